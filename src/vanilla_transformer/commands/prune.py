"""`vanilla-transformer prune`: which attention heads matter, and a smaller model without the others."""

import contextlib
import dataclasses
import json
import os
import sys
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from vanilla_transformer.convert import new_folder
from vanilla_transformer.data import read_parallel
from vanilla_transformer.hub import record_of, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
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
from vanilla_transformer.translation import load_translator, open_output
from vanilla_transformer.visualization import PICTURE_FORMATS, check_picture_path, importance_figure, save_figure
from vanilla_transformer_cli import prune_parser


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer prune --help`.

    Raises:
        ValueError: Arguments that do not fit each other or the model, or what `read_parallel`, `load_translator` and
            `head_importance` raise.
        ImportError: A picture is wanted, and matplotlib is not installed.
    """
    arguments = prune_parser().parse_args(argv)
    given = vars(arguments)
    check_arguments(given)
    transformers_logging.disable_progress_bar()
    sources, targets = read_parallel(arguments.source, arguments.target)
    with contextlib.ExitStack() as outputs:
        # Opened first: that it cannot be written is known before any work.
        json_output = outputs.enter_context(open_output(given["json"])) if "json" in given else None
        model, tokenizer = load_translator(
            arguments.model,
            device=given.get("device"),
            dtype="auto",  # the smaller model is stored as this one is
            revision=given.get("revision"),
        )
        if not isinstance(model, VanillaTransformerForConditionalGeneration):
            raise ValueError(f"{arguments.model} holds a {type(model).__name__}; prune takes models of this package.")
        total = sum(each.num_heads for each in attentions_of(model).values())
        heads_kept = None if arguments.importance_only else count_of_heads(arguments, total, len(attentions_of(model)))
        stored = model.dtype
        heads = head_importance(
            model.float() if stored != torch.float64 else model,
            tokenizer,
            sources,
            targets,
            tokens_per_batch=arguments.tokens_per_batch,
            progress=sys.stderr.isatty(),
        )
        ranked = comparable_across_layers(heads) if arguments.ranking == "layer_norm" else heads
        kept = ranked if heads_kept is None else heads_without_the_least(ranked, heads_kept)
        if json_output is not None:
            json_output.write(json.dumps(results_of(arguments, heads, ranked, kept), indent=2) + "\n")
        if "picture" in given:
            left = {(each.kind, each.layer, each.head) for each in kept}
            taken_out = [place for each in heads if (place := (each.kind, each.layer, each.head)) not in left]
            figure = importance_figure([dataclasses.astuple(each) for each in heads], taken_out)
            save_figure(figure, given["picture"])
        meaning = "" if heads_kept is None else "; [ ] is taken out, each attention keeps at least one"
        print(f"importance of each head, nats a target token{meaning}")
        print(importance_table(heads, kept))
        if heads_kept is not None:
            smaller = prune_heads(model, pruned_heads_of(model.config, kept))
            smaller.to(dtype=stored)  # type: ignore[call-arg]
            run = record_of(arguments.model)
            run.evaluations, run.kept_update = [], None
            with new_folder(arguments.output_dir) as folder:
                smaller.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                write_model_card(folder, run, model_id=os.path.basename(os.path.realpath(arguments.output_dir)))
            before, after = model.num_parameters(), smaller.num_parameters()
            print(
                f"{heads_kept} of {total} heads kept, {after:,} of {before:,} parameters; saved to "
                f"{arguments.output_dir}"
            )
    return 0


def check_arguments(given: dict[str, Any]) -> None:
    """Raises ValueError, or ImportError, for what cannot be, before any work."""
    if given["importance_only"] == ("output_dir" in given):
        wants = "goes with --heads_kept and --keep_fraction, not with --importance_only, which writes no model."
        raise ValueError(f"--output_dir {wants}" if "output_dir" in given else "--output_dir is missing.")
    if given["keep_fraction"] is not None and not 0 < given["keep_fraction"] <= 1:
        raise ValueError(f"--keep_fraction must lie above 0 and be at most 1, got {given['keep_fraction']}.")
    files = [given[name] for name in ("source", "target", "json", "picture") if name in given]
    named = [os.path.realpath(path) for path in files]
    if len(set(named)) < len(named):
        raise ValueError("--source, --target, --json and --picture must name different files.")
    if "-" in files:
        raise ValueError("prune reads and writes files; '-' is not one.")
    if "picture" in given:
        if os.path.splitext(given["picture"])[1].lower() not in PICTURE_FORMATS:
            raise ValueError(f"--picture must end in one of {', '.join(PICTURE_FORMATS)}, got {given['picture']}.")
        check_picture_path(given["picture"])
        importance_figure([("encoder", 0, 0, 1.0)])  # without matplotlib it fails now


def count_of_heads(arguments: Any, total: int, least: int) -> int:
    """How many heads are to stay, at least one for each of `least` attentions.

    Raises:
        ValueError: More than the model has, or fewer than it must keep.
    """
    count = arguments.heads_kept
    if count is None:
        count = round(arguments.keep_fraction * total)
    if not least <= count <= total:
        given = f"--heads_kept {count}" if arguments.heads_kept else f"--keep_fraction {arguments.keep_fraction}"
        raise ValueError(
            f"{given} is {count} heads; the model has {total}, and {least} of them, one for each attention, must stay."
        )
    return count


def results_of(arguments: Any, heads: list[Head], ranked: list[Head], kept: list[Head]) -> dict[str, Any]:
    """What `--json` writes."""
    left = set(kept)
    return {
        "model": arguments.model,
        "source": arguments.source,
        "target": arguments.target,
        "ranking": arguments.ranking,
        "heads": [
            {**dataclasses.asdict(head), "rank_by": rank.importance, "kept": rank in left}
            for head, rank in zip(heads, ranked, strict=True)
        ],
    }
