#!/usr/bin/env python
"""Write TensorBoard's event files anew from the journal of a run.

--load is the directory that the run saved to, --tensorboard-dir an empty one. Each step that counts
has one value on each curve: what was done again after a restart appears once.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import Manifest, published_tags, read_manifest
from megatron.checkpointing.saved_run import read_saved_run
from megatron.checkpointing.train_state import TrainState
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, WrongCheckpointError, near
from megatron.config.config import parse_config_for_checkpoint
from megatron.config.parsing.parser import peek
from megatron.config.plan.plan import plan
from megatron.training.loop.journal import read_journal
from megatron.training.telemetry.step_records import STEP, number, read_step
from megatron.training.telemetry.tensorboard import TensorBoard
from megatron.training.telemetry.writers import build_writer


def main(argv: Sequence[str]) -> None:
    """Write the curves of the run that `argv` names."""
    given = peek(argv)
    load, target = given.get("load"), given.get("tensorboard_dir")
    if not (load and target):
        raise ConfigError(
            "give --load, where the run saved, and --tensorboard-dir, an empty folder"
        )
    if list(Path(target).glob("**/*tfevents*")):
        raise ConfigError(f"--tensorboard-dir {target} holds event files: give an empty folder")
    manifest = newest(Path(load))
    run = read_saved_run(load)
    config, _ = parse_config_for_checkpoint(argv, run.config, {}, description=__doc__ or "")
    decided = plan(
        config,
        world_size=run.world_size or 1,
        vocab_size=manifest.spec.vocabulary.vocab_size,
        device="cuda",
        objective=run.objective,
    )
    # A second run of Weights & Biases is not wanted.
    alone = replace(decided.logging, wandb=replace(decided.logging.wandb, project=""))
    decided = replace(decided, logging=alone)
    writer = build_writer(alone, {})
    if writer is None:
        raise ConfigError(f"--tensorboard-dir {target}: nothing can be written there")
    curves = TensorBoard(writer, decided, asdict(config), TrainState())
    state, steps = TrainState(), 0
    for record in read_journal(Path(load)):
        if record["event"] == STEP:
            result = read_step(record)
            state, steps = result.state, steps + 1
            curves.after_step(state, result.step)
        elif record["event"] == "evaluation":
            loss, ppl = number(record["lm_loss"]), number(record["ppl"])
            others = {key: number(record[key]) for key in record.keys() - _OF_EVALUATIONS}
            curves.after_evaluation(record["set"], loss, ppl, state, others=others)
    curves.close()
    print(f"{steps} steps written to {target}")


_OF_EVALUATIONS = {"event", "set", "iteration", "lm_loss", "ppl"}
"""Keys of an evaluation's record that are not further terms of the loss."""


def newest(directory: Path) -> Manifest:
    """Return the manifest of the newest checkpoint of `directory`."""
    for tag in published_tags(directory)[:1]:
        return read_manifest(directory / tag)
    raise WrongCheckpointError(
        f"--load {directory} holds no checkpoint: what the run was is not known{near(directory)}"
    )


if __name__ == "__main__":
    run_tool(main)
