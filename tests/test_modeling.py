"""modeling_vanilla_transformer, judged by the paper as loops, by torch.nn.Transformer and by arithmetic."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.utils import logging

import reference
from small_models import (
    cache_of,
    hyper_of,
    numpy_weights,
    padded,
    randomise,
    reference_logits,
    small_config,
    small_model,
    words,
)
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    list_presets,
)
from vanilla_transformer.modeling_vanilla_transformer import (
    DECODER_DEPTH,
    MAX_KEYS_FOR_MATRIX_PRODUCTS,
    fast_scaled_dot_product_attention,
    scaled_dot_product_attention,
)


ATTENTIONS = ["eager", "sdpa"]
VARIANTS = {
    "paper": {},
    "pre_norm": {"norm_first": True},
    "pre_norm_without_final_norm": {"norm_first": True, "final_norm": False},
    "post_norm_with_final_norm": {"final_norm": True},
    "attention_bias": {"attention_bias": True},
    "output_bias": {"output_bias": True},
    "untied": {"tie_word_embeddings": False},
    "d_k_unlike_d_v": {"d_k": 3, "d_v": 5},
    "one_head": {"num_heads": 1},
    "gelu": {"activation": "gelu"},
    "learned_positions": {"position_embedding": "learned", "max_position_embeddings": 32},
    "odd_width": {"d_model": 15, "num_heads": 3},
}
SOURCES = [[5, 9, 4, 21, 8, 13, 2], [7, 7, 2], [11, 3, 20, 6, 2]]
TARGETS = [[0, 6, 12, 15], [0, 19, 4, 4], [0, 3, 22, 9]]


def assert_close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """The largest difference is at most tolerance times the largest expected number (or 1, if that is more)."""
    given, expected = given.detach().double(), expected.detach().double()
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(given, expected, atol=tolerance * scale, rtol=0)


def source_batch(side: str = "right", width: int | None = None):
    return padded(SOURCES, side=side, width=width)


def training_batch():
    """Source ids, mask and labels of three pairs, the labels padded with -100."""
    input_ids, attention_mask = source_batch()
    labels = torch.tensor([[6, 12, 15, 2], [19, 2, -100, -100], [3, 22, 2, -100]])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def loss_and_gradients(model: nn.Module, batch: dict, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_gradients(given: dict, expected: dict, tolerance: float = 1e-5) -> None:
    """The largest difference is at most tolerance times the largest entry of all gradients."""
    assert given.keys() == expected.keys()
    scale = max([1e-3, *(gradient.abs().max().item() for gradient in expected.values())])
    for name, gradient in expected.items():
        difference = (given[name].double() - gradient.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


def positions_read_by(model: nn.Module, count: int, side: str = "encoder") -> torch.Tensor:
    """What is added to the scaled embeddings at positions 0 .. count - 1: the first states of an all-zero table."""
    stack = getattr(model.base_model, side)
    with torch.no_grad():
        stack.get_input_embeddings().weight.zero_()
        ids = torch.full((1, count), 5)
        outputs = stack(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    return outputs.hidden_states[0][0]


def closed_form(count: int, d_model: int) -> torch.Tensor:
    return torch.from_numpy(np.array([reference.sinusoid(position, d_model) for position in range(count)]))


# the oracle itself --------------------------------------------------------------------------------


def torch_logits(weights: dict[str, np.ndarray], hyper: reference.Hyper, input_ids, attention_mask, decoder_input_ids):
    """Logits of torch.nn.TransformerEncoder and TransformerDecoder in float64 with copies of the weights.

    nn.Transformer ends its stacks with a norm, which the paper's post-norm model has not; so they are built by hand.
    """
    d_model = weights["lm_head.weight"].shape[1]
    common = {
        "d_model": d_model,
        "nhead": hyper.num_heads,
        "dim_feedforward": weights["model.encoder.layers.0.feed_forward.fc1.weight"].shape[0],
        "dropout": 0.0,
        "activation": hyper.activation,
        "layer_norm_eps": hyper.layer_norm_eps,
        "batch_first": True,
        "norm_first": hyper.norm_first,
    }
    norms = [nn.LayerNorm(d_model, eps=hyper.layer_norm_eps) if hyper.has_final_norm else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**common), hyper.encoder_layers, norms[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**common), hyper.decoder_layers, norms[1])
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        state = {}
        for number in range(len(stack.layers)):
            ours, theirs = f"model.{side}.layers.{number}", f"layers.{number}"
            kinds = [("self_attention", "self_attn", "norm1")]
            if side == "decoder":
                kinds.append(("cross_attention", "multihead_attn", "norm2"))
            for kind, attention, norm in kinds:
                for part in ("weight", "bias"):
                    state[f"{theirs}.{attention}.in_proj_{part}"] = np.concatenate(
                        [weights[f"{ours}.{kind}.{letter}_proj.{part}"] for letter in "qkv"]
                    )
                    state[f"{theirs}.{attention}.out_proj.{part}"] = weights[f"{ours}.{kind}.out_proj.{part}"]
                    state[f"{theirs}.{norm}.{part}"] = weights[f"{ours}.{kind}_norm.{part}"]
            for part in ("weight", "bias"):
                state[f"{theirs}.linear1.{part}"] = weights[f"{ours}.feed_forward.fc1.{part}"]
                state[f"{theirs}.linear2.{part}"] = weights[f"{ours}.feed_forward.fc2.{part}"]
                state[f"{theirs}.norm{len(kinds) + 1}.{part}"] = weights[f"{ours}.feed_forward_norm.{part}"]
        if hyper.has_final_norm:
            for part in ("weight", "bias"):
                state[f"norm.{part}"] = weights[f"model.{side}.norm.{part}"]
        stack.double().load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})

    def embedded(side: str, ids: torch.Tensor) -> torch.Tensor:
        table = torch.from_numpy(weights[f"model.{side}.embed_tokens.weight"])
        return table[ids] * math.sqrt(d_model) + closed_form(ids.shape[1], d_model)

    memory = encoder(embedded("encoder", input_ids), src_key_padding_mask=attention_mask == 0)
    causal = torch.triu(torch.ones(decoder_input_ids.shape[1], decoder_input_ids.shape[1], dtype=torch.bool), 1)
    states = decoder(
        embedded("decoder", decoder_input_ids), memory, tgt_mask=causal, memory_key_padding_mask=attention_mask == 0
    )
    return (states @ torch.from_numpy(weights["lm_head.weight"]).T).detach()


def random_weights(
    hyper: reference.Hyper, d_model: int, d_ff: int, vocab_size: int, seed: int
) -> dict[str, np.ndarray]:
    """Weights for `reference` by the names of the state dict, without asking any model for them."""
    draw = np.random.default_rng(seed)
    words_by_width = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    shapes = dict.fromkeys(words_by_width, (vocab_size, d_model))
    biased, norms = {}, []
    for side, depth in (("encoder", hyper.encoder_layers), ("decoder", hyper.decoder_layers)):
        for number in range(depth):
            layer = f"model.{side}.layers.{number}"
            for kind in ("self_attention",) if side == "encoder" else ("self_attention", "cross_attention"):
                biased |= {f"{layer}.{kind}.{matrix}_proj": (d_model, d_model) for matrix in ("q", "k", "v", "out")}
                norms.append(f"{layer}.{kind}_norm")
            biased |= {f"{layer}.feed_forward.fc1": (d_ff, d_model), f"{layer}.feed_forward.fc2": (d_model, d_ff)}
            norms.append(f"{layer}.feed_forward_norm")
        if hyper.has_final_norm:
            norms.append(f"model.{side}.norm")
    weights = {f"{name}.weight": 0.5 * draw.standard_normal(shape) for name, shape in (shapes | biased).items()}
    weights |= {f"{name}.bias": 0.5 * draw.standard_normal(shape[0]) for name, shape in biased.items()}
    for name in norms:
        weights |= {f"{name}.weight": 1 + 0.2 * draw.standard_normal(d_model)}
        weights |= {f"{name}.bias": 0.5 * draw.standard_normal(d_model)}
    return weights


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_reference_itself_equals_torch_nn_transformer(norm_first):
    hyper = reference.Hyper(num_heads=4, encoder_layers=2, decoder_layers=3, norm_first=norm_first)
    weights = random_weights(hyper, d_model=16, d_ff=24, vocab_size=23, seed=1)
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    expected = torch_logits(weights, hyper, input_ids, attention_mask, decoder_input_ids)
    ours = reference.logits(
        weights, hyper, input_ids.tolist(), decoder_input_ids.tolist(), attention_mask=attention_mask.tolist()
    )
    assert_close(torch.from_numpy(ours), expected, 1e-11)


def test_the_reference_loss_equals_torch_cross_entropy():
    scores, labels = torch.randn(2, 4, 9, dtype=torch.float64), torch.tensor([[3, 0, -100, 8], [1, -100, -100, 2]])
    for smoothing in (0.0, 0.1, 0.4):
        expected = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        assert reference.loss(scores.numpy(), labels.tolist(), smoothing) == pytest.approx(expected.item(), rel=1e-12)


# 3.1 - 3.3: attention, feed-forward and stacks ----------------------------------------------------


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_equal_the_paper_written_as_loops(attention, variant, dtype, tolerance):
    model = small_model(attn_implementation=attention, dtype=dtype, **VARIANTS[variant])
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    expected = reference_logits(model, input_ids, decoder_input_ids, attention_mask)
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids).logits
    assert logits.std() > 0.5
    assert_close(logits, expected, tolerance)


def test_logits_equal_the_paper_written_as_loops_with_padding_in_any_place_on_both_sides():
    model = small_model()
    input_ids = torch.tensor([[1, 5, 1, 1, 9, 2, 1], [4, 4, 8, 6, 3, 7, 2]])
    decoder_input_ids = torch.tensor([[1, 0, 1, 6, 8], [0, 9, 9, 1, 5]])
    attention_mask, decoder_mask = (input_ids != 1).long(), (decoder_input_ids != 1).long()
    expected = reference_logits(model, input_ids, decoder_input_ids, attention_mask, decoder_mask)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_mask,
    ).logits
    keep = decoder_mask.bool()
    assert_close(logits[keep], expected[keep])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_match_torch_nn_transformer_with_copied_weights(attention, norm_first):
    model = small_model(attn_implementation=attention, attention_bias=True, norm_first=norm_first, seed=3)
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    expected = torch_logits(numpy_weights(model), hyper_of(model.config), input_ids, attention_mask, decoder_input_ids)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids).logits
    assert_close(logits, expected)


def test_attention_weights_equal_equation_1_written_as_loops():
    model = small_model(attn_implementation="eager", d_k=3, d_v=5)
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    records: list = []
    reference.logits(
        numpy_weights(model),
        hyper_of(model.config),
        input_ids.tolist(),
        decoder_input_ids.tolist(),
        attention_mask.tolist(),
        record=records,
    )
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        output_attentions=True,
    )
    kept = attention_mask.bool()
    for given, name in (
        (outputs.encoder_attentions, "encoder"),
        (outputs.decoder_attentions, "decoder"),
        (outputs.cross_attentions, "cross"),
    ):
        assert len(given) == len(records[0][name])
        for number, weights in enumerate(given):
            expected = torch.from_numpy(np.array([record[name][number] for record in records]))
            if name == "encoder":  # what a padded query looks at is nobody's business
                weights, expected = weights.transpose(1, 2)[kept], expected.transpose(1, 2)[kept]
            assert_close(weights, expected)
            assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("rows,source_len,target_len", [(1, 1, 1), (1, 40, 3), (5, 7, 6), (2, 130, 70)])
@pytest.mark.parametrize("padding", [False, True])
def test_fused_and_written_out_attention_agree_in_forward_and_gradients(rows, source_len, target_len, padding):
    eager, fused = (
        small_model(attn_implementation=name, std=0.2, d_model=32, d_ff=48, d_k=5, d_v=9) for name in ATTENTIONS
    )
    batch = {"input_ids": words(rows, source_len), "decoder_input_ids": words(rows, target_len, seed=1)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if padding and source_len > 1:
        batch["attention_mask"][0, source_len // 2 :] = 0
    labels = words(rows, target_len, seed=2)
    with torch.inference_mode():
        assert_close(fused(**batch).logits, eager(**batch).logits)
    for train in (False, True):
        results = [loss_and_gradients(model.train(train), {**batch, "labels": labels}) for model in (eager, fused)]
        assert_close(results[1][0], results[0][0])
        assert_same_gradients(results[1][1], results[0][1])


@pytest.mark.parametrize("keys", [1, 15, 16, 17, MAX_KEYS_FOR_MATRIX_PRODUCTS["otherwise"] + 1])
@pytest.mark.parametrize("shape", [(3, 1, 1, "keys"), (1, 1, 5, "keys"), (3, 2, 5, 1)])
def test_a_mask_of_any_shape_hides_the_same_of_few_keys_as_of_many(keys, shape):
    """Rows shorter than the processor's vectors are filled up; equation (1) in float64 knows nothing of that."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(3, 2, n, 4, generator=generator).double() for n in (5, keys, keys))
    mask = torch.rand([keys if n == "keys" else n for n in shape], generator=generator) < 0.7
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~mask.expand(3, 2, 5, keys), -torch.inf)
    expected = torch.softmax(scores, dim=-1).nan_to_num() @ value  # nothing for a query without a key
    assert_close(fast_scaled_dot_product_attention(query, key, value, mask), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_computes_long_rows_the_same_way_twice(reentrant, autocast):
    """Between the two limits of the matrix products, with dropout: another way would draw other masks."""
    results = []
    for checkpointing in (False, True):
        model = small_model(std=0.2, d_model=32, dropout=0.3, attention_dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        batch = {"input_ids": words(2, 90), "labels": words(2, 70, seed=1)}
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(loss_and_gradients(model, batch))
    assert_close(results[1][0], results[0][0])
    assert_same_gradients(results[1][1], results[0][1], 1e-2 if autocast else 1e-5)


@pytest.mark.parametrize(
    "keys, training, autocast, products",
    [(48, False, False, True), (49, True, False, False), (49, False, True, False), (49, True, True, True)],
)
def test_matrix_products_are_taken_where_they_are_faster(keys, training, autocast, products):
    model = small_model().train(training).get_encoder()
    mask, x = torch.ones(2, 1, 1, keys, dtype=torch.bool), torch.zeros(2, keys, model.config.d_model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        taken = model.mask_for_layers(mask, x)
    assert (taken.dtype == torch.float32) == products


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_future_target_tokens_do_not_change_past_logits(attention):
    model = small_model(attn_implementation=attention)
    input_ids, decoder_input_ids = words(2, 6), words(2, 9, seed=1)
    before = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
    for place in range(1, 9):
        changed = decoder_input_ids.clone()
        changed[:, place:] = 3 + (changed[:, place:] - 3 + 7) % 20
        after = model(input_ids=input_ids, decoder_input_ids=changed).logits
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:], atol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_encoder_and_cross_attention_look_in_both_directions_without_padding(attention):
    model = small_model(attn_implementation=attention)
    input_ids, decoder_input_ids = words(2, 6), words(2, 3, seed=1)
    changed = input_ids.clone()
    changed[:, -1] = 3 + (changed[:, -1] - 3 + 7) % 20
    states, changed_states = (model.get_encoder()(ids).last_hidden_state for ids in (input_ids, changed))
    assert not torch.allclose(states[:, 0], changed_states[:, 0], atol=1e-3)
    first, second = (model(input_ids=ids, decoder_input_ids=decoder_input_ids).logits for ids in (input_ids, changed))
    assert not torch.allclose(first[:, 0], second[:, 0], atol=1e-3)


# padding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padded_source_tokens_change_nothing(attention, side):
    model = small_model(attn_implementation=attention, tie_word_embeddings=False)
    input_ids, attention_mask = source_batch(side)
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": torch.tensor([[1, 1, 0, 6], [0, 5, 9, 1], [0, 4, 12, 8]]),
        "decoder_attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
    }
    before = model(**batch)
    with torch.no_grad():
        for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
            embedding.weight[1] = 1e3
    after = model(**batch)
    kept, target_kept = attention_mask.bool(), batch["decoder_attention_mask"].bool()
    assert torch.equal(after.encoder_last_hidden_state[kept], before.encoder_last_hidden_state[kept])
    assert torch.equal(after.logits[target_kept], before.logits[target_kept])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_left_right_and_no_padding_agree_on_both_sides(attention):
    model = small_model(attn_implementation=attention)
    targets = [[0, 6, 12, 15, 9], [0, 19], [0, 3, 22]]
    alone = [
        model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
        for source, target in zip(SOURCES, targets, strict=True)
    ]
    for source_side in ("left", "right"):
        for target_side in ("left", "right"):
            input_ids, attention_mask = source_batch(source_side, width=11)
            decoder_input_ids, decoder_mask = padded(targets, side=target_side, width=8)
            logits = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_mask,
            ).logits
            for row, expected in enumerate(alone):
                assert_close(logits[row][decoder_mask[row].bool()], expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_batched_logits_equal_single_sentence_logits_in_any_order(attention):
    model = small_model(attn_implementation=attention)
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
        for width in (7, 8, 16):
            input_ids, attention_mask = padded([SOURCES[row] for row in order], width=width)
            decoder_input_ids = torch.tensor([TARGETS[row] for row in order])
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
            ).logits
            for place, row in enumerate(order):
                single = model(
                    input_ids=torch.tensor([SOURCES[row]]), decoder_input_ids=torch.tensor([TARGETS[row]])
                ).logits[0]
                assert_close(logits[place], single)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_missing_attention_mask_is_inferred_from_the_padding(attention):
    model = small_model(attn_implementation=attention)
    input_ids, attention_mask = source_batch("left")
    decoder_input_ids = torch.tensor(TARGETS)
    explicit = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids)
    inferred = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids)
    assert torch.equal(inferred.logits, explicit.logits)
    kept = attention_mask.bool()
    states = model.get_encoder()(input_ids).last_hidden_state
    assert_close(states[kept], explicit.encoder_last_hidden_state[kept], 1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_fully_padded_source_gives_no_nan_and_leaves_its_neighbours_alone(attention):
    model = small_model(attn_implementation=attention)
    batch = training_batch()
    batch["attention_mask"][1] = 0
    batch["input_ids"][1] = 1
    for train in (False, True):
        loss, grads = loss_and_gradients(model.train(train), batch)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(gradient).all() for gradient in grads.values())
    model.eval()
    others = {name: tensor[[0, 2]] for name, tensor in batch.items()}
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        whole = model.to(dtype)(**batch)
        assert torch.isfinite(whole.logits).all()
        assert torch.isfinite(whole.encoder_last_hidden_state).all()
        assert_close(whole.logits[[0, 2]], model(**others).logits, tolerance)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_fully_padded_target_row_gives_no_nan(attention):
    model = small_model(attn_implementation=attention)
    batch = training_batch()
    batch["decoder_input_ids"] = torch.tensor(TARGETS)
    batch["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]])
    batch["labels"][1] = -100
    batch["labels"][2] = torch.tensor([-100, -100, 9, 2])
    for train in (False, True):
        loss, grads = loss_and_gradients(model.train(train), batch)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(gradient).all() for gradient in grads.values())


