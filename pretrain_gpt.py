"""Pretrain a GPT: `deepspeed --num_gpus N pretrain_gpt.py --num-layers … --data-path …`."""

import sys
from collections.abc import Sequence

from megatron.config.config import parse_config
from megatron.training.launch import run_rank


def main(argv: Sequence[str]) -> None:
    """Train what the command line `argv` asks for."""
    config, notices = parse_config(argv, description=__doc__ or "")
    # After the flags are read: torch takes seconds to import, a wrong flag is told at once.
    from megatron.training.device import prepare_process

    launch, device = prepare_process(config.parallel)
    from megatron.training.pretrain import pretrain

    pretrain(config, notices, launch, device)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
