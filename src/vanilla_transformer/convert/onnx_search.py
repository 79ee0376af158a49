"""Translation with a model in the ONNX format: onnxruntime and numpy, without torch and transformers.

`convert --to onnx` puts a copy of this file into the folder that it writes. There it is a program,

    pip install onnxruntime numpy tokenizers
    python onnx_search.py < source.txt > translation.txt

and a module, whose `OnnxModel(folder)` translates lines (`translate`), or tokens where the tokenizer is another one
(`search`). The searches are those of the model in torch, the paper's length penalty, stop rule and limit for each
sentence included: Vaswani et al. 2017, section 6.1; Wu et al. 2016, equation (14).
"""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


logger = logging.getLogger(__name__)

ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
NEVER = np.float32(-1.0e9)  # the score of what does not exist
STOCK_NEW_TOKENS = 20  # tokens of a translation where nothing sets a limit, as in transformers
# What `OnnxModel.translate` may be given; the model's own settings count for the others.
SETTINGS = (
    *("num_beams", "length_penalty", "length_penalty_type", "early_stopping"),
    *("max_new_tokens", "max_new_tokens_over_source"),
)
NO_LENGTH_LIMIT = 10**9  # a tokenizer's limit above this means that it has none


class OnnxModel:
    """Encoder and decoder in onnxruntime, and what lies beside them.

    Args:
        folder: What `convert --to onnx` wrote.
        threads: Threads of one operator; None leaves it to onnxruntime.
        providers: Where to compute, in the order of preference; None means the CPU.

    Attributes:
        config: The model's configuration.
        settings: Its generation settings.
        max_positions: Tokens of a source, and of a translation, that the model has positions for; None means any.

    Raises:
        FileNotFoundError: The folder lacks a file.
        ValueError: onnxruntime cannot open the model so.
    """

    def __init__(
        self, folder: str | os.PathLike, *, threads: int | None = None, providers: Sequence[str] | None = None
    ):
        self.folder = Path(folder)
        for name in (ENCODER, DECODER, "config.json", "generation_config.json"):
            if not (self.folder / name).exists():
                raise FileNotFoundError(f"no {name} in {folder}; expected a folder that convert --to onnx wrote.")
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.settings: dict[str, Any] = json.loads(
            (self.folder / "generation_config.json").read_text(encoding="utf-8")
        )
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self.encoder, self.decoder = (
                onnxruntime.InferenceSession(
                    str(self.folder / name), options, providers=list(providers or ["CPUExecutionProvider"])
                )
                for name in (ENCODER, DECODER)
            )
        except Exception as error:  # classes of their own without a common one
            raise ValueError(f"onnxruntime cannot open the model in {folder}: {error}") from error
        # The name of each remembered tensor with its shape for an empty memory.
        self.memory = {
            each.name: (1, int(each.shape[1]), 1, int(each.shape[3]))
            for each in self.decoder.get_inputs()
            if each.name.startswith("past_key_values.")
        }
        self.outputs = [each.name for each in self.decoder.get_outputs()]
        learned = self.config.get("position_embedding") == "learned"
        self.max_positions: int | None = self.config["max_position_embeddings"] if learned else None

    def encode(self, sources: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The encoder's output, shape `(rows, longest, d_model)`, and the mask, shape `(rows, longest)`.

        Args:
            sources: Tokens, end of sentence included.
        """
        ids, mask = padded(sources, self.config["pad_token_id"])
        (states,) = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        return states, mask

    def log_probs(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """The natural log-probability of each token of each target, by forced decoding.

        Args:
            sources: Tokens, end of sentence included.
            targets: Tokens to score, without the start token, at least one each.
        """
        start = self.config["decoder_start_token_id"]
        state = DecoderState(self, *self.encode(sources))
        ids, _ = padded([[start, *target[:-1]] for target in targets], self.config["pad_token_id"])
        logits = state.logits(ids)
        normalisers = log_of_sum(logits)
        return [
            [float(logits[row, place, token] - normalisers[row, place]) for place, token in enumerate(target)]
            for row, target in enumerate(targets)
        ]

    def search(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        num_beams: int,
        num_best: int = 1,
        length_penalty: float = 1.0,
        length_penalty_type: str = "hub",
        early_stopping: bool | str = False,
        ends: Sequence[int] | None = None,
    ) -> list[list[tuple[list[int], float]]]:
        """The best translations of each source: tokens, and what ranks them, best first.

        Args:
            sources: Tokens, end of sentence included.
            limits: Most tokens of a translation, end of sentence included, for each source.
            num_beams: Hypotheses of each source; 1 is greedy search, which ranks nothing (0.0).
            num_best: How many translations of each source are wanted, at most `num_beams`.
            length_penalty: p; a hypothesis of n tokens is ranked by its log-probability divided by `n ** p`, or with
                `length_penalty_type` "gnmt", the paper's, by `((5 + n) / 6) ** p`.
            length_penalty_type: "hub" or "gnmt".
            early_stopping: True ends with `num_beams` complete hypotheses; "never" when none can win any more; False
                when the best of those under way would not win as it is.
            ends: Tokens that end a translation; None means the model's.
        """
        if not sources:
            return []
        if ends is None:
            end = self.settings.get("eos_token_id", self.config["eos_token_id"])
            ends = end if isinstance(end, list) else [end]
        state = DecoderState(self, *self.encode(sources))
        start = self.config["decoder_start_token_id"]
        if num_beams == 1:
            return [[(tokens, 0.0)] for tokens in greedy_search(state, start, np.array(limits), np.array(ends))]

        def divisor(length: np.ndarray | int) -> Any:
            """What a log-probability of so many tokens is divided by."""
            base = (5 + length) / 6 if length_penalty_type == "gnmt" else np.float32(length)
            return np.power(base, length_penalty, dtype=np.float32)

        is_bounded = early_stopping == "never" and length_penalty > 0.0
        return beam_search(
            state,
            start,
            np.array(limits),
            np.array(ends),
            num_beams,
            num_best,
            divisor,
            stop_at_once=early_stopping is True,
            bound_at_limit=is_bounded,
            exact=is_bounded or length_penalty <= 0.0,
        )

    def translate(
        self, lines: Iterable[str], *, tokens_per_batch: int = 4096, window: int = 1000, **settings: Any
    ) -> Iterator[str]:
        """Translates lines, one translation each, in order; blank lines stay blank, and too long ones are cut.

        Args:
            lines: Source text, one sentence each; may be endless.
            tokens_per_batch: Bound of rows x beams x longest source row.
            window: Lines read and sorted by length together.
            settings: Any of `SETTINGS`; what is not given is the model's own.

        Raises:
            FileNotFoundError: The folder has no `tokenizer.json`.
            TypeError: A setting that is not known here.
        """
        if unknown := sorted(set(settings) - set(SETTINGS)):
            raise TypeError(f"expected settings among {', '.join(SETTINGS)}, got {unknown[0]}.")
        if settings.get("max_new_tokens") is not None:
            settings["max_new_tokens_over_source"] = None
        values: dict[str, Any] = {name: settings.get(name, self.settings.get(name)) for name in SETTINGS}
        over_source = values.pop("max_new_tokens_over_source")
        most = values.pop("max_new_tokens") or STOCK_NEW_TOKENS
        values = {"num_beams": 1, **{name: value for name, value in values.items() if value is not None}}
        tokenizer = self.open_tokenizer()
        iterator, first_line = iter(lines), 1
        while held := list(islice(iterator, window)):
            visible = [index for index, line in enumerate(held) if line.strip()]
            encodings = tokenizer.encode_batch([held[index] for index in visible])
            for index, encoding in zip(visible, encodings, strict=True):
                if encoding.overflowing:
                    logger.warning("line %d: cut to %d tokens", first_line + index, len(encoding.ids))
            first_line += len(held)
            sources = [each.ids for each in encodings]
            answers = [""] * len(held)
            for batch in batches([len(source) * values["num_beams"] for source in sources], tokens_per_batch):
                limits = [most if over_source is None else len(sources[row]) + over_source for row in batch]
                if self.max_positions is not None:
                    limits = [min(limit, self.max_positions) for limit in limits]
                found = self.search([sources[row] for row in batch], limits, **values)
                texts = tokenizer.decode_batch([best[0][0] for best in found], skip_special_tokens=True)
                for row, text in zip(batch, texts, strict=True):
                    answers[visible[row]] = " ".join(re.split(r"[\r\n]+", text))
            yield from answers

    def open_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the folder, which cuts what is too long and keeps the end of sentence."""
        from tokenizers import Tokenizer

        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"no tokenizer.json in {self.folder}: make tokens yourself and call search().")
        tokenizer = Tokenizer.from_file(str(path))
        settings = json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        limits = [settings.get("model_max_length"), self.max_positions]
        known = [int(limit) for limit in limits if limit is not None and limit < NO_LENGTH_LIMIT]
        if known:
            tokenizer.enable_truncation(min(known))
        return tokenizer


