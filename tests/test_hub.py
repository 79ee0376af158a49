"""Model cards made from the run itself, and what a push would send."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

import vanilla_transformer_cli
from conftest import TINY_CORPUS
from hub_server import card_errors
from test_evaluation import sacrebleu_command
from translators import varied_marian, varied_model
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
)
from vanilla_transformer.data import tokenize_pairs
from vanilla_transformer.hub import (
    PUSHED,
    TrainingRun,
    add_evaluation,
    changed_arguments,
    decoding_text,
    duration,
    files_of_space,
    files_to_push,
    model_card,
    plain,
    write_model_card,
    write_space,
)
from vanilla_transformer.training import VanillaTransformerTrainingArguments
from vanilla_transformer.translation import translate_lines


CODE = {f"{part}_vanilla_transformer.py" for part in ("configuration", "generation", "modeling", "pipeline")}
CARDS = Path(__file__).resolve().parents[1] / "model_cards"
EVALUATION = {
    "name": "newstest",
    "split": "test",
    "segments": 2000,
    "decoding": "beam 4",
    "bleu": {"score": 27.345, "signature": "nrefs:1|tok:13a"},
    "chrf": {"score": 55.5, "signature": "nrefs:1|nc:6"},
    "perplexity": 5.125,
}


@pytest.fixture
def folder(tiny_tokenizer, tmp_path) -> Path:
    """A saved model with its tokenizer, in a folder called `model`."""
    path = tmp_path / "model"
    varied_model(tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def card_for(run: TrainingRun, config: VanillaTransformerConfig | None = None, **options) -> ModelCard:
    options = {"model_id": "user/name", "num_parameters": 1234567, **options}
    return model_card(config or VanillaTransformerConfig(), run, **options)


def metadata(text: str) -> dict:
    """The card's header, read by YAML alone."""
    return yaml.safe_load(text.split("---\n")[1])


# --- The card --------------------------------------------------------------------------------------------------------


def test_the_metadata_are_what_the_hub_reads():
    run = TrainingRun(source_lang="en", target_lang="de", dataset="bentrevett/multi30k", evaluations=[EVALUATION])
    header = metadata(str(card_for(run, license="apache-2.0")))
    assert header["language"] == ["en", "de"]
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "translation"
    assert header["datasets"] == ["bentrevett/multi30k"]
    (entry,) = header["model-index"]
    assert entry["name"] == "name"
    (result,) = entry["results"]
    assert result["task"] == {"type": "translation", "name": "Translation en-de"}
    assert result["dataset"] == {"name": "newstest", "type": "newstest", "split": "test"}
    scores = {metric["type"]: metric for metric in result["metrics"]}
    assert scores["sacrebleu"]["value"] == 27.34 or scores["sacrebleu"]["value"] == 27.35
    assert scores["sacrebleu"]["args"] == {"signature": "nrefs:1|tok:13a", "decoding": "beam 4"}
    assert scores["chrf"]["value"] == 55.5


def test_the_text_tells_languages_data_effort_and_machine():
    run = TrainingRun(
        source_lang="tg",
        target_lang="fa",
        files=["train.tg", "train.fa"],
        training_pairs=29000,
        validation_pairs=1014,
        preset="tiny",
        config_overrides=["dropout=0.1"],
        recipe="multi30k_tiny",
        arguments={"max_steps": 3600, "bf16": True},
        updates=3600,
        epochs=25.04,
        target_tokens=12_900_000,
        seconds=796.4,
        processes=2,
        hardware="Abacus 3000, 2 cores",
        software={"torch": "2.13.0"},
        train_loss=2.5,
        evaluations=[EVALUATION],
    )
    text = str(card_for(run))
    for words in (
        "tg to fa",
        "train.tg, train.fa, 29,000 pairs",
        "1,014 pairs",
        "3,600 updates, 25.0 epochs, 12,900,000 target tokens",
        "13 min 16 s",
        "Abacus 3000, 2 cores, 2 processes",
        "torch 2.13.0",
        "tiny with dropout=0.1",
        "multi30k\\_tiny",
        "| parameters | 1,234,567 |",
        "max_steps: 3600",
        "27.34",
        "5.125",
        "nrefs:1|nc:6",
        'pipeline("translation", model="user/name", trust_remote_code=True)',
    ):
        assert words in text, words