def test_a_query_without_any_key_gets_zeros_and_sends_back_no_gradient():
    query, key, value = (torch.randn(2, 1, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[[[1, 0, 1], [0, 0, 0], [1, 1, 1]]]]).bool()
    expected = torch.zeros(2, 1, 3, 4)
    for batch in range(2):
        for row, kept in ((0, [0, 2]), (2, [0, 1, 2])):
            scores = torch.stack([query[batch, 0, row] @ key[batch, 0, place] / math.sqrt(4) for place in kept])
            expected[batch, 0, row] = sum(
                weight * value[batch, 0, place] for weight, place in zip(scores.softmax(0), kept, strict=True)
            )
    expected = expected.detach()
    for function in (scaled_dot_product_attention, fast_scaled_dot_product_attention):
        output = function(query, key, value, mask)
        output = output[0] if isinstance(output, tuple) else output
        assert_close(output, expected, 1e-6)
        for tensor in (query, key, value):
            tensor.grad = None
        output.sum().backward()
        assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value))
        assert torch.equal(query.grad[:, :, 1], torch.zeros(2, 1, 4))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_source_without_any_token_is_attended_to_by_nobody(attention):
    model = small_model(attn_implementation=attention)
    decoder_input_ids = words(2, 3)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    padding = torch.ones(2, 4, dtype=torch.long)
    expected = model(input_ids=padding, decoder_input_ids=decoder_input_ids).logits
    assert_close(model(input_ids=nothing, decoder_input_ids=decoder_input_ids).logits, expected, 1e-6)
    assert model.generate(nothing, max_new_tokens=3).shape[0] == 2


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.float32, torch.float64])
def test_masks_may_be_of_any_type_of_numbers(attention, dtype):
    model = small_model(attn_implementation=attention)
    input_ids, attention_mask = source_batch("left")
    decoder_input_ids, decoder_mask = padded([[0, 6, 12, 15], [0, 19], [0, 3, 22]], side="left")

    def outputs(source_mask, target_mask):
        logits = model(
            input_ids=input_ids,
            attention_mask=source_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=target_mask,
        ).logits
        return logits, model.generate(input_ids, attention_mask=source_mask, max_new_tokens=4)

    expected = outputs(attention_mask, decoder_mask)
    for given, wanted in zip(outputs(attention_mask.to(dtype), decoder_mask.to(dtype)), expected, strict=True):
        assert torch.equal(given, wanted)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", [(3, 3), (3, 1), (1, 4), (3, 8), (4,), (3, 1, 4), (3, 1, 1, 4)])
