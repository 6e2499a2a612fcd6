"""A package outside megatron with a part of every kind.

`--plugin my_plugin` registers them; their flags are fields of the dataclasses here.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.api import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    EXPORTERS,
    HOOKS,
    METRICS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    SCHEDULES,
    TOKENIZERS,
    Hook,
    lr_decay,
)
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.model.layers.attention_kernels import sdpa_attention
from megatron.model.layers.norms import RMSNorm
from megatron.model.layers.positions import PositionEmbedding
from megatron.model.loss import Losses
from megatron.objectives.gpt import GPT
from megatron.tokenizer.types.options import Takes
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary


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


@dataclass(frozen=True, kw_only=True)
class BeatConfig:
    """A learning rate that beats."""

    beats: int = 2
    """Beats from the warm-up to the end."""


@dataclass(frozen=True, kw_only=True)
class SignsConfig:
    """Steps along the sign of the gradient."""

    sign_momentum: float = 0.9
    """How much of the last direction stays."""


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

    def loss_terms(self, spec):
        """Return the names of its own metrics, which evaluations log."""
        return ("late share",)

    def loss(self, plan):
        build = super().loss(plan)

        def build_weighted(*parts, **options):
            mean = build(*parts, **options)

            def loss(logits_bsv, batch):
                CALLS["loss"] += 1
                s = batch["labels"].size(1)
                weights = 1 + self.weight * batch["positions"] / s
                total = mean(logits_bsv, batch | {"loss_mask": batch["loss_mask"] * weights})
                late = weights[:, s // 2 :].sum() / weights.sum()
                return Losses(total, {"late share": late})

            return loss

        return build_weighted


@DATASETS.register("backwards")
class Backwards(GPTDataset):
    """Samples that are read from their last token to their first."""

    def __getitem__(self, i):
        CALLS["dataset"] += 1
        return {"tokens": super().__getitem__(i)["tokens"][::-1].copy()}


@ACTIVATIONS.register("mish")
def mish(x, bias, kernels):
    """x tanh(softplus(x)) (arXiv:1908.08681)."""
    CALLS["activation"] += 1
    return torch.nn.functional.mish(x if bias is None else x + bias)


@NORMS.register("centred")
class Centred(RMSNorm):
    """RMSNorm of the features without their mean."""

    def forward(self, x):
        CALLS["norm"] += 1
        return super().forward(x - x.mean(-1, keepdim=True))


@ATTENTIONS.register("halved")
def halved(query, key, value, how):
    """Softmax attention, of which half is added."""
    CALLS["attention"] += 1
    return sdpa_attention(query, key, value, how) / 2


@OPTIMIZERS.register("signs", flags=SignsConfig)
class Signs(torch.optim.Optimizer):
    """A step of the learning rate along the sign of a running mean of the gradients."""

    def __init__(self, groups, lr, plan, *, tensor_group, dtype, flags):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum = flags.sign_momentum

    @torch.no_grad()
    def step(self, closure=None):
        CALLS["optimizer"] += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight.grad, 1 - self.momentum)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * mean.sign())


@SCHEDULES.register("beats", flags=BeatConfig)
@lr_decay
def beats(progress, *, flags):
    """Return the share of the peak: it falls and rises so many times."""
    return 0.5 * (1 + math.cos(2 * math.pi * flags.beats * progress))


@TOKENIZERS.register("letters", about=Takes())
class Letters(Tokenizer):
    """An id for each ASCII character."""

    name, vocab_size = "letters", 129

    def __init__(self, options):
        self.special_ids = {"eod": 128}

    def encode(self, text):
        return [ord(letter) % 128 for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def vocabulary(self):
        return Vocabulary([chr(i) for i in range(128)], "letters")


@EXPORTERS.register("shapes")
def shapes(job, folder):
    """Write the shape of each weight to a file."""
    content = {name: list(weight.shape) for name, weight in job.weights()}
    (folder / "shapes.json").write_text(json.dumps(content))
    return f"the shapes of {len(content)} weights"


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
