"""Models in the style of "The Annotated Transformer": its names of weights, its pre-norm layers, its own LayerNorm.

A state dict has `encoder.layers.0.self_attn.linears.0.weight`, `src_embed.0.lut.weight`, `generator.proj.weight` and
so on. It tells neither words nor heads; a file `annotated.json` beside it does:

    weights                 name of the file: safetensors, or what torch.save wrote of a state dict
    state_dict              where in that file the state dict is (default: the file is the state dict)
    prefix                  what stands in front of every name, such as "module." (default: "")
    num_heads               h
    activation              "relu" (default), "gelu" or "silu"
    layer_norm_eps          default: that of the code, 1e-6; 1e-5 where the layer norms are those of torch
    unused                  weights and buffers that no result depends on
    dropout                 for further training (default: 0.1)
    source_vocabulary       the words by id: a list, or the name of a file with one word a line
    target_vocabulary       the same of the target (default: the source's)
    segmentation            "words" (default), separated by white space, or "characters"
    space                   how the vocabulary writes a space where words are characters (default: " ")
    bos_token, eos_token, pad_token, unk_token
                            default: "<s>", "</s>", "<blank>", "<unk>"
    source_begins_with_bos  whether a source is <s> ... </s> (default: true) or ... </s>
    generation              settings of generate(), such as {"num_beams": 1} (default: the paper's)

Its layer norm is a (x - mean) / (std + eps) + b, with the standard deviation over d_model - 1 numbers. The factor
sqrt((d_model - 1) / d_model) goes into the gain a. What stays is that eps stands outside of the root: no eps inside
makes the two equal for every x, but with eps 1e-6 beside standard deviations near 1 they differ by a millionth. How
much that is in the logits is measured on each model and told; where it is more than a thousandth the model is refused.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vanilla_transformer.convert.descriptions import described_vocabularies, described_weights, read_description
from vanilla_transformer.convert.weights import (
    Original,
    Weights,
    add_stored_positions,
    check_heads,
    model_of,
    write_folder,
)


DESCRIPTION = "annotated.json"
FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "prefix": ((str,), ""),
    "activation": ((str,), "relu"),
    "layer_norm_eps": ((int, float), None),
    "bos_token": ((str,), "<s>"),
    "eos_token": ((str,), "</s>"),
    "pad_token": ((str,), "<blank>"),
}
OWN_EPS, TORCH_EPS = 1e-6, 1e-5
# In the place of an eps beside the standard deviation, where no eps inside of the root is right: as good as none.
NO_EPS = 1e-12
# The largest difference of a logit, as a share of the largest logit, that is taken for the same model.
LARGEST_DIFFERENCE = 1e-3
SUB_LAYERS = {
    "encoder": {"self_attention": "self_attn", "feed_forward": "feed_forward"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "src_attn", "feed_forward": "feed_forward"},
}


def read(
    name: str, folder: Path, revision: str | None = None, description: Mapping[str, Any] | None = None
) -> list[str]:
    """Writes a model in the style of "The Annotated Transformer" as a model of this package.

    Args:
        name: A folder, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.
        description: The fields of `annotated.json`; None reads that file.

    Returns:
        What differs from the original, a line each.

    Raises:
        OSError: A file is missing.
        ValueError: A file is broken, or does not fit the description, or cannot be represented.
    """
    described = read_description(name, DESCRIPTION, description, FIELDS, revision)
    weights = described_weights(name, described, revision)
    original, eps = original_of(weights, described, described_vocabularies(name, described, revision))
    if eps is not None:
        tell_difference(original, eps)
    return write_folder(folder, name, original, origin="the annotated model", revision=revision)


def original_of(weights: Weights, described: Mapping[str, Any], vocabularies: Any) -> tuple[Original, float | None]:
    """The parts of the model, taken from its state dict, and its own eps (None where its layer norms are torch's)."""
    prefix = described["prefix"]
    source = weights.take(f"{prefix}src_embed.0.lut.weight", None, None)
    d_model = source.shape[1]
    d_ff = weights.take(f"{prefix}encoder.layers.0.feed_forward.w_1.weight", None, d_model).shape[0]
    is_own = f"{prefix}encoder.norm.a_2" in weights
    eps = described["layer_norm_eps"]
    eps = float(eps) if eps is not None else OWN_EPS if is_own else TORCH_EPS
    if not 0 < eps < math.inf:
        raise ValueError(f"layer_norm_eps must be positive and finite, got layer_norm_eps={eps}.")
    layers: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}

    def take(ours: str, theirs: str, *shape: int) -> None:
        layers[f"{ours}.weight"] = weights.take(f"{prefix}{theirs}.weight", *shape)
        layers[f"{ours}.bias"] = weights.take(f"{prefix}{theirs}.bias", shape[0])

    def take_norm(ours: str, theirs: str) -> None:
        if not is_own:
            take(ours, theirs, d_model)
            return
        gain = weights.take(f"{prefix}{theirs}.a_2", d_model).double() * math.sqrt((d_model - 1) / d_model)
        layers[f"{ours}.bias"] = weights.take(f"{prefix}{theirs}.b_2", d_model)
        layers[f"{ours}.weight"] = gain.to(layers[f"{ours}.bias"].dtype)

    for stack, sub_layers in SUB_LAYERS.items():
        sizes[f"{stack}_layers"] = weights.count(rf"{re.escape(prefix)}{stack}\.layers\.(\d+)\.")
        for layer in range(sizes[f"{stack}_layers"]):
            own, their = f"model.{stack}.layers.{layer}.", f"{stack}.layers.{layer}."
            for index, (ours, theirs) in enumerate(sub_layers.items()):
                take_norm(f"{own}{ours}_norm", f"{their}sublayer.{index}.norm")
                if ours == "feed_forward":
                    take(f"{own}feed_forward.fc1", f"{their}feed_forward.w_1", d_ff, d_model)
                    take(f"{own}feed_forward.fc2", f"{their}feed_forward.w_2", d_model, d_ff)
                    continue
                for place, projection in enumerate(("q_proj", "k_proj", "v_proj", "out_proj")):
                    take(f"{own}{ours}.{projection}", f"{their}{theirs}.linears.{place}", d_model, d_model)
        take_norm(f"model.{stack}.norm", f"{stack}.norm")
    output = weights.take(f"{prefix}generator.proj.weight", None, d_model)
    original = Original(
        layers=layers,
        source_embedding=source,
        target_embedding=weights.take(f"{prefix}tgt_embed.0.lut.weight", None, d_model),
        output=output,
        output_bias=weights.take(f"{prefix}generator.proj.bias", output.shape[0]),
        scale=math.sqrt(d_model),
        vocabularies=vocabularies,
        generation=described["generation"],
        settings={
            **sizes,
            "d_ff": d_ff,
            "num_heads": check_heads(described["num_heads"], d_model),
            "norm_first": True,
            "final_norm": True,
            "attention_bias": True,
            "activation": described["activation"],
            "layer_norm_eps": NO_EPS if is_own else eps,
            "dropout": described["dropout"],
        },
    )
    names = [f"{prefix}{side}_embed.1.pe" for side in ("src", "tgt")]
    add_stored_positions(original, weights, *(name if name in weights else None for name in names))
    weights.leave(*described["unused"])
    weights.check_nothing_left('; name them in the description under "unused" where no result depends on them')
    return original, eps if is_own else None


