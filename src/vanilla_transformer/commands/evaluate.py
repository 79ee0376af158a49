"""`vanilla-transformer evaluate`: BLEU and chrF with their signatures, and perplexity."""

import contextlib
import json
import os
import sys
from typing import Any

from transformers.utils import logging as transformers_logging

from vanilla_transformer.data import read_lines
from vanilla_transformer.evaluation import corpus_scores, perplexity
from vanilla_transformer.hub import add_evaluation, decoding_text
from vanilla_transformer.translation import load_translator, open_output, translate_lines
from vanilla_transformer_cli import evaluate_parser


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer evaluate --help`.

    Raises:
        ValueError: The files have unequal numbers of lines or no text, or what `read_lines`, `load_translator` and
            `corpus_scores` raise.
    """
    arguments = evaluate_parser().parse_args(argv)
    given = vars(arguments)
    transformers_logging.disable_progress_bar()
    outputs_named = [
        os.path.realpath(given[name]) for name in ("json", "hypothesis_output") if given.get(name, "-") != "-"
    ]
    inputs_named = [os.path.realpath(path) for path in (arguments.source, *arguments.reference)]
    if len(set(outputs_named)) < len(outputs_named) or set(outputs_named) & set(inputs_named):
        raise ValueError("--json, --hypothesis_output, --source and --reference must name different files.")
    if arguments.update_card and not os.path.isdir(arguments.model):
        raise ValueError(f"--update_card needs the model's folder, got {arguments.model}.")
    if "dataset_name" in given and not arguments.update_card:
        raise ValueError("--dataset_name is for --update_card, which is missing.")
    sources, references = read_test_set(arguments.source, arguments.reference)
    corpus_scores(sources, references, tokenize=arguments.tokenize)  # refuses a wrong --tokenize before the work
    with contextlib.ExitStack() as outputs:
        # Opened first: that they cannot be written is known before any work.
        json_output = outputs.enter_context(open_output(given["json"])) if "json" in given else None
        text_output = (
            outputs.enter_context(open_output(given["hypothesis_output"])) if "hypothesis_output" in given else None
        )
        model, tokenizer = load_translator(
            arguments.model,
            device=given.get("device"),
            dtype=arguments.dtype,
            revision=given.get("revision"),
            trust_remote_code=arguments.trust_remote_code,
        )
        settings = {"num_beams": given["num_beams"]} if "num_beams" in given else {}
        translations = translate_lines(
            model,
            tokenizer,
            sources,
            tokens_per_batch=arguments.tokens_per_batch,
            progress=sys.stderr.isatty(),
            name=arguments.source,
            num_return_sequences=1,
            **settings,
        )
        hypotheses = [best.text for best, *_ in translations]
        results: dict[str, Any] = {
            "model": arguments.model,
            "source": arguments.source,
            "references": arguments.reference,
            "segments": len(hypotheses),
            "num_beams": settings.get("num_beams") or model.generation_config.num_beams or 1,
            "dtype": arguments.dtype,
            **corpus_scores(hypotheses, references, tokenize=arguments.tokenize, lowercase=arguments.lowercase),
            "perplexity": perplexity(
                model, tokenizer, sources, references[0], tokens_per_batch=arguments.tokens_per_batch
            ),
        }
        if text_output is not None:
            text_output.writelines(text + "\n" for text in hypotheses)
        if json_output is not None:
            json_output.write(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    if arguments.update_card:
        add_evaluation(
            arguments.model,
            {
                "name": given.get("dataset_name", os.path.basename(arguments.source)),
                "decoding": decoding_text(model.generation_config, num_beams=settings.get("num_beams")),
                **{name: results[name] for name in ("segments", "dtype", "perplexity")},
                **{
                    metric: {name: results[metric][name] for name in ("score", "signature")}
                    for metric in ("bleu", "chrf")
                },
            },
        )
    if given.get("json") != "-" and given.get("hypothesis_output") != "-":
        print(readable(results))
    return 0


def read_test_set(source: str, references: list[str]) -> tuple[list[str], list[list[str]]]:
    """The lines of the source and of each reference file, as many in each.

    Raises:
        ValueError: A reference has another number of lines than the source, or the source has none.
    """
    if [source, *references].count("-") > 1:
        raise ValueError("only one of the files can be standard input ('-'), got it more than once.")
    sources = list(read_lines(source))
    lines = [list(read_lines(reference)) for reference in references]
    for reference, of_reference in zip(references, lines, strict=True):
        if len(of_reference) != len(sources):
            raise ValueError(
                f"{source} has {len(sources)} lines and {reference} has {len(of_reference)}; line i of a "
                "reference must be the translation of line i of the source."
            )
    if not sources:
        raise ValueError(f"{source} is empty; there is nothing to evaluate.")
    return sources, lines


def readable(results: dict[str, Any]) -> str:
    """The results as a few lines of text."""
    bleu, chrf = results["bleu"], results["chrf"]
    precisions = "/".join(f"{precision:.1f}" for precision in bleu["precisions"])
    return "\n".join(
        [
            f"segments    {results['segments']}",
            f"BLEU        {bleu['score']:.2f}  ({precisions}, brevity penalty {bleu['brevity_penalty']:.3f})",
            f"            {bleu['signature']}",
            f"chrF        {chrf['score']:.2f}",
            f"            {chrf['signature']}",
            f"perplexity  {results['perplexity']:.3f}  per target token, end of sentence counted",
        ]
    )
