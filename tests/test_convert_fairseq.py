"""The transformer models of fairseq: equal logits and translations, and a reason where it cannot be equal.

The oracle is a plain PyTorch model with fairseq's names of weights and its formula of positions (`foreign_models`).
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import vanilla_transformer_cli as cli
from foreign_models import (
    Fairseq,
    Rules,
    assert_equal_logits,
    assert_equal_searches,
    assert_hostile_files_are_refused,
    assert_refused,
    fairseq_position,
    random_rows,
)
from vanilla_transformer.convert import convert_from
from vanilla_transformer.convert.fairseq import position_table
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation import load_translator, translate_lines


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PAD, END, UNKNOWN = 1, 2, 3
SOURCE_WORDS = [*SPECIAL, "the", "red", "tra@@", "in", "leaves", "at", "seven", "12", "Haus", "im", "madeupword0000"]
TARGET_WORDS = [
    *SPECIAL,
    "im",
    "Haus",
    "rote",
    "Zug",
    "f@@",
    "ährt",
    "um",
    "sieben",
    "ab",
    "12",
    "Regen",
    "der",
    "die",
]
TARGET_WORDS += ["das", "und", "nicht"]
ARGS = {
    "arch": "transformer_iwslt_de_en",
    "source_lang": "en",
    "target_lang": "de",
    "activation_fn": "relu",
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "relu_dropout": 0.2,
    "label_smoothing": 0.2,
    "max_source_positions": 60,
    "max_target_positions": 40,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": False,
    "adaptive_softmax_cutoff": None,
    **{
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (
            ("embed_dim", 16),
            ("attention_heads", 4),
            ("normalize_before", False),
            ("learned_pos", False),
        )
    },
}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
JOINED = {"source_words": len(TARGET_WORDS)}
# What the model is built with, and what the settings then say.
CASES = {
    "post-norm": ({}, {}),
    "pre-norm": ({"pre_norm": True}, PRE_NORM),
    "pre-norm, no last norm": ({"pre_norm": True, "final": False}, PRE_NORM),
    "output tied": ({"tied": "target"}, {"share_decoder_input_output_embed": True}),
    "one matrix": ({"tied": "all", **JOINED}, {"share_all_embeddings": True}),
    "one matrix, not scaled": (
        {"tied": "all", "scaled": False, **JOINED},
        {"share_all_embeddings": True, "no_scale_embedding": True},
    ),
    "joined dictionary, three matrices": (JOINED, {}),
    "gelu": ({"activation": torch.nn.functional.gelu}, {"activation_fn": "gelu"}),
    "swish": ({"activation": torch.nn.functional.silu}, {"activation_fn": "swish"}),
    "odd d_model": ({"d_model": 15, "num_heads": 3}, {"encoder_attention_heads": 3, "decoder_attention_heads": 3}),
    "learned positions": ({"learned": (60, 40)}, LEARNED),
}


def written(folder: Path, words: list[str]) -> None:
    folder.write_text("".join(f"{word} {90 - place}\n" for place, word in enumerate(words[4:])), encoding="utf-8")


def saved(folder: Path, options: dict | None = None, changes: dict | None = None, dtype=torch.float32) -> Fairseq:
    """A checkpoint with its dictionaries in a folder, the settings in a Namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"source_words": len(SOURCE_WORDS), "target_words": len(TARGET_WORDS), **(options or {})}
    model = Fairseq(**options).to(dtype)
    is_joined = options["source_words"] == len(TARGET_WORDS)
    written(folder / "dict.en.txt", TARGET_WORDS if is_joined else SOURCE_WORDS)
    written(folder / "dict.de.txt", TARGET_WORDS)
    torch.save({"model": state_of(model), **settings(changes)}, folder / "checkpoint_best.pt")
    return model


