"""Run the first and the last program of every Triton kernel at sizes about 2^30 and 2^31 elements.

TRITON_INTERPRET=1 python large_programs.py: the tensors are allocated, but memory is used only for
what the two programs read and write. Compares their results with the references', and prints the name
of each kernel that ran.
"""

import builtins
from functools import partial

import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter
from triton_interpreter import patch_the_language_once

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.triton import decode_attention, launch, norms
from megatron.fused_kernels.triton.all import TRITON

ENDS = [0, -1]
FILLED = 1 << 17  # elements at both ends, more than two programs of any kernel take


def main() -> None:
    patch_the_language_once()
    run_first_and_last_programs()
    launch.launch_once(torch.device("cpu"))
    for size in (2**30, 2**31):
        for step in (-1, 0, 1):
            columns = max(divisor for divisor in range(1, 1 << 15) if (size + step) % divisor == 0)
            rows = (size + step) // columns
            check_glu(rows, columns)
            check_rotary(size // 1024 + step)
            if size == 2**31:  # nothing there is twice as long as their tensors
                check_activations(rows, columns)
                check_rows(rows, columns)
                check_cross_entropy(size // 16384 + step, 16384)
                check_decode_attention(size + step)


def run_first_and_last_programs() -> None:
    """Let the interpreter run no other programs, nor other rows of one, and print names of kernels."""
    run = interpreter.GridExecutor.__call__

    def ends(*bounds):
        numbers = builtins.range(*bounds)
        return numbers if len(numbers) <= 16 else (numbers[0], numbers[-1])

    def run_and_print(self, *args, **keywords):
        print(f"{self.fn.__module__}.{self.fn.__name__}")
        run(self, *args, **keywords)

    norms.num_multiprocessors = lambda device: 1  # each program of `_backward` has many rows
    decode_attention.num_multiprocessors = lambda device: 1 << 20  # each of few keys
    interpreter.range = ends
    interpreter.GridExecutor.__call__ = run_and_print


def tensor(*shape: int) -> Tensor:
    """Return a tensor of which only the ends have values."""
    found = torch.empty(shape)
    flat = found.view(-1)
    for end in (flat[:FILLED], flat[-FILLED:]):
        end.normal_()
    return found.requires_grad_()


def check(kernel, reference, *inputs: Tensor, fixed: tuple = ()) -> None:
    """Compare results, and the gradients of inputs [rows, columns], at both ends."""
    few = [(x[ENDS] if x.dim() > 1 else x).detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs, expected = kernel(*inputs, *fixed), reference(*few, *fixed)
    if torch.is_tensor(outputs):
        outputs, expected = (outputs,), (expected,)
    grads = [tensor(*output.shape) for output in outputs]
    wanted = [x for x in inputs if x.requires_grad and x.dim() > 1]
    got = torch.autograd.grad(outputs, wanted, [g.detach() for g in grads])
    wanted = [x for x in few if x.requires_grad and x.dim() > 1]
    want = torch.autograd.grad(expected, wanted, [g[ENDS].detach() for g in grads])
    for mine, right in zip((*outputs, *got), (*expected, *want), strict=True):
        close(mine, right)


def close(mine: Tensor, right: Tensor) -> None:
    """Compare the first four elements and the last one, which the two programs compute."""
    assert_close(mine[0].flatten()[:4].detach(), right[0].flatten()[:4].detach())
    assert_close(mine[-1].flatten()[-1].detach(), right[-1].flatten()[-1].detach())


def check_glu(rows: int, columns: int) -> None:
    """Gated units of so many features and as many gates."""
    pairs, bias = tensor(rows, 2 * columns), tensor(2 * columns)
    check(TRITON.glu, REFERENCE.glu, pairs, bias, fixed=("swiglu",))
    check(TRITON.glu, REFERENCE.glu, pairs, fixed=(None, "geglu"))


def check_activations(rows: int, columns: int) -> None:
    """GELU, and dropout, of which only what is not dropped is compared."""
    x, y, bias = tensor(rows, columns), tensor(rows, columns), tensor(columns)
    check(TRITON.bias_gelu, REFERENCE.bias_gelu, x, bias, fixed=("tanh",))
    out = TRITON.bias_dropout_add(y, None, x, 0.5, True)
    (grad,) = torch.autograd.grad(out, y, tensor(rows, columns).detach())
    kept = grad[ENDS] != 0
    close(out, torch.where(kept, 2 * y[ENDS], 0) + x[ENDS])


def check_rows(rows: int, columns: int) -> None:
    """Norms and the softmax over scores."""
    x, y, weight, bias = tensor(rows, columns), tensor(rows, columns), *map(tensor, [columns] * 2)

    def add_norm(x, y, bias, weight):
        return x + y + bias, REFERENCE.layer_norm(x + y + bias, weight, bias, 1.0)

    check(
        lambda x, y, b, w: TRITON.add_norm(x, y, b, w, b, 1.0, True), add_norm, x, y, bias, weight
    )
    if columns > 4096:  # more than the kernel of the softmax takes
        rows, columns = rows * columns // 1024, 1024
        x, y = tensor(rows, columns), tensor(rows, columns)
    mask = torch.empty(rows, columns, dtype=torch.bool)
    mask[ENDS] = True

    def softmax(kernels):
        return lambda x: kernels.scaled_causal_softmax(x[:, None, None], 0.5).view(-1, columns)

    def masked(kernels):
        return lambda x, seen: kernels.scaled_masked_softmax(
            x[:, None, None], seen[:, None, None], 0.5
        ).view(-1, columns)

    check(softmax(TRITON), softmax(REFERENCE), x)
    check(masked(TRITON), masked(REFERENCE), x, mask)


def check_cross_entropy(rows: int, columns: int) -> None:
    """The loss over a full vocabulary, and over a slice of it."""
    logits, target = tensor(rows, columns), torch.zeros(rows, dtype=torch.int64)
    few, chosen = logits[ENDS].detach().requires_grad_(), target[ENDS]
    largest, exact = TRITON.cross_entropy.largest(logits, columns), REFERENCE.cross_entropy
    close(largest, exact.largest(few, columns))
    sums = TRITON.cross_entropy.sums(logits, largest, target, columns)
    for mine, right in zip(
        sums, exact.sums(few, exact.largest(few, columns), chosen, columns), strict=True
    ):
        close(mine, right)
    losses, right = (
        TRITON.cross_entropy.full(logits, target, columns),
        exact.full(few, chosen, columns),
    )
    close(losses, right)
    (got,) = torch.autograd.grad(losses.sum(), logits)
    close(got, torch.autograd.grad(right.sum(), few)[0])


def check_rotary(positions: int) -> None:
    """Queries and keys, by themselves and out of a fused product; 1024 features of a position.

    Its gradient is summed for a bias, or not.
    """
    angles = torch.empty(1, 1, positions, 32), torch.empty(1, 1, positions, 32)
    for each in angles:
        each[:, :, ENDS] = torch.rand(2, 32)

    def turn(kernels):
        return lambda x, cos, sin: kernels.rotary(
            x.view(1, -1, 16, 64).transpose(1, 2), cos, sin
        ).permute(2, 0, 1, 3)

    def split(kernels, bias=None, turns=True):
        return lambda x, *tables: tuple(
            part.permute(2, 0, 1, 3)
            for part in kernels.split_heads(
                # Heads that are not turned are views, without a copy if they are one group.
                x.view(-1, 1, 4, 4, 64) if turns else x.view(-1, 1, 1, 16, 64),
                bias,
                tables if turns else None,
            )
        )

    few = tuple(each[:, :, ENDS] for each in angles)
    summed = partial(split, bias=tensor(1024))
    for call in (turn, split, summed, partial(summed, turns=False)):
        kernel, reference = call(TRITON), call(REFERENCE)
        check(
            lambda x, k=kernel: k(x, *angles),
            lambda x, r=reference: r(x, *few),
            tensor(positions, 1024),
        )


def check_decode_attention(elements: int) -> None:
    """A cache of so many elements and a little more: its first and its last rows, the latter's end."""
    capacity, width, groups = 4096, 64, 4
    rows = elements // (capacity * width * groups) + 1
    cache = [torch.empty(rows, groups, capacity, width) for _ in "kv"]
    new = [torch.randn(rows, groups, 1, width) for _ in "qkv"]
    positions = torch.zeros(rows, dtype=torch.int64)
    positions[-1] = capacity - 1
    for each in cache:
        each[-1, -1] = torch.randn(capacity, width)
    out = TRITON.decode_attention(
        *new,
        tuple(cache),
        positions,
        range(capacity),
        window=2,
        scale=1.0,
        softcap=0.0,
        slopes_a=None,
        sinks_a=None,
    )
    query, key, value = (each[-1, -1] for each in new)
    keys, values = cache[0][-1, -1, -2:], cache[1][-1, -1, -2:]
    assert_close(keys[-1:], key)
    assert_close(out[-1, -1], (query @ keys.T).softmax(-1) @ values)
    assert_close(out[0, 0], new[2][0, 0])


if __name__ == "__main__":
    main()