@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_a_mask_of_another_shape_is_refused_with_both_shapes(attention, shape, name):
    model = small_model(attn_implementation=attention)
    batch = {"input_ids": words(3, 4), "decoder_input_ids": words(3, 4), name: torch.ones(shape, dtype=torch.long)}
    with pytest.raises(ValueError, match=name) as error:
        model(**batch)
    assert str(tuple(shape)) in str(error.value)
    assert "(3, 4)" in str(error.value) or "(3, 1, 4, 4)" in str(error.value)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["boolean", "added", "added_for_all_rows"])
def test_a_causal_mask_of_four_dimensions_is_taken_as_it_is(attention, kind):
    model = small_model(attn_implementation=attention)
    decoder_input_ids, kept = padded([[0, 6, 12, 15], [0, 19], [0, 3, 22]], side="left")
    common = {"input_ids": words(3, 5), "decoder_input_ids": decoder_input_ids}
    mask = torch.ones(4, 4).tril().bool()[None, None] & kept.bool()[:, None, None, :]
    if kind == "added_for_all_rows":
        mask, kept = torch.ones(1, 1, 4, 4).tril().bool(), torch.ones_like(kept)
    expected = model(**common, decoder_attention_mask=kept).logits[kept.bool()]
    if kind != "boolean":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert_close(model(**common, decoder_attention_mask=mask).logits[kept.bool()], expected)
    with pytest.raises(ValueError, match="decoder_attention_mask"):
        model(**common, decoder_attention_mask=mask[..., :3])


