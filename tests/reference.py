"""The paper as loops in float64: the oracle that the model is judged by.

Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 to 3.5, 5.4 (label smoothing) and 6.1 (decoding): one
sentence, one head and one position at a time, for reading and not for speed. Nothing is batched, cached, fused or
masked by large negative numbers (a position that may not be attended to is left out of the sum). It shares no code
with the package and uses no deep-learning library. Weights come as a plain dict of arrays under the names of the
package's state dict, so a test says `reference.logits({name: tensor.double().numpy() for ...}, hyper, ...)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Hyper:
    """What the shapes of the weights do not tell."""

    num_heads: int
    encoder_layers: int
    decoder_layers: int
    norm_first: bool = False
    final_norm: bool | None = None  # None: the same as norm_first
    activation: str = "relu"
    position_embedding: str = "sinusoidal"
    layer_norm_eps: float = 1e-5
    bos: int = 0
    pad: int = 1
    eos: int = 2

    @property
    def has_final_norm(self) -> bool:
        return self.norm_first if self.final_norm is None else self.final_norm


# 3.5 Positional Encoding --------------------------------------------------------------------------


def sinusoid(position: int, d_model: int) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle; shape (d_model,)."""
    encoding = np.zeros(d_model)
    for column in range(d_model):
        two_i = column - column % 2
        angle = position / math.pow(10000.0, two_i / d_model)
        encoding[column] = math.sin(angle) if column % 2 == 0 else math.cos(angle)
    return encoding


def positions_of(mask: Sequence[int]) -> list[int]:
    """A token's position is the number of kept tokens before it, so padding on either side moves nothing."""
    return [sum(int(kept) for kept in mask[:place]) for place in range(len(mask))]


# 3.4 Embeddings and Softmax -----------------------------------------------------------------------