def test_what_is_unknown_is_said_or_left_out():
    text = str(card_for(TrainingRun()))
    assert "| languages | not stated |" in text
    assert "Not evaluated yet" in text
    assert "None" not in text
    assert not {"language", "license", "datasets", "model-index", "base_model"} & set(metadata(text))


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({}, "Departures from the paper: none."),
        ({"dropout": 0.3, "d_model": 64}, "Departures from the paper: none."),
        ({"norm_first": True}, "`norm_first=True` (layer normalisation before each sub-layer)"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings=False`"),
        ({"position_embedding": "learned"}, "`position_embedding=learned` (positions)"),
    ],
)
def test_departures_from_the_paper_are_named(overrides, words):
    assert words in str(card_for(TrainingRun(), VanillaTransformerConfig(**overrides)))


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
            "beam 4, length penalty ((5 + n) / 6) ** 0.6",
        ),
        ({"num_beams": 5, "length_penalty": 1.0}, "beam 5, length penalty n ** 1.0."),
        ({"num_beams": 5, "length_penalty": 0.0}, "beam 5."),
        ({"num_beams": 1, "max_new_tokens_over_source": 7}, "greedy, at most source + 7 tokens."),
    ],
)
def test_the_decoding_is_that_of_the_models_settings(settings, words):
    assert words in str(card_for(TrainingRun(), generation_config=GenerationConfig(**settings)))


HOSTILE = [
    "<script>alert(1)</script>",
    "a | b\n| c | d |",
    "[click](javascript:alert(1))",
    "![x](http://evil.example/x.png)",
    "`$(rm -rf ~)`",
    "---\nlicense: mit\n---",
    "{{ 7 * 7 }} {% raw %}",
    "<!-- end of results -->",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_from_elsewhere_stay_text(text):
    run = TrainingRun(
        source_lang=text,
        target_lang=text,
        files=[text],
        preset=text,
        recipe=text,
        base_model=text,
        hardware=text,
        evaluations=[{**EVALUATION, "name": text, "split": text, "decoding": text}],
    )
    card = str(card_for(run, model_id=text.replace("/", "")))
    header, body = metadata(card), card.split("---\n", 2)[2]
    assert header["pipeline_tag"] == "translation"
    assert "license" not in header
    assert "language" not in header
    outside_code = re.sub(r"```.*?```|`[^`\n]*`", "", body, flags=re.DOTALL)
    assert "<script>" not in outside_code
    assert re.search(r"(?<!\\)\[(click|x)(?<!\\)\]\(", outside_code) is None
    assert "49" not in outside_code
    assert outside_code.count("<!-- end of results -->") == 1
    table = [line for line in body.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} <= {3, 7}, "a cell has broken its row"


@pytest.mark.parametrize(
    "seconds, words", [(None, ""), (59.6, "1 min 0 s"), (796, "13 min 16 s"), (7384, "2 h 3 min")]
)
def test_times_are_readable(seconds, words):
    assert duration(seconds) == words


def test_plain_text_is_one_line_of_harmless_markdown():
    assert plain("a\n<b>|`c`_[d]") == "a &lt;b&gt;\\|\\`c\\`\\_\\[d\\]"


# --- In a folder -----------------------------------------------------------------------------------------------------


def test_record_and_card_come_together_and_the_record_is_read_back(folder):
    run = TrainingRun(source_lang="en", target_lang="de", updates=7, evaluations=[EVALUATION])
    write_model_card(folder, run)
    assert TrainingRun.load(folder) == run
    card = ModelCard.load(folder / "README.md")
    assert card.data.model_name == "model"
    assert f"| parameters | {sum(p.numel() for p in varied_parameters(folder)):,} |" in card.content
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def varied_parameters(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_a_missing_record_is_an_empty_one_and_a_broken_one_is_told(tmp_path):
    assert TrainingRun.load(tmp_path) == TrainingRun()
    (tmp_path / "training_run.json").write_text('{"source_lang": "en", "from_a_later_version": 1}')
    assert TrainingRun.load(tmp_path) == TrainingRun(source_lang="en")
    (tmp_path / "training_run.json").write_text('{"source_lang": ')
    with pytest.raises(ValueError, match=r"training_run\.json is not the record"):
        TrainingRun.load(tmp_path)


def test_an_evaluation_is_added_and_what_someone_wrote_stays(folder):
    write_model_card(folder, TrainingRun(source_lang="en", target_lang="de"))
    path = folder / "README.md"
    path.write_text(
        path.read_text()
        .replace("## Limits", "## Thanks\n\nTo my grandmother.\n\n## Limits")
        .replace("---\n", "---\nlicense: mit\n", 1)
    )
    add_evaluation(folder, EVALUATION)
    add_evaluation(folder, {**EVALUATION, "name": "other", "bleu": {"score": 11.0, "signature": "s"}})
    add_evaluation(folder, {**EVALUATION, "bleu": {"score": 30.0, "signature": "nrefs:1|tok:13a"}})
    text = path.read_text()
    header = metadata(text)
    assert "To my grandmother." in text
    assert header["license"] == "mit"
    assert {result["dataset"]["name"] for result in header["model-index"][0]["results"]} == {"newstest", "other"}
    assert "| 30.00 |" in text
    assert "| 11.00 |" in text
    assert "27.3" not in text, "the newer score of the same text by the same decoding replaces the older"
    assert [each["name"] for each in TrainingRun.load(folder).evaluations] == ["other", "newstest"]


def test_a_card_of_anothers_hand_gets_the_scores_at_its_end(folder):
    (folder / "README.md").write_text("# Mine\n\nBy hand.\n")
    add_evaluation(folder, EVALUATION)
    text = (folder / "README.md").read_text()
    assert "By hand." in text
    assert "newstest (test)" in text
    assert metadata(text)["model-index"][0]["name"] == "model"


def test_evaluate_writes_the_commands_scores_into_the_card(folder, tmp_path, capsys):
    sources, references = (list(side) for side in zip(*TINY_CORPUS, strict=True))
    files = {}
    for name, lines in (("source", sources), ("reference", references)):
        files[name] = tmp_path / name
        files[name].write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    command = ["evaluate", "--model", str(folder), "--source", str(files["source"])]
    command += ["--reference", str(files["reference"]), "--num_beams", "2", "--hypothesis_output", str(tmp_path / "h")]
    assert vanilla_transformer_cli.main([*command, "--update_card", "--dataset_name", "ten | lines"]) == 0
    capsys.readouterr()
    hypotheses = (tmp_path / "h").read_text(encoding="utf-8").splitlines()
    expected = sacrebleu_command(tmp_path, hypotheses, [references])
    (result,) = metadata((folder / "README.md").read_text())["model-index"][0]["results"]
    assert result["dataset"]["name"] == "ten | lines"
    scores = {metric["type"]: metric for metric in result["metrics"]}
    assert scores["sacrebleu"]["value"] == pytest.approx(expected["bleu"]["score"], abs=0.006)
    assert scores["chrf"]["value"] == pytest.approx(expected["chrf"]["score"], abs=0.006)
    assert scores["sacrebleu"]["args"]["decoding"].startswith("beam 2,")


@pytest.mark.parametrize(
    "options, message",
    [(["--dataset_name", "x"], "--update_card"), (["--update_card", "--model", "user/name"], "the model's folder")],
)
def test_evaluate_tells_at_once_what_does_not_fit_the_card(folder, tmp_path, capsys, options, message):
    (tmp_path / "text").write_text("a\n")
    command = ["evaluate", "--model", str(folder), "--source", str(tmp_path / "text")]
    assert vanilla_transformer_cli.main([*command, "--reference", str(tmp_path / "text"), *options]) == 2
    assert message in capsys.readouterr().err


# --- From the trainer and the pipeline -------------------------------------------------------------------------------


def trainer_for(tokenizer, folder, model=None, **arguments) -> VanillaTransformerTrainer:
    pairs = Dataset.from_dict(dict(zip(("source", "target"), zip(*TINY_CORPUS, strict=True), strict=True)))
    dataset, _ = tokenize_pairs(pairs, tokenizer)
    options = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return VanillaTransformerTrainer(
        varied_model(tokenizer) if model is None else model,
        VanillaTransformerTrainingArguments(output_dir=str(folder), warmup_steps=10, **{**options, **arguments}),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)),
        processing_class=tokenizer,
    )


def test_the_trainer_saves_one_folder_with_everything_and_the_card_tells_its_run(tiny_tokenizer, tmp_path):
    trainer = trainer_for(tiny_tokenizer, tmp_path / "run", max_steps=3, generation_num_beams=2)
    trainer.train()
    scores = trainer.evaluate()
    trainer.save_model()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    } | CODE <= names
    run = TrainingRun.load(tmp_path / "run")
    assert (run.updates, run.training_pairs, run.validation_pairs) == (3, len(TINY_CORPUS), 4)
    per_epoch = sum(len(tiny_tokenizer(target)["input_ids"]) for _, target in TINY_CORPUS)
    assert run.target_tokens == 3 * per_epoch, "all ten pairs fit into one batch"
    assert run.seconds > 0
    assert run.arguments["warmup_steps"] == 10
    assert run.arguments["adam_beta2"] == 0.98
    assert not {"output_dir", "report_to", "use_cpu"} & set(run.arguments)
    (evaluation,) = run.evaluations
    assert evaluation["bleu"]["score"] == scores["eval_bleu"]
    assert evaluation["decoding"].startswith("beam 2,")
    assert evaluation["bleu"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert str(tmp_path) not in (tmp_path / "run" / "README.md").read_text()
    # another folder
    trainer.save_model(str(tmp_path / "other"))
    assert (tmp_path / "other" / "README.md").is_file()


def test_the_evaluation_of_the_model_that_is_kept_is_the_one_told(tiny_tokenizer, tmp_path):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    trainer = trainer_for(
        tiny_tokenizer,
        tmp_path / "run",
        max_steps=3,
        eval_steps=1,
        save_steps=1,
        learning_rate=0.3,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first update's is the largest here
        generation_num_beams=1,
        **settings,
    )
    trainer.train()
    at = {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}
    assert len({entry["eval_chrf"] for entry in at.values()}) == 3, "the updates must differ for this test"
    best = max(at, key=lambda step: at[step]["eval_loss"])
    (evaluation,) = trainer.run.evaluations
    assert evaluation["chrf"]["score"] == at[best]["eval_chrf"]
    assert best != 3, "the best must not be the last for this test"
    trainer.save_model()
    assert f"| weights | of update {best}, the best" in (tmp_path / "run" / "README.md").read_text()


def test_checkpoints_carry_a_record_from_which_a_resumed_run_knows_the_whole(tiny_tokenizer, tmp_path):
    """Even where the checkpoint that it goes on from is thrown away on the way."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    whole = trainer_for(tiny_tokenizer, tmp_path / "whole", max_steps=6, **saving)
    whole.train()
    first = trainer_for(tiny_tokenizer, tmp_path / "run", max_steps=2, **saving)
    first.train()
    assert not (tmp_path / "run" / "checkpoint-2" / "README.md").exists()
    assert TrainingRun.load(tmp_path / "run" / "checkpoint-2").updates == 2
    resumed = trainer_for(tiny_tokenizer, tmp_path / "run", max_steps=6, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert not (tmp_path / "run" / "checkpoint-2").exists()
    assert resumed.updates_made == 4
    assert resumed.run.target_tokens == whole.run.target_tokens
    assert resumed.run.seconds >= first.run.seconds
    assert (resumed.run.resumed_at, resumed.run.train_loss) == (None, None)  # a mean of the part would be no mean
    resumed.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"{whole.run.target_tokens:,} target tokens" in card
    assert "since update" not in card
    assert "training loss" not in card


def test_a_run_resumed_from_a_checkpoint_without_a_record_says_since_when(tiny_tokenizer, tmp_path):
    trainer_for(tiny_tokenizer, tmp_path, save_strategy="steps", save_steps=2).train()
    (tmp_path / "checkpoint-2" / "training_run.json").unlink()
    resumed = trainer_for(tiny_tokenizer, tmp_path, max_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.run.resumed_at == 2
    resumed.save_model()
    assert "since update 2" in (tmp_path / "README.md").read_text()


def test_a_model_fine_tuned_in_python_tells_of_its_base(tiny_tokenizer, tmp_path):
    base = trainer_for(tiny_tokenizer, tmp_path / "base")
    base.run.source_lang, base.run.target_lang, base.run.preset = "en", "de", "tiny"
    base.train()
    base.save_model()
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "base")
    tuned = trainer_for(tiny_tokenizer, tmp_path / "tuned", model=model)
    tuned.train()
    tuned.save_model()
    run = TrainingRun.load(tmp_path / "tuned")
    assert (run.base_model, run.source_lang, run.target_lang, run.preset) == (
        "base (a local folder)",
        *("en", "de", "tiny"),
    )
    assert "base_model" not in metadata((tmp_path / "tuned" / "README.md").read_text()), "no repository of that name"
    assert "| fine-tuned from | base (a local folder) |" in (tmp_path / "tuned" / "README.md").read_text()
    assert base.run.base_model is None


def test_the_card_says_of_decoding_what_is_not_neutral():
    settings = GenerationConfig(num_beams=4, length_penalty=0.5, max_length=512, no_repeat_ngram_size=2)
    text = decoding_text(settings)
    assert text == "beam 4, length penalty n ** 0.5, at most 512 tokens, no_repeat_ngram_size 2"
    assert decoding_text(settings, 1, 13) == "greedy, at most 12 tokens, no_repeat_ngram_size 2"


def test_a_best_update_that_was_never_saved_is_not_told_as_kept(tiny_tokenizer, tmp_path):
    trainer = trainer_for(
        tiny_tokenizer,
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        learning_rate=0.3,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first update's is the largest here
        generation_max_length=9,
        generation_num_beams=1,
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint is None
    assert trainer.run.kept_update is None
    (evaluation,) = trainer.run.evaluations
    assert evaluation["decoding"] == "greedy, at most 8 tokens"


def test_a_second_resume_does_not_make_the_unknown_known(tiny_tokenizer, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer_for(tiny_tokenizer, tmp_path, max_steps=2, **saving).train()
    (tmp_path / "checkpoint-2" / "training_run.json").unlink()
    for steps in (4, 6):
        trainer = trainer_for(tiny_tokenizer, tmp_path, max_steps=steps, **saving)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.run.resumed_at == 2


def test_unknown_languages_leave_whole_sentences():
    card = str(
        model_card(VanillaTransformerConfig(), TrainingRun(preset="base"), model_id="user/model", num_parameters=7)
    )
    assert "preset base, for translation." in card
    assert "It knows one direction and the kind of text" in card
    changed = TrainingRun(preset="base", config_overrides=["d_model=32"])
    card = str(model_card(VanillaTransformerConfig(), changed, model_id="user/model", num_parameters=7))
    assert "a shape of its own, for translation." in card


def test_other_models_in_our_trainer_get_the_stock_card(tiny_tokenizer, tmp_path):
    trainer = trainer_for(tiny_tokenizer, tmp_path, model=varied_marian(tiny_tokenizer))
    trainer.save_model()
    assert not (tmp_path / "README.md").exists()
    trainer.create_model_card(model_name="marian")
    assert "generated_from_trainer" in (tmp_path / "README.md").read_text()


def test_the_arguments_told_are_those_that_were_chosen(tmp_path):
    arguments = VanillaTransformerTrainingArguments(
        output_dir=str(tmp_path), seed=7, weight_decay=0.25, hub_token="secret", run_name="mine", max_steps=5
    )
    told = changed_arguments(arguments)
    assert (told["seed"], told["weight_decay"], told["max_steps"], told["tokens_per_batch"]) == (7, 0.25, 5, 4096)
    assert "secret" not in str(told)
    assert "mine" not in str(told)
    assert str(tmp_path) not in str(told)
    assert "adam_beta1" not in told


@pytest.mark.parametrize("make", [varied_model, varied_marian])
def test_a_saved_pipeline_is_one_folder_with_a_card_and_opens_again(tiny_tokenizer, tmp_path, make):
    model = make(tiny_tokenizer)
    translate = pipeline("translation_en_to_de", model=model, tokenizer=tiny_tokenizer)
    expected = translate("The red train")
    translate.save_pretrained(tmp_path / "saved")
    header = metadata((tmp_path / "saved" / "README.md").read_text())
    assert (header["language"], header["pipeline_tag"]) == (["en", "de"], "translation")
    assert pipeline("translation", model=str(tmp_path / "saved"))("The red train") == expected
    (tmp_path / "saved" / "README.md").write_text("mine")
    translate.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"


# --- What a push sends -----------------------------------------------------------------------------------------------


def test_only_what_belongs_to_the_model_would_go(folder):
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "model.safetensors").write_bytes(b"x")
    for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin", "notes.txt", ".env", "adapter.safetensors"):
        (folder / name).write_bytes(b"private")
    (folder / "attention.png").write_bytes(b"picture")
    files = files_to_push(folder, "user/name")
    assert set(files) == CODE | {
        "README.md",
        "attention.png",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert list(files) == sorted(files)
    assert set(PUSHED) & {"*", "*.bin", "*.pt", "*.pkl"} == set()


def test_a_model_in_several_parts_goes_with_all_of_them(folder, tiny_tokenizer):
    (folder / "model.safetensors").unlink()
    varied_model(tiny_tokenizer).save_pretrained(folder, max_shard_size="20KB")
    parts = {path.name for path in folder.glob("model-*.safetensors")}
    assert len(parts) > 1
    assert parts | {"model.safetensors.index.json"} <= set(files_to_push(folder, "user/name"))
    (folder / min(parts)).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(min(parts))):
        files_to_push(folder, "user/name")


def test_code_that_is_missing_is_added_and_the_card_gets_the_repositorys_name(folder):
    for name in CODE:
        (folder / name).unlink()
    settings = json.loads((folder / "config.json").read_text())
    del settings["auto_map"], settings["custom_pipelines"]
    (folder / "config.json").write_text(json.dumps(settings))
    write_model_card(folder, TrainingRun(source_lang="en", target_lang="de", evaluations=[EVALUATION]))
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nBy hand.\n")
    files = files_to_push(folder, "user/other-name", license="mit")
    assert set(files) >= CODE
    assert {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"} <= set(json.loads(files["config.json"])["auto_map"])
    card = files["README.md"].decode()
    assert 'model="user/other-name"' in card
    assert "By hand." in card
    header = metadata(card)
    assert header["license"] == "mit"
    assert header["model-index"][0]["name"] == "other-name"
    assert 'model="model"' in (folder / "README.md").read_text(), "the folder's own card stays"


def break_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def break_shape(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "d_ff": settings["d_ff"] * 2}))


def break_layers(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "encoder_layers": settings["encoder_layers"] + 1}))


def break_family(folder):
    (folder / "config.json").write_text('{"model_type": "marian"}')


def break_vocabulary(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{number}" for number in range(500)])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "breaking, message",
    [
        (shutil.rmtree, "expected the folder of a model"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (break_weights, "not a whole safetensors file"),
        (break_shape, "do not belong together"),
        (break_layers, "the weights lack"),
        (break_family, "type 'marian'"),
        (break_vocabulary, "knows"),
    ],
)
def test_a_folder_that_nobody_could_use_is_refused_in_one_line(folder, capsys, breaking, message):
    breaking(folder)
    try:
        code = vanilla_transformer_cli.main(["push", "--model", str(folder), "--repo_id", "user/name", "--dry_run"])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_dry_run_shows_files_sizes_and_card_and_touches_nothing(folder, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = ["push", "--model", str(folder), "--repo_id", "user/name", "--dry_run", "--revision", "trial"]
    assert vanilla_transformer_cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "user/name, branch trial" in shown
    for name in CODE | {"model.safetensors", "tokenizer.json"}:
        size = (folder / name).stat().st_size
        assert re.search(rf"{re.escape(name)} +{size:,} bytes", shown), name
    assert 'pipeline("translation", model="user/name"' in shown
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["a/b/c", "", "user/na me", "user/.."])
def test_a_name_that_the_hub_does_not_take_is_refused_before_anything_is_sent(folder, capsys, name):
    code = vanilla_transformer_cli.main(["push", "--model", str(folder), f"--repo_id={name}"])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- A Space ---------------------------------------------------------------------------------------------------------


def test_a_space_holds_the_page_the_model_and_the_code_of_both(folder):
    write_model_card(folder, TrainingRun(source_lang="en", target_lang="de"))
    (folder / "optimizer.pt").write_bytes(b"state")
    files = files_of_space(folder, "user/my-page", license="mit")
    model = {name.removeprefix("model/") for name in files if name.startswith("model/")}
    assert model == set(files_to_push(folder, "user/my-page"))
    assert 'pipeline("translation", model="model"' in files["model/README.md"].decode(), "a folder of the Space"
    assert {name for name in files if "/" not in name} == {"README.md", "app.py", "requirements.txt"}
    header = metadata(files["README.md"].decode())
    assert (header["sdk"], header["app_file"], header["title"]) == ("gradio", "app.py", "my-page")
    assert header["license"] == "mit"
    assert "en to de" in header["short_description"]
    assert card_errors(files["README.md"].decode(), in_space=True) == []
    compile(files["app.py"], "app.py", "exec")  # what it does: see the test after the next
    names = [re.match(r"[\w-]+", line)[0] for line in files["requirements.txt"].decode().splitlines()]
    assert {"torch", "transformers", "gradio", "datasets"} <= set(names)


def test_a_dry_run_of_a_space_shows_its_app_and_requirements_and_writing_it_sends_nothing(folder, capsys, tmp_path):
    command = ["push", "--model", str(folder), "--repo_id", "user/page", "--space"]
    assert vanilla_transformer_cli.main([*command, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "would go to the Space user/page, main branch" in shown
    assert "sdk: gradio" in shown
    assert "from vanilla_transformer.serving import serve" in shown
    assert re.search(r"^torch==", shown, re.MULTILINE)
    assert vanilla_transformer_cli.main([*command, "--output_dir", str(tmp_path / "space")]) == 0
    written = {str(path.relative_to(tmp_path / "space")) for path in (tmp_path / "space").rglob("*") if path.is_file()}
    assert written == set(files_of_space(folder, "user/page"))
    assert (tmp_path / "space" / "model" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    with pytest.raises(SystemExit):
        vanilla_transformer_cli.main([*command, "--output_dir", str(tmp_path / "space")])
    assert "is not empty" in capsys.readouterr().err
    for wrong in (command[:-1], [*command, "--dry_run"]):  # no Space; nothing to be written
        assert vanilla_transformer_cli.main([*wrong, "--output_dir", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "answer, code, told",
    [
        ("print(options['port'])", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        (
            "raise OSError('port 7861 is in use')",
            1,
            "app.py: error: port 7861 is in use (GRADIO_SERVER_PORT is the port)",
        ),
    ],
)
def test_the_app_of_a_space_ends_without_a_traceback(folder, tmp_path, answer, code, told):
    """Around a page that is interrupted, or cannot listen."""
    (tmp_path / "app.py").write_bytes(files_of_space(folder, "user/page")["app.py"])
    (tmp_path / "vanilla_transformer").mkdir()
    (tmp_path / "vanilla_transformer" / "__init__.py").touch()
    page = f"def serve(*names, **options):\n    {answer}\n"
    (tmp_path / "vanilla_transformer" / "serving.py").write_text(page, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "GRADIO_SERVER_PORT": "7861"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (code, told)
    assert done.stdout.strip() == ("7861" if code == 0 else "")


@pytest.mark.slow
def test_a_space_opens_its_model_where_the_package_is_not(folder, tmp_path):
    write_space(folder, tmp_path / "space", "user/page")
    code = (
        "import sys; sys.path.insert(0, '.'); import app, vanilla_transformer;"
        "from vanilla_transformer.serving import open_served_model, translate_text;"
        "print(vanilla_transformer.__file__);"
        "print(translate_text(open_served_model('model'), 'The red train.', 4, 1)[0][0].hypothesis.text)"
    )
    # Without PYTHONPATH; what an editable install names comes after the folder itself.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "space",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, text = done.stdout.splitlines()
    assert Path(where).parent == tmp_path / "space" / "vanilla_transformer"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert text == next(translate_lines(model, tokenizer, ["The red train."]))[0].text


# --- The cards of the repository -------------------------------------------------------------------------------------


PUBLISHED = sorted(path.parent for path in CARDS.glob("*/training_run.json"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_a_published_card_is_what_the_template_makes_of_its_record(folder):
    config = VanillaTransformerConfig.from_pretrained(folder)
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    card = model_card(
        config,
        TrainingRun.load(folder),
        model_id=folder.name,
        num_parameters=parameters,
        generation_config=GenerationConfig.from_pretrained(folder),
        longest_source=1024,
        license="apache-2.0",
    )
    assert str(card) == (folder / "README.md").read_text(encoding="utf-8")


def test_the_template_travels_in_the_wheel():
    settings = (CARDS.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '"model_cards/template.md" = "vanilla_transformer/model_cards/template.md"' in settings
