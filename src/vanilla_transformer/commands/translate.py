"""`vanilla-transformer translate`: line i out belongs to line i in."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data import read_lines
from vanilla_transformer.resumable import (
    identity_of_model,
    local_device,
    process_number,
    warn_if_alone,
    write_in_parts,
)
from vanilla_transformer.translation import Hypothesis, json_line, load_translator, open_output, translate_lines
from vanilla_transformer_cli import translate_parser


GENERATION_ARGUMENTS = ("num_beams", "length_penalty", "length_penalty_type", "max_new_tokens")


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer translate --help`.

    Raises:
        ValueError: More translations of a line are asked for than there are beams, token probabilities as text, an
            argument of the other backend, or what `read_lines`, `load_translator`, `load_ctranslate2`,
            `load_onnx`, `translate_lines` and `write_in_parts` raise.
    """
    arguments = translate_parser().parse_args(argv)
    given = vars(arguments)
    if arguments.token_probabilities and arguments.output_format != "jsonl":
        raise ValueError("--token_probabilities needs --output_format jsonl; text has no column for them.")
    transformers_logging.disable_progress_bar()
    warn_if_alone()
    in_parts = arguments.resumable or process_number()[1] > 1
    if in_parts:
        translate_in_parts(arguments)
        return 0
    # Opened first: that the output cannot be written is known before any work.
    with open_output(arguments.output) as output:
        at_terminal = arguments.input == "-" and sys.stdin is not None and sys.stdin.isatty()
        window = given.get("window", 1 if at_terminal else 10000)
        progress = sys.stderr.isatty() and not at_terminal and not (arguments.output == "-" and sys.stdout.isatty())
        translator = Translator(arguments)
        answers = translator.lines(read_lines(arguments.input), window=window, progress=progress)
        for number, answer in enumerate(answers, 1):
            output.writelines(f"{line}\n" for line in answer)
            if number % window == 0:
                output.flush()
    return 0


def translate_in_parts(arguments: argparse.Namespace) -> None:
    """Translates the input file in parts, see `vanilla_transformer.resumable`.

    Raises:
        ValueError, OSError: See `write_in_parts`.
    """
    ignored = ("input", "output", "model", "device", "tokens_per_batch", "window", "resumable")
    settings = {name: value for name, value in vars(arguments).items() if name not in ignored}
    settings["model"] = identity_of_model(arguments.model, vars(arguments).get("revision"))
    translators: list[Translator] = []  # opened with the first part that is to be done

    def work(lines: list[str], first_line: int) -> Iterator[str]:
        if not translators:
            translators.append(Translator(arguments))
        progress = sys.stderr.isatty() and process_number()[0] == 0
        for answer in translators[0].lines(lines, window=len(lines), first_line=first_line, progress=progress):
            yield from answer

    write_in_parts(arguments.input, arguments.output, settings, work)


class Translator:
    """What the arguments of the command ask for, opened."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        given = vars(arguments)
        self.as_json = arguments.output_format == "jsonl"
        self.model, self.tokenizer = open_translator(arguments)
        self.settings = {name: given[name] for name in GENERATION_ARGUMENTS if name in given}
        own = VanillaTransformerConfig.model_type
        of_transformers = isinstance(self.model, PreTrainedModel) and self.model.config.model_type != own
        if of_transformers and self.settings.pop("length_penalty_type", "hub") != "hub":
            raise ValueError(
                f"--length_penalty_type gnmt is for models of this package; {arguments.model} holds a "
                f"{type(self.model).__name__}, which knows length ** P only."
            )
        num_beams = self.settings.get("num_beams") or self.model.generation_config.num_beams or 1
        if arguments.n_best > num_beams:
            raise ValueError(
                f"--n_best {arguments.n_best} needs as many beams, but there are {num_beams}; add --num_beams "
                f"{arguments.n_best}."
            )

    def lines(
        self, lines: Iterable[str], *, window: int, first_line: int = 1, progress: bool = False
    ) -> Iterator[list[str]]:
        """The lines of output for each line of the input."""
        arguments = self.arguments
        sources: Iterator[str] = iter(())
        if self.as_json:
            lines, sources = tee(lines)  # which holds what is read and not yet answered
        translations = translate_lines(
            self.model,
            self.tokenizer,
            lines,
            tokens_per_batch=arguments.tokens_per_batch,
            window=window,
            progress=progress,
            first_line=first_line,
            name="standard input" if arguments.input == "-" else arguments.input,
            scores=arguments.scores or self.as_json,
            num_return_sequences=arguments.n_best,
            **self.settings,
        )
        for number, hypotheses in enumerate(translations, first_line):
            if self.as_json:
                tokenizer = self.tokenizer if arguments.token_probabilities else None
                yield [json_line(as_record(next(sources), hypotheses, tokenizer))]
            else:
                yield list(formatted(number, hypotheses, arguments.n_best, arguments.scores))


def open_translator(arguments: argparse.Namespace) -> tuple[Any, PreTrainedTokenizerBase]:
    """What has `generate()` in the backend that was asked for, and the tokenizer.

    Raises:
        ValueError: An argument of the other backend.
    """
    given = vars(arguments)
    options = {
        "device": given.get("device") or local_device(),
        "revision": given.get("revision"),
        "trust_remote_code": arguments.trust_remote_code,
    }
    if arguments.backend != "ctranslate2" and "compute_type" in given:
        instead = "for torch give --dtype" if arguments.backend == "torch" else "onnx computes as the model is stored"
        raise ValueError(f"--compute_type is of --backend ctranslate2; {instead}.")
    if arguments.backend == "torch":
        return load_translator(arguments.model, dtype=arguments.dtype, **options)
    if arguments.dtype != "float32":
        instead = "onnx computes as the model is stored"
        if arguments.backend == "ctranslate2":
            instead = "for ctranslate2 give --compute_type"
        raise ValueError(f"--dtype is of --backend torch; {instead}.")
    if arguments.backend == "onnx":
        from vanilla_transformer.convert.onnx import load_onnx

        return load_onnx(arguments.model, **options)
    from vanilla_transformer.convert.ctranslate2 import load_ctranslate2

    return load_ctranslate2(arguments.model, compute_type=given.get("compute_type", "default"), **options)


def as_record(source: str, hypotheses: list[Hypothesis], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What JSON lines say of one line of the input; with a tokenizer also of each token."""
    records = []
    for hypothesis in hypotheses:
        record: dict[str, Any] = {
            "text": hypothesis.text,
            "log_probability": hypothesis.log_prob,
            "length": len(hypothesis.token_ids),
            "score": hypothesis.score,
        }
        if tokenizer is not None:
            record["tokens"] = tokenizer.convert_ids_to_tokens(hypothesis.token_ids)
            record["token_log_probabilities"] = hypothesis.token_log_probs
        records.append(record)
    return {"source": source, "hypotheses": records}


def formatted(number: int, hypotheses: list[Hypothesis], n_best: int, scores: bool) -> Iterator[str]:
    """The lines of output for line `number` of the input; a blank one has its one translation `n_best` times."""
    if len(hypotheses) < n_best:
        hypotheses = hypotheses[:1] * n_best
    for hypothesis in hypotheses:
        if scores:
            yield (
                f"{number}\t{hypothesis.score:.6f}\t{hypothesis.log_prob:.6f}\t{len(hypothesis.token_ids)}\t"
                f"{hypothesis.text}"
            )
        elif n_best > 1:
            yield f"{number}\t{hypothesis.text}"
        else:
            yield hypothesis.text
