"""`vanilla-transformer average`: the last checkpoints of a run as one model (Vaswani et al. 2017, section 6.1)."""

from vanilla_transformer.checkpoints import average_checkpoints, last_checkpoints
from vanilla_transformer_cli import average_parser


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
    named = "\n".join(f"  {checkpoint}" for checkpoint in checkpoints)
    print(f"averaged {len(checkpoints)} checkpoints:\n{named}\nsaved to {arguments.output_dir}")
    return 0
