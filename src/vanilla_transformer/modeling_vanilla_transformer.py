"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), in the order of the paper's sections.

Read from top to bottom: attention (3.2), feed-forward (3.3), embeddings and positions (3.4, 3.5), the layers and
stacks (3.1), the loss (5.4), and the classes that transformers loads; at the end, what refuses unfit input. The
equation stands first; where a faster way to the same numbers exists it stands beside it and says when it applies. This
file ships with every saved model.
"""

import contextlib
import copy
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import (
    CACHE,
    MIN_KEYS_FOR_SOFTMAX,
    VanillaTransformerGenerationMixin,
    as_model_output,
    paper_generation_config,
    warn_of_missing_mask,
    without_defaults,
)


if TYPE_CHECKING:
    # Never imported here at run time: the line makes the pipeline's file travel wherever this one is copied.
    from .pipeline_vanilla_transformer import VanillaTransformerTranslationPipeline  # noqa: F401


logger = logging.get_logger(__name__)

accept_old_cache_name = deprecate_kwarg(
    "past_key_values", version="5.40.0" if CACHE == "cache" else "5.0.0", new_name="cache"
)
# In `output_hidden_states=[-1]`, -1 counts from the decoder's own depth. Older versions select no single layers.
DECODER_DEPTH: dict[str, Any] = {}
if "num_hidden_layers_key" in OutputRecorder.__dataclass_fields__:
    DECODER_DEPTH["num_hidden_layers_key"] = "decoder_layers"

# How the names of the matrices that section 3.4 makes one end.
WORD_MATRICES = ("embed_tokens.weight", "lm_head.weight")
# Up to this many keys the matrix products of equation (1) beat the CPU kernel of scaled_dot_product_attention, which
# is slow at gradients in half precision, and otherwise wins where the scores would fill new memory.
MAX_KEYS_FOR_MATRIX_PRODUCTS = {"training in half precision": 512, "otherwise": 48}
# The halves of the model that may be saved on their own, with their names in the whole one; and what has both.
PARTS = {"VanillaTransformerEncoder": "encoder", "VanillaTransformerDecoder": "decoder"}
WHOLES = ("VanillaTransformerModel", "VanillaTransformerForConditionalGeneration")
# Numbers in the largest piece of the logits matrix that training holds at a time, on a CPU and on an accelerator.
LOGITS_CHUNK_ELEMENTS = {"cpu": 2**21, "accelerator": 2**26}


# ---------------------------------------------------------------------------------------------------------------------
# Dropout (section 5.4)
# ---------------------------------------------------------------------------------------------------------------------


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Zeroes each number with probability `p` and divides the others by 1 - p (section 5.4).

    On a CPU the mask is cut from 64-bit random words, fifteen bits a number, which takes a tenth of the time that
    `torch.nn.functional.dropout` takes there; `p` is then rounded to a multiple of 2 ** -15 and the scale follows it.

    Args:
        x (`torch.Tensor`): Any shape, floating point.
        p (`float`): Probability in [0, 1).
        training (`bool`): False returns `x` itself.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p, training=True)
    kept_of_32768 = round((1.0 - p) * 32768)
    if kept_of_32768 == 0:
        return torch.zeros_like(x)
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    # The sign bit of (random - kept) is 1 with the wanted probability; spread over 16 bits it selects 0 or the bit
    # pattern of 1.0 in bfloat16.
    mask = bits.bitwise_and_(0x7FFF).sub_(kept_of_32768).bitwise_right_shift_(15).bitwise_and_(0x3F80)
    return x * mask.view(torch.bfloat16).to(x.dtype).mul_(32768 / kept_of_32768)


# ---------------------------------------------------------------------------------------------------------------------
# Attention (section 3.2)
# ---------------------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V, written out, with the weights returned.

    Args:
        query (`torch.Tensor` of shape `(batch, num_heads, target_length, d_k)`): Q.
        key (`torch.Tensor` of shape `(batch, num_heads, source_length, d_k)`): K.
        value (`torch.Tensor` of shape `(batch, num_heads, source_length, d_v)`): V.
        mask (`torch.BoolTensor` broadcastable to `(batch, num_heads, target_length, source_length)`, *optional*): True
            where a key may be attended to; None means everywhere. A query that may attend to nothing gets zeros.
        dropout_p (`float`, defaults to 0.0): Dropout on the weights; not in the paper.

    Returns:
        The output, shape `(batch, num_heads, target_length, d_v)`, and the weights, shape
        `(batch, num_heads, target_length, source_length)`.

    Source: Vaswani et al. 2017, section 3.2.1, equation (1).
    """
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)  # not even a query without any key attends to a masked one
    weights = dropout(weights, dropout_p, training=dropout_p > 0.0)
    return weights @ value, weights


def fast_scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float = 0.0
) -> torch.Tensor:
    """Equation (1) without the weights: the same numbers as `scaled_dot_product_attention`, sooner.

    Args:
        query, key, value, dropout_p: As in `scaled_dot_product_attention`.
        mask (`torch.Tensor`, *optional*): Boolean as there, or, from `added_to_scores`, what is added to the scores (0
            or minus infinity): then two matrix products and a softmax, which on a CPU beat the fused kernel at
            sentence lengths.

    Returns:
        `torch.Tensor` of shape `(batch, num_heads, target_length, d_v)`.
    """
    if mask is not None and mask.dtype == torch.bool and matrix_products_are_faster(mask, query, dropout_p > 0.0):
        # Some query may attend to nothing. The other rows get the very numbers that they get without it.
        keyless = ~mask.any(dim=-1, keepdim=True)
        added = added_to_scores(mask | keyless, key.shape[-2])
        return fast_scaled_dot_product_attention(query, key, value, added, dropout_p).masked_fill(keyless, 0.0)
    if mask is None or mask.dtype == torch.bool:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
    keys = key.shape[-2]
    scores = torch.matmul(query * (1.0 / math.sqrt(query.shape[-1])), key.transpose(-2, -1))
    # In float32 at least, since the mask is: a softmax in half precision is slower still.
    scores = F.pad(scores, (0, mask.shape[-1] - keys)) + mask
    weights = torch.softmax(scores, dim=-1)[..., :keys].to(value.dtype)
    return torch.matmul(dropout(weights, dropout_p, training=dropout_p > 0.0), value)


