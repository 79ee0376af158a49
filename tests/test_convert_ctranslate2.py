"""CTranslate2: the same numbers, the same translations, the same command, and what it cannot do is refused."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline

from conftest import TINY_CORPUS
from engines import DEPARTURES, EOS, GREEDY, SAME, lively_model, one_by_one, sources, twenty_words, without_padding
from small_models import padded, reference_logits, small_model, words
from translators import varied_marian, varied_model
from vanilla_transformer.translation import load_translator, translate_lines
from vanilla_transformer_cli import main


SRC = Path(__file__).parents[1] / "src"
SOURCES = [source[: 26 - 3 * number] for number, (source, _) in enumerate(TINY_CORPUS[:6])]


@pytest.fixture
def ct():
    """The module under test; CTranslate2 is an extra."""
    pytest.importorskip("ctranslate2", reason='CTranslate2 is an extra: pip install ".[export]"')
    return importlib.import_module("vanilla_transformer.convert.ctranslate2")


@pytest.fixture(scope="module")
def word_tokenizer():
    """For models of twenty-three words."""
    return twenty_words()


def opened(ct, model, tokenizer, folder, compute_type: str = "float32", **options):
    """The model after the way through a folder of CTranslate2."""
    ct.to_ctranslate2(model, tokenizer, folder, **options)
    translator, _ = ct.load_ctranslate2(str(folder), compute_type=compute_type, device="cpu")
    return translator


# --- The same numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("departure", DEPARTURES)
def test_log_probabilities_are_those_of_the_paper_written_as_loops(ct, word_tokenizer, tmp_path, departure):
    model = small_model(**DEPARTURES[departure])
    translator = opened(ct, model, word_tokenizer, tmp_path)
    rows = [[*words(length, vocab_size=20, seed=length).tolist(), EOS] for length in (7, 3, 5)]
    targets = [words(length, seed=length).tolist() for length in (5, 9, 1)]  # words without a token among them
    start = model.config.decoder_start_token_id
    for row, target, got in zip(rows, targets, translator.log_probs(rows, targets), strict=True):
        logits = reference_logits(
            model, torch.tensor([row]), torch.tensor([[start, *target[:-1]]]), attention_mask=torch.ones(1, len(row))
        )
        expected = torch.log_softmax(logits[0], dim=-1)[torch.arange(len(target)), target]
        assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("quantization", ["float32", "bfloat16", "float16", "int16", "int8"])
def test_each_precision_is_stored_opened_and_near(ct, word_tokenizer, tmp_path, quantization):
    model = lively_model(d_model=64, d_ff=128)
    rows, targets = sources(), [words(6, seed=place).tolist() for place in range(10)]
    exact = opened(ct, model, word_tokenizer, tmp_path / "exact", max_positions=20)
    ct.to_ctranslate2(model, word_tokenizer, tmp_path / "small", quantization, max_positions=20)
    small, _ = ct.load_ctranslate2(str(tmp_path / "small"), device="cpu")
    differences = torch.tensor(exact.log_probs(rows, targets)) - torch.tensor(small.log_probs(rows, targets))
    error = float(differences.square().mean().sqrt())
    # Where the processor has no such arithmetic, another one takes its place: int8 for int16, and for int8 a product
    # that saturates. The log-probabilities of these targets have a standard deviation of 2.4.
    worst = {"float32": 0.0, "bfloat16": 0.1, "float16": 0.02, "int16": 0.1, "int8": 1.2}
    stand_in = "int8" if small.translator.compute_type.startswith("int8") else quantization
    assert error <= worst[stand_in]
    assert (error == 0.0) == (quantization == "float32")
    size = (tmp_path / "small" / "model.bin").stat().st_size / (tmp_path / "exact" / "model.bin").stat().st_size
    assert size < {"float32": 1.01, "bfloat16": 0.52, "float16": 0.52, "int16": 0.6, "int8": 0.4}[quantization]


@pytest.mark.parametrize("quantization", ["float32", "bfloat16", "float16", "int16", "int8"])
def test_the_converted_model_itself_stays_as_it_is(ct, word_tokenizer, tmp_path, quantization):
    model = lively_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ct.to_ctranslate2(model, word_tokenizer, tmp_path, quantization, max_positions=20)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_in_bfloat16_keeps_its_weights(ct, word_tokenizer, tmp_path):
    model = lively_model().to(torch.bfloat16)
    translator = opened(ct, model, word_tokenizer, tmp_path)
    target = words(6).tolist()
    logits = reference_logits(model, torch.tensor([[4, 5, EOS]]), torch.tensor([[0, *target[:-1]]]))
    expected = torch.log_softmax(logits[0], dim=-1)[torch.arange(6), target]
    got = torch.tensor(translator.log_probs([[4, 5, EOS]], [target])[0], dtype=torch.float64)
    assert torch.allclose(got, expected, atol=0.1)  # the table of positions is rounded too
    ct.to_ctranslate2(model.float(), word_tokenizer, tmp_path / "float")
    assert (tmp_path / "model.bin").stat().st_size < 0.55 * (tmp_path / "float" / "model.bin").stat().st_size


def test_tied_matrices_are_stored_once(ct, word_tokenizer, tmp_path):
    for name, tied in (("tied", True), ("untied", False)):
        model = small_model(vocab_size=500, tie_word_embeddings=tied)
        ct.to_ctranslate2(model, word_tokenizer, tmp_path / name, max_positions=10)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("tied", "untied")]
    assert sizes[1] - sizes[0] == pytest.approx(2 * 500 * 16 * 4, rel=0.01)


# --- The same translations -----------------------------------------------------------------------------------------

SAME = {
    **SAME,
    "min_new_tokens": {**GREEDY, "min_new_tokens": 5},
    "min_length": {**GREEDY, "min_length": 5},
    "no_repeat_ngram_size": {**GREEDY, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("name", SAME)
def test_translations_are_those_of_torch(ct, word_tokenizer, tmp_path, name):
    settings, lengths, different = SAME[name], set(), set()
    for seed in range(3):
        model = lively_model(seed)
        translator = opened(ct, model, word_tokenizer, tmp_path / str(seed))
        ids, mask = padded(sources(seed), side="left" if seed else "right")
        expected = one_by_one(model, sources(seed), **settings)
        got = without_padding(translator.generate(ids, attention_mask=mask, **settings))
        if "another end" in name:  # what torch puts behind that end is padding
            got, expected = ([row[: (row + [6]).index(6) + 1] for row in rows] for rows in (got, expected))
        assert got == expected
        lengths |= {len(row) for row in got}
        different |= {tuple(row) for row in got}
    assert len(lengths) >= (2 if "min_" in name or "max_" in name else 4)
    assert len(different) >= 10


@pytest.mark.parametrize(
    "settings, least", [({}, 0.95), ({"length_penalty": 1.0, "length_penalty_type": "hub"}, 0.77)]
)
def test_the_papers_stop_rule_is_nearly_always_met(ct, word_tokenizer, tmp_path, settings, least):
    """It ends when nothing can win any more, CTranslate2 when enough is complete: mostly with the same result."""
    same, total = 0, 0
    for seed in range(6):
        model = lively_model(seed)
        translator = opened(ct, model, word_tokenizer, tmp_path / str(seed))
        expected = one_by_one(model, sources(seed), **settings)
        got = without_padding(
            translator.generate(padded(sources(seed))[0], **settings)
        )  # and the mask that padding implies
        same += sum(one == other for one, other in zip(got, expected, strict=True))
        total += len(got)
    assert same >= least * total


def test_scores_are_those_of_torch(ct, word_tokenizer, tmp_path):
    model = lively_model(1)
    translator = opened(ct, model, word_tokenizer, tmp_path)
    ids, mask = padded(sources(1))
    for settings in (SAME["length ** 2, three best"], SAME["the paper's penalty"], SAME["greedy"]):
        options = {"return_dict_in_generate": True, "output_scores": True, "attention_mask": mask, **settings}
        got, expected = translator.generate(ids, **options), model.generate(ids, **options)
        steps = [
            each.compute_transition_scores(
                outputs.sequences,
                outputs.scores,
                getattr(outputs, "beam_indices", None),
                normalize_logits=settings.get("num_beams") == 1,
            )
            for each, outputs in ((translator, got), (model, expected))
        ]
        kept = torch.tensor([len(row) - 1 for row in without_padding(got.sequences)])
        inside = torch.arange(steps[0].shape[1]) < kept[:, None]
        width = steps[0].shape[1]
        assert torch.allclose(steps[0][inside], steps[1][:, :width][inside], atol=1e-4)
        if "num_beams" not in settings:
            assert torch.allclose(got.sequences_scores, expected.sequences_scores, atol=1e-4)
            assert (got.beam_indices >= 0).sum(dim=1).tolist() == kept.tolist()


def test_a_row_does_not_depend_on_its_neighbours(ct, word_tokenizer, tmp_path):
    model = lively_model(2)
    translator = opened(ct, model, word_tokenizer, tmp_path)
    together = without_padding(translator.generate(padded(sources(2))[0]))
    alone = [ids for row in sources(2) for ids in without_padding(translator.generate(torch.tensor([row])))]
    assert together == alone


# --- Lengths -------------------------------------------------------------------------------------------------------


def test_a_source_of_more_tokens_than_ctranslate2_keeps_by_itself_is_whole(ct, word_tokenizer, tmp_path):
    """Its own limit is 1,024 tokens, cut without a word."""
    model = lively_model(1)
    translator = opened(ct, model, word_tokenizer, tmp_path)
    row, other = [[4] * 1024 + [last] * 276 + [EOS] for last in (4, 9)]
    settings = {"num_beams": 1, "max_new_tokens": 12, "min_new_tokens": 12, "early_stopping": False}
    expected = one_by_one(model, [row, other], **settings, length_penalty=1.0)
    got = without_padding(translator.generate(torch.tensor([row, other]), **settings))
    assert got == expected
    assert got[0] != got[1]
    target = words(1200, vocab_size=20).tolist()
    logits = model(torch.tensor([row[:3]]), decoder_input_ids=torch.tensor([[0, *target[:-1]]])).logits[0].double()
    expected_log_probs = torch.log_softmax(logits, dim=-1)[torch.arange(1200), target].detach()
    got_log_probs = torch.tensor(translator.log_probs([row[:3]], [target])[0], dtype=torch.float64)
    assert torch.allclose(got_log_probs, expected_log_probs, atol=1e-3)


def test_the_table_of_positions_is_as_long_as_asked_and_its_end_is_told(ct, word_tokenizer, tmp_path):
    model = lively_model()
    translator = opened(ct, model, word_tokenizer, tmp_path, max_positions=10)
    ten = torch.tensor([[*words(9, vocab_size=20).tolist(), EOS]])
    for settings in ({}, {"max_new_tokens": 10}):
        assert 1 < translator.generate(ten, **settings).shape[1] <= 11
    with pytest.raises(ValueError, match="source may have 11 tokens, but the converted model has positions for 10"):
        translator.generate(torch.cat([ten, ten[:, -1:]], dim=1))
    with pytest.raises(ValueError, match="translation may have 12 tokens.*greater max_positions"):
        translator.generate(ten, max_new_tokens=12)
    with pytest.raises(ValueError, match="max_positions must be at least 1, got 0"):
        ct.to_ctranslate2(model, word_tokenizer, tmp_path / "none", max_positions=0)


@pytest.mark.parametrize(
    "settings, limit, expected",
    [({}, 64, 2048), ({}, 3000, 3004), ({"max_position_embeddings": 33, "position_embedding": "learned"}, 64, 33)],
)
def test_positions_suffice_for_what_the_tokenizer_lets_through(
    ct, word_tokenizer, tmp_path, settings, limit, expected
):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=limit
    )
    ct.to_ctranslate2(lively_model(**settings), tokenizer, tmp_path)
    assert ct.load_ctranslate2(str(tmp_path))[0].max_positions == expected


def test_learned_positions_shorten_the_limit_of_the_source_as_in_torch(ct, word_tokenizer, tmp_path):
    model = lively_model(end=-50.0, position_embedding="learned", max_position_embeddings=9)
    translator = opened(ct, model, word_tokenizer, tmp_path)
    rows = [[*words(length, vocab_size=20).tolist(), EOS] for length in (2, 8)]
    got = without_padding(translator.generate(padded(rows)[0], early_stopping=True))
    assert [len(row) - 1 for row in got] == [7, 9]
    assert got == one_by_one(model, rows, early_stopping=True)


# --- Lines, pipeline, command --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> str:
    """A saved model of ours with its tokenizer."""
    model = varied_model(tiny_tokenizer)
    model.save_pretrained(tmp_path / "ours")
    tiny_tokenizer.save_pretrained(tmp_path / "ours")
    return str(tmp_path / "ours")


def lines_of(translator, tokenizer, **settings):
    lines = ["", *SOURCES[:3], " \t", *SOURCES[3:]]
    return list(translate_lines(translator, tokenizer, lines, **settings))


@pytest.mark.parametrize("settings", [{"early_stopping": True}, {"num_beams": 1}, {"num_return_sequences": 3}])
def test_lines_are_translated_as_by_torch(ct, folder, settings):
    """Order, blank lines, scores and n-best, by the same code around both engines."""
    settings = {"early_stopping": True, "scores": True, "tokens_per_batch": 120, **settings}
    expected = lines_of(*load_translator(folder, device="cpu"), **settings)
    got = lines_of(*ct.load_ctranslate2(folder, device="cpu"), **settings)
    assert [[each.text for each in line] for line in got] == [[each.text for each in line] for line in expected]
    assert len({each.text for line in got for each in line}) >= 5
    for one, other in zip(sum(got, []), sum(expected, []), strict=True):
        assert one.token_ids == other.token_ids
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-4)


def test_an_overlong_line_is_cut_with_the_same_warning(ct, folder, caplog):
    translator, tokenizer = ct.load_ctranslate2(folder)
    tokenizer.model_max_length = 8
    list(translate_lines(translator, tokenizer, ["short", SOURCES[0] * 3], name="text.en"))
    assert [record.getMessage()[:19] for record in caplog.records] == ["text.en, line 2: cu"]


def test_the_pipeline_takes_the_translator(ct, folder):
    translator, tokenizer = ct.load_ctranslate2(folder)
    translate = pipeline("translation", model=translator, tokenizer=tokenizer)
    with_torch = pipeline("translation", model=folder, device="cpu")
    texts = [SOURCES[0], " ", *SOURCES[1:]]
    for settings in ({}, {"batch_size": 4}, {"num_return_sequences": 2, "num_beams": 3}):
        options = {"early_stopping": True, **settings}
        assert translate(texts, **options) == with_torch(texts, **options)
    assert "CTranslate2Translator" in repr(translate)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    written = capsys.readouterr()
    return code, written.out, written.err


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.en"
    path.write_text("\n".join([SOURCES[0], "", *SOURCES[1:]]) + "\n", encoding="utf-8")
    return str(path)


def test_the_command_translates_with_either_kind_of_folder(ct, folder, text, tmp_path, capsys):
    ct.to_ctranslate2(*load_translator(folder, device="cpu"), tmp_path / "theirs")
    for options in (["--num_beams", "1"], ["--length_penalty", "0", "--scores", "--n_best", "2"]):
        arguments = ["translate", "--input", text, *options]
        code, expected, _ = run(capsys, *arguments, "--model", folder)
        assert code == 0
        for model in (folder, str(tmp_path / "theirs")):
            code, got, _ = run(capsys, *arguments, "--model", model, "--backend", "ctranslate2")
            assert code == 0
            if "--scores" not in options:
                assert got == expected
                continue
            # The second best depends on the stop rule; the best does not without a length penalty.
            got_rows, rows = ([line.split("\t") for line in output.splitlines()] for output in (got, expected))
            assert len(got_rows) == len(rows) == 14
            for mine, other in zip(got_rows[::2], rows[::2], strict=True):
                assert (mine[0], mine[3:]) == (other[0], other[3:])
                assert [float(number) for number in mine[1:3]] == pytest.approx(
                    [float(number) for number in other[1:3]], abs=1e-4
                )


def test_the_command_computes_in_the_precision_that_it_is_told(ct, folder, text, capsys):
    arguments = ["translate", "--model", folder, "--input", text, "--backend", "ctranslate2", "--scores"]
    outputs = [run(capsys, *arguments, *more)[1] for more in ([], ["--compute_type", "int8"])]
    assert outputs[0] != outputs[1]
    assert [line.split("\t")[0] for line in outputs[1].splitlines()] == [str(number) for number in range(1, 8)]


def test_the_command_says_in_one_line_what_does_not_fit(ct, folder, text, tmp_path, capsys):
    ct.to_ctranslate2(*load_translator(folder, device="cpu"), tmp_path / "theirs")
    theirs, backend = str(tmp_path / "theirs"), ["--backend", "ctranslate2"]
    for arguments, expected in (
        (["--model", folder, "--compute_type", "int8"], "--compute_type is of --backend ctranslate2"),
        (["--model", folder, *backend, "--dtype", "bfloat16"], "give --compute_type"),
        (["--model", folder, *backend, "--device", "tpu"], "cpu, cuda, cuda:1 ..., got device 'tpu'"),
        (["--model", folder, *backend, "--device", "cpu:3"], "cannot be used here"),
        (["--model", theirs], "translate with --backend ctranslate2"),
    ):
        code, out, error = run(capsys, "translate", "--input", text, *arguments)
        assert (code, out) == (2, "")
        assert expected in error
        assert error.count("\n") == 1


def test_without_ctranslate2_the_command_names_the_extra(folder, text, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "vanilla_transformer.convert.ctranslate2", raising=False)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    arguments = ["translate", "--model", folder, "--input", text, "--backend", "ctranslate2"]
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert 'pip install "vanilla-transformer[export]"' in error
    assert error.count("\n") == 1


# --- CTranslate2's own converter -----------------------------------------------------------------------------------


def test_the_stock_converter_knows_the_model_once_the_module_is_imported(ct, folder, tmp_path):
    import ctranslate2

    converter = ctranslate2.converters.TransformersConverter(folder, copy_files=["tokenizer.json"])
    converter.convert(str(tmp_path / "theirs"), quantization="int8")
    ct.to_ctranslate2(*load_translator(folder, device="cpu"), tmp_path / "ours8", "int8")
    for path in (tmp_path / "ours8").iterdir():
        assert (tmp_path / "theirs" / path.name).read_bytes() == path.read_bytes(), path.name
    # As a user of CTranslate2 alone would have it: tokens in, tokens out.
    translator = ctranslate2.Translator(str(tmp_path / "theirs"), compute_type="float32")
    model, tokenizer = load_translator(folder, device="cpu")
    row = tokenizer(SOURCES[0])["input_ids"]
    result = translator.translate_batch([tokenizer.convert_ids_to_tokens(row)], beam_size=1, max_decoding_length=10)
    got = tokenizer.convert_tokens_to_ids(result[0].hypotheses[0])
    expected = without_padding(model.generate(torch.tensor([row]), num_beams=1, max_new_tokens=10))[0]
    assert got == [token for token in expected[1:] if token != EOS]


def test_the_module_is_the_stock_command_for_this_model(ct, folder, tmp_path):
    command = [sys.executable, "-m", "vanilla_transformer.convert.ctranslate2", "--model", folder]
    command += ["--output_dir", str(tmp_path / "theirs"), "--quantization", "int8"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ct.to_ctranslate2(*load_translator(folder, device="cpu"), tmp_path / "ours8", "int8")
    assert (tmp_path / "theirs" / "model.bin").read_bytes() == (tmp_path / "ours8" / "model.bin").read_bytes()
    got = lines_of(*ct.load_ctranslate2(str(tmp_path / "theirs")))
    assert got == lines_of(*ct.load_ctranslate2(str(tmp_path / "ours8")))


def test_the_stock_command_tells_a_mistake_in_one_line(ct, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convert", "--model", folder, "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        ct.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: output directory")


def test_write_says_what_is_lost(ct, folder, tmp_path):
    lost = ct.write(folder, tmp_path / "theirs", quantization="int8", max_positions=99)
    assert len(lost) == 2
    assert "length penalty" in lost[0]
    assert "99" in lost[1]
    assert lines_of(*ct.load_ctranslate2(str(tmp_path / "theirs")))[0][0].text == ""


# --- Folders and refusals ------------------------------------------------------------------------------------------


def test_the_folder_is_enough_for_itself(ct, tiny_tokenizer, tmp_path):
    """Tokenizer, configuration and generation settings come back from it."""
    model = varied_model(tiny_tokenizer, activation="gelu")
    model.generation_config.num_beams = 3
    ct.to_ctranslate2(model, tiny_tokenizer, tmp_path)
    translator, tokenizer = ct.load_ctranslate2(str(tmp_path))
    assert translator.config.activation == "gelu"
    assert translator.generation_config.num_beams == 3
    assert translator.generation_config.length_penalty_type == "gnmt"
    assert tokenizer("a </s> ä")["input_ids"] == tiny_tokenizer("a </s> ä")["input_ids"]
    assert tokenizer.model_max_length == tiny_tokenizer.model_max_length
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_second_conversion_replaces_the_first(ct, word_tokenizer, tmp_path):
    for seed in (1, 2):
        model = lively_model(seed)
        translator = opened(ct, model, word_tokenizer, tmp_path)
        assert without_padding(translator.generate(torch.tensor([[4, 5, EOS]]), num_beams=1)) == one_by_one(
            model, [[4, 5, EOS]], num_beams=1, early_stopping=False, length_penalty=1.0
        )


def test_the_folder_of_another_model_is_left_alone(ct, folder, tiny_tokenizer):
    before = (Path(folder) / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds a model of another kind; choose another folder"):
        ct.to_ctranslate2(varied_model(tiny_tokenizer), tiny_tokenizer, folder)
    assert (Path(folder) / "config.json").read_bytes() == before
    assert not (Path(folder) / "model.bin").exists()


def test_what_cannot_be_converted_is_refused_with_the_reason(ct, tiny_tokenizer, word_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="expected a model of this package, got one of type 'marian'"):
        ct.to_ctranslate2(varied_marian(tiny_tokenizer), tiny_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="tokenizer has .* words and the model 23"):
        ct.to_ctranslate2(small_model(), tiny_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="quantization must be one of .*int8.*, got 'int4'"):
        ct.to_ctranslate2(small_model(), word_tokenizer, tmp_path, "int4")
    with pytest.raises(ValueError, match="CTranslate2 needs eos_token_id"):
        ct.to_ctranslate2(small_model(eos_token_id=None), word_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="pruned_heads; CTranslate2 knows only one number of heads"):
        ct.to_ctranslate2(small_model(pruned_heads={"cross": [[0], [], []]}), word_tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_it_does_not_have_are_refused(ct, word_tokenizer, tmp_path):
    model = lively_model()
    translator = opened(ct, model, word_tokenizer, tmp_path)
    row = torch.tensor([[4, 5, EOS]])
    for name, value in (("do_sample", True), ("repetition_penalty", 1.3), ("logits_processor", []), ("top_k", 7)):
        with pytest.raises(ValueError, match=f"CTranslate2 translates without the setting {name}="):
            translator.generate(row, **{name: value})
    with pytest.raises(ValueError, match="without the setting bad_words_ids"):
        translator.generate(row, generation_config=GenerationConfig(bad_words_ids=[[4]]))
    for settings, message in (
        ({"min_new_tokens": 3}, "follows min_new_tokens=3 only with num_beams=1"),
        ({"min_length": 3}, "follows min_length=3 only with num_beams=1"),
        ({"no_repeat_ngram_size": 2, "num_beams": 2}, "follows no_repeat_ngram_size=2 only with num_beams=1"),
        ({"num_beams": 0}, "num_beams must be a whole number of at least 1, got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams, got 3 and 2"),
        ({"length_penalty_type": "bahdanau"}, "must be one of gnmt, hub"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 leaves no room"),
        ({"max_length": 1}, "max_length=1 leaves no room"),
        ({"decoder_start_token_id": 5}, "starts from the token 0, got decoder_start_token_id=5"),
    ):
        with pytest.raises(ValueError, match=message):
            translator.generate(row, **settings)
    neutral = {
        "do_sample": False,
        "repetition_penalty": 1.0,
        "top_k": 50,
        "temperature": 1.0,
        "logits_processor": None,
    }
    assert torch.equal(translator.generate(row, **neutral), translator.generate(row))
    with pytest.raises(ValueError, match="at least one token in every row"):
        translator.generate(row, attention_mask=torch.zeros_like(row))
    with pytest.raises(ValueError, match="cannot be trained"):
        translator.train()


def test_a_model_of_another_origin_or_device_is_refused(ct, word_tokenizer, tmp_path):
    ct.to_ctranslate2(lively_model(), word_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="cannot open .* on cpu as float16"):
        ct.load_ctranslate2(str(tmp_path), device="cpu", compute_type="float16")
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del settings["vanilla_transformer"]
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="lacks what this package writes beside it .*convert the model"):
        ct.load_ctranslate2(str(tmp_path))
