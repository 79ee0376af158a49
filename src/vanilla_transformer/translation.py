"""Translation of lines of text: any number of them, in order, in memory that does not grow with their number.

Works with this model and with any other sequence-to-sequence model of transformers and its tokenizer; decoding itself
is `model.generate()` with the model's own settings.
"""

import contextlib
import errno
import glob
import gzip
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vanilla_transformer.generation_vanilla_transformer import GNMTLengthPenalty
from vanilla_transformer.quantization import to_int8


logger = logging.getLogger(__name__)

# Above this a tokenizer's model_max_length means "not known" (transformers writes 10 ** 30).
_NO_LENGTH_LIMIT = 10**9

# With scores, generate() keeps the log-probabilities of the whole vocabulary at every step, and so does a forced pass:
# at most about so many of them.
SCORES_PER_BATCH = 2**27

# A vocabulary is rounded up to a multiple at most; a greater difference is worth a word.
_MOST_UNUSED_WORDS = 256

# What a trainer keeps beside the weights, and no weights themselves.
_TRAINER_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")

# Whatever the family, a tokenizer leaves one of these.
_TOKENIZER_FILES = ("tokenizer*.json", "vocab*", "*.spm", "*.model", "merges.txt", "*.codes")

_LINE_BREAKS = re.compile(r"[\r\n]+")


@dataclass(frozen=True)
class Hypothesis:
    """One translation of one line.

    Attributes:
        text: The translation, on one line: line breaks inside are written as one space.
        score: What hypotheses are ranked by: the log-probability divided by the length penalty; None unless asked for.
        token_ids: The generated tokens, end of sentence included (where the length limit did not come first).
        token_log_probs: Natural log-probability of each of `token_ids` (as decoding saw it: after processors such as a
            minimum length); None unless asked for.
    """

    text: str
    score: float | None = None
    token_ids: list[int] = field(default_factory=list)
    token_log_probs: list[float] | None = None

    @property
    def log_prob(self) -> float | None:
        """Sum of `token_log_probs`; None unless asked for."""
        return None if self.token_log_probs is None else math.fsum(self.token_log_probs)