def state_of(model: Fairseq) -> dict:
    """The state dict with the buffers that fairseq has besides."""
    state = dict(model.state_dict())
    for stack in ("encoder", "decoder"):
        state[f"{stack}.version"] = torch.tensor([3.0])
        if f"{stack}.embed_positions.weight" not in state:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    return state


def settings(changes: dict | None = None) -> dict:
    given = {**ARGS, **(changes or {})}
    given = {name: value for name, value in given.items() if value != "absent"}
    return {"args": argparse.Namespace(**given), "extra_state": {"epoch": 3}, "optimizer_history": [{"lr": 0.1}]}


def opened(folder: Path):
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()


def ids_of(folder: Path, options: dict) -> tuple[list[int], list[int]]:
    """Our ids of the source's and the target's words."""
    vocab = AutoTokenizer.from_pretrained(folder).vocab
    source = TARGET_WORDS if options.get("source_words") else SOURCE_WORDS
    return [vocab[word] for word in source], [vocab[word] for word in TARGET_WORDS]


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 5e-6)])
@pytest.mark.parametrize("options, changes", CASES.values(), ids=CASES)
def test_the_original_and_its_conversion_have_equal_logits(options, changes, dtype, tolerance, tmp_path):
    theirs = saved(tmp_path / "theirs", options, changes, dtype)
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    assert ours.dtype == dtype
    sources = random_rows((9, 4, 1), 3, len(SOURCE_WORDS), last=[END])
    targets = random_rows((12, 12, 12), 3, len(TARGET_WORDS), first=[END], seed=2)
    assert_equal_logits(theirs, ours, *ids_of(tmp_path / "ours", options), sources, targets, tolerance)
    assert ours.config.tie_word_embeddings == (options.get("tied") == "all" and "scaled" not in options)


@pytest.mark.parametrize(
    "case, seed", [("post-norm", 6), ("pre-norm", 0), ("one matrix", 6), ("learned positions", 1)]
)
def test_the_original_and_its_conversion_translate_alike(case, seed, tmp_path):
    options, changes = CASES[case]
    theirs = saved(tmp_path / "theirs", {**options, "seed": seed}, changes)
    with torch.no_grad():  # ends of sentences that are neither at once nor never
        theirs.decoder.output_projection.weight[END] *= 2
    torch.save({"model": state_of(theirs), **settings(changes)}, tmp_path / "theirs" / "checkpoint_best.pt")
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    sources = random_rows((3, 5, 1, 7, 4, 6, 2, 5, 8, 3), 3, len(SOURCE_WORDS), last=[END])
    rules = Rules(start=END, end=END, never=[PAD], at_once=False)
    assert_equal_searches(theirs, ours, *ids_of(tmp_path / "ours", options), sources, rules)


