"""The Transformers of JoeyNMT: equal logits and translations, and a reason where it cannot be equal.

The oracle is a plain PyTorch model with JoeyNMT's names of weights (`foreign_models`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from transformers import AutoTokenizer

import vanilla_transformer_cli as cli
from foreign_models import (
    Joey,
    Rules,
    assert_equal_logits,
    assert_equal_searches,
    assert_hostile_files_are_refused,
    assert_refused,
    random_rows,
)
from vanilla_transformer.convert import convert_from
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]
START, END = 2, 3
SOURCE_WORDS = [*SPECIAL, "the", "red", "train", "leaves", "at", "seven", "12", "im"]
TARGET_WORDS = [*SPECIAL, "im", "rote", "Zug", "fährt", "um", "sieben", "ab", "12", "Regen", "der", "die", "das"]
STACK = {
    "type": "transformer",
    "num_layers": 2,
    "num_heads": 4,
    "embeddings": {"embedding_dim": 16, "scale": True, "dropout": 0.0},
    "hidden_size": 16,
    "ff_size": 24,
    "dropout": 0.2,
    "layer_norm": "pre",
}
CONFIG = {
    "name": "small",
    "data": {"src": {"lang": "en", "level": "word"}, "trg": {"lang": "de", "level": "word"}},
    "testing": {"beam_size": 5, "beam_alpha": 1.0, "max_output_length": 30},
    "training": {"epochs": 3},
    "model": {"encoder": STACK, "decoder": {**STACK, "num_layers": 3}},
}
BOTH = ("model.encoder", "model.decoder")
POST = {f"{stack}.layer_norm": "post" for stack in BOTH}
# What the model is built with, and what the settings then say.
CASES = {
    "pre-norm": ({}, {}),
    "pre-norm of the first version": ({}, {f"{stack}.layer_norm": None for stack in BOTH}),
    "post-norm": ({"pre": False}, POST),
    "not scaled": ({"scales": (False, False)}, {f"{stack}.embeddings.scale": None for stack in BOTH}),
    "only the source scaled": ({"scales": (True, False)}, {"model.decoder.embeddings.scale": False}),
    "only the target scaled": ({"scales": (False, True)}, {"model.encoder.embeddings.scale": False}),
    "softmax tied": ({"tied_softmax": True}, {"model.tied_softmax": True}),
    "one matrix": (
        {"tied_softmax": True, "tied_embeddings": True, "source_words": len(TARGET_WORDS)},
        {"model.tied_softmax": True, "model.tied_embeddings": True, "model.decoder.embeddings.scale": False},
    ),
    "gelu": ({"activation": nn.GELU()}, {f"{stack}.activation": "gelu" for stack in BOTH}),
    "swish": ({"activation": nn.SiLU()}, {f"{stack}.activation": "swish" for stack in BOTH}),
}


def config_with(changes: dict) -> dict:
    """The settings with others at their dotted places; None takes one away."""
    config = json.loads(json.dumps(CONFIG))
    for place, value in changes.items():
        *parts, last = place.split(".")
        part = config
        for each in parts:
            part = part.setdefault(each, {})
        if value is None:
            part.pop(last, None)
        else:
            part[last] = value
    return config


def saved(folder: Path, options: dict | None = None, changes: dict | None = None, dtype=torch.float32) -> Joey:
    """A trained model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"source_words": len(SOURCE_WORDS), "target_words": len(TARGET_WORDS), **(options or {})}
    model = Joey(**options).to(dtype)
    source = TARGET_WORDS if options["source_words"] == len(TARGET_WORDS) else SOURCE_WORDS
    (folder / "src_vocab.txt").write_text("\n".join(source) + "\n", encoding="utf-8")
    (folder / "trg_vocab.txt").write_text("\n".join(TARGET_WORDS) + "\n", encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config_with(changes or {})), encoding="utf-8")
    torch.save(checkpoint(model), folder / "best.ckpt")
    return model


def checkpoint(model: Joey, **changes) -> dict:
    return {"steps": 7, "best_ckpt_score": np.float64(3.5), "model_state": model.state_dict(), **changes}


def opened(folder: Path):
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()


def ids_of(folder: Path, options: dict) -> tuple[list[int], list[int]]:
    vocab = AutoTokenizer.from_pretrained(folder).vocab
    source = TARGET_WORDS if options.get("source_words") else SOURCE_WORDS
    return [vocab[word] for word in source], [vocab[word] for word in TARGET_WORDS]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-5)])
