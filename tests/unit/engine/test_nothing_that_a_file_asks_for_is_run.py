"""Files that ask for a command are refused by whoever reads them, and the command is not run."""

import ast
import importlib.util
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.conversion.model_folder import Reader
from megatron.checkpointing.manifest import Manifest, read_manifest, record_file, write_manifest
from megatron.checkpointing.megatron_lm import bigscience, llama_meta, megatron
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.universal import universal_index, write_universal
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError, MegatronError
from megatron.data.sampling.index_cache import cached_maps
from megatron.data.sampling.index_size import MapRoom
from megatron.data.token_files.indexed_dataset import open_token_files
from megatron.tensor_parallel.sharding import shard_of

REPOSITORY = Path(__file__).resolve().parents[3]
ZERO = ("--bf16", "--zero-stage", "1")


class Runs:
    """What a file that wants to run a command holds."""

    def __reduce__(self):
        return os.system, ("touch was_run",)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that the command would leave its mark in."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not Path("was_run").exists()


def write_trap(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"module": {"weight": torch.zeros(1)}, "args": Runs()}, file)


def test_the_trap_works(here: Path) -> None:
    write_trap(here / "file.pt")
    torch.load("file.pt", weights_only=False)
    Path("was_run").unlink()


@pytest.fixture
def saved(build, micro_batch, here):
    """A checkpoint after a step, and a function that puts a trap in place of one of its files."""
    engine = build(*ZERO)
    engine.train_batch(iter([micro_batch(0)]))
    whole = here / "whole" / "global_step1"
    engine.save(whole.parent, whole.name, {})
    named = engine.module.named_parameters()
    dims = {name: shard.dim for name, p in named if (shard := shard_of(p))}

    def trapped(name: str) -> tuple[Path, Manifest]:
        folder = Path(shutil.copytree(whole, here / name / "global_step1"))
        if name != "whole again":
            write_trap(folder / name)
        manifest = Manifest(
            state=TrainState(iteration=1, samples=2, tokens=12),
            plan=tiny_plan(*ZERO).to_dict(),
            config=asdict(tiny_config(*ZERO)),
            versions={},
            partition_dims=dims,
            files=tuple(map(record_file, sorted(folder.iterdir()))),
        )
        # The author of the trap also writes a manifest that fits it.
        write_manifest(folder, manifest)
        return folder, manifest

    return trapped


MAIN, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("name", [MAIN, OPTIMIZER, "rng_rank_00000.pt"])
def test_of_our_own_checkpoints(saved, build, capsys, name: str) -> None:
    folder, manifest = saved(name)
    refused = r"refers to posix\.system|cannot be loaded|streams cannot be read"
    with pytest.raises(CheckpointError, match=refused):
        build(*ZERO).load(folder.parent, folder.name, read=read_state)
    if name.startswith("rng"):
        with problem("random streams", CheckpointError):
            build(*ZERO).load_streams(folder)
        return
    with problem(f"{name} … posix.system", CheckpointError):
        read_sharded(folder, manifest)
    with problem(f"{name} … posix.system", CheckpointError):
        write_universal(folder, Path("universal"), workers=1)
    for tool, *flags in (
        ("convert_checkpoint/inspect_checkpoint.py", folder / name),
        ("checkpoint/digest.py", folder),
        ("convert_checkpoint/deepspeed_to_megatron.py", "--input_folder", folder, *MEGATRON),
    ):
        if tool.endswith("megatron.py") and name == OPTIMIZER:
            continue  # it reads the weights alone
        with problem("posix.system", CheckpointError):
            run(tool, *flags)


MEGATRON = ("--output_folder", "megatron")