@pytest.mark.parametrize("d_model", [4, 15, 16, 64])
def test_positions_are_those_of_fairseqs_formula(d_model):
    exact = torch.tensor([fairseq_position(place + 2, d_model) for place in range(300)], dtype=torch.float64)
    torch.testing.assert_close(position_table(300, d_model).double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(position_table(3, d_model).double(), exact[:3], rtol=0, atol=1e-6)


def test_positions_go_as_far_as_the_model_was_made_for(tmp_path):
    saved(tmp_path / "theirs")
    told = convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    ours, tokenizer = opened(tmp_path / "ours"), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.config.max_position_embeddings == tokenizer.model_max_length == 60
    assert any("wavelengths" in line and "60 of them" in line for line in told)
    saved(tmp_path / "learned", *CASES["learned positions"])
    told = convert_from("fairseq", tmp_path / "learned", tmp_path / "others")
    assert opened(tmp_path / "others").config.max_position_embeddings == 40
    assert "tables of 60 and 40 positions are two of 40: longer sentences are cut" in told


# --- Checkpoints of all ages ----------------------------------------------------------------------------------------


def test_a_checkpoint_of_2018_has_other_names(tmp_path):
    options = {"tied": "target", "seed": 5, "pre_norm": True, "final": True}
    theirs = saved(tmp_path / "theirs", {**options, "final": False})
    state = {}
    for name, tensor in theirs.state_dict().items():
        if "layers" in name and "_layer_norm" in name:
            norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
            if name.startswith("encoder"):
                norms.remove("encoder_attn_layer_norm")
            for index, norm in enumerate(norms):
                name = name.replace(norm, f"layer_norms.{index}")
        if "q_proj" in name:
            parts = [theirs.state_dict()[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            name, tensor = name.replace("q_proj.", "in_proj_"), torch.cat(parts)
        if not ("k_proj" in name or "v_proj" in name or "output_projection" in name):
            state[name] = tensor
    # Written then, used by none since.
    for stack in ("encoder", "decoder"):
        for kind in ("weight", "bias"):
            state[f"{stack}.layer_norm.{kind}"] = torch.full((16,), 7.0)
    old = {**PRE_NORM, "share_decoder_input_output_embed": True, "activation_fn": "absent"}
    torch.save(
        {"model": state, **settings(old)}, tmp_path / "theirs" / "model.pt", _use_new_zipfile_serialization=False
    )
    (tmp_path / "theirs" / "checkpoint_best.pt").unlink()
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    sources = random_rows((9, 4, 1), 3, len(SOURCE_WORDS), last=[END])
    targets = random_rows((7, 7, 7), 3, len(TARGET_WORDS), first=[END], seed=2)
    ids = ids_of(tmp_path / "ours", {})
    assert_equal_logits(theirs, opened(tmp_path / "ours"), *ids, sources, targets, 2e-5)


def test_the_last_normalisation_of_a_newer_version_counts(tmp_path):
    """Version 2 of the encoder has one in use, and version 2 of the decoder has not."""
    theirs = saved(tmp_path / "theirs", {"pre_norm": True}, PRE_NORM)
    for versions, is_refused in (((2.0, 3.0), False), ((2.0, 2.0), True), ((1.0, 2.0), False)):
        state = state_of(theirs)
        for stack, version in zip(("encoder", "decoder"), versions, strict=True):
            state[f"{stack}.version"] = torch.tensor([version])
        torch.save({"model": state, **settings(PRE_NORM)}, tmp_path / "theirs" / "checkpoint_best.pt")
        output = tmp_path / f"ours{versions}"
        if is_refused:
            with pytest.raises(ValueError, match="last normalisation after the encoder alone"):
                convert_from("fairseq", tmp_path / "theirs", output)
        else:
            convert_from("fairseq", tmp_path / "theirs", output)
            assert opened(output).config.has_final_norm == (versions[0] == 2.0)


def equal_weights(one: Path, other: Path) -> bool:
    first, second = opened(one).state_dict(), opened(other).state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def fake_class(monkeypatch, module: str, name: str, **options) -> type:
    """A class that pickles under another package's name."""
    for end in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:end])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    made = type(name, (), {"__module__": module, **options})
    monkeypatch.setattr(sys.modules[module], name, made, raising=False)
    return made


def test_newer_settings_lie_in_dictionaries(tmp_path):
    theirs = saved(tmp_path / "theirs", *CASES["pre-norm"])
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    flat = {**ARGS, **PRE_NORM}
    task = {name: flat.pop(name) for name in ("source_lang", "target_lang")}
    nested = {name: value for name, value in flat.items() if not name.startswith(("encoder_", "decoder_"))}
    for stack in ("encoder", "decoder"):
        own = {name: value for name, value in flat.items() if name.startswith(f"{stack}_")}
        nested[stack] = {name.partition("_")[2]: value for name, value in own.items()}
    for number, model in enumerate((flat, nested, argparse.Namespace(**flat))):
        content = {"model": state_of(theirs), "args": None, "cfg": {"model": model, "task": task, "_name": None}}
        torch.save(content, tmp_path / "theirs" / "checkpoint_best.pt")
        convert_from("fairseq", tmp_path / "theirs", tmp_path / f"ours{number}")
        assert equal_weights(tmp_path / "ours", tmp_path / f"ours{number}")


def test_objects_of_omegaconf_and_meters_are_read_without_their_packages(tmp_path, monkeypatch):
    theirs = saved(tmp_path / "theirs", *CASES["pre-norm"])
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    with monkeypatch.context() as patched:
        config = fake_class(patched, "omegaconf.dictconfig", "DictConfig")
        node = fake_class(patched, "omegaconf.nodes", "AnyNode")
        meter = fake_class(patched, "fairseq.meters", "AverageMeter")

        def wrap(value):
            made = config() if isinstance(value, dict) else node()
            if isinstance(value, dict):
                made.__dict__.update(_content={name: wrap(each) for name, each in value.items()}, _parent=None)
            else:
                made.__dict__.update(_val=value)
            return made

        held = meter()
        held.__dict__.update(sum=np.float64(3.5), count=2)
        content = {
            "model": state_of(theirs),
            "cfg": wrap({"model": {**ARGS, **PRE_NORM}, "task": {"source_lang": "en"}}),
            "extra_state": {"train_meters": {"loss": held}, "val_loss": np.float64(1.5)},
        }
        torch.save(content, tmp_path / "theirs" / "checkpoint_best.pt")
    assert "omegaconf" not in sys.modules
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "again")
    assert equal_weights(tmp_path / "ours", tmp_path / "again")


