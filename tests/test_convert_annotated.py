"""Models in the style of "The Annotated Transformer": equal logits but for the place of eps, whose effect is measured.

The oracle is a plain PyTorch model with that code's names of weights and its layer norm (`foreign_models`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import foreign_models
import vanilla_transformer_cli as cli
from foreign_models import (
    Annotated,
    Rules,
    assert_equal_logits,
    assert_equal_searches,
    assert_hostile_files_are_refused,
    assert_refused,
    random_rows,
    write_json,
)
from vanilla_transformer.convert import convert_from
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


SPECIAL = ["<s>", "</s>", "<blank>", "<unk>"]
START, END = 0, 1
SOURCE_WORDS = [*SPECIAL, "the", "red", "train", "leaves", "at", "seven", "12", "im"]
TARGET_WORDS = [*SPECIAL, "im", "rote", "Zug", "fährt", "um", "sieben", "ab", "12", "Regen", "der", "die", "das"]
DESCRIPTION = {
    "weights": "model.pt",
    "num_heads": 4,
    "source_vocabulary": SOURCE_WORDS,
    "target_vocabulary": TARGET_WORDS,
}


def saved(folder: Path, options: dict | None = None, changes: dict | None = None, dtype=torch.float32) -> Annotated:
    """A model and its description in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Annotated(len(SOURCE_WORDS), len(TARGET_WORDS), **(options or {})).to(dtype)
    torch.save(model.state_dict(), folder / "model.pt")
    description = {**DESCRIPTION, **(changes or {})}
    write_json(folder / "annotated.json", {name: each for name, each in description.items() if each is not None})
    return model


def opened(folder: Path):
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()


def ids_of(folder: Path) -> tuple[list[int], list[int]]:
    vocab = AutoTokenizer.from_pretrained(folder).vocab
    return [vocab[word] for word in SOURCE_WORDS], [vocab[word] for word in TARGET_WORDS]


def told_difference(told: list[str]) -> float:
    """The difference of logits that the conversion measured."""
    (line,) = [each for each in told if "added to the standard deviation" in each]
    return float(re.search(r"differ by up to (\S+)$", line)[1])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-5)])
@pytest.mark.parametrize(
    "options, changes",
    [
        ({}, {}),
        ({"own": False, "eps": 1e-5}, {}),
        ({"own": False, "eps": 0.1}, {"layer_norm_eps": 0.1}),
    ],
    ids=["its own norms", "torch's norms", "torch's norms with another epsilon"],
)
def test_the_original_and_its_conversion_have_equal_logits(options, changes, dtype, tolerance, tmp_path):
    theirs = saved(tmp_path / "theirs", options, changes, dtype)
    told = convert_from("annotated", tmp_path / "theirs", tmp_path / "ours")
    ours = opened(tmp_path / "ours")
    assert ours.dtype == dtype
    sources = random_rows((9, 4, 1), 3, len(SOURCE_WORDS), first=[START], last=[END])
    targets = random_rows((12, 12, 12), 3, len(TARGET_WORDS), first=[START], seed=2)
    assert_equal_logits(theirs, ours, *ids_of(tmp_path / "ours"), sources, targets, tolerance)
    assert any("standard deviation" in line for line in told) == options.get("own", True)


def test_the_original_and_its_conversion_translate_alike(tmp_path):
    theirs = saved(tmp_path / "theirs", {"seed": 1})
    convert_from("annotated", tmp_path / "theirs", tmp_path / "ours")
    sources = random_rows((3, 5, 1, 7, 4, 6, 2, 5, 8, 3), 3, len(SOURCE_WORDS), first=[START], last=[END])
    ids = ids_of(tmp_path / "ours")
    assert_equal_searches(theirs, opened(tmp_path / "ours"), *ids, sources, Rules(START, END))


def test_the_effect_of_the_place_of_eps_is_measured_and_told(tmp_path, monkeypatch):
    """The told difference is of the size of that of other sentences, and grows with eps."""
    told = []
    # Positions in single precision are not what is measured.
    monkeypatch.setattr(foreign_models, "paper_table", exact_table)
    for eps in (1e-6, 1e-4):
        folder, output = tmp_path / f"theirs{eps}", tmp_path / f"ours{eps}"
        theirs = saved(folder, {"eps": eps}, {"layer_norm_eps": eps}, torch.float64)
        told.append(told_difference(convert_from("annotated", folder, output)))
        ours, (source_ids, target_ids) = opened(output), ids_of(output)
        measured = 0.0
        sources = random_rows([10] * 16, 4, len(SOURCE_WORDS))
        targets = random_rows([12] * 16, 4, len(TARGET_WORDS), seed=2)
        for source, target in zip(sources, targets, strict=True):
            with torch.no_grad():
                found = ours(
                    torch.tensor([[source_ids[word] for word in source]]),
                    decoder_input_ids=torch.tensor([[target_ids[word] for word in target]]),
                ).logits[0, :, target_ids]
                expected = theirs(source, target)
            measured = max(measured, (found - expected).abs().max().item())
        assert told[-1] / 4 < measured < told[-1] * 4
    assert 50 < told[1] / told[0] < 200


