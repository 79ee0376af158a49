"""Translation of lines: order, blank lines, batches, limits, scores, and output files written whole or not at all."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import math
import os
import pickle
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax
from transformers import BertConfig

import reference
from conftest import TINY_CORPUS
from small_models import reference_sentence
from translators import CopyModel, varied_marian, varied_model
from vanilla_transformer import translation
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.translation import (
    Hypothesis,
    length_batches,
    load_translator,
    on_one_line,
    open_output,
    translate_lines,
)


SOURCES = [source[:length] for length, (source, _) in zip((26, 9, 14, 5, 19), TINY_CORPUS, strict=False)]


def first_texts(*arguments, **options) -> list[str]:
    return [hypotheses[0].text for hypotheses in translate_lines(*arguments, **options)]


def by_hand(model, tokenizer, line: str, **settings) -> str:
    """The oracle: one sentence alone through tokenizer, generate() and decode."""
    rows = model.generate(**tokenizer(line, return_tensors="pt"), **settings)
    return tokenizer.decode(rows[0], skip_special_tokens=True)


# --- Order and alignment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [varied_model, varied_marian])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"num_beams": 3, "length_penalty": 2.0}])
def test_each_line_is_translated_as_if_alone(tiny_tokenizer, make, settings):
    model = make(tiny_tokenizer)
    expected = [by_hand(model, tiny_tokenizer, line, **settings) for line in SOURCES]
    assert len(set(expected)) >= 4
    for options in ({}, {"window": 4, "tokens_per_batch": 120}, {"tokens_per_batch": 1}):
        assert first_texts(model, tiny_tokenizer, SOURCES, **options, **settings) == expected


def test_the_padding_side_of_the_tokenizer_changes_nothing(tiny_tokenizer):
    """A text-generation pipeline sets it to the left; encoders with positions of the usual kind need the right."""
    expected = first_texts(varied_marian(tiny_tokenizer), tiny_tokenizer, SOURCES, num_beams=1)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "left"
    assert first_texts(varied_marian(tiny_tokenizer), tokenizer, SOURCES, num_beams=1) == expected


def test_line_i_of_the_output_belongs_to_line_i_of_the_input(tiny_tokenizer):
    """Odd lines among a thousand: empty, control characters, unknown signs, line separators, one very long."""
    lines = [f"line {number} " + "x" * (number * 7919 % 60) for number in range(1000)]
    lines[3] = ""
    lines[17] = "a\x00b"
    lines[18] = "\ufffd\u2603\U0001f600"
    lines[500] = "one\u2028still one\x85\x0c\x1c end"
    lines[501] = "\u3000 \t"
    lines[999] = "y" * 5000
    long = train_tokenizer(["a b c"], 259, model_max_length=10**6)
    expected = list(lines)
    expected[501] = ""
    for tokenizer in (tiny_tokenizer, long):
        got = first_texts(CopyModel(tokenizer), tokenizer, iter(lines), window=300, tokens_per_batch=1000)
        assert got[:999] == expected[:999]
        assert len(got) == 1000
    assert got[999] == lines[999]


def test_lines_are_read_a_window_at_a_time_and_answered_before_the_next(tiny_tokenizer):
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield "a b c"

    translations = translate_lines(CopyModel(tiny_tokenizer), tiny_tokenizer, endless(), window=5)
    for _ in range(5):
        next(translations)
    assert len(read) == 5
    next(translations)
    assert len(read) == 10


def test_a_line_break_inside_a_translation_becomes_one_space(tiny_tokenizer):
    model = CopyModel(tiny_tokenizer, rewrite=lambda text: text.replace(" ", "\r\n") + "\n\n!\r")
    assert first_texts(model, tiny_tokenizer, ["a b"]) == ["a b ! "]
    assert on_one_line("a\u2028b\x85c\x0cd") == "a\u2028b\x85c\x0cd"


def test_names_of_control_tokens_in_a_line_are_translated_as_text(tiny_tokenizer):
    model = CopyModel(tiny_tokenizer)
    lines = ["use the </s> tag, <pad>, <s> and <unk> here", "</s>", "<pad><pad>", "plain"]
    assert first_texts(model, tiny_tokenizer, lines) == lines
    lengths = sorted(len(tiny_tokenizer(line)["input_ids"]) for line in lines)
    assert sorted(sum((mask.sum(dim=1).tolist() for mask in model.batches), [])) == lengths  # nothing is masked


# --- Blank lines ---------------------------------------------------------------------------------------------------


def test_blank_lines_never_reach_the_model(tiny_tokenizer):
    blanks = ["", " ", "\t", "\u00a0", "\u3000", "\n", "\x0b\x1c"]
    model = CopyModel(tiny_tokenizer)
    assert list(translate_lines(model, tiny_tokenizer, blanks)) == [[Hypothesis("")]] * len(blanks)
    assert model.batches == []
    visible = ["-", ".", "\u200b", "a"]  # str.strip() keeps U+200B
    mixed = [line for pair in zip(visible, blanks, strict=False) for line in pair]
    expected = [line for text in visible for line in (text, "")]
    assert first_texts(model, tiny_tokenizer, mixed) == expected
    assert sum(len(batch) for batch in model.batches) == len(visible)


# --- Batches -------------------------------------------------------------------------------------------------------


def test_batches_hold_lines_of_like_length_within_the_budget(tiny_tokenizer):
    lines = ["x " * (number * 37 % 50 + 1) for number in range(200)]
    model = CopyModel(tiny_tokenizer)
    list(translate_lines(model, tiny_tokenizer, lines, tokens_per_batch=600))
    assert sum(mask.shape[0] for mask in model.batches) == 200
    assert all(mask.numel() <= 600 for mask in model.batches)
    assert sum(mask.numel() for mask in model.batches) < 1.1 * sum(int(mask.sum()) for mask in model.batches)
    # As full as they can be: no two neighbours fit into one.
    for one, other in zip(model.batches, model.batches[1:], strict=False):
        assert (one.shape[0] + other.shape[0]) * one.shape[1] > 600


def test_beams_and_returned_sequences_count_as_rows(tiny_tokenizer):
    lines = ["a b c d e f"] * 24
    length = len(tiny_tokenizer(lines[0])["input_ids"])
    for settings, rows_per_line in (({"num_beams": 3}, 3), ({"num_return_sequences": 2, "do_sample": True}, 2)):
        model = CopyModel(tiny_tokenizer)
        results = list(translate_lines(model, tiny_tokenizer, lines, tokens_per_batch=12 * length, **settings))
        assert {len(hypotheses) for hypotheses in results} == {settings.get("num_return_sequences", 1)}
        assert {mask.shape[0] for mask in model.batches} == {12 // rows_per_line}


def test_a_line_above_the_budget_is_a_batch_of_its_own(tiny_tokenizer):
    model = CopyModel(tiny_tokenizer)
    assert first_texts(model, tiny_tokenizer, SOURCES, tokens_per_batch=1) == SOURCES
    assert all(mask.shape[0] == 1 for mask in model.batches)


def test_length_batches_bound_every_side():
    lengths = [(number % 7 + 1, number % 5 + 1) for number in range(60)]
    batches = list(length_batches(lengths, 20))
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        for side in (0, 1):
            assert len(batch) * max(lengths[index][side] for index in batch) <= 20
    assert list(length_batches([], 20)) == []


# --- Length limit --------------------------------------------------------------------------------------------------


def test_an_overlong_line_is_cut_with_the_end_kept_and_one_warning(caplog):
    tokenizer = train_tokenizer(["a b c"], 259, model_max_length=8)
    model = CopyModel(tokenizer)
    lines = ["1234567", "12345678", "", "123456789012"]
    with caplog.at_level(logging.WARNING):
        got = list(translate_lines(model, tokenizer, lines, name="text.en", first_line=11))
    assert [hypotheses[0].text for hypotheses in got] == ["1234567", "1234567", "", "1234567"]
    assert all(h[0].token_ids[-1] == tokenizer.eos_token_id for h in got if h[0].text)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "text.en, line 12" in warnings[0]
    assert "from 9 to 8 tokens" in warnings[0]
    assert "text.en, line 14" in warnings[1]
    assert "from 13 to 8 tokens" in warnings[1]


@pytest.mark.parametrize("make", ["learned", "marian", "sinusoidal"])
def test_a_line_beyond_the_models_positions_does_not_stop_its_neighbours(tiny_tokenizer, caplog, make):
    if make == "marian":  # of transformers, with a table of 64
        model, limit = varied_marian(tiny_tokenizer), 64
    else:
        model, limit = varied_model(tiny_tokenizer, position_embedding=make, max_position_embeddings=32), 32
    long = " ".join(["a"] * 199)
    lines = [SOURCES[0], long, SOURCES[1]]
    assert len(tiny_tokenizer(long)["input_ids"]) >= 200
    with caplog.at_level(logging.WARNING):
        got = first_texts(model, tiny_tokenizer, lines, name="text.en")
    cut = None if make == "sinusoidal" else limit
    ids = tiny_tokenizer(long, truncation=True, max_length=cut)["input_ids"]
    assert ids[-1] == tiny_tokenizer.eos_token_id
    expected = tiny_tokenizer.decode(model.generate(torch.tensor([ids]))[0], skip_special_tokens=True)
    assert got == [by_hand(model, tiny_tokenizer, lines[0]), expected, by_hand(model, tiny_tokenizer, lines[2])]
    warnings = [record.getMessage() for record in caplog.records if "cut from" in record.getMessage()]
    if cut is None:
        assert not warnings
    else:
        (message,) = warnings
        assert "text.en, line 2" in message
        assert f"from {len(tiny_tokenizer(long)['input_ids'])} to {limit} tokens" in message
        assert "max_position_embeddings" in message


# --- Mode of the model ---------------------------------------------------------------------------------------------


def test_the_model_runs_without_dropout_and_is_left_in_its_mode(tiny_tokenizer):
    model = varied_model(tiny_tokenizer, dropout=0.5)
    expected = first_texts(model, tiny_tokenizer, SOURCES)
    model.train()
    assert first_texts(model, tiny_tokenizer, SOURCES) == expected
    assert model.training


# --- Scores --------------------------------------------------------------------------------------------------------


def forced_log_probs(model, tokenizer, line: str, token_ids: list[int]) -> list[float]:
    """The oracle: log-probability of each token, read off one forward pass."""
    start = torch.tensor([[model.config.decoder_start_token_id, *token_ids[:-1]]])
    with torch.no_grad():
        logits = model(**tokenizer(line, return_tensors="pt"), decoder_input_ids=start).logits[0]
    return log_softmax(logits, -1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("num_beams, best", [(1, 1), (4, 1), (4, 3)])
def test_scores_are_those_of_a_forced_pass(tiny_tokenizer, num_beams, best):
    model = varied_model(tiny_tokenizer)
    results = list(
        translate_lines(model, tiny_tokenizer, SOURCES, scores=True, num_beams=num_beams, num_return_sequences=best)
    )
    lengths = set()
    for line, hypotheses in zip(SOURCES, results, strict=True):
        assert len(hypotheses) == best
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        assert len({tuple(h.token_ids) for h in hypotheses}) == best
        for hypothesis in hypotheses:
            forced = forced_log_probs(model, tiny_tokenizer, line, hypothesis.token_ids)
            assert hypothesis.token_log_probs == pytest.approx(forced, abs=1e-4)
            assert hypothesis.log_prob == pytest.approx(math.fsum(forced), abs=1e-3)
            penalty = ((5 + len(forced)) / 6) ** 0.6  # Wu et al. 2016, equation (14), alpha of Vaswani et al. 2017
            assert hypothesis.score == pytest.approx(math.fsum(forced) / penalty, abs=1e-3)
            assert hypothesis.text == tiny_tokenizer.decode(hypothesis.token_ids, skip_special_tokens=True)
            lengths.add(len(forced))
    assert len(lengths) > 2


def test_scores_change_neither_text_nor_tokens(tiny_tokenizer):
    for model in (varied_model(tiny_tokenizer), varied_marian(tiny_tokenizer)):
        plain = list(translate_lines(model, tiny_tokenizer, SOURCES))
        scored = list(translate_lines(model, tiny_tokenizer, SOURCES, scores=True))
        assert [(h.text, h.token_ids) for (h,) in plain] == [(h.text, h.token_ids) for (h,) in scored]
        assert all(h.score is None and h.token_log_probs is None for (h,) in plain)


def test_a_blank_line_has_log_probability_zero(tiny_tokenizer):
    ((hypothesis,),) = translate_lines(varied_model(tiny_tokenizer), tiny_tokenizer, [" "], scores=True)
    assert (hypothesis.text, hypothesis.score, hypothesis.log_prob, hypothesis.token_ids) == ("", 0.0, 0.0, [])


def test_without_beams_a_given_length_penalty_still_normalises(tiny_tokenizer):
    model = varied_model(tiny_tokenizer)
    (best,) = next(translate_lines(model, tiny_tokenizer, SOURCES, scores=True, num_beams=1, length_penalty=0.0))
    assert best.score == pytest.approx(best.log_prob)


def test_totals_are_those_of_the_reference_in_float64(tiny_tokenizer):
    model = varied_model(tiny_tokenizer)
    results = translate_lines(model, tiny_tokenizer, SOURCES, scores=True, num_beams=4, num_return_sequences=4)
    for line, hypotheses in zip(SOURCES, results, strict=True):
        sentence = reference_sentence(model, tiny_tokenizer(line)["input_ids"])
        for hypothesis in hypotheses:
            expected = sentence.log_prob(hypothesis.token_ids)
            assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
            assert hypothesis.score == pytest.approx(expected / ((5 + len(hypothesis.token_ids)) / 6) ** 0.6, abs=1e-4)


@pytest.mark.parametrize("kind, power", [("gnmt", 0.6), ("hub", 1.0)])
def test_the_best_translations_are_those_of_all_there_are(kind, power):
    """Every text of at most two tokens, end of sentence counted, over the whole vocabulary of a tokenizer."""
    tokenizer = train_tokenizer(["a b c"], 259)
    model = varied_model(tokenizer)
    penalty = reference.gnmt_penalty(power) if kind == "gnmt" else reference.power_penalty(power)
    lines = ["one"]
    settings = {"length_penalty": power, "length_penalty_type": kind, "max_new_tokens": 2, "scores": True}
    results = translate_lines(model, tokenizer, lines, num_beams=259, num_return_sequences=6, **settings)
    for line, hypotheses in zip(lines, results, strict=True):
        expected = reference_sentence(model, tokenizer(line)["input_ids"]).all_hypotheses(2, penalty)[:6]
        assert [tuple(each.token_ids) for each in hypotheses] == [ids for _, ids in expected]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-4)


# --- Wrong arguments -----------------------------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_is_refused_by_line_and_place(tiny_tokenizer):
    lines = ["fine", "", "two \udc80 halves"]
    with pytest.raises(ValueError, match=r"input, line 3: .* lone surrogate U\+DC80 at character 5"):
        list(translate_lines(CopyModel(tiny_tokenizer), tiny_tokenizer, lines))


@pytest.mark.parametrize(
    "lines, options, error, message",
    [
        ("a single string", {}, TypeError, "pass \\[text\\]"),
        (["a", None], {}, TypeError, "input, line 2"),
        (["a"], {"tokens_per_batch": 0}, ValueError, "tokens_per_batch must be .* at least 1, got 0"),
        (["a"], {"window": 0}, ValueError, "window must be .* at least 1, got 0"),
        (["a"], {"num_beams": 10**6}, ValueError, "num_beams must be at most the vocabulary's .* words, got 1000000"),
    ],
)
def test_wrong_arguments_are_named(tiny_tokenizer, lines, options, error, message):
    with pytest.raises(error, match=message):
        list(translate_lines(CopyModel(tiny_tokenizer), tiny_tokenizer, lines, **options))


# --- Loading -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("translator")
    varied_model(tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def test_a_saved_folder_translates_as_the_model_did(tiny_tokenizer, folder):
    model, tokenizer = load_translator(str(folder), device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    expected = first_texts(varied_model(tiny_tokenizer), tiny_tokenizer, SOURCES)
    assert first_texts(model, tokenizer, SOURCES) == expected
    assert load_translator(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_a_folder_opens_in_int8_and_translates_nearly_the_same(tiny_tokenizer, folder, monkeypatch):
    """What the exact model, forced, says of each translation is near what int8 said."""
    exact, _ = load_translator(str(folder), device="cpu")
    model, tokenizer = load_translator(str(folder), dtype="int8")
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    translations = translate_lines(model, tokenizer, SOURCES, scores=True)
    for source, (found, *_) in zip(SOURCES, translations, strict=True):
        if not source.strip():
            continue
        words = torch.tensor([found.token_ids])
        with torch.no_grad():
            logits = exact(**tokenizer(source, return_tensors="pt"), labels=words).logits
        forced = log_softmax(logits, dim=-1).gather(2, words[..., None]).sum().item()
        assert abs(found.log_prob - forced) < 0.2 + 0.1 * abs(forced)
    monkeypatch.setattr(translation, "_usable_device", lambda device: torch.device("cuda"))
    with pytest.raises(ValueError, match="int8 runs on a cpu, got device 'cuda'"):
        load_translator(str(folder), dtype="int8", device="cuda")


def test_another_familys_model_loads(tiny_tokenizer, tmp_path):
    varied_marian(tiny_tokenizer).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_translator(str(tmp_path))
    assert first_texts(model, tokenizer, SOURCES) == first_texts(
        varied_marian(tiny_tokenizer), tiny_tokenizer, SOURCES
    )


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("with_safetensors", [True, False])
@pytest.mark.parametrize("with_own_check", [True, False])
def test_nothing_is_ever_unpickled(folder, tmp_path, monkeypatch, with_safetensors, with_own_check):
    """Neither where our own look at the folder stops it, nor where only loading can (a repository of the Hub)."""
    if not with_own_check:
        monkeypatch.setattr(translation, "_require_model_folder", lambda folder: None)
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    marker = tmp_path / "marker"
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (path / name).write_bytes(pickle.dumps(Bomb(marker)))
    if with_safetensors:
        model, _ = load_translator(str(path))
        expected, _ = load_translator(str(folder))
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
    else:
        (path / "model.safetensors").unlink()
        message = r"no safetensors .* only pytorch_model.bin" if with_own_check else r"no file named model.safe"
        with pytest.raises((ValueError, OSError), match=message):
            load_translator(str(path))
    assert not marker.exists()


def test_what_a_folder_lacks_is_named(tiny_tokenizer, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json .* save_pretrained"):
        load_translator(str(tmp_path))
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(FileNotFoundError, match=r"did you mean .*checkpoint-20\?"):
        load_translator(str(tmp_path))

    lacking = tmp_path / "lacking"
    shutil.copytree(folder, lacking)
    weights = load_file(lacking / "model.safetensors")
    del weights["model.decoder.layers.0.cross_attention.q_proj.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .*layers.0.cross_attention.q_proj.weight"):
        load_translator(str(lacking))

    wordless = tmp_path / "wordless"
    shutil.copytree(folder, wordless)
    (wordless / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"a file of it is missing, such as tokenizer\.json"):
        load_translator(str(wordless))
    (wordless / "tokenizer_config.json").unlink()
    with pytest.raises(OSError, match=r"no tokenizer in the folder .*wordless .*tokenizer\.save_pretrained"):
        load_translator(str(wordless))

    bert = tmp_path / "bert"
    shutil.copytree(folder, bert)
    BertConfig().save_pretrained(bert)
    with pytest.raises(ValueError, match=r"type 'bert', which is no encoder-decoder"):
        load_translator(str(bert))

    with pytest.raises(ValueError, match="dtype must be"):
        load_translator(str(folder), dtype="int16")
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used"):
        load_translator(str(folder), device="nowhere")


# --- Output files --------------------------------------------------------------------------------------------------


def test_an_output_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("good")

    def fail_half_way():
        with open_output(str(path)) as file:
            file.write("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert path.read_text() == "good"
    with open_output(str(path)) as file:
        file.write("whole\n")
        assert path.read_text() == "good"
    assert path.read_bytes() == b"whole\n"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_an_output_keeps_permissions_and_symbolic_links(tmp_path):
    path, link = tmp_path / "out.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with open_output(str(link)) as file:
        file.write("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_output_named_gz_is_compressed(tmp_path):
    with open_output(str(tmp_path / "out.gz")) as file:
        file.write("größer\n")
    assert gzip.decompress((tmp_path / "out.gz").read_bytes()) == "größer\n".encode()


def test_an_output_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_output(str(tmp_path)).__enter__()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_output(str(tmp_path / "nowhere" / "out")).__enter__()
    with pytest.raises(NotADirectoryError):
        open_output(str(tmp_path / "file" / "out")).__enter__()
    with open_output(os.devnull) as file:  # no regular file: written as it comes
        file.write("x")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("vocab_size", 1000, "shapes"),
        ("decoder_layers", 5, "lacks"),
        ("decoder_layers", 1, "no place for"),
    ],
)
def test_a_configuration_of_another_model_is_refused_in_one_line_without_a_report(
    field, value, told, tmp_path, tiny_tokenizer, capfd
):
    model = varied_model(tiny_tokenizer)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, field: value}), encoding="utf-8")
    capfd.readouterr()
    with pytest.raises(ValueError, match=told):
        load_translator(str(tmp_path), device="cpu")
    told_beside = capfd.readouterr().err
    assert "LOAD REPORT" not in told_beside
    assert "[transformers]" not in told_beside


def test_a_tokenizer_of_another_model_is_refused_or_warned_of(tmp_path, tiny_tokenizer, caplog):
    model = varied_model(tiny_tokenizer)
    model.save_pretrained(tmp_path)
    larger = copy.deepcopy(tiny_tokenizer)
    larger.add_tokens(["one", "more", "word"])
    larger.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not the tokenizer"):
        load_translator(str(tmp_path), device="cpu")
    model.resize_token_embeddings(len(larger) + 400)
    model.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        load_translator(str(tmp_path), device="cpu")
    assert "is it the tokenizer of this model?" in caplog.text
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="the tokenizer in"):
        load_translator(str(tmp_path), device="cpu")


def test_weights_that_may_not_be_read_are_told_as_such(tiny_tokenizer, tmp_path, monkeypatch):
    """safetensors says of them that they are not there. The superuser, as whom tests may run, may read everything."""
    varied_model(tiny_tokenizer).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    weights = str(tmp_path / "model.safetensors")

    def not_there(*args, **options):
        raise FileNotFoundError(f"No such file or directory: {weights}")

    monkeypatch.setattr(translation.AutoModelForSeq2SeqLM, "from_pretrained", not_there)
    with pytest.raises(OSError, match="No such file"):
        translation.load_translator(str(tmp_path))
    monkeypatch.setattr(translation.os, "access", lambda path, mode: path != weights)
    with pytest.raises(PermissionError, match=f"cannot open the model {tmp_path}: no permission to read {weights}"):
        translation.load_translator(str(tmp_path))