def with_raw_scores_of_minus_200(model: nn.Module) -> nn.Module:
    """Biases of the query and key projections add -10 * 10 * d_k / sqrt(d_k) = -200 to every raw score (d_k = 4)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.fill_(10.0 if "q_proj" in name else -10.0)
            elif "q_proj" in name or "k_proj" in name:
                parameter.mul_(0.05)
            elif "v_proj" in name or "out_proj" in name:
                parameter.mul_(0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_raw_scores_of_minus_200_stay_finite_and_close_in_16_bits(attention, dtype):
    model = with_raw_scores_of_minus_200(small_model(attn_implementation=attention, attention_bias=True, std=0.3))
    input_ids, attention_mask = source_batch("left")
    attention_mask[1], input_ids[1] = 0, 1
    decoder_input_ids, decoder_mask = padded([[0, 6, 12, 15], [0, 19], [0, 3, 22]], side="left")
    labels = torch.where(decoder_mask.bool(), decoder_input_ids.roll(-1, 1), -100)
    labels[:, -1] = 2
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_mask,
        "labels": labels,
    }
    kept = decoder_mask.bool()
    exact = model(**batch).logits[kept]
    half = copy.deepcopy(model).to(dtype)
    for train in (False, True):
        loss, grads = loss_and_gradients(half.train(train), batch)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(gradient).all() for gradient in grads.values())
    half.eval()
    before = half(**batch).logits
    assert torch.isfinite(before).all()
    assert (before[kept].float() - exact).abs().max() <= 2e-2 * exact.abs().max()
    with torch.no_grad():
        half.get_input_embeddings().weight[1] = 1e3
    after = half(**batch).logits
    but_pad = torch.arange(23) != 1
    assert torch.equal(after[kept][:, but_pad], before[kept][:, but_pad])


# the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("variant", ["paper", "pre_norm", "learned_positions", "d_k_unlike_d_v"])
def test_cached_decoding_equals_full_forward_at_every_step(attention, variant):
    model = small_model(attn_implementation=attention, **VARIANTS[variant])
    input_ids, attention_mask = source_batch("left")
    decoder_input_ids = words(3, 20)
    with torch.no_grad():
        encoder_outputs = model.get_encoder()(input_ids, attention_mask=attention_mask)
        common = {"encoder_outputs": encoder_outputs, "attention_mask": attention_mask}
        full = model(**common, decoder_input_ids=decoder_input_ids, use_cache=False).logits
        cache = None
        for step in range(20):
            outputs = model(
                **common, decoder_input_ids=decoder_input_ids[:, step : step + 1], cache=cache, use_cache=True
            )
            cache = cache_of(outputs)
            assert cache.get_seq_length() == step + 1
            assert_close(outputs.logits[:, -1], full[:, step])
    expected = reference_logits(model, input_ids[:1], decoder_input_ids[:1], attention_mask[:1])
    assert_close(full[:1], expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cached,chunk", [(5, 3), (1, 7), (7, 1), (15, 5)])
def test_a_chunk_on_top_of_a_cache_equals_the_full_forward_pass(attention, cached, chunk):
    model = small_model(attn_implementation=attention, max_position_embeddings=16)
    input_ids, attention_mask = source_batch()
    decoder_input_ids = words(3, cached + chunk)
    common = {"input_ids": input_ids, "attention_mask": attention_mask}
    full = model(**common, decoder_input_ids=decoder_input_ids).logits
    first = model(**common, decoder_input_ids=decoder_input_ids[:, :cached], use_cache=True)
    second = model(**common, decoder_input_ids=decoder_input_ids[:, cached:], cache=cache_of(first), use_cache=True)
    assert_close(first.logits, full[:, :cached])
    assert_close(second.logits, full[:, cached:])
    assert cache_of(second).get_seq_length() == cached + chunk


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_cached_decoding_of_left_padded_prompts_equals_the_full_forward_pass(attention):
    model = small_model(attn_implementation=attention)
    input_ids, attention_mask = source_batch()
    prompts = [[0, 6, 12, 15], [0, 19], [0, 3, 22]]
    start, start_mask = padded(prompts, side="left")
    more = words(3, 3)
    mask = torch.cat([start_mask, torch.ones_like(more)], dim=1)
    common = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": True}
    cache = cache_of(model(**common, decoder_input_ids=start, decoder_attention_mask=start_mask))
    logits = []
    for step in range(3):
        outputs = model(
            **common,
            decoder_input_ids=more[:, step : step + 1],
            decoder_attention_mask=mask[:, : 4 + step + 1],
            cache=cache,
        )
        cache = cache_of(outputs)
        logits.append(outputs.logits[:, -1])
    for row, prompt in enumerate(prompts):
        whole = torch.tensor([prompt + more[row].tolist()])
        alone = model(input_ids=torch.tensor([SOURCES[row]]), decoder_input_ids=whole).logits[0, -3:]
        assert_close(torch.stack([step[row] for step in logits]), alone)


def test_cross_attention_keys_are_computed_once_and_do_not_leak_into_the_next_source():
    model = small_model()
    projected: list[int] = []
    for layer in model.model.decoder.layers:
        layer.cross_attention.k_proj.register_forward_hook(lambda *_: projected.append(1))
    decoder_input_ids = words(1, 4)
    for source in SOURCES[:2]:
        input_ids = torch.tensor([source])
        encoder_outputs = model.get_encoder()(input_ids)
        for _ in range(2):  # the same encoder output serves two decodings
            projected.clear()
            cache, logits = None, []
            for step in range(4):
                outputs = model(
                    encoder_outputs=encoder_outputs,
                    attention_mask=torch.ones_like(input_ids),
                    decoder_input_ids=decoder_input_ids[:, step : step + 1],
                    cache=cache,
                    use_cache=True,
                )
                cache = cache_of(outputs)
                logits.append(outputs.logits)
            assert len(projected) <= len(model.model.decoder.layers)
            full = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
            assert_close(torch.cat(logits, dim=1), full)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_static_cache_serves_a_batch_and_a_source_of_any_size_after_each_reset(attention):
    model = small_model(attn_implementation=attention)
    cache = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=12), StaticCache(config=model.config, max_cache_len=20)
    )
    for rows, length in ((4, 20), (2, 7), (4, 20), (1, 3)):
        decoder_input_ids = words(rows, 6)
        input_ids, attention_mask = words(rows, length, seed=length), torch.ones(rows, length, dtype=torch.long)
        attention_mask[-1, -2:] = 0
        common = {"input_ids": input_ids, "attention_mask": attention_mask}
        full = model(**common, decoder_input_ids=decoder_input_ids).logits
        logits = []
        with torch.no_grad():
            for start, end in ((0, 2), (2, 3), (3, 6)):
                outputs = model(
                    **common, decoder_input_ids=decoder_input_ids[:, start:end], cache=cache, use_cache=True
                )
                logits.append(outputs.logits)
        assert_close(torch.cat(logits, dim=1), full)
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            for layer in part.layers:  # what is left of the last source must not be seen again
                layer.keys.fill_(1e3)
                layer.values.fill_(1e3)
        cache.reset()
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            for layer in part.layers:
                layer.keys.fill_(1e3)
                layer.values.fill_(1e3)


def static_cache(model: nn.Module, target: int, source: int) -> EncoderDecoderCache:
    return EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=target), StaticCache(config=model.config, max_cache_len=source)
    )


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_static_cache_made_in_advance_serves_a_smaller_batch(attention):
    model = small_model(attn_implementation=attention)
    cache = static_cache(model, 12, 20)
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        part.early_initialization(batch_size=4, num_heads=4, head_dim=4, dtype=torch.float32, device="cpu")
    inputs = {"input_ids": words(2, 7), "decoder_input_ids": words(2, 5)}
    assert_close(model(**inputs, cache=cache, use_cache=True).logits, model(**inputs).logits)


def test_a_static_cache_that_is_too_short_is_refused_with_its_length():
    model = small_model()
    inputs = {"input_ids": words(1, 5), "decoder_input_ids": words(1, 3)}
    cache = static_cache(model, 4, 8)
    model(**inputs, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="max_cache_len=4 target tokens, got 6"):
        model(**inputs, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="max_cache_len=4 source tokens, got 5"):
        model(**inputs, cache=static_cache(model, 8, 4), use_cache=True)


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_cache_of_another_batch_or_source_is_refused(kind):
    model = small_model()
    inputs = {"input_ids": words(2, 5), "decoder_input_ids": words(2, 3)}

    def filled():
        given = None if kind == "growing" else static_cache(model, 12, 12)
        return cache_of(model(**inputs, cache=given, use_cache=True))

    with pytest.raises(ValueError, match=r"2 rows, got a batch of 3"):
        model(input_ids=words(3, 5), decoder_input_ids=words(3, 1), cache=filled(), use_cache=True)
    if kind == "growing":
        with pytest.raises(ValueError, match=r"source of shape .*\(2, 5\).*\(2, 7\)"):
            model(input_ids=words(2, 7), decoder_input_ids=words(2, 1), cache=filled(), use_cache=True)
    with pytest.raises(ValueError, match=r"decoder_attention_mask .*\(2, 4\)"):
        model(
            input_ids=inputs["input_ids"],
            decoder_input_ids=words(2, 1),
            decoder_attention_mask=torch.ones(2, 1),  # of the new token alone, not of the cached ones
            cache=filled(),
            use_cache=True,
        )


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_cache_cut_back_or_reordered_goes_on_like_the_full_forward_pass(attention):
    model = small_model(attn_implementation=attention)
    input_ids, decoder_input_ids = words(1, 5).repeat(2, 1), words(2, 9)
    full = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
    cache = cache_of(model(input_ids=input_ids, decoder_input_ids=decoder_input_ids[:, :6], use_cache=True))
    cache.crop(-2)
    outputs = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids[:, 4:], cache=cache, use_cache=True)
    assert_close(outputs.logits, full[:, 4:])
    cache = cache_of(model(input_ids=input_ids, decoder_input_ids=decoder_input_ids[:, :6], use_cache=True))
    cache.reorder_cache(torch.tensor([1, 0]))
    outputs = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids[[1, 0], 6:], cache=cache, use_cache=True)
    assert_close(outputs.logits, full[[1, 0], 6:])


def test_a_plain_cache_serves_too():
    model = small_model()
    decoder_input_ids = words(2, 5)
    encoder_outputs = model.get_encoder()(words(2, 6))
    common = {"encoder_outputs": encoder_outputs, "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    full = model(**common, decoder_input_ids=decoder_input_ids).logits
    cache, logits = DynamicCache(config=model.config), []
    for step in (slice(0, 1), slice(1, 2), slice(2, 5)):
        outputs = model(**common, decoder_input_ids=decoder_input_ids[:, step], cache=cache, use_cache=True)
        cache = cache_of(outputs)
        logits.append(outputs.logits)
    assert_close(torch.cat(logits, dim=1), full)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that newer versions replace
def test_the_old_name_of_the_cache_is_accepted():
    model = small_model()
    input_ids, decoder_input_ids = words(2, 5), words(2, 4)
    full = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
    first = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids[:, :3], use_cache=True)
    second = model(
        input_ids=input_ids,
        decoder_input_ids=decoder_input_ids[:, 3:],
        past_key_values=cache_of(first),
        use_cache=True,
    )
    assert_close(second.logits, full[:, 3:])


# 3.5: positions -----------------------------------------------------------------------------------


def test_positional_encoding_matches_section_3_5_at_hand_computed_positions():
    table = positions_read_by(small_model(d_model=8, num_heads=2), 8)
    by_hand = {
        1: [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1.0],
        7: [0.656987, 0.753902, 0.644218, 0.764842, 0.069943, 0.997551, 0.007, 0.999976],
    }
    for position, digits in by_hand.items():
        assert_close(table[position], torch.tensor(digits, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("d_model", [5, 7, 33, 64])
def test_positional_encoding_equals_the_closed_form_at_any_width_and_length(d_model):
    model = small_model(d_model=d_model, num_heads=1, max_position_embeddings=16)
    torch.testing.assert_close(positions_read_by(model, 600).double(), closed_form(600, d_model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_positions_of_a_model_in_float64_are_exact(side):
    table = positions_read_by(small_model(d_model=64, dtype=torch.float64), 600, side)
    assert table.dtype == torch.float64
    torch.testing.assert_close(table, closed_form(600, 64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_four_hundred_positions_in_16_bits_stay_close_to_32_bits(dtype, tolerance):
    model = small_model(d_model=64, std=0.1)
    inputs = {"input_ids": words(2, 400), "decoder_input_ids": words(2, 400)}
    with torch.no_grad():
        exact = model(**inputs).logits
        given = model.to(dtype)(**inputs).logits
    assert (given.float() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("dtype,rounding", [(torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("how", ["after_construction", "on_loading", "by_default_dtype"])
def test_positions_in_16_bits_are_only_rounded_at_the_end(how, dtype, rounding, tmp_path):
    overrides = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
    if how == "by_default_dtype":
        torch.set_default_dtype(dtype)
        try:
            model = VanillaTransformerForConditionalGeneration(small_config(**overrides)).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    elif how == "on_loading":
        small_model(**overrides).save_pretrained(tmp_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    else:
        model = small_model(**overrides).to(dtype)
    for side in ("encoder", "decoder"):
        table = positions_read_by(model, 512, side)
        assert table.dtype == dtype
        assert (table.double() - closed_form(512, 64)).abs().max() <= rounding


def dirty_the_allocator(rows: int, columns: int) -> None:
    """Leaves memory behind that is finite and wrong, for a table that is allocated but never filled."""
    for value in range(3, 53):
        torch.full((rows, columns), float(value))


def opened_or_made_anew(how: str, model: nn.Module, folder) -> nn.Module:
    """The same model by one of the ways of building or loading."""
    cls = VanillaTransformerForConditionalGeneration
    if how == "from_pretrained":
        return cls.from_pretrained(folder)
    if how == "auto":
        return AutoModelForSeq2SeqLM.from_pretrained(folder)
    if how == "device_map":
        return AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="cpu")
    if how == "device_map_auto":
        return AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="auto")
    if how == "dtype_auto":
        return cls.from_pretrained(folder, dtype="auto")
    if how == "bfloat16":
        return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.bfloat16)
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    if how == "state_dict":
        loaded = cls(model.config)
    elif how == "to_meta_to_empty":
        loaded = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    else:
        with torch.device("meta"):
            loaded = cls(model.config)
        loaded = loaded.to_empty(device="cpu")
        if how == "meta_to_empty_and_init":
            loaded.init_weights()
    loaded.load_state_dict(model.state_dict())
    return loaded


WAYS = [
    *("from_pretrained", "auto", "device_map", "device_map_auto", "dtype_auto", "bfloat16", "deepcopy", "pickle"),
    *("state_dict", "to_meta_to_empty", "meta_to_empty", "meta_to_empty_and_init"),
]


@pytest.mark.parametrize("how", WAYS)
def test_positions_are_right_after_every_way_of_building_or_loading(how, tmp_path):
    model = small_model(d_model=32)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": words(2, 9), "decoder_input_ids": words(2, 7)}
    before = model(**inputs).logits
    dirty_the_allocator(1024, 32)
    loaded = opened_or_made_anew(how, model, tmp_path).eval()
    if how != "bfloat16":
        assert torch.equal(loaded(**inputs).logits, before)
    for side in ("encoder", "decoder"):
        table = positions_read_by(loaded, 300, side)
        tolerance = 4e-3 if how == "bfloat16" else 1e-6
        torch.testing.assert_close(table.double(), closed_form(300, 32), atol=tolerance, rtol=0)


@pytest.mark.parametrize("how", WAYS)
def test_matrices_stay_one_after_every_way_of_building_or_loading(how, tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    assert len({matrix.data_ptr() for matrix in three_matrices(opened_or_made_anew(how, model, tmp_path))}) == 1


def test_no_position_table_is_in_the_checkpoint_and_the_length_may_change(tmp_path):
    model = small_model(max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
    assert not [name for name in saved if "position" in name]
    assert sum(tensor.numel() for tensor in saved.values()) == sum(p.numel() for p in model.parameters())
    content = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - header == 4 * sum(p.numel() for p in model.parameters())
    inputs = {"input_ids": words(2, 12), "decoder_input_ids": words(2, 12)}
    for length in (64, 16):
        other = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, max_position_embeddings=length)
        assert torch.equal(other.eval()(**inputs).logits, model(**inputs).logits)


def test_sinusoids_reach_beyond_max_position_embeddings_on_both_sides():
    model = small_model(max_position_embeddings=32)
    input_ids, decoder_input_ids = words(1, 200), words(1, 40)
    expected = reference_logits(model, input_ids, decoder_input_ids)
    assert_close(model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits, expected)


def test_learned_positions_beyond_the_table_raise_an_error_that_names_the_limit():
    model = small_model(position_embedding="learned", max_position_embeddings=16)
    model(input_ids=words(1, 16), decoder_input_ids=words(1, 16))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model(input_ids=words(1, 17), decoder_input_ids=words(1, 4))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model(input_ids=words(1, 4), decoder_input_ids=words(1, 17))


def test_learned_positions_count_tokens_and_not_padding_or_free_slots_of_a_cache():
    model = small_model(position_embedding="learned", max_position_embeddings=8)
    rows = [[5, 6, 7, 8, 9, 3, 4, 2], [7, 2]]
    alone = [model(input_ids=torch.tensor([row]), decoder_input_ids=torch.tensor([[0, 9]])).logits[0] for row in rows]
    for side in ("left", "right"):
        input_ids, attention_mask = padded(rows, side=side, width=16)
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=torch.tensor([[0, 9], [0, 9]])
        ).logits
        for given, expected in zip(logits, alone, strict=True):
            assert_close(given, expected)
    input_ids, attention_mask = padded([[*rows[0], 2], [7, 2]], width=16)
    with pytest.raises(ValueError, match="9 tokens but max_position_embeddings=8"):
        model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=torch.tensor([[0], [0]]))
    inputs = {"input_ids": torch.tensor(rows[:1]), "decoder_input_ids": words(1, 8)}
    cached = model(**inputs, cache=static_cache(model, 20, 20), use_cache=True).logits
    assert_close(cached, model(**inputs).logits)


@pytest.mark.parametrize("train", [False, True])
def test_labels_beyond_max_position_embeddings_are_learnt_from(train):
    model = small_model(max_position_embeddings=32, label_smoothing=0.0).train(train)
    input_ids, labels = words(1, 200), words(1, 200, seed=1)
    start = torch.tensor([[0]])
    logits = reference_logits(model, input_ids, torch.cat([start, labels[:, :-1]], dim=1))
    loss = model(input_ids=input_ids, labels=labels).loss
    assert loss.item() == pytest.approx(reference.loss(logits.numpy(), labels.tolist()), rel=1e-5)
    loss.backward()


# 3.4: embeddings, tying, sizes --------------------------------------------------------------------


def three_matrices(model: nn.Module) -> list[torch.Tensor]:
    return [
        model.model.encoder.embed_tokens.weight,
        model.model.decoder.embed_tokens.weight,
        model.get_output_embeddings().weight,
    ]


def test_embedding_is_scaled_by_sqrt_d_model_before_adding_positions():
    model = small_model()
    input_ids = words(1, 5)
    outputs = model.get_encoder()(input_ids, output_hidden_states=True)
    expected = model.get_input_embeddings().weight.detach()[input_ids[0]].double() * 4 + closed_form(5, 16)
    assert_close(outputs.hidden_states[0][0], expected, 1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_uniform_within_half_of_xaviers_bound_and_scaled_embeddings_have_unit_variance(tied):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(
        small_config(
            vocab_size=500, d_model=64, d_ff=128, tie_word_embeddings=tied, attention_bias=True, output_bias=True
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif "embed_tokens" in name:
            assert (parameter * 8).std().item() == pytest.approx(1, abs=0.03), name
            assert torch.equal(parameter[1], torch.zeros(64)), name
        else:
            bound = 0.5 * math.sqrt(6 / sum(parameter.shape))
            assert parameter.abs().max().item() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name


def test_three_matrices_of_section_3_4_are_one_tensor_at_every_stage(tmp_path):
    def assert_one(model):
        assert len({matrix.data_ptr() for matrix in three_matrices(model)}) == 1
        assert torch.equal(three_matrices(model)[0], three_matrices(model)[2])

    model = VanillaTransformerForConditionalGeneration(small_config())
    assert_one(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(**training_batch()).loss.backward()
    optimizer.step()
    assert_one(model)
    model.resize_token_embeddings(31)
    assert_one(model)
    model.save_pretrained(tmp_path)
    for loaded in (
        VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path),
        AutoModelForSeq2SeqLM.from_config(VanillaTransformerConfig.from_pretrained(tmp_path)),
        copy.deepcopy(model),
    ):
        assert_one(loaded)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - the file is no dict
    assert shapes.count([31, 16]) == 1


def test_a_new_input_embedding_takes_all_three_places():
    model = small_model()
    new = nn.Embedding(23, 16, padding_idx=1)
    model.set_input_embeddings(new)
    assert {matrix.data_ptr() for matrix in three_matrices(model)[:2]} == {new.weight.data_ptr()}
    model.tie_weights()
    assert {matrix.data_ptr() for matrix in three_matrices(model)} == {new.weight.data_ptr()}
    untied = small_model(tie_word_embeddings=False)
    others = [matrix.data_ptr() for matrix in three_matrices(untied)[1:]]
    untied.set_input_embeddings(new)
    untied.tie_weights()
    assert [matrix.data_ptr() for matrix in three_matrices(untied)] == [new.weight.data_ptr(), *others]


def test_matrices_are_three_on_request_and_stay_three(tmp_path):
    model = small_model(tie_word_embeddings=False)
    assert len({matrix.data_ptr() for matrix in three_matrices(model)}) == 3
    model.save_pretrained(tmp_path)
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len({matrix.data_ptr() for matrix in three_matrices(loaded)}) == 3
    for before, after in zip(three_matrices(model), three_matrices(loaded), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("tied", [True, False])
def test_saving_a_loaded_model_again_gives_the_same_bytes(tied, tmp_path):
    model = small_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "first")
    VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_tied_weights_name_real_parameters():
    for cls in (VanillaTransformerModel, VanillaTransformerForConditionalGeneration):
        model = cls(small_config())
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert isinstance(model._tied_weights_keys, dict)
        for target, source in model.all_tied_weights_keys.items():
            assert {target, source} <= names


def parameters_by_hand(
    vocab_size: int = 37_000,
    d_model: int = 512,
    d_ff: int = 2048,
    num_heads: int = 8,
    layers: int = 6,
    d_k: int | None = None,
    d_v: int | None = None,
) -> int:
    """One matrix of words; attention without biases; two biased matrices of the feed-forward; gain and bias a norm."""
    d_k, d_v = d_k or d_model // num_heads, d_v or d_model // num_heads
    attention = 2 * d_model * num_heads * d_k + 2 * d_model * num_heads * d_v
    ffn = d_model * d_ff + d_ff + d_ff * d_model + d_model
    norm = 2 * d_model
    encoder_layer = attention + ffn + 2 * norm
    decoder_layer = 2 * attention + ffn + 3 * norm
    return vocab_size * d_model + layers * (encoder_layer + decoder_layer)


TABLE_3 = {
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16},
    "tiny": {"layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4},
    "A_h1": {"num_heads": 1},
    "A_h4": {"num_heads": 4},
    "A_h16": {"num_heads": 16},
    "A_h32": {"num_heads": 32},
    "B_dk16": {"d_k": 16},
    "B_dk32": {"d_k": 32},
    "C_N2": {"layers": 2},
    "C_N4": {"layers": 4},
    "C_N8": {"layers": 8},
    "C_d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "C_d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "C_ff1024": {"d_ff": 1024},
    "C_ff4096": {"d_ff": 4096},
    "D_drop0.0": {},
    "D_drop0.2": {},
    "D_ls0.0": {},
    "D_ls0.2": {},
    "E_learned": {},
}


def test_the_hand_formula_gives_the_known_counts():
    assert parameters_by_hand() == 63_045_632
    assert parameters_by_hand(**TABLE_3["big"]) == 214_171_648
    assert parameters_by_hand(**TABLE_3["B_dk16"]) == 55_967_744
    # tiny: 4,736,000 of words, and 4 x (3 x 65,536 of attention + 2 x 65,920 of feed-forward + 5 x 256 of norms)
    assert parameters_by_hand(**TABLE_3["tiny"]) == 4_736_000 + 4 * (196_608 + 131_840 + 1_280) == 6_054_912


@pytest.mark.parametrize("preset", TABLE_3)
def test_parameter_count_of_each_preset_matches_the_hand_count(preset):
    config = VanillaTransformerConfig.from_preset(preset)
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    expected = parameters_by_hand(**TABLE_3[preset])
    if preset == "E_learned":  # one table a side
        expected += 2 * config.max_position_embeddings * config.d_model
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert model.num_parameters() == expected


def test_every_preset_is_counted_here():
    assert set(list_presets()) == set(TABLE_3)


# the loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("variant", ["paper", "untied", "output_bias", "pre_norm"])
def test_loss_in_training_mode_is_the_smoothed_cross_entropy_over_the_whole_vocabulary(variant, smoothing):
    model = small_model(label_smoothing=smoothing, **VARIANTS[variant])
    batch = training_batch()
    decoder_input_ids = [reference.shift_right(row, 0, 1) for row in batch["labels"].tolist()]
    scores = reference_logits(model, batch["input_ids"], torch.tensor(decoder_input_ids), batch["attention_mask"])
    expected = reference.loss(scores.numpy(), batch["labels"].tolist(), smoothing)
    outputs = model.train()(**batch)
    assert outputs.logits is None
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", ["paper", "untied", "output_bias"])
def test_loss_in_evaluation_mode_is_plain_and_comes_with_the_logits(variant):
    model = small_model(label_smoothing=0.3, **VARIANTS[variant])
    batch = training_batch()
    outputs = model(**batch)
    assert outputs.logits.shape == (3, 4, 23)
    expected = reference.loss(outputs.logits.detach().double().numpy(), batch["labels"].tolist())
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-6)


def test_without_labels_logits_come_in_training_mode_too():
    model = small_model().train()
    outputs = model(input_ids=words(2, 5), decoder_input_ids=words(2, 4))
    assert outputs.loss is None
    assert outputs.logits.shape == (2, 4, 23)


def test_the_hubs_loss_function_of_the_model_does_not_shift_the_labels():
    logits, labels = torch.randn(2, 4, 23), words(2, 4)
    loss = small_model().loss_function(logits, labels, vocab_size=23)
    assert_close(loss, F.cross_entropy(logits.view(8, 23), labels.view(8)), 1e-6)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_loss_is_divided_by_num_items_in_batch(train, as_tensor):
    model = small_model().train(train)
    batch = training_batch()
    kept = int((batch["labels"] != -100).sum())
    count = torch.tensor(3 * kept) if as_tensor else 3 * kept
    plain, plain_grads = loss_and_gradients(model, batch)
    divided, divided_grads = loss_and_gradients(model, batch, num_items_in_batch=count)
    assert_close(divided * 3, plain, 1e-6)
    assert_same_gradients({name: 3 * grad for name, grad in divided_grads.items()}, plain_grads, 1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_accumulated_gradients_equal_one_large_batch(train):
    model = small_model().train(train)
    batch = training_batch()
    kept = int((batch["labels"] != -100).sum())
    whole_loss, whole = loss_and_gradients(model, batch)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for row in range(3):
        part = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        loss = model(**part, num_items_in_batch=kept).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole_loss.item(), rel=1e-6)
    assert_same_gradients(gradients(model), whole, 1e-6)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("count", [None, 0, 12])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_without_any_label_has_loss_zero_and_zero_gradients(train, count, smoothing):
    model = small_model(label_smoothing=smoothing).train(train)
    batch = training_batch()
    batch["labels"][:] = -100
    kwargs = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    loss, grads = loss_and_gradients(model, batch, **kwargs)
    assert loss.item() == 0.0
    for name, gradient in grads.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def plain_loss(model: nn.Module, batch: dict, smoothing: float) -> torch.Tensor:
    """The formula of section 5.4 on logits that the model gives when nothing is fused."""
    start = torch.full((batch["labels"].shape[0], 1), 0)
    decoder_input_ids = torch.cat([start, batch["labels"][:, :-1].masked_fill(batch["labels"][:, :-1] == -100, 1)], 1)
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch.get("attention_mask"),
        decoder_input_ids=decoder_input_ids,
    ).logits
    log_probs = logits.log_softmax(-1)
    kept = batch["labels"] != -100
    of_label = log_probs.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    per_word = (1 - smoothing) * of_label + smoothing * log_probs.mean(-1)
    return -(per_word * kept).sum() / kept.sum()


def exact_loss_and_gradients(model: nn.Module, batch: dict, smoothing: float):
    """Loss and gradients of `plain_loss` in float64."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad(set_to_none=True)
    loss = plain_loss(exact, batch, smoothing)
    loss.backward()
    return loss.detach(), gradients(exact)