def run(name: str, *words: object) -> None:
    spec = importlib.util.spec_from_file_location(Path(name).stem, REPOSITORY / "tools" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


def test_parameters_of_a_universal_checkpoint_are_counted(saved, monkeypatch, caplog) -> None:
    folder, _ = saved("whole again")
    monkeypatch.setattr("megatron.common.progress.EVERY_S", 0.0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with caplog.at_level("INFO", "megatron"):
        write_universal(folder, Path("universal"), workers=1)
    (last,) = (line for line in caplog.messages if "done: 100.0%" in line)
    assert last.startswith("universal checkpoint: ")


def test_of_universal_checkpoints(saved) -> None:
    folder, _ = saved("whole again")
    write_universal(folder, Path("universal"), workers=1)
    for name in (next(Path("universal").rglob("fp32.pt")), Path("universal/progress.pt")):
        whole = name.read_bytes()
        write_trap(name)
        with problem("posix.system", CheckpointError):
            universal = Path("universal")
            _look_at_all(universal_index(universal, _resealed(universal)).checkpoint(universal))
        name.write_bytes(whole)


def _resealed(folder: Path) -> Manifest:
    """Return a manifest of what the folder holds."""
    manifest = read_manifest(folder)
    files = tuple(replace(record_file(folder / f.name), name=f.name) for f in manifest.files)
    return replace(manifest, files=files)


def _look_at_all(whole) -> None:
    for parameter in whole.parameters.values():
        parameter.weight.all()


LAYERS = [f"layer_{n:02d}-model_00-model_states.pt" for n in (1, 3, 5)]


@pytest.mark.parametrize(
    ("find", "name", "beside"),
    [
        (megatron.find, "iter_0000001/mp_rank_00/model_optim_rng.pt", {}),
        (bigscience.find, f"global_step1/{MAIN}", {"latest": "global_step1"}),
        (llama_meta.find, "consolidated.00.pth", {"params.json": "{}"}),
        (Reader, "pytorch_model.bin", {}),
    ],
)
def test_of_checkpoints_of_others(
    here: Path, find: Callable[[Path], object], name: str, beside: dict[str, str]
) -> None:
    write_trap(here / name)
    (here / "latest_checkpointed_iteration.txt").write_text("1")
    for file, text in beside.items():
        (here / file).write_text(text)
    for layer in LAYERS:
        torch.save({}, (here / name).with_name(layer))
    with problem("posix.system", CheckpointError):
        find(here)


def test_of_data_and_their_indices(here: Path) -> None:
    trap = pickle.dumps(Runs())
    for suffix in (".idx", ".bin"):
        Path(f"data{suffix}").write_bytes(trap)
    for impl in ("infer", "mmap", "lazy", "cached"):
        with problem("data", MegatronError):
            open_token_files("data", impl)


SHAPES: dict[str, tuple[int | None, ...]] = {"order": (None,)}


def test_of_cached_indices(here: Path) -> None:
    def build() -> dict[str, np.ndarray]:
        return {"order": np.arange(3)}

    def cached() -> np.ndarray:
        room = MapRoom(0, 0, "nothing")
        return cached_maps("all", SHAPES, build, room, prefix="data", directory=here)["order"][:]

    cached()
    (file,) = here.glob("*.npy")
    np.save(file, np.array([Runs()], dtype=object), allow_pickle=True)
    assert cached().tolist() == [0, 1, 2]


READS = {"load", "loads", "Unpickler"}
RUN_WHAT_THEY_READ = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

RESTRICTED = "megatron/checkpointing/resharding/unpickle.py"
"""The file with an unpickler that returns stand-ins; see test_torch_dist.py for what it refuses."""

OF_OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
"""Collectives of torch.distributed that load pickles; see megatron/tensor_parallel/object_collectives.py."""


def reads(file: Path) -> Iterator[str]:
    """Yield each place of a source file that may run what another file asks for."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import) and RUN_WHAT_THEY_READ & {a.name for a in node.names}:
            yield f"{file}:{node.lineno}: imports a module that runs what it reads"
        if isinstance(node, ast.ImportFrom) and node.module in RUN_WHAT_THEY_READ:
            names = {alias.name for alias in node.names} - {"UnpicklingError", "dumps"}
            names -= {"Unpickler"} if str(file).endswith(RESTRICTED) else set()
            yield from (f"{file}:{node.lineno}: imports {node.module}.{name}" for name in names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            output = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and output.get("weights_only") != "True":
                yield f"{file}:{node.lineno}: torch.load without weights_only"
            if called == "np.load" and output.get("allow_pickle") != "False":
                yield f"{file}:{node.lineno}: np.load without allow_pickle=False"
            if node.func.attr in OF_OBJECTS:
                yield f"{file}:{node.lineno}: {called} loads pickles"


def test_of_any_file(here: Path) -> None:
    sources = [
        *REPOSITORY.glob("*.py"),
        *(REPOSITORY / "megatron").rglob("*.py"),
        *(REPOSITORY / "tools").rglob("*.py"),
        *(REPOSITORY / "benchmarks").rglob("*.py"),
    ]
    assert [place for file in sources for place in reads(file)] == []
    wrong = here / "wrong.py"
    wrong.write_text("import pickle\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n")
    with wrong.open("a") as file:
        file.write("dist.all_gather_object(found, own)\n")
    assert len([*reads(wrong)]) == 4
