"""What introductions to the Transformer claim of it, measured on this package's own modules.

Each function below measures one property and returns plain numbers; `CLAIMS` puts them beside the values that the
paper, or arithmetic, gives. Costs are counted in multiplications and additions of matrix products, never in time.
Source: Vaswani et al. 2017, sections 3 and 4.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import (
    FeedForward,
    MultiHeadAttention,
    added_to_scores,
    fast_scaled_dot_product_attention,
    scaled_dot_product_attention,
    sinusoidal_encoding,
)


IMPLEMENTATIONS = ("eager", "sdpa")
# Three ways through equation (1): written out, torch's fused kernel, and two matrix products.
PATHS = ("equation", "fused", "products")


@dataclass(frozen=True)
class Figure:
    """One measured number beside the expected one.

    Attributes:
        what: What is measured.
        measured: The value found.
        expected: The value, or the bound, that it should have.
        relation: "=" within `tolerance`, "<" below or ">" above `expected`.
        tolerance: Absolute, for "=".
    """

    what: str
    measured: float
    expected: float
    relation: Literal["=", "<", ">"] = "="
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the measured value stands in the relation to the expected one; never for NaN."""
        if self.relation == "=":
            return abs(self.measured - self.expected) <= self.tolerance
        return self.measured < self.expected if self.relation == "<" else self.measured > self.expected


@dataclass(frozen=True)
class Claim:
    """A claim, where the paper makes it, and how it is measured.

    Attributes:
        statement: The claim in one sentence.
        section: Of the paper.
        measure: Gives the figures, in a few seconds at most.
    """

    statement: str
    section: str
    measure: Callable[[], list[Figure]]


# ---------------------------------------------------------------------------------------------------------------------
# Material
# ---------------------------------------------------------------------------------------------------------------------


