"""Which attention heads a model needs, and the same model without the others.

The importance of a head, after Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?": a mask xi_h
on the output of each head, 1 in a model as it is, makes multi-head attention

    MultiHead(Q, K, V) = Concat(xi_1 head_1, ..., xi_h head_h) W^O

and the importance is how much the loss would change with it, whatever the sign, expected over pairs of sentences x:

    I_h = E_x | dL(x) / dxi_h | = E_x | head_h(x)^T dL(x) / dhead_h(x) |

L(x) is the cross-entropy of the target given the source, summed over its tokens and not smoothed; here the sum over
all pairs is divided by the number of target tokens, so that I_h is in nats a token. One pass forward and one backward
measures all heads. Heads are ranked by I_h itself, or, as there, by I_h over the l2 norm of the importances in their
attention (`comparable_across_layers`).
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import ATTENTION_KINDS, VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    MultiHeadAttention,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerPreTrainedModel,
)
from vanilla_transformer.translation import encode_lines, evaluation_mode, length_batches, pad_rows, position_limit


Model = TypeVar("Model", bound=VanillaTransformerPreTrainedModel)


@dataclass(frozen=True)
class Head:
    """An attention head and what it does for the loss.

    Args:
        kind: "encoder" or "decoder" for self-attention, "cross" for the decoder's attention to the encoder.
        layer: Number of the layer, from 0.
        head: Number of the head, from 0, as it was before any was pruned.
        importance: I_h, in nats a target token.
    """

    kind: str
    layer: int
    head: int
    importance: float


def attentions_of(model: Any) -> dict[tuple[str, int], MultiHeadAttention]:
    """The attentions of a model, by kind and number of layer."""
    encoder, decoder = model.base_model.encoder.layers, model.base_model.decoder.layers
    return {
        **{("encoder", number): layer.self_attention for number, layer in enumerate(encoder)},
        **{("decoder", number): layer.self_attention for number, layer in enumerate(decoder)},
        **{("cross", number): layer.cross_attention for number, layer in enumerate(decoder)},
    }


def head_importance(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    tokens_per_batch: int = 2048,
    progress: bool = False,
) -> list[Head]:
    """The importance of each head on parallel text; see this module.

    The model runs in evaluation mode, and is left as it was. Pairs with a blank side are left out; over-long sides are
    cut to the tokenizer's limit.

    Args:
        model: Of this package, with a head.
        tokenizer: Its tokenizer.
        sources: Source lines.
        targets: The translation of each.
        tokens_per_batch: Bound of rows x longest row, padding counted, for either side; it changes no value.
        progress: Whether to show a progress bar on stderr.

    Returns:
        Every head that the model has: encoder, decoder and cross, each in the order of layers and heads.

    Raises:
        TypeError: Another kind of model.
        ValueError: Unequal numbers of lines, or no pair with text on both sides.

    Source: Michel et al. 2019, section 3.1, equation (2).
    """
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise TypeError(f"expected a VanillaTransformerForConditionalGeneration, got a {type(model).__name__}.")
    if len(sources) != len(targets):
        raise ValueError(
            f"expected one target for each source, got {len(sources)} sources and {len(targets)} targets."
        )
    kept = [index for index in range(len(sources)) if sources[index].strip() and targets[index].strip()]
    if not kept:
        raise ValueError(f"importance needs a pair with text on both sides, got none among {len(sources)} pairs.")
    numbers, positions = [index + 1 for index in kept], position_limit(model)
    of_source = {"name": "source", "positions": positions}
    source_rows = encode_lines(tokenizer, [sources[index] for index in kept], numbers, **of_source)  # type: ignore[arg-type]
    target_rows = encode_lines(
        tokenizer, [targets[index] for index in kept], numbers, name="target", target=True, positions=positions
    )
    lengths = [(len(source), len(target)) for source, target in zip(source_rows, target_rows, strict=True)]
    totals = {place: torch.zeros(each.num_heads, dtype=torch.float64) for place, each in attentions_of(model).items()}
    with evaluation_mode(model), _frozen(model), tqdm(total=len(kept), disable=not progress, file=sys.stderr) as bar:
        for batch in length_batches(lengths, tokens_per_batch):
            input_ids, mask = pad_rows([source_rows[index] for index in batch], tokenizer)
            labels = nn.utils.rnn.pad_sequence(
                [torch.tensor(target_rows[index]) for index in batch], batch_first=True, padding_value=-100
            )
            given = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
            for place, gradient in _gradients_of_masks(model, given).items():
                totals[place] += gradient.abs().sum(dim=0, dtype=torch.float64).cpu()
            bar.update(len(batch))
    tokens = sum(target for _, target in lengths)
    return [
        Head(kind, layer, head, total / tokens)
        for (kind, layer), sums in totals.items()
        for head, total in zip(model.config.heads_of(kind, layer), sums.tolist(), strict=True)
    ]


def _gradients_of_masks(model: Any, batch: dict[str, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """dL(x) / dxi for each pair x of the batch, of shape `(batch, num_heads)`, for each attention.

    Each row has a mask of its own, so that the gradient of the summed loss holds that of each pair.
    """
    attentions = attentions_of(model)
    rows = batch["input_ids"].shape[0]
    masks = {
        place: torch.ones(rows, each.num_heads, device=model.device, dtype=model.dtype, requires_grad=True)
        for place, each in attentions.items()
    }

    def masked(mask: torch.Tensor, _: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        heads = inputs[0].unflatten(-1, (mask.shape[1], -1))  # (batch, length, num_heads, d_v)
        return ((heads * mask[:, None, :, None]).flatten(-2),)

    hooks = [
        each.out_proj.register_forward_pre_hook(functools.partial(masked, masks[place]))
        for place, each in attentions.items()
    ]
    try:
        with torch.enable_grad():
            batch = {name: each.to(model.device) for name, each in batch.items()}
            logits = model(**batch, use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            gradients = torch.autograd.grad(loss, list(masks.values()))
    finally:
        for hook in hooks:
            hook.remove()
    return dict(zip(masks, gradients, strict=True))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of the weights, which would only cost time."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def comparable_across_layers(heads: Sequence[Head]) -> list[Head]:
    """The importances divided by the l2 norm of those in the same attention, which makes layers comparable.

    Source: Michel et al. 2019, section 3.1, after Molchanov et al. 2017.
    """
    squares: dict[tuple[str, int], float] = {}
    for each in heads:
        squares[each.kind, each.layer] = squares.get((each.kind, each.layer), 0.0) + each.importance**2
    norms = {place: math.sqrt(square) or 1.0 for place, square in squares.items()}
    return [replace(each, importance=each.importance / norms[each.kind, each.layer]) for each in heads]


def heads_without_the_least(heads: Sequence[Head], heads_kept: int) -> list[Head]:
    """The `heads_kept` most important heads, and of each attention at least its most important one.

    Args:
        heads: Every head of a model.
        heads_kept: How many stay in the whole model.

    Raises:
        ValueError: More than there are, or fewer than there are attentions.
    """
    attentions = {(each.kind, each.layer) for each in heads}
    if not len(attentions) <= heads_kept <= len(heads):
        raise ValueError(
            f"heads_kept must lie between {len(attentions)}, one for each attention of the model, and {len(heads)}, "
            f"all that it has, got {heads_kept}."
        )
    ranked = sorted(heads, key=lambda each: -each.importance)
    best = {(each.kind, each.layer): each for each in reversed(ranked)}
    chosen = set(best.values())
    chosen |= set([each for each in ranked if each not in chosen][: heads_kept - len(chosen)])
    return [each for each in heads if each in chosen]


def pruned_heads_of(config: VanillaTransformerConfig, kept: Sequence[Head]) -> dict[str, list[list[int]]]:
    """The configuration's `pruned_heads` of a model that has only the heads in `kept`."""
    left = {(each.kind, each.layer, each.head) for each in kept}
    return {
        kind: [
            [head for head in range(config.num_heads) if (kind, layer, head) not in left]
            for layer in range(config.encoder_layers if kind == "encoder" else config.decoder_layers)
        ]
        for kind in ATTENTION_KINDS
    }