class AnnotatedLayerNorm(nn.Module):
    """gain (x - mean) / (std + eps) + bias, std over d_model numbers: what a converted layer norm stands for."""

    def __init__(self, norm: nn.LayerNorm, eps: float):
        super().__init__()
        self.norm, self.eps = norm, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(..., d_model)` in and out."""
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
        return self.norm.weight * (centred / (deviation + self.eps)) + self.norm.bias


def tell_difference(original: Original, eps: float, rows: int = 16, length: int = 12) -> None:
    """Measures, in double precision on random words, what the other place of eps changes in the logits, and says it.

    Raises:
        ValueError: More than `LARGEST_DIFFERENCE`.
    """
    model: Any = model_of(dataclasses.replace(original, differences=[])).double()
    words = original.vocabularies
    generator = torch.Generator().manual_seed(0)
    length = min(length, original.most_tokens or length)

    def draw(side: Sequence[str]) -> torch.Tensor:
        ids = torch.tensor([words.ids[word] for word in side])
        return ids[torch.randint(len(ids), (rows, length), generator=generator)]

    sources, targets = draw(words.source), draw(words.target)
    inputs = {"input_ids": sources, "decoder_input_ids": targets, "attention_mask": torch.ones_like(sources)}
    kept = torch.tensor([words.ids[word] for word in words.target])
    with torch.no_grad():
        found = model(**inputs).logits[..., kept]
        own_eps = eps * math.sqrt((model.config.d_model - 1) / model.config.d_model)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(module, name, AnnotatedLayerNorm(child, own_eps))
        expected = model(**inputs).logits[..., kept]
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= LARGEST_DIFFERENCE * largest:
        raise ValueError(
            f"this model adds eps={eps} to the standard deviation, and this package's model to the variance: on "
            f"random words the logits, up to {largest:.3g}, would differ by up to {difference:.1e}, too much for the "
            "same model."
        )
    original.differences.append(
        f"eps={eps} is added to the standard deviation there and has no place here: on random words the logits, up to "
        f"{largest:.3g}, differ by up to {difference:.1e}"
    )


__all__ = ["read"]
