"""Weights and floating-point operations of multi-token prediction."""

from dataclasses import replace

from megatron.config.architecture.counts import Weights, block_weights, norm_width, stack_flops
from megatron.config.network.model_spec import ModelSpec
from megatron.config.network.prediction import PredictionSpec
from megatron.config.parallelism.recompute_plan import RecomputePlan


def prediction_weights(spec: ModelSpec, *, tensor: int, expert: int = 1) -> Weights:
    """Return the weights of all layers that predict later tokens, on one of `tensor` ranks.

    Each has three norms, a matrix from two streams to one, which all ranks have, and a transformer
    layer.

    Args:
        expert: replicas that share the experts of a layer.
    """
    width = spec.hidden_size
    layer = Weights(2 * width**2 + 3 * norm_width(spec, width))
    layer += block_weights(spec, spec.num_layers + 1, tensor=tensor, expert=expert)
    layers = spec.part(PredictionSpec).num_layers
    return Weights(layers * layer.dense, layers * layer.experts)


def prediction_flops(spec: ModelSpec, recompute: RecomputePlan) -> float:
    """Return half the operations of forward and backward of all depths, for one token; see `stack_flops`.

    The head counts again for each depth. Layers that predict are not recomputed in full.
    """
    depths = spec.part(PredictionSpec).prediction_depths
    layers = [spec.num_layers + 1] * depths
    matrices = 2 * spec.hidden_size**2 + spec.vocabulary.padded_vocab_size * spec.hidden_size
    return stack_flops(spec, replace(recompute, share=0.0), layers) + 3 * depths * matrices
