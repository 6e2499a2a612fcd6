"""Registries of the parts that plugins can add (docs/extending.md); a leaf without imports of flags."""

from typing import Any

from megatron.common.registry import Registry

POSITION_EMBEDDINGS: Registry[Any] = Registry("position embedding", "--position-embedding-type")
"""Classes like megatron.model.layers.positions.PositionEmbedding."""

ACTIVATIONS: Registry[Any] = Registry("activation", "--activation")
"""Functions (x, bias or None) -> activation(x + bias); a gated one, with "glu" in its name, halves
the last dimension."""

NORMS: Registry[Any] = Registry("norm", "--normalization")
"""Classes like megatron.model.layers.norms.Norm."""

OPTIMIZERS: Registry[Any] = Registry("optimizer", "--optimizer")
"""Functions (parameter groups, lr, plan: OptimizerPlan) -> torch.optim.Optimizer."""

SCHEDULES: Registry[Any] = Registry("learning-rate schedule", "--lr-decay-style")
"""Functions of the progress from the end of the warm-up, 0, to the end of the decay, 1; they return
the share of the way from --min-lr up to --lr."""

HOOKS: Registry[Any] = Registry("hook", "--hook")
"""Functions of the Run that return a megatron.training.loop.loop.Hook, on every rank."""

METRICS: Registry[Any] = Registry("metric", "--metric")
"""Functions of the Run that return a function of the TrainState: numbers by name, after each step,
on every rank."""

REGISTRIES = (POSITION_EMBEDDINGS, ACTIVATIONS, NORMS, OPTIMIZERS, SCHEDULES, HOOKS, METRICS)
