"""BLEU of a model against the number of attention heads that it keeps.

    python scripts/prune_curve.py --model runs/en-de --source val.en --target val.de \
        --test_source test.en --test_reference test.de --output_dir runs/en-de-heads

Heads are ranked once, by their importance on --source and --target (vanilla_transformer/pruning.py), and the least
important go first, without any training afterwards (Michel et al. 2019, section 3). The same with heads that go in
random order stands beside it: what a ranking is worth is the space between the two. OUTPUT_DIR gets curve.json and
curve.png.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vanilla_transformer_cli import (
    OneLineParser,
    exit_code_of,
    input_file,
    model_name,
    output_folder,
    while_read,
    whole_number,
)


ORDERS = ("importance", "layer_norm", "random")


def arguments_parser() -> argparse.ArgumentParser:
    """The flags of this script."""
    parser = OneLineParser(
        prog="prune_curve.py",
        description="Takes more and more heads out of a model, the least important ones first, and measures BLEU.",
    )
    needed: dict[str, Any] = {"required": True, "default": argparse.SUPPRESS}
    parser.add_argument("--model", type=model_name, metavar="M", help="folder, or name on the Hub", **needed)
    for name, text in {
        "source": "source text to measure importance on",
        "target": "its translation",
        "test_source": "source text to measure BLEU on",
        "test_reference": "its translation",
    }.items():
        parser.add_argument(f"--{name}", type=input_file, metavar="F", help=text, **needed)
    parser.add_argument("--output_dir", type=output_folder, metavar="D", help="for curve.json and curve.png", **needed)
    parser.add_argument("--points", type=whole_number, metavar="N", default=8, help="numbers of heads to try")
    parser.add_argument(
        "--orders", nargs="+", choices=ORDERS, default=["importance", "random"], help="which heads go first"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the random order")
    parser.add_argument(
        "--num_beams", type=whole_number, metavar="N", default=argparse.SUPPRESS, help="(default: the model's own)"
    )
    parser.add_argument("--tokens_per_batch", type=whole_number, metavar="N", default=2048, help="of importance")
    return parser


def counts(least: int, most: int, points: int) -> list[int]:
    """Numbers of heads from all down to one for each attention, in even steps.

    Args:
        least: Attentions of the model.
        most: Heads that it has.
        points: How many; fewer where there are not so many.
    """
    steps = max(1, min(points, most - least + 1) - 1)
    return sorted({round(most - (most - least) * step / steps) for step in range(steps + 1)}, reverse=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """BLEU, heads and parameters of each point of each order."""
    from vanilla_transformer.data import read_parallel
    from vanilla_transformer.evaluation import corpus_scores
    from vanilla_transformer.presets import parameter_count
    from vanilla_transformer.pruning import (
        attentions_of,
        comparable_across_layers,
        head_importance,
        heads_without_the_least,
        prune_heads,
        pruned_heads_of,
    )
    from vanilla_transformer.translation import load_translator, translate_lines

    sources, targets = read_parallel(options.source, options.target)
    test_sources, references = read_parallel(options.test_source, options.test_reference)
    model, tokenizer = load_translator(options.model)
    config: Any = model.config
    beams = {"num_beams": options.num_beams} if "num_beams" in options else {}
    heads = head_importance(
        model,  # type: ignore[arg-type]
        tokenizer,
        sources,
        targets,
        tokens_per_batch=options.tokens_per_batch,
        progress=sys.stderr.isatty(),
    )
    chance = random.Random(options.seed)
    ranked = {
        "layer_norm": comparable_across_layers(heads),
        "importance": heads,
        "random": [replace(head, importance=chance.random()) for head in heads],
    }
    results: dict[str, Any] = {
        **{name: vars(options).get(name) for name in ("model", "source", "target", "test_source", "test_reference")},
        **{"num_beams": options.num_beams if beams else None, "seed": options.seed, "orders": {}},
    }
    whole: dict[str, Any] | None = None  # the same in each order
    for order in options.orders:
        points = results["orders"][order] = []
        for kept in counts(len(attentions_of(model)), len(heads), options.points):
            if kept < len(heads) or whole is None:
                pruned = pruned_heads_of(config, heads_without_the_least(ranked[order], kept))
                smaller = prune_heads(model, pruned)  # type: ignore[type-var]
                translations = translate_lines(smaller, tokenizer, test_sources, num_return_sequences=1, **beams)
                scores = corpus_scores([best.text for best, *_ in translations], [references])
                point = {"heads": kept, "parameters": parameter_count(smaller.config), "bleu": scores["bleu"]["score"]}
                results["signature"] = scores["bleu"]["signature"]
            else:
                point = whole
            whole = whole or point
            points.append(point)
            print(f"{order:12} {kept:5} heads  {point['parameters']:>12,} parameters  BLEU {point['bleu']:6.2f}")
    return results


def draw(results: dict[str, Any], path: Path) -> None:
    """The curves as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = {"layer_norm": "least important first, by layer", "importance": "least important first"}
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for order, points in results["orders"].items():
        heads, bleu = [point["heads"] for point in points], [point["bleu"] for point in points]
        axes.plot(heads, bleu, marker="o", markersize=3, label=names.get(order, f"in {order} order"))
    axes.invert_xaxis()
    axes.set_xlabel("heads kept")
    axes.set_ylabel("BLEU")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def run(options: argparse.Namespace) -> None:
    """Measures, writes and draws."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with contextlib.suppress(FileExistsError):
        os.makedirs(options.output_dir)
    folder = Path(options.output_dir)
    results = measure(options)
    (folder / "curve.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, folder / "curve.png")
    print(f"saved to {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns the exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    parser = arguments_parser()
    return exit_code_of(parser.prog, functools.partial(run, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(while_read(main))
