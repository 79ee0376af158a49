"""The paper's decoding (section 6.1) behind `generate()`: its length penalty and its length limit for each row.

The searches keep the rules of transformers' own and take its place where nothing but tokens is asked for; everything
else (constraints, sampling, scores, caches of the caller's) is left to it. This file ships with every saved model.
Source: Vaswani et al. 2017, section 6.1; Wu et al. 2016, "Google's Neural Machine Translation System", equation (14).
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import logging

from .configuration_vanilla_transformer import PAPER_DECODING


logger = logging.get_logger(__name__)

LENGTH_PENALTY_TYPES = ("gnmt", "hub")

# On a CPU a softmax over fewer numbers takes ten times as long a number; shorter rows are filled up with masked keys.
MIN_KEYS_FOR_SOFTMAX = 16

# transformers renamed `past_key_values` to `cache` within version 5; outputs carry, and its generate() knows, the name
# of the installed one.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def warn_of_missing_mask() -> None:
    """Warns, once, that encoder outputs came without the mask that belongs to them."""
    logger.warning_once(
        "encoder_outputs were given without attention_mask: every encoder position is attended to, padding too; pass "
        "the attention_mask that the encoder saw."
    )


def as_model_output(encoder_outputs: Any) -> BaseModelOutput:
    """The encoder's output in any form as a `BaseModelOutput`; one that is one already is returned itself.

    Args:
        encoder_outputs: A `ModelOutput`, a dictionary or a tuple that the encoder returned, or its
            `last_hidden_state` alone, of shape `(batch, source_length, d_model)`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(encoder_outputs, BaseModelOutput):
        return encoder_outputs
    if isinstance(encoder_outputs, torch.Tensor):
        return BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, encoder_outputs))
    if isinstance(encoder_outputs, Mapping) and encoder_outputs.get("last_hidden_state") is not None:
        names = ("last_hidden_state", "hidden_states", "attentions")
        return BaseModelOutput(**{name: encoder_outputs.get(name) for name in names})
    if isinstance(encoder_outputs, (tuple, list)):
        return BaseModelOutput(*encoder_outputs[:3])
    raise TypeError(
        "encoder_outputs must be what the encoder returned (a BaseModelOutput, a tuple, or a dictionary with "
        f"last_hidden_state) or its last hidden state, a tensor; got {type(encoder_outputs).__name__}."
    )


class GNMTLengthPenalty(float):
    """The exponent alpha of the GNMT length penalty: `length ** GNMTLengthPenalty(alpha)` is ((5 + length) / 6) **
    alpha.

    Beam search divides a hypothesis' log-probability by `length ** length_penalty`, which makes this class all that
    the paper's ranking needs; everywhere else, and in JSON, it is the plain number alpha.

    Source: Wu et al. 2016, equation (14) without coverage; Vaswani et al. 2017, section 6.1 (alpha = 0.6).
    """

    def __rpow__(self, length: float) -> float:  # type: ignore[override]
        return ((5 + length) / 6) ** float(self)


class MaxNewTokensPerRow(StoppingCriteria):
    """Ends each row at a number of generated tokens of its own.

    Args:
        limits (`torch.LongTensor` of shape `(batch,)`): Generated tokens at most, the end of sentence counted.
        prompt_length (`int`): Tokens that the decoder started from, which do not count.
    """

    def __init__(self, limits: torch.Tensor, prompt_length: int):
        self.limits = limits
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        rows_per_source = input_ids.shape[0] // self.limits.shape[0]
        limits = self.limits.to(input_ids.device).repeat_interleave(rows_per_source)
        return cast(torch.BoolTensor, input_ids.shape[1] - self.prompt_length >= limits)


class ForcedEndPerRow(LogitsProcessor):
    """`forced_eos_token_id` where each row has a limit of its own: the last token of each row is that one.

    The processor of transformers forces it at the limit of the longest row alone.

    Args:
        end_token_ids (`torch.LongTensor` of shape `(ends,)`): The tokens that may end a row.
        limits, prompt_length: As in `MaxNewTokensPerRow`.
    """

    def __init__(self, end_token_ids: torch.Tensor, limits: torch.Tensor, prompt_length: int):
        self.end_token_ids = end_token_ids
        self.limits = limits
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows_per_source = input_ids.shape[0] // self.limits.shape[0]
        limits = self.limits.to(scores.device).repeat_interleave(rows_per_source)
        is_last = limits.eq(input_ids.shape[1] - self.prompt_length + 1)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.end_token_ids.to(scores.device)] = 0.0
        return cast(torch.FloatTensor, torch.where(is_last[:, None], forced, scores))


def paper_generation_config(config: Any) -> GenerationConfig:
    """Settings of a new model: the paper's (section 6.1), token ids, and what the configuration handed over."""
    settings = {
        **PAPER_DECODING,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        **getattr(config, "_generation_settings_of_file", {}),
        **getattr(config, "_moved_generation_settings", {}),
    }
    if settings["num_beams"] == 1:
        # A stop rule for beams means nothing without them, and transformers warns of it.
        settings["early_stopping"] = False
    return GenerationConfig(**settings)


def without_defaults(settings: GenerationConfig) -> GenerationConfig:
    """A copy for the file, without what says no more than transformers' own defaults, save for the paper's settings.

    Seq2SeqTrainer writes all those defaults into a model's settings when it evaluates, max_length=20 among them.
    """
    kept = copy.deepcopy(settings)
    defaults: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    for name, value in defaults.items():
        if name not in PAPER_DECODING and getattr(kept, name, None) == value:
            setattr(kept, name, None)
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# The same search, sooner
# ---------------------------------------------------------------------------------------------------------------------


