"""`vanilla-transformer average`: the last checkpoints of a run as one model (Vaswani et al. 2017, section 6.1)."""

import json
import logging
from pathlib import Path

from vanilla_transformer.checkpoints import average_checkpoints, last_checkpoints
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.hub import TrainingRun, write_model_card
from vanilla_transformer_cli import average_parser


logger = logging.getLogger(__name__)

LAST = 5  # section 6.1: 5 for the base models, 20 for the big ones


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer average --help`.

    Raises:
        ValueError: `--last` or `--interval_minutes` beside `--checkpoints`, or what `last_checkpoints` and
            `average_checkpoints` raise.
    """
    arguments = average_parser().parse_args(argv)
    given = vars(arguments)
    if arguments.run is not None:
        checkpoints = last_checkpoints(
            arguments.run, given.get("last", LAST), interval_minutes=given.get("interval_minutes")
        )
    elif extra := [f"--{name}" for name in ("last", "interval_minutes") if name in given]:
        raise ValueError(f"{' and '.join(extra)} belongs to --run; --checkpoints names all that are averaged.")
    else:
        checkpoints = arguments.checkpoints
    average_checkpoints(checkpoints, arguments.output_dir)
    tell_of_average(arguments.output_dir, checkpoints)
    named = "\n".join(f"  {checkpoint}" for checkpoint in checkpoints)
    plural = "" if len(checkpoints) == 1 else "s"
    print(f"averaged {len(checkpoints)} checkpoint{plural}:\n{named}\nsaved to {arguments.output_dir}")
    return 0


def tell_of_average(folder: str, checkpoints: list[Path] | list[str]) -> None:
    """Writes record and card of the averaged model: those of the run that left the checkpoints, without its scores.

    Checkpoints of several runs, or of another package's model, say nothing of how the mean came to be.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != VanillaTransformerConfig.model_type:
        return
    runs = {Path(checkpoint).resolve().parent for checkpoint in checkpoints}
    run = TrainingRun()
    if len(runs) == 1:
        try:
            # The checkpoint knows how far the run was; what the run's folder says may be of an earlier end.
            run = TrainingRun.load(checkpoints[-1])
            if run == TrainingRun():
                run = TrainingRun.load(next(iter(runs)))
        except ValueError as error:
            logger.warning("the card will not tell of the training: %s", error)
    run.averaged = [Path(checkpoint).resolve().name for checkpoint in checkpoints]
    run.evaluations, run.kept_update = [], None
    write_model_card(folder, run)
