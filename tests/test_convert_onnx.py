"""ONNX: the same numbers at any shape, the same translations, with and without this package, and refusals."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, pipeline

from conftest import TINY_CORPUS
from engines import DEPARTURES, EOS, SAME, lively_model, one_by_one, sources, twenty_words, without_padding
from small_models import padded, reference_logits, small_model, words
from translators import varied_marian, varied_model
from vanilla_transformer.convert import convert_to
from vanilla_transformer.translation import load_translator, translate_lines
from vanilla_transformer_cli import main


SOURCES = [source[: 26 - 3 * number] for number, (source, _) in enumerate(TINY_CORPUS[:6])]
# What a short search shows as well as a long one, and what its exact stop rules add.
STOP_RULES = {
    "never": {"early_stopping": "never"},
    "never, length, three best": {"length_penalty": 1.0, "length_penalty_type": "hub", "num_return_sequences": 3},
    "False": {"early_stopping": False},
    "False, two best": {"early_stopping": False, "length_penalty": 1.5, "num_return_sequences": 2},
    "negative penalty": {"length_penalty": -0.5, "length_penalty_type": "hub"},
    "more candidates than words": {"num_beams": 12, "num_return_sequences": 12},
}


@pytest.fixture(scope="module")
def ox():
    """The module under test; onnx, onnxscript and onnxruntime are an extra."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f'{package} is of an extra: pip install ".[export]"')
    return importlib.import_module("vanilla_transformer.convert.onnx")


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    """One layer a side, for tracing takes its time, with heads of unequal widths and every bias."""
    settings = {"encoder_layers": 1, "decoder_layers": 1, "d_k": 3, "d_v": 5, "attention_bias": True, "seed": 11}
    model = varied_model(tiny_tokenizer, **settings)
    with torch.no_grad():  # so that translations depend on the source, and end where they like
        model.lm_head.bias[EOS] = 3.0
        model.model.decoder.layers[0].cross_attention.out_proj.weight.mul_(3)
    model.generation_config.max_new_tokens_over_source = 4
    return model


@pytest.fixture(scope="module")
def ours(model, tiny_tokenizer, tmp_path_factory) -> str:
    """The model as this package saves it."""
    path = tmp_path_factory.mktemp("ours")
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def theirs(ox, ours, tmp_path_factory) -> str:
    """What the command makes of it."""
    path = tmp_path_factory.mktemp("command") / "onnx"
    assert main(["convert", "--to", "onnx", "--model", ours, "--output_dir", str(path)]) == 0
    return str(path)


@pytest.fixture(scope="module")
def translator(ox, theirs):
    return ox.load_onnx(theirs)[0]


# --- The same numbers ----------------------------------------------------------------------------------------------


class Sessions:
    """The two files in plain onnxruntime, as a user of it alone would call them."""

    def __init__(self, folder: str | Path):
        import onnxruntime

        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(Path(folder) / name), providers=["CPUExecutionProvider"])
            for name in ("encoder_model.onnx", "decoder_model_merged.onnx")
        )
        self.past_shapes = {
            each.name: (1, each.shape[1], 1, each.shape[3])
            for each in self.decoder.get_inputs()
            if each.name.startswith("past_key_values")
        }

    def logits(self, ids: torch.Tensor, mask: torch.Tensor, target: torch.Tensor, pieces: list[int]) -> np.ndarray:
        """Logits of a target that is read in pieces of so many tokens, each after the first with the past."""
        (states,) = self.encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        past = {name: np.zeros(shape, np.float32) for name, shape in self.past_shapes.items()}
        names = [each.name for each in self.decoder.get_outputs()]
        result = []
        for number, piece in enumerate(target.split(pieces, dim=1)):
            inputs = {
                "input_ids": piece.numpy(),
                "encoder_hidden_states": states if number == 0 else np.full_like(states, np.nan),
                "encoder_attention_mask": mask.numpy(),
                "use_cache_branch": np.array([number > 0]),
                **past,
            }
            outputs = dict(zip(names, self.decoder.run(None, inputs), strict=True))
            result.append(outputs["logits"])
            for name in past:
                present = outputs[name.replace("past_key_values", "present")]
                if number == 0 or ".decoder." in name:
                    past[name] = present
                else:
                    assert present.size == 0  # the source's keys are made once
        return np.concatenate(result, axis=1)