def translate_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    tokens_per_batch: int = 8192,
    window: int = 10000,
    progress: bool = False,
    first_line: int = 1,
    name: str = "input",
    scores: bool = False,
    **generate_kwargs: Any,
) -> Iterator[list[Hypothesis]]:
    """Translates lines; item i of the result belongs to line i.

    `window` lines are read, translated in batches of like length, and handed out in order before the next are read.
    The model runs in evaluation mode and on its own device. A line of white space alone translates to the empty
    string and never reaches the model. A line of more tokens than `tokenizer.model_max_length`, or than the model has
    positions for, is cut there, the end of sentence kept, with a warning. Batches change a floating-point result by
    about 1e-6, which can only decide between translations that are equally good to that precision.

    Args:
        model: A sequence-to-sequence model.
        tokenizer: Its tokenizer.
        lines: Source text; may be endless.
        tokens_per_batch: Bound of rows x beams x longest source row, padding counted. A single line above it makes a
            batch of its own.
        window: Lines held and sorted by length together; 1 answers each line before it reads the next.
        progress: Whether to show a progress bar on stderr.
        first_line: Number of the first line, for warnings.
        name: What the warnings call the input, such as its file name.
        scores: Whether to compute `score` and `token_log_probs`. Batches become smaller where their memory demands it.
        generate_kwargs: Arguments of `model.generate()`, such as `num_beams`, `num_return_sequences`,
            `length_penalty` or `max_new_tokens`; what is not given is the model's own setting.

    Returns:
        An iterator with one list a line, best hypothesis first: `num_return_sequences` of them, one for a blank line.

    Raises:
        TypeError: `lines` is one string, or holds something else than strings.
        ValueError: `tokens_per_batch` or `window` is below 1, or `generate()` refuses an argument.

    Source: Vaswani et al. 2017, section 6.1, by way of `generate()`.
    """
    if isinstance(lines, (str, bytes)):
        raise TypeError(f"lines must be an iterable of strings, got one {type(lines).__name__}; pass [text] instead.")
    for argument, value in (("tokens_per_batch", tokens_per_batch), ("window", window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{argument} must be a whole number of at least 1, got {value!r}.")
    decoder = _Decoder(model, tokenizer, tokens_per_batch, scores, generate_kwargs)
    return _translate_windows(decoder, enumerate(lines, first_line), window, progress, name)


def _translate_windows(
    decoder: "_Decoder", numbered_lines: Iterator[tuple[int, str]], window: int, progress: bool, name: str
) -> Iterator[list[Hypothesis]]:
    with tqdm(unit=" lines", disable=not progress, file=sys.stderr) as bar:
        while held := list(islice(numbered_lines, window)):
            yield from decoder.translate([number for number, _ in held], [line for _, line in held], name, bar)


class _Decoder:
    """A model, its tokenizer and the settings of one `translate_lines`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tokens_per_batch: int,
        scores: bool,
        generate_kwargs: dict[str, Any],
    ):
        self.model: Any = model  # with generate(), which PreTrainedModel does not promise
        self.tokenizer = tokenizer
        self.scores = scores
        self.generate_kwargs = dict(generate_kwargs)
        self.num_beams = int(self.setting("num_beams") or 1)
        self.num_sequences = int(self.setting("num_return_sequences") or 1)
        self.tokens_per_batch = tokens_per_batch
        self.rows_per_line = max(self.num_beams, self.num_sequences)
        if self.num_beams > model.config.vocab_size:
            raise ValueError(
                f"num_beams must be at most the vocabulary's {model.config.vocab_size} words, got {self.num_beams}: "
                "the first step has no more hypotheses than words."
            )
        # As the pipeline has it: what models such as T5 want before every text.
        self.prefix = getattr(model.config, "prefix", None) or ""
        self.length_penalty = self.penalty_of_beams()
        if self.num_beams == 1:
            # Settings of the model for its beams, of which transformers would warn that one beam does not need them.
            for setting, neutral in (("early_stopping", False), ("length_penalty", 1.0)):
                if "generation_config" not in self.generate_kwargs:
                    self.generate_kwargs.setdefault(setting, neutral)

    def setting(self, name: str) -> Any:
        """The value of a generation setting that is in force: the call's, else the model's."""
        given = self.generate_kwargs.get("generation_config")
        for value in (
            self.generate_kwargs.get(name),
            getattr(given, name, None),
            getattr(self.model.generation_config, name, None),
        ):
            if value is not None:
                return value
        return None

    def translate(self, numbers: list[int], lines: list[str], name: str, bar: Any) -> list[list[Hypothesis]]:
        """Translates the lines of one window."""
        for number, line in zip(numbers, lines, strict=True):
            if not isinstance(line, str):
                raise TypeError(f"{name}, line {number}: expected a string, got {type(line).__name__}: {line!r:.80}.")
        blank = Hypothesis("", 0.0, [], []) if self.scores else Hypothesis("")
        results: list[list[Hypothesis]] = [[blank] for _ in lines]
        visible = [index for index, line in enumerate(lines) if line.strip()]
        bar.update(len(lines) - len(visible))
        rows = encode_lines(
            self.tokenizer,
            [self.prefix + lines[index] for index in visible],
            [numbers[index] for index in visible],
            name=name,
            positions=position_limit(self.model),
        )
        with evaluation_mode(self.model):
            for batch in self.batches(rows):
                hypotheses = self.generate([rows[row] for row in batch])
                for row, translations in zip(batch, hypotheses, strict=True):
                    results[visible[row]] = translations
                bar.update(len(batch))
        return results

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of `rows` in batches of like length."""
        costs = []
        for row in rows:
            cost = len(row) * self.rows_per_line
            if self.scores:
                cells = self.rows_per_line * self.model.config.vocab_size * self.most_new_tokens(len(row))
                cost = max(cost, math.ceil(cells * self.tokens_per_batch / SCORES_PER_BATCH))
            costs.append((cost,))
        return length_batches(costs, self.tokens_per_batch)

    def most_new_tokens(self, source_length: int) -> int:
        """About how many tokens a row of `source_length` tokens generates at most."""
        for name in ("max_new_tokens", "max_length"):
            if self.generate_kwargs.get(name):
                return int(self.generate_kwargs[name])
        over_source = self.setting("max_new_tokens_over_source")
        if over_source is not None:
            return source_length + int(over_source)
        return int(self.setting("max_new_tokens") or self.setting("max_length") or 20)

    def generate(self, rows: list[list[int]]) -> list[list[Hypothesis]]:
        """Translates one batch of token ids."""
        device = self.model.device
        input_ids, mask = pad_rows(rows, self.tokenizer)
        arguments = {"input_ids": input_ids.to(device), "attention_mask": mask.to(device), **self.generate_kwargs}
        if self.scores:
            arguments.update(return_dict_in_generate=True, output_scores=True)
        outputs = self.model.generate(**arguments)
        sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
        # An encoder-decoder starts from one token of its own, which is no part of the translation.
        token_ids = [self.generated(ids) for ids in sequences[:, 1:].tolist()]
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self.scores:
            hypotheses = self.with_scores(texts, token_ids, outputs)
        else:
            hypotheses = [Hypothesis(on_one_line(text), None, ids) for text, ids in zip(texts, token_ids, strict=True)]
        per_line = self.num_sequences
        return [hypotheses[start : start + per_line] for start in range(0, len(hypotheses), per_line)]

    def generated(self, ids: list[int]) -> list[int]:
        """`ids` up to the end of sentence; without one, less the padding."""
        ends = self.setting("eos_token_id")
        ends = [ends] if isinstance(ends, int) else ends or []
        for position, token in enumerate(ids):
            if token in ends:
                return ids[: position + 1]
        pad = self.setting("pad_token_id")
        length = len(ids)
        while length and ids[length - 1] == pad:
            length -= 1
        return ids[:length]

    def with_scores(self, texts: list[str], token_ids: list[list[int]], outputs: Any) -> list[Hypothesis]:
        """Hypotheses with their log-probabilities from what `generate()` returned."""
        beam_indices = getattr(outputs, "beam_indices", None)
        log_probs = self.model.compute_transition_scores(
            outputs.sequences, outputs.scores, beam_indices, normalize_logits=beam_indices is None
        ).tolist()
        if beam_indices is not None:
            ranked_by = outputs.sequences_scores.tolist()
            # Of beams the generated length is known; their padding may look like the end of sentence.
            lengths = (beam_indices >= 0).sum(dim=1).tolist()
            token_ids = [ids[:length] for ids, length in zip(outputs.sequences[:, 1:].tolist(), lengths, strict=True)]
        hypotheses = []
        for row, (text, ids) in enumerate(zip(texts, token_ids, strict=True)):
            row_log_probs = log_probs[row][: len(ids)]
            if beam_indices is not None:
                score = ranked_by[row]
            else:
                score = math.fsum(row_log_probs) / max(1, len(ids)) ** self.length_penalty
            hypotheses.append(Hypothesis(on_one_line(text), score, ids, row_log_probs))
        return hypotheses

    def penalty_of_beams(self) -> float:
        """The exponent that beams are, or would be, ranked with, so that scores with and without beams compare."""
        return ranking_penalty(self.setting("length_penalty"), self.setting("length_penalty_type"))


def ranking_penalty(penalty: float | None, penalty_type: str | None) -> float:
    """What the length is raised to in a hypothesis' score: log-probability / length ** ranking_penalty(...).

    Args:
        penalty: The setting `length_penalty`; None means 1, the default of transformers.
        penalty_type: The setting `length_penalty_type`: "gnmt" makes that power ((5 + length) / 6) ** penalty.
    """
    penalty = 1.0 if penalty is None else penalty
    return GNMTLengthPenalty(penalty) if penalty_type == "gnmt" else penalty


def json_line(record: Any) -> str:
    """A record as JSON on one line, without its end; null stands for infinite and undefined numbers."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(each) for name, each in value.items()}
        if isinstance(value, list):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False)


def position_limit(model: Any) -> int | None:
    """Tokens that a model has positions for; None where there is no end to them, as with the paper's sinusoids."""
    if getattr(model.config, "position_embedding", None) == "sinusoidal":
        return None
    return getattr(model.config, "max_position_embeddings", None)


def on_one_line(text: str) -> str:
    r"""The text with each run of line breaks (``\n``, ``\r``) as one space: one translation is one line of a file."""
    return _LINE_BREAKS.sub(" ", text)


def encode_lines(
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[str],
    numbers: Sequence[int],
    *,
    name: str = "input",
    target: bool = False,
    cut: bool = True,
    warn: bool = True,
    positions: int | None = None,
) -> list[list[int]]:
    """Token ids of each line, at most `tokenizer.model_max_length` or `positions` of them, end of sentence kept.

    Args:
        tokenizer: Any tokenizer that closes a text with the end of sentence.
        lines: Text without blank lines.
        numbers: The number of each line, for warnings.
        name: What the warnings call the input.
        target: Whether the lines are of the target language, for tokenizers that tell the two apart.
        cut: Whether to cut longer lines; False leaves them as they are.
        warn: Whether to warn of lines that were cut.
        positions: The `position_limit` of the model that the lines are for.

    Raises:
        ValueError: A line holds half of a surrogate pair, which is no character and which no file in UTF-8 has.
    """
    if not lines:
        return []
    for number, line in zip(numbers, lines, strict=True):
        try:
            line.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}, line {number}: expected text, got the lone surrogate U+{ord(line[error.start]):04X} at "
                f"character {error.start + 1}; decode the text as UTF-8, or with errors='replace'."
            ) from None
    key = "text_target" if target else "text"
    rows = tokenizer(**{key: list(lines)}, truncation=False, padding=False, verbose=False)["input_ids"]
    limit, reason = token_limit(tokenizer), "the tokenizer's model_max_length"
    if positions is not None and (limit is None or positions < limit):
        limit, reason = positions, "the model's max_position_embeddings"
    if limit is None or not cut:
        return rows
    for index, row in enumerate(rows):
        if len(row) > limit:
            if warn:
                logger.warning(
                    "%s, line %d: cut from %d to %d tokens, %s", name, numbers[index], len(row), limit, reason
                )
            rows[index] = tokenizer(**{key: lines[index]}, truncation=True, max_length=limit)["input_ids"]
    return rows


