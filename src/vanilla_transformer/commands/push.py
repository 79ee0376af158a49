"""`vanilla-transformer push`: a model's folder to the Hub, as one commit."""

from transformers.utils import logging as transformers_logging

from vanilla_transformer.hub import CARD, files_of_space, files_to_push, push, size_of, write_space
from vanilla_transformer_cli import push_parser


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer push --help`.

    Raises:
        FileNotFoundError, ValueError, HfHubHTTPError: See `vanilla_transformer.hub.push`.
    """
    arguments = push_parser().parse_args(argv)
    given = vars(arguments)
    transformers_logging.disable_progress_bar()
    license = given.get("license")
    if "output_dir" in given:
        if arguments.dry_run:
            raise ValueError("--dry_run writes nothing, --output_dir writes the files: choose one of them.")
        if not arguments.space:
            raise ValueError("--output_dir is where --space writes its files; a model's folder is there already.")
        names = write_space(arguments.model, arguments.output_dir, arguments.repo_id, license=license)
        print(f"{len(names)} files of a Space in {arguments.output_dir}; try it: python {arguments.output_dir}/app.py")
        return 0
    files_of = files_of_space if arguments.space else files_to_push
    files = files_of(arguments.model, arguments.repo_id, license=license)
    sizes = {name: size_of(content) for name, content in files.items()}
    if arguments.dry_run:
        branch = f"branch {given['revision']}" if "revision" in given else "main branch"
        kind = "the Space " if arguments.space else ""
        print(f"would go to {kind}{arguments.repo_id}, {branch}:\n")
        width = max(map(len, sizes))
        for name, size in sizes.items():
            print(f"  {name:{width}}  {size:>13,} bytes")
        print(f"  {'in all':{width}}  {sum(sizes.values()):>13,} bytes\n\n{CARD}:\n")
        card = files[CARD]
        print(card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8"))
        if arguments.space:
            for name in ("app.py", "requirements.txt"):
                content = files[name]
                print(f"{name}:\n\n{content.decode() if isinstance(content, bytes) else content}")
        return 0
    pushed = push(
        arguments.model,
        arguments.repo_id,
        private=True if arguments.private else None,
        revision=given.get("revision"),
        commit_message=arguments.commit_message,
        license=license,
        files=files,
        space=arguments.space,
    )
    amount = f"{len(files)} files, {sum(sizes.values()):,} bytes"
    if pushed.changed:
        print(f"{amount}: {pushed.address}")
    else:
        branch = f", branch {given['revision']}," if "revision" in given else ""
        print(f"nothing to send, {arguments.repo_id}{branch} holds these {amount} already: {pushed.address}")
    return 0
