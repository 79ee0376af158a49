"""Checkpoint averaging: the mean by numpy and by exact fractions, which checkpoints are taken, what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import vanilla_transformer_cli as cli
from conftest import TINY_CORPUS
from small_models import small_model, words
from test_hub_code_travels import SHIPPED, elsewhere
from translators import varied_marian, varied_model
from vanilla_transformer.checkpoints import average_checkpoints, last_checkpoints, whole_checkpoints
from vanilla_transformer.data import tokenize_pairs
from vanilla_transformer.hub import TrainingRun
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments


def checkpoint(folder: Path, model, tokenizer=None, written_at: float | None = None, **options) -> Path:
    """What Trainer leaves of `model` in `folder`, pickles and state included."""
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps({"state": name}))
    state = folder / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 1}))
    if written_at is not None:
        os.utime(state, (written_at, written_at))
    return folder


def run_of(folder: Path, steps_and_minutes) -> Path:
    """A run whose checkpoint of n updates was written at the given minute; each has weights of its own."""
    for steps, minute in steps_and_minutes:
        path = folder / f"checkpoint-{steps}"
        checkpoint(path, small_model(seed=steps, encoder_layers=1, decoder_layers=1), written_at=1e9 + 60 * minute)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, sharded or not."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def raw_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder of just these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "vanilla_transformer"}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def names(folders) -> list[str]:
    return [Path(folder).name for folder in folders]


# --- The mean ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_are_the_mean_that_numpy_computes_in_float64(tmp_path, count):
    folders = [checkpoint(tmp_path / str(seed), small_model(seed=seed)) for seed in range(count)]
    average_checkpoints(folders, tmp_path / "mean")
    given = weights(tmp_path / "mean")
    each = [weights(folder) for folder in folders]
    assert set(given) == set(each[0])
    for name, tensor in given.items():
        expected = np.mean([one[name].double().numpy() for one in each], axis=0).astype(np.float32)
        assert tensor.dtype == torch.float32
        assert np.array_equal(tensor.numpy(), expected), name


def nearest(number: Fraction, digits: int) -> float:
    """The number with so many binary digits, to the nearest and of two the even one; by exact arithmetic."""
    if number == 0:
        return 0.0
    unit = Fraction(1)
    while abs(number) / unit >= 2**digits:
        unit *= 2
    while abs(number) / unit < 2 ** (digits - 1):
        unit /= 2
    return float(round(number / unit) * unit)  # round() of a Fraction goes to the even one


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_the_mean_of_narrow_numbers_is_rounded_once(tmp_path, dtype, digits):
    count = 4
    values = [0.3 * torch.randn(400, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    each = [value.to(dtype) for value in values]
    # The mean lies just above the middle of two numbers, by less than float32 can tell from it.
    for row, value in enumerate([2.0, 2.0, 2.0 ** (2 - digits), 2.0**-23 if dtype == torch.float16 else 2.0**-40]):
        each[row][0], each[row][1] = value, -value
    folders = [raw_checkpoint(tmp_path / str(row), {"x": each[row]}) for row in range(count)]
    average_checkpoints(folders, tmp_path / "mean")
    given = weights(tmp_path / "mean")["x"]
    assert given.dtype == dtype
    for place in range(400):
        exact = sum(Fraction(float(one[place])) for one in each) / count
        assert float(given[place]) == nearest(exact, digits), place
    assert given[0] == 1 + 2.0 ** (1 - digits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [3, 7])
def test_identical_checkpoints_give_themselves_to_the_bit(tmp_path, dtype, count):
    numbers = torch.randn(2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    numbers[:6] = torch.tensor([0.0, -0.0, 2.0**-20, 1e-40, 6e4, -1e-7])
    tensors = {"x": numbers.to(dtype), "count": torch.tensor([3, 2**62 + 1]), "flag": torch.tensor([True, False])}
    folders = [raw_checkpoint(tmp_path / str(number), tensors) for number in range(count)]
    average_checkpoints(folders, tmp_path / "mean")
    given = weights(tmp_path / "mean")
    assert {name: tensor.dtype for name, tensor in given.items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert given[name].numpy(force=True).tobytes() == tensor.numpy().tobytes() if dtype != torch.bfloat16 else True
        assert torch.equal(given[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("where", ["all", "first", "last"])
def test_weights_in_several_files_are_averaged_as_in_one(tmp_path, where):
    models = [small_model(seed=seed) for seed in range(3)]
    whole = [checkpoint(tmp_path / f"whole{seed}", model) for seed, model in enumerate(models)]
    average_checkpoints(whole, tmp_path / "expected")
    folders = []
    for seed, model in enumerate(models):
        sharded = where == "all" or seed == {"first": 0, "last": 2}[where]
        options = {"max_shard_size": f"{20 + 5 * seed}KB"} if sharded else {}
        folders.append(checkpoint(tmp_path / f"part{seed}", model, **options))
    average_checkpoints(folders, tmp_path / "mean")
    expected, given = weights(tmp_path / "expected"), weights(tmp_path / "mean")
    assert set(given) == set(expected)
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    assert (len(list((tmp_path / "mean").glob("*.safetensors"))) > 1) == (where != "first")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_memory_does_not_grow_with_the_number_of_checkpoints(tmp_path):
    """Twelve checkpoints of 40 MB in a process of its own: the peak grows by less than three of them."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak memory of a process is read from /proc")
    sizes = {f"layers.{number}.weight": (1000, 1250) for number in range(8)}  # 5 MB each
    for number in range(2):
        tensors = {name: torch.full(size, number + 1.0) for name, size in sizes.items()}
        raw_checkpoint(tmp_path / str(number), tensors)
    for number in range(2, 12):
        (tmp_path / str(number)).mkdir()
        for name in ("config.json", "model.safetensors"):
            os.link(tmp_path / str(number % 2) / name, tmp_path / str(number) / name)
    script = f"""
import re
from pathlib import Path
import safetensors.torch
from vanilla_transformer.checkpoints import average_checkpoints

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

folder = Path({str(tmp_path)!r})
before = peak()
average_checkpoints([folder / str(number) for number in range(12)], folder / "mean")
print(peak() - before)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 3 * 40
    assert torch.equal(weights(tmp_path / "mean")["layers.7.weight"], torch.full((1000, 1250), 1.5))


# --- What comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [varied_model, varied_marian])
def test_the_mean_opens_as_any_model_and_computes_with_the_mean_weights(tmp_path, tiny_tokenizer, make):
    models = [make(tiny_tokenizer, seed=seed) for seed in (4, 5)]
    for model in models:
        model.generation_config.update(num_beams=3, length_penalty=0.7)
    folders = [checkpoint(tmp_path / str(row), model, tiny_tokenizer) for row, model in enumerate(models)]
    average_checkpoints(folders, tmp_path / "mean")
    expected = make(tiny_tokenizer)
    state = [model.state_dict() for model in models]
    expected.load_state_dict({name: (state[0][name].double() + state[1][name].double()) / 2 for name in state[0]})
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean")
    ids = words(2, 6, vocab_size=len(tiny_tokenizer))
    logits = [model(input_ids=ids, decoder_input_ids=ids).logits for model in (loaded, expected)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert loaded.generation_config.num_beams == 3
    assert loaded.generation_config.length_penalty == 0.7
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "mean")("a dog")["input_ids"] == tiny_tokenizer("a dog")["input_ids"]
    )


def test_the_three_tied_matrices_are_saved_once_and_tied_again(tmp_path):
    folders = [checkpoint(tmp_path / str(seed), small_model(seed=seed)) for seed in (1, 2)]
    average_checkpoints(folders, tmp_path / "mean")
    assert sum("embed_tokens" in name or "lm_head" in name for name in weights(tmp_path / "mean")) == 1
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean")
    pointers = {
        matrix.weight.data_ptr()
        for matrix in (model.lm_head, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens)
    }
    assert len(pointers) == 1


def test_the_code_and_the_pipeline_come_along_and_the_trainers_state_does_not(tmp_path, tiny_tokenizer):
    """No pickle is opened or copied, and no score that belongs to one checkpoint."""
    folders = [checkpoint(tmp_path / str(seed), varied_model(tiny_tokenizer), tiny_tokenizer) for seed in (1, 2)]
    for folder in folders:
        (folder / "training_args.bin").write_bytes(b"no pickle at all")
        (folder / "README.md").write_text("BLEU 99")
        for name in ("all_results.json", "training_run.json"):
            (folder / name).write_text("{}")
        (folder / "global_step9").mkdir()
    average_checkpoints(folders, tmp_path / "mean")
    found = {path.name for path in (tmp_path / "mean").iterdir()}
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert found == expected | SHIPPED
    translate = pipeline("translation", model=str(tmp_path / "mean"), device="cpu")
    own = pipeline("translation", model=str(folders[0]), device="cpu")
    assert translate("The red train") == own("The red train")


@pytest.mark.slow
def test_the_mean_opens_where_the_package_is_not_installed(tmp_path):
    folders = [checkpoint(tmp_path / str(seed), small_model(seed=seed)) for seed in (1, 2)]
    average_checkpoints(folders, tmp_path / "mean")
    expected = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean").generate(torch.tensor([[5, 9, 4, 2]]))
    printed = elsewhere(
        tmp_path,
        f"""
        import torch
        from transformers import AutoModelForSeq2SeqLM

        model = AutoModelForSeq2SeqLM.from_pretrained({str(tmp_path / "mean")!r}, trust_remote_code=True)
        print(model.generate(torch.tensor([[5, 9, 4, 2]])).tolist())
        """,
    )
    assert json.loads(printed.splitlines()[-1]) == expected.tolist()


# --- Which checkpoints ---------------------------------------------------------------------------------------------


def test_the_last_ones_are_those_with_the_most_updates(tmp_path):
    """By number, not by name: 1000 comes after 200. The time of writing does not matter."""
    run = run_of(tmp_path, [(100, 9), (200, 1), (1000, 5), (900, 7)])
    (run / "checkpoint-best").mkdir()
    assert names(last_checkpoints(run, 3)) == ["checkpoint-200", "checkpoint-900", "checkpoint-1000"]
    assert names(whole_checkpoints(run)) == [f"checkpoint-{steps}" for steps in (100, 200, 900, 1000)]
    assert whole_checkpoints(tmp_path / "nowhere") == []


def test_an_interval_takes_from_the_newest_back_what_lies_so_far_apart(tmp_path):
    run = run_of(tmp_path, [(1, 0), (2, 9), (3, 10), (4, 12.5), (5, 20), (6, 29), (7, 31)])
    # 31; 29 is too near; 20 is 11 before; 12.5 and then 10 are 7.5 and 10 before; 9 is too near; 0.
    assert names(last_checkpoints(run, 4, interval_minutes=10)) == [f"checkpoint-{n}" for n in (1, 3, 5, 7)]
    assert names(last_checkpoints(run, 2, interval_minutes=10)) == ["checkpoint-5", "checkpoint-7"]
    with pytest.raises(ValueError, match=r"4 whole checkpoints written at least 10 minutes apart .* 5 are to be"):
        last_checkpoints(run, 5, interval_minutes=10)
    assert names(last_checkpoints(run, 5)) == [f"checkpoint-{n}" for n in (3, 4, 5, 6, 7)]


def cut_state(path: Path) -> None:
    (path / "trainer_state.json").write_text('{"global_step": ')


def no_state(path: Path) -> None:
    (path / "trainer_state.json").unlink()


def cut_weights(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [cut_state, no_state, cut_weights, no_weights])
def test_a_checkpoint_that_is_not_whole_is_stepped_over_with_a_warning(tmp_path, caplog, spoil):
    run = run_of(tmp_path, [(1, 0), (2, 1), (3, 2), (4, 3)])
    spoil(run / "checkpoint-3")
    assert names(last_checkpoints(run, 2)) == ["checkpoint-2", "checkpoint-4"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "stepped over" in messages[0]
    assert "checkpoint-3" in messages[0]


def test_a_best_one_kept_from_long_ago_is_told(tmp_path, caplog):
    run = run_of(tmp_path, [(100, 0), (700, 1), (800, 2), (900, 3)])
    assert len(last_checkpoints(run, 4)) == 4
    (record,) = caplog.records
    assert "checkpoint-100 lies 600 updates before the next one" in record.getMessage()
    caplog.clear()
    last_checkpoints(run, 3)
    assert not caplog.records


def test_too_few_checkpoints_are_counted_and_the_way_to_more_is_said(tmp_path):
    run = run_of(tmp_path, [(1, 0), (2, 1)])
    with pytest.raises(ValueError, match=r"2 whole checkpoints \(checkpoint-1, checkpoint-2\), but 5 .*limit 5"):
        last_checkpoints(run)
    with pytest.raises(ValueError, match="holds 0 whole checkpoints, but 1"):
        last_checkpoints(tmp_path / "checkpoint-1", 1)


@pytest.mark.parametrize("limit", [2, 5])
def test_five_checkpoints_of_a_run_are_reached_with_a_save_total_limit_of_five(tmp_path, tiny_tokenizer, limit):
    pairs = Dataset.from_list([{"source": source, "target": target} for source, target in TINY_CORPUS])
    dataset, _ = tokenize_pairs(pairs, tiny_tokenizer)
    trainer = VanillaTransformerTrainer(
        small_model(vocab_size=len(tiny_tokenizer)),
        VanillaTransformerTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=7,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=limit,
            tokens_per_batch=200,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=dataset,
        processing_class=tiny_tokenizer,
    )
    trainer.train()
    if limit == 2:
        with pytest.raises(ValueError, match="2 whole checkpoints .* --save_total_limit 5"):
            last_checkpoints(tmp_path)
        return
    chosen = last_checkpoints(tmp_path)
    assert names(chosen) == [f"checkpoint-{steps}" for steps in range(3, 8)]
    average_checkpoints(chosen, tmp_path / "averaged")
    name = "model.encoder.layers.0.feed_forward.fc1.weight"
    each = [load_file(folder / "model.safetensors")[name].double().numpy() for folder in chosen]
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "averaged").state_dict()[name]
    assert np.array_equal(loaded.numpy(), np.mean(each, axis=0).astype(np.float32))
    assert not np.array_equal(loaded.numpy(), each[-1])


# --- What is refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path, tiny_tokenizer) -> list[Path]:
    """Two checkpoints of one model."""
    return [
        checkpoint(tmp_path / f"checkpoint-{number}", varied_model(tiny_tokenizer, seed=number), tiny_tokenizer)
        for number in (1, 2)
    ]


def edited_json(name: str, **changes):
    def spoil(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def edited_weights(change):
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


BIAS = "lm_head.bias"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (edited_json("config.json", d_ff=48), r"config.json: d_ff is 48 in .*checkpoint-2, but 24 in .*checkpoint-1"),
        (edited_json("config.json", novel=1), r"config.json: novel is 1 in .*checkpoint-2, but absent in"),
        (edited_json("tokenizer.json", added_tokens=[]), r"tokenizer.json: added_tokens is \[\] in .*checkpoint-2"),
        (edited_json("tokenizer_config.json", model_max_length=9), "tokenizer_config.json: model_max_length is 9"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"checkpoint-2 has no tokenizer.json, which .*-1 has"),
        (lambda folder: (folder / "merges.txt").write_text("a b"), r"checkpoint-1 has no merges.txt, which .*-2 has"),
        (
            edited_weights(lambda each: each.pop(BIAS)),
            r"checkpoint-2 lacks 1 tensors that .*-1 has, such as lm_",
        ),
        (
            edited_weights(lambda each: each.update(extra=torch.ones(1))),
            r"checkpoint-1 lacks 1 tensors that .*checkpoint-2 has, such as extra",
        ),
        (
            edited_weights(lambda each: each.update({BIAS: each[BIAS][:7].clone()})),
            r"lm_head.bias is F32 of shape \[7\]",
        ),
        (
            edited_weights(lambda each: each.update({BIAS: each[BIAS].bfloat16()})),
            r"bias is BF16 of .*-2, but F32",
        ),
        (edited_weights(lambda each: each[BIAS].fill_(torch.nan)), r"lm_head.bias in .*checkpoint-2 is not finite"),
        (edited_weights(lambda each: each[BIAS].fill_(torch.inf)), r"lm_head.bias in .*checkpoint-2 is not finite"),
        (cut_weights, "model.safetensors is broken or cut short"),
        (no_weights, "checkpoint-2 has no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json in .*checkpoint-2"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (shutil.rmtree, "there is no checkpoint .*checkpoint-2"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_and_nothing_is_left(tmp_path, pair, spoil, message):
    spoil(pair[1])
    with pytest.raises((ValueError, OSError), match=message):
        average_checkpoints(pair, tmp_path / "mean")
    assert sorted(path.name for path in tmp_path.iterdir() if path not in pair) == []


def test_what_says_nothing_of_the_weights_may_differ(tmp_path, pair):
    edited_json("config.json", transformers_version="4.0.0", _name_or_path="x")(pair[1])
    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    edited_json("tokenizer.json", truncation=truncation)(pair[1])
    average_checkpoints(pair, tmp_path / "mean")


def test_tensors_of_whole_numbers_must_be_equal(tmp_path):
    folders = [raw_checkpoint(tmp_path / str(n), {"seen": torch.tensor([7, n])}) for n in range(2)]
    with pytest.raises(ValueError, match=r"seen, of type torch.int64, differs between .*1 and .*0"):
        average_checkpoints(folders, tmp_path / "mean")


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"x": "../0/model.safetensors"}, "names a file outside its folder"),
        ({"x": "nowhere.safetensors"}, "has no nowhere.safetensors, which its index names"),
        ({"x": "model.safetensors", "y": "model.safetensors"}, "disagree on y"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, message):
    folders = [raw_checkpoint(tmp_path / str(n), {"x": torch.ones(2)}) for n in range(2)]
    (folders[1] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises((ValueError, OSError), match=message):
        average_checkpoints(folders, tmp_path / "mean")


def test_a_folder_that_holds_something_is_left_alone(tmp_path, pair):
    (tmp_path / "mean").mkdir()
    (tmp_path / "mean" / "mine.txt").write_text("good")
    with pytest.raises(FileExistsError, match="holds something already"):
        average_checkpoints(pair, tmp_path / "mean")
    assert [path.name for path in (tmp_path / "mean").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    average_checkpoints(pair, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    average_checkpoints(pair, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "model.safetensors").is_file()


def test_wrong_arguments_are_named(tmp_path, pair):
    for checkpoints, error, message in (
        ([], ValueError, "at least one checkpoint, got none"),
        (str(pair[0]), TypeError, "a sequence of folders, got one str"),
        ([pair[0], pair[1], tmp_path / "checkpoint-2" / "." / ".." / "checkpoint-1"], ValueError, "named twice"),
    ):
        with pytest.raises(error, match=message):
            average_checkpoints(checkpoints, tmp_path / "mean")
    for options, message in (
        ({"last": 0}, "last must be a whole number of at least 1, got 0"),
        ({"interval_minutes": 0.0}, "interval_minutes must be above 0"),
        ({"interval_minutes": float("nan")}, "interval_minutes must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            last_checkpoints(tmp_path, **options)
    with pytest.raises(FileNotFoundError, match="there is no run's folder"):
        last_checkpoints(tmp_path / "nowhere")


# --- The command ---------------------------------------------------------------------------------------------------


def run(capsys, *argv) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `vanilla-transformer average` in this process."""
    capsys.readouterr()  # what making the checkpoints wrote
    try:
        code = cli.main(["average", *map(str, argv)])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_averages_a_run_or_what_is_named(capsys, tmp_path):
    folder = run_of(tmp_path / "run", [(n, 10 * n) for n in range(1, 8)])
    code, out, err = run(capsys, "--run", folder, "--output_dir", tmp_path / "five")
    assert (code, err) == (0, "")
    assert "averaged 5 checkpoints" in out
    assert [line.split("/")[-1] for line in out.splitlines() if line.startswith("  ")] == [
        f"checkpoint-{n}" for n in range(3, 8)
    ]
    named = [folder / f"checkpoint-{n}" for n in range(3, 8)]
    assert run(capsys, "--checkpoints", *named, "--output_dir", tmp_path / "named")[0] == 0
    assert (
        run(capsys, "--run", folder, "--last", "3", "--interval_minutes", "20", "--output_dir", tmp_path / "three")[0]
        == 0
    )
    average_checkpoints([folder / f"checkpoint-{n}" for n in (3, 5, 7)], tmp_path / "expected")
    for one, other in (("five", "named"), ("three", "expected")):
        given, expected = weights(tmp_path / one), weights(tmp_path / other)
        assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(
        given["model.encoder.embed_tokens.weight"], weights(tmp_path / "five")["model.encoder.embed_tokens.weight"]
    )


