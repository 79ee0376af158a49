"""The page of all attentions: its numbers against the paper written as loops, hostile text, and a real browser."""

import base64
import hashlib
import html
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from browser import Page, find_chromium, running_browser
from small_models import hyper_of, numpy_weights, small_model
from vanilla_transformer import visualization
from vanilla_transformer.pruning import prune_heads
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.visualization import all_attentions_of, attention_page


SOURCE = "The ticket costs twelve euro."
TARGET = "Die Karte für fünf Züge, bitte."
ARABIC = "القطة الصغيرة تنام على الكرسي"
PERSIAN = "می\u200cخواهم به خانه بروم"
HEBREW = "הכלב הקטן רץ בגן"
HOSTILE = (
    '</script><script>window.hostile=1</script><img src=x onerror="window.hostile=2"> ]]> <!-- & \' \u2028 @DATA@'
)
TEXTS = [SOURCE, TARGET, ARABIC, PERSIAN, HEBREW, HOSTILE]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 4, vocab_size=700)


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocab_size=len(tokenizer))


def recorded(model, tokenizer, source: str, target: str) -> dict[str, list[np.ndarray]]:
    """The attention weights of every kind, layer and head by the reference."""
    source_ids, target_ids = (tokenizer(text).input_ids for text in (source, target))
    decoder_ids = [model.config.decoder_start_token_id, *target_ids[:-1]]
    record: list = []
    reference.logits(numpy_weights(model), hyper_of(model.config), [source_ids], [decoder_ids], record=record)
    return record[0]


def test_every_weight_of_the_page_is_that_of_the_paper_written_as_loops(model, tokenizer):
    found = all_attentions_of(model, tokenizer, SOURCE, TARGET)
    (sentence,) = Page(attention_page([found])).data["sentences"]
    expected = recorded(model, tokenizer, SOURCE, TARGET)
    assert set(sentence["attention"]) == {"encoder", "decoder", "cross"}
    sizes = {"source": len(found.source_tokens), "target": len(found.target_tokens)}
    assert sizes["source"] != sizes["target"]
    for kind, layers in sentence["attention"].items():
        assert len(layers) == (2 if kind == "encoder" else 3)
        for number, layer in enumerate(layers):
            assert layer["heads"] == [0, 1, 2, 3]
            weights = np.array(layer["weights"])
            np.testing.assert_allclose(weights, expected[kind][number], atol=1e-4)
            np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-4 * weights.shape[-1])
            rows, columns = found.tokens(kind)
            assert weights.shape == (4, len(rows), len(columns))
            np.testing.assert_allclose(found.of(kind, number), expected[kind][number].mean(axis=0), atol=1e-5)
    assert "".join(found.source_tokens[:-1]) == found.source_text == SOURCE
    assert "".join(found.target_tokens[:-1]) == found.target_text == TARGET
    assert found.read_tokens == ["<s>", *found.target_tokens[:-1]]
    assert sentence["tokens"]["source"] == [each.replace(" ", "␣") for each in found.source_tokens]


def test_without_a_target_the_page_shows_the_models_own_translation(model, tokenizer):
    found = all_attentions_of(model, tokenizer, SOURCE)
    sequence = model.generate(**tokenizer(SOURCE, return_tensors="pt"))[0]
    assert found.read_tokens == visualization.token_texts(tokenizer, sequence[:-1])
    assert found.target_text == tokenizer.decode(sequence, skip_special_tokens=True)


def test_heads_that_stay_after_pruning_keep_their_numbers(model, tokenizer):
    pruned = {"encoder": [[0], []], "cross": [[], [1, 2], []]}
    found = all_attentions_of(prune_heads(model, pruned), tokenizer, SOURCE, TARGET)
    assert found.heads["encoder"] == [[1, 2, 3], [0, 1, 2, 3]]
    assert found.heads["cross"][1] == [0, 3]
    full = all_attentions_of(model, tokenizer, SOURCE, TARGET)
    for head in (1, 2, 3):  # nothing was pruned below
        np.testing.assert_allclose(found.of("encoder", 0, head), full.of("encoder", 0, head), atol=1e-6)
    with pytest.raises(ValueError, match="layer 0 of encoder attention has the heads 1, 2, 3, got head 0"):
        found.of("encoder", -2, 0)


