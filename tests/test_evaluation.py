"""BLEU, chrF and perplexity: equal to the sacrebleu command, and to the mean of log-probabilities read off by hand.

Scores of given pairs: equal to the loops of the reference in float64, and to what `generate()` says of its own.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import log_softmax
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments

from conftest import TINY_CORPUS
from small_models import reference_sentence
from translators import CopyModel, varied_marian, varied_model
from vanilla_transformer.data import TranslationCollator
from vanilla_transformer.evaluation import (
    PairScore,
    compute_metrics_for,
    corpus_scores,
    perplexity,
    score_pairs,
    translation_metric,
    translation_metric_class,
)
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.translation import translate_lines


HYPOTHESES = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
REFERENCES = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
OTHER_REFERENCES = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]


def sacrebleu_command(folder, hypotheses, references, *options) -> dict[str, dict]:
    """The oracle: the scores of `python -m sacrebleu` on files, by the metric's name."""
    paths = []
    for number, lines in enumerate([hypotheses, *references]):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_bytes("".join(line + "\n" for line in lines).encode())
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        *paths[1:],
        "-i",
        paths[0],
        "-m",
        "bleu",
        "chrf",
        "-w",
        "12",
        *options,
    ]
    output = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
    return {"chrf" if score["name"].startswith("chrF") else "bleu": score for score in json.loads(output)}


# --- Corpus scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hypotheses, references, tokenize",
    [
        (HYPOTHESES, [REFERENCES], None),
        (HYPOTHESES, [REFERENCES, OTHER_REFERENCES], None),
        (["Hello , world ! It 's me .", "", " so\x0cmany  spaces "], [["Hello, world! It's me.", "a", ""]], None),
        (["我今天去了公园。", "他很好。"], [["今天我去公园了。", "他很好。"]], "zh"),
    ],
)
def test_scores_and_signatures_are_those_of_the_sacrebleu_command(tmp_path, hypotheses, references, tokenize):
    options = () if tokenize is None else ("-tok", tokenize)
    expected = sacrebleu_command(tmp_path, hypotheses, references, *options)
    scores = corpus_scores(hypotheses, references, tokenize=tokenize)
    for metric in ("bleu", "chrf"):
        assert scores[metric]["score"] == pytest.approx(expected[metric]["score"], abs=1e-9)
        assert scores[metric]["signature"] == expected[metric]["signature"]


@pytest.mark.parametrize(
    "lines",
    [
        ([line.upper() for line in HYPOTHESES], [REFERENCES, OTHER_REFERENCES]),
        (["THE Große Straße Im Ort"], [["the GROßE straße im ORT x"]]),
    ],
)
def test_capitals_count_as_small_letters_on_request(tmp_path, lines):
    expected = sacrebleu_command(tmp_path, *lines, "-lc", "--chrf-lowercase")
    scores = corpus_scores(*lines, lowercase=True)
    for metric in ("bleu", "chrf"):
        assert scores[metric]["score"] == pytest.approx(expected[metric]["score"], abs=1e-9)
        assert scores[metric]["signature"] == expected[metric]["signature"]
        assert scores[metric]["score"] > corpus_scores(*lines)[metric]["score"]


def test_known_scores():
    """Values that sacreBLEU's own users measured: references are one list a file, and never tokenised to match."""
    assert corpus_scores(HYPOTHESES, [REFERENCES])["bleu"]["score"] == pytest.approx(45.0675, abs=1e-3)
    spaced = corpus_scores(["Hello , world ! It 's me ."], [["Hello, world! It's me."]])
    assert spaced["bleu"]["score"] == pytest.approx(41.113, abs=1e-3)
    both = corpus_scores(["Hello , world ! It 's me ."], [["Hello , world ! It 's me ."]])
    assert both["bleu"]["score"] == pytest.approx(100.0)
    transposed = corpus_scores(HYPOTHESES[:1], [[each] for each in REFERENCES])  # three references of one segment
    assert "nrefs:3" in transposed["bleu"]["signature"]


