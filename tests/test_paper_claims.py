"""What introductions to the Transformer claim of it holds for our modules, and each measurement is able to fail."""

from __future__ import annotations

import cmath
import importlib.util
import itertools
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vanilla_transformer.paper_claims as claims
from small_models import small_config, small_model, words
from vanilla_transformer.modeling_vanilla_transformer import FeedForward, MultiHeadAttention, sinusoidal_encoding
from vanilla_transformer.paper_claims import CLAIMS, IMPLEMENTATIONS, PATHS, Claim, Figure


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    """`scripts/paper_claims.py` as a module."""
    spec = importlib.util.spec_from_file_location("paper_claims_script", ROOT / "scripts" / "paper_claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def softmax(scores: list[float]) -> list[float]:
    exponentials = [math.exp(score) for score in scores]
    return [each / sum(exponentials) for each in exponentials]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Scaled dot products (section 3.2.1) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_worked_example_gives_the_weights_of_hand_arithmetic(path):
    # q . k is 5.2, 0, -0.2 and 0; d_k is 3
    expected = softmax([score / math.sqrt(3) for score in (5.2, 0.0, -0.2, 0.0)])
    weights = claims.worked_example(path).tolist()
    assert weights == pytest.approx(expected, rel=1e-5)
    assert [f"{weight:.3f}" for weight in weights] == ["0.874", "0.043", "0.039", "0.043"]


@pytest.mark.parametrize("path", PATHS)
def test_scores_read_off_the_weights_are_the_scaled_dot_products(path):
    query, key = normal(5, 7), normal(6, 7, seed=1)
    expected = [
        [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(7) for k in key.tolist()] for q in query.tolist()
    ]
    torch.testing.assert_close(
        claims.scores_inside(path, query, key).float(), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("d_k", [1, 2, 4, 8])
def test_dot_products_of_all_sign_vectors_have_variance_d_k_and_one_after_scaling(path, d_k):
    # Of d_k coin throws, q . k is the number that agree less the number that differ: a binomial's variance.
    throws = [(math.comb(d_k, agree), 2 * agree - d_k) for agree in range(d_k + 1)]
    assert sum(count * value**2 for count, value in throws) / 2**d_k == d_k
    vectors = claims.all_sign_vectors(d_k)
    assert len({tuple(vector) for vector in vectors.tolist()}) == 2**d_k
    raw, scaled = claims.variances_of_scores(path, vectors, vectors)
    assert raw == d_k
    assert scaled == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("score", [0.0, 1.0, -3.0, 10.0, 20.0, 50.0])
def test_the_slope_of_softmax_is_that_of_the_logistic_function_and_vanishes(path, score):
    expected = 1 / (2 + math.exp(score) + math.exp(-score))
    assert claims.slope_of_softmax(path, score) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scaled", [True, False])
def test_scaling_keeps_the_slope_of_softmax_where_it_is_large(path, scaled):
    query, key = normal(501, 512).double().numpy(), normal(16, 512, seed=1).double().numpy()
    scores = query @ key.T / (math.sqrt(512) if scaled else 1)
    slopes = []
    for row in scores:
        others = sum(math.exp(score - row.max()) for score in sorted(row)[:-1])
        slopes.append(others / (1 + others) ** 2)
    found = claims.median_slope(path, 512, scaled)
    assert found == pytest.approx(statistics.median(slopes), rel=1e-3)
    assert (found > 0.1) == scaled


# Heads (section 3.2.2) -----------------------------------------------------------------------------------------------


def test_operations_are_counted_as_by_hand():
    a, b = normal(3, 5), normal(5, 7)
    assert claims.count_operations(lambda: a @ b) == 2 * 3 * 5 * 7
    query, key, value = normal(2, 3, 4, 6), normal(2, 3, 5, 6), normal(2, 3, 5, 6)
    for path in PATHS:  # each of 2 x 3 heads: 4 x 5 scores of 6 products, 4 x 6 sums of 5
        counted = claims.count_operations(lambda path=path: claims.attend(path, query, key, value))
        assert counted == 2 * (2 * 3) * (4 * 5 * 6 + 4 * 6 * 5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 20])
def test_heads_of_d_model_over_h_cost_what_one_head_of_d_model_costs(implementation, length):
    projections, products = 4 * 2 * length * 64 * 64, 2 * 2 * length * length * 64
    counts = {h: claims.self_attention_operations(h, 64, length, implementation) for h in (1, 2, 8, 64)}
    assert set(counts.values()) == {projections + products}
    sizes = {sum(p.numel() for p in MultiHeadAttention(small_config(num_heads=h), 0).parameters()) for h in (1, 4, 16)}
    assert sizes == {4 * 16 * 16}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_of_a_fixed_width_cost_more_the_more_there_are(implementation):
    def operations(num_heads: int) -> int:
        fields = {"num_heads": num_heads, "d_k": 16, "d_v": 16, "attn_implementation": implementation}
        attention, x = MultiHeadAttention(small_config(**fields), 0), normal(1, 9, 16)
        return claims.count_operations(lambda: attention(x, x))

    assert operations(8) == 8 * operations(1) == 8 * (4 * 2 * 9 * 16 * 16 + 2 * 2 * 9 * 9 * 16)


# The three uses of attention (section 3.2.3) -------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_causal_mask_gives_the_future_exactly_no_weight(path):
    length = 9
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    # Later keys match the queries best of all.
    query, key = normal(length, 4).abs(), 10.0 * torch.arange(1, length + 1)[:, None] * torch.ones(1, 4)
    weights = claims.attention_weights(path, query, key, mask)
    for row, of_row in enumerate(weights.tolist()):
        assert of_row[row + 1 :] == [0.0] * (length - row - 1)
        assert sum(of_row) == pytest.approx(1.0)
    assert claims.future_weight(path)[0] == 0.0
    assert claims.future_weight(path)[1] > 0.0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gradient_reaches_a_later_target_position_in_the_decoder(implementation):
    reach = claims.decoder_reach(implementation, length=7)
    for row, column in itertools.product(range(7), repeat=2):
        assert (reach[row, column] > 0.0) == (column <= row)


def test_no_head_of_the_decoder_has_a_weight_on_the_future():
    model = small_model(attn_implementation="eager")
    outputs = model(input_ids=words(2, 5), decoder_input_ids=words(2, 8, seed=1), output_attentions=True)
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)
    assert len(outputs.decoder_attentions) == 3
    for weights in outputs.decoder_attentions:
        assert weights.shape == (2, 4, 8, 8)
        assert torch.count_nonzero(weights[:, :, later]) == 0
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 8))
    assert any(torch.count_nonzero(weights[:, :, later[:, :5]]) for weights in outputs.cross_attentions)


