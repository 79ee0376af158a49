"""Text that someone chose to do harm with, and files that would run code if they were unpickled.

VANILLA_TRANSFORMER_FULL=1 has the slow tests try 10,000 texts for each property, in place of 1,000.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import vanilla_transformer_cli as cli
from conftest import TINY_CORPUS
from foreign_models import Planted
from small_models import small_model
from vanilla_transformer.commands import score, translate
from vanilla_transformer.data import load_pairs, read_lines
from vanilla_transformer.translation import load_translator


FULL = os.environ.get("VANILLA_TRANSFORMER_FULL", "0") not in ("", "0")
AT_ONCE = 10  # texts of one call

PIECES = [
    *(
        "</s>",
        "<s>",
        "<pad>",
        "<unk>",
        "\x00",
        "\ufeff",
        "\r",
        "\r\r",
        "\x85",
        "\u2028",
        "\u2029",
        "\x0b",
        "\x0c",
        "\x1b[2J",
    ),
    *(
        "\u202e",
        "\u200f",
        "\u0627\u0644\u0639",
        "\u05d0\u05d1",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f3fd",
    ),
    *(
        "e\u0301\u0323\u0300",
        "\u200b",
        "\ud7ff",
        "\ue000",
        "\uffff",
        "\U0010ffff",
        "{0}",
        "%s",
        "$(id)",
        "\\n",
        "\t",
        " ",
        "a",
    ),
]
REPEATED = st.tuples(st.sampled_from([*PIECES, "x", "\U0001f600"]), st.sampled_from([2, 50, 1500])).map(
    lambda each: each[0] * each[1]
)
# No line break, which would make two lines of one.
HOSTILE = st.lists(
    st.sampled_from(PIECES)
    | st.text(alphabet=st.characters(exclude_characters="\n", codec="utf-8"), max_size=20)
    | REPEATED,
    max_size=5,
).map("".join)
WITH_SURROGATE = st.tuples(HOSTILE, st.characters(whitelist_categories=["Cs"]), HOSTILE).map("".join)


MANY = 10_000 if FULL else 1000
NUMBERS = pytest.mark.parametrize("texts", [200, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


def lots_of(texts: int):
    """Settings of hypothesis for so many texts, several in each example."""
    return settings(
        max_examples=texts // AT_ONCE, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def several(texts):
    """Lists of so many texts as an example has."""
    return st.lists(texts, min_size=AT_ONCE, max_size=AT_ONCE)


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_model(vocab_size=len(tiny_tokenizer), decoder_layers=2).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def opened(folder):
    return load_translator(str(folder), device="cpu")


@pytest.fixture
def opened_once(opened, monkeypatch):
    """Spares the commands the opening of the model, ten thousand times."""
    for command in (translate, score):
        monkeypatch.setattr(command, "load_translator", lambda *_, **__: opened)


# --- Text ------------------------------------------------------------------------------------------------------------


@NUMBERS
def test_the_pipeline_answers_any_text_in_its_place(opened, texts):
    translator = pipeline("translation", model=opened[0], tokenizer=opened[1])

    @lots_of(texts)
    @given(several(HOSTILE))
    def tried(sources):
        answers = translator(sources, max_new_tokens=2, num_beams=1, batch_size=AT_ONCE)
        assert len(answers) == len(sources)
        for source, answer in zip(sources, answers, strict=True):
            assert isinstance(answer["translation_text"], str)
            assert source.strip() or answer["translation_text"] == ""

    tried()


@NUMBERS
def test_the_pipeline_names_a_lone_surrogate(opened, texts):
    translator = pipeline("translation", model=opened[0], tokenizer=opened[1])

    @lots_of(texts)
    @given(st.lists(HOSTILE, max_size=4), WITH_SURROGATE)
    def tried(sources, broken):
        with pytest.raises(ValueError, match="lone surrogate U\\+D[89A-F][0-9A-F]{2} at character"):
            translator([*sources, broken], max_new_tokens=2, num_beams=1)

    tried()


@NUMBERS
def test_a_text_never_makes_a_special_token_and_comes_back(opened, texts):
    tokenizer = opened[1]
    special = set(tokenizer.all_special_ids)

    @lots_of(texts)
    @given(several(HOSTILE))
    def tried(sources):
        for source, ids in zip(sources, tokenizer(sources)["input_ids"], strict=True):
            assert ids[-1] == tokenizer.eos_token_id
            assert not special & set(ids[:-1])
            assert tokenizer.decode(ids, skip_special_tokens=True) == source

    tried()


@NUMBERS
def test_any_bytes_are_lines_or_an_error_that_names_the_line(tmp_path, texts):
    path = tmp_path / "text"

    @lots_of(texts)
    @given(several(HOSTILE.map(str.encode) | st.binary(max_size=20)), st.booleans())
    def tried(lines, ends):
        content = b"\n".join(lines) + b"\n" * ends
        path.write_bytes(content)
        wanted = content.split(b"\n")
        if wanted[-1] == b"":
            wanted.pop()
        broken = next((number for number, line in enumerate(wanted, 1) if not is_utf8(line)), None)
        if broken is None:
            expected = [line.decode() for line in wanted]
            if expected:
                expected[0] = expected[0].removeprefix("\ufeff")
            assert list(read_lines(str(path))) == [line.removesuffix("\r") for line in expected]
        else:
            with pytest.raises(ValueError, match=f"line {broken}\\b"):
                list(read_lines(str(path)))

    tried()


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


@NUMBERS
def test_commands_keep_the_number_of_lines(opened_once, tmp_path, capsys, texts):
    """translate as text, with scores and as JSON, and score: no traceback, a line for a line."""
    source, target, output = (tmp_path / name for name in ("source", "target", "output"))
    greedy = ["--num_beams", "1", "--max_new_tokens", "2"]
    forms = [
        ["translate", "--input", str(source), *greedy],
        ["translate", "--input", str(source), *greedy, "--scores"],
        ["translate", "--input", str(source), *greedy, "--output_format", "jsonl"],
        ["score", "--source", str(source), "--target", str(target)],
        ["score", "--source", str(source), "--target", str(target), "--output_format", "jsonl"],
    ]

    @lots_of(texts)
    @given(several(HOSTILE), several(HOSTILE), st.sampled_from(forms))
    def tried(sources, targets, form):
        for path, lines in ((source, sources), (target, targets)):
            path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        assert cli.main([*form, "--model", "a/b", "--output", str(output)]) == 0
        written = output.read_bytes()
        assert written.count(b"\n") == AT_ONCE
        assert written.endswith(b"\n")
        assert b"\r" not in written
        if "jsonl" in form:
            for line in written.decode().split("\n")[:-1]:
                assert isinstance(json.loads(line), dict)
        assert "Traceback" not in capsys.readouterr().err

    tried()


# --- Pickles ---------------------------------------------------------------------------------------------------------

# Whatever a library, here or elsewhere, has ever looked for in a folder with a model.
PICKLES = (
    *(
        "pytorch_model.bin",
        "model.bin",
        "pytorch_model.pt",
        "model.pt",
        "model.pth",
        "model.ckpt",
        "adapter_model.bin",
    ),
    *("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"),
    *("tokenizer.pkl", "tokenizer.bin", "vocab.pkl", "vocab.bin", "vocab.pt", "added_tokens.pkl", "config.pkl"),
    *("generation_config.pkl", "spiece.model", "sentencepiece.bpe.model", "source.spm", "tf_model.h5"),
)


@pytest.fixture
def planted(tmp_path):
    """An object whose pickle leaves a mark; the test fails where it did."""
    mark = tmp_path / "the pickle was run"
    content = io.BytesIO()
    torch.save({"weight": Planted(mark)}, content)
    torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert mark.exists()  # whoever unpickles it leaves the mark
    mark.unlink()
    yield content.getvalue(), pickle.dumps(Planted(mark))
    assert not mark.exists()


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_text("".join(f"{source}\n" for source, _ in TINY_CORPUS), encoding="utf-8")
    return str(tmp_path / "text")


def plant(folder: Path, planted: tuple[bytes, bytes]) -> None:
    for number, name in enumerate(PICKLES):
        (folder / name).write_bytes(planted[number % 2])
    for name in ("modeling", "configuration", "tokenization"):  # code that comes along is not run either
        (folder / f"{name}_vanilla_transformer.py").write_text(f"open({name!r} + '/run', 'x')\nraise SystemExit\n")


@pytest.mark.parametrize("has_weights", [True, False])
def test_no_command_unpickles_what_lies_in_a_model_folder(capsys, tmp_path, folder, planted, text, has_weights):
    model, output = tmp_path / "model", tmp_path / "output"
    shutil.copytree(folder, model)
    plant(model, planted)
    if not has_weights:
        (model / "model.safetensors").unlink()
    quick = ["--num_beams", "1"]
    train = ["--train_source", text, "--train_target", text, "--max_steps", "1", "--use_cpu", "true"]
    for command in (
        ["translate", "--model", model, "--input", text, "--output", output, *quick],
        ["evaluate", "--model", model, "--source", text, "--reference", text, "--json", output, *quick],
        ["score", "--model", model, "--source", text, "--target", text, "--output", output],
        ["convert", "--to", "marian", "--model", model, "--output_dir", output],
        ["average", "--checkpoints", model, "--output_dir", output],
        ["push", "--model", model, "--repo_id", "user/name", "--dry_run"],
        [
            "train",
            "--model",
            model,
            *train,
            "--disable_tqdm",
            "true",
            "--learning_rate",
            "0.1",
            "--output_dir",
            output,
        ],
    ):
        try:
            code = cli.main([*map(str, command)])
        except SystemExit as end:
            code = end.code
        errors = capsys.readouterr().err
        assert code == (0 if has_weights else 2), (command, errors)
        assert "Traceback" not in errors
        if output.is_dir():
            shutil.rmtree(output)
        output.unlink(missing_ok=True)


def test_no_class_unpickles_what_lies_in_a_model_folder(tmp_path, folder, planted):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    plant(model, planted)
    AutoTokenizer.from_pretrained(model)
    AutoModelForSeq2SeqLM.from_pretrained(model)
    pipeline("translation", model=str(model))
    (model / "model.safetensors").unlink()
    for opens in (AutoModelForSeq2SeqLM.from_pretrained, lambda name: pipeline("translation", model=str(name))):
        with pytest.raises(Exception, match="(?i)weights|safetensors"):
            opens(model)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_run_does_not_go_on_from_a_checkpoint_with_code_in_it(capsys, tmp_path, planted, text, name):
    shape = ["--preset", "tiny", "--config_overrides", "d_model=16", "d_ff=32", "num_heads=2", "--vocab_size", "300"]
    run = ["train", "--train_source", text, "--train_target", text, *shape, "--use_cpu", "true", "--report_to", "none"]
    run += ["--disable_tqdm", "true", "--save_strategy", "steps", "--save_steps", "1", "--output_dir"]
    run += [str(tmp_path / "run"), "--tokens_per_batch", "200"]
    assert cli.main([*run, "--max_steps", "1"]) == 0
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / name).is_file()
    (checkpoint / name).write_bytes(planted[0])
    capsys.readouterr()
    code = cli.main([*run, "--max_steps", "2", "--resume_from_checkpoint", "true"])
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line or "Traceback" in line]
    if name == "training_args.bin":  # which nobody reads
        assert (code, errors) == (0, [])
    else:
        assert code == 2
        assert len(errors) == 1, errors
        assert "nothing in a checkpoint is run" in errors[0]
        assert str(checkpoint) in errors[0]


def test_no_data_set_and_no_recipe_is_unpickled(tmp_path, planted):
    """A pickle by its own name, one inside an archive of samples, a script beside the data, a tag of YAML."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.py").write_text("raise SystemExit('the script was run')")
    for name in ("train.pkl", "train.pickle", "train.pt"):
        (data / name).write_bytes(planted[1])
        with pytest.raises((ValueError, OSError)):
            load_pairs(dataset=str(data), source_lang="en", target_lang="de")
        with pytest.raises((ValueError, OSError)):
            load_pairs(dataset=str(data / name), source_lang="en", target_lang="de")
        (data / name).unlink()
    for ending, content in (("pkl", planted[1]), ("pyd", planted[1]), ("pth", planted[0]), ("npy", planted[1])):
        with tarfile.open(data / "train.tar", "w") as archive:
            member = tarfile.TarInfo(f"0001.{ending}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        with pytest.raises(Exception, match="."):
            load_pairs(dataset=str(data), source_lang="en", target_lang="de")
    (data / "train.tar").unlink()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: !!python/object/apply:sys.exit [7]\n", encoding="utf-8")
    assert cli.main(["train", "--recipe", str(recipe), "--output_dir", str(tmp_path / "never")]) == 2
