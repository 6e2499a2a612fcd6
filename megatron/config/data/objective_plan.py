"""What is learned of a sample, decided."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.config.config import Config
from megatron.config.data.fim import FimConfig

ObjectiveName = Literal["gpt", "prefix-lm", "multitask", "sft"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is known of an objective without torch; the rest is in `megatron/objectives/`."""

    script: str  # which trains it
    kind: str  # of the token files that samples are cut from: see `data_plan.SUFFIXES`
    flags: tuple[str, ...]  # those of objectives that it takes


DECLARATIONS: dict[ObjectiveName, Declaration] = {
    "gpt": Declaration(script="pretrain_gpt.py", kind="documents", flags=("--fim-rate",)),
    "prefix-lm": Declaration(
        script="pretrain_prefix_lm.py",
        kind="documents",
        flags=("--loss-on-targets-only", "--reweight-loss-based-on-position-frequency"),
    ),
    "multitask": Declaration(
        script="finetune_t0_non_causal_decoder.py",
        kind="pairs",
        flags=("--norm-target-loss", "--prefixlm"),
    ),
    "sft": Declaration(
        script="finetune_sft.py", kind="conversations", flags=("--norm-target-loss",)
    ),
}
"""The objectives by name."""


@dataclass(frozen=True, kw_only=True)
class FimPlan:
    """How documents are rearranged for fill-in-the-middle; an empty text means none."""

    rate: float  # of documents; 0: none
    spm_rate: float  # of those, with the suffix first
    split_token: str  # cuts documents into fragments
    fragment_rate: float  # of the fragments of a chosen document
    skipped_prefix: str  # fragments that start so are left alone
    cut: str  # between "characters" or "tokens"
    tokens: dict[str, str]  # names by role; "": the usual spellings


@dataclass(frozen=True, kw_only=True)
class ObjectivePlan:
    """What a sample is made of, what its tokens see, and how much each counts."""

    name: ObjectiveName
    sees_prefix: bool  # tokens of a prefix, or of an input, see each other
    targets_only: bool  # tokens of a prefix, or of an input, do not count
    reweights: bool  # by how often a position is behind the prefix
    equal_targets: bool  # each target counts as one, whatever its length
    fim: FimPlan


def plan_objective(config: Config, name: ObjectiveName) -> ObjectivePlan:
    """Return what the script of objective `name` learns."""
    said = config.objective
    return ObjectivePlan(
        name=name,
        sees_prefix=name == "prefix-lm" or said.prefixlm,
        targets_only=name in ("multitask", "sft") or said.loss_on_targets_only,
        reweights=said.reweight_loss_based_on_position_frequency,
        equal_targets=said.norm_target_loss,
        fim=_plan_fim(config.fim),
    )


def objective_problems(config: Config, name: ObjectiveName) -> Iterator[str]:
    """Yield every flag of another objective, and every rate that is none."""
    said = config.objective
    flags = {
        "--loss-on-targets-only": said.loss_on_targets_only,
        "--reweight-loss-based-on-position-frequency": (
            said.reweight_loss_based_on_position_frequency
        ),
        "--norm-target-loss": said.norm_target_loss,
        "--prefixlm": said.prefixlm,
        "--fim-rate": config.fim.fim_rate > 0,
    }
    own = DECLARATIONS[name]
    for flag, given in flags.items():
        if given and flag not in own.flags:
            owners = (each.script for each in DECLARATIONS.values() if flag in each.flags)
            yield f"{flag} is for {' and '.join(owners)}; {own.script} has no use for it"
    for flag, rate in (
        ("--fim-rate", config.fim.fim_rate),
        ("--fim-spm-rate", config.fim.fim_spm_rate),
        ("--fragment-fim-rate", config.fim.fragment_fim_rate),
    ):
        if not 0 <= rate <= 1:
            yield f"{flag} {rate} must be from 0 to 1"


def objective_notices(objective: ObjectivePlan) -> Iterator[str]:
    """Yield what a user should be told of the objective."""
    if objective.reweights:
        yield "Using loss reweighting: early positions count more, as they are seldom targets"
    if objective.name == "multitask" and not objective.sees_prefix:
        yield "inputs are read from left to right; --prefixlm lets their tokens see each other"


def _plan_fim(fim: FimConfig) -> FimPlan:
    return FimPlan(
        rate=fim.fim_rate,
        spm_rate=fim.fim_spm_rate,
        split_token=fim.fim_split_sample or "",
        fragment_rate=fim.fragment_fim_rate,
        skipped_prefix=fim.no_fim_prefix or "",
        cut=fim.fim_cut,
        tokens={
            "prefix": fim.fim_prefix_token or "",
            "middle": fim.fim_middle_token or "",
            "suffix": fim.fim_suffix_token or "",
            "pad": fim.fim_pad_token or "",
        },
    )
