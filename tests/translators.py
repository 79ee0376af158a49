"""Models for the tests of translation: one whose outputs vary, one that copies, one of another family."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from small_models import randomise, small_model


def output_bias(tokenizer: PreTrainedTokenizerBase, end: float) -> torch.Tensor:
    """A bias that keeps random models to whole printable characters and adds `end` to the end of sentence."""
    bias = torch.zeros(len(tokenizer))
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        bias[token] = 0.0 if text.isprintable() and "\ufffd" not in text else -1e4
    bias[tokenizer.all_special_ids] = -1e4
    bias[tokenizer.eos_token_id] = end
    return bias


def varied_model(tokenizer: PreTrainedTokenizerBase, **overrides):
    """A random model of ours whose translations differ from line to line and end at different lengths."""
    # Post-norm and tied random weights repeat one token for ever.
    settings = {"norm_first": True, "tie_word_embeddings": False, "output_bias": True, "seed": 4, **overrides}
    model = small_model(vocab_size=len(tokenizer), **settings)
    with torch.no_grad():
        model.lm_head.bias.copy_(output_bias(tokenizer, end=5.0))
    model.generation_config.max_new_tokens_over_source = 0  # quick
    return model


def varied_marian(tokenizer: PreTrainedTokenizerBase, seed: int = 10) -> MarianMTModel:
    """A random model of transformers' own for the same tokenizer, with settings of its own (2 beams)."""
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dropout=0.1,
    )
    model = MarianMTModel(config).eval()
    positions = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_positions" in name}
    randomise(model, seed=seed)
    model.load_state_dict(positions, strict=False)
    model.final_logits_bias.copy_(output_bias(tokenizer, end=3.0))
    model.generation_config = GenerationConfig(
        num_beams=2,
        max_length=12,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return model


class CopyModel(nn.Module):
    """Stands in for a model: its translation of a sentence is the sentence. Remembers the batches it was given.

    Args:
        tokenizer: Whose padding and end of sentence it uses.
        rewrite: Applied to the text of each sentence before it is given back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rewrite=None):
        super().__init__()
        self.tokenizer = tokenizer
        self.rewrite = rewrite
        self.config = SimpleNamespace(vocab_size=len(tokenizer))
        self.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, num_beams=1
        )
        self.device = torch.device("cpu")
        self.batches: list[torch.Tensor] = []
        self.trained_during_generate: list[bool] = []

    def generate(self, input_ids, attention_mask, **kwargs):
        self.batches.append(attention_mask)
        self.trained_during_generate.append(self.training)
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            row = ids[mask.bool()].tolist()
            if self.rewrite is not None:
                row = self.tokenizer(self.rewrite(self.tokenizer.decode(row, skip_special_tokens=True)))["input_ids"]
            rows += [[self.tokenizer.bos_token_id, *row]] * kwargs.get("num_return_sequences", 1)
        width = max(map(len, rows))
        return torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