@pytest.mark.parametrize("variant", ["paper", "untied", "output_bias"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_of_the_fused_loss_equal_those_of_the_plain_formula(variant, smoothing):
    model = small_model(label_smoothing=smoothing, **VARIANTS[variant]).train()
    batch = training_batch()
    fused_loss, fused = loss_and_gradients(model, batch)
    loss, exact = exact_loss_and_gradients(model, batch, smoothing)
    assert_close(fused_loss, loss)
    assert_same_gradients(fused, exact)


@pytest.mark.parametrize(
    "rows,length", [(1, 1), (1, 127), (1, 128), (1, 129), (4, 128), (3, 171), (5, 205), (2, 1025)]
)
def test_gradients_of_the_fused_loss_are_right_whatever_the_number_of_words(rows, length):
    overrides = {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": 67, "d_model": 8, "d_ff": 8, "num_heads": 1}
    model = small_model(std=0.4, **overrides).train()
    labels = words(rows, length, vocab_size=67)
    labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = -100
    labels[0, 0] = 9
    batch = {"input_ids": words(rows, 4), "labels": labels}
    fused_loss, fused = loss_and_gradients(model, batch)
    loss, exact = exact_loss_and_gradients(model, batch, 0.1)
    assert_close(fused_loss, loss)
    assert_same_gradients(fused, exact)


def test_the_fused_loss_is_exact_where_a_label_has_next_to_no_probability():
    model = small_model(std=0.4, output_bias=True).train()
    with torch.no_grad():
        model.lm_head.bias[5] = -200.0  # exp(-200) is no float32
        model.lm_head.bias[6] = -60.0
    batch = {"input_ids": words(2, 4), "labels": torch.tensor([[5, 6, 7, 2], [9, 5, 6, 2]])}
    fused_loss, fused = loss_and_gradients(model, batch)
    loss, exact = exact_loss_and_gradients(model, batch, 0.1)
    assert loss > 60
    assert_close(fused_loss, loss)
    assert_same_gradients(fused, exact)


@pytest.mark.parametrize("tokens", [60, 139, 210])
def test_gradients_of_the_fused_loss_are_right_for_a_vocabulary_too_large_to_hold_all_logits_at_once(tokens):
    overrides = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 8,
        "d_ff": 8,
        "num_heads": 1,
        "output_bias": True,
    }
    model = small_model(std=0.4, vocab_size=30_011, **overrides).train()
    batch = {"input_ids": words(1, 4), "labels": words(1, tokens, vocab_size=30_011)}
    fused_loss, fused = loss_and_gradients(model, batch)
    loss, exact = exact_loss_and_gradients(model, batch, 0.1)
    assert_close(fused_loss, loss)
    assert_same_gradients(fused, exact)


def test_a_factor_on_the_fused_loss_reaches_the_gradients():
    model = small_model().train()
    batch = training_batch()
    _, plain = loss_and_gradients(model, batch)
    model.zero_grad(set_to_none=True)
    (model(**batch).loss * 3).backward()
    assert_same_gradients(gradients(model), {name: 3 * gradient for name, gradient in plain.items()})


def test_the_fused_loss_of_frozen_parts_gives_the_others_the_same_gradients():
    model = small_model(tie_word_embeddings=False).train()
    batch = training_batch()
    _, whole = loss_and_gradients(model, batch)
    model.get_output_embeddings().weight.requires_grad_(False)
    _, without_head = loss_and_gradients(model, batch)
    assert "lm_head.weight" not in without_head
    assert_same_gradients(without_head, {name: whole[name] for name in without_head}, 1e-6)
    model.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    _, only_head = loss_and_gradients(model, batch)
    assert only_head.keys() == {"lm_head.weight"}
    assert_same_gradients(only_head, {"lm_head.weight": whole["lm_head.weight"]}, 1e-6)


def test_the_fused_loss_needs_no_gradients():
    model = small_model().train()
    batch = training_batch()
    with torch.no_grad():
        value = model(**batch).loss
    assert_close(value, model(**batch).loss, 1e-6)


def test_a_hook_or_a_wrapper_on_the_head_is_obeyed_in_training():
    batch = training_batch()
    model = small_model().train()
    called = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: called.append(output.shape) or output * 2)
    loss = model(**batch).loss
    assert called == [(3, 4, 23)]
    hook.remove()
    assert loss.item() != pytest.approx(model(**batch).loss.item(), rel=1e-3)

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.weight = inner.weight

        def forward(self, states):
            return 2 * self.inner(states)

    model.set_output_embeddings(Doubled(model.lm_head))
    assert model(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_under_bfloat16_autocast_stays_close_and_leaves_float32_gradients(attention):
    model = small_model(attn_implementation=attention, std=0.2).train()
    batch = training_batch()
    exact_loss, exact = loss_and_gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = loss_and_gradients(model, batch)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=2e-2)
    for name, gradient in exact.items():
        assert grads[name].dtype == torch.float32
        difference = (grads[name] - gradient).norm() / exact[name].norm().clamp(min=1e-2)
        assert difference < 0.1, f"{name}: {difference}"


def test_loss_ignores_padding_and_is_not_shifted_twice():
    model = small_model(label_smoothing=0.0)
    labels = torch.tensor([[5, 6, 7, 2, -100]])
    input_ids = words(1, 4)
    decoder_input_ids = torch.tensor([[0, 5, 6, 7, 2]])
    logits = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
    manual = F.cross_entropy(logits[0, :4], labels[0, :4]).item()
    shifted = F.cross_entropy(logits[0, :3], labels[0, 1:4]).item()
    for train in (False, True):
        value = model.train(train)(input_ids=input_ids, labels=labels).loss.item()
        assert value == pytest.approx(manual, abs=1e-6)
        assert value != pytest.approx(shifted, abs=1e-2)


def test_labels_are_shifted_right_once_from_the_decoder_start_token():
    model = small_model()
    labels = torch.tensor([[5, 6, 7, 2, -100], [9, 2, -100, -100, -100]])
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert shifted.tolist() == [[0, 5, 6, 7, 2], [0, 9, 2, 1, 1]]
    assert labels.tolist() == [[5, 6, 7, 2, -100], [9, 2, -100, -100, -100]]
    input_ids = words(2, 4)
    given = model(input_ids=input_ids, decoder_input_ids=shifted).logits
    assert_close(model(input_ids=input_ids, labels=labels).logits, given, 1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_forward_without_any_decoder_input_says_what_to_pass(train):
    model = small_model().train(train)
    with pytest.raises(
        ValueError, match=r"labels, decoder_input_ids or .*DataCollatorForSeq2Seq\(tokenizer, model=model"
    ):
        model(input_ids=words(2, 4))
    with pytest.raises(ValueError, match="give either decoder_input_ids or decoder_inputs_embeds, got neither"):
        model.model(input_ids=words(2, 4))


def test_one_pair_is_learnt_by_heart():
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(d_model=32, num_heads=2)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = {"input_ids": torch.tensor([[5, 9, 4, 2]]), "labels": torch.tensor([[7, 3, 11, 3, 20, 2]])}
    for _ in range(120):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    output = model.eval().generate(batch["input_ids"], num_beams=1)
    assert output[0].tolist() == [0, 7, 3, 11, 3, 20, 2]


# training mode: checkpointing and dropout ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that newer versions replace
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use_cache", [None, True])
def test_gradient_checkpointing_equals_none(reentrant, use_cache):
    model = small_model().train()
    batch = training_batch()
    kwargs = {} if use_cache is None else {"use_cache": use_cache}
    loss, grads = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed_loss, checkpointed = loss_and_gradients(model, batch, **kwargs)
    assert_close(checkpointed_loss, loss, 1e-6)
    assert_same_gradients(checkpointed, grads, 1e-6)
    assert any(name.startswith("model.encoder.layers") for name in checkpointed)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that newer versions replace
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_says_nothing_at_each_step(reentrant, caplog, recwarn):
    """At most once, that a cache which was asked for is left out."""
    model = small_model().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for step in range(6):
            loss_and_gradients(model, training_batch(), **({"use_cache": True} if step % 2 else {}))
    finally:
        logger.removeHandler(caplog.handler)
    assert len(caplog.records) <= 1
    assert len([warning for warning in recwarn if "checkpoint" in str(warning.message)]) <= 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that newer versions replace
def test_gradient_checkpointing_left_on_does_not_change_generation():
    model = small_model()
    before = model.generate(words(2, 5), max_new_tokens=8)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(words(2, 5), max_new_tokens=8), before)


def test_dropout_of_embeddings_and_positions_keeps_and_scales_as_it_says():
    model = small_model(dropout=0.3, d_model=64)
    ids, rate = words(20, 40), 0.3
    clean = model.get_encoder()(ids, output_hidden_states=True).hidden_states[0]
    torch.manual_seed(0)
    noisy = model.train().get_encoder()(ids, output_hidden_states=True).hidden_states[0]
    dropped = noisy == 0
    deviation = math.sqrt(rate * (1 - rate) / dropped.numel())
    assert abs(dropped.double().mean().item() - rate) < 5 * deviation
    assert_close(noisy[~dropped], (clean / (1 - rate))[~dropped], 1e-4)
    noisy = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True).decoder_hidden_states[0]
    assert abs((noisy == 0).double().mean().item() - rate) < 5 * deviation