class GrowingCache(DynamicCache):
    """Keys and values in buffers with room to grow: a step writes its own and copies nothing of the earlier ones."""

    def __init__(self, room: int = 64):
        super().__init__()
        self.room = room
        self.length = 0
        self.buffers: list[list[torch.Tensor]] = []

    def update(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the new positions of one layer, shape `(batch, num_heads, new, width)`; returns all so far."""
        if layer_idx == len(self.buffers):
            self.buffers.append([new.new_zeros(*new.shape[:2], self.room, new.shape[3]) for new in (key, value)])
        if layer_idx == 0:
            self.start, self.length = self.length, self.length + key.shape[2]
        pair = self.buffers[layer_idx]
        for which, new in enumerate((key, value)):
            if self.length > pair[which].shape[2]:
                grown = pair[which].new_empty(*new.shape[:2], max(self.length, 2 * pair[which].shape[2]), new.shape[3])
                grown[:, :, : self.start] = pair[which][:, :, : self.start]
                pair[which] = grown
            pair[which][:, :, self.start : self.length] = new
        return self.of_layer(layer_idx)

    def of_layer(self, layer_idx: int, least: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions so far, or of `least` (at most `room`): free ones hold finite numbers."""
        length = max(self.length, least)
        key, value = self.buffers[layer_idx]
        return key[:, :, :length], value[:, :, :length]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Positions so far."""
        return self.length

    def keep(self, rows: torch.Tensor) -> None:
        """Only these rows go on."""
        self.buffers = [[buffer.index_select(0, rows) for buffer in pair] for pair in self.buffers]

    def keep_positions(self, positions: torch.Tensor) -> None:
        """Only these positions of each row, an index of shape `(batch, kept)`, are remembered, in that order."""
        batch, self.length = positions.shape
        for pair in self.buffers:
            for buffer in pair:
                _, heads, room, width = buffer.shape
                first = torch.arange(batch * heads, device=positions.device).view(batch, heads, 1) * room
                kept = buffer.view(-1, width).index_select(0, (first + positions[:, None]).flatten())
                buffer[:, :, : self.length] = kept.view(batch, heads, self.length, width)


class BeamDecoder:
    """The decoder for several hypotheses of each source at once, without moving what it remembers.

    The hypotheses of a source stand side by side on the length axis, as if they were positions of one row; so the
    encoder's keys are made once for each source, and the keys of all hypotheses lie in one cache. `visible` says which
    of them a hypothesis descends from: where beams change places, that mask moves and the cache stays.

    Args:
        model: With a head.
        encoder_states (`torch.Tensor` of shape `(batch, source_length, d_model)`): One row a source.
        source_mask (`torch.Tensor` of shape `(batch, source_length)`): 1 for kept source tokens.
        most_tokens (`int`): Tokens of a hypothesis at most.
    """

    def __init__(self, model: Any, encoder_states: torch.Tensor, source_mask: torch.Tensor, most_tokens: int):
        self.model = model
        self.encoder_states = encoder_states
        self.source_mask = source_mask
        self.most_tokens = most_tokens
        self.steps = 0
        self.self_cache = GrowingCache()
        self.cache = EncoderDecoderCache(self.self_cache, DynamicCache())
        self.visible = torch.zeros((encoder_states.shape[0], 1, 0), dtype=torch.bool, device=encoder_states.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token of each hypothesis: `(batch, n)` to `(batch, n, vocab_size)`.

        They are the caller's to change, and count until the next step.
        """
        own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(tokens.shape[0], -1, -1)
        past = self.visible if self.steps else self.visible.expand(-1, tokens.shape[1], -1)
        self.visible = torch.cat([past, own], dim=-1)
        self.steps += 1
        return self.logits(tokens)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's answer to the tokens of a step, which `visible` knows already."""
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.encoder_states),
            attention_mask=self.source_mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=self.visible[:, None],
            use_cache=True,
            return_dict=True,
            cache=self.cache,
        ).logits

    def descend(self, parents: torch.Tensor) -> None:
        """Hypothesis i of a source now continues the one that was `parents[:, i]`, shape `(batch, num_beams)`."""
        self.visible = take(self.visible, parents)

    def keep(self, rows: torch.Tensor) -> None:
        """Only these sources, an index of shape `(kept,)`, go on."""
        self.encoder_states, self.source_mask = self.encoder_states[rows], self.source_mask[rows]
        self.visible = self.visible[rows]
        self.self_cache.keep(rows)
        for each in self.cache.cross_attention_cache.layers:
            layer = cast(Any, each)
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class FastBeamDecoder(BeamDecoder):
    """`BeamDecoder` for a decoder of plain matrices: the same equations layer by layer, with nothing around them.

    The matrices of query, key and value are one, keys and values of the encoder's output are made at the start, all
    hypotheses have one position, and what no hypothesis descends from any more is forgotten.
    """

    FORGET_FROM = 48  # remembered positions below which it does not pay to look for forgotten ones

    def __init__(self, model: Any, encoder_states: torch.Tensor, source_mask: torch.Tensor, most_tokens: int):
        super().__init__(model, encoder_states, source_mask, most_tokens)
        self.decoder = model.model.decoder
        config = model.config
        self.d_k, self.d_v = config.head_dimensions
        self.head_counts = {
            attention.num_heads
            for layer in self.decoder.layers
            for attention in (layer.self_attention, layer.cross_attention)
        }
        self.norm_first = config.norm_first
        weight = self.decoder.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        if torch.is_autocast_enabled(weight.device.type):
            self.dtype = torch.get_autocast_dtype(weight.device.type)
        self.positions = weight.new_zeros(0, config.d_model)
        self.head = self.matrix(model.lm_head)
        self.room: dict[torch.dtype, torch.Tensor] = {}  # for the logits of a step
        self.attend_to: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of the encoder's output
        self.matrices: list[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = []
        missing = max(0, MIN_KEYS_FOR_SOFTMAX - source_mask.shape[1])
        source_mask = F.pad(source_mask != 0, (0, missing))
        states = F.pad(encoder_states.to(self.dtype), (0, 0, 0, missing))
        for layer in self.decoder.layers:
            own, cross = layer.self_attention, layer.cross_attention
            self.matrices.append(
                {
                    "own": self.matrix(own.q_proj, own.k_proj, own.v_proj),
                    "own_out": self.matrix(own.out_proj),
                    "query": self.matrix(cross.q_proj),
                    "cross_out": self.matrix(cross.out_proj),
                    "fc1": self.matrix(layer.feed_forward.fc1),
                    "fc2": self.matrix(layer.feed_forward.fc2),
                }
            )
            key, value = (self.matrix(each)(states) for each in (cross.k_proj, cross.v_proj))
            # Contiguous, or each step would copy them.
            self.attend_to.append((self.split(key, self.d_k).contiguous(), self.split(value, self.d_v).contiguous()))
        self.source_bias = self.added_to_scores(source_mask[:, None])

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether the decoder is made of this package's layers and plain matrices, without hooks and adapters."""
        base = model.model
        everywhere = nn.modules.module
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
            return False
        for module in (model, base, model.lm_head, *base.decoder.modules()):
            kind = type(module)
            ours = kind.__module__.rpartition(".")[2] == "modeling_vanilla_transformer"
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            shaped = not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.ndim == 2  # and no flat piece
            if (
                not shaped
                or not (ours or kind in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList, nn.Identity))
                and not hasattr(module, "side_by_side")
                or "forward" in vars(module)
                # Those of transformers that record outputs do so only where outputs are asked for.
                or any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
                or any(type(each.data) is not torch.Tensor for each in module.parameters(recurse=False))
            ):
                return False
        for layer in base.decoder.layers:
            own = layer.self_attention
            if len({each.bias is None for each in (own.q_proj, own.k_proj, own.v_proj)}) > 1:
                return False
        parameters = [*base.decoder.parameters(), *model.lm_head.parameters()]
        devices, types = {each.device for each in parameters}, {each.dtype for each in parameters}
        return len(devices) == 1 and len(types) == 1 and "meta" not in {each.type for each in devices}

    def matrix(self, *linears: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Projections of the same input, one after the other, as one, in the precision of the products."""
        first = linears[0]
        if hasattr(first, "side_by_side"):  # matrices of another kind know how to be joined
            return first.side_by_side(linears[1:]) if len(linears) > 1 else first
        weight = torch.cat([each.weight for each in linears]) if len(linears) > 1 else first.weight
        bias = first.bias if first.bias is None else torch.cat([each.bias for each in linears]).to(self.dtype)
        return functools.partial(F.linear, weight=weight.to(self.dtype), bias=bias)

    def split(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """`(batch, length, num_heads * width)` to `(batch, num_heads, length, width)`."""
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, biases: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Equation (1); heads side by side again.

        Args:
            query (`torch.Tensor` of shape `(batch, n, num_heads * d_k)`): Q.
            key (`torch.Tensor` of shape `(batch, num_heads, length, d_k)`): K.
            value (`torch.Tensor` of shape `(batch, num_heads, length, d_v)`): V.
            biases (`dict`): By num_heads what is added to the scores, shape `(batch * num_heads, 1 or n, length)`.
        """
        rows, num_heads = self.split(query, self.d_k).flatten(0, 1), key.shape[1]
        bias = biases[num_heads]
        scores = torch.baddbmm(bias, rows, key.flatten(0, 1).transpose(1, 2), alpha=1.0 / math.sqrt(self.d_k))
        # In float32 at least: in half precision a softmax is less exact and, on a CPU, slower.
        exact = torch.promote_types(scores.dtype, torch.float32)
        heads = torch.bmm(torch.softmax(scores, dim=-1, dtype=exact).to(value.dtype), value.flatten(0, 1))
        return heads.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(2)

    def added_to_scores(self, mask: torch.Tensor) -> dict[int, torch.Tensor]:
        """0 where the mask is True, minus infinity where not, for each head; `(batch, 1 or n, length)` in.

        One for each number of heads that there is: pruned layers have fewer.
        """
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
        return {heads: bias.repeat_interleave(heads, dim=0) for heads in self.head_counts}

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `BeamDecoder.logits`."""
        if self.visible.shape[-1] >= self.FORGET_FROM:
            self.forget(tokens.shape[1])
        decoder = self.decoder
        x = F.embedding(tokens, decoder.embed_tokens.weight) * math.sqrt(decoder.config.d_model)
        if self.steps > len(self.positions):
            known = min(2 * self.steps + 62, self.most_tokens)  # twice as many as before
            steps = torch.arange(known, device=x.device)[None]
            self.positions = decoder.positions(steps, known, x.dtype)[0]
        x = x + self.positions[self.steps - 1]
        least = max(self.visible.shape[-1], MIN_KEYS_FOR_SOFTMAX)
        own_bias = self.added_to_scores(F.pad(self.visible, (0, least - self.visible.shape[-1])))

        def add_and_norm(x: torch.Tensor, sublayer: Any, norm: Any) -> torch.Tensor:
            return x + sublayer(norm(x)) if self.norm_first else norm(x + sublayer(x))

        for number, (layer, matrices) in enumerate(zip(decoder.layers, self.matrices, strict=True)):

            def self_attention(y: torch.Tensor) -> torch.Tensor:
                heads = layer.self_attention.num_heads  # noqa: B023
                widths = [heads * self.d_k] * 2 + [heads * self.d_v]
                query, key, value = matrices["own"](y).split(widths, dim=-1)  # noqa: B023
                self.self_cache.update(self.split(key, self.d_k), self.split(value, self.d_v), number)  # noqa: B023
                keys, values = self.self_cache.of_layer(number, least)  # noqa: B023
                return matrices["own_out"](self.attention(query, keys, values, own_bias))  # noqa: B023

            def cross_attention(y: torch.Tensor) -> torch.Tensor:
                query = matrices["query"](y)  # noqa: B023
                heads = self.attention(query, *self.attend_to[number], self.source_bias)  # noqa: B023
                return matrices["cross_out"](heads)  # noqa: B023

            def feed_forward(y: torch.Tensor) -> torch.Tensor:
                hidden = layer.feed_forward.activation(matrices["fc1"](y))  # noqa: B023
                return matrices["fc2"](hidden)  # noqa: B023

            x = add_and_norm(x, self_attention, layer.self_attention_norm)
            x = add_and_norm(x, cross_attention, layer.cross_attention_norm)
            x = add_and_norm(x, feed_forward, layer.feed_forward_norm)
        return self.in_words(decoder.norm(x))

    def in_words(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of the decoder's output, float32 at least, in memory that the next step writes over.

        With new memory for each step most of them would be out of the processor's cache when they are needed.
        """
        if isinstance(self.head, functools.partial):
            weight, bias = self.head.keywords["weight"], self.head.keywords["bias"]
            logits = self.room_for(*states.shape[:-1], weight.shape[0], dtype=weight.dtype)
            torch.mm(states.flatten(0, -2).to(weight.dtype), weight.t(), out=logits.flatten(0, -2))
            logits = logits if bias is None else logits.add_(bias)
        else:
            logits = self.head(states)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return logits if logits.dtype == exact else self.room_for(*logits.shape, dtype=exact).copy_(logits)

    def room_for(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the memory that is kept for tensors of its type."""
        size = math.prod(shape)
        if dtype not in self.room or self.room[dtype].numel() < size:
            self.room[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self.room[dtype][:size].view(shape)

    def forget(self, new: int) -> None:
        """Drops what no hypothesis descends from, where that is much; the last `new` positions are still to come."""
        past = self.visible[..., :-new]
        alive = past.any(dim=1)
        most = int(alive.sum(dim=-1).max())
        if most > 0.7 * past.shape[-1]:
            return
        # Rows with fewer than `most` keep some that nobody sees.
        positions = alive.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        self.self_cache.keep_positions(positions)
        kept = past.gather(-1, positions[:, None].expand(-1, past.shape[1], -1))
        self.visible = torch.cat([kept, self.visible[..., -new:]], dim=-1)

    def keep(self, rows: torch.Tensor) -> None:
        """See `BeamDecoder.keep`."""
        self.source_bias = {
            heads: bias.unflatten(0, (-1, heads))[rows].flatten(0, 1) for heads, bias in self.source_bias.items()
        }
        self.visible = self.visible[rows]
        self.self_cache.keep(rows)
        self.attend_to = [(key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.attend_to]


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of the second axis: `x` of shape `(batch, n, ...)` by `index` of shape `(batch, m)`."""
    shape = (*index.shape, *x.shape[2:])
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(shape))


def largest_sums(
    x: torch.Tensor, added: torch.Tensor, k: int, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of all `x[:, i, j] + added[:, i]` of each row.

    On a CPU they are looked for in the k blocks with the largest maxima, which must hold them.

    Args:
        x (`torch.Tensor` of shape `(batch, n, length)`): Numbers.
        added (`torch.Tensor` of shape `(batch, n)`): Added to each.
        k (`int`): How many, at most n x length.
        block (`int`, defaults to 128): Numbers in a block.

    Returns:
        The sums, in descending order, their i and their j, each of shape `(batch, k)`.
    """
    rows, n, length = x.shape
    blocks = length // block
    if x.device.type != "cpu" or n * blocks <= 4 * k:
        values, index = (x + added[:, :, None]).flatten(1).topk(k)
        return values, index // length, index % length
    largest = x[:, :, : blocks * block].view(rows, n, blocks, block).amax(dim=-1)
    best = (largest + added[:, :, None]).flatten(1).topk(k).indices
    places = ((best // blocks) * length + (best % blocks) * block)[:, :, None] + torch.arange(block)
    candidates = x.flatten(1).gather(1, places.flatten(1)).view_as(places)
    candidates = candidates + added.gather(1, best // blocks)[:, :, None]
    candidates, places = candidates.flatten(1), places.flatten(1)
    if blocks * block < length:
        rest = (x[:, :, blocks * block :] + added[:, :, None]).flatten(1)
        numbers = torch.arange(n)[:, None] * length + torch.arange(blocks * block, length)
        candidates = torch.cat([candidates, rest], dim=1)
        places = torch.cat([places, numbers.flatten().expand(rows, -1)], dim=1)
    values, index = candidates.topk(k)
    index = places.gather(1, index)
    return values, index // length, index % length


@torch.no_grad()
def beam_search(
    decoder: BeamDecoder,
    start_token_id: int,
    limits: torch.Tensor,
    end_token_ids: torch.Tensor,
    num_beams: int,
    length_penalty: float,
    early_stopping: bool | str,
    num_best: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Beam search with the rules of transformers' own, in which sources leave the batch as they are finished.

    Args:
        decoder (`BeamDecoder`): The model at work on a batch of sources.
        start_token_id (`int`): What every hypothesis starts from.
        limits (`torch.LongTensor` of shape `(batch,)`): Generated tokens at most, for each source.
        end_token_ids (`torch.LongTensor` of shape `(n,)`): Tokens that end a hypothesis.
        num_beams (`int`): Hypotheses of each source.
        length_penalty (`float`): p; a hypothesis of n tokens is ranked by its log-probability divided by `n ** p`.
        early_stopping (`bool` or `str`): As in `GenerationConfig`.
        num_best (`int`, *optional*): How many hypotheses of each source are wanted; None means all `num_beams`.

    Returns:
        Tokens of the `num_best` best hypotheses of each source, best first, shape `(batch, num_best, longest)`,
        without the start token; their lengths and their scores, both of shape `(batch, num_best)`.
    """
    batch, device = limits.shape[0], limits.device
    num_best = num_best or num_beams
    candidates = max(2, 1 + len(end_token_ids)) * num_beams  # so many that `num_beams` of them go on
    longest = int(limits.max())
    never = -1.0e9
    best_length_penalties = torch.tensor([int(n) ** length_penalty for n in limits.tolist()], device=device)

    width = min(longest, 64)  # of the tokens kept; grows with them
    finished = {
        "tokens": torch.zeros((batch, num_beams, width), dtype=torch.long, device=device),
        "lengths": torch.zeros((batch, num_beams), dtype=torch.long, device=device),
        "scores": torch.full((batch, num_beams), never, device=device),
    }
    results = {name: value.clone() for name, value in finished.items()}
    sources = torch.arange(batch, device=device)
    open_sources = torch.ones(batch, dtype=torch.bool, device=device)
    # All hypotheses start alike: one of them is enough, unless there are fewer words than candidates.
    starts = 1 if candidates <= decoder.model.config.vocab_size else num_beams
    tokens = torch.full((batch, starts), start_token_id, dtype=torch.long, device=device)
    hypotheses = torch.zeros((batch, starts, 0), dtype=torch.long, device=device)
    running = torch.zeros((batch, starts), device=device)
    running[:, 1:] = never
    first = torch.arange(candidates, device=device) < num_beams

    for length in range(1, longest + 1):
        if length > width:
            more = min(longest, 2 * width) - width
            width += more
            for each in (finished, results):
                each["tokens"] = F.pad(each["tokens"], (0, more))
        logits = decoder.step(tokens).float()
        log_probs = torch.log_softmax(logits, dim=-1, out=logits)  # in its place, for memory is what it costs
        scores, parents, words = largest_sums(log_probs, running, candidates)
        at_limit = limits <= length
        ends = (words[:, :, None] == end_token_ids).any(dim=-1) | at_limit[:, None]

        new = ends & first & open_sources[:, None]
        if bool(new.any()):
            continued = torch.cat([take(hypotheses, parents), words[:, :, None]], dim=-1)
            ranked = torch.where(new, scores / (length**length_penalty), never)
            order = torch.cat([finished["scores"], ranked], dim=1).topk(num_beams).indices
            lengths = torch.where(new, length, 0)
            for name, values in (("lengths", lengths), ("scores", ranked)):
                finished[name] = take(torch.cat([finished[name], values], dim=1), order)
            both = torch.cat([finished["tokens"][:, :, :length], continued], dim=1)
            finished["tokens"][:, :, :length] = take(both, order)

        order = torch.where(ends, never, scores).topk(num_beams).indices
        chosen = parents.gather(1, order)
        running, tokens = scores.gather(1, order), words.gather(1, order)
        running = torch.where(ends.gather(1, order), never, running)
        hypotheses = torch.cat([take(hypotheses, chosen), tokens[:, :, None]], dim=-1)
        decoder.descend(chosen)

        # A source is finished where its running hypotheses cannot overtake the worst of its finished ones any more.
        full = (finished["lengths"] > 0).all(dim=1)
        if early_stopping is True:
            may_improve = ~full
        else:
            by_limit = early_stopping == "never" and length_penalty > 0.0
            bound = running[:, 0] / (best_length_penalties if by_limit else length**length_penalty)
            may_improve = ~full | (bound > finished["scores"].amin(dim=1))
            if by_limit or length_penalty <= 0.0:
                # No later score exceeds this bound, so the hypotheses that nobody asks for need not be known.
                may_improve &= bound > finished["scores"][:, num_best - 1]
        open_sources &= may_improve & ~at_limit
        count = int(open_sources.sum())
        if count == 0 or count <= 0.9 * len(sources):
            closed = (~open_sources).nonzero()[:, 0]
            for name, values in results.items():
                values[sources[closed]] = finished[name][closed]
            if count == 0:
                break
            kept = open_sources.nonzero()[:, 0]
            decoder.keep(kept)
            finished = {name: values[kept] for name, values in finished.items()}
            sources, tokens, hypotheses, running = sources[kept], tokens[kept], hypotheses[kept], running[kept]
            limits, best_length_penalties = limits[kept], best_length_penalties[kept]
            open_sources = open_sources[kept]
    return results["tokens"][:, :num_best], results["lengths"][:, :num_best], results["scores"][:, :num_best]


@torch.no_grad()
def greedy_search(
    decoder: BeamDecoder, start_token_id: int, limits: torch.Tensor, end_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable token at each step; sources leave the batch as they are finished.

    Args:
        decoder (`BeamDecoder`): The model at work on a batch of sources, one hypothesis each.
        start_token_id (`int`): What every hypothesis starts from.
        limits (`torch.LongTensor` of shape `(batch,)`): Generated tokens at most, for each source.
        end_token_ids (`torch.LongTensor` of shape `(n,)`): Tokens that end a hypothesis.

    Returns:
        Tokens, shape `(batch, longest)`, without the start token, and how many of them, shape `(batch,)`.
    """
    batch, device, longest = limits.shape[0], limits.device, int(limits.max())
    results = torch.zeros((batch, longest), dtype=torch.long, device=device)
    lengths = limits.clone()
    sources = torch.arange(batch, device=device)
    open_sources = torch.ones(batch, dtype=torch.bool, device=device)
    tokens = torch.full((batch, 1), start_token_id, dtype=torch.long, device=device)
    for length in range(1, longest + 1):
        tokens = decoder.step(tokens).float().argmax(dim=-1)
        results[sources[open_sources], length - 1] = tokens[open_sources, 0]
        ends = (tokens == end_token_ids).any(dim=-1) | (limits[sources] <= length)
        lengths[sources[open_sources & ends]] = length
        open_sources &= ~ends
        count = int(open_sources.sum())
        if count == 0:
            break
        if count <= 0.9 * len(sources):
            kept = open_sources.nonzero()[:, 0]
            decoder.keep(kept)
            sources, tokens, open_sources = sources[kept], tokens[kept], open_sources[kept]
    return results, lengths


def padded_sequences(start: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, fill: int) -> torch.Tensor:
    """What `generate()` returns: the start token, the tokens, then `fill` up to the longest row.

    Args:
        start (`torch.LongTensor` of shape `(batch, 1)`): Start tokens.
        tokens (`torch.LongTensor` of shape `(batch * n, longest)`): Generated tokens.
        lengths (`torch.LongTensor` of shape `(batch * n,)`): How many of them.
        fill (`int`): What stands behind them.
    """
    tokens = tokens[:, : int(lengths.max())]
    tokens = tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None], fill)
    return torch.cat([start.repeat_interleave(tokens.shape[0] // start.shape[0], dim=0), tokens], dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Behind generate()
# ---------------------------------------------------------------------------------------------------------------------


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` with the paper's length penalty, its limit for each row, and the mask that padding implies.

    Differs from the stock method in these points:

    - `length_penalty_type` "gnmt" divides by ((5 + length) / 6) ** length_penalty, "hub" (or absent) by
      length ** length_penalty, length being the generated tokens, end of sentence included;
    - `max_new_tokens_over_source` n ends each row at its own kept source tokens + n generated tokens, end of sentence
      counted on both sides; only `max_length` or `max_new_tokens` given in the call replace it;
    - without `attention_mask`, tokens equal to `pad_token_id` are masked; without `decoder_attention_mask`, those
      before the first word of a decoder prompt;
    - each decoder prompt of a batch gets the start token if it lacks it, whatever the others have;
    - the start token is that of training, `config.decoder_start_token_id`, unless the call gives another; special
      tokens that the settings lack are those of the model's configuration;
    - plain beam and greedy searches run in `beam_search` and `greedy_search`, with the same results (hypotheses whose
      scores are equal to six digits, or in half precision as far as it rounds, may change places).

    Source: Vaswani et al. 2017, section 6.1.
    """

    config: Any

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates translations; see `transformers.GenerationMixin.generate` for everything not named here.

        Args:
            inputs (`torch.LongTensor` of shape `(batch, source_length)`, *optional*): Source tokens, or `input_ids`.
            generation_config (`GenerationConfig`, *optional*): Replaces settings of the model's own for this call.
            logits_processor (`LogitsProcessorList`, *optional*): Additional processors.
            stopping_criteria (`StoppingCriteriaList`, *optional*): Additional criteria.
            kwargs: Settings for this call, `length_penalty_type` and `max_new_tokens_over_source` among them, and
                inputs of the model (`attention_mask`, `encoder_outputs`, `decoder_input_ids` ...).

        Returns:
            `torch.LongTensor` of shape `(batch * num_return_sequences, length)`, or a `ModelOutput` with
            `return_dict_in_generate=True`.

        Raises:
            ValueError: An unknown `length_penalty_type`, a negative `max_new_tokens_over_source`, fewer than 1 of
                `num_beams`, `num_return_sequences`, `max_new_tokens` or `max_length`, a limit in the call beyond the
                table of learned positions, or no row at all.
        """
        given = generation_config if generation_config is not self.generation_config else None
        settings = copy.deepcopy(given)
        if CACHE != "cache" and "cache" in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")

        def setting(name: str) -> Any:
            """The value in force: from the call, else from its generation_config, else from the model's."""
            for value in (kwargs.get(name), getattr(given, name, None), getattr(self.generation_config, name, None)):
                if value is not None:
                    return value
            return None

        def settle(name: str, value: Any) -> None:
            if settings is None:
                kwargs[name] = value
            else:
                kwargs.pop(name, None)
                setattr(settings, name, value)

        penalty_type = setting("length_penalty_type") or "hub"
        over_source = setting("max_new_tokens_over_source")
        if penalty_type not in LENGTH_PENALTY_TYPES:
            raise ValueError(
                f"length_penalty_type must be one of {', '.join(LENGTH_PENALTY_TYPES)}, got {penalty_type!r}; "
                '"gnmt" is the paper\'s ((5 + length) / 6) ** p, "hub" is length ** p.'
            )
        if over_source is not None and (not isinstance(over_source, int) or over_source < 0):
            raise ValueError(f"max_new_tokens_over_source must be a whole number of at least 0, got {over_source!r}.")
        for name in ("num_beams", "num_return_sequences"):
            number = setting(name)
            if number is not None and (not isinstance(number, Integral) or number < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        kwargs.pop("length_penalty_type", None)
        kwargs.pop("max_new_tokens_over_source", None)
        penalty = setting("length_penalty")
        if penalty_type == "gnmt" and penalty is not None and (setting("num_beams") or 1) > 1:
            settle("length_penalty", GNMTLengthPenalty(penalty))

        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if setting(name) is None and getattr(self.config, name) is not None:
                settle(name, getattr(self.config, name))
        start = kwargs.get("decoder_start_token_id")
        start = getattr(given, "decoder_start_token_id", None) if start is None else start
        if start is None:
            start = self.config.decoder_start_token_id
            other = getattr(self.generation_config, "decoder_start_token_id", None)
            if other not in (None, start):
                logger.warning_once(
                    f"generation_config.decoder_start_token_id={other} is not the decoder_start_token_id={start} of "
                    "the configuration, which the model is trained with and which counts here; change it there, or "
                    "give decoder_start_token_id in the call."
                )
        settle("decoder_start_token_id", start)
        self._prepare_decoder_prompts(kwargs, start)

        if kwargs.get("encoder_outputs") is not None:
            # A copy of its own: generate() repeats the states for the beams in the object that it is given.
            kwargs["encoder_outputs"] = copy.copy(as_model_output(kwargs["encoder_outputs"]))
        source_lengths = self._prepare_source_mask(inputs, kwargs)
        if source_lengths is not None and source_lengths.shape[0] == 0:
            raise ValueError("there is nothing to generate from: the batch has no row.")
        given_limits = {
            name: getattr(given, name, None) if kwargs.get(name) is None else kwargs[name]
            for name in ("max_length", "max_new_tokens")
        }
        prompt = kwargs.get("decoder_input_ids")
        prompt_length = 1 if prompt is None else prompt.shape[1]
        # The last token generated needs no position.
        is_learned = self.config.position_embedding == "learned"
        most_new_tokens = self.config.max_position_embeddings - prompt_length + 1 if is_learned else None
        if any(limit is not None for limit in given_limits.values()):
            wanted = given_limits["max_new_tokens"] or (given_limits["max_length"] or 0) - prompt_length
            if most_new_tokens is not None and wanted > most_new_tokens:
                raise ValueError(
                    f"learned positions end at max_position_embeddings={self.config.max_position_embeddings}: after "
                    f"{prompt_length} decoder tokens at most {most_new_tokens} can be generated, got a limit of "
                    f"{wanted}; lower max_new_tokens or max_length."
                )
            # What the model's own settings say of the length does not count beside what the call says.
            for name, limit in given_limits.items():
                settle(name, limit)
        elif over_source is not None and source_lengths is not None:
            limits = source_lengths + over_source
            # The longest row's limit bounds the call; each row's own limit is a criterion of its own.
            if most_new_tokens is not None:
                limits = limits.clamp(max=max(1, most_new_tokens))
            settle("max_length", prompt_length + int(limits.max()))
            settle("max_new_tokens", None)
            if int(limits.min()) < int(limits.max()):
                stopping_criteria = StoppingCriteriaList(
                    [*(stopping_criteria or []), MaxNewTokensPerRow(limits, prompt_length)]
                )
                if (end := setting("forced_eos_token_id")) is not None:
                    forced_end = ForcedEndPerRow(torch.as_tensor(end).reshape(-1), limits, prompt_length)
                    logits_processor = LogitsProcessorList([*(logits_processor or []), forced_end])

        return super().generate(
            inputs,
            generation_config=settings,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            **kwargs,
        )

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """The stock criteria, without the warning at `max_position_embeddings`, which does not bound sinusoids."""
        criteria = cast(Any, super())._get_stopping_criteria(*args, **kwargs)
        if self.config.position_embedding == "sinusoidal":
            for criterion in criteria:
                if hasattr(criterion, "max_position_embeddings"):
                    criterion.max_position_embeddings = None
        return criteria

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """The stock processors; the one that forces the last token is that of the rows, in the same place."""
        processors = cast(Any, super())._get_logits_processor(*args, **kwargs)
        per_row = next((each for each in processors if isinstance(each, ForcedEndPerRow)), None)
        if per_row is None:
            return processors
        return LogitsProcessorList(
            [
                per_row if isinstance(each, ForcedEOSTokenLogitsProcessor) else each
                for each in processors
                if each is not per_row
            ]
        )

    def _prepare_source_mask(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Puts the mask that padding implies into `kwargs`; returns kept source tokens of each row, shape (batch,)."""
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        mask = kwargs.get("attention_mask")
        if mask is None and input_ids is not None and input_ids.ndim == 2 and not input_ids.is_floating_point():
            mask = input_ids.ne(self.config.pad_token_id).long()
            kwargs["attention_mask"] = mask
        if mask is not None:
            return mask.sum(dim=-1) if mask.ndim == 2 else None
        states = kwargs.get("inputs_embeds")
        if states is None and (encoder_outputs := kwargs.get("encoder_outputs")) is not None:
            warn_of_missing_mask()
            states = encoder_outputs[0]
        if states is None:
            return None
        return torch.full((states.shape[0],), states.shape[1], dtype=torch.long, device=states.device)

    def _prepare_decoder_prompts(self, kwargs: dict[str, Any], start_token_id: Any) -> None:
        """Makes each row of `decoder_input_ids` begin with the start token, as it would alone.

        The stock method looks at the first column of all rows together, padding or not. Here the first token that a
        row's mask keeps decides; where no mask is given, padding before the first word is not kept.
        """
        prompt = kwargs.get("decoder_input_ids")
        if prompt is None or kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            return
        starts = torch.as_tensor(start_token_id, device=prompt.device).reshape(-1, 1)
        mask = kwargs.get("decoder_attention_mask")
        if mask is None and not bool((starts == self.config.pad_token_id).any()):
            mask = prompt.ne(self.config.pad_token_id).long().cummax(dim=-1).values
            if bool(mask.all()):
                mask = None
        first = torch.zeros_like(prompt[:, :1]) if mask is None else (mask != 0).long().argmax(dim=-1, keepdim=True)
        lacking = prompt.gather(1, first) != starts
        if bool(lacking.any()):
            if mask is None and not bool(lacking.all()):
                mask = torch.ones_like(prompt)
            column = torch.where(lacking, starts, self.config.pad_token_id)
            prompt = torch.cat([column, prompt], dim=1)
            if mask is not None:
                mask = torch.cat([lacking.to(mask.dtype), mask], dim=1)
        kwargs["decoder_input_ids"] = prompt
        if mask is not None:
            kwargs["decoder_attention_mask"] = mask

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """The stock method, but prompts that `_prepare_decoder_prompts` completed are left as they are."""
        prompt = (kwargs.get("model_kwargs") or {}).get("decoder_input_ids")
        mask = (kwargs.get("model_kwargs") or {}).get("decoder_attention_mask")
        input_ids, model_kwargs = cast(Any, super())._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        if prompt is not None and mask is not None and input_ids.shape[1] > prompt.shape[1]:
            return prompt, {**model_kwargs, "decoder_attention_mask": mask}
        return input_ids, model_kwargs

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called by `generate()` for beams: `beam_search`, or the stock one where more is asked for than it knows."""
        limits = self._limits_of_plain_search(
            input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )
        if limits is None or args:
            return cast(Any, super())._beam_search(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )
        beams, per_source = cast(int, generation_config.num_beams), generation_config.num_return_sequences or 1
        states, mask = kwargs["encoder_outputs"][0][::beams], kwargs["attention_mask"][::beams]
        settings = cast(Any, generation_config)
        tokens, lengths, _ = beam_search(
            self._decoder_of_search(states, mask, limits),
            int(input_ids[0, 0]),
            limits,
            settings._eos_token_tensor.reshape(-1),
            beams,
            settings.length_penalty,
            settings.early_stopping,
            per_source,
        )
        pad = settings._pad_token_tensor
        fill = pad or settings._eos_token_tensor.reshape(-1)[0]  # the stock search's choice, 0 not being one
        return padded_sequences(input_ids[::beams], tokens.flatten(0, 1), lengths.flatten(), int(fill))

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called by `generate()` without beams: `greedy_search`, or the stock one, which also draws at random."""
        limits = self._limits_of_plain_search(
            input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )
        if limits is None or args:
            return cast(Any, super())._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )
        settings = cast(Any, generation_config)
        tokens, lengths = greedy_search(
            self._decoder_of_search(kwargs["encoder_outputs"][0], kwargs["attention_mask"], limits),
            int(input_ids[0, 0]),
            limits,
            settings._eos_token_tensor.reshape(-1),
        )
        return padded_sequences(input_ids, tokens, lengths, int(settings._pad_token_tensor))

    def _decoder_of_search(self, states: torch.Tensor, mask: torch.Tensor, limits: torch.Tensor) -> BeamDecoder:
        """The fastest decoder that gives the model's numbers."""
        # A source of padding alone has no key to attend to, which the model knows what to do with.
        plain = FastBeamDecoder.knows(self) and bool((mask != 0).any(dim=-1).all())
        kind = FastBeamDecoder if plain else BeamDecoder
        return kind(self, states, mask, int(limits.max()))

    def _limits_of_plain_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Most tokens that each source may get, shape `(batch,)`; None where the stock search is to be used.

        That is where logits are processed, tokens drawn, anything but tokens returned, a cache or a prompt given, or
        where hypotheses end by other criteria than the end of sentence and a length.
        """
        settings = cast(Any, generation_config)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        plain_cache = (
            isinstance(cache, EncoderDecoderCache)
            and type(cache.self_attention_cache) is DynamicCache
            and cache.get_seq_length() == 0
            and not any(cache.is_updated.values())
        )
        unlike = (
            len(logits_processor) > 0
            or settings.do_sample
            or settings.return_dict_in_generate
            or kwargs.get("synced_gpus")
            or kwargs.get("streamer") is not None
            or kwargs.get("decoder_attention_mask") is not None
            or settings._eos_token_tensor is None
            or settings._pad_token_tensor is None
            or not plain_cache
            or input_ids.shape[1] != 1
            or kwargs.get("attention_mask") is None
            or kwargs.get("encoder_outputs") is None
            or self.config._attn_implementation == "eager"
            or cast(Any, self).training
        )
        beams = settings.num_beams or 1
        if unlike or bool((input_ids != input_ids[0]).any()):
            return None
        limits = torch.full((input_ids.shape[0] // beams,), settings.max_length - 1, device=input_ids.device)
        for criterion in stopping_criteria:
            if type(criterion) is MaxNewTokensPerRow:
                limits = torch.minimum(limits, criterion.limits.to(limits.device))
            elif type(criterion) is MaxLengthCriteria:
                limits = limits.clamp(max=criterion.max_length - 1)
            elif type(criterion) is not EosTokenCriteria:
                return None
        if self.config.position_embedding == "learned" and int(limits.max()) > self.config.max_position_embeddings:
            return None  # the stock search says so when it gets there
        return limits if int(limits.min()) > 0 else None

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Called by `from_pretrained`: what counts in the settings of a loaded model.

        A checkpoint without generation_config.json decodes as the paper does (the stock method would build settings
        from config.json, which holds none, and so fall back to 20 greedy tokens). Settings that were given to the
        configuration by argument count more than the file.
        """
        cast(Any, super()).adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is not None:
            return
        if getattr(self.generation_config, "_from_model_config", False):
            self.generation_config = paper_generation_config(self.config)
            return
        for name, value in getattr(self.config, "_generation_settings_of_file", {}).items():
            counts = getattr(self.generation_config, name, None)
            if counts != value:
                logger.warning(
                    f"{name} is {value!r} in config.json and {counts!r} in generation_config.json, which counts."
                )
        for name, value in getattr(self.config, "_moved_generation_settings", {}).items():
            setattr(self.generation_config, name, value)


__all__ = ["VanillaTransformerGenerationMixin"]
