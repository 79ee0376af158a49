"""Trains rows of the paper's Table 3 on a corpus and prints the paper's figures beside the ones found.

    python scripts/ablations.py --rows base A_h1 B_dk16 --shrink 4 --output_dir runs/table3 \
        --train_source train.en --train_target train.de --validation_source val.en --validation_target val.de \
        --vocab_size 8000 --tokens_per_batch 4096 --max_steps 3600

Every flag that is not named below goes to `vanilla-transformer train`, the same for each row, so that all rows see the
same text, words and updates; the vocabulary is made once. Perplexity and BLEU are of the validation text. A row that
is done stays in OUTPUT_DIR/results.jsonl; the same command goes on where it was stopped, and more rows may be named.
Table 3 has the final models: give --save_strategy no --eval_strategy no for that, else `train` keeps the best by BLEU.
`--list` prints the paper's table with exact numbers of parameters, and trains nothing.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from vanilla_transformer_cli import (
    OneLineParser,
    exit_code_of,
    output_folder,
    while_read,
    whole_number,
)


SIZES = ("d_model", "d_ff", "d_k", "d_v")
# What `train` may be told otherwise when a run goes on, since no result depends on it.
MAY_CHANGE = {
    "cache_dir",
    "dataloader_num_workers",
    "disable_tqdm",
    "logging_steps",
    "overwrite_cache",
    "preprocessing_num_workers",
    "report_to",
    "save_total_limit",
}


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


def arguments_parser() -> argparse.ArgumentParser:
    """Flags of this script; all others are `train`'s."""
    parser = OneLineParser(
        prog="ablations.py",
        description="Trains rows of the paper's Table 3 on a corpus and prints the paper's figures beside the ones "
        "found. Flags that are not named here are those of vanilla-transformer train, the same for each row.",
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=["all"], help="presets; all means Table 3")
    parser.add_argument(
        "--shrink",
        type=whole_number,
        metavar="N",
        default=1,
        help="divide d_model, d_ff, d_k and d_v of every row; heads and layers stay, and so what a row is to base",
    )
    parser.add_argument("--output_dir", type=output_folder, metavar="D", help="for the models and results.jsonl")
    parser.add_argument("--vocab_size", type=whole_number, metavar="N", help="words of the joint vocabulary")
    parser.add_argument("--num_beams", type=whole_number, metavar="N", default=4, help="beams of the final BLEU")
    parser.add_argument("--list", action="store_true", help="print the paper's table and our counts, train nothing")
    return parser


def chosen_rows(names: Sequence[str]) -> list[str]:
    """The rows in the order of Table 3, each once; "all" stands for every row of it.

    Raises:
        ValueError: A name that is no preset.
    """
    from vanilla_transformer import list_presets
    from vanilla_transformer.presets import TABLE_3

    order = [*TABLE_3, *(name for name in list_presets() if name not in TABLE_3)]
    if unknown := [name for name in names if name != "all" and name not in order]:
        raise ValueError(f"--rows: unknown row {unknown[0]!r}; choose among all, {', '.join(order)}.")
    return [name for name in order if name in names or ("all" in names and name in TABLE_3)]


