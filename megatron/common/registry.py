"""Registry: parts of a run by name, of this package and of plugins, each with flags of its own.

The registries are at the end; docs/extending.md has an example of each.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar, cast

from megatron.common.errors import ConfigError

Part = TypeVar("Part")

OwnFlags = tuple[tuple[str, Any], ...]
"""Names and values of the flags of registered parts."""


@dataclass(frozen=True)
class Entry(Generic[Part]):
    """A registered part.

    Args:
        part: what the registry's users call.
        flags: a frozen dataclass, each field of it a flag; an instance is passed as `flags=`.
    """

    part: Part
    flags: type | None = None


class Registry(Generic[Part]):
    """Parts of one kind by name.

    Args:
        kind: what they are, for messages.
        option: the flag that takes a name.
        built_in: names of this package's own parts, wherever they are built.
    """

    def __init__(self, kind: str, option: str = "", built_in: Iterable[str] = ()):
        self.kind, self.option, self.built_in = kind, option, tuple(built_in)
        self._entries: dict[str, Entry[Part]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, *, flags: type | None = None) -> Callable[[Part], Part]:
        """Return a decorator that adds a part under `name`.

        Registering the same definition once more replaces it, as a notebook's cell does.

        Raises:
            ConfigError: another part has that name, of a plugin or of this package.
        """

        def add(part: Part) -> Part:
            if name in self.built_in and not _origin(part).startswith("megatron."):
                raise ConfigError(
                    f"{self.kind} {name} of {_origin(part)} has the name of a built-in one: "
                    "take another name"
                )
            there = self._entries.get(name)
            if there and _origin(there.part) != _origin(part):
                raise ConfigError(
                    f"{self.kind} {name} is registered already, by {_origin(there.part)}: "
                    "take another name"
                )
            self._entries[name] = Entry(part, flags)
            return part

        return add

    def sections(self) -> Iterator[type]:
        """Yield the dataclasses of flags that parts brought."""
        yield from (entry.flags for entry in self._entries.values() if entry.flags)

    def get(self, name: str, own: Iterable[tuple[str, Any]] = ()) -> Part:
        """Return the part of that name, with its flags bound as `flags=` if it has any.

        Args:
            own: names and values of flags, at least those of this part.

        Raises:
            ConfigError: there is no such part.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(self.unknown(name))
        if not entry.flags:
            return entry.part
        values = dict(own)
        flags = entry.flags(**{field.name: values[field.name] for field in fields(entry.flags)})
        part: Any = entry.part
        return cast(Part, partial(part, flags=flags))

    def flags_of(self, name: str, sections: Mapping[str, Any]) -> OwnFlags:
        """Return the flags of the part of that name; () if it has none or is unknown.

        Args:
            sections: instances by the name of their class.
        """
        entry = self._entries.get(name)
        if not entry or not entry.flags:
            return ()
        section = sections[entry.flags.__name__]
        return tuple((field.name, getattr(section, field.name)) for field in fields(section))

    def unknown(self, name: str, others: Iterable[str] = ()) -> str:
        """Return the message for a name that is not registered.

        Args:
            others: further names that would be accepted.
        """
        names = list(dict.fromkeys([*others, *self._entries]))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = f"known: {', '.join(names)}" if names else "none is registered"
        option = f"{self.option} {name}: " if self.option else ""
        return f"{option}unknown {self.kind} ({known}; --plugin MODULE adds others){hint}"


def _origin(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}" if hasattr(part, "__qualname__") else repr(part)


POSITION_EMBEDDINGS: Registry[Any] = Registry(
    "position embedding",
    "--position-embedding-type",
    ("learned_absolute", "absolute", "learned", "rotary", "rope", "alibi", "none"),
)
"""Classes like megatron.model.layers.positions.PositionEmbedding."""

ACTIVATIONS: Registry[Any] = Registry(
    "activation",
    "--activation",
    (
        *("gelu_tanh", "gelu_erf", "relu", "squared_relu"),
        *("geglu", "geglu_tanh", "liglu", "reglu", "swiglu"),
    ),
)
"""Functions (x, bias or None) -> activation(x + bias); a gated one, with "glu" in its name, halves
the last dimension."""

NORMS: Registry[Any] = Registry("norm", "--normalization", ("LayerNorm", "RMSNorm"))
"""Classes like megatron.model.layers.norms.Norm."""

OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    "--optimizer",
    ("adam", "adamw", "fused_adam", "adam8bit", "sgd", "lion", "muon", "dist_muon"),
)
"""Functions (parameter groups, lr, plan: OptimizerPlan) -> torch.optim.Optimizer."""

SCHEDULES: Registry[Any] = Registry(
    "learning-rate schedule",
    "--lr-decay-style",
    ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
)
"""Functions of the progress from the end of the warm-up, 0, to the end of the decay, 1; they return
the share of the way from --min-lr up to --lr."""

HOOKS: Registry[Any] = Registry("hook", "--hook")
"""Functions of the Run that return a megatron.training.loop.loop.Hook, on every rank."""

METRICS: Registry[Any] = Registry("metric", "--metric")
"""Functions of the Run that return a function of the TrainState: numbers by name, after each step,
on every rank."""

OBJECTIVES: Registry[Any] = Registry(
    "objective", "--objective", ("gpt", "prefix-lm", "multitask", "sft")
)
"""Classes like megatron.objectives.objective.Objective, with their `name`."""

DATASETS: Registry[Any] = Registry("dataset", "--dataset")
"""Classes like megatron.data.datasets.gpt_dataset.GPTDataset."""

TOKENIZERS: Registry[Any] = Registry(
    "tokenizer",
    "--tokenizer-type",
    (
        *("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "PretrainedFromHF"),
        *("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
        *("Llama2Tokenizer", "TikTokenizer", "NullTokenizer"),
    ),
)
"""Functions of megatron.tokenizer.build.TokenizerOptions, the flags of tokenizers, that return a
megatron.tokenizer.types.tokenizer.Tokenizer."""

REGISTRIES = (
    OBJECTIVES,
    DATASETS,
    TOKENIZERS,
    POSITION_EMBEDDINGS,
    ACTIVATIONS,
    NORMS,
    OPTIMIZERS,
    SCHEDULES,
    HOOKS,
    METRICS,
)