class DecoderState:
    """The decoder at work: what it remembers of each row, of which several may belong to one source.

    Args:
        model: The opened model.
        states: The encoder's output, shape `(sources, source_length, d_model)`.
        mask: 1 for kept source tokens, shape `(sources, source_length)`.
    """

    def __init__(self, model: OnnxModel, states: np.ndarray, mask: np.ndarray):
        self.model = model
        self.states = states
        self.mask = mask
        self.rows = np.arange(len(states))  # the source of each row
        self.memory: dict[str, np.ndarray] = {}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits after each of the new tokens: `(rows, n)` to `(rows, n, vocab_size)`."""
        memory = self.memory or {name: np.zeros(shape, np.float32) for name, shape in self.model.memory.items()}
        # A decoder that remembers does not look at the encoder's output, of which one number stands for all.
        states = np.zeros((len(tokens), 1, self.states.shape[2]), np.float32) if self.memory else self.states
        inputs = {
            "input_ids": tokens,
            "encoder_hidden_states": states,
            "encoder_attention_mask": self.mask,
            "use_cache_branch": np.array([bool(self.memory)]),
            **memory,
        }
        logits, *present = self.model.decoder.run(None, inputs)
        for name, value in zip(self.model.outputs[1:], present, strict=True):
            past = name.replace("present", "past_key_values", 1)
            if ".decoder." in name or past not in self.memory:  # of the encoder's output they are made only once
                self.memory[past] = value
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Logits after one more token of each row: `(rows,)` to `(rows, vocab_size)`."""
        return self.logits(tokens[:, None])[:, 0]

    def keep(self, rows: np.ndarray) -> None:
        """Row i now continues the one that was `rows[i]`."""
        same_sources = np.array_equal(self.rows[rows], self.rows)
        for name, value in self.memory.items():
            if ".decoder." in name or not same_sources:
                self.memory[name] = value[rows]
        if not same_sources:
            self.mask = self.mask[rows]
            self.rows = self.rows[rows]


