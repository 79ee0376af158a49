"""`vanilla-transformer score`: log-probabilities of given translations."""

import os
import sys
from itertools import tee
from typing import Any

from transformers.utils import logging as transformers_logging

from vanilla_transformer.data import read_lines
from vanilla_transformer.evaluation import score_pairs
from vanilla_transformer.translation import json_line, load_translator, open_output, ranking_penalty
from vanilla_transformer_cli import score_parser


WINDOW = 10000  # pairs sorted by length together


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer score --help`.

    Raises:
        ValueError: Both sides are standard input, the files have unequal numbers of lines, the output is one of them,
            a flag of one output format stands beside the other, or what `read_lines`, `load_translator` and
            `score_pairs` raise.
    """
    arguments = score_parser().parse_args(argv)
    given = vars(arguments)
    as_json = arguments.output_format == "jsonl"
    if arguments.token_probabilities and not as_json:
        raise ValueError("--token_probabilities needs --output_format jsonl; text has no column for them.")
    if arguments.normalized and as_json:
        raise ValueError("--normalized chooses the number of --output_format text; jsonl has both.")
    check_files(arguments.source, arguments.target, arguments.output)
    transformers_logging.disable_progress_bar()
    # Opened first: that the output cannot be written is known before any work.
    with open_output(arguments.output) as output:
        model, tokenizer = load_translator(
            arguments.model,
            device=given.get("device"),
            dtype=arguments.dtype,
            revision=given.get("revision"),
            trust_remote_code=arguments.trust_remote_code,
        )
        settings: Any = model.generation_config
        penalty = ranking_penalty(
            given.get("length_penalty", settings.length_penalty),
            given.get("length_penalty_type", getattr(settings, "length_penalty_type", None)),
        )
        names = ["standard input" if path == "-" else path for path in (arguments.source, arguments.target)]
        sources, targets = tee(read_lines(arguments.source)), tee(read_lines(arguments.target))
        scores = score_pairs(
            model,
            tokenizer,
            sources[0],
            targets[0],
            tokens_per_batch=arguments.tokens_per_batch,
            window=WINDOW,
            progress=sys.stderr.isatty() and not (arguments.output == "-" and sys.stdout.isatty()),
            names=(names[0], names[1]),
        )
        # tee() holds what was read and is not yet scored.
        for pair, source, target in zip(scores, sources[1], targets[1], strict=False):
            length = len(pair.token_ids)
            score = pair.log_prob / max(1, length) ** penalty
            if as_json:
                record: dict[str, Any] = {"source": source, "target": target, "log_probability": pair.log_prob}
                record |= {"length": length, "score": score}
                if arguments.token_probabilities:
                    record["tokens"] = tokenizer.convert_ids_to_tokens(pair.token_ids)
                    record["token_log_probabilities"] = pair.token_log_probs
                output.write(json_line(record) + "\n")
            else:
                output.write(f"{score if arguments.normalized else pair.log_prob:.6f}\n")
    return 0


def check_files(source: str, target: str, output: str) -> None:
    """Raises where the files cannot be scored, before the model is opened.

    Raises:
        ValueError: Both are standard input, the output is one of them, or they have unequal numbers of lines (which is
            found out later where one of them is standard input) or text that is not UTF-8.
    """
    if source == target == "-":
        raise ValueError("only one of --source and --target can be standard input ('-'), got it twice.")
    if output != "-" and os.path.realpath(output) in [os.path.realpath(path) for path in (source, target)]:
        raise ValueError("--output, --source and --target must name different files.")
    if "-" not in (source, target) and os.path.isfile(source) and os.path.isfile(target):
        counts = [sum(1 for _ in read_lines(path)) for path in (source, target)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; line i of the target must be the "
                "translation of line i of the source."
            )
