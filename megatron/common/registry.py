"""Registry: parts of a run by name, of this package and of plugins, each with its flags.

The registries are at the end; docs/extending.md has an example of each. Built-in parts are registered
like plugin parts, where they are defined; that module is imported when one is first used. Parts
that are not known are looked for in the extensions.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from megatron.common.errors import ConfigError
from megatron.common.extensions import extension_names, extension_of, load_extension

Part = TypeVar("Part")

OwnFlags = tuple[tuple[str, Any], ...]
"""Names and values of the flags of registered parts."""


@dataclass(frozen=True)
class Registration(Generic[Part]):
    """A registered part.

    Args:
        part: what the registry's users call.
        flags: a frozen dataclass, each field of it a flag; an instance is passed as `flags=`.
        about: what else the registry's users need to know of it.
    """

    part: Part
    flags: type | None = None
    about: Any = None


class Registry(Generic[Part]):
    """Parts of one kind by name.

    Args:
        kind: what they are, for messages.
        option: the flag that takes a name.
        built_in: names of this package's own parts, each with the module that registers it; "" for
            names that stand for no part.
        call: the arguments that parts are called with, as in a signature; None: not checked.
        takes_flags: whether parts may bring flags.
        otherwise: end of the message about an unknown name: what else may be meant.
    """

    def __init__(
        self,
        kind: str,
        option: str = "",
        built_in: Mapping[str, str] | None = None,
        *,
        call: str | None = None,
        takes_flags: bool = True,
        otherwise: str = "",
    ):
        self.kind, self.option = kind, option
        self._call, self._takes_flags = call, takes_flags
        self._otherwise = otherwise
        self.built_in: dict[str, str] = dict(built_in or {})
        self._entries: dict[str, Registration[Part]] = {}
        self._about: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        if not self._is_known(name):
            # One extension after the other, the one of this name first.
            for extension in sorted(extension_names(), key=lambda each: each != name):
                load_extension(extension)
                if self._is_known(name):
                    break
        return self._is_known(name)

    def _is_known(self, name: object) -> bool:
        return name in self.built_in or name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield all names: of the core, then of plugins, then by extension."""
        names = dict.fromkeys([*self.built_in, *self._entries])
        return iter(sorted(names, key=self._extension))

    def with_extensions(self) -> list[str]:
        """Return all names, including names of extensions that are not used yet."""
        for extension in extension_names():
            load_extension(extension)
        return [*self]

    def is_own(self, name: object) -> bool:
        """Whether `name` names a plugin's part."""
        there = None if name in self.built_in else self._entries.get(str(name))
        return there is not None and not _module(there.part).startswith("megatron.")

    def extension_with(self, name: str) -> str:
        """Return the extension that has the part of that name; "" for the core and for plugins."""
        return self._extension(name) if name in self else ""

    def _extension(self, name: str) -> str:
        module = self.built_in.get(name)
        return extension_of(_module(self._entries[name].part) if module is None else module)

    def declare(self, name: str, module: str, about: Any) -> None:
        """Declare a built-in part, and what is to be known of it before its module is imported."""
        self.built_in[name] = module
        self._about[name] = about

    def register(
        self, name: str, *, flags: type | None = None, about: Any = None
    ) -> Callable[[Part], Part]:
        """Return a decorator that adds a part under `name`.

        Registering the same definition once more replaces it, as a notebook's cell does.

        Args:
            flags: a frozen dataclass with the flags of the part.
            about: what users of this registry need to know of it; see the registry.

        Raises:
            ConfigError: another part has that name, of a plugin or of this package; or the part
                cannot be called like the other parts of this registry.
        """

        def add(part: Part) -> Part:
            if name in self.built_in and _module(part) != self.built_in[name]:
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
            if flags is not None and not self._takes_flags:
                raise ConfigError(f"{self.kind} {name}: a {self.kind} has no flags of its own")
            if flags is not None and not is_dataclass(flags):
                raise ConfigError(
                    f"{self.kind} {name}: flags={_origin(flags)} is not a dataclass: write "
                    "@dataclass(frozen=True, kw_only=True) above it"
                )
            self._require_callable(name, part, flags)
            self._entries[name] = Registration(part, flags, about)
            return part

        return add

    def _require_callable(self, name: str, part: Any, flags: type | None) -> None:
        """Refuse a part that its users could not call, before a run begins."""
        if self._call is None:
            return
        positional, _, named = self._call.partition("*")
        keywords = set(named.replace(",", " ").split())
        keywords |= {"flags"} if flags else set()
        expected = ", ".join([self._call] * bool(self._call) + ["flags=…"] * bool(flags))
        try:
            signature = inspect.signature(part)
        except ValueError:
            return  # of a compiled function nothing is known
        try:
            signature.bind(*positional.replace(",", " ").split(), **dict.fromkeys(keywords))
        except TypeError as error:
            raise ConfigError(
                f"{self.kind} {name}: {_origin(part)} is called with ({expected}), which its "
                f"signature {signature} does not accept: {error}"
            ) from error

    def sections(self) -> Iterator[type]:
        """Yield the dataclasses of flags that parts brought."""
        yield from (entry.flags for entry in self._entries.values() if entry.flags)

    def names_with(self, section: type) -> list[str]:
        """Return the names of the parts that have this dataclass of flags."""
        return [name for name, entry in self._entries.items() if entry.flags is section]

    def about(self, name: str) -> Any:
        """Return the declaration or registration of the part of that name; None if there is none."""
        if name not in self:
            return None
        if name not in self._about and (extension := self.extension_with(name)):
            load_extension(extension)  # which declares it, where its module was imported before
        return self._about[name] if name in self._about else self._entry(name).about

    def get(self, name: str, extra: Iterable[tuple[str, Any]] = ()) -> Part:
        """Return the part of that name, with its flags bound as `flags=` if it has any.

        Args:
            own: names and values of flags, at least this part's.

        Raises:
            ConfigError: there is no such part.
        """
        entry = self._entry(name)
        if not entry.flags:
            return entry.part
        values = dict(extra)
        flags = entry.flags(**{field.name: values[field.name] for field in fields(entry.flags)})
        part: Any = entry.part
        return cast(Part, partial(part, flags=flags))

    def require(self, name: str) -> None:
        """Refuse a name that is neither built in nor registered.

        Raises:
            ConfigError: with the names that are.
        """
        if name not in self:
            raise ConfigError(self.unknown(name))

    def _entry(self, name: str) -> Registration[Part]:
        if name in self and name not in self._entries and self.built_in.get(name):
            import_module(self.built_in[name])
        if name not in self._entries:
            raise ConfigError(self.unknown(name))
        return self._entries[name]

    def get_class(self, name: str) -> Any:
        """Return the part of that name as it was registered, for what does not depend on its flags.

        Raises:
            ConfigError: there is no such part.
        """
        return self._entry(name).part

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

    def canonical_name(self, name: str, names: Iterable[str]) -> str:
        """Return `name` as it is spelled in `names`: upper and lower case are the same in names."""
        return next((each for each in names if each.lower() == name.lower()), name)

    def unknown(self, name: str, names: Iterable[str] | None = None) -> str:
        """Return the message for a name that is not registered.

        Args:
            names: accepted names (default: all of this registry).
        """
        known_names = list(dict.fromkeys([*(self if names is None else names)]))
        by_lower_case = {known.lower(): known for known in known_names}
        near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
        hint = f"; did you mean {by_lower_case[near[0]]}?" if near else self._otherwise
        known = f"known: {', '.join(known_names)}" if known_names else "none is registered"
        option = f"{self.option} {name}: " if self.option else ""
        return f"{option}unknown {self.kind} ({known}; --plugin MODULE adds others){hint}"