@pytest.mark.parametrize("text", TEXTS[2:])
def test_whatever_the_text_the_page_has_the_same_tags_and_the_text_as_data(model, tokenizer, text):
    def page_of(source, target, title):
        found = all_attentions_of(model, tokenizer, source, target)
        return attention_page([found, found], title=title), found

    plain, hostile = Page(page_of(SOURCE, TARGET, "a")[0]), Page(page_of(text, text, text)[0])
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    same_attributes, same_script = hostile.tags == plain.tags, hostile.scripts[1:] == plain.scripts[1:]
    assert same_attributes
    assert same_script  # pytest would take minutes over the difference
    for sentence in hostile.data["sentences"]:
        assert sentence["source"] == sentence["target"] == text
        shown = "".join(sentence["tokens"]["source"][:-1])
        for hidden in "\u2028\u200c":  # by themselves they cannot be seen
            shown = shown.replace(ascii(hidden)[1:-1], hidden)
        assert shown.replace("␣", " ") == text


def test_the_page_loads_nothing_and_allows_only_its_own_script_and_style(model, tokenizer):
    text = attention_page([all_attentions_of(model, tokenizer, SOURCE, TARGET)])
    page = Page(text)
    for tag, attributes in page.tags:
        assert attributes.get("href", "data:,") == "data:,", tag
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\b(fetch|import|XMLHttpRequest|innerHTML|eval)\b", page.scripts[1])
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-" + digest)
    assert "unsafe" not in policy


def test_what_a_page_cannot_show_is_named(model, tokenizer, monkeypatch):
    found = all_attentions_of(model, tokenizer, SOURCE, TARGET)
    assert Page(attention_page([found], kind="encoder", layer=-2, head=3)).data["start"] == {
        "kind": "encoder",
        "layer": 0,
        "head": 3,
    }
    with pytest.raises(ValueError, match="layer must lie between -3 and 2 for cross attention, got 3"):
        attention_page([found], layer=3)
    with pytest.raises(ValueError, match="kind must be one of encoder, decoder, cross, got 'self'"):
        attention_page([found], kind="self")
    with pytest.raises(ValueError, match="at least one sentence, got none"):
        attention_page([])
    monkeypatch.setattr(visualization, "MOST_WEIGHTS_OF_A_PAGE", 100)
    with pytest.raises(ValueError, match="weights, more than the 100 that a browser bears"):
        attention_page([found])