def check_logits(sessions: Sessions, model, atol: float = 1e-4) -> None:
    """Against the paper as loops, at shapes that differ from those of the trace, padding on either side."""
    start = model.config.decoder_start_token_id
    pad = model.config.pad_token_id
    for side, lengths, target_length, pieces in (
        ("right", [7, 3, 5], 6, [1, 1, 4]),
        ("left", [2, 9, 1, 4], 9, [3, 6]),
        ("right", [1], 1, [1]),
        ("left", [4, 4], 2, [1, 1]),
    ):
        rows = [[*words(length, vocab_size=20, seed=length).tolist(), EOS] for length in lengths]
        ids, mask = padded(rows, side=side, pad=pad, width=max(lengths) + 2)
        target = torch.cat([torch.full((len(rows), 1), start), words(len(rows), target_length - 1)], dim=1)
        target_mask = torch.ones_like(target)
        if target_length > 2:  # a shorter target is padded behind its words
            target[0, -2:], target_mask[0, -2:] = pad, 0
        expected = reference_logits(model, ids, target, attention_mask=mask, decoder_attention_mask=target_mask)
        got = torch.from_numpy(sessions.logits(ids, mask, target, pieces)).double()
        kept = target_mask.bool()
        # Without a last norm logits reach 200, and float32 has a digit less behind the point.
        scale = max(1.0, expected.abs().max().item() / 20)
        assert torch.allclose(got[kept], expected[kept], atol=atol * scale, rtol=1e-5), (side, lengths)


def test_logits_are_those_of_the_paper_written_as_loops_at_any_shape(theirs, model):
    check_logits(Sessions(theirs), model)


@pytest.mark.slow
@pytest.mark.parametrize("departure", DEPARTURES)
def test_logits_of_each_departure_are_those_of_the_paper_written_as_loops(ox, tmp_path, departure):
    model = small_model(**DEPARTURES[departure])
    ox.to_onnx(model, twenty_words(), tmp_path)
    check_logits(Sessions(tmp_path), model)


@pytest.mark.slow
def test_a_model_whose_layers_have_unequally_many_heads_goes_out_as_it_is(ox, tmp_path):
    pruned = {"encoder": [[1], []], "decoder": [[], [0]], "cross": [[0, 1], []]}
    model = small_model(num_heads=4, d_model=16, pruned_heads=pruned, encoder_layers=2, decoder_layers=2)
    ox.to_onnx(model, twenty_words(), tmp_path)
    ids, target = words(3, 7, vocab_size=20), words(3, 6, vocab_size=20, seed=1)
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=target).logits
    got = Sessions(tmp_path).logits(ids, torch.ones_like(ids), target, [1, 3, 2])
    assert torch.allclose(torch.from_numpy(got), expected, atol=1e-4)


def test_sinusoids_have_no_end(theirs, model):
    """Far beyond what was traced, and beyond any table."""
    ids = words(1, 1500, vocab_size=20)
    target = torch.cat([torch.zeros(1, 1, dtype=torch.long), words(1, 1299, vocab_size=20, seed=1)], dim=1)
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=target).logits
    got = Sessions(theirs).logits(ids, torch.ones_like(ids), target, [1000, 300])
    assert torch.allclose(torch.from_numpy(got), expected, atol=1e-4)


def test_names_are_those_of_the_hubs_exports(theirs, model):
    sessions = Sessions(theirs)
    assert [each.name for each in sessions.encoder.get_inputs()] == ["input_ids", "attention_mask"]
    assert [each.name for each in sessions.encoder.get_outputs()] == ["last_hidden_state"]
    kinds = [f"0.{side}.{kind}" for side in ("decoder", "encoder") for kind in ("key", "value")]
    inputs = ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    inputs += [*(f"past_key_values.{kind}" for kind in kinds), "use_cache_branch"]
    assert [each.name for each in sessions.decoder.get_inputs()] == inputs
    outputs = {each.name: each.shape for each in sessions.decoder.get_outputs()}
    assert list(outputs) == ["logits", *(f"present.{kind}" for kind in kinds)]
    assert outputs["logits"] == ["batch_size", "decoder_sequence_length", model.config.vocab_size]
    assert outputs["present.0.decoder.key"] == ["batch_size", 4, "present_decoder_sequence_length", 3]
    assert outputs["present.0.encoder.value"] == ["batch_size", 4, "encoder_sequence_length", 5]