def prune_heads(model: Model, pruned_heads: dict[str, list[list[int]]]) -> Model:
    """A smaller model without some of its heads.

    Its logits are those of the given model with the columns of W^O that belong to these heads set to zero.

    Args:
        model: With encoder and decoder; it stays as it is.
        pruned_heads: As the field of `VanillaTransformerConfig`: all heads that the new model lacks, those that the
            model lacks already among them.

    Raises:
        TypeError: Another kind of model.
        ValueError: `pruned_heads` does not fit the model, or gives back heads that it lacks.
    """
    if not isinstance(model, VanillaTransformerPreTrainedModel) or not hasattr(model.base_model, "decoder"):
        raise TypeError(f"expected a model of this package with encoder and decoder, got a {type(model).__name__}.")
    smaller = copy.deepcopy(model)
    smaller.config.pruned_heads = pruned_heads if any(map(any, pruned_heads.values())) else None
    smaller.config.check_values()
    for (kind, layer), attention in attentions_of(smaller).items():
        had, keeps = model.config.heads_of(kind, layer), smaller.config.heads_of(kind, layer)
        if not set(keeps) <= set(had):
            raise ValueError(
                f"the model has only the heads {had} in layer {layer} of {kind!r}; pruned_heads must name those that "
                f"it lacks, but would leave {keeps}."
            )
        places = torch.tensor([had.index(head) for head in keeps])
        attention.num_heads = len(keeps)
        with torch.no_grad():
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                linear.weight = nn.Parameter(_of_heads(linear.weight, 0, len(had), places))
                linear.out_features = linear.weight.shape[0]
                if linear.bias is not None:
                    linear.bias = nn.Parameter(_of_heads(linear.bias, 0, len(had), places))
            out = attention.out_proj
            out.weight = nn.Parameter(_of_heads(out.weight, 1, len(had), places))
            out.in_features = out.weight.shape[1]
    return smaller


