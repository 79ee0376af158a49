"""Table 3 of the paper beside ours: what each row reports, and the exact number of parameters of our preset.

The shapes themselves are `configuration_vanilla_transformer.PRESETS`, which travel with every saved model; what the
paper measured with them stands here and does not travel.
Source: Vaswani et al. 2017, section 6.2, Table 3.
"""

import math
from dataclasses import dataclass

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig


PAPER_VOCABULARY = 37_000  # section 5.1: "about 37000 tokens", for English to German


@dataclass(frozen=True)
class PaperResult:
    """What a row of Table 3 reports, on English to German, newstest2013, without checkpoint averaging.

    Attributes:
        perplexity: Per wordpiece of the paper's vocabulary, on the development set.
        bleu: On the development set, from 0 to 100.
        parameters_in_millions: As rounded in the table; None where the table leaves it blank, which by its caption
            means base's.
        training_steps: Updates; base's where the table leaves them blank.
    """

    perplexity: float
    bleu: float
    parameters_in_millions: int | None = None
    training_steps: int = 100_000


# In the paper's order, under the names of the presets. "tiny" is not the paper's.
TABLE_3: dict[str, PaperResult] = {
    "base": PaperResult(4.92, 25.8, 65),
    "A_h1": PaperResult(5.29, 24.9),
    "A_h4": PaperResult(5.00, 25.5),
    "A_h16": PaperResult(4.91, 25.8),
    "A_h32": PaperResult(5.01, 25.4),
    "B_dk16": PaperResult(5.16, 25.1, 58),
    "B_dk32": PaperResult(5.01, 25.4, 60),
    "C_N2": PaperResult(6.11, 23.7, 36),
    "C_N4": PaperResult(5.19, 25.3, 50),
    "C_N8": PaperResult(4.88, 25.5, 80),
    "C_d256": PaperResult(5.75, 24.5, 28),
    "C_d1024": PaperResult(4.66, 26.0, 168),
    "C_ff1024": PaperResult(5.12, 25.4, 53),
    "C_ff4096": PaperResult(4.75, 26.2, 90),
    "D_drop0.0": PaperResult(5.77, 24.6),
    "D_drop0.2": PaperResult(4.95, 25.5),
    "D_ls0.0": PaperResult(4.67, 25.3),
    "D_ls0.2": PaperResult(5.47, 25.7),
    "E_learned": PaperResult(4.92, 25.7),
    "big": PaperResult(4.33, 26.4, 213, 300_000),
}


def parameter_count(config: VanillaTransformerConfig) -> int:
    """Number of parameters of `VanillaTransformerForConditionalGeneration(config)`, without making any.

    A matrix that stands in several places (section 3.4) counts once.

    Args:
        config: Any configuration; only sizes and which parts there are matter.
    """
    d_model, heads = config.d_model, config.num_heads
    d_k, d_v = config.head_dimensions
    bias = 1 if config.attention_bias else 0
    of_head = 2 * (d_model + bias) * d_k + (2 * d_model + bias) * d_v
    attention = heads * of_head + bias * d_model
    feed_forward = 2 * d_model * config.d_ff + config.d_ff + d_model
    norm = 2 * d_model
    encoder = config.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    words = config.vocab_size * d_model * (1 if config.tie_word_embeddings else 3)
    if config.output_bias:
        words += config.vocab_size
    positions = 2 * config.max_position_embeddings * d_model if config.position_embedding == "learned" else 0
    final_norms = 2 * norm if config.has_final_norm else 0
    pruned = sum(len(gone) for layers in (config.pruned_heads or {}).values() for gone in layers) * of_head
    return encoder + decoder + words + positions + final_norms - pruned


def preset_parameter_count(name: str, vocab_size: int = PAPER_VOCABULARY) -> int:
    """Number of parameters of a preset.

    Args:
        name: One of `list_presets()`.
        vocab_size: Words of the joint vocabulary.

    Raises:
        ValueError: `name` is not a preset, or `vocab_size` is too small for the special tokens.
    """
    return parameter_count(VanillaTransformerConfig.from_preset(name, vocab_size=vocab_size))


def vocabulary_sizes_of_the_paper(name: str) -> range:
    """The vocabulary sizes with which our preset has the paper's number of parameters, rounded to millions.

    The paper says "about 37000 tokens" (section 5.1) and rounds; this tells what fits.

    Args:
        name: A row of `TABLE_3`.

    Raises:
        ValueError: No such row, or one whose parameters the table leaves blank.
    """
    millions = TABLE_3[name].parameters_in_millions if name in TABLE_3 else None
    if millions is None:
        listed = ", ".join(row for row, result in TABLE_3.items() if result.parameters_in_millions is not None)
        raise ValueError(f"Table 3 gives no number of parameters for {name!r}; it does for {listed}.")
    config = VanillaTransformerConfig.from_preset(name)
    others = parameter_count(config) - config.vocab_size * config.d_model
    first, after = ((2 * millions + sign) * 500_000 - others for sign in (-1, 1))
    return range(math.ceil(first / config.d_model), math.ceil(after / config.d_model))
