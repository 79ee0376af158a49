"""`vanilla-transformer push`: a model's folder to the Hub, as one commit."""

from transformers.utils import logging as transformers_logging

from vanilla_transformer.hub import CARD, files_to_push, push, size_of
from vanilla_transformer_cli import push_parser


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer push --help`.

    Raises:
        FileNotFoundError, ValueError, HfHubHTTPError: See `vanilla_transformer.hub.push`.
    """
    arguments = push_parser().parse_args(argv)
    given = vars(arguments)
    transformers_logging.disable_progress_bar()
    files = files_to_push(arguments.model, arguments.repo_id, license=given.get("license"))
    sizes = {name: size_of(content) for name, content in files.items()}
    if arguments.dry_run:
        branch = f"branch {given['revision']}" if "revision" in given else "main branch"
        print(f"would go to {arguments.repo_id}, {branch}:\n")
        width = max(map(len, sizes))
        for name, size in sizes.items():
            print(f"  {name:{width}}  {size:>13,} bytes")
        print(f"  {'in all':{width}}  {sum(sizes.values()):>13,} bytes\n\n{CARD}:\n")
        card = files[CARD]
        print(card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8"))
        return 0
    pushed = push(
        arguments.model,
        arguments.repo_id,
        private=True if arguments.private else None,
        revision=given.get("revision"),
        commit_message=arguments.commit_message,
        license=given.get("license"),
        files=files,
    )
    amount = f"{len(files)} files, {sum(sizes.values()):,} bytes"
    if pushed.changed:
        print(f"{amount}: {pushed.address}")
    else:
        branch = f", branch {given['revision']}," if "revision" in given else ""
        print(f"nothing to send, {arguments.repo_id}{branch} holds these {amount} already: {pushed.address}")
    return 0