@pytest.mark.slow
def test_a_browser_shows_the_weights_of_the_head_and_the_token_that_are_picked(model, tokenizer, tmp_path):
    """By mouse and by keyboard, in a page with hostile text; its pictures stay in VANILLA_TRANSFORMER_PICTURES."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no chromium here")
    pictures = Path(os.environ.get("VANILLA_TRANSFORMER_PICTURES", tmp_path))
    torch.manual_seed(0)
    pairs = [(SOURCE, TARGET), (ARABIC, HEBREW), (HOSTILE, PERSIAN), (" ".join([SOURCE] * 4), "a" * 60)]
    found = [all_attentions_of(model, tokenizer, *pair) for pair in pairs]
    path = tmp_path / "page.html"
    path.write_text(attention_page(found, title=HOSTILE), encoding="utf-8")

    def shown(side: str) -> list[str]:
        return browser.ask(f"[...document.querySelectorAll('#{side} bdi')].map((each) => each.textContent)")

    def numbers(side: str) -> list[float]:
        texts = browser.ask(f"[...document.querySelectorAll('#{side} .number')].map((each) => each.textContent)")
        return [float(text) for text in texts]

    def choose_sentence(index: int) -> None:
        browser.ask(f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('change')); }})({SELECT})")

    SELECT = "document.getElementById('sentence')"
    with running_browser(chromium) as browser:
        browser.open(path)
        assert shown("rows") == [each.replace(" ", "␣") for each in found[0].target_tokens]
        browser.picture(pictures / "cross.png")
        # By mouse: the last layer and the mean of the heads are there at first.
        browser.point_at("#rows li", 4)
        assert numbers("columns") == pytest.approx(found[0].of("cross", -1)[4], abs=6e-4)
        browser.point_at("#kind label", 1, click=True)
        browser.point_at("#layer label", 1, click=True)
        browser.point_at("#head label", 3, click=True)  # "mean" stands first
        browser.point_at("#rows li", 6)
        assert numbers("columns") == pytest.approx(found[0].of("decoder", 1, 2)[6], abs=6e-4)
        assert shown("columns") == [each.replace(" ", "␣") for each in found[0].read_tokens]
        browser.point_at("#columns li", 2)
        assert numbers("rows") == pytest.approx(found[0].of("decoder", 1, 2)[:, 2], abs=6e-4)
        browser.picture(pictures / "decoder.png")
        # The small picture of another head is a button.
        browser.point_at("#thumbs tr:nth-child(4) button", 0, click=True)
        assert browser.ask("document.getElementById('map-title').textContent") == "decoder, layer 2, head 0"
        # By keyboard: k to cross, back to layer 1, h on to head 1; arrows from token to token.
        for key, shift in (("k", False), ("l", True), ("h", False)):
            browser.press(key, shift)
        assert browser.ask("document.getElementById('map-title').textContent") == (
            "cross (decoder to encoder), layer 1, head 1"
        )
        browser.ask("document.querySelector('#rows li').focus()")
        browser.press("ArrowDown")
        browser.press("ArrowDown")
        assert numbers("columns") == pytest.approx(found[0].of("cross", 1, 1)[2], abs=6e-4)
        told = browser.ask("document.getElementById('readout').textContent")
        best = int(found[0].of("cross", 1, 1)[2].argmax())
        assert f"{found[0].of('cross', 1, 1)[2, best]:.4f}" in told
        # Text from right to left, and text that would be a script elsewhere.
        choose_sentence(1)
        assert shown("columns") == [each.replace(" ", "␣") for each in found[1].source_tokens]
        browser.point_at("#rows li", 2)
        directions = browser.ask(
            "['source-text', 'target-text'].map((id) => getComputedStyle(document.getElementById(id)).direction)"
        )
        assert directions == ["rtl", "rtl"]
        assert browser.ask("getComputedStyle(document.querySelector('#columns bdi')).direction") == "rtl"
        browser.picture(pictures / "right_to_left.png")
        choose_sentence(2)
        browser.point_at("#rows li", 3)
        browser.picture(pictures / "hostile.png")
        assert browser.ask("[typeof window.hostile, document.images.length, document.scripts.length]") == (
            ["undefined", 0, 2]
        )
        assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
        choose_sentence(3)
        browser.press("k", True)
        browser.press("k", True)
        browser.point_at("#rows li", 20)
        browser.picture(pictures / "long.png")
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        assert browser.complaints() == []
        # On a narrow dark screen.
        browser.open(path, width=480, dark=True)
        browser.point_at("#rows li", 1, click=True)
        assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        browser.picture(pictures / "dark.png")
        assert browser.complaints() == []


@pytest.mark.slow
def test_lines_have_their_places_in_a_frame_that_is_shown_late(model, tokenizer, tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no chromium here")
    page = html.escape(attention_page([all_attentions_of(model, tokenizer, SOURCE, TARGET)]))
    path = tmp_path / "frames.html"
    path.write_text(
        "".join(f'<iframe style="{style}" srcdoc="{page}"></iframe>' for style in ("display:none", "width:0;border:0"))
    )
    line = (
        "[...frames[{}].document.querySelectorAll('#lines line')]"
        ".map((line) => ['x2', 'y2'].map((name) => Number(line.getAttribute(name))))"
    )
    with running_browser(chromium) as browser:
        browser.open(path)
        assert {tuple(end) for end in browser.ask(line.format(0))} == {(0, 0)}, "the frame has no size"
        browser.ask("document.querySelectorAll('iframe').forEach((f) => { f.style = 'width:1000px;height:800px'; })")
        for frame in (0, 1):
            end = time.monotonic() + 20
            while True:
                ends = browser.ask(line.format(frame))
                if (ends and min(x for x, _ in ends) > 50) or time.monotonic() > end:
                    break
                time.sleep(0.1)
            assert ends
            assert min(x for x, _ in ends) > 50
            middles = browser.ask(
                f"((d) => {{ const top = d.getElementById('lines').getBoundingClientRect().top;"
                "return [...d.querySelectorAll('#columns li')].map((li) => { const box = li.getBoundingClientRect();"
                f"return box.top + box.height / 2 - top; }}); }})(frames[{frame}].document)"
            )
            assert {y for _, y in ends} <= set(middles)
            assert len({y for _, y in ends}) > 3


@pytest.mark.slow
def test_a_held_token_and_the_focus_stay_while_layer_head_and_kind_change(model, tokenizer, tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no chromium here")
    found = all_attentions_of(model, tokenizer, SOURCE, TARGET)
    path = tmp_path / "page.html"
    path.write_text(attention_page([found], layer=0, head=0), encoding="utf-8")

    def numbers(side: str) -> list[float]:
        texts = browser.ask(f"[...document.querySelectorAll('#{side} .number')].map((each) => each.textContent)")
        return [float(text) for text in texts if text]

    def chosen() -> list:
        return browser.ask(
            "[...document.querySelectorAll('li.chosen')].map((li) => [li.parentElement.id,"
            "[...li.parentElement.children].indexOf(li), li === document.activeElement])"
        )

    def held() -> bool:
        return "(held)" in browser.ask("document.getElementById('readout').textContent")

    with running_browser(chromium) as browser:
        browser.open(path)
        # Arrows work before anything has the focus, and after the keys that draw all anew.
        browser.press("ArrowDown")
        assert chosen() == [["rows", 0, True]]
        browser.press("ArrowDown")
        browser.press("h")
        assert numbers("columns") == pytest.approx(found.of("cross", 0, 1)[1], abs=6e-4)
        browser.press("ArrowDown")
        assert chosen() == [["rows", 2, True]]
        browser.press("ArrowRight")
        assert chosen() == [["columns", 2, True]]
        browser.press("Enter")
        assert held()
        # The source token stands in the columns of cross and of the encoder, but not in the decoder's.
        browser.press("l")
        assert numbers("rows") == pytest.approx(found.of("cross", 1, 1)[:, 2], abs=6e-4)
        browser.press("k")
        assert held()
        assert numbers("rows") == pytest.approx(found.of("encoder", 1, 1)[:, 2], abs=6e-4)
        browser.press("Escape")
        # A target token stands in the rows of the decoder and of cross; changed by mouse.
        browser.point_at("#kind label", 1, click=True)
        browser.point_at("#rows li", 4, click=True)
        browser.point_at("#head label", 4, click=True)
        browser.point_at("#kind label", 2, click=True)
        assert held()
        assert numbers("columns") == pytest.approx(found.of("cross", 1, 3)[4], abs=6e-4)
        browser.press("ArrowUp")  # on from the held one, although a button has the focus
        assert chosen() == [["rows", 3, True]]
        browser.press("ArrowUp")
        browser.press("Enter")
        browser.point_at("#kind label", 0, click=True)
        assert chosen() == []
        assert not held()
        assert browser.complaints() == []
