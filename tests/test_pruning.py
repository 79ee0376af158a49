"""Importance of heads against finite differences, and pruned models against the full one with zeros in W^O."""

import itertools

import pytest
import torch

from conftest import TINY_CORPUS
from small_models import padded, randomise, small_model, words
from translators import varied_model
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.checkpoints import average_checkpoints
from vanilla_transformer.presets import parameter_count
from vanilla_transformer.pruning import (
    Head,
    attentions_of,
    comparable_across_layers,
    head_importance,
    heads_without_the_least,
    importance_table,
    prune_heads,
    pruned_heads_of,
)


# Of 2 + 3 + 3 attentions with 4 heads: none, some, and all but one.
PRUNED = {
    "encoder": [[1], [0, 2, 3]],
    "decoder": [[], [0, 1], [3]],
    "cross": [[2], [], [0, 1, 3]],
}
DEPARTURES = {
    "the paper": {},
    "widths of their own, biases, learned positions": {
        **{"d_k": 3, "d_v": 5, "attention_bias": True, "position_embedding": "learned", "norm_first": True},
        **{"tie_word_embeddings": False, "output_bias": True},
    },
}
SOURCES, TARGETS = (list(side) for side in zip(*TINY_CORPUS[:5], strict=True))


def with_zeros(model, pruned_heads):
    """The model itself, with zeros where W^O takes up these heads."""
    for (kind, layer), attention in attentions_of(model).items():
        d_v = attention.out_proj.weight.shape[1] // attention.num_heads
        for head in pruned_heads.get(kind, [[]] * 9)[layer]:
            attention.out_proj.weight.data[:, head * d_v : (head + 1) * d_v] = 0
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("departure", DEPARTURES)
def test_a_pruned_model_has_the_logits_of_the_full_one_with_zeros_in_the_output_projection(departure, attention):
    model = small_model(attn_implementation=attention, **DEPARTURES[departure])
    before = model.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    smaller = prune_heads(model, PRUNED)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.pruned_heads is None
    source, mask = padded([[5, 6, 7, 8, 2], [9, 10, 2]])
    target = words(2, 6)
    with torch.no_grad():
        found = smaller(input_ids=source, attention_mask=mask, decoder_input_ids=target)
        expected = with_zeros(model, PRUNED)(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert smaller.num_parameters() == parameter_count(smaller.config) < model.num_parameters()


def test_a_pruned_model_translates_as_the_full_one_with_zeros_by_every_search():
    model = small_model(std=0.8).double()
    smaller = prune_heads(model, PRUNED)
    with_zeros(model, PRUNED)
    source, mask = padded([words(n).tolist() for n in (7, 3, 5)])
    for settings in (
        {"num_beams": 4},
        {"num_beams": 1},
        {"num_beams": 3, "num_return_sequences": 3, "output_scores": True, "return_dict_in_generate": True},
        {"num_beams": 1, "cache_implementation": "static"},
    ):
        found, expected = (
            each.generate(source, attention_mask=mask, max_new_tokens=60, **settings) for each in (smaller, model)
        )
        assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected)), settings


