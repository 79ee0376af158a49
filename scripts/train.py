"""Launcher for several processes: `accelerate launch scripts/train.py ...`, or `torchrun --nproc_per_node 2`.

Without GPUs, accelerate starts several processes if told `--multi_gpu --num_processes 2`, and else one.
Takes what `vanilla-transformer train` takes.
"""

import sys

from vanilla_transformer_cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