def test_a_half_precision_checkpoint_is_widened(tmp_path):
    theirs = saved(tmp_path / "theirs")
    state = {name: tensor.half() for name, tensor in state_of(theirs).items()}
    torch.save({"model": state, **settings()}, tmp_path / "theirs" / "checkpoint_best.pt")
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    assert ours.dtype == torch.float32
    assert torch.equal(
        ours.model.decoder.layers[2].feed_forward.fc1.weight, state["decoder.layers.2.fc1.weight"].float()
    )
    assert torch.equal(ours.model.encoder.positions.embed_positions.weight, position_table(60, 16))


# --- Text and settings ----------------------------------------------------------------------------------------------


def test_text_goes_in_and_out_as_fairseq_interactive_has_it(tmp_path):
    theirs = saved(tmp_path / "theirs", {"seed": 2})
    (tmp_path / "theirs" / "dict.en.txt").rename(tmp_path / "theirs" / "dict.src.txt")
    convert_from("fairseq", tmp_path / "theirs", tmp_path / "ours")
    model, tokenizer = load_translator(str(tmp_path / "ours"), device="cpu")
    source, target = ids_of(tmp_path / "ours", {})
    line = "  the  red\u3000tra@@ im\tZug in <unk> nowhere\x1f12\u200b ab "
    expected = [SOURCE_WORDS.index(word) if word in SOURCE_WORDS else UNKNOWN for word in line.split()]
    embeddings = model.get_input_embeddings()(torch.tensor(tokenizer(line).input_ids))
    torch.testing.assert_close(embeddings, theirs.encoder.embed_tokens.weight[[*expected, END]], rtol=0, atol=1e-6)
    words = ["</s>", "rote", "f@@", "ährt", "<unk>", "<s>", "12", "</s>", "<pad>"]
    row = [target[TARGET_WORDS.index(word)] for word in words]
    assert tokenizer.decode(row, skip_special_tokens=True) == "rote f@@ ährt <unk> 12"
    assert [each[0].text for each in translate_lines(model, tokenizer, ["", "the red"])][0] == ""


