"""`vanilla-transformer serve`: a page in the browser to try models on."""

from transformers.utils import logging as transformers_logging

from vanilla_transformer.serving import serve
from vanilla_transformer_cli import serve_parser


def main(argv: list[str]) -> int:
    """Runs the command until it is told to end; see `vanilla-transformer serve --help`.

    Raises:
        ImportError, OSError, ValueError: See `vanilla_transformer.serving.serve`.
    """
    arguments = serve_parser().parse_args(argv)
    given = vars(arguments)
    transformers_logging.disable_progress_bar()
    options = {name: given[name] for name in ("device", "revision") if name in given}
    serve(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        **options,
    )
    return 0