def import_dotted(dotted: str) -> Any:
    """Import a dotted name and return its object."""
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


def _module(part: Any) -> str:
    return str(getattr(part, "__module__", ""))


def _origin(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}" if hasattr(part, "__qualname__") else repr(part)


POSITION_EMBEDDINGS: Registry[Any] = Registry(
    "position embedding",
    "--position-embedding-type",
    dict.fromkeys(
        (
            *("learned_absolute", "absolute", "learned", "relative"),
            *("rotary", "rope", "yarn", "alibi", "none"),
        ),
        "",
    ),
    call="spec, *, number",
)
"""Classes like megatron.model.layers.positions.PositionEmbedding."""

ACTIVATIONS: Registry[Any] = Registry(
    "activation",
    "--activation",
    dict.fromkeys(
        (
            *("gelu_tanh", "gelu_erf", "relu", "squared_relu"),
            *("geglu", "geglu_tanh", "liglu", "quick_geglu", "reglu", "swiglu"),
        ),
        "megatron.model.layers.activations",
    ),
    call="x, bias, kernels",
)
"""Functions (x, bias or None, kernels) -> activation(x + bias), which may compute with the kernels; a
gated one, with "glu" in its name, halves the last dimension."""

NORMS: Registry[Any] = Registry(
    "norm",
    "--normalization",
    dict.fromkeys(("LayerNorm", "RMSNorm"), "megatron.model.layers.norms"),
    call="width, *, eps, around_one, group, kernels",
)
"""Classes like megatron.model.layers.norms.Norm."""

