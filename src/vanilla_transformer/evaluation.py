"""How good a translation model is: BLEU and chrF as sacreBLEU counts them, perplexity, and scores of given pairs.

Texts are scored as they are, detokenised; no reference is ever tokenised to match. Source of the measures: Papineni
et al. 2002 (BLEU), Popovic 2015 (chrF), Post 2018 (sacreBLEU); Vaswani et al. 2017 report BLEU and perplexity in
Table 3.
"""

import functools
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.translation import (
    SCORES_PER_BATCH,
    encode_lines,
    evaluation_mode,
    length_batches,
    on_one_line,
    pad_rows,
    position_limit,
    token_limit,
)


logger = logging.getLogger(__name__)


def bleu_with(tokenize: str | None, lowercase: bool = False) -> BLEU:
    """sacreBLEU's BLEU with one of its tokenizers.

    Raises:
        ValueError: `tokenize` is unknown.
        ImportError: It needs a package that is not installed.
    """
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"tokenize must be one of {', '.join(sorted(BLEU.TOKENIZERS))}, got {tokenize!r}.")
    try:
        return BLEU(tokenize=tokenize, lowercase=lowercase)
    except (RuntimeError, ImportError) as error:
        raise ImportError(f"tokenize={tokenize!r}: {' '.join(str(error).split())}") from error


def corpus_scores(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, dict[str, Any]]:
    """BLEU and chrF of a whole corpus, the numbers of the `sacrebleu` command on the same lines.

    Args:
        hypotheses: One translation a segment.
        references: One sequence for each reference file, each with one line a segment: `[references]` for a single
            file. (Not one list a segment.)
        tokenize: sacreBLEU's tokenizer for BLEU; None means its default for most languages, "13a". Chinese needs "zh".
        lowercase: Whether capitals count as small letters, in BLEU and chrF; the signatures say so.

    Returns:
        `{"bleu": {"score", "signature", "precisions", "brevity_penalty"}, "chrf": {"score", "signature"}}`; scores
        from 0 to 100, precisions of 1- to 4-grams.

    Raises:
        TypeError: `references` holds strings instead of one sequence a file.
        ValueError: No segment at all, a reference of another number of lines, or an unknown `tokenize`.
    """
    if isinstance(hypotheses, str) or isinstance(references, str) or any(isinstance(each, str) for each in references):
        raise TypeError(
            "expected hypotheses as a sequence of strings and references as one such sequence a reference file, got a "
            "plain string in the place of a sequence; pass [references] for a single file."
        )
    if not hypotheses or not references:
        raise ValueError(f"nothing to score: got {len(hypotheses)} hypotheses and {len(references)} references.")
    for number, lines in enumerate(references, 1):
        if len(lines) != len(hypotheses):
            raise ValueError(
                f"reference {number} has {len(lines)} lines for {len(hypotheses)} hypotheses; every reference file "
                "has one line a segment, and references are one sequence a file, not one a segment."
            )
    bleu, chrf = bleu_with(tokenize, lowercase), CHRF(lowercase=lowercase)
    lists = [list(lines) for lines in references]
    bleu_score = bleu.corpus_score(list(hypotheses), lists)
    chrf_score = chrf.corpus_score(list(hypotheses), lists)
    return {
        "bleu": {
            "score": float(bleu_score.score),
            "signature": bleu.get_signature().format(),
            "precisions": [float(precision) for precision in bleu_score.precisions],
            "brevity_penalty": float(bleu_score.bp),
        },
        "chrf": {"score": float(chrf_score.score), "signature": chrf.get_signature().format()},
    }


