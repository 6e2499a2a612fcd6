"""A network with the head of a downstream task in place of the pretraining heads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.common.registry import HEADS
from megatron.config.architecture.architecture import Entry, Stacks
from megatron.config.architecture.counts import Weights, dense_weights, stack_flops
from megatron.config.config import Config
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.network.prediction import PredictionSpec
from megatron.config.network_contract import Network
from megatron.config.parallelism.layout import sequence_flags
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.extensions.tasks.data.text_flags import TEXT_TASKS, TextTaskConfig
from megatron.extensions.tasks.flags import DownstreamConfig, HeadSpec, downstream_in, head_of


@HEADS.register("classes")
class Classifier(Network):
    """Logits of classes, of each sequence or of each token.

    Args:
        under: the network that the head is on.
    """

    part = HeadSpec
    layers_in = "megatron.extensions.tasks.layers.classification_layers"
    use = "tasks/ evaluates it, with --epochs 0"
    usage = "evaluate with: {script} --epochs 0 --use-checkpoint-args --load {directory} ..."

    def __init__(self, under: Network):
        self.under = under
        # Copied from the network below the head.
        self.name = under.name
        self.is_causal = under.is_causal
        self.masks_padding = under.masks_padding
        self.megatron_in = under.megatron_in
        self.lacks = under.lacks
        self.options = (under.options - {*names_of(PredictionSpec)}) | {*names_of(HeadSpec)}

    def problems(self, config: Config) -> Iterator[str]:
        """Yield the problems of the network below the head, and flags of other heads."""
        yield from self.under.problems(config)
        chunk, task = config.kernels.loss_chunk_tokens, config.section(DownstreamConfig).task
        if chunk:
            yield (
                f"--loss-chunk-tokens {chunk}: a downstream task has no logits of tokens: leave it out"
            )
        layers = config.section(TextTaskConfig).head_layers
        if self.is_causal and layers is not None:
            yield f"--head-layers {layers} is for a BERT; leave it out"
        # Heads on each token, of which a decoder's loss takes the last.
        if not (self.is_causal or task in TEXT_TASKS):
            return
        for flag, ranks in sequence_flags(config.parallel).items():
            if ranks > 1:
                yield f"{flag} {ranks}: --task {task} needs full sequences; write 1"

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return the network below with the head of --task."""
        under = self.under.without_head(self.under.spec(plain, config))
        return replace(under, head=head_of(downstream_in(config)))

    def entries(self, spec: ModelSpec, *, tensor: int = 1, expert: int = 1) -> list[Entry]:
        """Return the entries of the network below with another head; choices are rows."""
        name = "take_tokens" if self.rows(spec) == 1 else "rows_of_choices"
        body = self.under.body(spec, tensor=tensor, expert=expert)
        return [Entry(name=name), *body, *self.head(spec, tensor=tensor)]

    def head(self, spec: ModelSpec, *, tensor: int) -> list[Entry]:
        """Return the head, which all ranks have."""
        head, width, dense = spec.part(HeadSpec), spec.hidden_size, dense_weights(spec)
        last = head.num_outputs * (width + 1)
        if self.is_causal:
            name, count = "ScorePipe", head.num_outputs * width
        elif head.head_layers:
            name, count = "LayersHeadPipe", (head.head_layers - 1) * dense + last
        else:
            name, count = "ClassificationHeadPipe", dense + last
        return [Entry(name=name, kind="task", weights=Weights(count))]

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample, without the head."""
        return float(2 * spec.seq_length * stack_flops(spec, recompute) * self.rows(spec))

    def kept_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that an entry of the network below keeps; the head's are not counted."""
        return self.under.kept_bytes(entry, sizes)

    def kept_logits(self, sizes: Any, tokens: int) -> int:
        """Return the bytes of the logits of `tokens`, or of their sequences."""
        spec = sizes.spec
        return int(4 * self.num_logits(spec) * (tokens if self.scores_tokens(spec) else sizes.rows))

    def rows(self, spec: ModelSpec) -> int:
        """Return the choices of a sample."""
        return spec.part(HeadSpec).num_choices

    def num_logits(self, spec: ModelSpec) -> int:
        """Return the classes, or 1 for a score."""
        return spec.part(HeadSpec).num_outputs

    def predicts(self, spec: ModelSpec) -> str:
        """Return that it predicts labels, if they have names."""
        return "label" if spec.part(HeadSpec).labels else ""

    def with_labels(self, spec: ModelSpec, labels: tuple[str, ...]) -> ModelSpec:
        """Return the network with names of its classes; choices have none."""
        head = replace(spec.part(HeadSpec), labels=labels)
        return spec if head.num_choices > 1 else replace(spec, head=head)

    def scores_tokens(self, spec: ModelSpec) -> bool:
        """Whether the head is on each token; the loss of a decoder takes the last one's logits."""
        head = spec.part(HeadSpec)
        return self.is_causal or bool(head.head_layers and not head.first_token_head)

    def prefixes(self, stacks: Stacks) -> Iterator[tuple[str, str]]:
        """Yield the prefixes of the network below, which has names for a head."""
        return self.under.prefixes(stacks)