def test_a_pruned_model_survives_saving_averaging_resizing_and_training(tmp_path):
    smaller = prune_heads(small_model(), PRUNED)
    smaller.save_pretrained(tmp_path / "a")
    batch = {"input_ids": words(2, 5), "labels": words(2, 4, seed=1)}
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "a")
    assert loaded.config.pruned_heads == PRUNED
    with torch.no_grad():
        expected = smaller(**batch).logits
        assert torch.equal(loaded(**batch).logits, expected)
    other = prune_heads(small_model(seed=1), PRUNED)
    other.save_pretrained(tmp_path / "b")
    average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    mean = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "mean").state_dict()
    for name, weight in smaller.state_dict().items():
        torch.testing.assert_close(mean[name], (weight + other.state_dict()[name]) / 2)
    half = VanillaTransformerModel.from_pretrained(tmp_path / "a").encoder
    torch.testing.assert_close(half(words(2, 5))[0], smaller.model.encoder(words(2, 5))[0])
    loaded.resize_token_embeddings(25)
    torch.testing.assert_close(loaded(**batch).logits[..., :23], expected)
    loaded.train()(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_pruning_twice_is_pruning_once():
    model = small_model()
    first = prune_heads(model, {"encoder": [[1], [0]], "cross": [[], [], [3]]})
    twice, once = prune_heads(first, PRUNED), prune_heads(model, PRUNED)
    for name, weight in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], weight), name
    assert twice.config.pruned_heads == PRUNED
    with pytest.raises(ValueError, match=r"only the heads \[0, 2, 3\] in layer 0 of 'encoder'"):
        prune_heads(first, {"cross": [[], [], [3]]})
    with pytest.raises(ValueError, match="leave one head at least, got"):
        prune_heads(model, {"encoder": [[0, 1, 2, 3], []]})
    with pytest.raises(TypeError, match="got a Linear"):
        prune_heads(torch.nn.Linear(2, 2), {})


@pytest.fixture
def model(tiny_tokenizer):
    """Large weights, in float64: differences of losses say something."""
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            **{"vocab_size": len(tiny_tokenizer), "d_model": 16, "d_ff": 24, "num_heads": 4, "dropout": 0.3},
            **{"encoder_layers": 2, "decoder_layers": 2, "d_k": 3, "d_v": 5},
        )
    )
    randomise(model, std=0.4)
    return model.double().eval()


@pytest.mark.parametrize("pruned", [None, {"encoder": [[0], []], "cross": [[1, 2], []]}], ids=["full", "pruned"])
def test_importance_is_the_mean_absolute_slope_of_the_loss_of_each_pair(model, tiny_tokenizer, pruned):
    model = model if pruned is None else prune_heads(model, pruned)
    found = head_importance(model, tiny_tokenizer, SOURCES, TARGETS, tokens_per_batch=60)
    assert [(each.kind, each.layer, each.head) for each in found] == [
        (kind, layer, head)
        for kind, layer in itertools.product(("encoder", "decoder", "cross"), range(2))
        for head in model.config.heads_of(kind, layer)
    ]
    tokens = sum(len(tiny_tokenizer(target).input_ids) for target in TARGETS)
    step = 1e-4

    @torch.no_grad()
    def losses():
        """Of each pair by itself: no padding, and no softmax in float32."""
        for source, target in zip(SOURCES, TARGETS, strict=True):
            source_ids, target_ids = (tiny_tokenizer(text, return_tensors="pt").input_ids for text in (source, target))
            start = torch.full((1, 1), model.config.decoder_start_token_id)
            logits = model(source_ids, decoder_input_ids=torch.cat([start, target_ids[:, :-1]], dim=1)).logits
            yield -logits.log_softmax(dim=-1).gather(-1, target_ids[..., None]).sum().item()

    for each in found[::3]:
        attention = attentions_of(model)[each.kind, each.layer]
        place = model.config.heads_of(each.kind, each.layer).index(each.head)
        columns = attention.out_proj.weight.data[:, place * 5 : (place + 1) * 5]
        as_it_was = columns.clone()
        measured = []
        for scale in (1 + step, 1 - step):  # a mask on the head is a factor on its columns of W^O
            columns.copy_(as_it_was * scale)
            measured.append(list(losses()))
        columns.copy_(as_it_was)
        slopes = [(above - below) / (2 * step) for above, below in zip(*measured, strict=True)]
        assert each.importance > 0.001
        assert each.importance == pytest.approx(sum(map(abs, slopes)) / tokens, rel=1e-4), each