def attend(
    path: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Output of equation (1) by one of `PATHS`; shapes and mask as in `scaled_dot_product_attention`."""
    if path == "equation":
        return scaled_dot_product_attention(query, key, value, mask)[0]
    if path == "products":
        everywhere = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
        mask = added_to_scores(everywhere if mask is None else mask, key.shape[-2])
    return fast_scaled_dot_product_attention(query, key, value, mask)


def attention_weights(
    path: str, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights, read off the output for the values (1, 0, 0 ...), (0, 1, 0 ...) ...; shape `(queries, keys)`.

    Args:
        path: One of `PATHS`.
        query: Shape `(queries, d_k)`.
        key: Shape `(keys, d_k)`.
        mask: Shape `(queries, keys)`, True where a key may be attended to.
    """
    value = torch.eye(key.shape[0], dtype=query.dtype)
    return attend(path, query[None, None], key[None, None], value[None, None], mask)[0, 0]


def random_model(implementation: str, seed: int = 0, **fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A small model in evaluation mode with large random weights, so that nothing is near its initial value.

    Args:
        implementation: One of `IMPLEMENTATIONS`.
        seed: Of the weights.
        fields: Of the configuration, in place of 2 + 2 layers of width 32.
    """
    shape = {"vocab_size": 40, "d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    config = VanillaTransformerConfig(**{**shape, **fields, "attn_implementation": implementation})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unscaled_embeddings(length: int, d_model: int) -> torch.Tensor:
    """Random embeddings that ask for gradients, of variance 1 once the model has scaled them; `(1, length, d_model)`.

    Larger ones would saturate softmax, and gradients would vanish.
    """
    return (_normal(1, length, d_model) / math.sqrt(d_model)).requires_grad_()


def _flops_of_cpu_kernel(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two products of the fused CPU kernel, which torch's counter does not know."""
    batch, heads, queries, d_k = query
    return 2 * batch * heads * queries * key[-2] * (d_k + value[-1])


def count_operations(function: Callable[[], Any]) -> int:
    """Multiplications plus additions in the matrix products of a call, as torch's counter counts them."""
    mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flops_of_cpu_kernel}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        function()
    return counter.get_total_flops()


def _reach(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Largest gradient that arrives at input position s from output position t; shape `(outputs, inputs)`.

    Each output position is projected on a random direction (LayerNorm has none in the direction of ones).

    Args:
        outputs: Shape `(1, output_positions, d_model)`, computed from `inputs`.
        inputs: Shape `(1, input_positions, d_model)`.
    """
    direction = _normal(outputs.shape[-1], seed=7)
    rows = []
    for position in range(outputs.shape[1]):
        (gradient,) = torch.autograd.grad(outputs[0, position] @ direction, inputs, retain_graph=True)
        rows.append(gradient[0].abs().amax(dim=-1))
    return torch.stack(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------------------------------------------------


def worked_example(path: str) -> torch.Tensor:
    """Weights of the query (2, 1, -1) on the keys (1.8, .8, -.8), (.2, .1, .5), (.3, .5, 1.3) and (0, 0, 0)."""
    query = torch.tensor([[2.0, 1.0, -1.0]])
    key = torch.tensor([[1.8, 0.8, -0.8], [0.2, 0.1, 0.5], [0.3, 0.5, 1.3], [0.0, 0.0, 0.0]])
    return attention_weights(path, query, key)[0]


def scores_inside(path: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The scaled scores that a path computes, shape `(queries, keys)`: log-odds of each key against a key of zeros."""
    weights = attention_weights(path, query, torch.cat([torch.zeros_like(key[:1]), key])).double()
    return (weights[:, 1:] / weights[:, :1]).log()


def variances_of_scores(path: str, query: torch.Tensor, key: torch.Tensor) -> tuple[float, float]:
    """Variance over all pairs of q . k, and of the score that attention makes of it.

    Args:
        path: One of `PATHS`.
        query: Shape `(queries, d_k)`.
        key: Shape `(keys, d_k)`.
    """
    products = query.double() @ key.double().T
    return float(products.var(correction=0)), float(scores_inside(path, query, key).var(correction=0))


def all_sign_vectors(d_k: int) -> torch.Tensor:
    """The 2 ** d_k vectors of ones and minus ones: components of mean 0 and variance 1, exactly."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d_k)))


def slope_of_softmax(path: str, score: float) -> float:
    """By how much a weight changes with its score, where two keys have the scores `score` and 0: autograd's value."""
    query = torch.tensor([[[[score]]]], requires_grad=True)
    key = torch.tensor([[[[1.0], [0.0]]]])
    value = torch.tensor([[[[0.0], [1.0]]]])
    attend(path, query, key, value).sum().backward()
    assert query.grad is not None
    return abs(query.grad.item())


def median_slope(path: str, d_k: int, scaled: bool, keys: int = 16) -> float:
    """Median over 501 random queries of the largest slope w (1 - w) of softmax, with the division by sqrt(d_k) or not.

    Args:
        path: One of `PATHS`.
        d_k: Width of queries and keys, whose components are standard normal.
        scaled: False multiplies the queries by sqrt(d_k), which undoes what attention divides by.
        keys: Number of keys.
    """
    query = _normal(501, d_k) * (1.0 if scaled else math.sqrt(d_k))
    weights = attention_weights(path, query, _normal(keys, d_k, seed=1)).double().sort(dim=-1).values
    # 1 - w as the sum of the others, which keeps its digits where w is near 1.
    return float((weights[:, -1] * weights[:, :-1].sum(dim=-1)).median())


def permutation_differences(implementation: str) -> tuple[float, float]:
    """How far Encoder(permuted source) is from the permuted Encoder(source), over all orders of five tokens.

    Returns:
        The largest difference over all orders where the layers get embeddings without positions, and the smallest
        over all orders but the given one where positions are added.
    """
    encoder = random_model(implementation).model.encoder
    words = torch.tensor([[5, 11, 17, 23, 29]])

    def without_positions(input_ids: torch.Tensor) -> torch.Tensor:
        x = encoder.embed_tokens(input_ids) * math.sqrt(encoder.config.d_model)
        for layer in encoder.layers:
            x = layer(x, None)
        return x

    def with_positions(input_ids: torch.Tensor) -> torch.Tensor:
        return encoder(input_ids=input_ids).last_hidden_state

    with torch.no_grad():
        unmoved = without_positions(words), with_positions(words)
        orders = [list(order) for order in itertools.permutations(range(words.shape[1]))]  # the given one first
        without, with_ = (
            torch.stack([(encode(words[:, order]) - same[:, order]).abs().max() for order in orders])
            for encode, same in zip((without_positions, with_positions), unmoved, strict=True)
        )
    return without.max().item(), with_[1:].min().item()


def rotation_error(d_model: int, distance: int, positions: torch.Tensor) -> float:
    """Largest difference between PE(pos + k) and the rotation of PE(pos) that depends on k alone.

    The pair (sin, cos) number i is turned by the angle k / 10000 ** (2i / d_model).

    Args:
        d_model: Width of the encoding, even.
        distance: k.
        positions: Shape `(count,)`.
    """
    sine, cosine = sinusoidal_encoding(positions, d_model).double().unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.tensor([distance / 10000 ** (2 * i / d_model) for i in range(d_model // 2)], dtype=torch.float64)
    turned = torch.stack(
        [angle.cos() * sine + angle.sin() * cosine, angle.cos() * cosine - angle.sin() * sine], dim=-1
    ).flatten(-2)
    return (turned - sinusoidal_encoding(positions + distance, d_model)).abs().max().item()


def wavelengths(d_model: int) -> torch.Tensor:
    """Wavelength, in positions, of each sine-cosine pair, from the angle by which one step turns it; `(d_model / 2,)`.

    Args:
        d_model: Width of the encoding, even.
    """
    sine, cosine = sinusoidal_encoding(torch.tensor(1), d_model).double().unflatten(-1, (-1, 2)).unbind(-1)
    return 2 * math.pi / torch.atan2(sine, cosine)


def self_attention_operations(num_heads: int, d_model: int, length: int, implementation: str) -> int:
    """Operations of self-attention over `length` tokens with `num_heads` heads of d_model / num_heads."""
    fields: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "attn_implementation": implementation}
    config = VanillaTransformerConfig(**fields)
    attention = MultiHeadAttention(config, layer_idx=0)
    x = _normal(1, length, d_model)
    return count_operations(lambda: attention(x, x))


def score_operations(path: str, d_k: int, length: int) -> int:
    """Operations of equation (1) alone, over `length` queries and as many keys."""
    x = _normal(1, 1, length, d_k)
    return count_operations(lambda: attend(path, x, x, x))


def future_weight(path: str, length: int = 12) -> tuple[float, float]:
    """Largest weight on a later position and smallest on a position that is not later, under the causal mask."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    weights = attention_weights(path, _normal(length, 4), _normal(length, 4, seed=1), mask)
    return float(weights[~mask].max()), float(weights[mask].min())


def decoder_reach(implementation: str, length: int = 9) -> torch.Tensor:
    """Gradient that reaches each target position (column) from the decoder's output at each (row)."""
    decoder = random_model(implementation).model.decoder
    embeddings = unscaled_embeddings(length, decoder.config.d_model)
    states = _normal(1, 5, decoder.config.d_model, seed=1)
    outputs = decoder(inputs_embeds=embeddings, encoder_hidden_states=states)
    return _reach(outputs.last_hidden_state, embeddings)


def one_layer_reach(
    implementation: str, source_length: int = 40, target_length: int = 30
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients through one layer a side.

    Returns:
        Those that reach each source token from each encoder output, shape `(source_length, source_length)`, and from
        each target position, shape `(target_length, source_length)`.
    """
    model = random_model(implementation, encoder_layers=1, decoder_layers=1).model
    embeddings = unscaled_embeddings(source_length, model.config.d_model)
    target = torch.arange(target_length)[None] % 30 + 5
    encoded = model.encoder(inputs_embeds=embeddings).last_hidden_state
    decoded = model(inputs_embeds=embeddings, decoder_input_ids=target).last_hidden_state
    return _reach(encoded, embeddings), _reach(decoded, embeddings)


def cached_step_operations(implementation: str, steps: int, source_length: int = 10) -> list[int]:
    """Operations of the decoder for each of `steps` tokens, one after the other, with a cache."""
    decoder = random_model(implementation).model.decoder
    states = _normal(1, source_length, decoder.config.d_model)
    counts: list[int] = []
    cache: Any = None
    for step in range(steps):
        outputs: Any = None

        def run() -> None:
            nonlocal outputs
            outputs = decoder(torch.tensor([[5 + step]]), encoder_hidden_states=states, cache=cache, use_cache=True)  # noqa: B023

        counts.append(count_operations(run))
        cache = outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
    return counts


def positions_decoded(implementation: str, use_cache: bool, new_tokens: int) -> int:
    """Positions that go through the decoder while `generate()` makes `new_tokens` tokens, greedily."""
    model = random_model(implementation)
    positions = 0

    def count(module: Any, arguments: tuple[Any, ...]) -> None:
        nonlocal positions
        positions += arguments[0].shape[1]

    handle = model.model.decoder.layers[0].register_forward_pre_hook(count)
    try:
        model.generate(
            torch.tensor([[5, 6, 7, 2]]),
            num_beams=1,
            early_stopping=False,
            do_sample=False,
            use_cache=use_cache,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
    finally:
        handle.remove()
    return positions


def feed_forward_reach(length: int = 6) -> tuple[torch.Tensor, float]:
    """How the feed-forward block treats positions.

    Returns:
        The gradient that reaches each position (column) from each output position (row), and the largest difference
        between the block on all positions at once and on each alone.
    """
    block = random_model("eager").model.encoder.layers[0].feed_forward
    assert isinstance(block, FeedForward)
    x = _normal(1, length, block.fc1.in_features).requires_grad_()
    together = block(x)
    alone = torch.cat([block(x[:, index : index + 1]) for index in range(length)], dim=1)
    return _reach(together, x), (together - alone).abs().max().item()


# ---------------------------------------------------------------------------------------------------------------------
# Claims
# ---------------------------------------------------------------------------------------------------------------------


def _off_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    return matrix[~torch.eye(matrix.shape[0], dtype=torch.bool)]


def _farthest(found: Iterable[float], expected: float) -> float:
    """Of what several paths give, the value that is farthest from the expected one; NaN where there is one."""
    return max(found, key=lambda value: math.inf if math.isnan(value) else abs(value - expected))


def _largest(found: Iterable[float]) -> float:
    """The largest, or NaN where there is one (which `max` may miss)."""
    return torch.tensor(list(found), dtype=torch.float64).max().item()


def _smallest(found: Iterable[float]) -> float:
    return -_largest(-value for value in found)


def _worked_example() -> list[Figure]:
    keys = ("(1.8, .8, -.8)", "(.2, .1, .5)", "(.3, .5, 1.3)", "(0, 0, 0)")
    weights = [worked_example(path).tolist() for path in PATHS]
    return [
        Figure(f"weight of {key}", _farthest(found, value), value, tolerance=5e-4)
        for key, value, *found in zip(keys, (0.874, 0.043, 0.039, 0.043), *weights, strict=True)
    ]


def _variance() -> list[Figure]:
    figures = []
    for d_k in (4, 8):
        vectors = all_sign_vectors(d_k)
        found = [variances_of_scores(path, vectors, vectors) for path in PATHS]
        figures.append(Figure(f"all q and k of {d_k} signs", found[0][0], d_k, tolerance=1e-9))
        figures.append(Figure("scaled", _farthest((scaled for _, scaled in found), 1), 1, tolerance=1e-5))
    raw, scaled = variances_of_scores("equation", _normal(1000, 512), _normal(1000, 512, seed=1))
    figures.append(Figure("1,000 normal q and k of 512, within 4 %", raw, 512, tolerance=20))
    figures.append(Figure("scaled, within 4 %", scaled, 1, tolerance=0.04))
    return figures


def _saturation() -> list[Figure]:
    figures = []
    for score, expected, tolerance in ((0.0, 0.25, 1e-6), (10.0, 4.5396e-5, 1e-9)):
        slope = _farthest((slope_of_softmax(path, score) for path in PATHS), expected)
        figures.append(Figure(f"slope for two keys, scores {score:g} apart", slope, expected, tolerance=tolerance))
    figures.append(Figure("50 apart", _largest(slope_of_softmax(path, 50.0) for path in PATHS), 1e-20, "<"))
    figures.append(Figure("median of 16 random keys, d_k 512, scaled", median_slope("equation", 512, True), 0.1, ">"))
    figures.append(Figure("without scaling", median_slope("equation", 512, False), 0.01, "<"))
    return figures


def _permutation() -> list[Figure]:
    found = [permutation_differences(implementation) for implementation in IMPLEMENTATIONS]
    return [
        Figure("largest difference without positions, 120 orders", _largest(each[0] for each in found), 1e-4, "<"),
        Figure("smallest with positions, 119 orders", _smallest(each[1] for each in found), 0.01, ">"),
    ]


def _rotation() -> list[Figure]:
    positions = torch.arange(10_000)
    return [
        Figure(f"largest error, k = {distance:,}, pos 0 to 9,999", rotation_error(64, distance, positions), 3e-7, "<")
        for distance in (1, 100, 5000)
    ]


def _wavelengths() -> list[Figure]:
    found = wavelengths(512)
    ratios = found[1:] / found[:-1]
    ratio = 10000 ** (2 / 512)
    return [
        Figure("first, over 2 pi", float(found[0]) / (2 * math.pi), 1.0, tolerance=1e-5),
        Figure("each over the one before, d_model 512", _farthest(ratios.tolist(), ratio), ratio, tolerance=1e-5),
        Figure("last, over 2 pi", float(found[-1]) / (2 * math.pi), 10000 ** (510 / 512), tolerance=0.1),
    ]


def _heads() -> list[Figure]:
    # Four projections of n x d by d x d, and two products of n x n x d, a multiplication and an addition each.
    expected = 4 * 2 * 64 * 512 * 512 + 2 * 2 * 64 * 64 * 512
    return [
        Figure(
            f"operations with {heads} head{'s' if heads > 1 else ''} of {512 // heads}, 64 tokens",
            _farthest((self_attention_operations(heads, 512, 64, each) for each in IMPLEMENTATIONS), expected),
            expected,
        )
        for heads in (1, 8, 32)
    ]


def _causal() -> list[Figure]:
    found = [future_weight(path) for path in PATHS]
    reach = torch.stack([decoder_reach(implementation) for implementation in IMPLEMENTATIONS])
    later = torch.ones(reach.shape[1:], dtype=torch.bool).triu(1)
    return [
        Figure("largest weight on a later position", _largest(each[0] for each in found), 0.0),
        Figure("largest gradient from a later position", float(reach[:, later].max()), 0.0),
        Figure("smallest gradient from the others", float(reach[:, ~later].min()), 0.0, ">"),
    ]


def _one_step() -> list[Figure]:
    found = [one_layer_reach(implementation) for implementation in IMPLEMENTATIONS]
    return [
        Figure(
            "smallest gradient between two of 40 source positions", _smallest(x.min().item() for x, _ in found), 0, ">"
        ),
        Figure("from 40 source to 30 target positions", _smallest(x.min().item() for _, x in found), 0, ">"),
    ]


def _growth() -> list[Figure]:
    figures = []
    for length in (64, 512):
        ratios = [score_operations(path, 64, 2 * length) / score_operations(path, 64, length) for path in PATHS]
        what = f"operations for {2 * length:,} tokens over those for {length}"
        figures.append(Figure(what, _farthest(ratios, 4), 4))
    return figures


def _decoding() -> list[Figure]:
    found = [cached_step_operations(implementation, 20) for implementation in IMPLEMENTATIONS]
    more = {step - before for counts in found for before, step in itertools.pairwise(counts[1:])}
    cached, anew = (
        [positions_decoded(implementation, use_cache, 20) for implementation in IMPLEMENTATIONS]
        for use_cache in (True, False)
    )
    return [
        Figure("positions decoded for 20 tokens with a cache", _farthest(cached, 20), 20),
        Figure("without", _farthest(anew, 210), 210),
        # One key more in each of two layers: a product with it, and one with its value.
        Figure("operations that each step adds, 2 layers of 32", _farthest(more, 256), 256),
    ]


def _feed_forward() -> list[Figure]:
    reach, difference = feed_forward_reach()
    return [
        Figure("largest gradient from another position", float(_off_diagonal(reach).max()), 0.0),
        Figure("smallest from its own", float(reach.diagonal().min()), 0.0, ">"),
        Figure("all positions at once less each alone", difference, 1e-5, "<"),
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim("The query (2, 1, -1) attends to four keys as computed by hand", "3.2.1", _worked_example),
    Claim("q . k has the variance d_k, and 1 after scaling", "3.2.1", _variance),
    Claim("A saturated softmax has a vanishing gradient, which scaling prevents", "3.2.1", _saturation),
    Claim("h heads of d_model / h cost what one head of d_model costs", "3.2.2", _heads),
    Claim("The causal mask gives the future exactly no weight", "3.2.3", _causal),
    Claim("The feed-forward block acts on each position alone", "3.3", _feed_forward),
    Claim(
        "Without positions self-attention commutes with every permutation; with them it does not", "3.5", _permutation
    ),
    Claim("The encoding at pos + k is one rotation of that at pos, whatever pos", "3.5", _rotation),
    Claim("Wavelengths grow geometrically from 2 pi towards 10000 x 2 pi", "3.5", _wavelengths),
    Claim("Any two positions are one step apart", "4", _one_step),
    Claim("The cost of attention grows with the square of the length", "4", _growth),
    Claim("Decoding with a cache costs one step a token", "3.1", _decoding),
)


def number(value: float) -> str:
    """A number as the tables print it: whole ones with commas, others to four digits."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"