@pytest.mark.parametrize("sublayer", ["self_attention.out_proj", "feed_forward.fc2"])
def test_dropout_of_each_sublayer_output_keeps_and_scales_as_it_says(sublayer):
    rate = 0.4
    model = small_model(
        dropout=rate, d_model=64, attention_bias=True, norm_first=True, final_norm=False, encoder_layers=1
    )
    with torch.no_grad():  # every sub-layer gives nothing but the constant 3 where it is looked at
        layer = model.model.encoder.layers[0]
        for linear in (layer.self_attention.out_proj, layer.feed_forward.fc2):
            linear.weight.zero_()
            linear.bias.zero_()
        layer.get_submodule(sublayer).bias.fill_(3.0)
    torch.manual_seed(1)
    outputs = model.train().get_encoder()(words(20, 40), output_hidden_states=True)
    added = (outputs.last_hidden_state - outputs.hidden_states[0]).detach()
    kept = added.abs() > 1e-3
    deviation = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - rate)) < 5 * deviation
    assert_close(added[kept], torch.full_like(added[kept], 3 / (1 - rate)), 1e-4)


@pytest.mark.parametrize(
    "side,sublayer",
    [
        ("encoder", "self_attention"),
        ("encoder", "feed_forward"),
        ("decoder", "self_attention"),
        ("decoder", "cross_attention"),
        ("decoder", "feed_forward"),
    ],
)
def test_what_each_norm_of_the_paper_sees_is_x_plus_the_dropped_out_sublayer(side, sublayer):
    rate = 0.4
    model = small_model(dropout=rate, d_model=64, attention_bias=True, encoder_layers=1, decoder_layers=1)
    layer = model.get_submodule(f"model.{side}.layers.0")
    order = [name for name, _ in layer.named_children() if not name.endswith("_norm")]
    with torch.no_grad():  # every sub-layer gives nothing but the constant 3 where it is looked at
        for name in order:
            last = layer.get_submodule(name).fc2 if name == "feed_forward" else layer.get_submodule(name).out_proj
            last.weight.zero_()
            last.bias.fill_(3.0 if name == sublayer else 0.0)
    seen, given = {}, {}
    for name in order:
        norm = layer.get_submodule(f"{name}_norm")
        norm.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
        norm.register_forward_hook(lambda _, args, output, name=name: given.update({name: output.detach()}))
    torch.manual_seed(1)
    ids = words(20, 40)
    outputs = model.train()(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
    x = outputs[f"{side}_hidden_states"][0].detach()
    for name in order:
        added = seen[name] - x
        if name == sublayer:
            kept = added.abs() > 1e-3
            deviation = math.sqrt(rate * (1 - rate) / kept.numel())
            assert abs(kept.double().mean().item() - (1 - rate)) < 5 * deviation
            assert_close(added[kept], torch.full_like(added[kept], 3 / (1 - rate)), 1e-4)
        else:
            assert_close(added, torch.zeros_like(added))
        x = given[name]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_acts_in_training_and_is_off_in_evaluation(field, attention):
    plain = small_model(attn_implementation=attention)
    model = small_model(attn_implementation=attention, **{field: 0.5})
    inputs = {"input_ids": words(2, 9), "decoder_input_ids": words(2, 6)}
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    model.train()
    first, second = model(**inputs).logits, model(**inputs).logits
    assert not torch.allclose(first, second, atol=1e-3)
    plain.train()
    assert_close(plain(**inputs).logits, plain(**inputs).logits, 1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_dropout_is_on_the_weights_and_keeps_their_mean(attention):
    rate = 0.25
    model = small_model(
        attn_implementation=attention,
        attention_dropout=rate,
        norm_first=True,
        final_norm=False,
        encoder_layers=1,
        d_model=16,
        num_heads=1,
    )
    layer = model.model.encoder.layers[0]
    with torch.no_grad():  # all keys alike, all values one: the output is the share of the weights that is kept
        layer.self_attention.q_proj.weight.zero_()
        layer.self_attention_norm.weight.zero_()
        layer.self_attention_norm.bias.fill_(1.0)
        layer.self_attention.v_proj.weight.fill_(1 / 16)
        layer.self_attention.out_proj.weight.copy_(torch.eye(16))
        layer.feed_forward.fc2.weight.zero_()
        layer.feed_forward.fc2.bias.zero_()
    torch.manual_seed(2)
    length = 10
    outputs = model.train().get_encoder()(words(50, length), output_hidden_states=True)
    share = (outputs.last_hidden_state - outputs.hidden_states[0]).detach()[..., 0].double() * (1 - rate) * length
    counts = share.round()
    assert_close(share, counts, 1e-3)  # a whole number of equal weights is kept in each row
    assert counts.unique().numel() > 3
    assert abs(counts.mean().item() / length - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / (500 * length))


# other ways in and out ----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_inputs_embeds_of_the_input_embeddings_equal_input_ids_on_both_sides(attention):
    model = small_model(attn_implementation=attention)
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    expected = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids).logits
    embed = model.get_input_embeddings()
    given = model(
        inputs_embeds=embed(input_ids),
        attention_mask=attention_mask,
        decoder_inputs_embeds=model.get_decoder().get_input_embeddings()(decoder_input_ids),
    ).logits
    assert torch.equal(given, expected)


def test_encoder_outputs_may_be_of_any_form():
    model = small_model()
    input_ids, attention_mask = source_batch()
    decoder_input_ids = torch.tensor(TARGETS)
    common = {"attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
    expected = model(input_ids=input_ids, **common).logits
    encoded = model.get_encoder()(input_ids, attention_mask=attention_mask)
    states = encoded.last_hidden_state
    forms = [encoded, encoded.to_tuple(), [states], states, {"last_hidden_state": states}]
    for form in (*forms, BaseModelOutput(states), BaseModelOutputWithPooling(states)):
        assert torch.equal(model(encoder_outputs=form, **common).logits, expected)
    with pytest.raises(TypeError, match="encoder_outputs"):
        model(encoder_outputs="states", **common)


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_encoder_outputs_without_a_mask_warn_once(how, caplog):
    model = small_model()
    encoded = model.get_encoder()(words(2, 5))
    logging.enable_propagation()  # else transformers' loggers do not reach the root, where pytest listens
    logging.warning_once.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            for _ in range(3):
                if how == "forward":
                    model(encoder_outputs=encoded, decoder_input_ids=words(2, 3))
                else:
                    model.generate(encoder_outputs=encoded, max_new_tokens=2, num_beams=1)
    finally:
        logging.disable_propagation()
    assert len([record for record in caplog.records if "attention_mask" in record.getMessage()]) == 1


def test_a_tuple_is_returned_on_request():
    model = small_model()
    batch = training_batch()
    outputs = model(**batch)
    as_tuple = model(**batch, return_dict=False)
    assert torch.equal(as_tuple[0], outputs.loss)
    assert torch.equal(as_tuple[1], outputs.logits)


def test_attention_weights_come_on_request_from_sdpa_too():
    inputs = {"input_ids": source_batch()[0], "decoder_input_ids": torch.tensor(TARGETS)}
    eager, fused = (small_model(attn_implementation=name)(**inputs, output_attentions=True) for name in ATTENTIONS)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for given, expected in zip(fused[name], eager[name], strict=True):
            assert_close(given, expected, 1e-6)
    assert small_model()(**inputs).cross_attentions is None


def test_only_the_logits_asked_for_are_made():
    model = small_model()
    inputs = {"input_ids": words(2, 5), "decoder_input_ids": words(2, 6)}
    logits = model(**inputs).logits
    assert torch.equal(model(**inputs, logits_to_keep=2).logits, logits[:, -2:])
    places = torch.tensor([0, 3])
    assert torch.equal(model(**inputs, logits_to_keep=places).logits, logits[:, places])


def test_hidden_states_are_one_more_than_layers_and_end_with_the_last():
    model = small_model()
    outputs = model(input_ids=words(2, 5), decoder_input_ids=words(2, 4), output_hidden_states=True)
    assert len(outputs.encoder_hidden_states) == 2 + 1
    assert len(outputs.decoder_hidden_states) == 3 + 1
    assert torch.equal(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)


@pytest.mark.skipif(not DECODER_DEPTH, reason="this version of transformers selects no single hidden states")
@pytest.mark.parametrize("depths", [{}, {"encoder_layers": 3, "decoder_layers": 2}])
@pytest.mark.parametrize("chosen", [[0], [-1], [1, -2]])
def test_chosen_hidden_states_are_those_of_the_full_list(depths, chosen):
    model = small_model(**depths)  # the stacks differ in depth, and -1 is the last of each
    inputs = {"input_ids": words(2, 5), "decoder_input_ids": words(2, 4)}
    full = model(**inputs, output_hidden_states=True)
    some = model(**inputs, output_hidden_states=chosen)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        length = len(full[name])
        kept = {index % length for index in chosen}
        assert len(some[name]) == length
        for index in range(length):
            if index in kept:
                assert torch.equal(some[name][index], full[name][index])
            else:
                assert some[name][index] is None


def test_attention_implementations_other_than_eager_and_sdpa_are_refused():
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError)):
            AutoModelForSeq2SeqLM.from_config(small_config(), attn_implementation=name)