def _of_heads(matrix: torch.Tensor, axis: int, num_heads: int, places: torch.Tensor) -> torch.Tensor:
    """The rows (axis 0) or columns (axis 1) of some heads."""
    heads = matrix.unflatten(axis, (num_heads, -1)).index_select(axis, places.to(matrix.device))
    return heads.flatten(axis, axis + 1).contiguous()


def importance_table(heads: Sequence[Head], kept: Sequence[Head] | None = None) -> str:
    """The importances as text, one line an attention, one column a head.

    Args:
        heads: What `head_importance` returned.
        kept: Where given, the other heads stand in brackets.
    """
    left = None if kept is None else {(each.kind, each.layer, each.head) for each in kept}
    columns = range(max(each.head for each in heads) + 1)
    lines = [" " * 12 + "".join(f"{f'head {column}':>12}" for column in columns)]
    for kind, layer in dict.fromkeys((each.kind, each.layer) for each in heads):
        cells = [""] * len(columns)
        for each in heads:
            if (each.kind, each.layer) == (kind, layer):
                goes = left is not None and (kind, layer, each.head) not in left
                cells[each.head] = f"[{each.importance:.5f}]" if goes else f"{each.importance:.5f} "
        lines.append(f"{f'{kind} {layer}':12}" + "".join(f"{cell:>12}" for cell in cells).rstrip())
    return "\n".join(lines)


__all__ = [
    "Head",
    "attentions_of",
    "comparable_across_layers",
    "head_importance",
    "heads_without_the_least",
    "importance_table",
    "prune_heads",
    "pruned_heads_of",
]
