"""Models around `torch.nn.Transformer`: embeddings, that module, and a linear layer, as in many courses and papers.

The weights tell neither the words nor what the code around them did; a file `nn_transformer.json` beside them does:

    weights                 name of the file: safetensors, or what torch.save wrote
    state_dict              where in that file the state dict is (default: the file is the state dict)
    num_heads               nhead of the module
    norm_first              norm_first of the module
    activation              "relu", "gelu" or "silu"
    embedding_scale         what embeddings are multiplied by: a number, or "sqrt(d_model)"
    transformer             name of the module in front of ".encoder.layers..." (default: "transformer"; "" for none)
    source_embedding        name of the weight
    target_embedding        the same of the target (default: the source's)
    output                  name of the linear layer (default: none, the output words are the target embedding)
    source_positions        name of a table of positions, of shape (positions, d_model), with sizes of 1 anywhere;
                            or "sinusoidal" (default) for those of the paper, computed
    target_positions        the same of the target (default: the source's)
    unused                  weights and buffers that no result depends on, such as a stored mask
    layer_norm_eps          default: 1e-5, that of the module
    dropout                 for further training (default: 0.1)
    source_vocabulary       the words by id: a list, or the name of a file with one word a line
    target_vocabulary       the same of the target (default: the source's)
    segmentation            "words" (default), separated by white space, or "characters"
    space                   how the vocabulary writes a space where words are characters (default: " ")
    bos_token, eos_token, pad_token, unk_token
                            default: "<bos>", "<eos>", "<pad>", "<unk>"
    source_begins_with_bos  whether a source is <bos> ... <eos> (default: true) or ... <eos>
    generation              settings of generate(), such as {"num_beams": 1} (default: the paper's)

The module has a normalisation after each stack also where its layers normalise after each sub-layer; that is
`final_norm` here. A table that is the paper's sinusoids up to rounding is not kept, but computed.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.convert.descriptions import (
    REQUIRED,
    described_vocabularies,
    described_weights,
    read_description,
)
from vanilla_transformer.convert.weights import (
    Original,
    Weights,
    add_stored_positions,
    check_heads,
    write_folder,
)


DESCRIPTION = "nn_transformer.json"
SINUSOIDAL = "sinusoidal"
SQRT_D_MODEL = "sqrt(d_model)"
FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "norm_first": ((bool,), REQUIRED),
    "activation": ((str,), REQUIRED),
    "embedding_scale": ((str, int, float), REQUIRED),
    "transformer": ((str,), "transformer"),
    "source_embedding": ((str,), REQUIRED),
    "target_embedding": ((str,), None),
    "output": ((str,), None),
    "source_positions": ((str,), SINUSOIDAL),
    "target_positions": ((str,), None),
    "layer_norm_eps": ((int, float), 1e-5),
}
# The module's names for what comes before each of its layer norms, which are numbered from 1.
SUB_LAYERS = {
    "encoder": {"self_attention": "self_attn", "feed_forward": "linear"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "multihead_attn", "feed_forward": "linear"},
}


def read(
    name: str, folder: Path, revision: str | None = None, description: Mapping[str, Any] | None = None
) -> list[str]:
    """Writes a model around `torch.nn.Transformer` as a model of this package, with a tokenizer of its words.

    Args:
        name: A folder, or a name on the Hub.
        folder: Where to write, empty.
        revision: Branch, tag or commit on the Hub.
        description: The fields of `nn_transformer.json`; None reads that file.

    Returns:
        What differs from the original, a line each.

    Raises:
        OSError: A file is missing.
        ValueError: A file is broken, or does not fit the description, or cannot be represented.
    """
    described = read_description(name, DESCRIPTION, description, FIELDS, revision)
    original = original_of(
        described_weights(name, described, revision), described, described_vocabularies(name, described, revision)
    )
    return write_folder(folder, name, original, origin="the torch.nn.Transformer model", revision=revision)


def original_of(weights: Weights, described: Mapping[str, Any], vocabularies: Any) -> Original:
    """The parts of the model, taken from its state dict."""
    prefix = f"{described['transformer']}." if described["transformer"] else ""
    source_name = described["source_embedding"]
    target_name = described["target_embedding"] or source_name
    source = weights.take(source_name, None, None)
    d_model = source.shape[1]
    target = weights.take(target_name, None, d_model)
    output, output_bias = target, None
    if described["output"] is not None:
        output = weights.take(f"{described['output']}.weight", None, d_model)
        if f"{described['output']}.bias" in weights:
            output_bias = weights.take(f"{described['output']}.bias", output.shape[0])
    layers, settings = stacks(weights, prefix, d_model)
    scale = described["embedding_scale"]
    if isinstance(scale, str):
        if scale != SQRT_D_MODEL:
            raise ValueError(f'embedding_scale must be a number or "{SQRT_D_MODEL}", got {scale!r}.')
        scale = math.sqrt(d_model)
    if isinstance(scale, bool) or not math.isfinite(scale) or scale == 0:
        raise ValueError(f"embedding_scale must be a finite number other than 0, got {scale!r}.")
    original = Original(
        layers=layers,
        source_embedding=source,
        target_embedding=target,
        output=output,
        output_bias=output_bias,
        scale=scale,
        vocabularies=vocabularies,
        generation=described["generation"],
        settings={
            **settings,
            "num_heads": check_heads(described["num_heads"], d_model),
            "norm_first": described["norm_first"],
            "activation": described["activation"],
            "layer_norm_eps": float(described["layer_norm_eps"]),
            "dropout": described["dropout"],
        },
    )
    names = [described["source_positions"], described["target_positions"] or described["source_positions"]]
    add_stored_positions(original, weights, *(None if name == SINUSOIDAL else name for name in names))
    weights.leave(*described["unused"])
    weights.check_nothing_left('; name them in the description, or under "unused" where no result depends on them')
    return original


def stacks(weights: Weights, prefix: str, d_model: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of both stacks under our names, and what they tell of the configuration."""
    first = f"{prefix}encoder.layers.0."
    d_ff = weights.take(f"{first}linear1.weight", None, d_model).shape[0]
    has_bias = f"{first}self_attn.in_proj_bias" in weights
    final_norm = f"{prefix}encoder.norm.weight" in weights
    layers: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {"d_ff": d_ff, "attention_bias": has_bias, "final_norm": final_norm}

    def bias(name: str, size: int) -> torch.Tensor:
        """A bias; zeros where the module was made with bias=False."""
        return weights.take(name, size) if has_bias else torch.zeros(size)

    def take_norm(ours: str, theirs: str) -> None:
        layers[f"{ours}.weight"] = weights.take(f"{theirs}.weight", d_model)
        layers[f"{ours}.bias"] = bias(f"{theirs}.bias", d_model)

    for stack, sub_layers in SUB_LAYERS.items():
        number = weights.count(rf"{re.escape(prefix)}{stack}\.layers\.(\d+)\.")
        settings[f"{stack}_layers"] = number
        for layer in range(number):
            for index, (ours, theirs) in enumerate(sub_layers.items(), 1):
                own = f"model.{stack}.layers.{layer}.{ours}"
                their = f"{prefix}{stack}.layers.{layer}.{theirs}"
                take_norm(f"{own}_norm", f"{prefix}{stack}.layers.{layer}.norm{index}")
                if ours == "feed_forward":
                    for inner, (rows, columns) in enumerate(((d_ff, d_model), (d_model, d_ff)), 1):
                        layers[f"{own}.fc{inner}.weight"] = weights.take(f"{their}{inner}.weight", rows, columns)
                        layers[f"{own}.fc{inner}.bias"] = bias(f"{their}{inner}.bias", rows)
                    continue
                inward = weights.take(f"{their}.in_proj_weight", 3 * d_model, d_model)
                for each, part in zip("qkv", inward.chunk(3), strict=True):
                    layers[f"{own}.{each}_proj.weight"] = part
                layers[f"{own}.out_proj.weight"] = weights.take(f"{their}.out_proj.weight", d_model, d_model)
                if has_bias:
                    inward = weights.take(f"{their}.in_proj_bias", 3 * d_model)
                    for each, part in zip("qkv", inward.chunk(3), strict=True):
                        layers[f"{own}.{each}_proj.bias"] = part
                    layers[f"{own}.out_proj.bias"] = weights.take(f"{their}.out_proj.bias", d_model)
        if final_norm:
            take_norm(f"model.{stack}.norm", f"{prefix}{stack}.norm")
    return layers, settings


__all__ = ["read"]
