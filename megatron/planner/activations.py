"""Activation memory: bytes that a forward pass keeps for backward, per micro-batch and rank.

The formulas count the tensors that this project's layers keep. In 16 bits on a GPU, without tensor
parallelism and dropout, they are the 34 s b h of arXiv:2205.05198, section 4.1, less the 5 s b h
of its dropout masks and score matrices, plus the output of attention.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.config.architecture.architecture import Architecture, Entry, network_of
from megatron.config.architecture.attention_form import attention_form
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec
from megatron.config.network.spec_part import AttentionForm
from megatron.config.plan.plan import Plan

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a number in each dtype."""


@dataclass(frozen=True)
class Activations:
    """Sizes of what one rank keeps of one micro-batch.

    Args:
        device: "cuda" or "cpu", whose implementations of attention and dropout keep other things.
    """

    plan: Plan
    device: str

    @property
    def spec(self) -> ModelSpec:
        """The network."""
        return self.plan.model

    @property
    def _network(self) -> Architecture:
        return network_of(self.plan.model)

    def of(self, spec: ModelSpec, *, samples: int = 1) -> "Activations":
        """Return those of another network in this run, with `samples` for each sample."""
        batch = self.plan.batch
        micro = replace(batch, micro_batch_size=batch.micro_batch_size * samples)
        return Activations(replace(self.plan, model=spec, batch=micro), self.device)

    def entry(self, entry: Entry) -> int:
        """Return the bytes that an entry of the list of layers keeps when nothing is recomputed."""
        return self._network.kept_bytes(entry, self)

    def deferred_bytes(self, entry: Entry) -> int:
        """Return the bytes that its weight gradients are computed from: see `products`."""
        return self._network.deferred_bytes(entry, self)

    @cached_property
    def rows(self) -> int:
        """Sequences of a micro-batch: each of the choices of a question is one."""
        return self.plan.batch.micro_batch_size * self._network.rows(self.spec)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch that one rank sees inside attention's and the MLP's matrices."""
        spec, parallel = self.plan.model, self.plan.parallel
        if parallel.ring:  # two chunks, the last one padded
            return self.rows * 2 * -(-spec.seq_length // (2 * parallel.sequence))
        return self.rows * spec.seq_length // parallel.sequence

    @cached_property
    def outside(self) -> int:
        """Tokens between these: tensor-parallel ranks may divide them."""
        divides = self.plan.parallel.sequence_parallel
        return self.tokens // (self._tensor if divides else 1)

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream between two layers."""
        return self.outside * self.plan.model.hidden_size * self._residual

    def layer(self, number: int) -> int:
        """Return the bytes that the layer `number`, from 1 on, keeps when nothing is recomputed."""
        norms = self.plan.model.norm.per_layer * self.norm()
        return norms + self.attention() + 2 * self.dropped() + self.mlp(number)

    def dropped(self) -> int:
        """Return the bytes of the dropout mask of what is added to the residual stream."""
        spec = self.plan.model
        mask = self._dropout_mask if spec.hidden_dropout else 0
        return self.outside * spec.hidden_size * mask

    def mlp(self, number: int) -> int:
        """Return the activations of the MLP, or of the experts, of the layer `number`."""
        return self._mlp() if self.plan.model.experts_of(number) == 1 else self._mixture()

    def products(self, number: int) -> int:
        """Return the bytes that the weight gradients of the layer `number` are computed from.

        That are the inputs of its linear layers, and the gradients of their outputs; those of experts
        are computed at once.
        """
        spec = self.plan.model
        widths = [spec.mlp.ffn_hidden_size]
        if spec.experts_of(number) > 1:
            moe = spec.part(MoESpec)
            shared = moe.shared_expert_ffn_hidden_size
            widths = [*([shared] if shared else []), *(widths if moe.residual_experts else [])]
        inner = sum(widths) * (3 if spec.mlp.is_gated else 2)
        mlp = self.tokens * inner // self._tensor
        mlp += len(widths) * (self.outside + self.tokens) * spec.hidden_size
        return self.attention_products() + mlp * self._bytes

    def attention_products(self, source: "Activations | None" = None) -> int:
        """Return the same of attention.

        Args:
            source: of keys and values in cross-attention.
        """
        spec, tensor = self.plan.model, self._tensor
        if source:
            queries, keys = 2 * spec.attention.query_features, 2 * spec.attention.key_features
            inner = (self.tokens * queries + source.tokens * keys) // tensor
            streams = (self.outside + self.tokens + source.outside) * spec.hidden_size
            return (inner + streams) * self._bytes
        features = 0
        for product in attention_form(spec).products:
            inputs, outputs = product.shape(tensor)
            is_row, is_column = product.divided == "rows", product.divided == "columns"
            features += inputs * (self.tokens if is_row else self.outside)
            features += outputs * (self.tokens if is_row or is_column else self.outside)
        return features * self._bytes

    def embedding(self) -> int:
        """Return the activations of the embedding."""
        spec = self.plan.model
        mask = self._bytes if self.device == "cpu" else 1
        kept = self.outside * spec.hidden_size * mask if spec.hidden_dropout else 0
        return kept + (self.norm() - self.stream if spec.norm.embed_layernorm else 0)

    def prediction(self, number: int) -> int:
        """Return the activations of a depth of multi-token prediction, whose layer has this number.

        That are three norms, the embedding of later tokens, both streams side by side and the layer.
        """
        streams = 2 * self.outside * self.plan.model.hidden_size * self._bytes
        return 3 * self.norm() + self.embedding() + streams + self.layer(number)

    def features(self) -> int:
        """Return the activations of a head before the logits: dense layer, GELU and norm."""
        return self.outside * self.plan.model.hidden_size * self._bytes + self.norm()

    def logits(self) -> int:
        """Return the bytes that the loss keeps for backward: logits, in 32 bits or as kernels read them.

        Soft-capping keeps their tangents too. In chunks, the loss keeps gradients instead: of the
        head's input, and of its table in 32 bits.
        """
        if not self.defers_logits:
            return self._logits_of(self._scored_activations.tokens)
        spec = self.plan.model
        table = spec.vocabulary.padded_vocab_size * spec.hidden_size // self._tensor
        return 4 * table * self.spec.scores_per_token + self.head_input()

    def loss(self) -> int:
        """Return the bytes that computing the loss takes for a moment on top of `logits`.

        That is the gradient of the logits, and where they are cast to 32 bits that of 16 bits too; in
        chunks, also the logits of one.
        """
        chunk = min(self.plan.kernels.loss_chunk_tokens, self._scored_activations.tokens)
        logits = self._logits_of(chunk if self.defers_logits else self._scored_activations.tokens)
        is_cast = self.plan.precision.is_mixed
        gradient = logits + (self.uncast_logits(logits) if is_cast else 0)
        logit_bytes = logits if self.defers_logits else 0
        return logit_bytes + (0 if self._overwrites_logits else gradient)

    @property
    def defers_logits(self) -> bool:
        """Whether the loss computes logits in chunks of tokens."""
        return self.plan.kernels.loss_chunk_tokens > 0

    def head_input(self) -> int:
        """Return the bytes of the activations that the logits are computed from."""
        return self._scored_activations.tokens * self.plan.model.hidden_size * self._bytes

    def uncast_logits(self, logits: int) -> int:
        """Return the bytes, in the network's dtype, of logits that take `logits` bytes in 32 bits."""
        return 0 if self._overwrites_logits else logits * self._bytes // 4

    @property
    def _overwrites_logits(self) -> bool:
        """Whether a kernel reads logits of any dtype and writes their gradient over them."""
        kernels = self.plan.kernels
        fused = kernels.source != "reference" and "cross-entropy" not in kernels.unfused
        return self.device == "cuda" and fused and not self.plan.model.vocabulary.logit_softcap

    def _logits_of(self, tokens: int) -> int:
        return self._network.kept_logits(self, tokens)

    def vocabulary_logits(self, tokens: int) -> int:
        """Return the bytes of the logits of `tokens` over the vocabulary."""
        spec = self.spec
        copies = 2 if spec.vocabulary.logit_softcap else 1
        each = self._bytes if self._overwrites_logits else 4
        return copies * each * tokens * spec.vocabulary.padded_vocab_size // self._tensor

    @cached_property
    def _scored_activations(self) -> "Activations":
        """Those of the samples whose logits are computed, once for each depth of prediction."""
        scored = self._network.scored_spec(self.spec)
        return self.of(scored, samples=self.spec.scores_per_token)

    def cross_attention(self, source: "Activations") -> int:
        """Return the activations of cross-attention to `source`, and of the norm before it."""
        return self.norm() + self.attention() + self.keys_beyond(source.tokens - self.tokens)

    def keys_beyond(self, tokens: int) -> int:
        """Return the bytes of keys and values of more tokens than those of self-attention."""
        keys = 2 * self._key_features * self._bytes // self._tensor
        return tokens * keys

    def norm(self) -> int:
        """Return the activations of a norm of the residual stream, its result included."""
        spec = self.plan.model
        stats = 2 if spec.norm.normalization == "LayerNorm" else 1
        wide = self.device != "cpu" or self._residual == 4
        kept = self.stream + self.outside * spec.hidden_size * self._bytes
        if self.device == "cpu" and spec.norm.normalization == "RMSNorm":
            # Composed of operations that keep the scaled input, in 16 bits its copy in 32 too.
            extra = self._bytes + (4 if self._bytes == 2 else 0)
            kept += self.outside * spec.hidden_size * extra
        return kept + self.outside * stats * (4 if wide else 2)

    def attention(self) -> int:
        """Return the activations of self-attention, without its norm."""
        spec, width = self.plan.model, self._bytes
        queries = spec.attention.query_features
        keys = self._key_features
        ring = self.plan.parallel.ring
        if self.device == "cpu" and not ring:
            keys = queries  # its kernel takes a key per query
        form = attention_form(spec)
        values = keys * spec.value_dim // spec.attention.head_dim
        # Ulysses keeps the mixed values before and after their exchange.
        outputs = form.value_features * (2 if self._sequence > 1 and not ring else 1)
        features = queries + keys + values + outputs
        if form.latents:
            features += self._beside_heads(form)
        elif spec.positions.reach_attention:
            features += queries + keys
        if spec.norm.qk_layernorm and not form.latents:
            features += 3 * (queries + keys) // 2
        kept = self.tokens * features * width // self._tensor + self._latent_bytes(form)
        if spec.positions.position_embedding == "rotary":
            kept += 2 * self.tokens * spec.positions.rotary_dim * 4
        selective = self.plan.recompute.granularity == "selective"
        return kept + (0 if selective else self._core())

    def _beside_heads(self, form: AttentionForm) -> int:
        """Return the features that latent attention keeps in addition to those of heads.

        That are values padded to the width of keys, or the reverse, and their mixture before it is cut;
        without padding, values are a part of the product that keys are composed of.
        """
        wider = form.value_features - self.spec.attention.query_features
        pads = self.device == "cpu" or self.plan.parallel.ring
        if pads and wider < 0:
            return form.value_features - 2 * wider
        return form.expanded + (2 * wider if pads else 0)

    def _latent_bytes(self, form: AttentionForm) -> int:
        """Return the bytes of latents: before and after their norms, and gathered."""
        if not form.latents:
            return 0
        of_queries = form.latents - form.cached
        each = self.outside * (form.latents + of_queries) + self.tokens * form.cached
        composed = 0  # as of `norm`
        if self.device == "cpu" and self.spec.norm.normalization == "RMSNorm":
            composed = self._bytes + (4 if self._bytes == 2 else 0)
        return each * self._bytes + self.outside * sum(form.norms) * composed

    @property
    def _has_masks(self) -> bool:
        return self.plan.kernels.attention == "sdpa" and not self.plan.parallel.ring

    def padding_masks(self, queries: int) -> int:
        """Return the bytes of masks of padding: `queries` of each sample see its real tokens."""
        rows = self.rows * self._bytes if self._has_masks else 0
        return rows * queries * self.spec.seq_length

    def masks(self, numbers: Iterable[int]) -> int:
        """Return the bytes of the attention masks that the layers `numbers` share."""
        spec = self.plan.model
        if not self._has_masks:
            return 0
        slopes = spec.positions.position_embedding == "alibi"
        rows = self.rows * self._bytes
        heads = self._heads if slopes else 1
        has_spans = self.plan.masks.isolate_documents or self._network.masks_padding
        windows = {spec.attention.window_of(number) for number in numbers}
        kinds = sum(1 for window in windows if window or slopes or has_spans)
        return kinds * (rows if has_spans else self._bytes) * heads * spec.seq_length**2

    def _core(self) -> int:
        """Return the activations of the core of attention."""
        spec, implementation = self.plan.model, self.plan.kernels.attention
        if self.plan.parallel.ring:
            # The logarithms of sums of exponentials.
            return 4 * self.tokens * spec.attention.num_attention_heads // self._tensor
        features = self.tokens * spec.attention.query_features // self._tensor
        square = spec.seq_length**2
        scores = self.rows * self._heads * square
        drops = spec.attention.attention_dropout > 0
        if implementation in ("sdpa", "flash"):
            if self.device == "cpu" and drops:
                # Written out in 32 bits: weights, mask and product of the two.
                scaled = 2 if self._bytes == 4 else 3
                return 12 * scores + scaled * features * self._bytes
            return 4 * scores // spec.seq_length
        capped = scores if spec.attention.attention_softcap else 0
        if self.device != "cpu":
            each = self._bytes * (2 if drops else 1) + drops
            return scores * each + (capped + features) * self._bytes
        wide = 4 if implementation == "reference" else self._bytes
        softmax = 4 if self.plan.kernels.softmax_in_fp32 else wide
        copies = (
            12 - 3 * self._bytes if implementation == "reference" and self._bytes == 2 else wide
        )
        weights = scores * (softmax + wide * (2 if drops else 1)) + capped * wide
        return weights + features * copies + square

    def _mlp(self) -> int:
        spec = self.plan.model
        # ReLU is undone from its result, which the next matrix keeps anyway.
        plain = 1 if spec.mlp.activation == "relu" else 2
        features = spec.mlp.ffn_hidden_size * (3 if spec.mlp.is_gated else plain)
        fused = self.device != "cpu" and self._is_fused("activation") and not spec.mlp.is_composed
        if spec.mlp.is_gated and not fused:
            # Gates as clamped, their sigmoid, what became of them, and the pairs' other halves.
            own = spec.mlp
            kept = (own.glu_clamp > 0, own.activation == "quick_geglu", own.activation != "liglu")
            features += spec.mlp.ffn_hidden_size * (sum(kept) + own.changes_pairs)
        return self.tokens * features * self._bytes // self._tensor

    def _mixture(self) -> int:
        """Return the activations of experts: sorted tokens, exchanged ones, and scores in 32 bits."""
        spec, moe = self.plan.model, self.plan.model.part(MoESpec)
        expert_bytes = self._mlp() * spec.expert_width // spec.mlp.ffn_hidden_size
        parallel, tokens = self.plan.parallel, 2 * self.tokens
        if parallel.divides_experts:
            # Those that this rank sends, and those that arrive at its experts.
            tokens = tokens * (1 + parallel.ranks_per_expert) // parallel.tensor
        rows = tokens * spec.hidden_size * self._bytes
        router = 4 * self.tokens * (spec.hidden_size + 2 * max(moe.num_experts))
        shared = self._mlp() * moe.shared_expert_ffn_hidden_size // spec.mlp.ffn_hidden_size
        return (
            int(self.choices * (expert_bytes + rows))
            + router
            + shared
            + (self._mlp() if moe.residual_experts else 0)
        )

    @property
    def choices(self) -> float:
        """Experts that compute a token, where each gets an even share of all tokens."""
        experts = self.plan.experts
        capacity = min(1.0, experts.train_capacity) if experts.drops_tokens else 1.0
        return self.plan.model.part(MoESpec).experts_per_token * capacity

    @property
    def _key_features(self) -> int:
        """Features of keys on all tensor-parallel ranks, of which several may share a query group."""
        attention = self.spec.attention
        return max(attention.num_query_groups, self._tensor) * attention.head_dim

    @property
    def _heads(self) -> int:
        return self.spec.attention.num_attention_heads // (self._tensor * self._sequence)

    @property
    def _tensor(self) -> int:
        return self.plan.parallel.tensor

    @property
    def _sequence(self) -> int:
        return self.plan.parallel.sequence

    @property
    def _bytes(self) -> int:
        return BYTES[self.plan.precision.dtype]

    @property
    def _residual(self) -> int:
        return 4 if self.plan.model.fp32_residual else self._bytes

    @property
    def _dropout_mask(self) -> int:
        """Bytes per feature: the fused kernel draws its mask again."""
        if self.device == "cpu":
            return self._bytes
        return 0 if self._is_fused("bias, dropout, residual") else 1

    def _is_fused(self, operation: str) -> bool:
        kernels = self.plan.kernels
        return kernels.source in ("auto", "triton") and operation not in kernels.unfused
