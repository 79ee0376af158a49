"""The page's work without a browser: lines in order, errors in words, hostile text as text, one thread a model."""

from __future__ import annotations

import html
import html.parser
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

import vanilla_transformer_cli
from translators import CopyModel, varied_model
from vanilla_transformer import serving
from vanilla_transformer.serving import (
    MOST_LINES,
    ServedModel,
    attention_html,
    lines_of,
    open_page,
    open_served_model,
    translate_file,
    translate_text,
    translation_page,
)
from vanilla_transformer.translation import translate_lines


HOSTILE = "<img src=x onerror=alert(1)> </script> ${alert(1)} {{1}} `b` \u202e\u05e9\u05dc\u05d5\u05dd"


@pytest.fixture(scope="module")
def served(tiny_tokenizer) -> ServedModel:
    return ServedModel("varied", varied_model(tiny_tokenizer), tiny_tokenizer)


def copying(tokenizer, rewrite=None) -> ServedModel:
    return ServedModel("copies", CopyModel(tokenizer, rewrite), tokenizer)


def test_line_i_of_the_text_belongs_to_line_i_and_blank_ones_stay(served):
    text = "The red train.\r\n\n  \nShe reads a book.\n"
    results = translate_text(served, text, 4, 2)
    lines = ["The red train.", "", "  ", "She reads a book."]
    alone = [
        next(translate_lines(served.model, served.tokenizer, [line], num_beams=4, num_return_sequences=2, scores=True))
        for line in lines
    ]
    assert [[each.hypothesis.text for each in ranked] for ranked in results] == [
        [each.text for each in alone[0]], [], [], [each.text for each in alone[3]]
    ]  # fmt: skip
    first, second = results[3]
    assert (first.line, first.rank, second.rank, first.source) == (4, 1, 2, lines[3])
    line, rank, score, log_prob, tokens, shown = second.row()
    assert (line, rank, tokens, shown) == (4, 2, len(alone[3][1].token_ids), alone[3][1].text)
    assert (score, log_prob) == pytest.approx((alone[3][1].score, alone[3][1].log_prob), abs=1e-3)
    assert first.row()[2] >= score


def test_a_line_ends_at_its_line_feed_alone():
    assert lines_of("a\u2028b\x85c\rd\r\n\ne") == ["a\u2028b\x85c\rd", "", "e"]
    assert lines_of("a\n") == ["a"]


