"""A model of transformers is the same network here, and the same files when it is exported again."""

from collections.abc import Mapping
from pathlib import Path

import torch
from architectures import require_equal, tool
from checkpoints import in_transformers
from families import (
    decoded_logits,
    logits_and_gradients,
    require_close,
    sample,
    their_logits_and_gradients,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.inference.loading.loaded_model import lone_groups


def require_same_model(model: PreTrainedModel, folder: Path) -> None:
    """Import a model and export it again; compare weights, logits, gradients and decode steps."""
    model.save_pretrained(folder / "hf", max_shard_size="10KB")
    tool("from_hf", "--load", folder / "hf", "--save", folder / "ours", "--seq-length", 20)
    saved = folder / "ours/global_step0"
    manifest = read_manifest(saved)
    spec, checkpoint = manifest.spec, read_checkpoint(saved, manifest, optimizer=False)
    own = load_network(spec, checkpoint)
    assert spec.num_parameters == sum(p.numel() for p in own.parameters())

    own_type = ["--model-type", model.config.model_type]
    tool("to_hf", "--load", folder / "ours", "--save", folder / "back", "--no-verify", *own_type)
    files = (folder / "hf").glob("*.safetensors")
    wanted = {name: weight for file in files for name, weight in load_file(file).items()}
    require_equal(
        with_one_head(load_file(folder / "back/model.safetensors")), with_one_head(wanted)
    )

    ids = sample(length=25)
    logits, gradients = logits_and_gradients(own, ids)
    expected, theirs = their_logits_and_gradients(model, ids, folder / "gradients")
    require_close(logits, expected)
    family = family_of(spec, model.config.model_type)
    found, theirs = map(with_one_head, (in_transformers(spec, gradients, family), theirs))
    assert len(found) > 2 and found.keys() <= theirs.keys()
    for name, gradient in found.items():
        require_close(gradient, theirs[name], name)

    decoded, positions_bn = decoded_logits(spec, checkpoint.parameters, ids, lone_groups())
    require_close(decoded, expected[torch.arange(len(ids))[:, None], positions_bn])


def with_one_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename GPT-NeoX's head, whose name depends on the version of transformers."""
    return {name.replace("embed_out.", "lm_head."): weight for name, weight in weights.items()}