@pytest.mark.parametrize("options, changes", CASES.values(), ids=CASES)
def test_the_original_and_its_conversion_have_equal_logits(options, changes, dtype, tolerance, tmp_path):
    theirs = saved(tmp_path / "theirs", options, changes, dtype)
    convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    assert ours.dtype == dtype
    sources = random_rows((9, 4, 1), 4, len(SOURCE_WORDS), first=[0], last=[END])
    targets = random_rows((12, 12, 12), 4, len(TARGET_WORDS), first=[START, 0], seed=2)
    assert_equal_logits(theirs, ours, *ids_of(tmp_path / "ours", options), sources, targets, tolerance)
    assert ours.config.tie_word_embeddings == bool(options.get("tied_embeddings"))


@pytest.mark.parametrize("case, seed", [("pre-norm", 0), ("post-norm", 8), ("one matrix", 7)])
def test_the_original_and_its_conversion_translate_alike(case, seed, tmp_path):
    options, changes = CASES[case]
    theirs = saved(tmp_path / "theirs", {**options, "seed": seed}, changes)
    convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    sources = random_rows((3, 5, 1, 7, 4, 6, 2, 5, 8, 3), 4, len(SOURCE_WORDS), last=[END])
    ids = ids_of(tmp_path / "ours", options)
    assert_equal_searches(theirs, opened(tmp_path / "ours"), *ids, sources, Rules(START, END))


# --- Text and settings ----------------------------------------------------------------------------------------------


def test_text_goes_in_and_out_by_the_vocabularies(tmp_path):
    saved(tmp_path / "theirs")
    # Special words are added in front where a file lacks them.
    (tmp_path / "theirs" / "src_vocab.txt").write_text("\n".join(SOURCE_WORDS[4:]), encoding="utf-8")
    convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    words = ["the", "train", "<unk>", "im", "</s>"]
    assert tokenizer("the train never im").input_ids == [tokenizer.vocab[word] for word in words]
    row = [tokenizer.vocab[word] for word in ("<s>", "rote", "<unk>", "Zug", "</s>", "<pad>")]
    assert tokenizer.decode(row, skip_special_tokens=True) == "rote <unk> Zug"


@pytest.mark.parametrize("space", ["\u2581", " "])
def test_characters_may_be_the_words(space, tmp_path):
    changes = {"data.src.level": "char", "data.trg.level": "char"}
    if space == " ":  # the first version has one level for both sides
        changes = {"data.src": "en", "data.trg": "de", "data.level": "char"}
    saved(tmp_path / "theirs", {}, changes)
    characters = [*SPECIAL, *"abcdefg", space]
    (tmp_path / "theirs" / "src_vocab.txt").write_text("\n".join(characters) + "\n", encoding="utf-8")
    convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("ab  z").input_ids == [4, 5, 11, 11, 0, 3]
    assert tokenizer.decode([2, 4, 5, 11, 0, 3, 1], skip_special_tokens=True) == "ab <unk>"


