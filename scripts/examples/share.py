"""Puts a trained model on the Hub with its card, and a page to try it on as a Space beside it.

python scripts/examples/share.py runs/en-de user/en-de --license apache-2.0 --dry_run

Without --dry_run it is sent, by the token of `hf auth login` or of HF_TOKEN.
"""

import argparse

from vanilla_transformer.hub import files_of_space, files_to_push, push


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="folder of the model")
parser.add_argument("repo_id", help="user/name")
parser.add_argument("--license", help="written into the card")
parser.add_argument("--private", action="store_true", help="for your own eyes")
parser.add_argument("--dry_run", action="store_true", help="list what would be sent")
options = parser.parse_args()

repositories = [(options.repo_id, files_to_push, False), (f"{options.repo_id}-page", files_of_space, True)]
for repo_id, files_of, space in repositories:
    files = files_of(options.model, repo_id, license=options.license)
    print(f"{'Space' if space else 'model'} {repo_id}: {len(files)} files, such as {', '.join(list(files)[:3])}")
    if not options.dry_run:
        pushed = push(
            options.model, repo_id, private=options.private or None, license=options.license, files=files, space=space
        )
        print(f"  {'sent' if pushed.changed else 'there already'}: {pushed.address}")
