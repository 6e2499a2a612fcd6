"""A script of one's own: `train.py RUN.yaml` trains what the file lists, with a hook."""

import sys

from megatron.api import Hook, make_config, pretrain, run_rank


class LossLines(Hook):
    """Prints a line for each step."""

    def after_step(self, state, step):
        print(f"script's own hook: step {state.iteration}, loss {step.loss:.4f}")


def main(argv):
    """Train, and return the exit code."""
    return pretrain(make_config(config=argv[0]), hooks=[LossLines()])


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