@pytest.mark.parametrize(
    "hypotheses, references, error, message",
    [
        (HYPOTHESES, [[each] for each in REFERENCES], ValueError, "1 lines for 3 hypotheses; .* not one a segment"),
        (HYPOTHESES, [REFERENCES[:2]], ValueError, "reference 1 has 2 lines for 3 hypotheses"),
        (HYPOTHESES, [REFERENCES, [*REFERENCES, ""]], ValueError, "reference 2 has 4 lines for 3 hypotheses"),
        (HYPOTHESES, REFERENCES, TypeError, "pass \\[references\\]"),
        (HYPOTHESES, "text", TypeError, "pass \\[references\\]"),
        ([], [[]], ValueError, "nothing to score"),
        (HYPOTHESES, [], ValueError, "nothing to score"),
    ],
)
def test_wrongly_shaped_references_are_refused(hypotheses, references, error, message):
    with pytest.raises(error, match=message):
        corpus_scores(hypotheses, references)


def test_an_unknown_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"one of 13a, .*zh.*, got 'moses'"):
        corpus_scores(["a"], [["a"]], tokenize="moses")


# --- Metrics of the trainer ----------------------------------------------------------------------------------------


def test_metrics_of_padded_predictions_equal_the_command_on_the_texts(tiny_tokenizer, tmp_path):
    hypotheses = [*HYPOTHESES, "", "a\nb"]
    references = [*REFERENCES, "x", "a b"]
    predicted = [[0, *ids] for ids in tiny_tokenizer(hypotheses)["input_ids"]]
    labels = tiny_tokenizer(references)["input_ids"]
    width = max(map(len, predicted)) + 3
    # Batches of unequal lengths: Trainer pads with -100 around what generate() padded with the pad token.
    padded = [(row + [1] * 2 + [-100] * width)[:width] for row in predicted]
    wide = max(map(len, labels))
    prediction = EvalPrediction(
        predictions=np.array(padded), label_ids=np.array([row + [-100] * (wide - len(row)) for row in labels])
    )
    metrics = compute_metrics_for(tiny_tokenizer)(prediction)
    expected = sacrebleu_command(tmp_path, [*HYPOTHESES, "", "a b"], [references])
    assert metrics["bleu"] == pytest.approx(expected["bleu"]["score"], abs=1e-6)
    assert metrics["chrf"] == pytest.approx(expected["chrf"]["score"], abs=1e-6)
    assert metrics["generated_length"] == pytest.approx(np.mean([len(row) - 1 for row in predicted]))


def test_metrics_refuse_logits(tiny_tokenizer):
    prediction = EvalPrediction(predictions=np.zeros((2, 3, 5)), label_ids=np.zeros((2, 3), dtype=int))
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 5\); set predict_with_generate=True"):
        compute_metrics_for(tiny_tokenizer)(prediction)


@pytest.mark.parametrize("make", [varied_model, varied_marian])
def test_metrics_in_a_stock_trainer_equal_one_by_one_generation(tiny_tokenizer, make, tmp_path):
    model = make(tiny_tokenizer)
    sources = [source[:length] for length, (source, _) in zip((26, 2, 14, 5, 1), TINY_CORPUS, strict=False)]
    targets = [target for _, target in TINY_CORPUS[:5]]
    rows = [
        {"input_ids": source, "labels": target}
        for source, target in zip(
            tiny_tokenizer(sources)["input_ids"], tiny_tokenizer(targets)["input_ids"], strict=True
        )
    ]
    generated = [model.generate(torch.tensor([row["input_ids"]]), num_beams=2, max_length=9)[0] for row in rows]
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            tmp_path,
            predict_with_generate=True,
            per_device_eval_batch_size=2,
            generation_max_length=9,
            generation_num_beams=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=TranslationCollator(tiny_tokenizer.pad_token_id),
        eval_dataset=rows,
        processing_class=tiny_tokenizer,
        compute_metrics=compute_metrics_for(tiny_tokenizer),
    )
    metrics = trainer.evaluate()
    expected = sacrebleu_command(tmp_path, texts, [targets])
    assert metrics["eval_bleu"] == pytest.approx(expected["bleu"]["score"], abs=1e-6)
    assert metrics["eval_chrf"] == pytest.approx(expected["chrf"]["score"], abs=1e-6)


# --- Perplexity ----------------------------------------------------------------------------------------------------


def log_probs_by_hand(model, tokenizer, source: str, target: str) -> list[float]:
    """The oracle: one pair at a time, the log-probability of each target token and of the end of sentence."""
    labels = tokenizer(target)["input_ids"]
    start = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
    with torch.no_grad():
        logits = model(**tokenizer(source, return_tensors="pt"), decoder_input_ids=start).logits[0].double()
    return log_softmax(logits, -1)[range(len(labels)), labels].tolist()