def test_sdpa_is_the_default_and_can_be_exchanged_on_a_living_model():
    model = VanillaTransformerForConditionalGeneration(small_config()).eval()
    randomise(model)
    assert model.config._attn_implementation == "sdpa"
    inputs = {"input_ids": words(2, 5), "decoder_input_ids": words(2, 4)}
    before = model(**inputs).logits
    model.set_attn_implementation("eager")
    outputs = model(**inputs, output_attentions=True)
    assert outputs.cross_attentions[0].shape == (2, 4, 4, 5)
    assert_close(outputs.logits, before)


# the Hub's classes --------------------------------------------------------------------------------


def test_auto_classes_know_the_model_after_import():
    config = small_config()
    assert type(AutoModel.from_config(config)) is VanillaTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VanillaTransformerForConditionalGeneration


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}, {"output_bias": True}], ids=str)
def test_a_checkpoint_with_a_head_opens_as_the_base_model(overrides, tmp_path):
    model = small_model(**overrides)
    model.save_pretrained(tmp_path)
    for cls in (VanillaTransformerModel, AutoModel):
        base, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in base.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[f"model.{name}"]), name
        states = base.eval().get_encoder()(words(1, 6)).last_hidden_state
        assert_close(states, model.get_encoder()(words(1, 6)).last_hidden_state, 1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_checkpoint_opens_with_a_head(tied, tmp_path):
    base = small_model(cls=VanillaTransformerModel, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path)
    for cls in (VanillaTransformerForConditionalGeneration, AutoModelForSeq2SeqLM):
        model, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["missing_keys"]) == (set() if tied else {"lm_head.weight"})
        assert not info["unexpected_keys"]
        for name, tensor in base.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[f"model.{name}"]), name


def test_what_a_head_does_not_know_is_reported(tmp_path):
    small_model(output_bias=True).save_pretrained(tmp_path)
    _, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        tmp_path, output_bias=False, output_loading_info=True
    )
    assert set(info["unexpected_keys"]) == {"lm_head.bias"}


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}, {"position_embedding": "learned"}], ids=str)
@pytest.mark.parametrize("cls", [VanillaTransformerModel, VanillaTransformerForConditionalGeneration])
def test_each_half_opens_from_the_whole_models_folder(cls, overrides, tmp_path):
    whole = small_model(cls=cls, **overrides)
    whole.save_pretrained(tmp_path)
    for half, side in ((VanillaTransformerEncoder, "encoder"), (VanillaTransformerDecoder, "decoder")):
        opened, info = half.from_pretrained(tmp_path, output_loading_info=True)
        assert type(opened) is half
        assert not info["missing_keys"]
        expected = getattr(whole.base_model, side).state_dict()
        assert opened.state_dict().keys() == expected.keys()
        for name, tensor in opened.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        opened.save_pretrained(tmp_path / side)
        again = half.from_pretrained(tmp_path / side)
        assert torch.equal(again.layers[0].feed_forward.fc1.weight, opened.layers[0].feed_forward.fc1.weight)


@pytest.mark.parametrize("cls", [VanillaTransformerModel, AutoModelForSeq2SeqLM, AutoModel, VanillaTransformerDecoder])
def test_half_a_model_is_not_filled_up_with_random_weights(cls, tmp_path):
    small_model().get_encoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a VanillaTransformerEncoder alone"):
        cls.from_pretrained(tmp_path)


