"""generation_vanilla_transformer: the decoding of section 6.1, judged by recomputation and by exhaustive search."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

import reference
from small_models import padded, reference_logits, reference_sentence, small_config, small_model, words
from test_hub_code_travels import elsewhere
from translators import varied_model
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer import (
    generation_vanilla_transformer as generation,
)
from vanilla_transformer.data import TranslationCollator


ATTENTIONS = ["eager", "sdpa"]
PAPER = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "length_penalty_type": "gnmt",
    "max_new_tokens_over_source": 50,
    "early_stopping": "never",
}
SOURCES = [[5, 9, 2], [4, 21, 8, 13, 6, 7, 2], [11, 3, 20, 6, 9, 15, 17, 4, 8, 19, 22, 2]]
NO_END = {"suppress_tokens": [1, 2]}  # neither pad nor EOS, so that every row runs to its limit


def translating_model(attn_implementation: str = "sdpa", seed: int = 0, **overrides):
    """A random model that ends its sentences at different lengths, at the latest 12 tokens over the source."""
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "output_bias": True}
    model = small_model(attn_implementation=attn_implementation, seed=seed, std=0.4, **{**sizes, **overrides})
    model.generation_config.max_new_tokens_over_source = 12
    with torch.no_grad():
        model.lm_head.bias.zero_()
        model.lm_head.bias[2] = 1.5
        model.lm_head.bias[1] = -1e4  # a translation with padding in its middle would be hard to trim
    return model


def trimmed(row: torch.Tensor, pad: int = 1) -> list[int]:
    """A row of generate() without the padding behind it."""
    ids = row.tolist()
    while ids and ids[-1] == pad:
        ids.pop()
    return ids


def translate(model, sources: list[list[int]], side: str = "right", width: int | None = None, **kwargs):
    """Ids of each source's translation, trimmed, and their scores (None without beams)."""
    input_ids, attention_mask = padded(sources, side=side, width=width)
    output = model.generate(
        input_ids, attention_mask=attention_mask, return_dict_in_generate=True, output_scores=True, **kwargs
    )
    return [trimmed(row) for row in output.sequences], getattr(output, "sequences_scores", None)


# the defaults and their survival ----------------------------------------------------------------


def settings_of(model) -> dict:
    return {name: getattr(model.generation_config, name, None) for name in PAPER}


def assert_decodes_as_the_paper(model) -> None:
    """The settings say so, and so do the limit of a row and the score of a hypothesis."""
    assert settings_of(model) == PAPER
    output = model.generate(torch.tensor([[5, 9, 2]]), return_dict_in_generate=True, output_scores=True, **NO_END)
    assert output.sequences.shape == (1, 1 + 3 + 50)
    total = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices).sum()
    assert output.sequences_scores.item() == pytest.approx(total.item() / ((5 + 53) / 6) ** 0.6, rel=1e-4)


def test_a_fresh_model_decodes_as_section_6_1_says():
    assert_decodes_as_the_paper(small_model())
    assert_decodes_as_the_paper(AutoModelForSeq2SeqLM.from_config(small_config()).eval())


@pytest.mark.parametrize("json_file", ["kept", "deleted"])
@pytest.mark.parametrize("times", [1, 2])
def test_decoding_defaults_survive_saving_and_loading(json_file, times, tmp_path):
    model = small_model()
    for number in range(times):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        saved = json.loads((folder / "generation_config.json").read_text())
        assert {name: saved[name] for name in PAPER} == PAPER
        assert not saved.get("_from_model_config")
        if json_file == "deleted":
            (folder / "generation_config.json").unlink()
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert_decodes_as_the_paper(model)
    assert_decodes_as_the_paper(VanillaTransformerForConditionalGeneration.from_pretrained(folder))


def test_own_settings_survive_saving_and_loading(tmp_path):
    model = small_model()
    model.generation_config.update(
        num_beams=2, length_penalty=1.0, length_penalty_type="hub", max_new_tokens_over_source=7
    )
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    expected = {**PAPER, "num_beams": 2, "length_penalty": 1.0, "length_penalty_type": "hub"}
    assert settings_of(loaded) == {**expected, "max_new_tokens_over_source": 7}
    assert loaded.generate(torch.tensor([[5, 9, 2]]), **NO_END).shape == (1, 1 + 3 + 7)


def test_generating_changes_no_setting_of_the_model():
    model = small_model()
    before = copy.deepcopy(model.generation_config.to_dict())
    model.generate(words(2, 5), max_new_tokens=4)
    model.generate(words(2, 5), num_beams=1)
    model.generate(words(2, 5), length_penalty=2.0, length_penalty_type="hub", max_new_tokens_over_source=2)
    own = GenerationConfig(num_beams=3, max_new_tokens=3)
    own_before = copy.deepcopy(own.to_dict())
    model.generate(words(2, 5), generation_config=own)
    assert model.generation_config.to_dict() == before
    assert own.to_dict() == own_before
    assert type(model.generation_config.length_penalty) is float
    assert "GNMT" not in model.generation_config.to_json_string()


def test_the_defaults_that_seq2seq_trainer_writes_do_not_cut_translations_at_20_tokens(tmp_path):
    model = small_model()
    model.generation_config.update(**model.generation_config._get_default_generation_params(), defaults_only=True)
    assert model.generation_config.max_length == 20
    assert_decodes_as_the_paper(model)
    model.save_pretrained(tmp_path)
    assert_decodes_as_the_paper(AutoModelForSeq2SeqLM.from_pretrained(tmp_path))