def greedy_search(state: DecoderState, start: int, limits: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    """The most probable token at each step; rows leave the batch as they are finished."""
    results: list[list[int]] = [[] for _ in limits]
    rows = np.arange(len(limits))
    tokens = np.full(len(limits), start)
    for length in range(1, int(limits.max()) + 1):
        tokens = state.step(tokens).argmax(axis=-1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            results[row].append(token)
        (kept,) = np.nonzero(~(np.isin(tokens, ends) | (limits[rows] <= length)))
        if not len(kept):
            break
        if len(kept) < len(rows):
            state.keep(kept)
            rows, tokens = rows[kept], tokens[kept]
    return results


def beam_search(
    state: DecoderState,
    start: int,
    limits: np.ndarray,
    ends: np.ndarray,
    num_beams: int,
    num_best: int,
    divisor: Any,
    *,
    stop_at_once: bool,
    bound_at_limit: bool,
    exact: bool,
) -> list[list[tuple[list[int], float]]]:
    """Beam search; sources leave the batch as they are finished.

    Args:
        state: One row a source.
        start: What every hypothesis starts from.
        limits: Most tokens of a hypothesis, shape `(sources,)`.
        ends: Tokens that end one.
        num_beams: Hypotheses of each source.
        num_best: How many of them are wanted.
        divisor: What a log-probability of so many tokens is divided by.
        stop_at_once: End with `num_beams` complete hypotheses.
        bound_at_limit: Judge what a hypothesis may still reach by the divisor at the limit, not by that of now.
        exact: No hypothesis can exceed that judgement, so that those which nobody asks for need not be known.
    """
    candidates = max(2, 1 + len(ends)) * num_beams  # so many that `num_beams` of them go on
    sources = np.arange(len(limits))
    results: list[list[tuple[list[int], float]]] = [[] for _ in limits]
    complete: list[list[tuple[float, list[int]]]] = [[] for _ in limits]  # best first, at most num_beams
    width = 1  # hypotheses of each source: all start alike, and one of them is enough
    tokens = np.full(len(limits), start)
    running = np.zeros((len(limits), 1), np.float32)
    hypotheses: np.ndarray = np.zeros((len(limits), 1, 0), np.int64)

    for length in range(1, int(limits.max()) + 1):
        logits = state.step(tokens)
        vocab_size = logits.shape[1]
        logits += running.reshape(-1, 1) - log_of_sum(logits)[:, None]
        scores, index = largest(logits.reshape(len(sources), -1), min(candidates, width * vocab_size))
        parents, words = index // vocab_size, index % vocab_size
        at_limit = limits[sources] <= length
        is_end = np.isin(words, ends) | at_limit[:, None]
        share = divisor(length)

        for place, column in zip(*np.nonzero(is_end[:, :num_beams]), strict=True):
            if scores[place, column] > NEVER / 2:
                ended = [*hypotheses[place, parents[place, column]].tolist(), int(words[place, column])]
                complete[sources[place]].append((float(scores[place, column] / share), ended))
        for source in sources[is_end[:, :num_beams].any(axis=1)]:
            complete[source] = sorted(complete[source], key=lambda each: -each[0])[:num_beams]

        going_on = np.where(is_end, NEVER, scores)
        order = np.argsort(-going_on, axis=1, kind="stable")[:, :num_beams]
        running = np.take_along_axis(going_on, order, axis=1)
        chosen, words = np.take_along_axis(parents, order, axis=1), np.take_along_axis(words, order, axis=1)
        hypotheses = np.take_along_axis(hypotheses, chosen[:, :, None], axis=1)
        hypotheses = np.concatenate([hypotheses, words[:, :, None]], axis=2)

        bounds = running[:, 0] / (divisor(limits[sources]) if bound_at_limit else share)
        is_open = ~at_limit
        for place, source in enumerate(sources):
            have = [score for score, _ in complete[source]]
            if stop_at_once:
                is_open[place] &= len(have) < num_beams
            else:
                asked_for = num_best if exact else num_beams
                is_open[place] &= len(have) < asked_for or bounds[place] > have[asked_for - 1]
        (kept,) = np.nonzero(is_open)
        for source in sources[~is_open]:
            results[source] = [(ids, score) for score, ids in complete[source][:num_best]]
        if not len(kept):
            break
        rows = (np.arange(len(sources))[:, None] * width + chosen)[kept]
        state.keep(rows.flatten())
        width = rows.shape[1]
        sources, running, hypotheses, tokens = sources[kept], running[kept], hypotheses[kept], words[kept].flatten()
    return results


def log_of_sum(logits: np.ndarray) -> np.ndarray:
    """log(sum(exp(logits))) over the last axis."""
    most = logits.max(axis=-1)
    return most + np.log(np.exp(logits - most[..., None]).sum(axis=-1))


def largest(x: np.ndarray, k: int, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """The k largest numbers of each row in descending order, and where they stand, both of shape `(rows, k)`.

    They are looked for in the k blocks with the largest maxima, which must hold them.
    """
    rows, length = x.shape
    blocks = length // block
    index = None
    if blocks > 4 * k:
        maxima = x[:, : blocks * block].reshape(rows, blocks, block).max(axis=-1)
        best = np.argpartition(maxima, -k, axis=1)[:, -k:]
        index = (best[:, :, None] * block + np.arange(block)).reshape(rows, -1)
        rest = np.broadcast_to(np.arange(blocks * block, length), (rows, length - blocks * block))
        index = np.concatenate([index, rest], axis=1)
        x = np.take_along_axis(x, index, axis=1)
    places = np.argpartition(x, -k, axis=1)[:, -k:] if k < x.shape[1] else np.argsort(-x, axis=1)
    values = np.take_along_axis(x, places, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    values, places = np.take_along_axis(values, order, axis=1), np.take_along_axis(places, order, axis=1)
    return values, places if index is None else np.take_along_axis(index, places, axis=1)


def padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of unequal length as tokens and mask (1 token, 0 padding), both of shape `(rows, longest)`."""
    ids = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask


def batches(costs: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices in batches of like cost, the costliest first, of which rows x greatest cost is at most `most`."""
    batch: list[int] = []
    for index in sorted(range(len(costs)), key=lambda each: -costs[each]):
        if batch and (len(batch) + 1) * costs[batch[0]] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def main() -> None:
    """Translates standard input, line by line, with the model in the folder of this file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", default=os.path.dirname(os.path.abspath(__file__)), help="another model")
    parser.add_argument("--num_beams", type=at_least_one, help="default: the model's own")
    parser.add_argument("--length_penalty", type=float, help="default: the model's own")
    parser.add_argument("--max_new_tokens", type=at_least_one, help="default: the model's own")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    try:
        for text in OnnxModel(given.pop("folder")).translate(lines_of(sys.stdin.buffer), **given):
            sys.stdout.write(f"{text}\n")
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def at_least_one(text: str) -> int:
    """A whole number above 0, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def lines_of(file: Iterable[bytes]) -> Iterator[str]:
    """Lines of UTF-8 text; a byte order mark before them, and a carriage return at their ends, are dropped.

    Raises:
        ValueError: A line is not UTF-8.
    """
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input, line {number}: expected UTF-8 ({error.reason})") from None
        yield text.rstrip("\n").removesuffix("\r")


if __name__ == "__main__":
    main()