def test_the_card_of_a_mean_is_that_of_the_run_without_its_scores(capsys, tmp_path):
    folder = run_of(tmp_path / "run", [(n, 10 * n) for n in range(1, 4)])
    scores = {"bleu": {"score": 12.5, "signature": "s"}, "chrf": {"score": 34.5, "signature": "t"}}
    record = TrainingRun(source_lang="en", target_lang="de", preset="tiny", updates=3, kept_update=2)
    record.add_evaluation({"name": "newstest", **scores})
    record.save(folder)
    assert run(capsys, "--run", folder, "--last", "2", "--output_dir", tmp_path / "mean")[0] == 0
    record = TrainingRun.load(tmp_path / "mean")
    assert (record.source_lang, record.preset, record.updates) == ("en", "tiny", 3)
    assert record.averaged == ["checkpoint-2", "checkpoint-3"]
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "en to de" in card
    assert "the mean of 2 checkpoints: checkpoint-2, checkpoint-3" in card
    assert "12.5" not in card
    # What the checkpoint itself knows counts more: the run's folder may tell of an earlier end.
    TrainingRun(preset="tiny", updates=2, seconds=1.0).save(folder / "checkpoint-3")
    assert run(capsys, "--run", folder, "--last", "2", "--output_dir", tmp_path / "later")[0] == 0
    assert TrainingRun.load(tmp_path / "later").updates == 2
    # Of checkpoints of two runs neither's record holds.
    other = run_of(tmp_path / "other", [(7, 70)])
    named = [folder / "checkpoint-3", other / "checkpoint-7"]
    assert run(capsys, "--checkpoints", *named, "--output_dir", tmp_path / "both")[0] == 0
    assert TrainingRun.load(tmp_path / "both") == TrainingRun(averaged=["checkpoint-3", "checkpoint-7"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output_dir", "{}/mean"], "one of the arguments --run --checkpoints is required"),
        (["--run", "{}/nowhere", "--output_dir", "{}/mean"], "argument --run: no such folder"),
        (["--run", "{}/run", "--last", "2", "--output_dir", "{}/run"], "run holds something already"),
        (["--run", "{}/run", "--output_dir", "{}/mean"], "holds 2 whole checkpoints (checkpoint-1, checkpoint-2)"),
        (["--run", "{}/run", "--last", "0", "--output_dir", "{}/mean"], "at least 1, got '0'"),
        (["--run", "{}/run", "--last", "2", "--interval_minutes", "-1", "--output_dir", "{}/mean"], "above 0"),
        (["--checkpoints", "{}/run", "--last", "1", "--output_dir", "{}/mean"], "--last belongs to --run"),
        (["--checkpoints", "{}/run", "--output_dir", "{}/mean"], "there is no config.json"),
        (["--checkpoints", "{}/run/checkpoint-1", "--run", "{}/run", "--output_dir", "{}/mean"], "not allowed with"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_left(capsys, tmp_path, flags, message):
    run_of(tmp_path / "run", [(1, 0), (2, 1)])
    code, out, err = run(capsys, *(flag.format(tmp_path) for flag in flags))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