def exact_table(length: int, d_model: int) -> torch.Tensor:
    """The paper's sinusoids in double precision."""
    place = torch.arange(length, dtype=torch.float64)[:, None]
    angles = place / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def test_an_eps_that_changes_the_model_is_refused(tmp_path, capsys):
    saved(tmp_path / "theirs", {"eps": 0.1}, {"layer_norm_eps": 0.1})
    reason = "too much for the same model"
    assert_refused(capsys, "annotated", tmp_path / "theirs", tmp_path / "new", reason)


def test_names_may_have_a_prefix_and_the_card_says_what_is_different(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs", {}, {"prefix": "module.", "state_dict": "net", "generation": {"num_beams": 1}})
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"net": state}, tmp_path / "theirs" / "model.pt")
    argv = ["convert", "--from", "annotated", "--model", str(tmp_path / "theirs")]
    assert cli.main([*argv, "--output_dir", str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    card = (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    for each in ("to the standard deviation there", "words are one of", "50 sinusoids is computed here"):
        assert each in told
        assert each in card
    assert told.count("differ by up to") == 1
    ours, tokenizer = opened(tmp_path / "ours"), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.generation_config.num_beams == 1
    assert (ours.config.norm_first, ours.config.has_final_norm, ours.config.position_embedding) == (
        True,
        True,
        "sinusoidal",
    )
    words = ["<s>", "the", "<unk>", "</s>"]
    assert tokenizer("the  night").input_ids == [tokenizer.vocab[word] for word in words]
    assert (tokenizer.pad_token, tokenizer.model_max_length) == ("<blank>", 50)


# --- Mistakes -------------------------------------------------------------------------------------------------------


def test_hostile_files_are_one_line_and_leave_nothing(tmp_path, capsys):
    theirs = saved(tmp_path / "theirs")
    assert_hostile_files_are_refused(
        capsys,
        "annotated",
        tmp_path / "theirs",
        "model.pt",
        lambda planted, path: torch.save({**theirs.state_dict(), "extra": planted}, path),
    )
    torch.save(theirs, tmp_path / "theirs" / "model.pt")  # the whole module, as some save it
    reason = "it would have to call foreign_models.Annotated, and nothing in a checkpoint is run"
    assert_refused(capsys, "annotated", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("encoder.layers.1.sublayer.1.norm.a_2", None, "lacks the weight encoder.layers.1.sublayer.1.norm.a_2"),
        (
            "decoder.layers.2.src_attn.linears.3.bias",
            None,
            "lacks the weight decoder.layers.2.src_attn.linears.3.bias",
        ),
        ("generator.proj.bias", None, "lacks the weight generator.proj.bias"),
        (
            "tgt_embed.0.lut.weight",
            torch.zeros(16, 8),
            "tgt_embed.0.lut.weight has the shape (16, 8), expected (any, 16)",
        ),
        ("src_embed.1.pe", torch.zeros(1, 50, 8), "the table of positions src_embed.1.pe has the shape (1, 50, 8)"),
        ("decoder.layers.0.gate.weight", torch.zeros(2), "no place for, such as decoder.layers.0.gate.weight"),
        ("encoder.layers.1.sublayer.1.norm.b_2", torch.full((16,), float("nan")), "would differ by up to nan"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_reason(name, change, reason, tmp_path, capsys):
    state = saved(tmp_path / "theirs").state_dict()
    if change is None:
        del state[name]
    else:
        state[name] = change
    torch.save(state, tmp_path / "theirs" / "model.pt")
    assert_refused(capsys, "annotated", tmp_path / "theirs", tmp_path / "new", reason)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_heads": 3}, "num_heads must be a whole number that divides d_model=16, got num_heads=3"),
        ({"num_heads": None}, "lacks the field 'num_heads'"),
        ({"norm_first": True}, "unknown field 'norm_first'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be positive"),
        ({"prefix": "module."}, "lacks the weight module.src_embed.0.lut.weight"),
        ({"pad_token": "<pad>"}, "no vocabulary has '<pad>'"),
        ({"activation": "tanh"}, "activation must be one of"),
    ],
)
def test_a_description_that_does_not_fit_is_refused_with_the_reason(changes, reason, tmp_path, capsys):
    saved(tmp_path / "theirs", {}, changes)
    assert_refused(capsys, "annotated", tmp_path / "theirs", tmp_path / "new", reason)