# Feed-forward (section 3.3) ------------------------------------------------------------------------------------------


def test_the_feed_forward_block_acts_on_each_position_alone():
    reach, difference = claims.feed_forward_reach(length=5)
    assert torch.count_nonzero(reach) == torch.count_nonzero(reach.diagonal()) == 5
    assert difference < 1e-5


def test_the_feed_forward_block_is_equation_2_at_each_position():
    block = FeedForward(small_config())
    x = normal(2, 3, 16)
    first, second = block.fc1.weight.detach().double().numpy(), block.fc2.weight.detach().double().numpy()
    for row, column in itertools.product(range(2), range(3)):
        inner = np.maximum(0, x[row, column].double().numpy() @ first.T + block.fc1.bias.detach().double().numpy())
        expected = inner @ second.T + block.fc2.bias.detach().double().numpy()
        np.testing.assert_allclose(block(x)[row, column].detach().numpy(), expected, rtol=1e-4, atol=1e-6)


# Positions (section 3.5) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_self_attention_without_positions_commutes_with_every_permutation_and_with_them_with_none(implementation):
    without, with_positions = claims.permutation_differences(implementation)
    assert 0.0 < without < 1e-4
    assert with_positions > 0.01


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_causal_mask_takes_that_away(implementation):
    attention = MultiHeadAttention(small_config(attn_implementation=implementation), 0).eval()
    x, mask = normal(1, 5, 16), torch.ones(5, 5, dtype=torch.bool).tril()
    order = [4, 2, 0, 1, 3]
    with torch.no_grad():
        free = (attention(x[:, order], x[:, order])[0] - attention(x, x)[0][:, order]).abs().max()
        masked = (attention(x[:, order], x[:, order], mask)[0] - attention(x, x, mask)[0][:, order]).abs().max()
    assert free < 1e-5
    assert masked > 0.01