def test_settings_come_along_and_what_is_different_is_said(tmp_path, capsys):
    changes = {"data.src.lowercase": True, "data.src.level": "bpe", "data.trg.tokenizer_cfg.pretokenizer": "moses"}
    changes |= {"testing.no_repeat_ngram_size": 3, "testing.generate_unk": False}
    saved(tmp_path / "theirs", {}, changes)
    argv = ["convert", "--from", "joeynmt", "--model", str(tmp_path / "theirs")]
    assert cli.main([*argv, "--output_dir", str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    card = (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    for each in (
        "lowercase, level bpe of the source is not done here",
        "pretokenizer moses of the target is not done here",
        "50 sinusoids is computed here",
        "size=3 is not taken over",
    ):
        assert each in told
        assert each in card
    ours = opened(tmp_path / "ours")
    assert (ours.config.dropout, ours.config.layer_norm_eps, ours.config.norm_first) == (0.2, 1e-6, True)
    settings = ours.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (5, 1.0, "gnmt")
    assert (settings.max_new_tokens, settings.suppress_tokens) == (30, [0])


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"testing": None}, {"num_beams": 1, "max_new_tokens_over_source": 50}),
        ({"testing": {"beam_size": 3}}, {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"}),
        ({"testing": {"beam_size": 3, "alpha": 0.5}}, {"length_penalty": 0.5, "length_penalty_type": "gnmt"}),
        ({"testing": None, "training.max_output_length": 60}, {"max_new_tokens": 60}),
    ],
)
def test_decoding_is_that_of_the_settings(changes, expected, tmp_path):
    saved(tmp_path / "theirs", {}, changes)
    told = convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    settings = opened(tmp_path / "ours").generation_config
    assert {name: getattr(settings, name) for name in expected} == expected
    assert any("1.5 times" in line for line in told) == ("max_new_tokens" not in expected)


# --- Mistakes -------------------------------------------------------------------------------------------------------


def test_hostile_files_are_one_line_and_leave_nothing(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs")
    assert_hostile_files_are_refused(
        capsys,
        "joeynmt",
        tmp_path / "theirs",
        "best.ckpt",
        lambda planted, path: torch.save(checkpoint(theirs, optimizer_state=planted), path),
    )
    (tmp_path / "theirs" / "best.ckpt").rename(tmp_path / "theirs" / "model.ckpt")
    convert_from("joeynmt", tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs" / "model.ckpt").unlink()
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", "no best.ckpt in the folder")


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "model.encoder.type is 'recurrent'"),
        (b"- 1\n", "model.encoder.type is 'recurrent'"),
        (b"model: [", "config.yaml is no YAML file"),
        (b"\xff\xfe\x00", "config.yaml is no YAML file"),
        (b"[" * 20000, "config.yaml is no YAML file"),
        (b"model: !!python/object/apply:os.system [ls]\n", "config.yaml is no YAML file"),
        (LAUGHS.encode(), "config.yaml has more than 10000 settings"),
    ],
    ids=["empty", "list", "open", "binary", "deep", "code", "aliases"],
)
def test_settings_of_another_form_are_one_line(content, reason, tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.yaml").write_bytes(content)
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "options, changes, reason",
    [
        ({}, {"model.decoder.type": "recurrent"}, "model.decoder.type is 'recurrent'; only the transformers"),
        ({}, {"model.encoder.layer_norm": "post"}, "layer_norm is 'post' in the encoder and 'pre' in the decoder"),
        ({"pre": False}, {f"{each}.layer_norm": None for each in BOTH}, "tells no model.encoder.layer_norm"),
        ({}, {f"{each}.layer_norm": "both" for each in BOTH}, "this package's model has 'pre' or 'post' in both"),
        ({}, {"model.encoder.num_heads": 2}, "num_heads is 2 in the encoder and 4 in the decoder"),
        ({}, {f"{each}.num_heads": 3 for each in BOTH}, "divides d_model=16, got num_heads=3"),
        ({}, {f"{each}.alpha": 1.2 for each in BOTH}, "weights residuals by alpha=1.2"),
        ({}, {"model.encoder.alpha": 1.2}, "alpha is 1.2 in the encoder and 1.0 in the decoder"),
        ({}, {f"{each}.activation": "tanh" for each in BOTH}, "activation='tanh'; this package's model has only"),
        ({}, {"data.special_symbols": {"lang_tags": ["<en>"]}}, "lang_tags or sep_token"),
        ({}, {"data.special_symbols": {"unk_id": 3}}, "with the ids 0 to 3 in the order unk, pad, bos, eos"),
        ({}, {"data.special_symbols": {"pad_token": 7}}, "must be words with the ids 0 to 3"),
        ({}, {"data.trg.level": "char"}, "the source's level is 'word' and the target's 'char'"),
        ({}, {"testing.beam_size": 0}, "testing.beam_size must be a number"),
        ({}, {"testing.beam_alpha": "x"}, "testing.beam_alpha must be a number"),
    ],
)
def test_settings_that_cannot_be_equalled_are_refused_with_the_reason(options, changes, reason, tmp_path, capsys):
    saved(tmp_path / "theirs", options, changes)
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("src_embed.lut.weight", None, "lacks the weight src_embed.lut.weight"),
        (
            "decoder.layers.0.src_trg_att.k_layer.bias",
            None,
            "lacks the weight decoder.layers.0.src_trg_att.k_layer.bias",
        ),
        ("decoder.layer_norm.weight", None, "last normalisation after the encoder alone"),
        ("encoder.layers.1.feed_forward.pwff_layer.3.weight", torch.zeros(16, 23), "(16, 23), expected (16, 24)"),
        ("trg_embed.lut.weight", torch.zeros(17, 16), "the weights are of 17 target words, but"),
        ("encoder.layers.0.gate.weight", torch.zeros(2), "no place for, such as encoder.layers.0.gate.weight"),
        ("decoder.pe.pe", torch.zeros(1, 50, 8), "the table of positions decoder.pe.pe has the shape (1, 50, 8)"),
        ("encoder.layers.4.layer_norm.weight", torch.zeros(16), "found 0, 1, 4"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_reason(name, change, reason, tmp_path, capsys):
    state = saved(tmp_path / "theirs").state_dict()
    if change is None:
        del state[name]
    else:
        state[name] = change
    torch.save({"model_state": state}, tmp_path / "theirs" / "best.ckpt")
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize("file", ["config.yaml", "src_vocab.txt", "trg_vocab.txt"])
def test_a_missing_file_is_named(file, tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / file).unlink()
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", f"no {file} in the folder")


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "trg_vocab.txt").write_bytes(b"a\n\xff\n")
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", "trg_vocab.txt, line 2: not in UTF-8")
    (tmp_path / "theirs" / "trg_vocab.txt").write_bytes(b"a\n")
    reason = "the weights are of 16 target words, but the target vocabulary has 5"
    assert_refused(capsys, "joeynmt", tmp_path / "theirs", tmp_path / "new", reason)