def translation_metric(tokenize: str | None = None) -> Any:
    """BLEU and chrF as an `evaluate.Metric`, without a download: for `evaluate.evaluator("translation")` and by hand.

    Its `compute(predictions=, references=)` takes one reference a segment, or a list of references a segment (as many
    for each), and gives what the `sacrebleu` command gives: `bleu`, `chrf` (from 0 to 100), `bleu_signature`,
    `chrf_signature`, `bleu_precisions` (a list, 1- to 4-grams) and `bleu_brevity_penalty`. `add` and `add_batch` work
    as with every metric. It keeps the texts in memory and writes no file.

    Args:
        tokenize: As for `corpus_scores`.

    Returns:
        A `TranslationMetric`, a subclass of `evaluate.Metric`.

    Raises:
        ImportError: evaluate is not installed, or the tokenizer needs a package that is not.
        ValueError: `tokenize` is unknown. From `compute` and `add_batch`: no segment, unequal numbers of predictions
            and references, or of references a segment.
        TypeError: From `add` and `add_batch`: a prediction or reference that is not a string.
    """
    return translation_metric_class()(tokenize)


@functools.cache
def translation_metric_class() -> Any:
    """The class `TranslationMetric`, made when it is first asked for: evaluate is optional."""
    try:
        from datasets import Features, Value
        from evaluate import Metric, MetricInfo
    except ImportError as error:
        raise ImportError(
            "the evaluate library is needed for this metric and could not be imported "
            f'({error}); pip install "vanilla-transformer[evaluate]".'
        ) from error

    class TranslationMetric(Metric):
        """See `translation_metric`."""

        def __init__(self, tokenize: str | None = None):
            bleu_with(tokenize)  # refuses at once what it would refuse after an hour of translating
            self.tokenize = tokenize
            # evaluate makes a folder for the files that a metric in memory never writes.
            with tempfile.TemporaryDirectory() as folder:
                super().__init__(keep_in_memory=True, cache_dir=folder)

        def _info(self) -> Any:
            return MetricInfo(
                description="BLEU and chrF of a corpus, as the sacrebleu command counts them.",
                citation="Papineni et al. 2002 (BLEU), Popovic 2015 (chrF), Post 2018 (sacreBLEU)",
                inputs_description="predictions: one string a segment; references: a string or a list of strings each",
                # Always a list: what an Arrow file holds cannot change from segment to segment.
                features=Features({"predictions": Value("string"), "references": [Value("string")]}),
                reference_urls=["https://github.com/mjpost/sacrebleu"],
            )

        def compute(self, *, predictions: Any = None, references: Any = None) -> dict[str, Any] | None:
            """Scores the segments given here and those added before; see `translation_metric`."""
            if predictions is not None or references is not None:
                self.add_batch(predictions=predictions, references=references)
            if self.writer is None:
                raise ValueError("nothing to score: got no predictions and references, here or by add_batch before.")
            return super().compute()

        def add_batch(self, *, predictions: Any = None, references: Any = None) -> None:
            """Adds segments: predictions, and for each a reference or a list of references."""
            for name, given in (("predictions", predictions), ("references", references)):
                if given is None or isinstance(given, str):
                    raise TypeError(f"expected {name} as a sequence with one entry a segment, got {given!r:.60}.")
            if len(predictions) != len(references):
                raise ValueError(
                    f"expected as many references as predictions, got {len(predictions)} predictions and "
                    f"{len(references)} references; several references of a segment are one list."
                )
            if len(predictions):
                super().add_batch(
                    predictions=[checked_string(text, "prediction") for text in predictions],
                    references=[references_of_a_segment(each) for each in references],
                )

        def add(self, *, prediction: Any = None, reference: Any = None) -> None:
            """Adds one segment: a prediction, and its reference or list of references."""
            super().add(
                prediction=checked_string(prediction, "prediction"),
                reference=references_of_a_segment(reference),
            )

        def _compute(self, *, predictions: Any = None, references: Any = None) -> dict[str, Any]:
            number = len(references[0])
            for segment, each in enumerate(references, 1):
                if len(each) != number:
                    raise ValueError(
                        f"every segment must have as many references as the first, which has {number}; segment "
                        f"{segment} has {len(each)}."
                    )
            # evaluate has one list a segment, sacreBLEU one a file.
            scores = corpus_scores(predictions, list(zip(*references, strict=True)), tokenize=self.tokenize)
            return {
                "bleu": scores["bleu"]["score"],
                "chrf": scores["chrf"]["score"],
                "bleu_signature": scores["bleu"]["signature"],
                "chrf_signature": scores["chrf"]["signature"],
                "bleu_precisions": scores["bleu"]["precisions"],
                "bleu_brevity_penalty": scores["bleu"]["brevity_penalty"],
            }

    # As if it stood at the top of this file, where pickle looks for it.
    TranslationMetric.__qualname__ = TranslationMetric.__name__
    return TranslationMetric