@pytest.mark.parametrize("distance", [1, 17, 1000])
def test_one_linear_map_fitted_on_some_positions_moves_all_the_others_and_is_a_rotation(distance):
    positions = torch.arange(40_000)
    here = sinusoidal_encoding(positions, 32).double().numpy().reshape(-1, 16, 2)
    there = sinusoidal_encoding(positions + distance, 32).double().numpy().reshape(-1, 16, 2)
    for pair in range(16):
        fitted = np.linalg.lstsq(here[:20_000, pair], there[:20_000, pair], rcond=None)[0]
        np.testing.assert_allclose(here[20_000:, pair] @ fitted, there[20_000:, pair], atol=5e-7)
        np.testing.assert_allclose(fitted @ fitted.T, np.eye(2), atol=1e-6)
        assert np.linalg.det(fitted) == pytest.approx(1.0, abs=1e-6)


def test_a_pair_is_a_number_on_the_unit_circle_and_moving_multiplies_it():
    d_model, pos, distance = 6, 41, 12
    pairs = sinusoidal_encoding(torch.tensor([pos, pos + distance]), d_model).double().unflatten(-1, (3, 2)).tolist()
    for i in range(3):
        here, there = (complex(cosine, sine) for sine, cosine in (pairs[0][i], pairs[1][i]))
        turn = cmath.exp(1j * distance / 10000 ** (2 * i / d_model))
        assert abs(here * turn - there) < 1e-6
    assert claims.rotation_error(d_model, distance, torch.arange(100)) < 3e-7


def test_an_encoding_that_is_no_rotation_is_found_out(monkeypatch):
    table = normal(200, 8)
    monkeypatch.setattr(claims, "sinusoidal_encoding", lambda positions, d_model: table[positions])
    assert claims.rotation_error(8, 5, torch.arange(100)) > 0.5


def test_wavelengths_are_those_counted_in_cycles():
    length, d_model = 200_000, 16
    sines = sinusoidal_encoding(torch.arange(length), d_model)[:, ::2].numpy()
    cycles = ((sines[:-1] < 0) & (sines[1:] >= 0)).sum(axis=0)
    found = claims.wavelengths(d_model).tolist()
    for counted, wavelength in zip(cycles, found, strict=True):
        assert abs(length / wavelength - counted) <= 1
    assert found == pytest.approx([2 * math.pi * 10 ** (i / 2) for i in range(8)], rel=1e-5)


@pytest.mark.parametrize("d_model", [4, 64, 512])
def test_wavelengths_grow_geometrically_from_2_pi_and_the_wider_the_nearer_to_10000_times_that(d_model):
    found = (claims.wavelengths(d_model) / (2 * math.pi)).tolist()
    assert found[0] == pytest.approx(1.0, rel=1e-6)
    assert found[-1] == pytest.approx(10 ** (4 - 8 / d_model), rel=1e-5)
    ratios = [longer / shorter for shorter, longer in itertools.pairwise(found)]
    assert ratios == pytest.approx([10 ** (8 / d_model)] * len(ratios), rel=1e-5)
    assert found[-1] < 10_000


# Path length and cost (section 4) ------------------------------------------------------------------------------------


