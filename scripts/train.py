"""Launcher for several processes: `accelerate launch scripts/train.py ...`, or with `torchrun --nproc_per_node 2`.

Takes what `vanilla-transformer train` takes.
"""

import sys

from vanilla_transformer_cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