def token_limit(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most tokens of a line, end of sentence included; None where the tokenizer names no limit."""
    return tokenizer.model_max_length if tokenizer.model_max_length < _NO_LENGTH_LIMIT else None


def pad_rows(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as `input_ids` and `attention_mask` (1 token, 0 padding), both int64 of shape `(rows, longest)`.

    Padded on the right whatever the tokenizer's side: most encoders count positions from the left edge.
    """
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    # Without a pad token any id will do, for the mask hides it.
    input_ids = pad_sequence(tensors, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True)
    return input_ids, mask


def length_batches(lengths: Sequence[tuple[int, ...]], tokens_per_batch: int) -> Iterator[list[int]]:
    """Indices in batches of like length, the longest first, so that memory runs out at once if at all.

    Args:
        lengths: One tuple a row: its length on each side that counts.
        tokens_per_batch: Bound of rows x longest row on each side; a longer row makes a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], -index), reverse=True)
    batch: list[int] = []
    longest: tuple[int, ...] = ()
    for index in order:
        grown = tuple(map(max, longest, lengths[index])) if batch else lengths[index]
        if batch and (len(batch) + 1) * max(grown) > tokens_per_batch:
            yield batch
            batch, grown = [], lengths[index]
        batch.append(index)
        longest = grown
    if batch:
        yield batch


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switches dropout off inside, and back to what it was after."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def load_translator(
    name: str,
    *,
    device: str | None = None,
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Opens a sequence-to-sequence model and its tokenizer for translation, from safetensors only.

    Args:
        name: A folder that `save_pretrained` wrote, or the name of a model on the Hub.
        device: Where to put the model, such as "cpu" or "cuda:0"; None means "cuda" where there is one, else "cpu".
        dtype: "float32", "bfloat16" or "float16", "int8" (on a CPU, see `quantization`), or "auto" for that of the
            saved weights.
        revision: Branch, tag or commit on the Hub; None means the main branch.
        trust_remote_code: Whether code that lies beside the weights may run. This package's own models do not need it.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: The folder has no `config.json`.
        OSError: The Hub has no such model, or is not reached.
        ValueError: The folder has no safetensors, or not all weights of the model; the model is no encoder-decoder;
            `device` or `dtype` does not exist here.
    """
    torch_dtype = "auto" if dtype == "auto" else getattr(torch, "float32" if dtype == "int8" else dtype, None)
    if torch_dtype != "auto" and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise ValueError(f"dtype must be float32, bfloat16, float16, int8 or auto, got {dtype!r}.")
    place = _usable_device("cpu" if dtype == "int8" and device is None else device)
    if dtype == "int8" and place.type != "cpu":
        raise ValueError(f"int8 runs on a cpu, got device {device!r}; use bfloat16 or float16 there.")
    if os.path.isdir(name):
        _require_model_folder(name)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        if not config.is_encoder_decoder:
            raise ValueError(
                f"{name} holds a model of type {config.model_type!r}, which is no encoder-decoder and so cannot "
                "translate here; pass a sequence-to-sequence model."
            )
        tokenizer = open_tokenizer(name, options)
        with _without_load_report():
            model, report = AutoModelForSeq2SeqLM.from_pretrained(
                name, config=config, dtype=torch_dtype, use_safetensors=True, output_loading_info=True, **options
            )
    except (SafetensorError, RuntimeError) as error:  # broken weights, or of other shapes than the configuration's
        other_shapes = "ignore_mismatched_sizes" in str(error)
        reason = "their shapes are not those that its config.json asks for." if other_shapes else str(error)
        raise ValueError(f"the weights in {name} cannot be used: {reason}") from error
    except OSError as error:
        for file in glob.glob(os.path.join(glob.escape(name), "*")):
            needed = file.endswith((".json", ".safetensors", ".model", ".spm", ".txt", ".jinja"))
            if needed and os.path.exists(file) and not os.access(file, os.R_OK):
                raise PermissionError(f"cannot open the model {name}: no permission to read {file}") from error
        where = "" if os.path.isdir(name) else " (no folder of that name here, so it was looked for on the Hub)"
        raise OSError(f"cannot open the model {name}{where}: {error}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"{name} lacks {len(missing)} weights that its config.json asks for, such as {missing[0]}; save the "
            "model again."
        )
    if report["unexpected_keys"]:
        unexpected = sorted(report["unexpected_keys"])
        raise ValueError(
            f"{name} has {len(unexpected)} weights that its config.json has no place for, such as {unexpected[0]}: "
            "the configuration is not that of this model."
        )
    vocab_size = config.vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer in {name} has {len(tokenizer)} words and the model {vocab_size}: it is not the tokenizer "
            "of this model."
        )
    if vocab_size - len(tokenizer) > _MOST_UNUSED_WORDS:
        logger.warning(
            "the tokenizer in %s has %d words and the model %d: is it the tokenizer of this model?",
            name,
            len(tokenizer),
            vocab_size,
        )
    if dtype == "int8":
        return to_int8(model), tokenizer
    return model.to(place).eval(), tokenizer


