"""A package outside megatron: a position embedding, an objective, a dataset, a metric and a hook.

`--plugin my_plugin` registers them; their flags are fields of the dataclasses here.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.api import DATASETS, HOOKS, METRICS, OBJECTIVES, POSITION_EMBEDDINGS, Hook
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.model.layers.positions import PositionEmbedding
from megatron.objectives.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class WavesConfig:
    """Sinusoidal positions."""

    wave_base: float = 10000.0
    """Base of the wavelengths."""


@dataclass(frozen=True, kw_only=True)
class LateConfig:
    """An objective in which late tokens count more."""

    late_weight: float = 1.0
    """How much more the last token of a sample counts than the first."""


@dataclass(frozen=True, kw_only=True)
class NotesConfig:
    """Notes of a hook."""

    notes: str
    """Folder for a file of each rank."""


CALLS: Counter[str] = Counter()
"""How often each part was called in this process."""


@POSITION_EMBEDDINGS.register("waves", flags=WavesConfig)
class Waves(PositionEmbedding):
    """Sines and cosines that are added to the token embedding (arXiv:1706.03762, section 3.5)."""

    def __init__(self, spec, *, number, flags):
        super().__init__(spec, number=number)
        self.base = flags.wave_base

    def embed(self, x_bsh, positions_bs):
        CALLS["position embedding"] += 1
        half = self.spec.hidden_size // 2
        steps = torch.arange(half, device=x_bsh.device) / half
        angles = positions_bs[..., None] * torch.exp(-math.log(self.base) * steps)
        return x_bsh + torch.cat([angles.sin(), angles.cos()], -1).to(x_bsh.dtype)


@OBJECTIVES.register("late", flags=LateConfig)
class Late(GPT):
    """Next-token prediction in which late tokens count more."""

    name = "late"

    def __init__(self, flags):
        self.weight = flags.late_weight

    def loss(self, plan):
        build = super().loss(plan)

        def build_weighted(*parts, **options):
            mean = build(*parts, **options)

            def loss(logits_bsv, batch):
                CALLS["loss"] += 1
                s = batch["labels"].size(1)
                weights = 1 + self.weight * batch["positions"] / s
                return mean(logits_bsv, batch | {"loss_mask": batch["loss_mask"] * weights})

            return loss

        return build_weighted


@DATASETS.register("backwards")
class Backwards(GPTDataset):
    """Samples that are read from their last token to their first."""

    def __getitem__(self, i):
        CALLS["dataset"] += 1
        return {"tokens": super().__getitem__(i)["tokens"][::-1].copy()}


@METRICS.register("tokens_per_weight")
def tokens_per_weight(run):
    """Return a metric that needs the state alone; `run.engine` and `run.groups` are there too."""
    weights = run.plan.model.num_parameters
    return lambda state: {"tokens per weight": state.tokens / weights}


@HOOKS.register("notes", flags=NotesConfig)
class Notes(Hook):
    """Writes what was called, behind each step."""

    def __init__(self, run, *, flags):
        self.file = Path(flags.notes) / f"{run.groups.rank}.json"
        self.losses = []

    def after_step(self, state, step):
        self.losses.append(step.loss)
        self.file.write_text(json.dumps({**CALLS, "iteration": state.iteration}))