def test_a_stock_trainer_that_predicts_with_generate_leaves_the_paper_s_settings(tmp_path):
    model = small_model(encoder_layers=1, decoder_layers=1)
    rows = [{"input_ids": source, "labels": source[::-1]} for source in SOURCES]
    expected = [trimmed(model.generate(torch.tensor([source]))[0]) for source in SOURCES]
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            tmp_path / "run",
            predict_with_generate=True,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=2,
            max_steps=1,
            learning_rate=0.0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=TranslationCollator(1),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.train()
    predictions = torch.as_tensor(trainer.predict(rows).predictions).masked_fill_(
        torch.as_tensor(trainer.predict(rows).predictions).eq(-100), 1
    )
    assert [trimmed(row) for row in predictions] == expected
    assert_decodes_as_the_paper(trainer.model)
    trainer.save_model(tmp_path / "saved")
    assert_decodes_as_the_paper(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved"))


@pytest.mark.slow
@pytest.mark.parametrize("json_file", ["kept", "deleted"])
def test_decoding_defaults_survive_where_the_package_is_not_installed(json_file, tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    if json_file == "deleted":
        (tmp_path / "model" / "generation_config.json").unlink()
    source = torch.tensor([[5, 9, 2]])
    expected = model.generate(source, return_dict_in_generate=True, output_scores=True, **NO_END)
    printed = elsewhere(
        tmp_path,
        f"""
        import json, torch
        from transformers import AutoModelForSeq2SeqLM

        folder = {str(tmp_path / "model")!r}
        for _ in range(2):
            model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
            folder = {str(tmp_path / "again")!r}
            model.save_pretrained(folder)
        output = model.generate(
            torch.tensor([[5, 9, 2]]), suppress_tokens=[1, 2], return_dict_in_generate=True, output_scores=True
        )
        settings = {{name: getattr(model.generation_config, name, None) for name in {list(PAPER)}}}
        print(json.dumps([settings, output.sequences.tolist(), output.sequences_scores.item()]))
        """,
    )
    settings, ids, score = json.loads(printed.splitlines()[-1])
    assert settings == PAPER
    assert ids == expected.sequences.tolist()
    assert score == pytest.approx(expected.sequences_scores.item(), abs=1e-5)


def test_the_default_call_warns_of_nothing(caplog, recwarn):
    model = small_model()
    logging.enable_propagation()
    try:
        with caplog.at_level("WARNING"):
            for kwargs in ({}, {"num_beams": 1}, {"max_new_tokens": 4}, {"num_beams": 1, "do_sample": True}):
                model.generate(torch.tensor([[5, 9, 2], [4, 2, 1]]), **kwargs)
    finally:
        logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in recwarn.list] == []


# the limit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 1, "do_sample": True},
        {"num_beams": 3, "num_return_sequences": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_ends_at_its_own_source_length_plus_50(side, kwargs):
    model = small_model(encoder_layers=1, decoder_layers=1)
    outputs, _ = translate(model, SOURCES, side=side, **kwargs, **NO_END)
    returned = kwargs.get("num_return_sequences", 1)
    expected = [1 + len(source) + 50 for source in SOURCES for _ in range(returned)]
    assert [len(output) for output in outputs] == expected


def test_the_end_of_sentence_counts_among_the_generated_tokens_of_the_limit():
    class EndAt(LogitsProcessor):
        def __init__(self, length):
            self.length = length

        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -1e4)
            forced[:, 2 if input_ids.shape[1] == self.length else 7] = 0
            return forced

    model = small_model()
    source = torch.tensor([[5, 9, 2]])
    for num_beams in (1, 4):
        in_time = model.generate(source, num_beams=num_beams, logits_processor=LogitsProcessorList([EndAt(53)]))
        assert in_time.tolist() == [[0] + [7] * 52 + [2]]
        too_late = model.generate(source, num_beams=num_beams, logits_processor=LogitsProcessorList([EndAt(54)]))
        assert too_late.tolist() == [[0] + [7] * 53]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_only_a_limit_in_the_call_replaces_the_one_over_the_source(num_beams):
    model = small_model(encoder_layers=1, decoder_layers=1)
    model.generation_config.max_length = 9
    model.generation_config.max_new_tokens = 8
    common = {"num_beams": num_beams, **NO_END}
    ids, mask = padded(SOURCES)

    def lengths(**kwargs):
        return [len(trimmed(row)) for row in model.generate(ids, attention_mask=mask, **common, **kwargs)]

    assert lengths() == [54, 58, 63]
    assert lengths(max_new_tokens=5) == [6, 6, 6]
    assert lengths(max_length=7) == [7, 7, 7]
    assert lengths(max_new_tokens_over_source=4) == [8, 12, 17]
    assert lengths(max_new_tokens_over_source=0) == [4, 8, 13]
    assert lengths(generation_config=GenerationConfig(max_new_tokens=3, num_beams=num_beams)) == [4, 4, 4]
    for nothing in ({"max_new_tokens": 0}, {"max_length": 0}, {"max_length": 1}):  # no limit that means "none given"
        with pytest.raises(ValueError, match=next(iter(nothing))):
            lengths(**nothing)


def test_a_translation_of_60_tokens_needs_no_length_argument(tmp_path):
    model = small_model()
    source = torch.tensor([[*range(3, 13), 2]])

    class Script(LogitsProcessor):
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -1e4)
            forced[:, 2 if input_ids.shape[1] == 60 else 3 + input_ids.shape[1] % 7] = 0
            return forced

    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for each in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        output = each.generate(source, logits_processor=LogitsProcessorList([Script()]))
        assert output.shape == (1, 61)
        assert output[0, -1] == 2


@pytest.mark.parametrize(
    "kwargs,word",
    [
        ({"length_penalty_type": "wu"}, "gnmt"),
        ({"max_new_tokens_over_source": -1}, "-1"),
        ({"max_new_tokens_over_source": 1.5}, "1.5"),
    ],
)
def test_an_impossible_setting_is_refused(kwargs, word):
    with pytest.raises(ValueError, match=next(iter(kwargs))) as error:
        small_model().generate(words(1, 4), **kwargs)
    assert word in str(error.value)


# beam search and its penalty --------------------------------------------------------------------


def tiny_vocabulary_model(seed: int, vocab_size: int = 4, **overrides):
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return small_model(seed=seed, std=0.3, **{**sizes, "vocab_size": vocab_size, **overrides})