def open_tokenizer(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        name: A folder, or a name on the Hub.
        options: Arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: There is none.
        ImportError: It needs a package that is not installed.
        ValueError: Whatever is wrong with its files.
    """
    if os.path.isdir(name) and not any(glob.glob(os.path.join(glob.escape(name), each)) for each in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"no tokenizer in the folder {name} (tokenizer.json or the like); save it there with "
            "tokenizer.save_pretrained."
        )
    try:
        with warnings.catch_warnings():
            # Marian's tokenizer recommends a package on being opened, and never uses it.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            return AutoTokenizer.from_pretrained(name, **options)
    except OSError:
        raise
    except ImportError as error:
        if "sentencepiece" not in str(error).lower():
            raise
        raise ImportError(
            f'the tokenizer in {name} needs the package sentencepiece: pip install "vanilla-transformer[export]"'
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        if "backend tokenizer" in reason:  # three ways to build one are then listed, all for want of its file
            reason = "a file of it is missing, such as tokenizer.json."
        raise ValueError(f"the tokenizer in {name} cannot be used: {reason}") from error


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Keeps the many lines that transformers writes of weights that do not fit; the caller says it in one."""
    loader = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    loader.addFilter(is_error)
    try:
        yield
    finally:
        loader.removeFilter(is_error)


def _usable_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()  # a device without data, such as "meta", fails here
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used here ({reason}); pass 'cpu', or leave it out.") from None
    return place


def _require_model_folder(folder: str) -> None:
    """Says what a folder lacks before transformers is asked to open it, for which pickled weights would do."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        checkpoints = sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint-*")))
        hint = (
            f"; did you mean {checkpoints[-1]}?" if checkpoints else "; expected a folder written by save_pretrained."
        )
        raise FileNotFoundError(f"no config.json in the folder {folder}{hint}")
    decoding = os.path.join(folder, "generation_config.json")
    if os.path.isfile(decoding):  # without which transformers would decode by its own defaults, and say nothing
        try:
            with open(decoding, encoding="utf-8") as file:
                json.load(file)
        except ValueError as error:
            raise ValueError(
                f"{decoding} is not JSON ({error}); save the model again, or remove the file for the model's defaults."
            ) from None
    weights = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    if not weights:
        if glob.glob(os.path.join(glob.escape(folder), "*_vocabulary.*")) and "model.bin" in os.listdir(folder):
            raise ValueError(
                f"{folder} holds a CTranslate2 model: translate with --backend ctranslate2, or pass the model that it "
                "was converted from."
            )
        if "encoder_model.onnx" in os.listdir(folder):
            raise ValueError(
                f"{folder} holds an ONNX model: translate with --backend onnx, or pass the model that it was "
                "converted from."
            )
        others = sorted(
            name
            for name in os.listdir(folder)
            if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and not _TRAINER_STATE.fullmatch(name)
        )
        found = f"only {', '.join(others)}, which would have to be unpickled" if others else "no weights at all"
        raise ValueError(
            f"no safetensors in the folder {folder}, but {found}; save the model again with save_pretrained, which "
            "writes model.safetensors."
        )


@contextlib.contextmanager
def naming_what_is_full(path: str | os.PathLike) -> Iterator[None]:
    """Adds to an error of a full disk what was being written, which Python leaves out after a file is opened."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    r"""Opens a text file for writing that appears under its name whole or not at all.

    What is written goes to a temporary file in the same folder, which takes the place of `path` at the end; an error
    before that leaves `path` as it was. UTF-8, lines end in ``\n``.

    Args:
        path: The file, compressed when its name ends in ``.gz``; ``-`` means standard output, which (like a device or
            a named pipe) is written as it comes.

    Raises:
        OSError: The file cannot be written, for instance since its folder does not exist.
    """
    if path == "-":
        if sys.stdout is None:
            raise ValueError("standard output is closed; give a file, or open it")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        with naming_what_is_full("standard output"):
            yield sys.stdout
            sys.stdout.flush()
        return
    if os.path.isdir(path):
        raise IsADirectoryError(f"expected a file to write to, but {path} is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        with naming_what_is_full(path), open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    target = os.path.realpath(path)  # a symbolic link stays one
    folder, base = os.path.split(target)
    # A name that no killed process has left behind: in a container each may have the number 1.
    temporary = os.path.join(folder, f".{base}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    opener = gzip.open if path.lower().endswith(".gz") else open
    try:
        file = opener(temporary, "xt", encoding="utf-8", newline="\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such folder: {folder} (to write {base} into)") from None
    try:
        with naming_what_is_full(path), file:
            yield file
        with naming_what_is_full(path), open(temporary, "rb") as written:
            os.fsync(written.fileno())  # before it takes its name, or a power failure could leave a part under it
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