def test_settings_come_along_and_what_is_different_is_said(tmp_path, capsys):
    saved(
        tmp_path / "theirs",
        {"scaled": False, "tied": "all", **JOINED},
        {"no_scale_embedding": True, "encoder_layerdrop": 0.2, "share_all_embeddings": True},
    )
    argv = ["convert", "--from", "fairseq", "--model", str(tmp_path / "theirs")]
    assert cli.main([*argv, "--output_dir", str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    card = (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    for each in ("the embeddings, multiplied by 1 there", "encoder_layerdrop=0.2", "not the paper's"):
        assert each in told
        assert each.replace("_", r"\_") in card
    ours = opened(tmp_path / "ours")
    config, generation = ours.config, ours.generation_config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.3, 0.1, 0.2)
    assert config.label_smoothing == 0.2
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        0,
        1,
        2,
        2,
    )
    assert (generation.num_beams, generation.length_penalty, generation.length_penalty_type) == (5, 1.0, "hub")
    assert (generation.early_stopping, generation.min_new_tokens, generation.suppress_tokens) == (True, 1, [1])
    assert generation.max_new_tokens == 60  # 201 of fairseq, but for positions
    row = ours.generate(torch.tensor([[5, 6, 2]]), num_beams=1, length_penalty=1.0, early_stopping=False)[0].tolist()
    assert len(row) > 2
    assert row[1] != 2


# --- Mistakes -------------------------------------------------------------------------------------------------------


def test_hostile_files_are_one_line_and_leave_nothing(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs")
    for place in ("extra", "model"):

        def save(planted, path, place=place):
            content = {"model": state_of(theirs), **settings(), "extra": None}
            content[place] = {**content["model"], "x": planted} if place == "model" else planted
            torch.save(content, path)

        assert_hostile_files_are_refused(capsys, "fairseq", tmp_path / "theirs", "checkpoint_best.pt", save)


def test_a_class_that_is_none_of_settings_is_refused_by_name(tmp_path, capsys, monkeypatch):
    theirs = saved(tmp_path / "theirs")
    with monkeypatch.context() as patched:
        other = fake_class(patched, "fairseq.tasks.translation", "TranslationTask")
        content = {"model": state_of(theirs), **settings(), "task": other()}
        torch.save(content, tmp_path / "theirs" / "checkpoint_best.pt")
    reason = "it would have to call fairseq.tasks.translation.TranslationTask, and nothing in a checkpoint is run"
    assert_refused(capsys, "fairseq", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"arch": "fconv_wmt_en_de"}, "architecture 'fconv_wmt_en_de'"),
        ({"arch": "transformer_lm_gpt"}, "architecture 'transformer_lm_gpt'"),
        ({"activation_fn": "gelu_accurate"}, "activation_fn='gelu_accurate'"),
        ({"decoder_attention_heads": 2}, "encoder_attention_heads=4 and decoder_attention_heads=2"),
        ({"encoder_normalize_before": True}, "encoder_normalize_before=True and decoder_normalize_before=False"),
        ({"decoder_learned_pos": True}, "encoder_learned_pos=False and decoder_learned_pos=True"),
        ({"layernorm_embedding": True}, "layernorm_embedding=True; this package's model has no normalisation of"),
        ({"no_token_positional_embeddings": True}, "no_token_positional_embeddings=True"),
        ({"adaptive_softmax_cutoff": "10,20"}, "adaptive_softmax_cutoff='10,20'; this package's model has a plain"),
        ({"no_cross_attention": True}, "no_cross_attention=True"),
        ({"cross_self_attention": True}, "cross_self_attention=True"),
        ({"encoder_recurrent_stacking": 3}, "encoder_recurrent_stacking=3"),
        ({"encoder_attention_heads": 5, "decoder_attention_heads": 5}, "divides d_model=16, got num_heads=5"),
        ({"encoder_attention_heads": "absent", "decoder_attention_heads": "absent"}, "got num_heads=None"),
        ({"max_source_positions": 10**9}, "max_source_positions must be a whole number in [1, 100000]"),
        ({"max_target_positions": 0}, "max_target_positions must be a whole number in [1, 100000], got 0"),
        (LEARNED, "lacks the weight encoder.embed_positions.weight"),
        ({"source_lang": "fr"}, "no dict.fr.txt in the folder"),
        ({"source_lang": "../x"}, "no dict.src.txt in the folder"),
        ({"dropout": 1.0}, "dropout must lie in [0, 1)"),
    ],
)
def test_settings_that_cannot_be_equalled_are_refused_with_the_reason(changes, reason, tmp_path, capsys):
    saved(tmp_path / "theirs", {}, changes)
    assert_refused(capsys, "fairseq", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("encoder.layers.1.fc1.weight", None, "lacks the weight encoder.layers.1.fc1.weight"),
        (
            "decoder.layers.0.encoder_attn.k_proj.bias",
            None,
            "lacks the weight decoder.layers.0.encoder_attn.k_proj.bias",
        ),
        ("decoder.output_projection.weight", None, "lacks the weight decoder.output_projection.weight"),
        ("decoder.layers.0.fc2.weight", torch.zeros(16, 23), "has the shape (16, 23), expected (16, 24)"),
        ("decoder.embed_tokens.weight", torch.zeros(20, 8), "has the shape (20, 8), expected (any, 16)"),
        ("decoder.embed_tokens.weight", torch.zeros(21, 16), "the weights are of 21 target words, but"),
        ("decoder.project_in_dim.weight", torch.zeros(16, 16), "no place for, such as decoder.project_in_dim.weight"),
        ("encoder.layer_norm.weight", torch.zeros(16), "last normalisation after the encoder alone"),
        ("encoder.layers.0.adapter.weight", torch.zeros(2), "no place for, such as encoder.layers.0.adapter.weight"),
        ("encoder.layers.7.fc1.weight", torch.zeros(24, 16), "found 0, 1, 7"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_reason(name, change, reason, tmp_path, capsys):
    state = state_of(saved(tmp_path / "theirs"))
    if change is None:
        del state[name]
    else:
        state[name] = change
    torch.save({"model": state, **settings()}, tmp_path / "theirs" / "checkpoint_best.pt")
    assert_refused(capsys, "fairseq", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"the 5\nred\n", "dict.en.txt, line 2: expected a word, a space and a number, got 'red'"),
        (b"the 5\nred x\n", "line 2: expected a word, a space and a number"),
        (b"the 5\nthe 4\n", "line 2: the word 'the' stands twice"),
        (b"<pad> 5\n", "line 1: the word '<pad>' stands twice"),
        (b"<pad> 5 #fairseq:overwrite\n", "line 1: the word"),
        (b"the 5\n\xff 4\n", "line 2: not in UTF-8"),
        (b"the 5\n", "the weights are of 15 source words, but the source vocabulary has 5"),
    ],
)
def test_a_dictionary_of_another_form_is_refused_with_the_line(content, reason, tmp_path, capsys):
    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "dict.en.txt").write_bytes(content)
    assert_refused(capsys, "fairseq", tmp_path / "theirs", tmp_path / "new", reason)


def test_what_is_no_checkpoint_of_fairseq_says_so(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs")
    path, new = tmp_path / "theirs" / "checkpoint_best.pt", tmp_path / "new"
    loop: list = []
    loop.append(loop)
    for content, reason in (
        (state_of(theirs), "has no entry 'model'"),
        ({"model": state_of(theirs)}, "settings neither as 'args' nor as 'cfg'"),
        ({"model": state_of(theirs), "args": 3}, "its settings are of type int"),
        ({"model": state_of(theirs), "cfg": {"model": 3}}, "settings neither as 'args' nor as 'cfg'"),
        ({"model": state_of(theirs), "args": argparse.Namespace(loop=loop)}, "hold one another without end"),
        ({"model": [], **settings()}, "holds no state dict, but an object of type list"),
        ({"model": {"a": 3}, **settings()}, "its entry 'a' is an object of type int"),
    ):
        torch.save(content, path)
        assert_refused(capsys, "fairseq", tmp_path / "theirs", new, reason)
    path.unlink()
    assert_refused(capsys, "fairseq", tmp_path / "theirs", new, "no checkpoint_best.pt in the folder")
