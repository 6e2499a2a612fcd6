"""Detect the system that wrote a checkpoint from its file names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.manifest import LATEST, has_manifest, published_tags
from megatron.common.registry import LOADERS

RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
"""Flag of Megatron-LM's with which it saves states that any ranks load."""

SYSTEMS = {
    "own": "this program's",
    "torch_dist": "Megatron-LM's in the format torch_dist",
    "megatron": "Megatron-LM's",
    "bigscience": "of BigScience's or Microsoft's Megatron-DeepSpeed",
    "llama_meta": "Llama in Meta's files",
    "hugging_face": "in Hugging Face's format",
    "universal": "DeepSpeed's universal, written by another program",
    "deepspeed": "DeepSpeed's, of a run without a pipeline, written by another program",
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format that is registered in LOADERS.

    Args:
        program: that writes it.
        recognises: whether a path holds a checkpoint in it.
        tokenizer_in: dotted name of a function that returns the type of the tokenizer in a path and
            its vocabulary file, None if there is none.
    """

    program: str
    recognises: Callable[[Path], bool]
    tokenizer_in: str


def title_of(system: str) -> str:
    """Return the description of a checkpoint of that system, for messages."""
    return SYSTEMS.get(system) or f"a checkpoint of {LOADERS.about(system).program}'s"


def system_of(path: Path) -> str | None:
    """Return a key of SYSTEMS or a name in LOADERS, or None."""
    if has_manifest(path) or published_tags(path):
        return "own"
    folder = _latest(path)
    shards = ("*.distcp", "iter_*/*.distcp")
    # Of a new run there are only the lock and the journal: no extension is imported to look at them.
    others = LOADERS.with_extensions() if _has_weights(path) else ()
    has = {
        "llama_meta": (path / "params.json").is_file() and any(path.glob("consolidated.*.pth")),
        "hugging_face": (path / "config.json").is_file(),
        "bigscience": any(folder.glob("layer_*-model_*-model_states.pt")),
        "universal": (folder / "zero").is_dir(),
        **{name: LOADERS.about(name).recognises(path) for name in others},
        "torch_dist": any(next(path.glob(pattern), None) for pattern in shards),
        "megatron": path.is_file()
        and path.suffix == ".pt"
        or (path / "latest_checkpointed_iteration.txt").is_file()
        or any(path.glob("mp_rank_*/model_optim_rng.pt")),
        "deepspeed": any(folder.glob("*mp_rank_*_model_states.pt")),
    }
    return next((system for system, is_it in has.items() if is_it), None)


def foreign_checkpoint_in(path: Path) -> str:
    """Return whose checkpoint is in the directory of a run, and how to import it; "" if none is there."""
    system = system_of(path)
    if system in (None, "own", "deepspeed", "universal"):
        return ""
    how = {
        "hugging_face": f"import it with tools/convert_checkpoint/from_hf.py --load {path} --save NEW, and "
        "write --load NEW --finetune",
    }
    saver = "--saver own " if system == "megatron" else ""  # else its files are written again
    convert = f"convert it with tools/checkpoint/util.py {saver}--load-dir {path} --save-dir NEW, and write --load NEW"
    return f"{title_of(str(system))}, {how.get(str(system), convert)}"


def _has_weights(path: Path) -> bool:
    return path.is_file() or any(each.suffix not in (".json", ".jsonl") for each in path.glob("*"))


def _latest(path: Path) -> Path:
    hint = path / LATEST
    return path / hint.read_text(encoding="utf-8").strip() if hint.is_file() else path