@pytest.mark.parametrize(
    "text, beams, n_best, message",
    [
        (" \n\t", 4, 1, "nothing to translate"),
        ("a\n" * (MOST_LINES + 1), 4, 1, f"{MOST_LINES + 1:,} lines"),
        ("a" * 20_001, 4, 1, "The text has 1 line and 20,001 characters"),
        ("a\n" + "z!" * 600, 4, 1, "Line 2 has 1,201 tokens, more than the 1,024"),
        ("a", 2, 3, "3 translations of a line need as many beams, but there are 2"),
        ("a", 17, 1, "from 1 to 16 beams here, got 17"),
        ("a\nb\ud800", 4, 1, "the text, line 2: expected text, got the lone surrogate U+D800"),
    ],
)
def test_text_that_cannot_be_translated_is_refused_in_words(served, text, beams, n_best, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        translate_text(served, text, beams, n_best)


@pytest.mark.parametrize("typed", [2.5, "4", None, True, [3]])
def test_a_number_that_is_not_whole_is_refused_and_not_cut(typed):
    with pytest.raises(ValueError, match=re.escape(f"The beams must be a whole number, got {typed!r}")):
        serving.whole(typed, "beams")
    assert serving.whole(4.0, "beams") == 4


def test_line_i_of_a_file_belongs_to_line_i_and_what_was_cut_is_told(tiny_tokenizer, tmp_path):
    lines = [f"line {number} of it" if number % 3 else "" for number in range(150)]
    lines[100] = "word " * 1100
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode())
    steps = translate_file(copying(tiny_tokenizer, str.upper), str(tmp_path / "in.txt"), str(tmp_path / "out.txt"), 1)
    told = [(done, total, list(cut)) for done, total, cut in steps]
    assert told[0] == (0, 150, [])
    assert told[-1] == (150, 150, [101])
    assert [done for done, _, _ in told] == sorted({done for done, _, _ in told})
    found = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert found.pop() == ""
    assert found[:100] + found[101:] == [line.upper() for line in lines[:100] + lines[101:]]
    assert lines[100].upper().startswith(found[100])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("bad.txt", b"good\nbad \xff\n", "bad.txt, line 2: expected UTF-8 text, got the byte 0xff"),
        ("empty.txt", b"", "empty.txt has nothing to translate"),
        ("blank.txt", b"\n \n", "blank.txt has nothing to translate"),
        ("text.txt.GZ", b"\x1f\x8b", "text.txt.GZ is compressed"),
    ],
)
def test_a_file_that_cannot_be_translated_is_named_without_its_folder(served, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        list(translate_file(served, str(tmp_path / name), str(tmp_path / "out"), 1))


class Tags(html.parser.HTMLParser):
    """The tags of a piece of HTML, as a browser would read them."""

    def __init__(self, content: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_attention_of_hostile_text_is_one_frame_that_reaches_nothing(served):
    shown = attention_html(served, HOSTILE, HOSTILE)
    ((tag, attributes),) = Tags(shown).found
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts"
    assert not set(attributes) - {"title", "loading", "sandbox", "style", "srcdoc"}
    assert not set("$`{}\\") & set(shown), "the page's templates would read them"
    inside = Tags(attributes["srcdoc"]).found
    assert {"html", "canvas"} <= set(dict(inside))
    for tag, attributes in inside:
        assert "onerror" not in attributes
        assert attributes.get("src") != "x", tag


def test_a_model_is_run_by_one_thread_at_a_time_and_a_long_file_lets_others_in_between(tiny_tokenizer, tmp_path):
    served = copying(tiny_tokenizer)
    running, most, finished = 0, 0, {}
    generate = served.model.generate

    def watched(**arguments):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return generate(**arguments)

    served.model.generate = watched
    sizes = {"long": 1500, "short": 3}
    for name, lines in sizes.items():
        (tmp_path / name).write_text("".join(f"{name} {number}\n" for number in range(lines)))

    def work(name: str) -> None:
        for _ in translate_file(served, str(tmp_path / name), str(tmp_path / f"{name}.out"), 1):
            pass
        finished[name] = time.monotonic()

    threads = [threading.Thread(target=work, args=(name,)) for name in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert finished["short"] < finished["long"]
    for name in sizes:
        assert (tmp_path / f"{name}.out").read_text() == (tmp_path / name).read_text()


def test_a_folder_is_called_by_its_name_and_its_record_tells_languages_and_examples(served, tmp_path):
    folder = tmp_path / "en-de"
    served.model.save_pretrained(folder)
    served.tokenizer.save_pretrained(folder)
    opened = open_served_model(f"{folder}/")
    assert (opened.name, opened.languages, list(opened.examples)) == ("en-de", "", [])
    (folder / "training_run.json").write_text(json.dumps({"source_lang": "de", "target_lang": "en"}))
    opened = open_served_model(str(folder))
    assert (opened.languages, opened.num_beams, opened.limit) == ("de to en", 4, 1024)
    assert "Zwei Hunde spielen im Schnee." in opened.examples


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_that_is_none_is_refused_in_one_line(capsys, port, tmp_path):
    with pytest.raises(SystemExit) as exit:
        vanilla_transformer_cli.main(["serve", "--model", str(tmp_path), f"--port={port}"])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "expected a port from 1 to 65535" in error
    assert error.count("\n") == 1


def test_without_gradio_the_extra_is_named_in_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert vanilla_transformer_cli.main(["serve", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert 'pip install "vanilla-transformer[serve]"' in error
    assert error.count("\n") == 1


def test_a_page_needs_models_of_different_names(served, monkeypatch):
    monkeypatch.setattr(serving, "import_gradio", lambda: None)
    with pytest.raises(ValueError, match="at least one model"):
        translation_page([])
    with pytest.raises(ValueError, match="varied, varied"):
        translation_page([served, served])


def test_a_port_in_use_is_told(monkeypatch):
    monkeypatch.setattr(serving, "import_gradio", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {port}: "):
            open_page(None, port=port)


def test_the_page_reports_to_nobody_and_shows_errors_as_text(served):
    gradio = pytest.importorskip("gradio")
    page = translation_page([served])
    assert page.analytics_enabled is False
    config = json.dumps(page.get_config_file(), default=str)
    assert not re.search(r'"analytics_enabled": true', config)
    with pytest.raises(gradio.Error) as told, serving.told_on_the_page(gradio):
        raise ValueError(HOSTILE)
    assert "<" not in told.value.message
    assert html.unescape(told.value.message) == HOSTILE
    with pytest.raises(gradio.Error, match="its log tells more"), serving.told_on_the_page(gradio):
        raise KeyError(str(Path(__file__)))