def test_importance_does_not_depend_on_batches_and_leaves_the_model_as_it_was(model, tiny_tokenizer):
    model.train()
    model.model.encoder.requires_grad_(False)
    required = [parameter.requires_grad for parameter in model.parameters()]
    whole = head_importance(model, tiny_tokenizer, [*SOURCES, " "], [*TARGETS, "ein"], tokens_per_batch=10_000)
    single = head_importance(model, tiny_tokenizer, SOURCES, TARGETS, tokens_per_batch=1)
    for one, other in zip(whole, single, strict=True):
        assert one.importance == pytest.approx(other.importance, rel=1e-5)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == required
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="got 5 sources and 4 targets"):
        head_importance(model, tiny_tokenizer, SOURCES, TARGETS[:4])
    with pytest.raises(ValueError, match="text on both sides, got none among 1"):
        head_importance(model, tiny_tokenizer, ["a"], [" "])


def test_a_head_that_is_not_heard_has_no_importance(model, tiny_tokenizer):
    with_zeros(model, {"decoder": [[], [2]]})
    found = head_importance(model, tiny_tokenizer, SOURCES, TARGETS)
    assert {(each.kind, each.layer, each.head) for each in found if each.importance == 0} == {("decoder", 1, 2)}


IMPORTANCES = {"encoder": [[3.0, 4.0], [0.1, 0.0]], "cross": [[9.0, 8.0]]}
HEADS = [
    Head(kind, layer, head, importance)
    for kind, layers in IMPORTANCES.items()
    for layer, row in enumerate(layers)
    for head, importance in enumerate(row)
]


@pytest.mark.parametrize("heads_kept", range(3, 7))
def test_of_all_choices_that_leave_each_attention_a_head_the_heaviest_is_made(heads_kept):
    choices = [
        choice
        for choice in itertools.combinations(HEADS, heads_kept)
        if len({(each.kind, each.layer) for each in choice}) == 3
    ]
    best = max(choices, key=lambda choice: sum(each.importance for each in choice))
    assert heads_without_the_least(HEADS, heads_kept) == list(best)


@pytest.mark.parametrize("heads_kept", [2, 7])
def test_a_number_of_heads_that_cannot_be_is_named(heads_kept):
    with pytest.raises(ValueError, match=f"between 3, one for each attention of the model, and 6.* got {heads_kept}"):
        heads_without_the_least(HEADS, heads_kept)


def test_layers_are_made_comparable_by_their_norm():
    found = [each.importance for each in comparable_across_layers([*HEADS, Head("cross", 1, 0, 0.0)])]
    assert found == pytest.approx([0.6, 0.8, 1, 0, 9 / 145**0.5, 8 / 145**0.5, 0])


def test_the_table_has_each_importance_and_marks_what_goes():
    lines = importance_table(HEADS, heads_without_the_least(HEADS, 4)).splitlines()
    assert [line.split() for line in lines] == [
        ["head", "0", "head", "1"],
        ["encoder", "0", "[3.00000]", "4.00000"],
        ["encoder", "1", "0.10000", "[0.00000]"],
        ["cross", "0", "9.00000", "8.00000"],
    ]
    config = VanillaTransformerConfig(num_heads=2, encoder_layers=2, decoder_layers=1)
    pruned = pruned_heads_of(config, heads_without_the_least(HEADS, 4))
    assert pruned == {"encoder": [[0], [1]], "decoder": [[0, 1]], "cross": [[]]}


def test_varied_models_stay_apart_when_pruned(tiny_tokenizer):
    """The models of the other tests can be pruned too, and say other things then."""
    model = varied_model(tiny_tokenizer).eval()
    heads = head_importance(model, tiny_tokenizer, SOURCES, TARGETS)
    kept = heads_without_the_least(heads, len(attentions_of(model)))
    smaller = prune_heads(model, pruned_heads_of(model.config, kept))
    assert {each.num_heads for each in attentions_of(smaller).values()} == {1}
    ids = tiny_tokenizer(SOURCES[:2], return_tensors="pt", padding=True)
    with torch.no_grad():
        difference = (
            smaller(**ids, decoder_input_ids=ids.input_ids).logits
            - model(**ids, decoder_input_ids=ids.input_ids).logits
        )
    assert difference.abs().max() > 0.01
