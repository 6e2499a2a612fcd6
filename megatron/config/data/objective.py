"""The training objective and fill-in-the-middle: flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.common.registry import OBJECTIVES, OwnFlags
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.config.parsing.declaration import range_problems, resolved, setting
from megatron.extensions.masked_lm.flags import (
    MaskedLMConfig,
    MaskedLMPlan,
    masked_lm_problems,
    plan_masked_lm,
)
from megatron.extensions.retro.instruct_flags import QUESTIONS, InstructPlan
from megatron.extensions.retro.project_settings import RetroPlan
from megatron.extensions.tasks.flags import LABELLED


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens count in the loss, and how much."""

    loss_on_targets_only: bool = False
    """Leave the tokens of the prefix out of the loss (pretrain_prefix_lm.py)."""

    reweight_loss_based_on_position_frequency: bool = False
    """Let early positions, which are seldom behind the prefix, count more and late ones less:
    position i of s by 2 (s - i) / (s + 1) (pretrain_prefix_lm.py)."""

    norm_target_loss: bool = False
    """Let all targets count the same, however long they are (finetune_t0_non_causal_decoder.py), or
    all conversations (finetune_sft.py)."""

    prefixlm: bool = False
    """Let the tokens of an input see each other, rather than only those before them
    (finetune_t0_non_causal_decoder.py)."""


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """Fill-in-the-middle: the share of documents, and the special tokens."""

    fim_rate: float = setting(0.0, at_least=0, at_most=1, plan="objective.fim.rate")
    """Share of documents that are rearranged for fill-in-the-middle."""

    fim_spm_rate: float = setting(0.5, at_least=0, at_most=1, plan="objective.fim.spm_rate")
    """Share of those in which the suffix comes before the prefix."""

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
"""gpt, prefix-lm, multitask, sft, bert, t5, retro, instruct, instruct-retro, those of downstream tasks, or the name of a plugin's
objective."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """An objective as far as it needs no torch; the rest is in `megatron/objectives/`."""

    script: str = ""  # which trains it; "": any, with --objective
    network: str = "gpt"  # that it trains: see NETWORKS
    reads_neighbors: bool = False  # stored ones, of each chunk of a sample
    kind: str = "documents"  # of the token files that samples are cut from: see `corpora.SUFFIXES`
    flags: tuple[str, ...] = ()  # those of objectives that it takes
    view: str = ""  # of the samples: see `data.datasets.views`; "": as they are
    sees_prefix: bool = False  # tokens of a prefix see each other
    targets_only: bool = False  # tokens of an input do not count
    takes_short_samples: bool = False  # the ends of samples may be cut off (curriculum learning)
    tokenizer: str = "GPT2BPETokenizer"  # its type without --tokenizer-type
    extra_ids: int = 0  # without --vocab-extra-ids


def _declare(name: ObjectiveName, module: str, declaration: Declaration) -> None:
    OBJECTIVES.declare(name, module, declaration)


_declare(
    "gpt",
    "megatron.objectives.gpt",
    Declaration(
        script="pretrain_gpt.py", flags=("--fim-rate",), view="fim", takes_short_samples=True
    ),
)
_declare(
    "prefix-lm",
    "megatron.objectives.prefix_lm",
    Declaration(
        script="pretrain_prefix_lm.py",
        flags=("--loss-on-targets-only", "--reweight-loss-based-on-position-frequency"),
        view="prefixes",
        sees_prefix=True,
    ),
)
_declare(
    "multitask",
    "megatron.objectives.multitask",
    Declaration(
        script="finetune_t0_non_causal_decoder.py",
        kind="pairs",
        flags=("--norm-target-loss", "--prefixlm"),
        targets_only=True,
    ),
)
_declare(
    "sft",
    "megatron.objectives.sft",
    Declaration(
        script="finetune_sft.py",
        kind="conversations",
        flags=("--norm-target-loss",),
        targets_only=True,
    ),
)
_declare(
    "bert",
    "megatron.extensions.bert.objective",
    Declaration(
        script="pretrain_bert.py",
        kind="sentences",
        network="bert",
        flags=("--mask-prob", "--short-seq-prob", "--bert-no-binary-head"),
        view="bert",
        tokenizer="BertWordPieceLowerCase",
    ),
)
_declare(
    "t5",
    "megatron.extensions.t5.objective",
    Declaration(
        script="pretrain_t5.py",
        network="t5",
        kind="sentences",
        flags=("--mask-prob", "--short-seq-prob", "--decoder-seq-length"),
        view="t5",
        tokenizer="BertWordPieceLowerCase",
        extra_ids=100,
    ),
)
_declare(
    "retro",
    "megatron.extensions.retro.objective",
    Declaration(script="pretrain_retro.py", network="retro", view="retro", reads_neighbors=True),
)
_INSTRUCT = Declaration(script="tools/retro/sft/sft_retro.py", kind=QUESTIONS)
_declare("instruct", "megatron.extensions.retro.objective_instruct", _INSTRUCT)
_declare(
    "instruct-retro",
    "megatron.extensions.retro.objective_instruct",
    replace(_INSTRUCT, network="retro"),
)
for _name, _module, _script in (
    ("classification", "objective", "tasks/main.py"),
    ("multiple-choice", "objective", "tasks/main.py"),
    ("token-classification", "objective_tokens", "tasks/token_classification.py"),
    ("question-answering", "objective_tokens", "tasks/question_answering.py"),
):
    _declare(
        _name,
        f"megatron.extensions.tasks.{_module}",
        Declaration(
            script=_script,
            network="bert",
            kind=LABELLED,
            tokenizer="BertWordPieceLowerCase",
        ),
    )
for _name in ("gpt-classification", "gpt-multiple-choice"):
    _declare(
        _name,
        "megatron.extensions.tasks.objective",
        Declaration(script="tasks/main.py", kind=LABELLED),
    )


def declaration_of(name: ObjectiveName) -> Declaration:
    """Return the description of an objective, which needs no torch."""
    declaration: Declaration = OBJECTIVES.about(name) or Declaration()
    return declaration


def objective_tokenizer_arguments(config: TokenizerConfig, name: ObjectiveName) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer` for an objective, with its defaults."""
    declared = declaration_of(name)
    arguments = tokenizer_arguments(config, default=declared.tokenizer)
    return {"vocab_extra_ids": declared.extra_ids, **arguments} if declared.extra_ids else arguments


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
    reweights: bool  # by how often a position is behind the prefix
    equal_targets: bool  # each target counts as one, whatever its length
    fim: FimPlan
    masked: MaskedLMPlan
    retro: RetroPlan = RetroPlan()
    instruct: InstructPlan = InstructPlan()
    own_flags: OwnFlags = ()  # of a plugin's objective


