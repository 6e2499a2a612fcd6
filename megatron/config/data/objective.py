"""The training objective and fill-in-the-middle: flags and plan."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron.common.registry import OwnFlags
from megatron.config.parsing.declaration import resolve, setting


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens count in the loss, and how much."""

    loss_on_targets_only: bool = False
    """Exclude the tokens of the prefix from the loss (pretrain_prefix_lm.py)."""

    reweight_loss_based_on_position_frequency: bool = False
    """Weight early positions, which are seldom after the prefix, more and late positions less:
    position i of s by 2 (s - i) / (s + 1) (pretrain_prefix_lm.py)."""

    norm_target_loss: bool = False
    """Weight all targets equally, whatever their length (finetune_t0_non_causal_decoder.py), or all
    conversations (finetune_sft.py)."""

    prefixlm: bool = False
    """Bidirectional attention among the tokens of an input (finetune_t0_non_causal_decoder.py)."""


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """Fill-in-the-middle: the share of documents, and the special tokens."""

    fim_rate: float = setting(0.0, at_least=0, at_most=1, plan="objective.fim.rate")
    """Share of documents that are rearranged for fill-in-the-middle."""

    fim_spm_rate: float = setting(0.5, at_least=0, at_most=1, plan="objective.fim.spm_rate")
    """Share of rearranged documents in which the suffix comes before the prefix."""

    fim_split_sample: str | None = setting(None, plan="objective.fim.split_token")
    """Token that cuts a document, such as a repository, into fragments that are rearranged apart
    (default: not cut)."""

    fragment_fim_rate: float = setting(
        0.5,
        at_least=0,
        at_most=1,
        older=("--fim-fragment-rate",),
        plan="objective.fim.fragment_rate",
    )
    """Share of the fragments of a chosen document that are rearranged."""

    no_fim_prefix: str | None = setting(
        None, older=("--fim-no-prefix",), plan="objective.fim.skipped_prefix"
    )
    """Leave fragments that start with this text as they are."""

    fim_cut: Literal["characters", "tokens"] = setting("characters", plan="objective.fim.cut")
    """Where documents may be cut: between any two characters, or only between two tokens."""

    fim_prefix_token: str | None = None
    """Token before the prefix (default: <fim_prefix> in one of its usual spellings)."""

    fim_middle_token: str | None = None
    """Token before the middle (default: <fim_middle> in one of its usual spellings)."""

    fim_suffix_token: str | None = None
    """Token before the suffix (default: <fim_suffix> in one of its usual spellings)."""

    fim_pad_token: str | None = None
    """Token that fills up a sample that became shorter (default: <fim_pad> in one of its usual
    spellings, or else the tokenizer's padding, or the end of a document)."""


LM_LOSS, SOP_LOSS = "lm loss", "sop loss"
UNMASKED = "micro-batches without masked tokens"
"""Names of the terms of a loss in logs; a loss with one term is the first."""

ObjectiveName = str
"""gpt, prefix-lm, multitask, sft, or the name of the objective of an extension or a plugin."""


@dataclass(frozen=True, kw_only=True)
class FimPlan:
    """Fill-in-the-middle, resolved; an empty text means none."""

    rate: float  # of documents; 0: none
    spm_rate: float  # of those, with the suffix first
    split_token: str  # cuts documents into fragments
    fragment_rate: float  # of the fragments of a chosen document
    skipped_prefix: str  # fragments that start so are left alone
    cut: str  # between "characters" or "tokens"
    tokens: dict[str, str]  # names by role; "": the usual spellings


@dataclass(frozen=True, kw_only=True)
class ObjectivePlan:
    """The training objective, resolved: attention to the prefix, and weights in the loss."""

    name: ObjectiveName
    sees_prefix: bool  # tokens of a prefix, or of an input, see each other
    targets_only: bool  # tokens of a prefix, or of an input, do not count
    reweights: bool  # by how often a position is after the prefix
    equal_targets: bool  # each target counts as one, whatever its length
    fim: FimPlan
    own: Any = None  # plan of an extension's objective; see `Declaration.plan`
    own_flags: OwnFlags = ()  # of a plugin's objective


def plan_fim(fim: FimConfig) -> FimPlan:
    """Return fill-in-the-middle as the flags decide it."""
    tokens = {
        "prefix": fim.fim_prefix_token or "",
        "middle": fim.fim_middle_token or "",
        "suffix": fim.fim_suffix_token or "",
        "pad": fim.fim_pad_token or "",
    }
    return resolve(FimPlan, "objective.fim", fim, tokens=tokens)