@pytest.mark.parametrize(
    "kind,power", [("gnmt", 0.6), ("gnmt", 0.0), ("gnmt", 2.0), ("hub", 0.6), ("hub", 1.0), ("hub", 0.0)]
)
def test_beam_search_wide_enough_equals_exhaustive_search(kind, power):
    penalty = reference.gnmt_penalty(power) if kind == "gnmt" else reference.power_penalty(power)
    winners = set()
    for seed in range(3, 11):
        model = tiny_vocabulary_model(seed)
        source = [3, 0, 3, 2][seed % 3 :]
        expected = reference_sentence(model, source).all_hypotheses(4, penalty)[:3]
        output = model.generate(
            torch.tensor([source]),
            num_beams=4**4,
            num_return_sequences=3,
            max_new_tokens=4,
            length_penalty=power,
            length_penalty_type=kind,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for (score, ids), row, given in zip(expected, output.sequences, output.sequences_scores, strict=True):
            assert row.tolist()[: 1 + len(ids)] == [0, *ids]
            assert set(row.tolist()[1 + len(ids) :]) <= {1}
            assert given.item() == pytest.approx(score, abs=1e-5)
        winners.add(expected[0][1])
    assert len(winners) > 1


@pytest.mark.parametrize("kind,power", [("gnmt", 0.6), ("hub", 1.0), ("hub", 0.3)])
def test_n_best_lists_of_many_models_are_the_head_of_all_there_is(kind, power):
    """The least number of beams that drops nothing, and more."""
    penalty = reference.gnmt_penalty(power) if kind == "gnmt" else reference.power_penalty(power)
    winners, lengths = set(), set()
    for seed in range(100, 133):
        model = tiny_vocabulary_model(seed, norm_first=seed % 2 == 0, tie_word_embeddings=seed % 3 > 0)
        source = [[3, 2], [0, 3, 3, 2], [3, 0, 2]][seed % 3]
        beams = (27, 40, 81)[seed % 3]
        expected = reference_sentence(model, source).all_hypotheses(3, penalty)[:5]
        output = model.generate(
            torch.tensor([source]),
            num_beams=beams,
            num_return_sequences=5,
            max_new_tokens=3,
            length_penalty=power,
            length_penalty_type=kind,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert output.sequences_scores.tolist() == pytest.approx([score for score, _ in expected], abs=1e-5)
        log_probs = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
        for (score, ids), row, each in zip(expected, output.sequences.tolist(), log_probs, strict=True):
            assert row[1 : 1 + len(ids)] == list(ids)
            assert each.sum().item() == pytest.approx(score * penalty(len(ids)), abs=1e-5)
        winners.add(expected[0][1])
        lengths |= {len(ids) for _, ids in expected}
    assert len(winners) > 5
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("kind", ["gnmt", "hub"])
def test_without_a_penalty_the_patient_search_finds_the_most_probable_of_all_sequences(kind):
    lengths = set()
    for seed in range(3, 9):
        model = tiny_vocabulary_model(seed)
        source = [3, 0, 3, 2][seed % 3 :]
        expected = reference_sentence(model, source).all_hypotheses(5, reference.power_penalty(0.0))[:2]
        output = model.generate(
            torch.tensor([source]),
            num_beams=4**4,
            num_return_sequences=2,
            max_new_tokens=5,
            length_penalty=0.0,
            length_penalty_type=kind,
            early_stopping="never",
            return_dict_in_generate=True,
            output_scores=True,
        )
        for (score, ids), row, given in zip(expected, output.sequences, output.sequences_scores, strict=True):
            assert row.tolist()[: 1 + len(ids)] == [0, *ids]
            assert given.item() == pytest.approx(score, abs=1e-5)
            lengths.add(len(ids))
    assert len(lengths) > 1


def test_the_paper_ranks_otherwise_than_the_hub_somewhere():
    differ = 0
    for seed in range(3, 11):
        sentence = reference_sentence(tiny_vocabulary_model(seed), [3, 0, 3, 2][seed % 3 :])
        best = [
            sentence.all_hypotheses(4, penalty(0.6))[0][1]
            for penalty in (reference.gnmt_penalty, reference.power_penalty)
        ]
        differ += best[0] != best[1]
    assert differ > 0, "the exhaustive test could not tell the two penalties apart"


class TwoHypotheses(LogitsProcessor):
    """Word 3 three times and EOS: log-probability -4 in 4 tokens. Word 4 seven times and EOS: -5 in 8 tokens."""

    def __call__(self, input_ids, scores):
        rigged = torch.full_like(scores, -1e6)
        for row, ids in enumerate(input_ids.tolist()):
            for word, each, length in ((3, -1.0, 4), (4, -0.625, 8)):
                if set(ids[1:]) <= {word}:
                    rigged[row, 2 if len(ids) == length else word] = each
        return rigged


@pytest.mark.parametrize(
    "settings,scores",
    [
        ({}, {4: -3.136211, 8: -3.144088}),
        ({"length_penalty": 0.6}, {4: -3.136211, 8: -3.144088}),
        ({"length_penalty": 0.6, "length_penalty_type": "gnmt"}, {4: -3.136211, 8: -3.144088}),
        ({"length_penalty": 0.6, "length_penalty_type": "hub"}, {4: -1.741101, 8: -1.435873}),
        ({"length_penalty": 1.0}, {4: -4 / 1.5, 8: -5 * 6 / 13}),
        ({"length_penalty_type": "hub", "length_penalty": 1.0}, {4: -1.0, 8: -0.625}),
        ({"length_penalty": 0.0}, {4: -4.0, 8: -5.0}),
    ],
    ids=str,
)
def test_the_score_of_two_hypotheses_is_the_arithmetic_of_their_penalty(settings, scores):
    output = small_model().generate(
        torch.tensor([[5, 9, 4, 8, 2]]),
        num_beams=2,
        num_return_sequences=2,
        logits_processor=LogitsProcessorList([TwoHypotheses()]),
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    given = {
        len(trimmed(row)) - 1: score.item()
        for row, score in zip(output.sequences, output.sequences_scores, strict=True)
    }
    assert given == pytest.approx(scores, abs=1e-5)
    assert len(trimmed(output.sequences[0])) - 1 == max(scores, key=scores.get)


def test_a_penalty_in_the_models_settings_keeps_its_type():
    model = small_model()
    common = {
        "num_beams": 2,
        "logits_processor": LogitsProcessorList([TwoHypotheses()]),
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    source = torch.tensor([[5, 9, 4, 8, 2]])
    assert model.generate(source, **common).sequences_scores.item() == pytest.approx(-3.136211, abs=1e-5)
    model.generation_config.length_penalty_type = "hub"
    assert model.generate(source, **common).sequences_scores.item() == pytest.approx(-1.435873, abs=1e-5)
    del model.generation_config.length_penalty_type  # absent means the Hub's
    assert model.generate(source, **common).sequences_scores.item() == pytest.approx(-1.435873, abs=1e-5)
    given = GenerationConfig(num_beams=2, length_penalty=0.6, length_penalty_type="gnmt", max_new_tokens=20)
    common.pop("num_beams")
    output = model.generate(source, generation_config=given, **common)
    assert output.sequences_scores.item() == pytest.approx(-3.136211, abs=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_scores_of_beam_search_are_the_references_log_probabilities(attention):
    model = translating_model(attention)
    for source in SOURCES:
        (ids,), scores = translate(model, [source], max_new_tokens=12)
        log_prob = reference_sentence(model, source).log_prob(ids[1:])
        length = len(ids) - 1
        assert scores.item() == pytest.approx(log_prob / ((5 + length) / 6) ** 0.6, abs=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "variant", [{}, {"norm_first": True}, {"tie_word_embeddings": False}, {"d_k": 3, "d_v": 5}], ids=str
)
def test_beam_size_one_equals_the_greedy_loop_of_the_reference(attention, variant):
    model = translating_model(attention, **variant)
    for source in SOURCES:
        expected = reference_sentence(model, source).greedy(10)
        (ids,), _ = translate(model, [source], num_beams=1, max_new_tokens=10)
        assert ids == [0, *expected]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_beams_keep_their_own_cache_after_reordering(attention, num_beams):
    model = translating_model(attention)
    common = {"num_beams": num_beams, "num_return_sequences": num_beams}
    with_cache, scores = translate(model, SOURCES, use_cache=True, **common)
    without, expected = translate(model, SOURCES, use_cache=False, **common)
    assert with_cache == without
    if num_beams > 1:
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_static_cache_generates_the_same(attention, num_beams):
    model = translating_model(attention)
    for sources in (SOURCES, SOURCES[:1], [*SOURCES, *SOURCES]):  # another length and batch each time
        expected, _ = translate(model, sources, num_beams=num_beams, max_new_tokens=12)
        given, _ = translate(model, sources, num_beams=num_beams, max_new_tokens=12, cache_implementation="static")
        assert given == expected


# --- Constraints ---------------------------------------------------------------------------------------


def various_model(seed: int):
    """A model of five words whose best outputs differ from seed to seed, in length too."""
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 5}
    return small_model(seed=seed, std=0.6, norm_first=True, tie_word_embeddings=False, **sizes)


def constrained(sentence, max_new_tokens: int, penalty, step, ends=lambda prefix: False):
    """Every output that `step` allows with its score, best first: the oracle for constraints.

    step(prefix, log_probs) gives what each word adds to the log-probability after a prefix (start token included),
    minus infinity for what may not follow; ends(prefix) says where an output ends besides EOS and the limit.
    """
    finished = []

    def extend(prefix: tuple[int, ...], total: float) -> None:
        for word, each in enumerate(step(prefix, list(sentence.next_log_probs(prefix)))):
            longer, sum_of_both = (*prefix, word), total + each
            if each == -math.inf:
                continue
            if word == sentence.hyper.eos or len(longer) > max_new_tokens or ends(longer):
                finished.append((sum_of_both / penalty(len(longer) - 1), longer[1:]))
            else:
                extend(longer, sum_of_both)

    extend((sentence.hyper.bos,), 0.0)
    return sorted(finished, reverse=True)


def without(log_probs: list[float], banned) -> list[float]:
    return [-math.inf if word in banned else each for word, each in enumerate(log_probs)]


def only(log_probs: list[float], word: int) -> list[float]:
    """What is forced costs nothing."""
    return [0.0 if each == word else -math.inf for each in range(len(log_probs))]


def no_bigram_twice(prefix, log_probs):
    seen = set(itertools.pairwise(prefix))
    return without(log_probs, [word for word in range(len(log_probs)) if (prefix[-1], word) in seen])


def penalised(prefix, scores):
    return [each * (1.7 if each < 0 else 1 / 1.7) if word in prefix else each for word, each in enumerate(scores)]


LENGTH = 4  # generated tokens at most, so that the whole sequence has 5
CONSTRAINTS = {
    "min_new_tokens": ({"min_new_tokens": 3}, lambda prefix, each: without(each, [2] if len(prefix) - 1 < 3 else [])),
    "min_length": ({"min_length": 3}, lambda prefix, each: without(each, [2] if len(prefix) < 3 else [])),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, no_bigram_twice),
    "suppress_tokens": ({"suppress_tokens": [3, 1]}, lambda prefix, each: without(each, [3, 1])),
    "begin_suppress_tokens": (
        {"begin_suppress_tokens": [2, 4]},
        lambda prefix, each: without(each, [2, 4] if len(prefix) == 1 else []),
    ),
    "bad_words_ids": (
        {"bad_words_ids": [[0], [3, 4]]},
        lambda prefix, each: without(each, [0, 4] if prefix[-1] == 3 else [0]),
    ),
    "forced_bos_token_id": (
        {"forced_bos_token_id": 4},
        lambda prefix, each: only(each, 4) if len(prefix) == 1 else each,
    ),
    "forced_eos_token_id": (
        {"forced_eos_token_id": 2},
        lambda prefix, each: only(each, 2) if len(prefix) == LENGTH else each,
    ),
    "repetition_penalty": ({"repetition_penalty": 1.7}, penalised),
    "renormalize_logits": (
        {"suppress_tokens": [3], "renormalize_logits": True},
        lambda prefix, each: reference.log_softmax(without(each, [3])),
    ),
    "several": (
        {"min_new_tokens": 2, "no_repeat_ngram_size": 2, "suppress_tokens": [0], "forced_eos_token_id": 2},
        lambda prefix, each: (
            only(each, 2)
            if len(prefix) == LENGTH
            else without(no_bigram_twice(prefix, each), [0, 2] if len(prefix) - 1 < 2 else [0])
        ),
    ),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_hold_and_the_best_that_they_allow_is_found(name):
    settings, step = CONSTRAINTS[name]
    changed = 0
    for seed in range(3, 9):
        model = various_model(seed)
        source = [3, 4, 0, 2]
        sentence = reference_sentence(model, source)
        kind, penalty = [("gnmt", reference.gnmt_penalty(0.6)), ("hub", reference.power_penalty(0.6))][seed % 2]
        expected = constrained(sentence, LENGTH, penalty, step)
        output = model.generate(
            torch.tensor([source]),
            num_beams=4**4,
            num_return_sequences=3,
            max_new_tokens=LENGTH,
            length_penalty=0.6,
            length_penalty_type=kind,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        for (score, ids), row, given in zip(
            expected, output.sequences.tolist(), output.sequences_scores, strict=False
        ):
            assert row[1 : 1 + len(ids)] == list(ids)
            assert given.item() == pytest.approx(score, abs=1e-5)
        changed += expected[0][1] != constrained(sentence, LENGTH, penalty, lambda prefix, each: each)[0][1]
    assert changed


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_hold_in_a_greedy_search(name):
    settings, step = CONSTRAINTS[name]
    changed = 0
    for seed in range(3, 15):
        model = various_model(seed)
        source = torch.tensor([[3, 4, 0, 2]])

        def greedy(rule, model=model, source=source):
            output = [0]
            while len(output) <= LENGTH and output[-1:] != [2]:
                # Logits, not log-probabilities: a repetition penalty is not the same for both.
                scores = rule(tuple(output), reference_logits(model, source, torch.tensor([output]))[0, -1].tolist())
                output.append(scores.index(max(scores)))
            return output

        expected = greedy(step)
        given = model.generate(source, num_beams=1, max_new_tokens=LENGTH, **settings)[0].tolist()
        assert given == expected
        changed += expected != greedy(lambda prefix, each: each)
    assert changed


class EndsWith(StoppingCriteria):
    """Ends a row once it ends with these tokens."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -len(self.tokens) :] == self.tokens).all(dim=1)


@pytest.mark.parametrize("tokens", [(3,), (4, 3), (0, 3)])
def test_a_stopping_criterion_ends_hypotheses_of_a_beam_search(tokens):
    stopped = 0
    for seed in range(3, 9):
        model = various_model(seed)
        expected = constrained(
            reference_sentence(model, [3, 4, 2]),
            LENGTH,
            reference.gnmt_penalty(0.6),
            lambda prefix, each: each,
            ends=lambda prefix: prefix[-len(tokens) :] == tokens,
        )
        output = model.generate(
            torch.tensor([[3, 4, 2]]),
            num_beams=4**4,
            num_return_sequences=3,
            max_new_tokens=LENGTH,
            stopping_criteria=StoppingCriteriaList([EndsWith(*tokens)]),
            return_dict_in_generate=True,
            output_scores=True,
        )
        for (score, ids), row, given in zip(
            expected, output.sequences.tolist(), output.sequences_scores, strict=False
        ):
            assert row[1 : 1 + len(ids)] == list(ids)
            assert given.item() == pytest.approx(score, abs=1e-5)
            stopped += ids[-len(tokens) :] == tokens and len(ids) < LENGTH
    assert stopped


@pytest.mark.parametrize("num_beams", [1, 4])
def test_stop_strings_end_a_translation(num_beams, tiny_tokenizer):
    model = varied_model(tiny_tokenizer)
    model.generation_config.max_new_tokens_over_source = 12
    ids = tiny_tokenizer("The green bus", return_tensors="pt").input_ids
    settings = {"num_beams": num_beams, "tokenizer": tiny_tokenizer, "suppress_tokens": [2]}
    text = tiny_tokenizer.decode(model.generate(ids, **settings)[0], skip_special_tokens=True)
    tried = 0
    for stop in sorted({text[place : place + 2] for place in range(1, len(text) - 4)}):
        row = model.generate(ids, stop_strings=[stop], **settings)[0].tolist()
        given = tiny_tokenizer.decode(row, skip_special_tokens=True)
        without_last = tiny_tokenizer.decode(row[: len(trimmed(torch.tensor(row))) - 1], skip_special_tokens=True)
        if num_beams == 1 or stop in given:
            assert stop in given
            assert stop not in without_last
            tried += 1
        else:  # another hypothesis without it won
            assert len(trimmed(torch.tensor(row))) == 1 + ids.shape[1] + 12
        if num_beams == 1:
            assert text.startswith(given)
    assert tried > 3


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")  # of a short row alone
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"forced_eos_token_id": 2, "min_new_tokens": 20},
        {"forced_eos_token_id": [2], "suppress_tokens": [10]},
        {"forced_bos_token_id": 7},
        {"min_new_tokens": 10},
        {"min_length": 13, "no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.7, "bad_words_ids": [[5], [8, 9]]},
        {"early_stopping": True, "renormalize_logits": True, "suppress_tokens": [6, 7]},
    ],
    ids=str,
)
def test_under_constraints_too_a_translation_does_not_depend_on_its_neighbours(settings, num_beams):
    """Each row ends at a limit of its own, which constraints that look at the limit must know."""
    model = translating_model()
    model.generation_config.max_new_tokens_over_source = 3
    sources = [*SOURCES, *words(4, 5).tolist()]
    common = {**settings, "num_beams": num_beams, "num_return_sequences": 2 if num_beams > 1 else 1}
    together, scores = translate(model, sources, side="left", **common)
    returned = common["num_return_sequences"]
    for row, source in enumerate(sources):
        alone, expected = translate(model, [source], **common)
        assert together[returned * row : returned * (row + 1)] == alone
        if num_beams > 1:
            torch.testing.assert_close(scores[2 * row : 2 * row + 2], expected, atol=1e-5, rtol=0)
        if settings.get("forced_eos_token_id") == 2:
            assert [(len(ids) - 1, ids[-1]) for ids in alone] == [(len(source) + 3, 2)] * returned


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_static_cache_of_the_callers_own_serves_one_call_after_the_other(attention):
    model = translating_model(attention)
    cache = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=40), StaticCache(config=model.config, max_cache_len=12)
    )
    for sources in ([*SOURCES, SOURCES[0]], SOURCES[:2], [*SOURCES, SOURCES[0]]):
        expected, _ = translate(model, sources, num_beams=1)
        assert translate(model, sources, num_beams=1, cache=cache)[0] == expected
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            for layer in part.layers:
                layer.keys.fill_(1e3)
                layer.values.fill_(1e3)
        cache.reset()


def test_drafts_of_an_assistant_or_of_the_source_do_not_change_the_translation():
    model = translating_model(tie_word_embeddings=False, norm_first=True)
    assistant = translating_model(seed=3)
    for source in SOURCES:
        expected = model.generate(torch.tensor([source]), num_beams=1)
        for kwargs in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(model.generate(torch.tensor([source]), num_beams=1, **kwargs), expected)


# rows of a batch --------------------------------------------------------------------------------


def test_the_rigged_model_makes_translations_of_different_lengths():
    lengths = [len(ids) for ids in translate(translating_model(), [*SOURCES, *words(9, 6).tolist()])[0]]
    assert len(set(lengths)) > 3


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_translation_does_not_depend_on_padding_order_or_neighbours(attention, num_beams):
    model = translating_model(attention)
    alone = [translate(model, [source], num_beams=num_beams) for source in SOURCES]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 1]):
        for side, width in (("right", None), ("left", None), ("right", 16), ("left", 16)):
            given, scores = translate(
                model, [SOURCES[row] for row in order], side=side, width=width, num_beams=num_beams
            )
            assert given == [alone[row][0][0] for row in order]
            if num_beams > 1:
                expected = torch.cat([alone[row][1] for row in order])
                torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_no_way_of_computing_changes_a_translation_or_its_scores(num_beams):
    """Attention implementation, cache, padding side, neighbours, and whether scores are asked for."""
    common = {"num_beams": num_beams, "num_return_sequences": num_beams}
    expected = []
    model = translating_model("eager")
    for source in SOURCES:
        output = model.generate(
            torch.tensor([source]), use_cache=False, return_dict_in_generate=True, output_scores=True, **common
        )
        log_probs = model.compute_transition_scores(
            output.sequences, output.scores, getattr(output, "beam_indices", None), normalize_logits=num_beams == 1
        )
        sentence = reference_sentence(model, source)
        for row, each in zip(output.sequences, log_probs, strict=True):
            ids = trimmed(row)
            forced = [sentence.next_log_probs(ids[:place])[ids[place]] for place in range(1, len(ids))]
            assert each[: len(forced)].tolist() == pytest.approx(forced, abs=1e-4)
            expected.append((ids, forced))
    for attention, use_cache, side, order in itertools.product(
        ATTENTIONS, (True, False), ("left", "right"), ([0, 1, 2], [2, 0])
    ):
        model = translating_model(attention)
        ids, mask = padded([SOURCES[row] for row in order], side=side, width=14)
        rows = [expected[num_beams * row + place] for row in order for place in range(num_beams)]
        plain = model.generate(ids, attention_mask=mask, use_cache=use_cache, **common)
        assert [trimmed(row) for row in plain] == [ids for ids, _ in rows]
        output = model.generate(
            ids, attention_mask=mask, use_cache=use_cache, return_dict_in_generate=True, output_scores=True, **common
        )
        assert torch.equal(output.sequences, plain)
        log_probs = model.compute_transition_scores(
            output.sequences, output.scores, getattr(output, "beam_indices", None), normalize_logits=num_beams == 1
        )
        for (_, forced), each in zip(rows, log_probs.tolist(), strict=True):
            assert each[: len(forced)] == pytest.approx(forced, abs=1e-4)


def test_a_batch_without_rows_is_refused():
    for num_beams in (1, 4):
        with pytest.raises(ValueError, match="row"):
            small_model().generate(words(0, 5), num_beams=num_beams)


# --- The search of our own and that of transformers --------------------------------------------------------


SEARCHES = [
    {},
    {"num_beams": 1},
    {"num_beams": 3, "num_return_sequences": 3},
    {"length_penalty_type": "hub", "length_penalty": 1.0},
    {"length_penalty_type": "hub", "length_penalty": 0.0},
    {"length_penalty_type": "hub", "length_penalty": -1.0},
    {"early_stopping": True},
    {"early_stopping": False},
    {"max_new_tokens": 5},
    {"max_new_tokens_over_source": 3},
    {"eos_token_id": [2, 5, 9]},
]


@pytest.fixture
def searches(monkeypatch):
    """Which search generate() takes; `searches.stock = True` leaves it the stock one."""
    mixin = generation.VanillaTransformerGenerationMixin
    limits_of = mixin._limits_of_plain_search

    class Searches:
        stock = False
        own = 0

    def counting(self, *args):
        limits = None if Searches.stock else limits_of(self, *args)
        Searches.own += limits is not None
        return limits

    monkeypatch.setattr(mixin, "_limits_of_plain_search", counting)
    return Searches


@pytest.mark.parametrize("settings", SEARCHES, ids=str)
def test_our_search_finds_what_the_stock_one_finds(searches, settings):
    """In float64; hypotheses whose scores are still equal may change places, and the oracle's scores decide."""
    ends_early = 0
    for seed in range(5):
        vocab_size = (23, 40, 1100)[seed % 3]
        learned = {"position_embedding": "learned", "max_position_embeddings": 62} if seed == 4 else {}
        model = small_model(seed=seed, vocab_size=vocab_size, std=(0.3, 0.5, 0.8)[seed % 3], **learned).double()
        rows = [[*words(1 + (seed * i) % 8, vocab_size=vocab_size, seed=10 * seed + i).tolist(), 2] for i in range(4)]
        ids, mask = padded(rows, side="left" if seed % 2 else "right")
        searches.stock = False
        ours = model.generate(ids, attention_mask=mask, **settings)
        searches.stock = True
        stock = model.generate(ids, attention_mask=mask, **settings)
        assert ours.shape == stock.shape
        ends_early += int((ours[:, -1] == 1).any())
        per_source = settings.get("num_return_sequences", 1)
        for index in (ours != stock).any(dim=1).nonzero()[:, 0].tolist():
            sentence = reference_sentence(model, rows[index // per_source])
            ends = settings.get("eos_token_id", [2])
            targets = [until_end(row[index, 1:].tolist(), ends) for row in (ours, stock)]
            assert len(set(map(len, targets))) == 1
            of_ours, of_stock = map(sentence.log_prob, targets)
            assert of_ours == pytest.approx(of_stock, abs=2e-4, rel=1e-5)
    assert searches.own == 5
    assert ends_early > 0 or "max_new_tokens" in settings, "rows of unlike length belong to the test"


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    """The generated tokens alone: up to the end of sentence, or without the padding behind them."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    while ids and ids[-1] == 1:
        ids = ids[:-1]
    return ids


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 3},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "num_beams": 1},
        {"return_dict_in_generate": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"decoder_input_ids": torch.tensor([[0, 5], [0, 6]])},
        {"stop": True},
    ],
    ids=str,
)
def test_what_our_search_does_not_know_is_left_to_the_stock_one(searches, settings):
    class Never(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    settings = dict(settings)
    if settings.pop("stop", False):
        settings["stopping_criteria"] = StoppingCriteriaList([Never()])
    small_model().generate(words(2, 5), max_new_tokens=4, **settings)
    assert searches.own == 0


def test_a_limit_beyond_the_learned_positions_is_left_to_the_stock_search(searches):
    """Hypotheses may end before they get there."""
    model = small_model(position_embedding="learned", max_position_embeddings=16)
    model.generation_config.max_new_tokens_over_source = None
    for limit, own in ((17, 1), (18, 0)):
        model.generation_config.max_length, searches.own = limit, 0
        model.generate(words(2, 5), eos_token_id=list(range(3, model.config.vocab_size)))
        assert searches.own == own


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("length", [10, 100, 1024, 4096, 5003])
@pytest.mark.parametrize("k", [1, 8])
def test_the_largest_sums_are_found_wherever_they_stand(n, length, k):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(50, n, length, generator=generator)
    added = torch.randn(50, n, generator=generator)
    x[0, -1, -1] = 9.0
    x[1, 0, :k] += 8.0
    x[2, :, 7::128] += 7.0
    added[3, 0] = -1e9
    sums, i, j = generation.largest_sums(x, added, k)
    expected = (x + added[:, :, None]).flatten(1).sort(dim=1, descending=True).values[:, :k]
    assert torch.equal(sums, expected)
    rows = torch.arange(50)[:, None]
    assert torch.equal(x[rows, i, j] + added[rows, i], expected)
    assert all(len(set(zip(a, b, strict=True))) == k for a, b in zip(i.tolist(), j.tolist(), strict=True))


DECODERS = [
    {},
    {"position_embedding": "learned", "max_position_embeddings": 30},
    {"norm_first": True, "activation": "gelu"},
    {"attention_bias": True, "output_bias": True, "tie_word_embeddings": False},
    {"d_k": 6, "d_v": 5, "norm_first": True, "final_norm": False},
    {"pruned_heads": {"encoder": [[1], [0, 2, 3]], "decoder": [[], [0, 1], [3]], "cross": [[2], [], [0, 1, 3]]}},
]


@pytest.mark.parametrize("forget_from", [4, 1000])
@pytest.mark.parametrize("overrides", DECODERS, ids=str)
def test_the_fast_decoder_gives_the_models_numbers_whatever_descends_from_what(monkeypatch, overrides, forget_from):
    """Hypotheses change places, sources leave, and what nobody descends from is forgotten."""
    monkeypatch.setattr(generation.FastBeamDecoder, "FORGET_FROM", forget_from)
    model = small_model(**overrides).double()
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1] * 6])
    states = model.get_encoder()(words(4, 6), attention_mask=mask).last_hidden_state
    assert generation.FastBeamDecoder.knows(model)
    plain, fast = (kind(model, states, mask, 30) for kind in (generation.BeamDecoder, generation.FastBeamDecoder))
    tokens, forgotten = torch.zeros(4, 1, dtype=torch.long), False
    with torch.no_grad():
        for step in range(30):
            expected, found = plain.step(tokens), fast.step(tokens)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            parents = torch.randint(0, tokens.shape[1], (len(tokens), 3))
            tokens = torch.randint(3, model.config.vocab_size, (len(tokens), 3))
            for decoder in (plain, fast):
                decoder.descend(parents)
                if step in (7, 19):
                    decoder.keep(torch.tensor([0, 2] if step == 7 else [1]))
            if step in (7, 19):
                tokens = tokens[[0, 2] if step == 7 else [1]]
            forgotten |= fast.visible.shape[-1] < plain.visible.shape[-1]
    assert forgotten == (forget_from == 4)


def test_a_source_of_padding_alone_is_left_to_the_model(searches):
    model = small_model()
    ids = words(3, 5)
    ids[1] = 1
    ours = model.generate(ids)
    searches.stock = True
    assert torch.equal(ours, model.generate(ids))
    assert searches.own == 1


def test_the_fast_decoder_computes_in_the_precision_of_autocast():
    """bfloat16 has 8 bits: both are as far from the exact numbers as that leads to."""
    model = small_model()
    mask = torch.ones(4, 6, dtype=torch.long)
    tokens = torch.randint(3, model.config.vocab_size, (5, 4, 1))
    answers = {}
    for name, kind, enabled in (
        ("exact", generation.BeamDecoder, False),
        ("model", generation.BeamDecoder, True),
        ("fast", generation.FastBeamDecoder, True),
    ):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            states = model.get_encoder()(words(4, 6, seed=3), attention_mask=mask).last_hidden_state
            decoder = kind(model, states, mask, 5)
            answers[name] = torch.stack([decoder.step(each).float() for each in tokens])
    errors = {name: (answers[name] - answers["exact"]).square().mean().sqrt().item() for name in ("model", "fast")}
    assert 0 < errors["fast"] < 1.5 * errors["model"]


def test_a_long_translation_finds_room(searches):
    """Past the tokens, positions and hypotheses that are kept at first."""
    model = small_model(eos_token_id=2)
    with torch.no_grad():
        model.lm_head.weight[2] = 0.0
    for settings in ({"num_beams": 2}, {"num_beams": 1}):
        searches.stock = False
        ours = model.generate(words(2, 4), max_new_tokens=150, **settings)
        searches.stock = True
        stock = model.generate(words(2, 4), max_new_tokens=150, **settings)
        assert ours.shape == stock.shape == (2, 151)
        sames = (ours == stock).float().mean()
        assert sames == 1.0


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"num_beams": 3, "eos_token_id": [2, 3, 4]}], ids=str)
def test_fewer_words_than_candidates_are_enough(searches, settings):
    model = small_model(vocab_size=6)
    ids = words(3, 5, vocab_size=6)
    ours = model.generate(ids, max_new_tokens=7, **settings)
    searches.stock = True
    assert torch.equal(ours, model.generate(ids, max_new_tokens=7, **settings))
    assert searches.own == 1


def test_hooks_on_every_module_there_is_are_heard():
    model = small_model()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert not generation.FastBeamDecoder.knows(model)
    finally:
        handle.remove()
    assert generation.FastBeamDecoder.knows(model)


def test_a_decoder_that_is_not_plain_is_left_to_the_model(searches):
    """With a hook, an adapter, a method of its own or parameters of another kind; the text stays that of the model."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = small_model()
    ids = words(3, 5)
    before = model.generate(ids)
    attention = model.model.decoder.layers[0].self_attention
    handle = attention.register_forward_hook(lambda module, inputs, output: (5.0 * output[0], output[1]))
    assert not generation.FastBeamDecoder.knows(model)
    hooked = model.generate(ids)
    searches.stock = True
    assert torch.equal(hooked, model.generate(ids))
    assert not torch.equal(hooked, before)
    handle.remove()
    assert generation.FastBeamDecoder.knows(model)

    old = attention.q_proj
    attention.q_proj = Doubled(old.in_features, old.out_features, bias=False)
    assert not generation.FastBeamDecoder.knows(model)
    attention.q_proj = old
    model.model.decoder.forward = model.model.decoder.forward
    assert not generation.FastBeamDecoder.knows(model)
    del model.model.decoder.forward
    torch.nn.utils.parametrizations.weight_norm(attention.k_proj)
    assert not generation.FastBeamDecoder.knows(model)


def test_recorded_outputs_do_not_slow_later_searches_down():
    model = small_model()
    model(input_ids=words(1, 4), decoder_input_ids=words(1, 3), output_attentions=True, output_hidden_states=True)
    assert generation.FastBeamDecoder.knows(model)


def test_a_cache_with_room_holds_what_one_without_holds():
    ours, stock = generation.GrowingCache(room=3), DynamicCache()
    for step, new in enumerate((1, 2, 1, 9, 1)):
        for layer in range(2):
            key, value = torch.randn(4, 2, new, 5), torch.randn(4, 2, new, 6)
            for given, expected in zip(ours.update(key, value, layer), stock.update(key, value, layer), strict=True):
                assert torch.equal(given, expected), step
    ours.keep(torch.tensor([3, 1]))
    given, _ = ours.update(torch.zeros(2, 2, 1, 5), torch.zeros(2, 2, 1, 6), 0)
    assert torch.equal(given[:, :, :-1], stock.layers[0].keys[[3, 1]])


def test_a_mask_of_another_length_is_refused_by_generate():
    for length in (3, 7):
        with pytest.raises(ValueError, match=rf"attention_mask must have .*\(2, 5\).* got \(2, {length}\)"):
            small_model().generate(words(2, 5), attention_mask=torch.ones(2, length, dtype=torch.long))


def test_a_poisoned_padding_row_changes_no_translation():
    model = translating_model(tie_word_embeddings=False)
    expected, _ = translate(model, SOURCES, side="left")
    with torch.no_grad():
        for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
            embedding.weight[1] = 1e3
    for side in ("left", "right"):
        assert translate(model, SOURCES, side=side)[0] == expected


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_beam_search_does_not_depend_on_when_its_neighbours_end(early_stopping):
    sources = [*SOURCES, *words(7, 6).tolist()]
    for seed in range(2):
        model = translating_model(seed=seed)
        common = {"early_stopping": early_stopping, "num_beams": 4, "num_return_sequences": 2}
        together, scores = translate(model, sources, **common)
        for row, source in enumerate(sources):
            alone, expected = translate(model, [source], **common)
            assert together[2 * row : 2 * row + 2] == alone
            torch.testing.assert_close(scores[2 * row : 2 * row + 2], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_fully_padded_row_is_translated_without_harm_to_its_neighbours(attention, num_beams):
    model = translating_model(attention)
    ids, mask = padded([SOURCES[0], [], SOURCES[1]])
    output = model.generate(ids, attention_mask=mask, num_beams=num_beams)
    expected = [translate(model, [SOURCES[row]], num_beams=num_beams)[0][0] for row in (0, 1)]
    assert [trimmed(output[0]), trimmed(output[2])] == expected
    assert output[1, 0] == 0
    assert len(trimmed(output[1])) <= 1 + 0 + 12
    assert ((output >= 0) & (output < 23)).all()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_missing_attention_mask_is_inferred_from_the_padding(num_beams):
    model = translating_model()
    for side in ("left", "right"):
        ids, mask = padded(SOURCES, side=side)
        expected = model.generate(ids, attention_mask=mask, num_beams=num_beams)
        assert torch.equal(model.generate(ids, num_beams=num_beams), expected)
        assert torch.equal(model.generate(input_ids=ids, num_beams=num_beams), expected)


# other ways in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_beams,returned", [(1, 1), (4, 1), (4, 3)])
def test_encoder_outputs_of_any_form_and_inputs_embeds_give_what_input_ids_give(num_beams, returned):
    model = translating_model()
    ids, mask = padded(SOURCES[:2])
    common = {"attention_mask": mask, "num_beams": num_beams, "num_return_sequences": returned}
    expected = model.generate(ids, **common)
    assert expected.shape[0] == 2 * returned
    for form in ("as_it_is", "tuple", "list", "dictionary", "tensor", "base"):
        encoded = model.get_encoder()(ids, attention_mask=mask)
        if form == "tuple":
            encoded = encoded.to_tuple()
        elif form == "list":
            encoded = [encoded.last_hidden_state]
        elif form == "dictionary":
            encoded = dict(encoded)
        elif form == "tensor":
            encoded = encoded.last_hidden_state
        elif form == "base":
            encoded = BaseModelOutput(last_hidden_state=encoded.last_hidden_state)
        for _ in range(2):  # and again: the call leaves the caller's object as it was
            assert torch.equal(model.generate(encoder_outputs=encoded, **common), expected), form
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **common), expected)


def test_returned_sequences_come_source_by_source():
    model = translating_model()
    together, _ = translate(model, SOURCES, num_return_sequences=3)
    for row, source in enumerate(SOURCES):
        assert together[3 * row : 3 * row + 3] == translate(model, [source], num_return_sequences=3)[0]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_decoder_prompts_of_different_lengths_continue_as_they_do_alone(num_beams, use_cache):
    model = translating_model()
    source = torch.tensor([SOURCES[1], SOURCES[1]])
    prompts, prompt_mask = padded([[0, 9], [0, 7, 8, 9]], side="left")
    common = {
        "max_new_tokens": 6,
        "num_beams": num_beams,
        "use_cache": use_cache,
        "suppress_tokens": [1, 2],
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    together = model.generate(source, decoder_input_ids=prompts, decoder_attention_mask=prompt_mask, **common)
    for row, prompt in enumerate(([0, 9], [0, 7, 8, 9])):
        alone = model.generate(source[:1], decoder_input_ids=torch.tensor([prompt]), **common)
        assert together.sequences[row, -6:].tolist() == alone.sequences[0, -6:].tolist()
        if num_beams == 1:
            for step, expected in zip(together.logits, alone.logits, strict=True):
                torch.testing.assert_close(step[row], expected[0], atol=1e-5, rtol=1e-5)


PROMPTS = {  # with padding "p" and start "s"; alone, a row is completed with the start if it lacks it
    "both_start": ["pps9", "s789"],
    "both_start_after_padding": ["pps9", "ps89"],
    "neither_starts": ["pp94", "3789"],
    "neither_starts_after_padding": ["pp94", "p789"],
    "one_starts": ["s394", "3789"],
    "one_starts_after_padding": ["pps9", "p389"],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("start,pad", [(0, 1), (1, 0)])
@pytest.mark.parametrize("given_mask", [True, False])
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_each_decoder_prompt_begins_as_it_does_alone(prompts, start, pad, given_mask, cache_implementation):
    overrides = {"norm_first": True, "tie_word_embeddings": False}
    model = small_model(bos_token_id=start, pad_token_id=pad, seed=4, **overrides)
    source = torch.tensor([SOURCES[1], SOURCES[1]])
    rows = [[{"p": pad, "s": start}.get(sign) if sign in "ps" else int(sign) for sign in row] for row in prompts]
    ids = torch.tensor(rows)
    common = {
        "max_new_tokens": 6,
        "num_beams": 1,
        "suppress_tokens": [pad, 2],
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    mask = {"decoder_attention_mask": ids.ne(pad).long()} if given_mask else {}
    together = model.generate(
        source, decoder_input_ids=ids, cache_implementation=cache_implementation, **mask, **common
    )
    for row, prompt in enumerate(rows):
        kept = [token for token in prompt if token != pad]
        kept = kept if kept[0] == start else [start, *kept]
        alone = model.generate(source[:1], decoder_input_ids=torch.tensor([kept]), **common)
        assert alone.sequences[0, : len(kept)].tolist() == kept
        assert together.sequences[row, -6:].tolist() == alone.sequences[0, -6:].tolist()
        for step, expected in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(step[row], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_decoding_goes_on_past_max_position_embeddings(use_cache, cache_implementation):
    sizes = {"d_model": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    model = small_model(**sizes)
    source = [5, 9, 4, 2]
    output = model.generate(
        torch.tensor([source]),
        num_beams=1,
        max_new_tokens=40,
        use_cache=use_cache,
        cache_implementation=cache_implementation if use_cache else None,
        suppress_tokens=[2],
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert output.sequences.shape == (1, 41)
    expected = reference_logits(model, torch.tensor([source]), output.sequences[:, :-1])
    torch.testing.assert_close(torch.stack(output.logits, dim=1).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_learned_positions_end_with_an_error_that_names_the_limit(num_beams, cache_implementation):
    model = small_model(position_embedding="learned", max_position_embeddings=16)
    source = torch.tensor([[5, 9, 2]])
    common = {"num_beams": num_beams, "cache_implementation": cache_implementation, **NO_END}
    assert model.generate(source, max_new_tokens=16, **common).shape == (1, 17)
    assert model.generate(source, max_length=17, **common).shape == (1, 17)
    assert model.generate(source, **common).shape == (1, 17)  # 3 + 50, were there as many positions
    calls = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for limit in ({"max_new_tokens": 17}, {"max_length": 18}, {"generation_config": GenerationConfig(max_length=40)}):
        with pytest.raises(ValueError, match="max_position_embeddings=16"):
            model.generate(source, **limit, **common)
    assert not calls  # nothing is decoded and lost


@pytest.mark.parametrize(
    "fields,start",
    [
        ({}, 0),
        ({"bos_token_id": 7}, 7),
        ({"decoder_start_token_id": 9}, 9),
        ({"bos_token_id": 7, "decoder_start_token_id": 1}, 1),
    ],
    ids=str,
)
def test_the_first_decoder_token_of_generate_is_that_of_training(fields, start, tmp_path):
    model = small_model(**fields)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "generation_config.json").unlink()
    labels = torch.tensor([[5, 6, 2]])
    for each in (
        model,
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole"),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "bare"),
        AutoModelForSeq2SeqLM.from_config(VanillaTransformerConfig.from_pretrained(tmp_path / "whole")),
    ):
        first = each.generate(torch.tensor([[5, 9, 2]]), num_beams=1, max_new_tokens=2)[0, 0].item()
        assert first == start == each.config.decoder_start_token_id
        assert each.prepare_decoder_input_ids_from_labels(labels=labels)[0, 0].item() == start


def first_of_generate(model, **kwargs) -> int:
    return model.generate(torch.tensor([[5, 9, 2]]), num_beams=1, max_new_tokens=2, **kwargs)[0, 0].item()


def test_the_start_token_of_training_counts_whatever_the_settings_lack_or_say(tmp_path, caplog):
    labels = torch.tensor([[5, 6, 2]])
    model = small_model(bos_token_id=7)
    model.save_pretrained(tmp_path)
    for settings in (GenerationConfig(num_beams=2), GenerationConfig(bos_token_id=5, num_beams=2)):
        model.generation_config = settings
        assert first_of_generate(model) == 7
        settings.save_pretrained(tmp_path)
        assert first_of_generate(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)) == 7

    small_model(bos_token_id=7).save_pretrained(tmp_path)
    config = VanillaTransformerConfig.from_pretrained(tmp_path, decoder_start_token_id=9)
    later = small_model()
    later.config.decoder_start_token_id = 9
    for model in (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, config=config),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, decoder_start_token_id=9),
        later,
    ):
        assert first_of_generate(model) == 9 == model.prepare_decoder_input_ids_from_labels(labels)[0, 0].item()
        assert first_of_generate(model, decoder_start_token_id=4) == 4  # but a call is obeyed
        assert first_of_generate(model, generation_config=GenerationConfig(decoder_start_token_id=4)) == 4


def test_a_start_token_in_the_settings_that_is_not_that_of_training_is_warned_of(caplog):
    model = small_model()
    model.generation_config.decoder_start_token_id = 9
    logging.enable_propagation()
    logging.warning_once.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert first_of_generate(model) == 0
    finally:
        logging.disable_propagation()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "decoder_start_token_id=9" in message
    assert "decoder_start_token_id=0" in message


def test_settings_without_special_tokens_end_and_pad_as_the_configuration_says():
    model = translating_model(seed=5, norm_first=True, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.bias[2] = 4.0
    ids, mask = padded(SOURCES)
    expected = model.generate(ids, attention_mask=mask, num_beams=1, max_new_tokens=30)
    assert len({len(trimmed(row)) for row in expected}) > 1
    model.generation_config = GenerationConfig(num_beams=1)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=30), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_weights_of_a_generation_are_returned_on_request(attention):
    model = translating_model(attention)
    output = model.generate(
        torch.tensor([SOURCES[1]]),
        num_beams=1,
        max_new_tokens=5,
        output_attentions=True,
        return_dict_in_generate=True,
        **NO_END,
    )
    assert len(output.cross_attentions) == 5
    whole = model(
        input_ids=torch.tensor([SOURCES[1]]), decoder_input_ids=output.sequences[:, :-1], output_attentions=True
    )
    for step, layers in enumerate(output.cross_attentions):
        for weights, expected in zip(layers, whole.cross_attentions, strict=True):
            torch.testing.assert_close(weights[0, :, -1], expected[0, :, step], atol=1e-5, rtol=0)


def test_sampling_follows_the_seed():
    model = translating_model()
    ids, mask = padded(SOURCES)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.generate(ids, attention_mask=mask, do_sample=True, num_beams=1))
    assert torch.equal(draws[0], draws[1])
    assert draws[0].shape != draws[2].shape or not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_generation_in_16_bits_is_finite(attention, dtype):
    model = translating_model(attention).to(dtype)
    output = model.generate(padded(SOURCES)[0], return_dict_in_generate=True, output_scores=True)
    assert torch.isfinite(output.sequences_scores).all()


def test_sinusoids_bring_no_warning_at_max_position_embeddings(caplog):
    model = small_model(max_position_embeddings=8)
    logging.enable_propagation()
    try:
        with caplog.at_level("WARNING"):
            model.generate(words(1, 12), num_beams=1)
    finally:
        logging.disable_propagation()
    assert not [record for record in caplog.records if "predefined maximum length" in record.getMessage()]


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "max_new_tokens", "max_length"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused_and_not_taken_for_none_given(name, count):
    model = small_model()
    given = copy.deepcopy(model.generation_config)
    setattr(given, name, count)
    for settings in ({name: count}, {"generation_config": given}):
        with pytest.raises(ValueError, match=name):
            model.generate(words(2, 5), **settings)
    assert torch.equal(model.generate(words(2, 5), **{name: None}), model.generate(words(2, 5)))