@pytest.mark.parametrize("make", [varied_model, varied_marian])
@pytest.mark.parametrize("tokens_per_batch", [4096, 60, 1])
def test_perplexity_is_over_all_target_tokens_whatever_the_batches(tiny_tokenizer, make, tokens_per_batch):
    model = unbiased(make(tiny_tokenizer))
    sources, targets = (list(side) for side in zip(*TINY_CORPUS, strict=True))
    log_probs = [
        value
        for source, target in zip(sources, targets, strict=True)
        for value in log_probs_by_hand(model, tiny_tokenizer, source, target)
    ]
    assert len(log_probs) == sum(map(len, tiny_tokenizer(targets)["input_ids"]))
    expected = math.exp(-math.fsum(log_probs) / len(log_probs))
    got = perplexity(model, tiny_tokenizer, sources, targets, tokens_per_batch=tokens_per_batch)
    assert got == pytest.approx(expected, rel=1e-4)


def test_perplexity_cuts_both_sides_at_learned_positions(tiny_tokenizer):
    model = varied_model(tiny_tokenizer, position_embedding="learned", max_position_embeddings=16)
    text = "a b c d e f g h i j k l m n o p q r"
    cut = tiny_tokenizer.decode(tiny_tokenizer(text, truncation=True, max_length=16)["input_ids"][:-1])
    assert len(tiny_tokenizer(text)["input_ids"]) > 17 > len(tiny_tokenizer(cut)["input_ids"])
    expected = perplexity(model, tiny_tokenizer, [cut], [cut])
    assert perplexity(model, tiny_tokenizer, [text], [text]) == pytest.approx(expected, rel=1e-6)


def test_perplexity_knows_neither_dropout_nor_label_smoothing_and_leaves_the_mode(tiny_tokenizer):
    sources, targets = zip(*TINY_CORPUS, strict=True)
    expected = perplexity(varied_model(tiny_tokenizer), tiny_tokenizer, sources, targets)
    model = varied_model(tiny_tokenizer, dropout=0.5, label_smoothing=0.3).train()
    assert perplexity(model, tiny_tokenizer, sources, targets) == pytest.approx(expected, rel=1e-6)
    assert model.training


def test_pairs_with_a_blank_side_do_not_count(tiny_tokenizer):
    model = varied_model(tiny_tokenizer)
    expected = perplexity(model, tiny_tokenizer, ["a dog"], ["ein Hund"])
    assert perplexity(model, tiny_tokenizer, ["a dog", "x", " "], ["ein Hund", "", "y"]) == pytest.approx(expected)
    with pytest.raises(ValueError, match="none among 2 pairs"):
        perplexity(model, tiny_tokenizer, ["", "x"], ["y", " "])
    with pytest.raises(ValueError, match="got 2 sources and 1 targets"):
        perplexity(model, tiny_tokenizer, ["a", "b"], ["c"])