@pytest.mark.slow
def test_the_converted_model_itself_stays_as_it_is(ox, tmp_path):
    model = small_model(encoder_layers=1, decoder_layers=1, dtype=torch.bfloat16).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ox.to_onnx(model, twenty_words(), tmp_path)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sinusoids = model.model.encoder.positions(torch.arange(3)[None], 3)
    assert torch.equal(sinusoids[0, 1, :2], torch.tensor([1.0]).sin().new_tensor([np.sin(1.0), np.cos(1.0)]))
    check_logits(Sessions(tmp_path), model.float().eval())  # in float32, whatever the model's precision


@pytest.mark.slow
def test_int8_is_small_and_near_and_leaves_the_embedding_alone(ox, tmp_path):
    """Tied matrices too, of which one is looked up and the other multiplied, the other way round."""
    for tied in (True, False):
        model = lively_model(d_model=64, d_ff=128, tie_word_embeddings=tied, encoder_layers=1, decoder_layers=1)
        sizes, log_probs = [], []
        for quantization in (None, "int8"):
            path = tmp_path / f"{tied} {quantization}"
            ox.to_onnx(model, twenty_words(), path, quantization)
            sizes.append(sum(each.stat().st_size for each in path.glob("*.onnx")))
            targets = [words(6, seed=place).tolist() for place in range(10)]
            log_probs.append(torch.tensor(ox.load_onnx(str(path))[0].log_probs(sources(), targets)))
        error = float((log_probs[0] - log_probs[1]).square().mean().sqrt())
        assert 0.0 < error < 0.2 * float(log_probs[0].std())
        assert sizes[1] < 0.6 * sizes[0]


def test_weights_beyond_what_one_file_holds_lie_beside_it(ox, theirs, model, tmp_path, monkeypatch):
    import onnx

    monkeypatch.setattr(ox, "MOST_BYTES_INSIDE", 5_000)
    names = ("encoder_model.onnx", "decoder_model_merged.onnx")
    for name in names:
        ox.save(onnx.load(str(Path(theirs) / name)), tmp_path / name)
    assert {each.name for each in tmp_path.iterdir()} == {*names, *(f"{name}_data" for name in names)}
    check_logits(Sessions(tmp_path), model)


# --- The same translations -----------------------------------------------------------------------------------------


def source_rows(seed: int) -> list[list[int]]:
    """Sources of many lengths in the words of the model of text."""
    return [[100 + token for token in row[:-1]] + [EOS] for row in sources(seed)]


@pytest.mark.parametrize("name", [*SAME, *STOP_RULES])
def test_translations_are_those_of_torch(translator, model, name):
    settings, lengths, different = {**SAME, **STOP_RULES}[name], set(), set()
    for seed in range(2):
        rows = source_rows(seed)
        ids, mask = padded(rows, side="left" if seed else "right")
        expected = one_by_one(model, rows, **settings)
        got = without_padding(translator.generate(ids, attention_mask=mask, **settings))
        if "another end" in name:  # what torch puts behind that end is padding
            got, expected = ([row[: (row + [6]).index(6) + 1] for row in rows] for rows in (got, expected))
        assert got == expected
        lengths |= {len(row) for row in got}
        different |= {tuple(row) for row in got}
    assert len(lengths) >= (2 if "max_" in name or "negative" in name else 4)
    assert len(different) >= 10


