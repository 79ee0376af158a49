"""int8: the oracle is the same arithmetic on whole numbers, in float64."""

import pytest
import torch
from torch import nn

from small_models import small_model, words
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer.quantization import Int8Linear, sums_are_exact, to_int8


def int8_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T with W rounded to 8 bits row by row, in float64; x stays as it is."""
    scale = weight.double().abs().amax(dim=1, keepdim=True) / 127
    product = x.double() @ ((weight.double() / scale).round() * scale).T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_layer_multiplies_what_is_nearest_in_eight_bits(bias, rows):
    torch.manual_seed(rows)
    linear = nn.Linear(24, 40, bias=bias)
    linear.weight.data[3] = 0.0  # a row without any range
    x = 3 * torch.randn(2, rows, 24)
    found = Int8Linear.of(linear)(x)
    expected = int8_product(x, linear.weight.nan_to_num(), linear.bias).nan_to_num()
    expected[..., 3] = 0.0 if linear.bias is None else linear.bias[3].item()
    # Of x, half a step of its range over 255 (127 where sums of products might overflow) is lost at most.
    step = (x.max() - x.min()) / (255 if sums_are_exact() else 127)
    bound = (step / 2) * linear.weight.abs().sum(dim=1) * 1.02 + 1e-5
    assert ((found - expected).abs() <= bound).all()
    assert found.shape == (2, rows, 40)
    assert not torch.equal(found, linear(x))


def test_layers_side_by_side_give_what_each_gives():
    torch.manual_seed(0)
    for bias in (False, True):
        layers = [Int8Linear.of(nn.Linear(16, width, bias=bias)) for width in (5, 8, 3)]
        x = torch.randn(6, 16)
        joined = layers[0].side_by_side(layers[1:])
        torch.testing.assert_close(joined(x), torch.cat([each(x) for each in layers], dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "output_bias": True, "norm_first": True}], ids=str)
def test_a_model_in_int8_translates_by_the_fast_search_as_by_its_own_layers(monkeypatch, overrides):
    model = to_int8(small_model(**overrides))
    assert not any(type(each) is nn.Linear for each in model.modules())
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    states = model.get_encoder()(words(2, 6), attention_mask=mask).last_hidden_state
    assert generation.FastBeamDecoder.knows(model)
    plain, fast = (kind(model, states, mask, 9) for kind in (generation.BeamDecoder, generation.FastBeamDecoder))
    with torch.no_grad():
        for token in (0, 5, 9, 4):
            tokens = torch.full((2, 1), token)
            # A number on the border between two steps may fall to either side.
            torch.testing.assert_close(fast.step(tokens), plain.step(tokens), rtol=0, atol=0.1)
    ids = model.generate(words(2, 6), attention_mask=mask, max_new_tokens=8)
    assert ids.shape[0] == 2


def test_logits_in_int8_are_near_those_in_float32_and_embeddings_are_the_same():
    exact = small_model(std=0.3)
    embeddings = exact.get_input_embeddings().weight.clone()
    ids, targets = words(3, 7), words(3, 5, seed=1)
    with torch.no_grad():
        expected = exact(input_ids=ids, decoder_input_ids=targets).logits
        found = to_int8(exact)(input_ids=ids, decoder_input_ids=targets).logits
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.1
    assert torch.equal(exact.get_input_embeddings().weight, embeddings)


def test_int8_is_neither_saved_nor_made_of_other_precisions(tmp_path):
    with pytest.raises(ValueError, match=r"float32 model on a cpu, got torch\.bfloat16 on cpu"):
        to_int8(small_model().bfloat16())
    model = to_int8(small_model())
    with pytest.raises(ValueError, match="open the original"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