def test_perplexity_of_even_odds_is_their_number(tiny_tokenizer):
    """A model without knowledge hesitates between all words of its vocabulary."""
    model = varied_model(tiny_tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
    assert perplexity(model, tiny_tokenizer, ["a"], ["b c"]) == pytest.approx(len(tiny_tokenizer), rel=1e-5)


def test_an_overlong_target_is_cut_with_a_warning(caplog):
    tokenizer = train_tokenizer(["a b c"], 259, model_max_length=8)
    model = varied_model(tokenizer)
    expected = perplexity(model, tokenizer, ["abc"], ["1234567"])
    assert not caplog.records
    assert perplexity(model, tokenizer, ["abc"], ["1234567890"]) == pytest.approx(expected)
    assert "line 1: cut from 11 to 8 tokens" in caplog.records[0].getMessage()


def test_a_copy_of_the_reference_scores_100(tiny_tokenizer):
    lines = [target for _, target in TINY_CORPUS]
    hypotheses = [best.text for (best,) in translate_lines(CopyModel(tiny_tokenizer), tiny_tokenizer, lines)]
    scores = corpus_scores(hypotheses, [lines])
    assert scores["bleu"]["score"] == pytest.approx(100)
    assert scores["chrf"]["score"] == pytest.approx(100)


# --- The metric of the evaluate library ------------------------------------------------------------------------------


@pytest.fixture
def evaluate():
    return pytest.importorskip("evaluate")


def assert_scores_of_the_command(result, command):
    for name in ("bleu", "chrf"):
        assert result[name] == pytest.approx(command[name]["score"], abs=1e-9)
        assert result[f"{name}_signature"] == command[name]["signature"]


@pytest.mark.parametrize(
    "predictions, references, files, tokenize",
    [
        (HYPOTHESES, REFERENCES, [REFERENCES], None),
        (HYPOTHESES, [[each] for each in REFERENCES], [REFERENCES], None),
        (HYPOTHESES, list(zip(REFERENCES, OTHER_REFERENCES, strict=True)), [REFERENCES, OTHER_REFERENCES], None),
        (["我今天去了公园。", ""], ["今天我去公园了。", "他很好。"], [["今天我去公园了。", "他很好。"]], "zh"),
    ],
)
def test_the_metric_gives_the_scores_of_the_command(evaluate, tmp_path, predictions, references, files, tokenize):
    options = () if tokenize is None else ("-tok", tokenize)
    command = sacrebleu_command(tmp_path, predictions, files, *options)
    assert command["bleu"]["score"] > 1
    metric = translation_metric(tokenize)
    assert isinstance(metric, evaluate.Metric)
    once = metric.compute(predictions=predictions, references=references)
    assert_scores_of_the_command(once, command)
    assert set(once) == {
        "bleu", "chrf", "bleu_signature", "chrf_signature", "bleu_precisions", "bleu_brevity_penalty"
    }  # fmt: skip
    verbose = command["bleu"]["verbose_score"]
    assert "/".join(f"{precision:.1f}" for precision in once["bleu_precisions"]) in verbose
    assert f"BP = {once['bleu_brevity_penalty']:.3f}" in verbose
    # Piece by piece, and once more on what is empty again after compute().
    metric.add_batch(predictions=predictions[:1], references=references[:1])
    metric.add_batch(predictions=[], references=[])
    for prediction, reference in zip(predictions[1:], references[1:], strict=True):
        metric.add(prediction=prediction, reference=reference)
    assert metric.compute() == once
    metric.add_batch(predictions=predictions[:1], references=references[:1])
    assert metric.compute(predictions=predictions[1:], references=references[1:]) == once


def test_line_breaks_within_a_text_are_no_ends_of_segments(evaluate):
    predictions = ["the cat\nsat on\rthe mat", "a\u2028b c d e", "x\x0cy z\x85w v\r\n"]
    references = ["the cat sat on the mat", "a b\nc d e", "x y z w\rv"]
    expected = corpus_scores(predictions, [references])
    result = translation_metric().compute(predictions=predictions, references=references)
    assert expected["bleu"]["score"] > 1
    assert (result["bleu"], result["chrf"]) == (expected["bleu"]["score"], expected["chrf"]["score"])


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({}, ValueError, "nothing to score"),
        ({"predictions": [], "references": []}, ValueError, "nothing to score"),
        ({"predictions": ["a"]}, TypeError, "references as a sequence .*, got None"),
        ({"predictions": "ab", "references": ["a", "b"]}, TypeError, "predictions as a sequence .*, got 'ab'"),
        ({"predictions": ["a"], "references": ["a", "b"]}, ValueError, "got 1 predictions and 2 references"),
        ({"predictions": ["a", None], "references": ["a", "b"]}, TypeError, "a prediction must be a string, got None"),
        ({"predictions": ["a"], "references": [["a", 5]]}, TypeError, "a reference must be a string, got int"),
        (
            {"predictions": ["a", "b"], "references": [["a"], ["b", "c"]]},
            ValueError,
            "as many references as the first, which has 1; segment 2 has 2",
        ),
        ({"predictions": ["a", "b"], "references": [[], []]}, ValueError, "2 hypotheses and 0 references"),
        ({"predictions": ["a"], "references": ["a"], "lowercase": True}, TypeError, "lowercase"),
    ],
)
def test_the_metric_refuses_what_it_cannot_score_and_goes_on(evaluate, given, error, message):
    metric = translation_metric()
    with pytest.raises(error, match=message):
        metric.compute(**given)
    assert metric.compute(predictions=HYPOTHESES, references=REFERENCES)["bleu"] == pytest.approx(45.0675, abs=1e-3)


def test_an_unknown_tokenizer_is_refused_when_the_metric_is_made(evaluate):
    with pytest.raises(ValueError, match=r"one of 13a, .*zh.*, got 'moses'"):
        translation_metric("moses")


