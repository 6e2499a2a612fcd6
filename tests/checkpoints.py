"""Checkpoints of small networks, written without a run."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from networks import gpt_steps
from tiny import VOCAB_SIZE, tiny_config
from torch import Tensor

from megatron.checkpointing.conversion.network import parameters_of, weights_of
from megatron.checkpointing.hugging_face.families.family import Family
from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.manifest import Manifest, record_file, write_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan.plan import plan
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import shard_of

_POSITIONS = "tied_modules.positions."
_PROGRESS = {"global_steps": 3, "global_samples": 6, "skipped_steps": 0, "optimizer": None}


def spread_network(spec: ModelSpec, group, *, seed: int = 1) -> SequentialModel:
    """Return a network whose biases and norms are not all zeros and ones."""
    model = SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=seed, std=0.2, num_layers=spec.num_layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            if tensor.dim() == 1 or name.endswith("bias"):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def random_weights(spec: ModelSpec, *, seed: int = 1) -> dict[str, Tensor]:
    """Return weights of a network by name, the scales of norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator)
        + (1 if "norm" in name and name.endswith("weight") else 0)
        for name, parameter in parameters_of(spec).items()
    }


def write_checkpoint(
    directory: Path,
    weights: dict[str, Tensor],
    *flags: str,
    vocab_size: int = VOCAB_SIZE,
    objective: str = "gpt",
    without: tuple[str, ...] = (),
) -> Path:
    """Write weights as ranks of the layout in `flags` do, without an optimizer; return the folder."""
    folder = directory / "global_step3"
    folder.mkdir(parents=True)
    config = tiny_config(*flags, without=without)
    layout = config.parallel
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    decided = plan(
        config,
        world_size=tensor * pipeline,
        vocab_size=vocab_size,
        device="cpu",
        objective=objective,
    )
    own = parameters_of(decided.model)
    dims = {name: shard.dim for name, p in own.items() if (shard := shard_of(p))}
    for rank in range(tensor):
        shards = {
            name: weight.chunk(tensor, dims[name])[rank].clone() if name in dims else weight.clone()
            for name, weight in weights.items()
        }
        if pipeline > 1:
            for number in {_number(name) for name in shards}:
                entry = {_rest(n): shard for n, shard in shards.items() if _number(n) == number}
                torch.save(entry, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        for stage in range(pipeline):
            file = folder / f"mp_rank_{stage * tensor + rank:02d}_model_states.pt"
            torch.save({"module": None if pipeline > 1 else shards, **_PROGRESS}, file)
    manifest = Manifest(
        state=TrainState(iteration=3, samples=6, tokens=36),
        plan=json.loads(json.dumps(decided.to_dict())),
        config=asdict(config),
        versions={"megatron": "test"},
        partition_dims=dims,
        files=tuple(map(record_file, sorted(folder.iterdir()))),
    )
    write_manifest(folder, manifest)
    return folder


def whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return {parameter name: whole tensor} of the checkpoint in `folder`."""
    parameters = read_checkpoint(folder, manifest, optimizer=False).parameters
    return {name: parameter.weight.all() for name, parameter in parameters.items()}


def in_transformers(
    spec: ModelSpec, weights: dict[str, Tensor], family: Family | None = None
) -> dict[str, Tensor]:
    """Return weights, or their gradients, as the tensors of transformers'."""
    return {
        name: tensor
        for part in (family or family_of(spec)).parts(spec)
        if part.ours in weights
        for name, tensor in zip(
            part.theirs, part.mapping.to_hugging_face(weights[part.ours]), strict=True
        )
    }


def _number(name: str) -> int:
    if name.startswith(_POSITIONS):
        return 2
    first = name.partition(".")[0]
    return int(first) if first.isdigit() else 1


def _rest(name: str) -> str:
    rest = name.removeprefix("tied_modules.embed.").removeprefix(_POSITIONS)
    return rest.removeprefix(f"{_number(name)}.")