def test_scores_are_those_of_torch(translator, model):
    ids, mask = padded(source_rows(1))
    for settings in (SAME["length ** 2, three best"], {}, SAME["greedy"]):
        options = {"return_dict_in_generate": True, "output_scores": True, "attention_mask": mask, **settings}
        got, expected = translator.generate(ids, **options), model.generate(ids, **options)
        is_greedy = settings.get("num_beams") == 1
        steps = model.compute_transition_scores(
            expected.sequences, expected.scores, getattr(expected, "beam_indices", None), normalize_logits=is_greedy
        )
        inside = torch.arange(got.scores.shape[1]) < torch.tensor(
            [[len(row) - 1] for row in without_padding(got.sequences)]
        )
        assert torch.allclose(got.scores[inside], steps[:, : got.scores.shape[1]][inside], atol=1e-4)
        if not is_greedy:
            assert torch.allclose(got.sequences_scores, expected.sequences_scores, atol=1e-4)


@pytest.mark.slow
def test_learned_positions_shorten_the_limit_of_the_source_as_in_torch(ox, tmp_path):
    model = lively_model(end=-50.0, position_embedding="learned", max_position_embeddings=9)
    ox.to_onnx(model, twenty_words(), tmp_path)
    translator, _ = ox.load_onnx(str(tmp_path))
    rows = [[*words(length, vocab_size=20).tolist(), EOS] for length in (2, 8)]
    got = without_padding(translator.generate(padded(rows)[0]))
    assert [len(row) - 1 for row in got] == [7, 9]
    assert got == one_by_one(model, rows)
    with pytest.raises(ValueError, match="the source may have 10 tokens, but the converted model has positions for 9"):
        translator.generate(torch.full((1, 10), 4))


def test_the_largest_numbers_are_found_in_any_block(ox):
    search = importlib.import_module("vanilla_transformer.convert.onnx_search")
    x = np.random.default_rng(0).normal(size=(5, 3000)).astype(np.float32)
    x[:, [0, 127, 128, 2999, 2940]] += np.arange(1, 6, dtype=np.float32) * 3  # edges of blocks and the rest behind
    values, index = search.largest(x, 4)
    expected = np.argsort(-x, axis=1)[:, :4]
    assert np.array_equal(index, expected)
    assert np.array_equal(values, np.take_along_axis(x, expected, axis=1))


# --- Lines, pipeline, command --------------------------------------------------------------------------------------


def lines_of(translator, tokenizer, **settings):
    return list(translate_lines(translator, tokenizer, ["", *SOURCES[:3], " \t", *SOURCES[3:]], **settings))


@pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"num_return_sequences": 3}])
def test_lines_are_translated_as_by_torch(ox, ours, theirs, settings):
    settings = {"scores": True, "tokens_per_batch": 120, **settings}
    expected = lines_of(*load_translator(ours, device="cpu"), **settings)
    got = lines_of(*ox.load_onnx(theirs), **settings)
    assert len({each.text for line in got for each in line}) >= 5
    for one, other in zip(sum(got, []), sum(expected, []), strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-4)


def test_the_pipeline_takes_the_translator(ox, ours, theirs):
    translator, tokenizer = ox.load_onnx(theirs)
    translate = pipeline("translation", model=translator, tokenizer=tokenizer)
    with_torch = pipeline("translation", model=ours, device="cpu")
    texts = [SOURCES[0], " ", *SOURCES[1:]]
    for options in ({}, {"batch_size": 4}, {"num_return_sequences": 2, "num_beams": 3}):
        assert translate(texts, **options) == with_torch(texts, **options)


WITHOUT_THE_PACKAGE = """
import runpy, sys
for name in ("torch", "transformers", "vanilla_transformer"):
    sys.modules[name] = None  # importing it fails
sys.argv[0] = "onnx_search.py"
runpy.run_path("onnx_search.py", run_name="__main__")
"""