def checked_string(text: Any, name: str) -> str:
    """The text, unless it is none."""
    if not isinstance(text, str):
        raise TypeError(f"a {name} must be a string, got {type(text).__name__}: {text!r:.60}.")
    return str(text)


def references_of_a_segment(given: Any) -> list[str]:
    """One reference or several, as a list."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [checked_string(text, "reference") for text in several]


def __getattr__(name: str) -> Any:
    if name == "TranslationMetric":
        return translation_metric_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compute_metrics_for(tokenizer: PreTrainedTokenizerBase) -> Callable[..., dict[str, float]]:
    """The `compute_metrics` of a `Seq2SeqTrainer` with `predict_with_generate=True`.

    Args:
        tokenizer: Decodes predictions and labels; -100, with which Trainer pads both, is left out.

    Returns:
        A function of an `EvalPrediction` that gives `bleu` and `chrf` (from 0 to 100) and `generated_length` (mean
        number of generated tokens, end of sentence counted). It raises ValueError for logits in the place of
        generated tokens. With `batch_eval_metrics` Trainer calls it batch by batch, with `compute_result=True` only
        for the last: then it scores all batches since the last result as one corpus.
    """
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, -100}
    hypotheses: list[str] = []
    references: list[str] = []
    lengths: list[int] = []

    def texts_of(rows: np.ndarray) -> list[str]:
        kept = [[token for token in row if token != -100] for row in rows.tolist()]
        decoded = tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [on_one_line(text) for text in decoded]

    def blocks_of(rows: Any) -> list[np.ndarray]:
        # One array, one of torch's, a tuple of which it is the first, or a list of arrays of unlike width.
        by_batch = isinstance(rows, list) and len(rows) > 0 and getattr(rows[0], "ndim", 0) == 2
        blocks = rows[:1] if isinstance(rows, tuple) else rows if by_batch else [rows]
        return [block.cpu().numpy() if torch.is_tensor(block) else np.asarray(block) for block in blocks]

    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        for block in blocks_of(prediction.predictions):
            if block.ndim != 2:
                raise ValueError(
                    f"expected generated tokens of shape (segments, length), got shape {block.shape}; set "
                    "predict_with_generate=True in the training arguments."
                )
            hypotheses.extend(texts_of(block))
            lengths.extend(sum(token not in special for token in row) for row in block.tolist())
        for block in blocks_of(prediction.label_ids):
            references.extend(texts_of(block))
        if not compute_result:
            return {}
        try:
            scores = corpus_scores(hypotheses, [references])
            mean_length = float(np.mean(lengths))
        finally:
            for kept in (hypotheses, references, lengths):
                kept.clear()
        return {
            "bleu": scores["bleu"]["score"],
            "chrf": scores["chrf"]["score"],
            "generated_length": mean_length,
        }

    return compute_metrics


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    tokens_per_batch: int = 4096,
) -> float:
    """exp of the mean cross-entropy of a target token given its source: how many tokens the model hesitates between.

    Unsmoothed and per token of this tokenizer, end of sentence counted, so comparable only between models of the same
    vocabulary. A pair with a blank side is left out, for a blank line never reaches the model. Over-long sides are
    cut to the tokenizer's `model_max_length`, end of sentence kept, with a warning for the target.

    Args:
        model: A sequence-to-sequence model; runs in evaluation mode.
        tokenizer: Its tokenizer.
        sources: Source lines.
        targets: The translation of each.
        tokens_per_batch: Bound of rows x longest row, padding counted, for either side; a longer pair makes a batch
            of its own.

    Raises:
        ValueError: Unequal numbers of lines, or no pair with text on both sides.

    Source: Vaswani et al. 2017, Table 3 ("per-wordpiece" perplexities).
    """
    if len(sources) != len(targets):
        raise ValueError(
            f"expected one target for each source, got {len(sources)} sources and {len(targets)} targets."
        )
    kept = [index for index in range(len(sources)) if sources[index].strip() and targets[index].strip()]
    if not kept:
        raise ValueError(f"perplexity needs a pair with text on both sides, got none among {len(sources)} pairs.")
    if len(kept) < len(sources):
        logger.info("perplexity: left out %d of %d pairs with a blank side", len(sources) - len(kept), len(sources))
    numbers = [index + 1 for index in kept]
    prefix = getattr(model.config, "prefix", None) or ""
    positions = position_limit(model)
    source_rows = encode_lines(
        tokenizer, [prefix + sources[index] for index in kept], numbers, name="source", warn=False, positions=positions
    )
    target_rows = encode_lines(
        tokenizer, [targets[index] for index in kept], numbers, name="target", target=True, positions=positions
    )
    total, tokens = 0.0, 0
    for _, log_probs in _forced_log_probs(model, tokenizer, source_rows, target_rows, tokens_per_batch):
        total -= math.fsum(log_probs)
        tokens += len(log_probs)
    mean = total / tokens
    return math.exp(mean) if mean < 700 else math.inf  # beyond, exp overflows


@dataclass(frozen=True)
class PairScore:
    """How likely a model finds a given translation.

    Attributes:
        token_ids: Tokens of the target, end of sentence included; none where source and target are blank.
        token_log_probs: Natural log-probability of each of `token_ids`, given the source and the tokens before it.
    """

    token_ids: list[int]
    token_log_probs: list[float]

    @property
    def log_prob(self) -> float:
        """Natural log-probability of the whole target: the sum of `token_log_probs`."""
        return math.fsum(self.token_log_probs)


def score_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    targets: Iterable[str],
    *,
    tokens_per_batch: int = 4096,
    window: int = 10000,
    progress: bool = False,
    names: tuple[str, str] = ("source", "target"),
) -> Iterator[PairScore]:
    """Forced decoding: log-probabilities of given targets; item i of the result belongs to pair i.

    `window` pairs are read, scored in batches of like length, and handed out in order before the next are read. The
    model runs in evaluation mode and on its own device; its logits are taken as they are, without the processors that
    `generate()` may add.

    A blank target is the end of sentence alone. A blank source never reaches the model, since its translation is blank
    by definition: a blank target then has no token and log-probability 0, and every token of another one has minus
    infinity. A source above `tokenizer.model_max_length` tokens is cut there with a warning, as in `translate_lines`;
    a target cannot be cut without being another one, and gets nan for each token, with a warning.

    Args:
        model: A sequence-to-sequence model.
        tokenizer: Its tokenizer.
        sources: Source lines; may be endless.
        targets: The translation of each.
        tokens_per_batch: Bound of rows x longest row, padding counted, for either side; a longer pair makes a batch
            of its own. Batches become smaller where the memory of a large vocabulary demands it.
        window: Pairs held and sorted by length together.
        progress: Whether to show a progress bar on stderr.
        names: What warnings and errors call the two sides, such as their file names.

    Raises:
        TypeError: `sources` or `targets` is one string.
        ValueError: `tokens_per_batch` or `window` is below 1, or one side ends before the other.

    Source: Vaswani et al. 2017, section 3 (the decoder's next-token probabilities), multiplied along the target.
    """
    if isinstance(sources, (str, bytes)) or isinstance(targets, (str, bytes)):
        raise TypeError("sources and targets must be iterables of strings, got one string; pass [text] instead.")
    for argument, value in (("tokens_per_batch", tokens_per_batch), ("window", window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{argument} must be a whole number of at least 1, got {value!r}.")
    return _score_windows(
        model, tokenizer, _pairs_of(sources, targets, names), tokens_per_batch, window, progress, names
    )


def _pairs_of(
    sources: Iterable[str], targets: Iterable[str], names: tuple[str, str]
) -> Iterator[tuple[int, str, str]]:
    """Pairs with their number, from 1; raises where one side ends first."""
    pairs = zip_longest(sources, targets)
    for number, (source, target) in enumerate(pairs, 1):
        if source is None or target is None:
            longer = number + sum(1 for _ in pairs)
            counts = (number - 1, longer) if source is None else (longer, number - 1)
            raise ValueError(
                f"{names[0]} has {counts[0]} lines and {names[1]} has {counts[1]}; line i of the target must be the "
                "translation of line i of the source."
            )
        yield number, source, target


def _score_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterator[tuple[int, str, str]],
    tokens_per_batch: int,
    window: int,
    progress: bool,
    names: tuple[str, str],
) -> Iterator[PairScore]:
    prefix = getattr(model.config, "prefix", None) or ""
    positions = position_limit(model)
    limits = [limit for limit in (token_limit(tokenizer), positions) if limit is not None]
    limit = min(limits, default=None)
    with tqdm(unit=" lines", disable=not progress, file=sys.stderr) as bar:
        while held := list(islice(pairs, window)):
            numbers = [number for number, _, _ in held]
            texts = [target if target.strip() else "" for _, _, target in held]
            rows = encode_lines(tokenizer, texts, numbers, name=names[1], target=True, cut=False)
            scores: list[PairScore | None] = [None] * len(held)
            for index, (number, source, _) in enumerate(held):
                row = rows[index]
                if not source.strip():
                    scores[index] = PairScore(row, [-math.inf] * len(row)) if texts[index] else PairScore([], [])
                elif limit is not None and len(row) > limit:
                    logger.warning(
                        "%s, line %d: %d tokens are more than the %d that tokenizer and model take; not scored",
                        names[1],
                        number,
                        len(row),
                        limit,
                    )
                    scores[index] = PairScore(row, [math.nan] * len(row))
            left = [index for index, score in enumerate(scores) if score is None]
            bar.update(len(held) - len(left))
            visible = [prefix + held[index][1] for index in left]
            source_rows = encode_lines(
                tokenizer, visible, [numbers[index] for index in left], name=names[0], positions=positions
            )
            target_rows = [rows[index] for index in left]
            for place, log_probs in _forced_log_probs(model, tokenizer, source_rows, target_rows, tokens_per_batch):
                scores[left[place]] = PairScore(target_rows[place], log_probs)
                bar.update()
            yield from (score for score in scores if score is not None)


def _forced_log_probs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_rows: Sequence[list[int]],
    target_rows: Sequence[list[int]],
    tokens_per_batch: int,
) -> Iterator[tuple[int, list[float]]]:
    """Index of each pair of rows, in no particular order, and the log-probability of each token of its target."""
    most_logits = max(1, SCORES_PER_BATCH // model.config.vocab_size)
    costs = [
        (len(source), max(len(target), math.ceil(len(target) * tokens_per_batch / most_logits)))
        for source, target in zip(source_rows, target_rows, strict=True)
    ]
    for batch in length_batches(costs, tokens_per_batch):
        input_ids, mask = pad_rows([source_rows[index] for index in batch], tokenizer)
        labels = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(target_rows[index]) for index in batch], batch_first=True, padding_value=-100
        ).to(model.device)
        # Entered anew for each batch: what happens between two of them is not ours.
        with evaluation_mode(model), torch.no_grad():
            outputs = model(input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), labels=labels)
            # From the logits: a model's own loss may be smoothed, or a mean in half precision.
            losses = cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        for index, row in zip(batch, losses.view(labels.shape).neg().tolist(), strict=True):
            yield index, row[: len(target_rows[index])]
