"""Whether a checkpoint fits the run that loads it, from its manifest alone and without torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.compare import require_same
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.megatron_lm.detect import RESHARDABLE
from megatron.checkpointing.saved_run import is_model_of_transformers
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.config.objectives import declaration_of
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.plan.plan import Plan
from megatron.config.plugins import missing_plugins
from megatron.config.run.checkpoint import CheckpointPlan

_OF_NETWORK = frozenset({"model", "kernels"})
_ALL_PARTS = _OF_NETWORK | {"optimizer", "schedule", "tokenizer", "plugins"}
"""Sections of a config with parts of plugins that a run needs: which loads weights, or resumes."""


def require_fit(plan: Plan, folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint of another run, or of a plugin that this run does not have.

    Raises:
        WrongCheckpointError: lists every difference.
    """
    sections = _ALL_PARTS if resumes(plan) else _OF_NETWORK
    if plan.schedule.on_resume == "flags":
        sections = sections - {"schedule"}
    lost = [*missing_plugins(manifest.config, plan.plugins.modules, only=sections)]
    if lost:
        raise WrongCheckpointError(f"{folder}: " + "\n".join(lost))
    goes_on = resumes(plan) and not manifest.converted_from
    if goes_on:
        _require_objective(plan, folder, manifest)
    require_same(
        manifest.plan,
        as_json(plan.to_dict()),
        str(folder),
        with_optimizer=plan.checkpoint.loads_optimizer,
        with_schedule=goes_on and plan.schedule.on_resume == "equal",
        with_samples=goes_on,
    )
    _require_parts(manifest, plan.checkpoint, folder)
    # What cannot be gone on with is refused before anything slow.
    going_on(plan, folder, manifest)


def _require_objective(plan: Plan, folder: Path, manifest: Manifest) -> None:
    """Refuse to continue the iterations of a run that read token files of another kind."""
    saved, now = manifest.objective.name, plan.objective.name
    if declaration_of(saved).kind != declaration_of(now).kind:
        raise WrongCheckpointError(
            f"{folder} was saved at iteration {manifest.state.iteration} by a run with objective "
            f"{saved}, and this run has objective {now}: write --finetune to start from its weights, "
            "at iteration 0 (--reset-progress starts from its optimizer states too)"
        )


def resumes(plan: Plan) -> bool:
    """Whether the run continues that of its checkpoint, with its progress."""
    return plan.checkpoint.loads_progress and not plan.evaluation.only


def _require_parts(manifest: Manifest, requested: CheckpointPlan, folder: Path) -> None:
    """Refuse a checkpoint that was saved without the parts that this run loads."""
    saved, source = manifest.checkpoint, manifest.converted_from
    for is_there, wants, part, states in (
        (
            *(saved.saves_optimizer, requested.loads_optimizer, "optim"),
            "optimizer states"
            + (
                f" (Megatron-LM's need {RESHARDABLE} when it saves)"
                if source and not is_model_of_transformers(Path(source))
                else ""
            ),
        ),
        (saved.saves_streams, requested.loads_streams, "rng", "RNG states"),
    ):
        if wants and not is_there:
            how = f"converted from {source} without {states}"
            raise WrongCheckpointError(
                f"{folder} was {how if source else f'saved with --no-save-{part}'}: write "
                f"--no-load-{part}, or --finetune for its weights alone"
            )


def going_on(plan: Plan, folder: Path, manifest: Manifest) -> Plan:
    """Return `plan` for the resumed run, with the checkpoint's learning rate if so configured."""
    if plan.schedule.on_resume != "checkpoint":
        return plan
    schedule = _saved_schedule(folder, manifest)
    if plan.optimizer.embeddings_apart != (schedule.embedding_peak > 0):
        raise WrongCheckpointError(
            f"{folder} was saved {'with' if schedule.embedding_peak else 'without'} "
            "--decoupled-lr, and --use-checkpoint-opt_param-scheduler continues its learning rates: "
            "write the flag as the saved run had it, or --override-opt_param-scheduler"
        )
    return replace(plan, schedule=schedule)


def _saved_schedule(folder: Path, manifest: Manifest) -> SchedulePlan:
    if source := manifest.converted_from:
        raise WrongCheckpointError(
            f"{folder} was converted from {source}, without its learning rate: write "
            "--override-opt_param-scheduler in place of --use-checkpoint-opt_param-scheduler"
        )
    try:
        return replace(manifest.schedule, on_resume="checkpoint")
    except CheckpointError as error:
        raise WrongCheckpointError(
            f"{folder} holds no learning rate that this version understands ({error}); "
            "write --override-opt_param-scheduler"
        ) from error


def as_json(tree: Any) -> Any:
    """Return `tree` as it comes back from JSON: tuples as lists."""
    if isinstance(tree, dict):
        return {name: as_json(value) for name, value in tree.items()}
    return [as_json(value) for value in tree] if isinstance(tree, list | tuple) else tree