def matrix_products_are_faster(mask: torch.Tensor, x: torch.Tensor, training: bool) -> bool:
    """Whether two matrix products beat the fused kernel: on a CPU, up to `MAX_KEYS_FOR_MATRIX_PRODUCTS` keys.

    Whether gradients are wanted does not matter: gradient checkpointing wants them the second time only, and both
    times must be computed alike.
    """
    if mask.device.type != "cpu" or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    halves = training and precision_of_products(x).itemsize < 4
    return mask.shape[-1] <= MAX_KEYS_FOR_MATRIX_PRODUCTS["training in half precision" if halves else "otherwise"]


def added_to_scores(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """0 where the mask is True and minus infinity where not, in float32, for `MIN_KEYS_FOR_SOFTMAX` keys at least."""
    mask = F.pad(mask.expand(*mask.shape[:-1], keys), (0, max(0, MIN_KEYS_FOR_SOFTMAX - keys)), value=False)
    return torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)


def fast_mask(mask: torch.Tensor, x: torch.Tensor, training: bool) -> torch.Tensor:
    """The form of a boolean mask that `fast_scaled_dot_product_attention` is fastest with, made once for all layers.

    `x` is what the layers take. Where `matrix_products_are_faster` that is a tensor to add to the scores, provided
    that every query may attend to something (a softmax over minus infinity alone is not a number); else the mask
    itself.
    """
    if not matrix_products_are_faster(mask, x, training) or not bool(mask.any(dim=-1).all()):
        return mask
    return added_to_scores(mask, mask.shape[-1])


