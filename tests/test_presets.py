"""Table 3 of the paper beside ours: the paper's figures as printed, and exact numbers of parameters."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, list_presets
from vanilla_transformer.presets import (
    TABLE_3,
    parameter_count,
    preset_parameter_count,
    vocabulary_sizes_of_the_paper,
)


# Copied by eye from the paper, in its columns: row, PPL (dev), BLEU (dev), params x 10^6 (. where blank).
PRINTED = """
base 4.92 25.8 65
A_h1 5.29 24.9 .
A_h4 5.00 25.5 .
A_h16 4.91 25.8 .
A_h32 5.01 25.4 .
B_dk16 5.16 25.1 58
B_dk32 5.01 25.4 60
C_N2 6.11 23.7 36
C_N4 5.19 25.3 50
C_N8 4.88 25.5 80
C_d256 5.75 24.5 28
C_d1024 4.66 26.0 168
C_ff1024 5.12 25.4 53
C_ff4096 4.75 26.2 90
D_drop0.0 5.77 24.6 .
D_drop0.2 4.95 25.5 .
D_ls0.0 4.67 25.3 .
D_ls0.2 5.47 25.7 .
E_learned 4.92 25.7 .
big 4.33 26.4 213
"""
ROWS_WITH_PARAMETERS = [line.split()[0] for line in PRINTED.split("\n") if line and not line.endswith(".")]
SMALL = {"vocab_size": 50, "d_model": 12, "d_ff": 20, "num_heads": 3, "encoder_layers": 2, "decoder_layers": 3}


def counted(config: VanillaTransformerConfig) -> int:
    """Numbers in the distinct parameters of the model itself, on no device."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_row_has_the_figures_that_the_paper_prints():
    printed = [line.split() for line in PRINTED.strip().split("\n")]
    ours = [
        [
            name,
            f"{result.perplexity:.2f}",
            f"{result.bleu:.1f}",
            "." if result.parameters_in_millions is None else str(result.parameters_in_millions),
        ]
        for name, result in TABLE_3.items()
    ]
    assert ours == printed


def test_every_preset_but_ours_is_a_row_of_the_table():
    assert set(list_presets()) - set(TABLE_3) == {"tiny"}
    assert set(TABLE_3) <= set(list_presets())


def test_big_is_trained_three_times_as_long_and_no_other_row_is():
    steps = {name: result.training_steps for name, result in TABLE_3.items()}
    assert steps.pop("big") == 300_000
    assert set(steps.values()) == {100_000}


def test_known_counts():
    assert preset_parameter_count("base") == 63_045_632
    assert preset_parameter_count("B_dk16") == 55_967_744
    assert preset_parameter_count("big") == 214_171_648
    assert preset_parameter_count("base", vocab_size=8000) == 63_045_632 - 29_000 * 512


@pytest.mark.parametrize("name", list_presets())
@pytest.mark.parametrize("vocab_size", [37_000, 8_000])
def test_the_formula_counts_what_the_model_of_each_preset_has(name, vocab_size):
    assert preset_parameter_count(name, vocab_size) == counted(
        VanillaTransformerConfig.from_preset(name, vocab_size=vocab_size)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "output_bias": True},
        {"output_bias": True},
        {"attention_bias": True},
        {"attention_bias": True, "d_k": 5, "d_v": 7},
        {"d_v": 9},
        {"norm_first": True},
        {"norm_first": True, "final_norm": False},
        {"final_norm": True},
        {"position_embedding": "learned", "max_position_embeddings": 31},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_the_formula_knows_every_part_that_a_configuration_can_add(fields):
    config = VanillaTransformerConfig(**{**SMALL, **fields})
    assert parameter_count(config) == counted(config)


@pytest.mark.parametrize("name", ROWS_WITH_PARAMETERS)
def test_the_vocabulary_that_explains_the_papers_count_is_as_wide_as_rounding_allows(name):
    sizes = vocabulary_sizes_of_the_paper(name)
    millions = TABLE_3[name].parameters_in_millions
    inside = [round(preset_parameter_count(name, size) / 1e6) for size in (sizes[0], sizes[-1])]
    outside = [round(preset_parameter_count(name, size) / 1e6) for size in (sizes[0] - 1, sizes[-1] + 1)]
    assert inside == [millions, millions]
    assert outside == [millions - 1, millions + 1]


def test_one_vocabulary_explains_every_row_but_big():
    rows = [name for name in ROWS_WITH_PARAMETERS if name != "big"]
    common = set.intersection(*(set(vocabulary_sizes_of_the_paper(name)) for name in rows))
    assert (min(common), max(common)) == (41_004, 41_208)
    for name in rows:
        assert round(preset_parameter_count(name, 41_100) / 1e6) == TABLE_3[name].parameters_in_millions
    assert not common & set(vocabulary_sizes_of_the_paper("big"))
    assert vocabulary_sizes_of_the_paper("big") == range(35_368, 36_345)


@pytest.mark.parametrize("name", ["A_h1", "tiny", "C_d2048"])
def test_a_row_without_a_printed_count_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"no number of parameters for '{name}'; it does for base, B_dk16"):
        vocabulary_sizes_of_the_paper(name)