@pytest.mark.parametrize("cls", [VanillaTransformerModel, VanillaTransformerForConditionalGeneration])
def test_a_tied_checkpoint_opened_untied_starts_with_the_same_numbers(cls, tmp_path):
    tied = small_model(cls=cls)
    tied.save_pretrained(tmp_path)
    untied, info = cls.from_pretrained(tmp_path, tie_word_embeddings=False, output_loading_info=True)
    assert not info["missing_keys"]
    for name, tensor in untied.state_dict().items():
        assert torch.equal(tensor, tied.state_dict()[name]), name
    decoder = untied.base_model.decoder.embed_tokens.weight
    assert decoder.data_ptr() != untied.get_input_embeddings().weight.data_ptr()
    untied.save_pretrained(tmp_path / "untied")
    with safe_open(tmp_path / "untied" / "model.safetensors", "pt") as file:
        assert len([name for name in file.keys() if file.get_slice(name).get_shape() == [23, 16]]) == (  # noqa: SIM118
            2 if cls is VanillaTransformerModel else 3
        )


@pytest.mark.parametrize("tied", [True, False])
def test_other_ways_of_saving_keep_one_copy_of_a_shared_matrix(tied, tmp_path):
    model = small_model(tie_word_embeddings=tied)
    inputs = {"input_ids": words(1, 4), "decoder_input_ids": words(1, 3)}
    expected = model(**inputs).logits
    Accelerator().save_model(model, tmp_path / "accelerate")
    save_model(model, tmp_path / "plain.safetensors")
    for file in (tmp_path / "accelerate" / "model.safetensors", tmp_path / "plain.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
        assert shapes.count([23, 16]) == (1 if tied else 3)
        loaded = VanillaTransformerForConditionalGeneration(model.config).eval()
        load_model(loaded, file)
        assert torch.equal(loaded(**inputs).logits, expected)
    model.save_pretrained(tmp_path / "shards", max_shard_size="3KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "shards")(**inputs).logits, expected)


def test_a_config_that_no_longer_fits_builds_no_model():
    for name, value in (("num_heads", 7), ("d_model", 18), ("eos_token_id", 23), ("vocab_size", 2)):
        config = small_config()
        setattr(config, name, value)
        for cls in (VanillaTransformerModel, VanillaTransformerForConditionalGeneration):
            with pytest.raises(ValueError, match=name):
                cls(config)


def test_a_vocabulary_is_not_resized_below_its_special_tokens():
    model = small_model()
    with pytest.raises(ValueError, match="eos_token_id"):
        model.resize_token_embeddings(2)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 23


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size,multiple", [(28, None), (20, None), (25, 8), (None, 8)])
def test_resizing_the_vocabulary_keeps_the_old_words_and_every_shape_together(tied, size, multiple, tmp_path):
    model = small_model(output_bias=True, tie_word_embeddings=tied, label_smoothing=0.0)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    size = size or 23
    rows = size if multiple is None else -(-size // multiple) * multiple
    kept = min(rows, 23)
    batch = training_batch()
    batch = {name: torch.where(tensor >= 20, 19, tensor) for name, tensor in batch.items()}

    def check(model):
        logits = model(**batch).logits
        bias = next(value for name, value in model.state_dict().items() if name.endswith("lm_head.bias"))
        assert logits.shape[-1] == model.config.vocab_size == bias.shape[-1] == rows
        for matrix in three_matrices(model):
            assert matrix.shape[0] == rows
        if tied:
            assert len({matrix.data_ptr() for matrix in three_matrices(model)}) == 1
        for side in ("encoder", "decoder"):
            name = f"model.{side}.embed_tokens.weight"
            assert torch.equal(model.state_dict()[name][:kept], old[name][:kept])
        assert torch.equal(model.lm_head.weight[:kept], old["lm_head.weight"][:kept])
        assert torch.equal(bias[:kept], old["lm_head.bias"][:kept])
        assert torch.equal(bias[kept:], torch.zeros(rows - kept))
        manual = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert_close(model(**batch).loss, manual, 1e-6)
        assert_close(model.train()(**batch).loss, manual, 1e-5)
        model.eval()
        model.generate(batch["input_ids"], max_new_tokens=3)

    check(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    check(loaded)
    loaded.resize_token_embeddings(rows + 1)
    assert loaded(**batch).logits.shape[-1] == rows + 1
    if not tied:  # the padding's row, as an input, still gets no gradient
        loaded.train()(**batch).loss.backward()
        for embedding in (loaded.model.encoder.embed_tokens, loaded.model.decoder.embed_tokens):
            assert embedding.weight.grad[1].abs().max() == 0
            assert embedding.weight.grad.abs().max() > 0


def test_a_model_can_be_copied_and_its_half_saved_on_its_own(tmp_path):
    model = small_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.add_(1)
    assert not torch.equal(twin.get_input_embeddings().weight, model.get_input_embeddings().weight)
    model.get_encoder().save_pretrained(tmp_path)
    encoder = type(model.get_encoder()).from_pretrained(tmp_path).eval()
    ids = words(2, 6)
    assert_close(encoder(ids).last_hidden_state, model.get_encoder()(ids).last_hidden_state, 1e-6)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path, mask):
    before = os.umask(mask)
    try:
        small_model().save_pretrained(tmp_path, max_shard_size="5KB")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()}
    assert len([name for name in modes if name.endswith(".safetensors")]) > 1
    assert set(modes.values()) == {0o666 & ~mask}


def test_saved_config_says_what_was_saved(tmp_path):
    small_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "vanilla_transformer"
    assert config["architectures"] == ["VanillaTransformerForConditionalGeneration"]
    assert config["dtype"] == "float32"


# inputs that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": words(0, 5)}, r"input_ids must have the shape \(batch, length\) .* got \(0, 5\)"),
        ({"input_ids": words(5)}, r"input_ids must have the shape .* got \(5,\)"),
        ({"input_ids": words(2, 5).float()}, "input_ids must hold whole numbers, got torch.float32"),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 16)},
            r"inputs_embeds must have .* d_model\) .* got \(2, 16\)",
        ),
        ({"decoder_input_ids": words(2, 0)}, r"decoder_input_ids must have the shape .* got \(2, 0\)"),
        ({"decoder_input_ids": words(3, 4)}, "equally many rows, got 2 and 3"),
        ({"attention_mask": torch.ones(2, 3)}, r"^attention_mask must have .* \(2, 5\).* got \(2, 3\)"),
        ({"attention_mask": torch.ones(2, 7)}, r"^attention_mask must have .* \(2, 5\).* got \(2, 7\)"),
        ({"attention_mask": torch.ones(1, 5)}, r"^attention_mask must have .* \(2, 5\).* got \(1, 5\)"),
        ({"decoder_attention_mask": torch.ones(2, 3)}, r"decoder_attention_mask must have .* \(2, 4\).* got \(2, 3\)"),
        ({"decoder_attention_mask": torch.ones(2, 9)}, r"decoder_attention_mask must have .* \(2, 4\).* got \(2, 9\)"),
        ({"encoder_outputs": (torch.ones(2, 6, 16),), "attention_mask": torch.ones(2, 5)}, r"\(2, 6\).* got \(2, 5\)"),
        ({"input_ids": torch.tensor([[3, 99], [3, 4]])}, r"\[0, vocab_size=23\), got 3 to 99"),
        ({"decoder_input_ids": torch.tensor([[3, -1], [3, 4]])}, r"\[0, vocab_size=23\), got -1 to 4"),
        ({"labels": torch.tensor([[3, 4, 2, 23], [3, 4, 5, 2]])}, r"labels must lie in \[0, vocab_size=23\).* got 23"),
        ({"labels": torch.tensor([[3, -1, 2, 2], [3, 4, 5, 2]])}, r"labels must lie in \[0, vocab_size=23\).* got -1"),
        ({"labels": words(2, 3)}, r"labels must have the shape \(2, 4\).* got \(2, 3\)"),
        ({"labels": words(3, 4), "decoder_input_ids": None}, "equally many rows, got 2 and 3"),
        ({"labels": words(4), "decoder_input_ids": None}, r"labels must have the shape .* got \(4,\)"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_inputs_that_do_not_fit_are_named(inputs, message, training):
    model = small_model().train(training)
    usual = {"input_ids": words(2, 5), "decoder_input_ids": words(2, 4)}
    with pytest.raises(ValueError, match=message):
        model(**{**usual, **inputs})


def test_a_mask_of_the_new_tokens_alone_is_refused_beside_a_cache():
    """Their positions would be counted from zero again."""
    model = small_model()
    source, target = words(1, 5), words(1, 6)
    first = model(input_ids=source, decoder_input_ids=target[:, :4], use_cache=True)
    rest = {"input_ids": source, "decoder_input_ids": target[:, 4:], "cache": cache_of(first)}
    with pytest.raises(ValueError, match=r"\(1, 6\), the length counting cached tokens, got \(1, 2\)"):
        model(**rest, decoder_attention_mask=torch.ones(1, 2))
    whole = model(input_ids=source, decoder_input_ids=target).logits[:, 4:]
    assert_close(model(**rest, decoder_attention_mask=torch.ones(1, 6)).logits, whole, 1e-5)


# compilers ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_exported_encoder_and_decoder_step_keep_no_size_of_the_sample(attention):
    model = small_model(attn_implementation=attention)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, input_ids, attention_mask):
            return self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, states, attention_mask, decoder_input_ids):
            outputs = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                use_cache=False,
            )
            return outputs.logits

    rows, source, target = (torch.export.Dim(name, min=1, max=512) for name in ("rows", "source", "target"))
    ids, decoder_ids = words(2, 7), words(2, 5)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    states = Encoder()(ids, mask)
    with torch.no_grad():
        encoder = torch.export.export(
            Encoder().eval(),
            (ids, mask),
            dynamic_shapes={"input_ids": {0: rows, 1: source}, "attention_mask": {0: rows, 1: source}},
        ).module()
        step = torch.export.export(
            Step().eval(),
            (states, mask, decoder_ids),
            dynamic_shapes={
                "states": {0: rows, 1: source},
                "attention_mask": {0: rows, 1: source},
                "decoder_input_ids": {0: rows, 1: target},
            },
        ).module()
    for batch, length in ((1, 3), (4, 30), (2, 200)):
        ids, decoder_ids = words(batch, length), words(batch, length // 2 + 1, seed=1)
        mask = torch.ones_like(ids)
        mask[-1, length - 1 :] = 0
        states = encoder(ids, mask)
        assert_close(states[mask.bool()], Encoder()(ids, mask)[mask.bool()])
        assert_close(step(states, mask, decoder_ids), Step()(states, mask, decoder_ids))


@pytest.mark.slow
def test_a_compiled_forward_recompiles_a_bounded_number_of_times():
    from torch._dynamo.testing import CompileCounter

    model = small_model()
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend=counter, dynamic=None)
    for length in (5, 9, 17, 23):
        inputs = {"input_ids": words(2, length), "decoder_input_ids": words(2, length - 1)}
        with torch.no_grad():
            assert_close(compiled(**inputs, use_cache=False).logits, model(**inputs).logits, 1e-4)
    assert counter.frame_count <= 3