def embed(weights: Weights, hyper: Hyper, side: str, ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """Embedding times sqrt(d_model), plus the position; side is "encoder" or "decoder"; shape (length, d_model)."""
    table = _get(weights, f"{side}.embed_tokens.weight")
    d_model = table.shape[1]
    rows = []
    for token, position in zip(ids, positions_of(mask), strict=True):
        row = [math.sqrt(d_model) * float(value) for value in table[token]]
        if hyper.position_embedding == "sinusoidal":
            offset = sinusoid(position, d_model)
        else:
            offset = _get(weights, f"{side}.positions.embed_positions.weight")[position]
        rows.append([value + float(extra) for value, extra in zip(row, offset, strict=True)])
    return np.array(rows).reshape(len(ids), d_model)


def log_softmax(scores: Sequence[float]) -> list[float]:
    largest = max(scores)
    log_total = largest + math.log(math.fsum(math.exp(score - largest) for score in scores))
    return [score - log_total for score in scores]


# 3.2 Attention ------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, allowed: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Equation (1) for one query: the mean of the values, weighted by softmax(q . k / sqrt(d_k)) over what is allowed.

    A query that may attend to nothing gets zeros: the sum over no key.
    """
    attended = [place for place in range(len(keys)) if allowed[place]]
    weights = np.zeros(len(keys))
    mixed = np.zeros(values.shape[1])
    if attended:
        scores = [float(np.dot(query, keys[place])) / math.sqrt(len(query)) for place in attended]
        for place, log_weight in zip(attended, log_softmax(scores), strict=True):
            weights[place] = math.exp(log_weight)
            mixed = mixed + weights[place] * values[place]
    return mixed, weights


def multi_head_attention(
    weights: Weights,
    name: str,
    num_heads: int,
    query_states: np.ndarray,
    memory_states: np.ndarray,
    may_attend: Callable[[int, int], bool],
) -> tuple[np.ndarray, np.ndarray]:
    """Concat(head_1 .. head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Returns the output (target_len, d_model) and the attention weights (num_heads, target_len, source_len).
    """
    queries = np.array([_linear(weights, f"{name}.q_proj", state) for state in query_states])
    keys = np.array([_linear(weights, f"{name}.k_proj", state) for state in memory_states])
    values = np.array([_linear(weights, f"{name}.v_proj", state) for state in memory_states])
    d_k, d_v = queries.shape[1] // num_heads, values.shape[1] // num_heads
    probabilities = np.zeros((num_heads, len(query_states), len(memory_states)))
    outputs = []
    for i in range(len(query_states)):
        allowed = [may_attend(i, j) for j in range(len(memory_states))]
        heads = []
        for head in range(num_heads):
            of_keys, of_values = slice(head * d_k, (head + 1) * d_k), slice(head * d_v, (head + 1) * d_v)
            mixed, probabilities[head, i] = scaled_dot_product_attention(
                queries[i, of_keys], keys[:, of_keys], values[:, of_values], allowed
            )
            heads.append(mixed)
        outputs.append(_linear(weights, f"{name}.out_proj", np.concatenate(heads)))
    return np.array(outputs), probabilities


# 3.3 Position-wise Feed-Forward Networks ----------------------------------------------------------


def feed_forward(weights: Weights, name: str, activation: str, states: np.ndarray) -> np.ndarray:
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, each position by itself."""
    outputs = []
    for state in states:
        hidden = [_activate(activation, float(value)) for value in _linear(weights, f"{name}.fc1", state)]
        outputs.append(_linear(weights, f"{name}.fc2", np.array(hidden)))
    return np.array(outputs)


def layer_norm(weights: Weights, name: str, eps: float, states: np.ndarray) -> np.ndarray:
    gain, bias = _get(weights, f"{name}.weight"), _get(weights, f"{name}.bias")
    outputs = []
    for state in states:
        mean = math.fsum(state) / len(state)
        variance = math.fsum((value - mean) ** 2 for value in state) / len(state)
        outputs.append([(value - mean) / math.sqrt(variance + eps) for value in state] * gain + bias)
    return np.array(outputs)


# 3.1 Encoder and Decoder Stacks -------------------------------------------------------------------


def residual(
    weights: Weights, hyper: Hyper, norm: str, states: np.ndarray, sublayer: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """LayerNorm(x + Sublayer(x)); with norm_first x + Sublayer(LayerNorm(x))."""
    if hyper.norm_first:
        return states + sublayer(layer_norm(weights, norm, hyper.layer_norm_eps, states))
    return layer_norm(weights, norm, hyper.layer_norm_eps, states + sublayer(states))


def encode(
    weights: Weights,
    hyper: Hyper,
    input_ids: Sequence[int],
    attention_mask: Sequence[int] | None = None,
    record: dict[str, list[np.ndarray]] | None = None,
) -> np.ndarray:
    """The encoder's states of one sentence, (source_len, d_model); attention weights go to `record["encoder"]`."""
    mask = _mask(hyper, input_ids, attention_mask)
    states = embed(weights, hyper, "encoder", input_ids, mask)
    for number in range(hyper.encoder_layers):
        layer = f"encoder.layers.{number}"

        def self_attention(states: np.ndarray, layer: str = layer) -> np.ndarray:
            mixed, attention = multi_head_attention(
                weights, f"{layer}.self_attention", hyper.num_heads, states, states, lambda i, j: bool(mask[j])
            )
            if record is not None:
                record.setdefault("encoder", []).append(attention)
            return mixed

        def ffn(states: np.ndarray, layer: str = layer) -> np.ndarray:
            return feed_forward(weights, f"{layer}.feed_forward", hyper.activation, states)

        states = residual(weights, hyper, f"{layer}.self_attention_norm", states, self_attention)
        states = residual(weights, hyper, f"{layer}.feed_forward_norm", states, ffn)
    if hyper.has_final_norm:
        states = layer_norm(weights, "encoder.norm", hyper.layer_norm_eps, states)
    return states


def decode(
    weights: Weights,
    hyper: Hyper,
    memory: np.ndarray,
    source_mask: Sequence[int],
    decoder_input_ids: Sequence[int],
    decoder_attention_mask: Sequence[int] | None = None,
    record: dict[str, list[np.ndarray]] | None = None,
) -> np.ndarray:
    """The decoder's states of one sentence, (target_len, d_model); without a mask every decoder token is kept."""
    mask = [1] * len(decoder_input_ids) if decoder_attention_mask is None else list(decoder_attention_mask)
    states = embed(weights, hyper, "decoder", decoder_input_ids, mask)
    for number in range(hyper.decoder_layers):
        layer = f"decoder.layers.{number}"

        def self_attention(states: np.ndarray, layer: str = layer) -> np.ndarray:
            mixed, attention = multi_head_attention(
                weights,
                f"{layer}.self_attention",
                hyper.num_heads,
                states,
                states,
                lambda i, j: j <= i and bool(mask[j]),
            )
            if record is not None:
                record.setdefault("decoder", []).append(attention)
            return mixed

        def cross_attention(states: np.ndarray, layer: str = layer) -> np.ndarray:
            mixed, attention = multi_head_attention(
                weights,
                f"{layer}.cross_attention",
                hyper.num_heads,
                states,
                memory,
                lambda i, j: bool(source_mask[j]),
            )
            if record is not None:
                record.setdefault("cross", []).append(attention)
            return mixed

        def ffn(states: np.ndarray, layer: str = layer) -> np.ndarray:
            return feed_forward(weights, f"{layer}.feed_forward", hyper.activation, states)

        states = residual(weights, hyper, f"{layer}.self_attention_norm", states, self_attention)
        states = residual(weights, hyper, f"{layer}.cross_attention_norm", states, cross_attention)
        states = residual(weights, hyper, f"{layer}.feed_forward_norm", states, ffn)
    if hyper.has_final_norm:
        states = layer_norm(weights, "decoder.norm", hyper.layer_norm_eps, states)
    return states


def logits(
    weights: Weights,
    hyper: Hyper,
    input_ids: Sequence[Sequence[int]],
    decoder_input_ids: Sequence[Sequence[int]],
    attention_mask: Sequence[Sequence[int]] | None = None,
    decoder_attention_mask: Sequence[Sequence[int]] | None = None,
    record: list[dict[str, list[np.ndarray]]] | None = None,
) -> np.ndarray:
    """Scores of every word before the softmax for a batch of rectangles, (batch, target_len, vocab_size)."""
    batch = []
    for row, (source, target) in enumerate(zip(input_ids, decoder_input_ids, strict=True)):
        source_mask = _mask(hyper, source, None if attention_mask is None else attention_mask[row])
        target_mask = None if decoder_attention_mask is None else decoder_attention_mask[row]
        attentions: dict[str, list[np.ndarray]] = {}
        memory = encode(weights, hyper, source, source_mask, attentions)
        states = decode(weights, hyper, memory, source_mask, target, target_mask, attentions)
        batch.append([_linear(weights, "lm_head", state) for state in states])
        if record is not None:
            record.append(attentions)
    return np.array(batch)


# 5.4 Label Smoothing ------------------------------------------------------------------------------


def shift_right(labels: Sequence[int], start: int, pad: int) -> list[int]:
    """The decoder reads the labels one place later, after the start token; -100 is read as padding."""
    return [start] + [pad if label == -100 else label for label in labels[:-1]]


def loss(
    scores: np.ndarray, labels: Sequence[Sequence[int]], label_smoothing: float = 0.0, count: float | None = None
) -> float:
    """Cross-entropy with the target 1 - eps on the label and eps spread evenly over the whole vocabulary.

    Args:
        scores: Logits of shape (batch, target_len, vocab_size).
        labels: Right words, (batch, target_len); -100 is left out.
        label_smoothing: eps, between 0 and 1.
        count: What to divide the sum by; None for the number of labels that are not -100.
    """
    total, kept = 0.0, 0
    for row_scores, row_labels in zip(scores, labels, strict=True):
        for word_scores, label in zip(row_scores, row_labels, strict=True):
            if label == -100:
                continue
            kept += 1
            log_probs = log_softmax([float(score) for score in word_scores])
            for word, log_prob in enumerate(log_probs):
                target = label_smoothing / len(log_probs) + (1 - label_smoothing if word == label else 0.0)
                total -= target * log_prob
    return total / (kept if count is None else count) if kept else 0.0


# 6.1 Decoding -------------------------------------------------------------------------------------


class Sentence:
    """One source sentence and the log-probabilities of what follows any prefix, decoded anew each time."""

    def __init__(
        self, weights: Weights, hyper: Hyper, input_ids: Sequence[int], attention_mask: Sequence[int] | None = None
    ) -> None:
        self.weights, self.hyper = weights, hyper
        self.mask = _mask(hyper, input_ids, attention_mask)
        self.memory = encode(weights, hyper, input_ids, self.mask)
        self._known: dict[tuple[int, ...], list[float]] = {}

    def next_log_probs(self, prefix: Sequence[int]) -> list[float]:
        """log P(word | source, prefix) for each word; the prefix begins with the start token."""
        key = tuple(prefix)
        if key not in self._known:
            states = decode(self.weights, self.hyper, self.memory, self.mask, prefix)
            self._known[key] = log_softmax([float(score) for score in _linear(self.weights, "lm_head", states[-1])])
        return self._known[key]

    def log_prob(self, target: Sequence[int]) -> float:
        """log P(target | source), EOS counted where the target has one; the target has no start token."""
        prefix, total = [self.hyper.bos], 0.0
        for word in target:
            total += self.next_log_probs(prefix)[word]
            prefix.append(word)
        return total

    def greedy(self, max_new_tokens: int) -> list[int]:
        """The likeliest word each time, until EOS or the limit; without the start token, with the EOS."""
        output: list[int] = []
        while len(output) < max_new_tokens and output[-1:] != [self.hyper.eos]:
            log_probs = self.next_log_probs([self.hyper.bos, *output])
            output.append(log_probs.index(max(log_probs)))
        return output

    def all_hypotheses(
        self, max_new_tokens: int, penalty: Callable[[int], float]
    ) -> list[tuple[float, tuple[int, ...]]]:
        """Every possible output with its score log P / penalty(length), best first.

        An output ends with its first EOS, or has max_new_tokens words and no EOS; the length counts the EOS.
        """
        vocab_size = len(self.next_log_probs([self.hyper.bos]))
        words = [word for word in range(vocab_size) if word != self.hyper.eos]
        outputs: list[tuple[int, ...]] = []
        for length in range(max_new_tokens):
            outputs += [(*stem, self.hyper.eos) for stem in itertools.product(words, repeat=length)]
        outputs += itertools.product(words, repeat=max_new_tokens)
        return sorted(((self.log_prob(output) / penalty(len(output)), output) for output in outputs), reverse=True)


def gnmt_penalty(alpha: float) -> Callable[[int], float]:
    """((5 + length) / 6) ** alpha of Wu et al. 2016, eq. (14), which the paper's section 6.1 refers to."""
    return lambda length: ((5 + length) / 6) ** alpha


def power_penalty(exponent: float) -> Callable[[int], float]:
    """length ** exponent, what transformers itself divides by."""
    return lambda length: float(length) ** exponent


# small helpers ---------------------------------------------------------------------------------------


def _get(weights: Weights, name: str) -> np.ndarray:
    """A weight by its name in the model with a head, whose base model is called `model`."""
    return weights[name] if name in weights else weights[f"model.{name}"]


def _linear(weights: Weights, name: str, state: np.ndarray) -> np.ndarray:
    """W x + b with W of shape (out, in); without a bias where the weights have none."""
    matrix = _get(weights, f"{name}.weight")
    product = np.array([float(np.dot(row, state)) for row in matrix])
    if f"{name}.bias" in weights or f"model.{name}.bias" in weights:
        product = product + _get(weights, f"{name}.bias")
    return product


def _mask(hyper: Hyper, ids: Sequence[int], mask: Sequence[int] | None) -> list[int]:
    """Without a mask, padding is what carries the padding's id."""
    return [int(token != hyper.pad) for token in ids] if mask is None else [int(kept) for kept in mask]


def _activate(name: str, value: float) -> float:
    if name == "relu":
        return max(0.0, value)
    if name == "gelu":
        return 0.5 * value * (1 + math.erf(value / math.sqrt(2)))
    if name in ("silu", "swish"):
        return value / (1 + math.exp(-value))
    raise ValueError(f"the reference knows relu, gelu and silu, got {name!r}")
