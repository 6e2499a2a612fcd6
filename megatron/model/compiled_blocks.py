"""torch.compile of transformer layers and of the loss (--compile), by inductor.

A layer is compiled as one graph (`fullgraph`), and all layers that are alike share what was
compiled, so that compilation takes the time of one layer. Modules, parameters and their names stay
what they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.common.errors import ConfigError
from megatron.fused_kernels.compilation import compile_function
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block
from megatron.model.loss import Loss, Losses
from megatron.tensor_parallel.broadcast import Batch

_VARIANTS = 8
"""How often a layer may be compiled: for training, for evaluation, for recomputation, and where its
input needs a gradient or does not."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """How transformer layers and the loss are compiled.

    Args:
        mode: of torch.compile, for layers. With reduce-overhead, which replays CUDA graphs, a model
            is called once for each micro-batch, and backward follows before the next call.
        compiles_loss: whether the loss is compiled too.
        backend: of torch.compile.
    """

    mode: str
    compiles_loss: bool
    backend: str = "inductor"

    def compile_blocks(self, model: nn.Module) -> None:
        """Let every transformer layer of `model` run compiled code, from its first call on.

        Hooks of a layer itself stay outside of its graph.
        """
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        compiled = self._compile(
            _forward_of,
            fullgraph=True,
            mode=self.mode if self.backend == "inductor" else None,
            variants=_VARIANTS * max(1, len(blocks)),
        )
        for block in blocks:
            block.forward = partial(_compiled_forward, compiled, block)
        if self.mode == "reduce-overhead":
            _keep_from_graphs(model, blocks)

    def compile_loss(self, loss: Loss) -> Loss:
        """Return `loss`, compiled from its first call on if that is wanted.

        Parts that cannot be compiled run as they are.
        """
        if not self.compiles_loss:
            return loss
        compiled = self._compile(loss, variants=_VARIANTS)

        def run(output: Any, batch: Batch) -> Tensor | Losses:
            try:
                value: Tensor | Losses = compiled(output, batch)
                return value
            except Exception as error:
                if not _is_of_compiler(error):
                    raise
                raise _refusal("the loss", error) from error

        return run

    def _compile(
        self, function: Callable[..., Any], *, variants: int, **options: Any
    ) -> Callable[..., Any]:
        options |= {"dynamic": False, "backend": self.backend}
        return compile_function(function, variants=variants, **options)


def _forward_of(block: Block, inputs: LayerInput) -> LayerInput:
    # The class's method: `block.forward` is the compiled function.
    output: LayerInput = type(block).forward(block, inputs)
    return output


def _compiled_forward(compiled: Callable[..., Any], block: Block, inputs: LayerInput) -> LayerInput:
    try:
        # Without the memo: what one layer writes into it would make another layer's graph differ.
        output: LayerInput = compiled(block, inputs.replace(shared=None))
        return output.replace(shared=inputs.shared)
    except Exception as error:
        if not _is_of_compiler(error):
            raise
        raise _refusal(f"{type(block).__name__} as one graph", error) from error


def _keep_from_graphs(model: nn.Module, blocks: list[Block]) -> None:
    """Prepare for CUDA graphs, whose replay overwrites the results of the one before."""
    model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    for block in blocks:
        for parameter in block.parameters():
            if parameter.requires_grad:
                # Gradients are accumulated over micro-batches.
                parameter.register_hook(torch.clone)


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile raised it, and not the code that was compiled. Its errors are private."""
    return type(error).__module__.startswith("torch._")


def _refusal(what: str, error: Exception) -> ConfigError:
    lines = filter(None, map(str.strip, str(error).splitlines()))
    reason = next(lines, type(error).__name__)
    return ConfigError(
        f"--compile: torch.compile cannot compile {what}: {reason}; leave --compile out"
    )
