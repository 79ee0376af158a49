"""Launcher for several processes: `accelerate launch scripts/translate.py ...`, or `torchrun --nproc_per_node 2`.

Without GPUs, accelerate starts several processes if told `--multi_gpu --num_processes 2`, and else one.
Takes what `vanilla-transformer translate` takes, and always works in parts (`--resumable`): each process translates
its share, the first one puts the lines back in order, and a run that was killed goes on where it stopped.
"""

import sys

from vanilla_transformer_cli import main


if __name__ == "__main__":
    sys.exit(main(["translate", "--resumable", *sys.argv[1:]]))