ATTENTIONS: Registry[Any] = Registry(
    "attention",
    "--attention-impl",
    {
        "auto": "",
        "sdpa": "megatron.model.layers.attention_kernels",
        **dict.fromkeys(("flash", "flex"), "megatron.model.layers.fused_attention"),
        **dict.fromkeys(("fused-softmax", "reference"), "megatron.model.layers.attention_kernels"),
    },
    call="query, key, value, how",
)
"""Functions like megatron.model.layers.attention_kernels.Attend: core attention, between the linear
layers."""

OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    "--optimizer",
    {
        **dict.fromkeys(
            ("adam", "adamw", "fused_adam", "adam8bit", "sgd"), "megatron.optimizer.build"
        ),
        "lion": "megatron.optimizer.lion",
        **dict.fromkeys(("muon", "dist_muon"), "megatron.optimizer.build"),
    },
    call="groups, lr, plan, *, tensor_group, dtype",
)
"""Functions (parameter groups, lr, plan: OptimizerPlan, *, tensor_group: tensor-parallel ranks, dtype:
of the network) -> torch.optim.Optimizer."""

SCHEDULES: Registry[Any] = Registry(
    "learning-rate schedule",
    "--lr-decay-style",
    dict.fromkeys(
        ("constant", "linear", "cosine", "square-root", "inverse-square-root", "WSD"),
        "megatron.optimizer.schedule",
    ),
    call="consumed, plan",
)
"""Functions (samples or tokens that were trained on, plan: SchedulePlan) -> the learning rate, after
the warm-up; megatron.optimizer.schedule.lr_decay makes one of a function of the progress."""

HOOKS: Registry[Any] = Registry("hook", "--hook", call="run")
"""Functions of the Run that return a megatron.training.loop.loop.Hook, on every rank."""

FLAG_HOOKS: Registry[Any] = Registry("hook of flags", call="run", takes_flags=False)
"""The same, of extensions: they act on runs that have a section of flags; `about` is a
megatron.config.plugins.RunHook."""

METRICS: Registry[Any] = Registry("metric", "--metric", call="run")
"""Functions of the Run that return a function of the TrainState: numbers by name, after each step,
on every rank."""