def row_overrides(row: str, shrink: int, given: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a row's configuration that differ from the paper's base, sizes divided.

    Args:
        row: A preset.
        shrink: What d_model, d_ff, d_k and d_v are divided by.
        given: NAME=VALUE of `--config_overrides`; where the row itself says otherwise, the row counts.

    Raises:
        ValueError: `shrink` does not divide a size, or `given` holds one.
    """
    from vanilla_transformer import VanillaTransformerConfig
    from vanilla_transformer.configuration_vanilla_transformer import PRESETS

    fields: dict[str, Any] = dict(override.partition("=")[::2] for override in given)
    if sizes := sorted(set(fields) & set(SIZES)):
        raise ValueError(f"--config_overrides {sizes[0]}: the rows differ in it; --shrink N divides it for all alike.")
    fields.update(PRESETS[row])
    if shrink > 1:
        config = VanillaTransformerConfig.from_preset(row)
        for name in SIZES:
            size = getattr(config, name)
            if size is not None and size % shrink:
                raise ValueError(f"--shrink {shrink} does not divide {name}={size} of row {row}; choose another.")
            if size is not None:
                fields[name] = size // shrink
    return fields


# ---------------------------------------------------------------------------------------------------------------------
# Training and measuring
# ---------------------------------------------------------------------------------------------------------------------


class Ablations:
    """A set of rows on one corpus, with one folder for all.

    Args:
        options: This script's own arguments.
        flags: The others, for `train`.

    Raises:
        ValueError: What cannot be trained, or a folder that holds results of other settings.
        OSError: A path that does not exist or cannot be used.
    """

    def __init__(self, options: argparse.Namespace, flags: list[str]):
        from vanilla_transformer.commands import train

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("this script trains one row after the other in one process; start it without a launcher.")
        if options.output_dir is None:
            raise ValueError("--output_dir is missing: the folder for the models and results.jsonl.")
        known = set(vars(train.TrainParser().parse_args([])))
        given = train.given_settings(flags, known)
        recipe = train.read_recipe(given["recipe"]) if given.get("recipe") else {}
        for name in ("preset", "model", "resume_from_checkpoint"):
            if name in given or (name != "preset" and name in recipe):
                raise ValueError(f"--{name} does not go with --rows: each row is a new model, and goes on by itself.")
        self.options, self.flags = options, flags
        self.rows = chosen_rows(options.rows)
        self.folder = Path(options.output_dir)
        self.results_file = self.folder / "results.jsonl"
        words = ["--vocab_size", str(options.vocab_size)] if options.vocab_size else []
        # Everything that is wrong with the flags is told here, before anything is read or written.
        self.arguments, self.training_arguments = train.parse(
            [*flags, *words, "--preset", "base", "--output_dir", str(self.folder / "tokenizer.partial")]
        )
        if not (self.arguments.validation_source or self.arguments.validation_split):
            raise ValueError("--validation_source and --validation_target, or --validation_split, are missing.")
        self.overrides = {row: self.checked_overrides(row) for row in self.rows}
        settings = {**recipe, **given, "shrink": options.shrink, "num_beams": options.num_beams}
        settings["vocab_size"] = self.arguments.vocab_size
        settings = {name: value for name, value in settings.items() if name not in MAY_CHANGE}
        self.settings = json.loads(json.dumps(settings, default=str))

    def checked_overrides(self, row: str) -> dict[str, Any]:
        """The row's fields, after a look at whether they make a configuration."""
        from vanilla_transformer.commands.train import TrainArguments, new_config

        fields = row_overrides(row, self.options.shrink, self.arguments.config_overrides)
        arguments = TrainArguments(preset=row, config_overrides=[f"{name}={fields[name]}" for name in fields])
        try:
            new_config(arguments, vocab_size=max(self.arguments.vocab_size, 3))
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error
        return fields

    def settle_folder(self) -> None:
        """Writes the settings into a new folder, and compares them with those of an old one."""
        path = self.folder / "settings.json"
        if path.exists():
            (old,) = read_objects(path, path.read_text(encoding="utf-8"))
            for name in sorted(set(old) | set(self.settings)):
                if old.get(name) != self.settings.get(name):
                    raise ValueError(
                        f"{self.folder} holds results with {name}={old.get(name)}, now it is "
                        f"{name}={self.settings.get(name)}; give another --output_dir."
                    )
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(f"--output_dir {self.folder} holds something else; give an empty or a new folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.settings, indent=2) + "\n")

    def results(self) -> dict[str, dict[str, Any]]:
        """What is done, by row."""
        if not self.results_file.exists():
            return {}
        lines = self.results_file.read_text(encoding="utf-8").splitlines()
        return {result["row"]: result for result in read_objects(self.results_file, *lines)}

    def run(self) -> None:
        """Trains and measures each row that is not done yet."""
        from transformers.utils.logging import disable_progress_bar

        from vanilla_transformer.commands.train import open_corpora

        self.settle_folder()
        if not sys.stderr.isatty():
            disable_progress_bar()
        missing = [row for row in self.rows if row not in self.results()]
        if not missing:
            return
        training, validation = cast(tuple[Any, Any], open_corpora(self.arguments))
        sources, targets = ([text or "" for text in validation[side]] for side in ("source", "target"))
        tokenizer = self.arguments.tokenizer or self.shared_tokenizer(training)
        for number, row in enumerate(missing, 1):
            print(f"row {row}, {number} of {len(missing)}", file=sys.stderr)
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the table's
                self.train(row, str(tokenizer))
            result = self.measure(row, sources, targets)
            done = [*self.results().values(), result]
            write_whole(self.results_file, "".join(json.dumps(each) + "\n" for each in done))

    def shared_tokenizer(self, training: Any) -> Path:
        """The folder of the vocabulary, made from the training text where it is not there yet."""
        from vanilla_transformer.commands.train import shared_tokenizer

        folder = self.folder / "tokenizer"
        if not folder.exists():
            partial = Path(str(self.training_arguments.output_dir))
            shutil.rmtree(partial, ignore_errors=True)
            shared_tokenizer(self.arguments, self.training_arguments, training)
            partial.rename(folder)
        return folder

    def train(self, row: str, tokenizer: str) -> None:
        """Trains a row as `vanilla-transformer train` does, from its last whole checkpoint where there is one."""
        from vanilla_transformer.commands import train
        from vanilla_transformer.training import last_whole_checkpoint

        folder = self.folder / row
        goes_on = last_whole_checkpoint(folder) is not None
        if not goes_on:
            shutil.rmtree(folder, ignore_errors=True)  # stopped before its first checkpoint or before it was measured
        overrides = [f"{name}={value}" for name, value in self.overrides[row].items()]
        train.main(
            [
                *self.flags,
                *(["--config_overrides", *overrides] if overrides else []),
                *(["--resume_from_checkpoint", "true"] if goes_on else []),
                *("--preset", row, "--tokenizer", tokenizer, "--output_dir", str(folder)),
            ]
        )

    def measure(self, row: str, sources: list[str], targets: list[str]) -> dict[str, Any]:
        """Perplexity and BLEU of the validation text, with the paper's decoding."""
        from vanilla_transformer.evaluation import corpus_scores, perplexity
        from vanilla_transformer.translation import load_translator, translate_lines

        folder = self.folder / row
        model, tokenizer = load_translator(str(folder), device=str(self.training_arguments.device))
        beams = {"num_beams": self.options.num_beams}
        found = translate_lines(model, tokenizer, sources, num_return_sequences=1, **beams)
        scores = corpus_scores([best.text for best, *_ in found], [targets])
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return {
            "row": row,
            "parameters": model.num_parameters(),
            "perplexity": perplexity(model, tokenizer, sources, targets),
            "bleu": scores["bleu"]["score"],
            "signature": scores["bleu"]["signature"],
            "chrf": scores["chrf"]["score"],
            "updates": state["global_step"],
            "vocabulary": len(tokenizer),
            "segments": len(sources),
        }

    def page(self) -> str:
        """The table of what is done, with the settings in words."""
        results = self.results()
        first = next(iter(results.values()))
        shape = shapes_in_words(self.options.shrink)
        if overrides := self.arguments.config_overrides:
            shape += f"; {', '.join(overrides)} where the row does not say otherwise"
        lines = [
            f"Ours: {shape}; {first['updates']:,} updates, vocabulary {first['vocabulary']:,}; validation text of "
            f"{first['segments']:,} lines, beam {self.options.num_beams}, {first['signature']}.",
            "Paper: English to German, newstest2013, 100,000 updates (big 300,000); Table 3.",
            "",
            *results_table(results),
        ]
        if "base" not in results:
            lines += ["", "Differences from base want the row base: add --rows base."]
        return "\n".join(lines)


def shapes_in_words(shrink: int) -> str:
    """Whether the sizes are the paper's."""
    if shrink == 1:
        return "shapes as in the paper"
    return f"SHRUNK: d_model, d_ff, d_k and d_v are those of the paper divided by {shrink}"


def read_objects(path: Path, *texts: str) -> list[dict[str, Any]]:
    """JSON objects out of a file of ours.

    Raises:
        ValueError: One of the texts is something else.
    """
    try:
        found = [json.loads(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}); mend it, or give another --output_dir.") from error
    if not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{path} is broken (expected JSON objects); mend it, or give another --output_dir.")
    return found


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is seen whole or not at all."""
    from vanilla_transformer.translation import open_output

    with open_output(str(path)) as file:
        file.write(text)


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, columns aligned, all but the first to the right."""
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    aligned = [
        [cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in (head, *body))
    ]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (aligned[0], rules, *aligned[1:])]


def results_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Ours beside the paper's, both with their differences from base; rows in the order of Table 3."""
    from vanilla_transformer.presets import TABLE_3

    base, paper_base = results.get("base"), TABLE_3["base"]
    body = []
    for row in chosen_rows(list(results)):
        ours, paper = results[row], TABLE_3.get(row)
        cells = [row, f"{ours['parameters']:,}", f"{ours['perplexity']:.2f}", f"{ours['bleu']:.1f}"]
        if base:
            cells += [
                f"{ours['perplexity'] - base['perplexity']:+.2f}",
                f"{ours['bleu'] - base['bleu']:+.1f}",
            ]
        else:
            cells += ["", ""]
        cells += paper_cells(row)
        if paper is not None:
            cells += [f"{paper.perplexity - paper_base.perplexity:+.2f}", f"{paper.bleu - paper_base.bleu:+.1f}"]
        else:
            cells += ["", ""]
        body.append(cells)
    ours_head = ["row", "parameters", "PPL", "BLEU", "PPL - base", "BLEU - base"]
    paper_head = ["paper: 10^6", "PPL", "BLEU", "PPL - base", "BLEU - base"]
    return table([*ours_head, *paper_head], body)


def paper_cells(row: str) -> list[str]:
    """Parameters in millions, perplexity and BLEU as Table 3 prints them; empty for a preset that is not in it."""
    from vanilla_transformer.presets import TABLE_3

    paper = TABLE_3.get(row)
    if paper is None:
        return ["", "", ""]
    return [str(paper.parameters_in_millions or ""), f"{paper.perplexity:.2f}", f"{paper.bleu:.1f}"]


def preset_table(rows: Sequence[str], vocab_size: int, shrink: int = 1) -> list[str]:
    """The exact number of parameters of each row beside the paper's figures."""
    from vanilla_transformer import VanillaTransformerConfig
    from vanilla_transformer.presets import parameter_count

    body = []
    for row in rows:
        config = VanillaTransformerConfig.from_preset(row, **row_overrides(row, shrink), vocab_size=vocab_size)
        body.append([row, f"{parameter_count(config):,}", *paper_cells(row)])
    return table(["row", "parameters", "paper: 10^6", "PPL", "BLEU"], body)


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, flags: list[str]) -> None:
    """Prints a table, after training what it wants."""
    if options.list:
        from vanilla_transformer.presets import PAPER_VOCABULARY

        if flags:
            raise ValueError(f"--list trains nothing and knows no {flags[0]}.")
        vocab_size = options.vocab_size or PAPER_VOCABULARY
        print(f"Parameters at {vocab_size:,} words, {shapes_in_words(options.shrink)}; Table 3 of the paper.\n")
        print("\n".join(preset_table(chosen_rows(options.rows), vocab_size, options.shrink)))
        return
    ablations = Ablations(options, flags)
    ablations.run()
    print(ablations.page())


def main(argv: list[str] | None = None) -> int:
    """Runs the script; returns the exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    parser = arguments_parser()
    options, flags = parser.parse_known_args(argv)
    again = "interrupted; the same command goes on from here"
    return exit_code_of(parser.prog, functools.partial(run, options, flags), interrupted=again)


if __name__ == "__main__":
    sys.exit(while_read(main))
