"""Objectives as far as they need no torch: what each declares, its plan and checks of its flags."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.common.extensions import extensions_with, load_extension
from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config
from megatron.config.data.corpora import data_problems, suffixes_of
from megatron.config.data.objective import ObjectiveName, ObjectivePlan, plan_fim
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.config.parsing.declaration import range_problems
from megatron.config.parsing.flags import given_options


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """An objective as far as it needs no torch; the rest is in `megatron/objectives/`."""

    script: str = ""  # which trains it; "": any, with --objective
    network: str = "gpt"  # that it trains: see NETWORKS
    kind: str = "documents"  # of the token files that samples are cut from: see `corpora.SUFFIXES`
    flags: tuple[str, ...] = ()  # objective-specific flags that it takes
    view: str = ""  # dotted name of what makes the view of samples; "": as they are
    sees_prefix: bool = False  # tokens of a prefix see each other
    targets_only: bool = False  # tokens of an input do not count
    takes_short_samples: bool = False  # the ends of samples may be cut off (curriculum learning)
    weighs_tokens: bool = False  # the loss is a mean over tokens, be it of a global batch
    tokenizer: str = "GPT2BPETokenizer"  # its type without --tokenizer-type
    extra_ids: int = 0  # without --vocab-extra-ids
    adds_special_tokens: bool = False  # to texts, so that their tokenizer must not
    has_epochs: bool = False  # over data that its additional flags name; each ends with a save

    def plan(self, config: Config) -> Any:
        """Return this objective's part of the plan, a dataclass; None for none."""
        return None

    def cut(self, config: Config) -> Any:
        """Return how documents are cut into samples, a dataclass, if the kind of files needs it."""
        return None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the token files of a prefix; () where samples come from other files."""
        return suffixes_of(self.kind)

    def data_problems(self, config: Config) -> Iterator[str]:
        """Yield every reason why the flags do not name the data."""
        return data_problems(config.data)

    def prepare(self, config: Config, *, world_size: int) -> Config:
        """Return `config` with what files of its data decide, such as the number of steps.

        Values that are refused later count as if they were possible.

        Raises:
            WrongDataError: a file is missing or malformed.
        """
        return config

    def network_with_head(self, network: Any) -> Any:
        """Return the network with this objective's head, if the network has another one.

        Raises:
            ConfigError: there is none for it.
        """
        return network

    def path_problems(self, config: Config) -> Iterator[str]:
        """Yield missing flags that a run needs to read its data."""
        return iter(())

    def objective_to_train(self, config: Config, name: ObjectiveName) -> ObjectiveName:
        """Return the objective that is trained with these flags where `name`, this one, is asked for."""
        return name

    def saved_flags(self, given: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the flags of a checkpoint that a run takes over, by field.

        Args:
            given: values of options of its command line, by name; see `peek`.

        Raises:
            ConfigError: a flag that is given is for another program.
        """
        return saved

    def problems(self, config: Config) -> Iterator[str]:
        """Yield wrong values of the flags of this objective alone."""
        return iter(())

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield flags of such objectives, given to one of another class; `flags` are found without."""
        return iter(())

    def upgrade_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan that version 1.0 saved, as dictionaries, with the parts that it has now."""
        return plan


OBJECTIVES.declare(
    "gpt",
    "megatron.objectives.gpt",
    Declaration(
        script="pretrain_gpt.py",
        flags=("--fim-rate",),
        view="megatron.data.datasets.views.fim_view",
        takes_short_samples=True,
        weighs_tokens=True,
    ),
)
OBJECTIVES.declare(
    "prefix-lm",
    "megatron.objectives.prefix_lm",
    Declaration(
        script="pretrain_prefix_lm.py",
        flags=("--loss-on-targets-only", "--reweight-loss-based-on-position-frequency"),
        view="megatron.data.datasets.views.prefix_view",
        sees_prefix=True,
    ),
)
OBJECTIVES.declare(
    "multitask",
    "megatron.objectives.multitask",
    Declaration(
        script="finetune_t0_non_causal_decoder.py",
        kind="pairs",
        flags=("--norm-target-loss", "--prefixlm"),
        targets_only=True,
        weighs_tokens=True,
    ),
)
OBJECTIVES.declare(
    "sft",
    "megatron.objectives.sft",
    Declaration(
        script="finetune_sft.py",
        kind="conversations",
        flags=("--norm-target-loss",),
        targets_only=True,
        weighs_tokens=True,
    ),
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


def plan_objective(config: Config, name: ObjectiveName) -> ObjectivePlan:
    """Return the objective of the script of `name`."""
    declared = declaration_of(name)
    objective = config.objective
    return ObjectivePlan(
        name=name,
        sees_prefix=declared.sees_prefix or objective.prefixlm,
        targets_only=declared.targets_only or objective.loss_on_targets_only,
        reweights=objective.reweight_loss_based_on_position_frequency,
        equal_targets=objective.norm_target_loss,
        fim=plan_fim(config.fim),
        own=declared.plan(config),
    )


def objective_problems(config: Config, name: ObjectiveName) -> Iterator[str]:
    """Yield every flag of another objective, and every value out of its range."""
    declaration = declaration_of(name)
    sections = (config.objective, config.fim, *config.extensions.values())
    given = {option for section in sections for option in given_options(section)}
    if not given <= {*declaration.flags}:  # whose they are
        for extension in extensions_with(config.extensions):
            load_extension(extension)
    declared = [declaration_of(each) for each in OBJECTIVES]
    for flag in dict.fromkeys(flag for each in declared for flag in each.flags):
        if flag in given and flag not in declaration.flags:
            owners = (e.script for e in declared if flag in e.flags and e.script)
            scripts = " and ".join(dict.fromkeys(owners))
            this = declaration.script or f"--objective {name}"
            yield f"{flag} is for {scripts}; {this} has no use for it"
    yield from range_problems(config.fim)
    for kind in dict.fromkeys(
        type(each) for each in declared if not isinstance(declaration, type(each))
    ):
        yield from kind.misplaced_flags(config)
    yield from declaration.problems(config)


def objective_notices(objective: ObjectivePlan) -> Iterator[str]:
    """Yield notices about the objective."""
    if objective.reweights:
        yield "Using loss reweighting: early positions count more, as they are seldom targets"
    if objective.name == "multitask" and not objective.sees_prefix:
        yield "inputs are read from left to right; --prefixlm lets their tokens see each other"