def test_the_metric_leaves_no_file_and_is_pickled(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    metric = pickle.loads(pickle.dumps(translation_metric("char")))
    result = metric.compute(predictions=HYPOTHESES, references=REFERENCES)
    assert "tok:char" in result["bleu_signature"]
    assert list(tmp_path.iterdir()) == []


def test_without_evaluate_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[evaluate\]"'):
        translation_metric_class.__wrapped__()


@pytest.mark.parametrize("family", [varied_model, varied_marian])
def test_the_evaluator_scores_the_translations_of_each_line_alone(evaluate, tiny_tokenizer, tmp_path, family):
    model = family(tiny_tokenizer)
    sources = [source[: 9 + 3 * number] for number, (source, _) in enumerate(TINY_CORPUS[:6])]
    texts = [
        tiny_tokenizer.decode(
            model.generate(**tiny_tokenizer(source, return_tensors="pt"))[0], skip_special_tokens=True
        )
        for source in sources
    ]
    assert len(set(texts)) >= 4
    targets = [text if number % 2 else TINY_CORPUS[number][1] for number, text in enumerate(texts)]
    columns = {"en": sources, "de": targets, "both": [[target, "x y z"] for target in targets]}
    files = {"de": [targets], "both": [targets, ["x y z"] * len(targets)]}
    for label, references in files.items():
        result = evaluate.evaluator("translation").compute(
            model_or_pipeline=model,
            tokenizer=tiny_tokenizer,
            data=Dataset.from_dict(columns),
            metric=translation_metric(),
            input_column="en",
            label_column=label,
        )
        command = sacrebleu_command(tmp_path, texts, references)
        assert command["chrf"]["score"] > 1
        assert_scores_of_the_command(result, command)


# --- Scores of given pairs -----------------------------------------------------------------------------------------

PAIRS = [(source[: 5 + 3 * number], target[: 20 - 2 * number]) for number, (source, target) in enumerate(TINY_CORPUS)]


def sides(pairs) -> list[list[str]]:
    return [list(side) for side in zip(*pairs, strict=True)]


def unbiased(model):
    """The model without the bias that makes most tokens all but impossible."""
    with torch.no_grad():
        for name in ("final_logits_bias", "lm_head.bias"):
            {**dict(model.named_parameters()), **dict(model.named_buffers())}.get(name, torch.zeros(1)).zero_()
    return model


@pytest.mark.parametrize("options", [{}, {"tokens_per_batch": 60}, {"tokens_per_batch": 1}, {"window": 3}], ids=str)
def test_scores_of_pairs_equal_the_loops_of_the_reference(tiny_tokenizer, options):
    model = unbiased(varied_model(tiny_tokenizer))
    scores = list(score_pairs(model, tiny_tokenizer, *sides(PAIRS), **options))
    assert len(scores) == len(PAIRS)
    for (source, target), score in zip(PAIRS, scores, strict=True):
        ids = tiny_tokenizer(target)["input_ids"]
        sentence = reference_sentence(model, tiny_tokenizer(source)["input_ids"])
        start = model.config.decoder_start_token_id
        each = [sentence.next_log_probs([start, *ids[:place]])[token] for place, token in enumerate(ids)]
        assert score.token_ids == ids
        assert score.token_log_probs == pytest.approx(each, abs=1e-5)
        assert score.log_prob == pytest.approx(math.fsum(each), abs=1e-4)
    assert len({round(score.log_prob) for score in scores}) > 5


def test_scores_of_pairs_of_another_family_equal_one_by_one_passes(tiny_tokenizer):
    model = unbiased(varied_marian(tiny_tokenizer))
    for (source, target), score in zip(PAIRS, score_pairs(model, tiny_tokenizer, *sides(PAIRS)), strict=True):
        assert score.token_log_probs == pytest.approx(
            log_probs_by_hand(model, tiny_tokenizer, source, target), abs=1e-5
        )


@pytest.mark.parametrize("num_beams", [1, 4])
def test_what_generate_says_of_its_translations_is_their_score(num_beams):
    tokenizer = train_tokenizer(["a b c"], 259)  # bytes alone, so that a text has only one division into tokens
    model = varied_model(tokenizer, seed=6)
    model.generation_config.max_new_tokens_over_source = 4
    with torch.no_grad():
        model.lm_head.bias[tokenizer.eos_token_id] += 0.5
    sources = [source for source, _ in PAIRS]
    best = [each for each, *_ in translate_lines(model, tokenizer, sources, scores=True, num_beams=num_beams)]
    scores = list(score_pairs(model, tokenizer, sources, [each.text for each in best]))
    ended = 0
    for own, forced in zip(best, scores, strict=True):
        length = len(own.token_ids)
        assert forced.token_ids[:length] == own.token_ids
        assert forced.token_log_probs[:length] == pytest.approx(own.token_log_probs, abs=1e-5)
        if own.token_ids[-1] == tokenizer.eos_token_id:  # else the limit came first, and the text ends all the same
            assert forced.log_prob == pytest.approx(own.log_prob, abs=1e-5)
            ended += length > 1
    assert ended >= 3


def test_blank_sides_are_scored_by_definition(tiny_tokenizer):
    model = varied_model(tiny_tokenizer)
    pairs = [("a dog", ""), ("", ""), (" ", "ein Hund"), ("a dog", " \t"), ("\u3000", "\n"), ("a dog", "ein Hund")]
    end, nothing, impossible, white, both, whole = score_pairs(model, tiny_tokenizer, *sides(pairs))
    ids = tiny_tokenizer("a dog")["input_ids"]
    expected = reference_sentence(model, ids).log_prob([tiny_tokenizer.eos_token_id])
    assert end.token_ids == white.token_ids == [tiny_tokenizer.eos_token_id]
    assert end.log_prob == white.log_prob == pytest.approx(expected, abs=1e-5)
    assert nothing == both == PairScore([], [])
    assert nothing.log_prob == 0.0
    assert impossible.log_prob == -math.inf
    assert impossible.token_ids == tiny_tokenizer("ein Hund")["input_ids"]
    alone = next(score_pairs(model, tiny_tokenizer, ["a dog"], ["ein Hund"]))
    assert whole.log_prob == pytest.approx(alone.log_prob, abs=1e-4)


def test_an_overlong_target_is_not_scored_and_an_overlong_source_is_cut(caplog):
    tokenizer = train_tokenizer(["a b c"], 259, model_max_length=8)
    model = varied_model(tokenizer)
    pairs = [("abc", "1234567"), ("abc", "12345678"), ("1234567890", "x"), ("", "12345678")]
    fits, long, cut, blank = score_pairs(model, tokenizer, *sides(pairs), names=("text.en", "text.de"))
    assert math.isfinite(fits.log_prob)
    assert math.isnan(long.log_prob)
    assert len(long.token_ids) == 9
    assert blank.log_prob == -math.inf
    expected = next(score_pairs(model, tokenizer, ["1234567"], ["x"]))
    assert cut.token_ids == expected.token_ids
    assert cut.token_log_probs == pytest.approx(expected.token_log_probs, abs=1e-4)  # of another batch
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    assert "text.de, line 2: 9 tokens are more than the 8" in messages[0]
    assert "text.en, line 3: cut from 11 to 8 tokens" in messages[1]


def test_scoring_knows_no_dropout_leaves_the_mode_and_reads_a_window_at_a_time(tiny_tokenizer):
    expected = next(score_pairs(varied_model(tiny_tokenizer), tiny_tokenizer, ["a dog"], ["ein Hund"]))
    model = varied_model(tiny_tokenizer, dropout=0.5).train()
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield "a dog"

    scores = score_pairs(model, tiny_tokenizer, endless(), iter(["ein Hund"] * 100), window=5)
    assert next(scores).log_prob == pytest.approx(expected.log_prob, abs=1e-5)
    assert model.training
    for _ in range(4):
        next(scores)
    assert len(read) == 5


@pytest.mark.parametrize(
    "sources, targets, options, error, message",
    [
        (["a", "b"], ["c"], {}, ValueError, "source has 2 lines and target has 1"),
        (["a"], ["c", "d", "e"], {"window": 1}, ValueError, "source has 1 lines and target has 3"),
        (["a"], [], {}, ValueError, "source has 1 lines and target has 0"),
        ("a", ["b"], {}, TypeError, "pass \\[text\\]"),
        (["a"], "b", {}, TypeError, "pass \\[text\\]"),
        (["a"], ["b"], {"tokens_per_batch": 0}, ValueError, "tokens_per_batch must be .* at least 1, got 0"),
        (["a"], ["b"], {"window": True}, ValueError, "window must be .* at least 1, got True"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(tiny_tokenizer, sources, targets, options, error, message):
    with pytest.raises(error, match=message):
        list(score_pairs(varied_model(tiny_tokenizer), tiny_tokenizer, sources, targets, **options))
    assert list(score_pairs(varied_model(tiny_tokenizer), tiny_tokenizer, [], [])) == []
