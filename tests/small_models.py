"""Small models with large random weights for the tests, and their weights in the form that `reference` reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import reference
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


SMALL = {
    "vocab_size": 23,
    "d_model": 16,
    "d_ff": 24,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,  # unlike the encoder's, so that whoever confuses the two is found out
    "dropout": 0.0,
}


def small_config(**overrides) -> VanillaTransformerConfig:
    """A config of a few hundred weights a layer, without dropout."""
    return VanillaTransformerConfig(**{**SMALL, **overrides})


def small_model(
    *,
    seed: int = 0,
    std: float = 0.5,
    cls: type = VanillaTransformerForConditionalGeneration,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **overrides,
):
    """A model in evaluation mode whose weights are all drawn from N(0, std): nothing is near 0, 1 or each other."""
    model = cls(small_config(attn_implementation=attn_implementation, **overrides)).to(dtype).eval()
    randomise(model, std=std, seed=seed)
    return model


def randomise(model: nn.Module, std: float = 0.5, seed: int = 0) -> None:
    """Draws every parameter from N(0, std), the gains of layer norms from N(1, 0.2); biases are not left at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_gain = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * drawn if is_gain else std * drawn)


def numpy_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """The state dict in float64; tied matrices stand under each of their names."""
    return {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}


def hyper_of(config: VanillaTransformerConfig) -> reference.Hyper:
    """The config's part that `reference` needs."""
    return reference.Hyper(
        num_heads=config.num_heads,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        norm_first=config.norm_first,
        final_norm=config.final_norm,
        activation=config.activation,
        position_embedding=config.position_embedding,
        layer_norm_eps=config.layer_norm_eps,
        bos=config.decoder_start_token_id,
        pad=config.pad_token_id,
        eos=config.eos_token_id,
    )


def reference_logits(model: nn.Module, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None):
    """`reference.logits` of a model's weights for tensors, as a float64 tensor (batch, target_len, vocab_size)."""
    lists = [
        None if tensor is None else tensor.tolist()
        for tensor in (input_ids, decoder_input_ids, attention_mask, decoder_attention_mask)
    ]
    return torch.from_numpy(reference.logits(numpy_weights(model), hyper_of(model.config), *lists))


def reference_sentence(model: nn.Module, input_ids: list[int]) -> reference.Sentence:
    """`reference.Sentence` of a model's weights for one unpadded source."""
    return reference.Sentence(numpy_weights(model), hyper_of(model.config), input_ids)


def words(*shape: int, vocab_size: int = 23, seed: int = 0) -> torch.Tensor:
    """Random ids of ordinary words (3 and up: no bos, pad or eos), of the given shape."""
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows: list[list[int]], *, side: str = "right", pad: int = 1, width: int | None = None):
    """Rows of unequal length as (ids, mask), padded on the "left" or the "right" to the longest row or to `width`."""
    width = width or max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        padding = width - len(row)
        ids.append([pad] * padding + row if side == "left" else row + [pad] * padding)
        mask.append([0] * padding + [1] * len(row) if side == "left" else [1] * len(row) + [0] * padding)
    return torch.tensor(ids), torch.tensor(mask)


def cache_of(outputs):
    """The cache in a model's outputs, whose name depends on the version of transformers."""
    return outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
