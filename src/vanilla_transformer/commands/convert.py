"""`vanilla-transformer convert`: what others trained becomes a model of this package, and the reverse."""

from transformers.utils import logging as transformers_logging

from vanilla_transformer.convert import FORMATS, convert_from, convert_to
from vanilla_transformer_cli import convert_parser


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer convert --help`.

    Raises:
        ValueError, OSError, ImportError: See `vanilla_transformer.convert`.
    """
    arguments = convert_parser().parse_args(argv)
    given = vars(arguments)
    transformers_logging.disable_progress_bar()
    options = {name: given[name] for name in ("revision", "quantization") if name in given}
    if "quantization" in options and arguments.write not in ("ctranslate2", "onnx"):
        raise ValueError("--quantization is for --to ctranslate2 and --to onnx.")
    if arguments.read is not None:
        differences = convert_from(arguments.read, arguments.model, arguments.output_dir, **options)
        print(f"{arguments.model}, {FORMATS[arguments.read].title}, is now a model of this package: ", end="")
    else:
        differences = convert_to(arguments.write, arguments.model, arguments.output_dir, **options)
        print(f"{arguments.model} is now in the format {FORMATS[arguments.write].title}: ", end="")
    print(arguments.output_dir)
    for difference in differences:
        print(f"  {difference}")
    return 0