def test_the_folder_translates_without_torch_transformers_and_this_package(ours, theirs):
    lines = [SOURCES[0], "", "a </s> <pad> \u00e4 \U0001f600", *SOURCES[1:], "\t"]
    for options, settings in (([], {}), (["--num_beams", "1", "--max_new_tokens", "9"], {})):
        settings = {name[2:]: int(value) for name, value in zip(options[::2], options[1::2], strict=True)}
        expected = [each[0].text for each in translate_lines(*load_translator(ours, device="cpu"), lines, **settings)]
        done = subprocess.run(
            [sys.executable, "-I", "-c", WITHOUT_THE_PACKAGE, *options],
            cwd=theirs,
            input="".join(f"{line}\r\n" for line in lines).encode(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().split("\n") == [*expected, ""]
        assert len(set(expected)) > 5


def test_the_file_without_the_package_cuts_what_is_too_long_and_keeps_its_end(ox, theirs, tmp_path, caplog):
    search = importlib.import_module("vanilla_transformer.convert.onnx_search")
    for path in Path(theirs).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = 8
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = search.OnnxModel(tmp_path).open_tokenizer()
    translator, stock = ox.load_onnx(str(tmp_path))
    assert tokenizer.encode(SOURCES[0]).ids == stock(SOURCES[0], truncation=True)["input_ids"]
    assert tokenizer.encode(SOURCES[0]).ids[7:] == [stock.eos_token_id]
    with pytest.raises(TypeError, match="expected settings among num_beams.*, got top_k"):
        list(search.OnnxModel(tmp_path).translate(["a"], top_k=3))
    lines = [SOURCES[1][:5], "", SOURCES[2][:6]]
    lines.append(SOURCES[0])
    expected = [each[0].text for each in translate_lines(translator, stock, lines)]
    caplog.clear()
    assert list(search.OnnxModel(tmp_path).translate(iter(lines), window=1)) == expected
    assert [record.getMessage() for record in caplog.records] == ["line 4: cut to 8 tokens"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stopped:  # by the parser
        code = stopped.code
    written = capsys.readouterr()
    return code, written.out, written.err


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.en"
    path.write_text("\n".join([SOURCES[0], "", *SOURCES[1:]]) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["theirs", pytest.param("ours", marks=pytest.mark.slow)])
def test_the_command_translates_with_either_kind_of_folder(kind, ours, theirs, text, capsys):
    arguments = ["translate", "--input", text]
    code, expected, _ = run(capsys, *arguments, "--model", ours)
    assert code == 0
    model = {"ours": ours, "theirs": theirs}[kind]
    assert run(capsys, *arguments, "--model", model, "--backend", "onnx")[:2] == (0, expected)


def test_the_command_says_in_one_line_what_does_not_fit(ours, theirs, text, capsys):
    arguments = ["translate", "--input", text]
    for more, message in (
        (["--model", ours, "--backend", "onnx", "--compute_type", "int8"], "onnx computes as the model is stored"),
        (["--model", ours, "--backend", "onnx", "--dtype", "bfloat16"], "onnx computes as the model is stored"),
        (["--model", theirs, "--backend", "onnx", "--device", "tpu"], "onnxruntime computes on cpu"),
        (["--model", theirs], "translate with --backend onnx"),
    ):
        code, out, error = run(capsys, *arguments, *more)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert message in error


# --- Folders and refusals ------------------------------------------------------------------------------------------


def test_the_folder_is_enough_for_itself(ox, theirs, tiny_tokenizer):
    translator, tokenizer = ox.load_onnx(theirs)
    assert translator.config.norm_first
    assert translator.generation_config.length_penalty_type == "gnmt"
    assert tokenizer("a </s> ä")["input_ids"] == tiny_tokenizer("a </s> ä")["input_ids"]
    settings = json.loads(Path(theirs, "config.json").read_text(encoding="utf-8"))
    assert settings["model_type"] == "vanilla_transformer"
    assert "auto_map" not in settings  # no code of ours lies there
    assert sorted(path.name for path in Path(theirs).iterdir()) == [
        *("config.json", "decoder_model_merged.onnx", "encoder_model.onnx", "generation_config.json"),
        *("onnx_search.py", "tokenizer.json", "tokenizer_config.json"),
    ]


@pytest.mark.parametrize(
    "options, text, told",
    [
        ([], b"a\na \xff\n", "standard input, line 2: expected UTF-8"),
        (["--num_beams", "0"], b"a\n", "--num_beams: must be a whole number above 0, got '0'"),
    ],
)
def test_the_file_without_the_package_tells_a_mistake_in_one_line(theirs, options, text, told):
    command = [sys.executable, str(Path(theirs) / "onnx_search.py"), *options]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    error = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert told in error[-1]
    assert not any("Traceback" in line for line in error)


@pytest.mark.parametrize("to", ["onnx", "ctranslate2", "marian"])
def test_every_format_refuses_alike(to, ours, theirs, tiny_tokenizer, tmp_path, capsys):
    """A folder that is not empty, a model of another family, a precision that there is not: one line, nothing left."""
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    varied_marian(tiny_tokenizer).save_pretrained(tmp_path / "marian")
    tiny_tokenizer.save_pretrained(tmp_path / "marian")
    capsys.readouterr()
    for model, output_dir, more, message in (
        (ours, theirs, [], "expected a new or an empty folder, but .* is not empty"),
        (str(tmp_path / "marian"), str(tmp_path / "new"), [], "(of this package.*'marian'|'marian'.*of this package)"),
        (ours, str(tmp_path / "new"), ["--quantization", "int3"], "quantization"),
    ):
        command = ["convert", "--to", to, "--model", model, "--output_dir", output_dir, *more]
        code, out, error = run(capsys, *command)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert re.search(message, error), error
        assert not (tmp_path / "new").exists()


def test_without_the_packages_the_command_names_the_extra(ours, tmp_path, capsys, monkeypatch):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as patch:
            for module in ("onnx", "onnx_search"):
                patch.delitem(sys.modules, f"vanilla_transformer.convert.{module}", raising=False)
            patch.setitem(sys.modules, package, None)
            for command in (
                ["convert", "--to", "onnx", "--model", ours, "--output_dir", str(tmp_path / "new")],
                ["translate", "--model", ours, "--input", __file__, "--backend", "onnx"],
            ):
                code, out, error = run(capsys, *command)
                assert (code, out, error.count("\n")) == (2, "", 1)
                assert 'pip install "vanilla-transformer[export]"' in error
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_converted_is_refused_with_the_reason(ox, tiny_tokenizer, ours, tmp_path):
    tokenizer = twenty_words()
    with pytest.raises(ValueError, match="expected a model of this package, got one of type 'marian'"):
        ox.to_onnx(varied_marian(tiny_tokenizer), tiny_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="tokenizer has .* words and the model 23"):
        ox.to_onnx(small_model(), tiny_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="quantization must be one of float32, int8, got 'int4'"):
        ox.to_onnx(small_model(), tokenizer, tmp_path, "int4")
    with pytest.raises(ValueError, match="needs eos_token_id"):
        ox.to_onnx(small_model(eos_token_id=None), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="holds a model of another kind; choose another folder"):
        ox.to_onnx(small_model(), tokenizer, ours)
    with pytest.raises(FileExistsError, match="not empty"):
        convert_to("onnx", ours, ours)


def test_settings_that_it_does_not_have_are_refused(translator):
    row = torch.tensor([[4, 5, EOS]])
    for name, value in (("do_sample", True), ("min_new_tokens", 3), ("no_repeat_ngram_size", 2), ("top_k", 7)):
        with pytest.raises(ValueError, match=f"onnxruntime translates without the setting {name}="):
            translator.generate(row, **{name: value})
    with pytest.raises(ValueError, match="without the setting bad_words_ids"):
        translator.generate(row, generation_config=GenerationConfig(bad_words_ids=[[4]]))
    with pytest.raises(ValueError, match="at least one token in every row"):
        translator.generate(row, attention_mask=torch.zeros_like(row))
    with pytest.raises(ValueError, match="a model in onnxruntime cannot be trained"):
        translator.train()


def test_a_folder_of_another_origin_is_refused(ox, theirs, tmp_path):
    for missing in ("decoder_model_merged.onnx", "generation_config.json"):
        for path in Path(theirs).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / missing).unlink()
        with pytest.raises(ValueError, match=f"no {missing} .*convert the model that it comes from again"):
            ox.load_onnx(str(tmp_path))
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "decoder_model_merged.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="onnxruntime cannot open the model"):
        ox.load_onnx(str(tmp_path))
