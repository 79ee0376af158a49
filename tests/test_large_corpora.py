"""`vanilla-transformer train` on large text: from a cache, as a stream, and of several corpora mixed by weight."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

import vanilla_transformer_cli
from test_train_command import PAIRS, QUICK, SMALL, launched, train, trainer_state, write_lines
from vanilla_transformer import data
from vanilla_transformer.commands.train import vocabulary_texts
from vanilla_transformer.hub import TrainingRun
from vanilla_transformer.mixing import Mixture


COMMON = [*SMALL, *QUICK, "--tokens_per_batch", "200", "--logging_steps", "1", "--max_steps", "12"]
COMMON += ["--save_strategy", "steps", "--save_steps", "5", "--report_to", "none"]
KINDS = {
    "weights": ["--train_weights", "1", "2"],
    "stream": ["--streaming", "true", "--shuffle_buffer_size", "30"],
    "stream_of_weights": ["--streaming", "true", "--shuffle_buffer_size", "30", "--train_weights", "1", "2"],
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[str]:
    """Two pairs of files, of 60 and of 20 lines."""
    folder = tmp_path_factory.mktemp("corpora")
    parts = {"large": PAIRS[:60], "small": PAIRS[60:80]}
    paths = {
        side: [write_lines(folder / f"{name}.{side}", [pair[number] for pair in part]) for name, part in parts.items()]
        for number, side in enumerate(("source", "target"))
    }
    return ["--train_source", *paths["source"], "--train_target", *paths["target"]]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in trainer_state(folder)["log_history"] if "loss" in entry]


def same_weights(one: Path, two: Path) -> bool:
    values, others = (load_file(folder / "model.safetensors") for folder in (one, two))
    return all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory, corpora) -> SimpleNamespace:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    assert train(*corpora, *COMMON, *KINDS[request.param], "--output_dir", folder) == 0
    return SimpleNamespace(kind=request.param, folder=folder)


def test_a_run_that_is_resumed_goes_on_bit_identically(whole, tmp_path, corpora):
    arguments = [*corpora, *COMMON, *KINDS[whole.kind], "--output_dir", tmp_path / "rest"]
    assert train(*arguments, "--resume_from_checkpoint", whole.folder / "checkpoint-5") == 0
    assert len(losses(whole.folder)) == 12
    assert losses(tmp_path / "rest") == losses(whole.folder)
    assert same_weights(tmp_path / "rest", whole.folder)


def test_record_and_card_tell_how_the_text_was_read_and_what_that_took(whole):
    record = json.loads((whole.folder / "training_run.json").read_text())
    assert 0 < record["first_batch_seconds"] < record["seconds"] + 60
    assert 100 < record["peak_memory_without_files_mib"] < record["peak_memory_mib"] < 20_000
    card = (whole.folder / "README.md").read_text()
    if "weights" in whole.kind:
        sizes = [{}, {}] if "stream" in whole.kind else [{"pairs": 60}, {"pairs": 20}]
        assert record["corpora"] == [
            {"files": ["large.source", "large.target"], "weight": 1, **sizes[0]},
            {"files": ["small.source", "small.target"], "weight": 2, **sizes[1]},
        ]
        assert "small.source + small.target" in card
        assert "weight 2" in card
    if "stream" in whole.kind:
        assert (record["streamed"], record["shuffle_buffer_size"]) == (True, 30)
        assert "streamed, shuffled within 30 pairs a process" in card
        assert "training_pairs" not in record
        assert "epochs" not in record
    else:
        assert record["training_pairs"] == 80


def test_an_epoch_of_a_mixture_has_as_many_pairs_as_all_corpora(tmp_path, corpora, monkeypatch):
    seen = []
    real = Mixture.indices
    monkeypatch.setattr(
        Mixture, "indices", lambda self, epoch, seed: (seen.append((seed, epoch)), real(self, epoch, seed))[1]
    )
    settings = [*SMALL, *QUICK, "--tokens_per_batch", "200", "--num_train_epochs", "2", "--save_strategy", "no"]
    arguments = [*corpora, *settings, *KINDS["weights"], "--seed", "7", "--output_dir", tmp_path / "model"]
    assert train(*arguments) == 0
    assert [each for each in seen if each[0] == 7] == [(7, 0), (7, 1)]
    samples = trainer_state(tmp_path / "model")["log_history"][-1]
    assert samples["train_samples_per_second"] * samples["train_runtime"] == pytest.approx(160, rel=0.01)


def test_the_cache_lies_where_it_is_told_and_is_used_again(tmp_path, corpora, monkeypatch):
    settings = [*SMALL, *QUICK, "--max_steps", "1", "--save_strategy", "no", "--cache_dir", tmp_path / "cache"]
    assert train(*corpora, *settings, "--output_dir", tmp_path / "one") == 0
    assert {path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()} == {"pairs", "tokens"}
    real, batches = data.encode_batch, []
    monkeypatch.setattr(data, "encode_batch", lambda *args, **kwargs: (batches.append(1), real(*args, **kwargs))[1])
    settings += ["--tokenizer", str(tmp_path / "one")]
    del settings[settings.index("--vocab_size") : settings.index("--vocab_size") + 2]
    assert train(*corpora, *settings, "--output_dir", tmp_path / "two") == 0
    assert not batches
    assert train(*corpora, *settings, "--overwrite_cache", "true", "--output_dir", tmp_path / "three") == 0
    assert len(batches) == 1


def test_a_vocabulary_can_be_learnt_from_pairs_spread_over_the_text():
    parts = [Dataset.from_dict({"source": [f"s{n}" for n in numbers], "target": [f"t{n}" for n in numbers]})
             for numbers in (range(2500), range(2500, 4000))]  # fmt: skip
    for wanted in (None, 1, 7, 1000, 3999, 4000, 9999):
        arguments = SimpleNamespace(streaming=False, vocab_pairs=wanted)
        texts = list(vocabulary_texts(arguments, parts))
        numbers = sorted(int(text[1:]) for text in texts if text[0] == "s")
        assert numbers == sorted(int(text[1:]) for text in texts if text[0] == "t")
        count = min(wanted or 4000, 4000)
        assert len(set(numbers)) == len(numbers) == count
        gaps = {later - earlier for earlier, later in zip(numbers, numbers[1:], strict=False)}
        assert gaps <= {4000 // count, -(-4000 // count)}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--train_weights", "1"], "one weight for each of 2 corpora, got 1"),
        (["--train_weights", "1", "0"], "weights must be numbers above 0"),
        (["--train_weights", "1", "nan"], "weights must be numbers above 0"),
        (
            ["--train_weights", "1", "2", "--per_device_train_batch_size", "4"],
            "--train_weights needs --tokens_per_batch",
        ),
        (["--train_weights", "1", "2", "--train_target", "TARGET"], "got 1 and 2"),
        (["--dataset", "data", "--train_weights", "1"], "--train_weights belongs to"),
        (["--streaming"], "--streaming needs --max_steps"),
        (["--streaming", "--num_train_epochs", "3"], "--streaming needs --max_steps"),
        (["--streaming", "--max_steps", "9", "--per_device_train_batch_size", "4"], "needs --tokens_per_batch"),
        (["--shuffle_buffer_size", "9"], "belongs to --streaming"),
        (["--streaming", "--max_steps", "9", "--shuffle_buffer_size", "0"], "--shuffle_buffer_size must be"),
        (["--vocab_pairs", "0"], "--vocab_pairs must be"),
        (["--cache_dir", "TARGET"], "is a file; give a folder"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_2(arguments, told, tmp_path, capsys, corpora):
    files = [] if "--dataset" in arguments else corpora
    arguments = [corpora[-1] if each == "TARGET" else each for each in arguments]
    assert vanilla_transformer_cli.main(["train", *files, "--output_dir", str(tmp_path / "out"), *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert told in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_fault_in_a_stream_is_told_when_the_reading_comes_to_it(tmp_path, capsys, corpora):
    broken = write_lines(tmp_path / "broken", [f"line {number}" for number in range(30)])
    files = ["--train_source", broken, "--train_target", corpora[-2]]
    assert train(*files, *COMMON, *KINDS["stream"], "--output_dir", tmp_path / "out") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "broken has 30 and" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream_of_weights", "weights"])
def test_two_processes_share_cache_and_text_and_resume_bit_identically(tmp_path, corpora, kind):
    common = [*corpora, *COMMON, *KINDS[kind], "--cache_dir", tmp_path / "cache", "--overwrite_cache", "true"]
    launched(2, *common, "--output_dir", tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    launched(2, *common, "--output_dir", tmp_path / "rest", "--resume_from_checkpoint", checkpoint)
    assert len(losses(tmp_path / "whole")) == 12
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "rest", tmp_path / "whole")
    tables = [path for path in (tmp_path / "cache").glob("*/") if path.is_dir()]
    assert len(tables) == (0 if "stream" in kind else 4)
    for table in tables:
        assert sorted(os.listdir(table)) == ["part-00000.arrow", "whole.json"]
    assert TrainingRun.load(tmp_path / "whole").processes == 2