OBJECTIVES: Registry[Any] = Registry(
    "objective",
    "--objective",
    {
        "gpt": "megatron.objectives.gpt",
        "prefix-lm": "megatron.objectives.prefix_lm",
        "multitask": "megatron.objectives.multitask",
        "sft": "megatron.objectives.sft",
    },
    call="",
)
"""Classes like megatron.objectives.objective.Objective, with their `name`; `about` is a
megatron.config.objectives.Declaration, by default GPT's."""

NETWORKS: Registry[Any] = Registry(
    "network",
    "--network",
    {"gpt": "megatron.config.gpt"},
    call="",
)
"""Classes like megatron.config.network_contract.Network, with their `name`."""

HEADS: Registry[Any] = Registry("head", call="under", takes_flags=False)
"""Functions of a network, one that `takes_heads`, that return it with another head."""

DATASETS: Registry[Any] = Registry(
    "dataset", "--dataset", otherwise="; token files are named by --data-path"
)
"""Classes like megatron.data.datasets.gpt_dataset.GPTDataset."""

KINDS: Registry[Any] = Registry(
    "kind of token files",
    call="",
    takes_flags=False,
)
"""Classes like megatron.data.datasets.kinds.Kind; `about` is the suffixes of the token files after
their prefix, () where samples come from other files."""

_TYPES = "megatron.tokenizer.types"
TOKENIZERS: Registry[Any] = Registry(
    "tokenizer",
    "--tokenizer-type",
    {
        **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), f"{_TYPES}.wordpiece"),
        "GPT2BPETokenizer": f"{_TYPES}.gpt2",
        **dict.fromkeys(("PretrainedFromHF", "HuggingFaceTokenizer"), f"{_TYPES}.hugging_face"),
        "SentencePieceTokenizer": f"{_TYPES}.sentencepiece",
        "GPTSentencePieceTokenizer": f"{_TYPES}.sentencepiece",
        "Llama2Tokenizer": f"{_TYPES}.sentencepiece",
        "TikTokenizer": f"{_TYPES}.tiktoken",
        "NullTokenizer": f"{_TYPES}.null",
    },
    call="options",
    takes_flags=False,  # they would have to be recorded with token files; --tokenizer-kwargs is
)
"""Functions of megatron.tokenizer.types.options.TokenizerOptions, the flags of tokenizers, that return a
megatron.tokenizer.types.tokenizer.Tokenizer; `about` is a megatron.tokenizer.types.options.Takes, without which
all flags are accepted."""

EXPORTERS: Registry[Any] = Registry(
    "exporter",
    "--exporter",
    {
        "transformers": "megatron.checkpointing.hugging_face.export",
        "safetensors": "megatron.checkpointing.conversion.own_safetensors",
    },
    call="job, folder",
)
"""Functions (job: megatron.checkpointing.conversion.export.Export, folder) that write a checkpoint in another
format to a folder, and return the text that the tool prints of it."""

LOADERS: Registry[Any] = Registry(
    "format of checkpoints", call="path, *, heads, task", takes_flags=False
)
"""Functions that read a checkpoint of another program that the core does not support, and return a
megatron.checkpointing.megatron_lm.foreign_checkpoint.ForeignCheckpoint; `about` is a
megatron.checkpointing.megatron_lm.detect.Format."""

FAMILIES: Registry[Any] = Registry(
    "set of architectures",
    built_in={"decoders": "megatron.checkpointing.hugging_face.families.registry"},
    call="",
    takes_flags=False,
)
"""Functions that return megatron.checkpointing.hugging_face.families.family.Family, of the models of
transformers that are written and read; the first that expresses a network is preferred."""

REGISTRIES = (
    OBJECTIVES,
    NETWORKS,
    DATASETS,
    TOKENIZERS,
    POSITION_EMBEDDINGS,
    ACTIVATIONS,
    NORMS,
    ATTENTIONS,
    OPTIMIZERS,
    SCHEDULES,
    HOOKS,
    METRICS,
    EXPORTERS,
)