def precision_of_products(x: torch.Tensor) -> torch.dtype:
    """What autocast makes of `x` in each projection; its own without autocast."""
    device_type = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def in_autocast_precision(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision that autocast would cast it to for each projection anew; `x` itself without autocast."""
    return x.to(precision_of_products(x))


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i).

    One class for the three uses of section 3.2.3: self-attention of the encoder and of the decoder, and the decoder's
    attention to the encoder. The h matrices W^Q_i stand side by side in `q_proj`, and so on. No biases, as in the
    paper, unless `config.attention_bias`. `kind` is "encoder" or "decoder" for self-attention, or "cross"; heads in
    `config.pruned_heads` are left out.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, kind: str = "encoder"):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_cross_attention = kind == "cross"
        self.num_heads = len(config.heads_of(kind, layer_idx))
        self.dropout = config.attention_dropout
        d_k, d_v = config.head_dimensions
        self.q_proj = nn.Linear(config.d_model, self.num_heads * d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, self.num_heads * d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, self.num_heads * d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(self.num_heads * d_v, config.d_model, bias=config.attention_bias)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, length, num_heads * width)` to `(batch, num_heads, length, width)`."""
        return x.view(x.shape[0], x.shape[1], self.num_heads, x.shape[2] // self.num_heads).transpose(1, 2)

    def project_keys_and_values(
        self, states: torch.Tensor, cache: EncoderDecoderCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K W^K and V W^V, split into heads; from the cache where they are known already.

        Args:
            states (`torch.Tensor` of shape `(batch, length, d_model)`): The new positions, or the encoder's output.
            cache (`EncoderDecoderCache`, *optional*): Keys and values of earlier steps; cross-attention fills its part
                only once.
        """
        if cache is None:
            return self.split_heads(self.k_proj(states)), self.split_heads(self.v_proj(states))
        part = cache.cross_attention_cache if self.is_cross_attention else cache.self_attention_cache
        if self.is_cross_attention and cache.is_updated.get(self.layer_idx):
            layer: Any = part.layers[self.layer_idx]
            is_static = static_cache_length(part) is not None
            if layer.keys.shape[0] != states.shape[0] or (not is_static and layer.keys.shape[2] != states.shape[1]):
                raise ValueError(
                    f"the cache belongs to a source of shape (batch, length) = {tuple(layer.keys.shape[0:3:2])}, got "
                    f"encoder states of shape {tuple(states.shape[:2])}; use a new cache, or cache.reset(), for each "
                    "source."
                )
            return layer.keys, layer.values
        key, value = self.split_heads(self.k_proj(states)), self.split_heads(self.v_proj(states))
        fit_cache_to_batch(part, self.layer_idx, key, value)
        key, value = part.update(key, value, self.layer_idx)
        if self.is_cross_attention:
            cache.is_updated[self.layer_idx] = True
        return key, value

    def forward(
        self,
        query_states: torch.Tensor,
        key_value_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends from `query_states` to `key_value_states` (the same tensor in self-attention).

        Args:
            query_states (`torch.Tensor` of shape `(batch, target_length, d_model)`): What asks.
            key_value_states (`torch.Tensor` of shape `(batch, source_length, d_model)`): What is attended to.
            mask (`torch.Tensor`, *optional*): See `scaled_dot_product_attention` and `fast_mask`.
            cache (`EncoderDecoderCache`, *optional*): Keys and values of earlier steps.
            output_attentions (`bool`, *optional*): True takes the written-out path, which has weights.

        Returns:
            The output, shape `(batch, target_length, d_model)`, and the weights, shape
            `(batch, num_heads, target_length, source_length)`, or None on the fast path.
        """
        is_self_attention = key_value_states is query_states
        query_states = in_autocast_precision(query_states)
        key_value_states = query_states if is_self_attention else in_autocast_precision(key_value_states)
        query = self.split_heads(self.q_proj(query_states))
        key, value = self.project_keys_and_values(key_value_states, cache)
        dropout_p = self.dropout if self.training else 0.0
        weights: torch.Tensor | None = None
        if self.config._attn_implementation == "eager" or output_attentions:
            heads, weights = scaled_dot_product_attention(query, key, value, mask, dropout_p)
        else:
            heads = fast_scaled_dot_product_attention(query, key, value, mask, dropout_p)
        concatenated = heads.transpose(1, 2).flatten(2)
        return self.out_proj(concatenated), weights


# ---------------------------------------------------------------------------------------------------------------------
# Position-wise feed-forward networks (section 3.3)
# ---------------------------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, at each position alone.

    Source: Vaswani et al. 2017, section 3.3, equation (2). `config.activation` may replace the ReLU.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.activation: Any = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[config.activation]
        self.dropout = config.activation_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(batch, length, d_model)` in and out."""
        return self.fc2(dropout(self.activation(self.fc1(x)), self.dropout, self.training))


# ---------------------------------------------------------------------------------------------------------------------
# Positional encoding (section 3.5)
# ---------------------------------------------------------------------------------------------------------------------


def sinusoidal_encoding(positions: torch.Tensor, d_model: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model)).

    Computed anew from the positions, in float64 (float32 where the device has no float64), at any length: there is no
    table to store, to reload or to outgrow. With an odd `d_model` the last column is a sine.

    Args:
        positions (`torch.LongTensor` of any shape): Positions, from 0.
        d_model (`int`): Width of the encoding.
        dtype (`torch.dtype`, defaults to `torch.float32`): Of the result, which is rounded to it once, at the end.

    Returns:
        `torch.Tensor` of shape `(*positions.shape, d_model)`.

    Source: Vaswani et al. 2017, section 3.5.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    column = torch.arange(d_model, device=positions.device)
    wavelength_over_2_pi = torch.pow(10000.0, (column - column % 2).to(exact) / d_model)
    angle = positions.to(exact).unsqueeze(-1) / wavelength_over_2_pi
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(dtype)


class PositionEncoding(nn.Module):
    """Adds positions to scaled embeddings: sinusoids (section 3.5) or a learned table (Table 3, row E).

    Parameters: none for sinusoids; `embed_positions.weight` of shape `(max_position_embeddings, d_model)` when
    learned.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.d_model = config.d_model
        self.max_positions = config.max_position_embeddings
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.d_model)
            if config.position_embedding == "learned"
            else None
        )

    def forward(self, positions: torch.Tensor, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Encodings of `positions`, shape `(*positions.shape, d_model)`.

        Args:
            positions (`torch.LongTensor` of shape `(batch or 1, length)`): Positions, from 0.
            length (`int`): No position reaches it.
            dtype (`torch.dtype`, defaults to `torch.float32`): Of sinusoids; a learned table has its own.

        Raises:
            ValueError: The table of learned positions is too short.
        """
        if self.embed_positions is not None:
            if length > self.max_positions and not torch.compiler.is_compiling():
                length = int(positions.max()) + 1  # padding and free slots of a static cache need no position
            if length > self.max_positions:
                raise ValueError(
                    f"the sequence has {length} tokens but max_position_embeddings={self.max_positions}: learned "
                    "positions end there; shorten the input (truncation=True) or use position_embedding='sinusoidal'."
                )
            return self.embed_positions(positions)
        if torch.compiler.is_compiling() or length >= positions.numel():
            return sinusoidal_encoding(positions, self.d_model, dtype)
        # Fewer positions than tokens: compute each once.
        return sinusoidal_encoding(torch.arange(length, device=positions.device), self.d_model, dtype)[positions]


def positions_of_kept_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token = number of kept tokens before it in its row, so that padding moves nothing.

    Padding, which nothing attends to, repeats the position before it.

    Args:
        mask (`torch.BoolTensor` of shape `(batch, length)`): True for kept tokens.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`.
    """
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and decoder layers (section 3.1, figure 1)
# ---------------------------------------------------------------------------------------------------------------------


class ResidualLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: each sub-layer's output is LayerNorm(x + Dropout(Sublayer(x)))."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.dropout = config.dropout
        self.norm_first = config.norm_first

    def add_and_norm(self, x: torch.Tensor, sublayer: Any, norm: nn.LayerNorm) -> torch.Tensor:
        """Residual connection and layer normalisation around a sub-layer, shape `(batch, length, d_model)` in and out.

        Source: Vaswani et al. 2017, sections 3.1 and 5.4.
        """
        if self.norm_first:
            # Differs from the paper, on request: x + Dropout(Sublayer(LayerNorm(x))).
            return x + dropout(sublayer(norm(x)), self.dropout, self.training)
        return norm(x + dropout(sublayer(x), self.dropout, self.training))


class VanillaTransformerEncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward (figure 1, left)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        self.self_attention = MultiHeadAttention(config, layer_idx)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, source_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """Shape `(batch, source_length, d_model)` in and out.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, source_length, d_model)`): Output of the layer below.
            source_mask (`torch.Tensor` broadcastable to `(batch, num_heads, source_length, source_length)`,
                *optional*): Which source tokens are kept.
        """
        x = hidden_states
        x = self.add_and_norm(
            x, lambda y: self.self_attention(y, y, source_mask, **kwargs)[0], self.self_attention_norm
        )
        return self.add_and_norm(x, self.feed_forward, self.feed_forward_norm)


class VanillaTransformerDecoderLayer(ResidualLayer):
    """Causal self-attention, attention to the encoder, then feed-forward (figure 1, right)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        self.self_attention = MultiHeadAttention(config, layer_idx, "decoder")
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.cross_attention = MultiHeadAttention(config, layer_idx, "cross")
        self.cross_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        target_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        source_mask: torch.Tensor | None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Shape `(batch, target_length, d_model)` in and out.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, target_length, d_model)`): Output of the layer below.
            target_mask (`torch.Tensor` broadcastable to `(batch, num_heads, target_length, key_length)`, *optional*):
                No attention to later positions, nor to padding.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, source_length, d_model)`, *optional*): The
                encoder's output; None leaves attention to it out.
            source_mask (`torch.Tensor` broadcastable to `(batch, num_heads, target_length, source_length)`,
                *optional*): Which source tokens are kept.
            cache (`EncoderDecoderCache`, *optional*): Keys and values of earlier steps.
        """
        x = hidden_states
        x = self.add_and_norm(
            x, lambda y: self.self_attention(y, y, target_mask, cache, **kwargs)[0], self.self_attention_norm
        )
        if encoder_hidden_states is not None:
            x = self.add_and_norm(
                x,
                lambda y: self.cross_attention(y, encoder_hidden_states, source_mask, cache, **kwargs)[0],
                self.cross_attention_norm,
            )
        return self.add_and_norm(x, self.feed_forward, self.feed_forward_norm)


# ---------------------------------------------------------------------------------------------------------------------
# What transformers needs to know of every model
# ---------------------------------------------------------------------------------------------------------------------


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Initialisation, saving and loading, common to all classes below."""

    config_class = VanillaTransformerConfig
    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _part_of_the_whole: str | None = None

    def __init__(self, config: VanillaTransformerConfig, *args: Any, **kwargs: Any):
        if isinstance(config, VanillaTransformerConfig):
            config.check_values()  # fields may have been set since its construction
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Half of Xavier's bound for projections; embeddings of standard deviation d_model ** -0.5 (1 after scaling).

        The paper does not say how it initialised. With LayerNorm after the residual sum, sub-layers that start small
        beside the residual learn several times sooner than with Xavier's full bound; half of it is a standard
        deviation of 0.022 at d_model 512, about the 0.02 of BERT and BART.
        """
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
            # A slice does not carry the mark that protects loaded weights, hence the question.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes every word matrix, tied or not; see `PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: A special token would be cut off.
        """
        if new_num_tokens is not None:
            resized = copy.copy(self.config)
            resized.vocab_size = new_num_tokens
            resized.check_values()
        old_vocab_size = self.config.vocab_size
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        bias = getattr(self.get_output_embeddings(), "bias", None)
        if bias is not None:
            bias.data[old_vocab_size:] = 0.0  # not the mean of the old ones: a new word is not favoured
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and decoder.embed_tokens.weight.shape[0] != self.config.vocab_size:
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, self.config.vocab_size)
        return embeddings

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Opens a saved model, from safetensors alone; see `PreTrainedModel.from_pretrained`.

        An encoder or a decoder opens from a folder of its own or from that of the whole model.

        Raises:
            ValueError: The folder holds an encoder or a decoder alone, and more is asked for.
        """
        if kwargs.get("use_safetensors") is None:
            kwargs["use_safetensors"] = True
        saved = architecture_of(pretrained_model_name_or_path, kwargs)
        part = cls._part_of_the_whole
        if saved in PARTS and PARTS[saved] != part:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {saved} alone, but was to be opened as {cls.__name__}; open "
                f"it with {saved}.from_pretrained()."
            )
        is_part_of_saved = part is not None and saved in WHOLES
        opening: Any = VanillaTransformerModel if is_part_of_saved else super()
        with_info = kwargs.get("output_loading_info", False)
        kwargs["output_loading_info"] = True
        with without_conversion_service():
            model, info = opening.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if is_part_of_saved:
            model = getattr(model, cast(str, part))
        elif not model.config.tie_word_embeddings:
            model._fill_from_tied_checkpoint(info["missing_keys"])
        return (model, info) if with_info else model

    def _fill_from_tied_checkpoint(self, missing: set[str]) -> None:
        """Copies the one matrix of a tied checkpoint to where an untied model has one of its own."""
        tied = self._tied_weights_keys or {}
        if not set(tied) <= missing or set(tied.values()) & missing:  # an untied one, or none of ours
            return
        parameters = dict(self.named_parameters())
        for target, source in tied.items():
            with torch.no_grad():
                parameters[target].copy_(parameters[source])
            missing.discard(target)
            logger.warning(f"{target} is not in the checkpoint, whose matrices are tied: it starts as {source}.")

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module.to_empty`, which would leave a matrix of its own in each place of a shared one."""
        super().to_empty(*args, **kwargs)
        self.tie_weights()
        return self

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration, generation settings and the code that opens them.

        See `PreTrainedModel.save_pretrained`. The folder is self-contained: `trust_remote_code=True` opens it on a
        machine that has only transformers and torch. Where the configuration says that the word matrices are not
        tied, the file holds all three, even if they are still one in memory.
        """
        if not self.config.tie_word_embeddings and not args and kwargs.get("state_dict") is None:
            state_dict: dict[str, torch.Tensor] = self.state_dict()
            matrices = {
                name: each
                for name, each in state_dict.items()
                if name.endswith(WORD_MATRICES) and each.device.type != "meta"
            }
            if len({matrix.data_ptr() for matrix in matrices.values()}) < len(matrices):
                # transformers would keep one name only.
                kwargs["state_dict"] = {**state_dict, **{name: each.clone() for name, each in matrices.items()}}
        taken = self.config.take_generation_settings()
        if not self.can_generate():  # else they are in its generation_config.json
            self.config.give_generation_settings(taken)
        settings = getattr(self, "generation_config", None)
        try:
            if settings is not None:
                self.generation_config = without_defaults(settings)
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            if settings is not None:
                self.generation_config = settings
            self.config.give_generation_settings(taken)
        let_read_as_config(Path(save_directory))
        here = Path(cast(str, sys.modules[VanillaTransformerPreTrainedModel.__module__].__file__)).parent
        for source in sorted(here.glob("*_vanilla_transformer.py")):
            target = Path(save_directory) / source.name
            if not target.exists() or not source.samefile(target):
                shutil.copyfile(source, target)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers guesses this from the source; here every attention asks the configuration at each call.
        return True

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        """Two short rows, one of them padded."""
        pad, end = self.config.pad_token_id, self.config.vocab_size - 1
        input_ids = torch.tensor([[end, end, end], [end, end, pad]], device=self.device)
        return {"input_ids": input_ids, "attention_mask": input_ids.ne(pad), "decoder_input_ids": input_ids}


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and decoder stacks (section 3.1)
# ---------------------------------------------------------------------------------------------------------------------


def let_read_as_config(folder: Path) -> None:
    """Lets those read the weights in a folder who may read its config.json; safetensors lets their owner alone."""
    settings = folder / "config.json"
    if settings.is_file():
        for weights in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # another's file, or a file system without such rights
                if (weights.stat().st_mode ^ settings.stat().st_mode) & 0o777:
                    shutil.copymode(settings, weights)


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embeddings (section 3.4), positions, layers, and a final norm on request."""

    def __init__(self, config: VanillaTransformerConfig, layer_class: Any, num_layers: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.positions = PositionEncoding(config)
        self.layers = nn.ModuleList([layer_class(config, layer_idx) for layer_idx in range(num_layers)])
        # Differs from the paper, on request: pre-norm stacks need a last LayerNorm.
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.has_final_norm else nn.Identity()
        self.gradient_checkpointing = False

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        positions: torch.Tensor,
        length: int,
    ) -> torch.Tensor:
        """Dropout(embedding * sqrt(d_model) + position), shape `(batch, length, d_model)`.

        `inputs_embeds` are rows of the embedding matrix as `get_input_embeddings()` gives them, not yet scaled.

        Source: Vaswani et al. 2017, sections 3.4, 3.5 and 5.4.
        """
        if inputs_embeds is None:
            try:
                inputs_embeds = self.embed_tokens(input_ids)
            except IndexError as error:  # on a CPU
                ids = cast(torch.Tensor, input_ids)
                raise ValueError(
                    f"tokens must lie in [0, vocab_size={self.config.vocab_size}), got {ids.min()} to {ids.max()}; is "
                    "the tokenizer that of the model?"
                ) from error
        encodings = self.positions(positions.to(inputs_embeds.device), length, inputs_embeds.dtype)
        x = inputs_embeds * math.sqrt(self.config.d_model) + encodings.to(inputs_embeds.dtype)
        return dropout(x, self.config.dropout, self.training)

    def mask_for_layers(self, mask: torch.Tensor | None, x: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        """The mask in the form that the attention implementation in force takes."""
        if mask is None or self.config._attn_implementation == "eager" or kwargs.get("output_attentions"):
            return mask
        return fast_mask(mask, x, self.training)


class VanillaTransformerEncoder(VanillaTransformerStack):
    """N layers of self-attention and feed-forward over the source (figure 1, left)."""

    _part_of_the_whole = "encoder"
    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": MultiHeadAttention,
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, VanillaTransformerEncoderLayer, config.encoder_layers)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encodes the source.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source_length)`, *optional*): 1 for kept tokens, 0 for
                padding; None means `input_ids != pad_token_id`.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, source_length, d_model)`, *optional*): Unscaled
                embeddings in place of `input_ids`.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(batch, source_length, d_model)`.

        Raises:
            ValueError: Both or neither of `input_ids` and `inputs_embeds`, no row, a token outside the
                vocabulary (on a CPU), or a mask of another shape.
        """
        check_one_input(input_ids, inputs_embeds)
        rows, length = cast(torch.Tensor, input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        kept = boolean_mask(attention_mask, (rows, length), "attention_mask")
        if kept is None and input_ids is not None:
            kept = input_ids.ne(self.config.pad_token_id)
        if kept is None:
            positions = torch.arange(length).unsqueeze(0)
        else:
            positions = positions_of_kept_tokens(kept)
        x = self.embed(input_ids, inputs_embeds, positions, length)
        source_mask = None if kept is None else kept.to(x.device)[:, None, None, :]
        source_mask = self.mask_for_layers(source_mask, x, **kwargs)
        for layer in self.layers:
            x = layer(x, source_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class VanillaTransformerDecoder(VanillaTransformerStack):
    """N layers of causal self-attention, attention to the encoder, and feed-forward (figure 1, right)."""

    _part_of_the_whole = "decoder"
    _can_record_outputs = {
        "hidden_states": OutputRecorder(VanillaTransformerDecoderLayer, **DECODER_DEPTH),
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, VanillaTransformerDecoderLayer, config.decoder_layers)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @accept_old_cache_name
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes the target from the tokens so far.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, target_length)`, *optional*): Target tokens not yet cached.
            attention_mask (`torch.Tensor` of shape `(batch, cached_length + target_length)`, *optional*): 1 for kept
                target tokens, 0 for padding; None keeps all. One of shape `(batch, 1, target_length, key_length)` is
                taken as the causal mask itself (see `boolean_causal_mask`).
            encoder_hidden_states (`torch.FloatTensor` of shape `(batch, source_length, d_model)`, *optional*): The
                encoder's output.
            encoder_attention_mask (`torch.Tensor` of shape `(batch, source_length)`, *optional*): 1 for kept source
                tokens, 0 for padding; None keeps all.
            cache (`Cache`, *optional*): Keys and values of earlier steps.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, target_length, d_model)`, *optional*): Unscaled
                embeddings in place of `input_ids`.
            use_cache (`bool`, *optional*): Whether to return a cache; None means the configuration's.

        Returns:
            `BaseModelOutputWithPastAndCrossAttentions`, `last_hidden_state` of shape `(batch, target_length,
            d_model)`.

        Raises:
            ValueError: Both or neither of `input_ids` and `inputs_embeds`, no row, a token outside the
                vocabulary (on a CPU), a mask of another shape, or a cache that is too short or belongs to another
                batch or source.
        """
        check_one_input(input_ids, inputs_embeds, "decoder_")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        inputs = cast(torch.Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        rows, length = inputs.shape[:2]
        past = 0 if cache is None else cache.get_seq_length()
        static_length = static_source_length = None
        if cache is not None:
            static_length = static_cache_length(cache.self_attention_cache)
            static_source_length = static_cache_length(cache.cross_attention_cache)
            check_static_cache(static_length, past, length, "target")
            if encoder_hidden_states is not None:
                check_static_cache(static_source_length, 0, encoder_hidden_states.shape[1], "source")
        key_length = past + length if static_length is None else static_length
        given_mask, kept = None, None
        if attention_mask is not None and attention_mask.ndim == 4:
            given_mask = boolean_causal_mask(attention_mask.to(inputs.device), rows, length, key_length)
        else:
            so_far = past + length
            if attention_mask is not None and isinstance(past, torch.Tensor):  # of a static cache
                so_far = attention_mask.shape[1] if torch.compiler.is_compiling() else int(past) + length
            kept = boolean_mask(attention_mask, (rows, so_far), "decoder_attention_mask")

        # Without padding a token's position is its index; with padding, the number of kept tokens before it.
        index = torch.arange(length, device=inputs.device) + past
        if kept is not None:
            positions = positions_of_kept_tokens(kept.to(inputs.device))[:, -length:]
        elif given_mask is not None:
            positions = (given_mask[:, 0].sum(dim=-1) - 1).clamp(min=0)
        else:
            positions = index.unsqueeze(0)
        x = self.embed(input_ids, inputs_embeds, positions, key_length)

        target_mask: torch.Tensor | None = given_mask
        if given_mask is not None:
            target_mask = self.mask_for_layers(given_mask, x, **kwargs)
        elif length > 1 or static_length is not None or kept is not None:
            # Section 3.2.3: no position attends to a later one.
            target_mask = (torch.arange(key_length, device=x.device) <= index[:, None])[None, None]
            if kept is not None:
                kept = F.pad(kept.to(x.device), (0, key_length - kept.shape[1]), value=True)
                target_mask = target_mask & kept[:, None, None, :]
            target_mask = self.mask_for_layers(target_mask, x, **kwargs)
        source_kept = None
        if encoder_hidden_states is not None:
            if encoder_hidden_states.shape[0] != rows:
                raise ValueError(
                    f"source and target must have equally many rows, got {encoder_hidden_states.shape[0]} and {rows}."
                )
            source_kept = boolean_mask(
                encoder_attention_mask, (rows, encoder_hidden_states.shape[1]), "attention_mask"
            )
        if static_source_length is not None and encoder_hidden_states is not None:
            # A static cache may have more slots than the source has tokens; nothing attends to the others.
            if source_kept is None:
                source_kept = torch.ones(encoder_hidden_states.shape[:2], dtype=torch.bool, device=x.device)
            source_kept = F.pad(source_kept, (0, static_source_length - source_kept.shape[1]), value=False)
        source_mask = None if source_kept is None else source_kept.to(x.device)[:, None, None, :]
        source_mask = self.mask_for_layers(source_mask, x, **kwargs)
        if encoder_hidden_states is not None:
            # Once for all layers.
            encoder_hidden_states = cast(torch.FloatTensor, in_autocast_precision(encoder_hidden_states))

        for layer in self.layers:
            x = layer(x, target_mask, encoder_hidden_states, source_mask, cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(x), **cast(dict[str, Any], {CACHE: cache})
        )


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output projection (figure 1).

    One matrix embeds source and target (section 3.4), unless `config.tie_word_embeddings` is False.
    """

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
    # What a checkpoint of the model with its head has besides.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The source embedding, which is the target embedding too where they are tied."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the source embedding, and the target embedding where they are tied."""
        self.encoder.embed_tokens = cast(nn.Embedding, value)
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = self.encoder.embed_tokens

    @can_return_tuple
    @accept_old_cache_name
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | dict | torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Encodes the source and decodes the target given so far.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source_length)`, *optional*): 1 for kept source tokens, 0
                for padding; None means `input_ids != pad_token_id`.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target_length)`, *optional*): Target tokens, the
                start token first.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, target_length)`, *optional*): 1 for kept target
                tokens; None keeps all.
            encoder_outputs (`BaseModelOutput`, `tuple`, `dict` or `torch.Tensor`, *optional*): Output of an earlier
                call of the encoder, or its `last_hidden_state` alone.
            cache (`Cache`, *optional*): Keys and values of earlier steps.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, source_length, d_model)`, *optional*): Unscaled source
                embeddings in place of `input_ids`.
            decoder_inputs_embeds (`torch.FloatTensor` of shape `(batch, target_length, d_model)`, *optional*):
                Unscaled target embeddings in place of `decoder_input_ids`.
            use_cache (`bool`, *optional*): Whether to return a cache; None means the configuration's.

        Returns:
            `Seq2SeqModelOutput`, `last_hidden_state` of shape `(batch, target_length, d_model)`.
        """
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id)
        if attention_mask is None and encoder_outputs is not None:
            warn_of_missing_mask()
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        encoder_outputs = as_model_output(encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE: decoder_outputs.get(CACHE)},
        )


# ---------------------------------------------------------------------------------------------------------------------
# Output probabilities and the training loss (sections 3.4 and 5.4)
# ---------------------------------------------------------------------------------------------------------------------


def label_smoothed_loss(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, num_items: torch.Tensor | int | None
) -> torch.Tensor:
    """Cross-entropy against (1 - epsilon) * one-hot + epsilon / V, over the labels that are not -100.

    Args:
        logits (`torch.Tensor` of shape `(batch, target_length, vocab_size)`): Unnormalised scores.
        labels (`torch.LongTensor` of shape `(batch, target_length)`): Words; -100 is left out.
        label_smoothing (`float`): epsilon_ls.
        num_items (`torch.Tensor` or `int`, *optional*): What the sum is divided by; None means the labels counted.

    Returns:
        `torch.FloatTensor`, a scalar; 0 where every label is -100.

    Source: Vaswani et al. 2017, section 5.4; Szegedy et al. 2015, "Rethinking the Inception Architecture", section 7.
    """
    labels = labels.to(logits.device)
    total = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    return total / divisor_of_loss(labels, num_items)


def divisor_of_loss(labels: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor:
    """`num_items` or the number of labels that are not -100, at least 1."""
    count = labels.ne(-100).sum() if num_items is None else torch.as_tensor(num_items)
    return count.to(labels.device).clamp(min=1)


def log_of_chosen(
    probabilities: torch.Tensor, words: torch.Tensor, logits: torch.Tensor, states: torch.Tensor, projection: Any
) -> torch.Tensor:
    """Logarithm of the probability of one word in each row, without another pass over the rows.

    Args:
        probabilities (`torch.Tensor` of shape `(tokens, vocab_size)`): softmax(states @ matrix^T + bias).
        words (`torch.LongTensor` of shape `(tokens, 1)`): The words.
        logits (`torch.Tensor` of shape `(tokens,)`): Unnormalised scores of these words.
        states (`torch.Tensor` of shape `(tokens, d_model)`): What the scores were made of.
        projection (`tuple`): The matrix, shape `(vocab_size, d_model)`, and its bias or None.

    Returns:
        `torch.Tensor` of shape `(tokens,)`; where a probability is too small for its logarithm to be exact, that comes
        from the largest logit and its probability.
    """
    chosen = probabilities.gather(1, words)[:, 0]
    tiny = chosen < 1e-30
    if chosen.device.type == "cpu" and not bool(tiny.any()):  # elsewhere the question would wait for the device
        return chosen.log()
    matrix, bias = projection
    largest, word = probabilities.max(dim=-1)
    largest_logit = (states.to(chosen.dtype) * matrix[word].to(chosen.dtype)).sum(dim=-1).to(matrix.dtype)
    log_normaliser = largest_logit.to(chosen.dtype) - largest.log()
    if bias is not None:
        log_normaliser = log_normaliser + bias[word].to(chosen.dtype)
    return torch.where(tiny, logits - log_normaliser, chosen.log())


class FusedLabelSmoothedLoss(torch.autograd.Function):
    """Output projection and `label_smoothed_loss` in one, chunk by chunk: the whole logits matrix never exists.

    The gradient with respect to the logits z is softmax(z) - (1 - epsilon) * one-hot - epsilon / V, known as soon as z
    is; so forward multiplies it on to the hidden states and the matrix at once, and backward only scales.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, label_smoothing):
        """Sum of the losses of all rows.

        Args:
            ctx: Context of autograd.
            hidden (`torch.Tensor` of shape `(tokens, d_model)`): Decoder output at the labelled positions.
            weight (`torch.Tensor` of shape `(vocab_size, d_model)`): Output projection.
            bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Its bias.
            labels (`torch.LongTensor` of shape `(tokens,)`): Words.
            label_smoothing (`float`): epsilon_ls.
        """
        device_type = hidden.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
        vocab_size = weight.shape[0]
        elements = LOGITS_CHUNK_ELEMENTS["cpu" if device_type == "cpu" else "accelerator"]
        # At least d_model rows: adding up the gradient of the matrix must not cost more than its products.
        rows = max(elements // vocab_size, hidden.shape[1])
        exact = torch.promote_types(dtype, torch.float32)
        share = label_smoothing / vocab_size
        with torch.autocast(device_type, enabled=False):
            matrix = weight.to(dtype)
            # What smoothing adds is the same for every word: the mean logit is a product with the mean row, and the
            # gradient's constant part is added at the end, so that neither passes over the logits.
            sum_of_rows = weight.to(exact).sum(dim=0)
            mean_bias = 0.0 if bias is None else bias.to(exact).mean()
            total = torch.zeros((), dtype=exact, device=hidden.device)
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device)
            grad_bias = None if bias is None else torch.zeros(vocab_size, dtype=exact, device=hidden.device)
            # The same memory for every piece: new pages cost a CPU more time than the arithmetic on them.
            rows = max(1, min(rows, hidden.shape[0]))
            scores = torch.empty(rows, vocab_size, dtype=dtype, device=hidden.device)
            exact_scores = scores if exact == dtype else torch.empty_like(scores, dtype=exact)
            product = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            for start in range(0, hidden.shape[0], rows):
                states = hidden[start : start + rows].to(dtype)
                words = labels[start : start + rows, None]
                pieces = slice(0, states.shape[0])
                logits = torch.mm(states, matrix.t(), out=scores[pieces])
                if exact != dtype:
                    logits = exact_scores[pieces].copy_(logits)
                if bias is not None:
                    logits += bias.to(exact)
                chosen = logits.gather(1, words)[:, 0]
                # In place where that is known to be right.
                probabilities = torch.softmax(logits, dim=-1, out=logits if device_type == "cpu" else None)
                log_probability = log_of_chosen(probabilities, words, chosen, states, (matrix, bias))
                log_normaliser = chosen - log_probability
                mean_log_probability = states.to(exact) @ sum_of_rows / vocab_size + mean_bias - log_normaliser
                total -= ((1 - label_smoothing) * log_probability + label_smoothing * mean_log_probability).sum()

                gradient = probabilities
                gradient.scatter_add_(1, words, torch.full_like(words, label_smoothing - 1, dtype=exact))
                if grad_bias is not None:
                    grad_bias += gradient.sum(dim=0) - share * states.shape[0]
                if exact != dtype:
                    gradient = scores[pieces].copy_(gradient)
                grad_hidden[start : start + rows] = (gradient @ matrix).to(exact) - share * sum_of_rows
                grad_weight += torch.mm(gradient.t(), states, out=product)
            grad_weight -= share * hidden.to(exact).sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx, grad_output):
        """Scales the gradients that forward prepared."""
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            grad_hidden * grad_output.to(grad_hidden.dtype),
            (grad_weight * grad_output).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_output).to(bias_dtype),
            None,
            None,
        )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear` and nothing else: no adapter, hook, parametrisation or forward of its own."""
    return (
        type(module) is nn.Linear
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and not module._backward_pre_hooks
        and "forward" not in vars(module)
    )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin):
    """The whole model of figure 1: encoder, decoder, output projection, loss and `generate()`.

    The output projection is the embedding matrix (section 3.4), unless `config.tie_word_embeddings` is False.
    """

    _tied_weights_keys = {
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.weight": "model.encoder.embed_tokens.weight",
    }
    # The loss divides by num_items_in_batch itself, so that Trainer must not divide by its accumulation steps.
    accepts_loss_kwargs = True

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        # A loss whose labels are not shifted, as the class's name would mean: Trainer counts tokens accordingly.
        self.loss_type = "ForMaskedLM"
        self.post_init()
        self._keys_to_ignore_on_load_unexpected = set()  # not that of the model inside
        self.generation_config = paper_generation_config(config)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels shifted right by one, the start token first: what the decoder reads while it learns `labels`.

        Args:
            labels (`torch.LongTensor` of shape `(batch, target_length)`): Words, -100 where there is none.

        Returns:
            `torch.LongTensor` of shape `(batch, target_length)`, padding in place of -100.
        """
        start = labels.new_full((labels.shape[0], 1), cast(int, self.config.decoder_start_token_id))
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    @can_return_tuple
    @accept_old_cache_name
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | dict | torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits, or in training mode the loss.

        Args:
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache,
                inputs_embeds, decoder_inputs_embeds, use_cache: As in `VanillaTransformerModel`.
            labels (`torch.LongTensor` of shape `(batch, target_length)`, *optional*): Words to predict, the end of
                sentence last; -100 is left out. Shifted right they are the decoder's input, where none is given.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): What the summed loss is divided by; None means
                the number of labels that are not -100.
            logits_to_keep (`int` or `torch.LongTensor`, defaults to 0): Only the last so many positions, or these
                indices, get logits; 0 means all.

        Returns:
            `Seq2SeqLMOutput`. In training mode with labels: `loss`, smoothed by `config.label_smoothing`, and `logits`
            None, since the fused path never makes them (they are made where the output projection is not a plain
            linear layer). Otherwise `logits` of shape `(batch, target_length, vocab_size)` and, with labels, the loss
            unsmoothed.

        Raises:
            ValueError: Neither labels nor an input of the decoder: source tokens never take its place. Inputs of
                shapes that do not fit each other, or, on a CPU, labels that are no words.

        Source: Vaswani et al. 2017, sections 3.4 and 5.4.
        """
        if labels is not None:
            use_cache = False if cache is None else use_cache
            check_labels(labels, decoder_input_ids, self.config.vocab_size)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = cast(torch.LongTensor, self.prepare_decoder_input_ids_from_labels(labels))
        elif decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "the decoder has nothing to read: give labels, decoder_input_ids or decoder_inputs_embeds. Trainer's "
                "label_smoothing_factor takes the labels away; then DataCollatorForSeq2Seq(tokenizer, model=model), "
                "with the model itself and not a wrapper around it, puts decoder_input_ids into the batch."
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss, logits = None, None
        if (
            labels is not None
            and self.training
            and is_plain_linear(self.lm_head)
            and not torch.compiler.is_compiling()
        ):
            labels = cast(torch.LongTensor, labels.to(hidden.device))
            kept = labels.ne(-100)
            total = FusedLabelSmoothedLoss.apply(
                hidden[kept], self.lm_head.weight, self.lm_head.bias, labels[kept], self.config.label_smoothing
            )
            loss = total / divisor_of_loss(labels, num_items_in_batch)
        else:
            if isinstance(logits_to_keep, torch.Tensor):
                hidden = hidden[:, logits_to_keep]
            elif logits_to_keep:
                hidden = hidden[:, -logits_to_keep:]
            logits = self.lm_head(hidden)
            if labels is not None:
                smoothing = self.config.label_smoothing if self.training else 0.0
                loss = label_smoothed_loss(logits, labels, smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            **{CACHE: outputs.get(CACHE)},
        )


# ---------------------------------------------------------------------------------------------------------------------
# What comes in: masks, caches and inputs that do not fit are refused by name
# ---------------------------------------------------------------------------------------------------------------------


def check_one_input(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, prefix: str = "") -> None:
    """Raises ValueError unless exactly one of the two is given, with at least one row, and one token in the decoder.

    A source without any token is like one of padding alone: nothing is there to attend to.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"give either {prefix}input_ids or {prefix}inputs_embeds, got {found}.")
    given = cast(torch.Tensor, input_ids if inputs_embeds is None else inputs_embeds)
    is_ids = inputs_embeds is None
    if given.ndim != (2 if is_ids else 3) or given.shape[0] == 0 or (prefix and given.shape[1] == 0):
        least = "one row and one token" if prefix else "one row"
        raise ValueError(
            f"{prefix}{'input_ids' if is_ids else 'inputs_embeds'} must have the shape (batch, length"
            f"{'' if is_ids else ', d_model'}) with at least {least}, got {tuple(given.shape)}."
        )
    if is_ids and given.is_floating_point():
        raise ValueError(f"{prefix}input_ids must hold whole numbers, got {given.dtype}.")


def check_labels(labels: torch.Tensor, decoder_input_ids: torch.Tensor | None, vocab_size: int) -> None:
    """Raises ValueError for labels of the wrong shape and, on a CPU, for labels that are no words.

    On an accelerator the values are not looked at, for that would wait for it.
    """
    if labels.ndim != 2 or (decoder_input_ids is not None and labels.shape != decoder_input_ids.shape):
        wanted = "(batch, target_length)" if decoder_input_ids is None else tuple(decoder_input_ids.shape)
        raise ValueError(f"labels must have the shape {wanted}, got {tuple(labels.shape)}.")
    if labels.device.type == "cpu" and labels.numel() and not torch.compiler.is_compiling():
        wrong = (labels >= vocab_size) | ((labels < 0) & (labels != -100))
        if wrong.any():
            raise ValueError(
                f"labels must lie in [0, vocab_size={vocab_size}), or be -100 where there is none, got "
                f"{labels[wrong][0].item()}."
            )


def boolean_mask(mask: torch.Tensor | None, shape: tuple[int, int], name: str) -> torch.Tensor | None:
    """The Hub's 1/0 mask as a boolean one.

    Args:
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 for kept tokens, 0 for padding, of any dtype.
        shape (`tuple[int, int]`): Batch and length that it must have.
        name (`str`): What an error calls it.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`, True for kept tokens; None where no mask is given.

    Raises:
        ValueError: The mask has another shape.
    """
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] != shape[1]:
        raise ValueError(
            f"{name} must have the shape (batch, length) = {tuple(shape)}, the length counting cached tokens, got "
            f"{tuple(mask.shape)}; causal masks are made by the model itself."
        )
    return mask if mask.dtype == torch.bool else mask != 0


def boolean_causal_mask(mask: torch.Tensor, rows: int, length: int, key_length: int) -> torch.Tensor:
    """A causal mask that `generate()` made (it does for static caches) as a boolean one.

    Args:
        mask (`torch.Tensor` of shape `(batch or 1, 1, target_length, key_length)`): Boolean, True where a key may be
            attended to; or what is added to the scores, 0 where a key may be attended to.
        rows, length, key_length (`int`): Batch, target length and key length that it must have.

    Raises:
        ValueError: The mask has another shape or another type.
    """
    if mask.shape[0] not in (1, rows) or tuple(mask.shape[1:]) != (1, length, key_length):
        raise ValueError(
            f"a decoder_attention_mask of four dimensions must have the shape (batch, 1, target_length, key_length) = "
            f"{(rows, 1, length, key_length)}, got {tuple(mask.shape)}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "a decoder_attention_mask of four dimensions must be boolean (True: attended to) or floating point (added "
            f"to the scores), got {mask.dtype}."
        )
    return mask if mask.dtype == torch.bool else mask == 0


def static_cache_length(cache: Cache) -> int | None:
    """Slots of a cache whose size is fixed in advance; None for one that grows."""
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "max_cache_len", None) if layers else None


def check_static_cache(slots: int | None, past: torch.Tensor | int, length: int, side: str) -> None:
    """Raises ValueError where `length` more tokens do not fit into a cache of `slots`; None means any number."""
    if slots is None or torch.compiler.is_compiling():
        return
    if isinstance(past, torch.Tensor):
        # How much an accelerator's cache holds is not asked for at each step: the answer would hold up its queue.
        past = int(past) if past.device.type == "cpu" else 0
    if past + length > slots:
        raise ValueError(
            f"the static cache has room for max_cache_len={slots} {side} tokens, got {past + length}; make a longer "
            "one."
        )


def fit_cache_to_batch(cache: Cache, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Makes an empty static cache anew for the batch that comes; a cache that holds other rows is refused.

    Args:
        cache (`Cache`): Keys and values of self-attention or of attention to the encoder.
        layer_idx (`int`): The layer.
        key, value (`torch.Tensor` of shape `(batch, num_heads, length, width)`): What will be added.

    Raises:
        ValueError: The cache holds keys of another number of rows.
    """
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized or layer.keys.numel() == 0:
        return
    is_static = static_cache_length(cache) is not None
    if layer.keys.shape[0] == key.shape[0] and (not is_static or layer.keys.dtype == key.dtype):
        return
    if is_static and int(layer.get_seq_length()) == 0:
        layer.lazy_initialization(key, value)
    elif layer.keys.shape[0] != key.shape[0]:
        raise ValueError(
            f"the cache holds {layer.keys.shape[0]} rows, got a batch of {key.shape[0]}; use a new cache, or "
            "cache.reset(), for each batch."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def without_conversion_service() -> Iterator[None]:
    """Keeps transformers from handing a repository of pickled weights, and the token, to an outside service."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def architecture_of(name_or_path: Any, options: dict[str, Any]) -> str | None:
    """The class that a saved model was of, from its config.json; None where that does not tell.

    Args:
        name_or_path (`str` or `os.PathLike`, *optional*): Folder or repository.
        options (`dict`): Arguments of `from_pretrained`, of which those about the repository are used.
    """
    if name_or_path is None:
        return None
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
    try:
        saved, _ = PretrainedConfig.get_config_dict(name_or_path, **{n: options[n] for n in names if n in options})
    except OSError:  # no config.json; a config may have been given beside the folder
        return None
    return next(iter(saved.get("architectures") or []), None)


__all__ = [
    "VanillaTransformerEncoder",
    "VanillaTransformerDecoder",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