def plan_objective(
    objective: ObjectiveConfig,
    fim: FimConfig,
    masked: MaskedLMConfig,
    name: ObjectiveName,
    *,
    seq_length: int,
) -> ObjectivePlan:
    """Return the objective of the script of `name` on samples of `seq_length` tokens."""
    declared = declaration_of(name)
    return ObjectivePlan(
        name=name,
        sees_prefix=declared.sees_prefix or objective.prefixlm,
        targets_only=declared.targets_only or objective.loss_on_targets_only,
        reweights=objective.reweight_loss_based_on_position_frequency,
        equal_targets=objective.norm_target_loss,
        fim=_plan_fim(fim),
        masked=plan_masked_lm(masked, name, seq_length=seq_length),
    )


def objective_problems(
    objective: ObjectiveConfig,
    fim: FimConfig,
    masked: MaskedLMConfig,
    name: ObjectiveName,
    *,
    seq_length: int,
) -> Iterator[str]:
    """Yield every flag of another objective, and every value out of its range."""
    flags = {
        "--loss-on-targets-only": objective.loss_on_targets_only,
        "--reweight-loss-based-on-position-frequency": (
            objective.reweight_loss_based_on_position_frequency
        ),
        "--norm-target-loss": objective.norm_target_loss,
        "--prefixlm": objective.prefixlm,
        "--fim-rate": fim.fim_rate > 0,
        "--mask-prob": masked.mask_prob != MaskedLMConfig.mask_prob,
        "--short-seq-prob": masked.short_seq_prob != MaskedLMConfig.short_seq_prob,
        "--bert-no-binary-head": not masked.bert_binary_head,
        "--decoder-seq-length": masked.decoder_seq_length is not None,
    }
    own = declaration_of(name)
    for flag, given in flags.items():
        if given and flag not in own.flags:
            owners = (each for each in map(declaration_of, OBJECTIVES) if flag in each.flags)
            scripts = " and ".join(owner.script for owner in owners if owner.script)
            this = own.script or f"--objective {name}"
            yield f"{flag} is for {scripts}; {this} has no use for it"
    yield from range_problems(fim)
    if own.kind == "sentences":
        yield from masked_lm_problems(masked, name, seq_length=seq_length)


def objective_notices(objective: ObjectivePlan) -> Iterator[str]:
    """Yield notices about the objective."""
    if objective.reweights:
        yield "Using loss reweighting: early positions count more, as they are seldom targets"
    if objective.name == "multitask" and not objective.sees_prefix:
        yield "inputs are read from left to right; --prefixlm lets their tokens see each other"


def _plan_fim(fim: FimConfig) -> FimPlan:
    tokens = {
        "prefix": fim.fim_prefix_token or "",
        "middle": fim.fim_middle_token or "",
        "suffix": fim.fim_suffix_token or "",
        "pad": fim.fim_pad_token or "",
    }
    return resolved(FimPlan, "objective.fim", fim, tokens=tokens)