def test_reach_is_the_largest_derivative_of_a_known_function():
    x = normal(1, 4, 3).requires_grad_()
    reach = claims._reach(torch.stack([x[0, 0], x[0, 0] + 3 * x[0, 2], 0 * x[0, 1], x[0, 3]])[None], x)
    largest = float(normal(3, seed=7).abs().max())
    expected = torch.tensor([[1, 0, 0, 0], [1, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 1]]) * largest
    torch.testing.assert_close(reach, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_after_one_layer_a_gradient_reaches_from_each_source_token_to_each_position(implementation):
    of_encoder, of_decoder = claims.one_layer_reach(implementation, source_length=11, target_length=7)
    assert of_encoder.shape == (11, 11)
    assert of_decoder.shape == (7, 11)
    assert bool((of_encoder > 0).all())
    assert bool((of_decoder > 0).all())


def test_without_attention_a_gradient_reaches_its_own_position_alone(monkeypatch):
    make = claims.random_model

    def without_attention(*args, **kwargs):
        model = make(*args, **kwargs)
        torch.nn.init.zeros_(model.model.encoder.layers[0].self_attention.out_proj.weight)
        return model

    monkeypatch.setattr(claims, "random_model", without_attention)
    of_encoder, of_decoder = claims.one_layer_reach("sdpa", source_length=6, target_length=4)
    assert torch.equal(of_encoder > 0, torch.eye(6, dtype=torch.bool))
    assert bool((of_decoder > 0).all())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("length", [1, 10, 100])
def test_attention_costs_a_multiplication_and_an_addition_twice_for_each_pair_and_column(path, length):
    assert claims.score_operations(path, 64, length) == 2 * 2 * length**2 * 64


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_with_a_cache_costs_one_token_and_a_look_at_those_before(implementation):
    d_model, d_ff, layers, source = 32, 64, 2, 10
    projections = (4 + 2) * d_model**2  # four in self-attention; query and output in attention to the source
    feed_forward = 2 * d_model * d_ff
    expected = [
        2 * layers * (projections + feed_forward + 2 * d_model * (step + 1) + 2 * d_model * source)
        for step in range(6)
    ]
    expected[0] += 2 * layers * 2 * source * d_model**2  # keys and values of the source, once
    assert claims.cached_step_operations(implementation, 6, source) == expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("new_tokens", [1, 7])
def test_generate_decodes_one_position_a_token_with_a_cache_and_all_anew_without(implementation, new_tokens):
    assert claims.positions_decoded(implementation, True, new_tokens) == new_tokens
    assert claims.positions_decoded(implementation, False, new_tokens) == sum(range(1, new_tokens + 1))


# The page ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.measure.__name__.strip("_"))
def test_every_figure_of_every_claim_holds(claim):
    figures = claim.measure()
    assert figures
    assert [figure for figure in figures if not figure.holds] == []


@pytest.mark.parametrize(
    "relation, measured, holds",
    [
        ("=", 1.0, True), ("=", 1.1, True), ("=", 1.2, False), ("=", math.nan, False),
        ("<", 0.9, True), ("<", 1.0, False), ("<", math.nan, False),
        (">", 1.1, True), (">", 1.0, False), (">", math.nan, False),
    ],
)  # fmt: skip
def test_a_figure_holds_within_its_bound_only(relation, measured, holds):
    assert Figure("x", measured, 1.0, relation, tolerance=0.11).holds is holds


@pytest.mark.parametrize("summary", [claims._largest, claims._smallest, lambda found: claims._farthest(found, 0.0)])
@pytest.mark.parametrize("found", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]])
def test_what_is_not_a_number_is_never_summarised_away(summary, found):
    assert math.isnan(summary(found))


def test_the_readme_has_the_table_that_the_script_prints(script, capsys):
    assert script.main(["--markdown"]) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 2 + len(CLAIMS)
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_shows_each_measured_value_and_what_does_not_hold(script, capsys, monkeypatch):
    figures = [Figure("six", 6.0, 6.0), Figure("small", 0.25, 0.125, "<"), Figure("many", 12345.0, 12345.0)]
    monkeypatch.setattr(script, "CLAIMS", (Claim("Six is small", "9.9", lambda: figures),))
    assert script.main([]) == 1
    out, err = capsys.readouterr()
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "Six is small (section 9.9)",
        "six 6 expected = 6",
        "small 0.25 expected < 0.125 DOES NOT HOLD",
        "many 12,345 expected = 12,345",
    ]
    assert err == "does not hold: Six is small: small\n"
    figures.pop(1)
    assert script.main([]) == 0
    assert capsys.readouterr().out.endswith("Every claim holds.\n")


def test_a_reader_who_goes_away_ends_the_script_without_a_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "paper_claims.py")],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")
