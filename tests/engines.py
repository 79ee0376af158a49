"""What the tests of other engines share: models whose translations vary, their sources, and torch as the oracle."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from small_models import small_model, words


EOS = 2

# Each departure from the paper that the configuration knows, and heads of every kind of width.
DEPARTURES = {
    "paper": {},
    "norm_first": {"norm_first": True},
    "norm_first without final_norm": {"norm_first": True, "final_norm": False},
    "final_norm": {"final_norm": True},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "biases": {"attention_bias": True, "output_bias": True},
    "untied": {"tie_word_embeddings": False},
    "learned positions": {"position_embedding": "learned", "max_position_embeddings": 32},
    "d_k below d_v": {"d_k": 2, "d_v": 5},
    "d_k above d_v": {"d_k": 7, "d_v": 3, "attention_bias": True},
    "heads that do not divide d_model": {"num_heads": 3, "d_k": 6, "d_v": 6},
    "odd d_model": {"d_model": 15, "num_heads": 5},
    "layer_norm_eps": {"layer_norm_eps": 0.3},
    "other special tokens": {"bos_token_id": 5, "pad_token_id": 0, "decoder_start_token_id": 7},
}


def twenty_words() -> PreTrainedTokenizerFast:
    """Twenty words for models of twenty-three, of which the last three have no token."""
    names = ["<s>", "<pad>", "</s>", *(f"w{number}" for number in range(3, 20))]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token="</s>", model_max_length=64
    )


def lively_model(seed: int = 0, end: float = 2.0, **overrides):
    """A random model of twenty-three words whose translations differ and end at many lengths."""
    settings = {"norm_first": True, "tie_word_embeddings": False, "output_bias": True, "seed": seed, **overrides}
    model = small_model(**settings)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.lm_head.bias.zero_()
        model.lm_head.bias[:2] = -1e4
        model.lm_head.bias[EOS] = end
    model.generation_config.max_new_tokens_over_source = 4
    return model


def sources(seed: int = 0) -> list[list[int]]:
    """Ten sources of different lengths, two of them of the same."""
    return [
        [*words(length, vocab_size=20, seed=100 * seed + length + place).tolist(), EOS]
        for place, length in enumerate([9, 3, 7, 12, 5, 3, 8, 15, 1, 11])
    ]


def without_padding(rows: torch.Tensor) -> list[list[int]]:
    """Rows as lists up to the end of sentence, or up to the padding."""
    lists = []
    for row in rows.tolist():
        ended = row[1:].index(EOS) + 2 if EOS in row[1:] else len(row)
        while row[ended - 1] == 1:
            ended -= 1
        lists.append(row[:ended])
    return lists


def one_by_one(model, rows: list[list[int]], **settings) -> list[list[int]]:
    """The oracle: each source alone through torch."""
    return [ids for row in rows for ids in without_padding(model.generate(torch.tensor([row]), **settings))]


# What every engine finds as torch does.
GREEDY = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0}
SAME = {
    "greedy": GREEDY,
    "no penalty": {"length_penalty": 0.0, "length_penalty_type": "hub"},
    "no penalty, four best": {
        "length_penalty": 0.0,
        "length_penalty_type": "hub",
        "early_stopping": True,
        "num_return_sequences": 4,
    },
    "length": {"length_penalty": 1.0, "length_penalty_type": "hub", "early_stopping": True},
    "length ** 2, three best": {
        "length_penalty": 2.0,
        "length_penalty_type": "hub",
        "early_stopping": True,
        "num_return_sequences": 3,
    },
    "the paper's penalty": {"early_stopping": True},
    "the paper's penalty, two best": {"early_stopping": True, "num_return_sequences": 2},
    "the paper's penalty, strong": {"length_penalty": 1.0, "early_stopping": True},
    "two beams, max_new_tokens": {"num_beams": 2, "max_new_tokens": 7, "early_stopping": True},
    "max_length": {"max_length": 6, "early_stopping": True},
    "another end": {**GREEDY, "eos_token_id": [EOS, 6]},
}
