"""What every implementation of an operation has to compute: its formula in float64."""

import math
from functools import partial

import torch
from torch.testing import assert_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = (1, 3, 17, 129, 1000)


def compare(function, exact, shapes, *, device, dtype, fixed=(), slack=8, floor=1e-3):
    """Compare values and gradients of `function` with those of `exact` on the same inputs.

    Args:
        shapes: of the inputs that gradients are wanted for.
        fixed: further arguments.
        slack: allowed error in units of the dtype's rounding of the greatest value.
        floor: the greatest value counts as at least this, where large numbers cancel.
    """
    generator = torch.Generator().manual_seed(0)
    rounded = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    rounded = [x.to(dtype) for x in rounded]
    inputs = [x.to(device, copy=True).requires_grad_() for x in rounded]
    wide = [x.double().requires_grad_() for x in rounded]
    got, want = function(*inputs, *fixed), exact(*wide, *(to_double(x) for x in fixed))
    assert got.dtype in (dtype, torch.float32)
    grad = torch.randn(want.shape, generator=generator, dtype=torch.float64).to(got.dtype)
    got.backward(grad.to(device))
    want.backward(grad.double())
    for name, mine, right in [
        ("value", got, want),
        *(
            (f"gradient {i}", x.grad, w.grad)
            for i, (x, w) in enumerate(zip(inputs, wide, strict=True))
        ),
    ]:
        close(mine, right, dtype=dtype, slack=slack, floor=floor, name=name)


def close(mine, right, *, dtype, slack, name, floor=1e-3):
    """Compare within `slack` roundings of the greatest value."""
    tolerance = slack * torch.finfo(dtype).eps
    if mine.is_cuda and dtype == torch.float32:
        tolerance *= 4  # a GPU's exponentials and hyperbolic tangents are approximations
    largest = float(right.detach().abs().max()) if right.numel() else 0.0
    assert_close(
        mine.detach().cpu().double(),
        right.detach().double(),
        rtol=tolerance,
        atol=tolerance * max(largest, floor),
        msg=lambda text: f"{name}: {text}",
    )


def to_double(x):
    """Return `x` in float64 on the CPU if it is a tensor of floats."""
    if not torch.is_tensor(x):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def exact_softmax(scores, seen, scale):
    exp = (scores * scale).exp() * seen
    total = exp.sum(-1, keepdim=True)
    return exp / total.where(total > 0, 1)


def check_causal_softmax(kernels, device, dtype, keys):
    queries = min(keys, 5)
    seen = torch.tensor([[k <= q + keys - queries for k in range(keys)] for q in range(queries)])
    compare(
        lambda scores: kernels.scaled_causal_softmax(scores, 0.7),
        lambda scores: exact_softmax(scores, seen, 0.7),
        [(1, 2, queries, keys)],
        device=device,
        dtype=dtype,
        floor=1 / keys,
    )


def check_masked_softmax(kernels, device, dtype, keys):
    """Masks of every shape that can be spread over the scores; some rows see nothing."""
    scores = (2, 2, 2, keys)
    for shape in ((2, 1, 2, keys), (1, 2, 2, keys), (2, keys), (2, 1, 1, keys)):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[..., 0, :] = False
        compare(
            lambda x, seen: kernels.scaled_masked_softmax(x, seen, 1.5),
            lambda x, seen: exact_softmax(x, seen, 1.5),
            [scores],
            device=device,
            dtype=dtype,
            floor=1 / keys,
            fixed=[mask.to(device)],
        )
    compare(
        lambda x: kernels.scaled_masked_softmax(x, None, 1.5),
        lambda x: exact_softmax(x, torch.ones(scores), 1.5),
        [scores],
        device=device,
        dtype=dtype,
        floor=1 / keys,
    )


def _norm_floor(columns):
    """One feature alone: what is left of it is divided by the root of epsilon."""
    return 32.0 if columns == 1 else 1.0


def check_layer_norm(kernels, device, dtype, columns):
    def exact(x, weight, bias=0.0):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias

    for biased in (True, False):
        compare(
            lambda x, weight, bias=None: kernels.layer_norm(x, weight, bias, 1e-3),
            exact,
            [(2, 3, columns), (columns,), *([(columns,)] if biased else [])],
            device=device,
            dtype=dtype,
            floor=_norm_floor(columns),
        )


def check_rms_norm(kernels, device, dtype, columns):
    compare(
        lambda x, weight: kernels.rms_norm(x, weight, 1e-3),
        lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight,
        [(2, 3, columns), (columns,)],
        device=device,
        dtype=dtype,
        floor=_norm_floor(columns),
    )


def check_add_norm(kernels, device, dtype, columns):
    """Sum of a residual and its norm: values and gradients through both results."""

    def norm(x, weight, bias, centred):
        x = x - x.mean(-1, keepdim=True) if centred else x
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias

    def function(x, weight, *more, centred, adds):
        y, y_bias, bias = [*([None] * (0 if adds else 2)), *more, None][:3]
        parts = kernels.add_norm(x, y, y_bias, weight, bias, 1e-3, centred)
        return torch.stack(parts)

    def exact(x, weight, *more, centred, adds):
        y, y_bias, bias = [*([0.0] * (0 if adds else 2)), *more, 0.0][:3]
        return torch.stack([x + y + y_bias, norm(x + y + y_bias, weight, bias, centred)])

    wide, row = (2, 3, columns), (columns,)
    for centred, adds, more in (
        (True, True, [wide, row, row]),
        (False, True, [wide, row]),
        (True, False, [row]),
        (False, False, []),
    ):
        compare(
            partial(function, centred=centred, adds=adds),
            partial(exact, centred=centred, adds=adds),
            [wide, row, *more],
            device=device,
            dtype=dtype,
            floor=_norm_floor(columns),
            slack=16,  # the sum is rounded before it is normed
        )


def exact_gelu(x, form):
    if form == "erf":
        return x * 0.5 * (1 + torch.special.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def check_bias_gelu(kernels, device, dtype, columns):
    for form in ("tanh", "erf"):
        for biased in (True, False):
            compare(
                lambda x, bias=None, form=form: kernels.bias_gelu(x, bias, form),
                lambda x, bias=0.0, form=form: exact_gelu(x + bias, form),
                [(3, 2, columns), *([(columns,)] if biased else [])],
                device=device,
                dtype=dtype,
                floor=1.0,
            )


def check_glu(kernels, device, dtype, columns):
    """Features come in pairs: the first of a pair is the gate of the second."""
    gates = {
        "geglu": lambda gate: exact_gelu(gate, "erf"),
        "liglu": lambda gate: gate,
        "geglu_tanh": lambda gate: exact_gelu(gate, "tanh"),
        "reglu": lambda gate: gate * (gate > 0),
        "swiglu": lambda gate: gate / (1 + (-gate).exp()),
    }

    def exact(x, kind, bias=0.0):
        x = x + bias
        return gates[kind](x[..., 0::2]) * x[..., 1::2]

    for kind in gates:
        for biased in (True, False):
            compare(
                lambda x, bias=None, kind=kind: kernels.glu(x, bias, kind),
                lambda x, bias=0.0, kind=kind: exact(x, kind, bias),
                [(3, 2, 2 * columns), *([(2 * columns,)] if biased else [])],
                device=device,
                dtype=dtype,
                floor=1.0,
            )


def check_bias_add(kernels, device, dtype, columns):
    """Without dropout: in evaluation, and with a probability of 0."""
    for p, training in ((0.0, True), (0.5, False)):
        for biased in (True, False):

            def function(y, residual, bias=None, p=p, training=training):
                return kernels.bias_dropout_add(y * 1, bias, residual, p, training)

            compare(
                function,
                lambda y, residual, bias=0.0: y + bias + residual,
                [(3, 2, columns), (3, 2, columns), *([(columns,)] if biased else [])],
                device=device,
                dtype=dtype,
                floor=1.0,
            )


def check_dropout(kernels, device, dtype):
    """Every feature is dropped with probability p, others are scaled up; backward does the same."""
    p, shape = 0.3, (10, 400)
    ones = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    residual = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    bias = torch.ones(shape[-1], dtype=dtype, device=device, requires_grad=True)

    def run():
        torch.manual_seed(5)
        return kernels.bias_dropout_add(ones * 1, bias, residual, p, True)

    out = run()
    kept = out != 0
    close(out, kept.cpu() * (2 / (1 - p)), dtype=dtype, slack=2, name="value")
    share, deviation = float(kept.double().mean()), math.sqrt(p * (1 - p) / kept.numel())
    assert abs(share - (1 - p)) < 5 * deviation
    out.sum().backward()
    close(ones.grad, kept.cpu() / (1 - p), dtype=dtype, slack=2, name="gradient of y")
    close(bias.grad, kept.cpu().sum(0) / (1 - p), dtype=dtype, slack=50, name="gradient of bias")
    assert bool((residual.grad == 1).all())
    assert torch.equal(out, run()), "the same seed drops the same features"
    again = kernels.bias_dropout_add(ones * 1, bias, residual, p, True)
    assert not torch.equal(out, again), "the next draw drops others"


def check_rotary(kernels, device, dtype, half):
    """Queries as attention has them: a view of the fused product, not contiguous."""
    samples, heads, positions, rest = 2, 3, 3, 2

    def queries(fused):
        return fused.permute(1, 2, 0, 3)  # [s, b, a, d] -> [b, a, s, d]

    def exact(fused, angles):
        x = queries(fused)
        turned = torch.view_as_complex(
            torch.stack([x[..., :half], x[..., half : 2 * half]], -1)
        ) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)

    generator = torch.Generator().manual_seed(2)
    for shape in ((positions, half), (samples, 1, positions, half)):
        angles = 6 * torch.rand(shape, generator=generator)
        compare(
            lambda fused, angles: kernels.rotary(queries(fused), angles.cos(), angles.sin()),
            exact,
            [(positions, samples, heads, 2 * half + rest)],
            device=device,
            dtype=dtype,
            fixed=[angles.to(device)],
        )


def check_split_heads(kernels, device, dtype, half):
    """Turns the queries and keys of a fused product, and leaves values and the last features.

    With a bias, which the product has already, and without; with positions and without.
    """
    samples, groups, queries, positions, rest = 2, 2, 3, 3, 2
    width = 2 * half + rest

    def exact(fused, *more):
        (bias, angles) = more if len(more) == 2 else (None, *more)
        if bias is not None:
            fused = fused + bias.view(fused.shape[2:])
        fused = fused.permute(1, 2, 3, 0, 4)  # [b, groups, heads of each, s, d]
        turned = fused
        if angles is not None:
            first, second = fused[..., :half], fused[..., half : 2 * half]
            cos, sin = (x.view(-1, 1, 1, positions, half) for x in (angles.cos(), angles.sin()))
            turned = [first * cos - second * sin, second * cos + first * sin]
            turned = torch.cat([*turned, fused[..., 2 * half :]], -1)
        return torch.cat([turned[:, :, :-1].flatten(1, 2), fused[:, :, -1]], 1)

    def function(fused, *more):
        (bias, angles) = more if len(more) == 2 else (None, *more)
        if bias is not None:
            fused = fused + bias.detach().view(fused.shape[2:])
        tables = None if angles is None else (angles.cos(), angles.sin())
        query, key, value = kernels.split_heads(fused, bias, tables)
        heads = torch.cat([query.unflatten(1, (groups, queries)), key[:, :, None]], 2)
        return torch.cat([heads.flatten(1, 2), value], 1)

    generator = torch.Generator().manual_seed(2)
    shape = (positions, samples, groups, queries + 2, width)
    bias = (groups * (queries + 2) * width,)
    for shapes in ([shape], [shape, bias]):
        for of_angles in ((positions, half), (samples, 1, positions, half), None):
            angles = None if of_angles is None else 6 * torch.rand(of_angles, generator=generator)
            compare(
                function,
                exact,
                shapes,
                device=device,
                dtype=dtype,
                fixed=[None if angles is None else angles.to(device)],
                floor=1.0,
            )


def exact_cross_entropy(logits, target):
    exp = logits.exp()
    own = exp.gather(1, target[:, None]).squeeze(1)
    return (exp.sum(1) / own).log()


def check_cross_entropy(kernels, device, dtype, columns):
    target = torch.randint(columns, (6,), generator=torch.Generator().manual_seed(3))
    compare(
        lambda logits, target: kernels.cross_entropy.full(logits * 1, target, logits.size(1)),
        exact_cross_entropy,
        [(6, columns)],
        device=device,
        dtype=dtype,
        fixed=[target.to(device)],
    )


class Sliced(torch.autograd.Function):
    """The parts of every slice, put together as the ranks' collectives do.

    Args:
        vocabulary: columns of all slices that take part.
    """

    @staticmethod
    def forward(ctx, logits, target, parts, count, vocabulary):
        slices = [x.contiguous() for x in logits.chunk(count, 1)]
        width = slices[0].size(1)
        own = [target - i * width for i in range(count)]
        own = [t.where((t >= 0) & (t < width), -1) for t in own]
        real = [min(max(vocabulary - i * width, 0), width) for i in range(count)]
        pairs = zip(slices, real, strict=True)
        largest = torch.stack([parts.largest(x, columns) for x, columns in pairs]).amax(0)
        each = zip(slices, own, real, strict=True)
        sums = [torch.stack(parts.sums(x, largest, t, columns)) for x, t, columns in each]
        total, of_target = sum(sums)
        ctx.parts, ctx.count, ctx.real = parts, count, real
        ctx.save_for_backward(total.log() + largest, *slices, *own)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, grad):
        log_total, *rest = ctx.saved_tensors
        slices, own = rest[: ctx.count], rest[ctx.count :]
        parts = [
            ctx.parts.gradient(x, log_total, t, grad, real)
            for x, t, real in zip(slices, own, ctx.real, strict=True)
        ]
        return torch.cat(parts, 1), None, None, None, None


def check_sliced_cross_entropy(kernels, device, dtype, columns):
    target = torch.randint(2 * columns, (6,), generator=torch.Generator().manual_seed(3))
    compare(
        lambda logits, target: Sliced.apply(logits, target, kernels.cross_entropy, 2, 2 * columns),
        exact_cross_entropy,
        [(6, 2 * columns)],
        device=device,
        dtype=dtype,
        fixed=[target.to(device)],
    )


def check_padded_cross_entropy(kernels, device, dtype, columns):
    """Four slices, the padding from within the third one on."""
    real = 3 * columns - columns // 2
    target = torch.randint(real, (6,), generator=torch.Generator().manual_seed(3))

    def loss(logits, target):
        padding = torch.full((6, 4 * columns - real), 30.0, dtype=dtype, device=device)
        padded = torch.cat([logits, padding], 1)
        return Sliced.apply(padded, target, kernels.cross_entropy, 4, real)

    compare(
        loss,
        exact_cross_entropy,
        [(6, real)],
        device=device,
        dtype=dtype,
        fixed=[target.to(device)],
    )


def check_padding_beside_the_whole_vocabulary(kernels, device, dtype, columns):
    target = torch.randint(columns, (6,), generator=torch.Generator().manual_seed(3))

    def loss(logits, target):
        padding = torch.full((6, 5), 30.0, dtype=dtype, device=device)
        return kernels.cross_entropy.full(torch.cat([logits, padding], 1), target, columns)

    compare(
        loss,
        exact_cross_entropy,
        [(6, columns)],
        device=device,
        dtype=dtype,
        fixed=[target.to(device)],
    )


def exact_decode_attention(query, key, value, cache, position, *, window, softcap, slopes, sinks):
    """Attend from one row's query [a, d] to its cached keys [g, capacity, d] and the new one."""
    first = max(0, position - window + 1) if window else 0
    each = len(query) // len(key)
    keys, values = (
        torch.cat([old[:, first:position], new[:, None]], 1).repeat_interleave(each, 0)
        for old, new in zip(cache, (key, value), strict=True)
    )
    scores = (keys @ query[..., None])[..., 0] * 0.3
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes[:, None] * torch.arange(first - position, 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].double()], 1)
    weights = scores.softmax(-1)[:, : keys.size(1)]
    return (weights[:, None] @ values)[:, 0]


def check_decode_attention(kernels, device, dtype, *, heads, groups, width, **options):
    """Rows of several lengths; the cache changes where the new keys and values are stored alone."""
    generator = torch.Generator().manual_seed(5)
    options = {"window": 0, "softcap": 0.0, "slopes": None, "sinks": None} | options
    positions, capacity = [0, 5, 299, 170], 320

    def draw(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).double()

    query = draw(len(positions), heads, width)
    fused = draw(len(positions), 2, groups, width)
    cache = draw(2, len(positions) + 1, groups, capacity, width)
    key, value = fused.unbind(1)
    kept = [each.to(device, dtype) for each in cache]
    found = kernels.decode_attention(
        *(x.to(device, dtype)[:, :, None] for x in (query, key, value)),
        tuple(kept),
        torch.tensor(positions, device=device),
        range(310),
        window=options["window"],
        scale=0.3,
        softcap=options["softcap"],
        slopes_a=None if options["slopes"] is None else options["slopes"].to(device),
        sinks_a=None if options["sinks"] is None else options["sinks"].to(device),
    )
    for row, position in enumerate(positions):
        right = exact_decode_attention(
            query[row], key[row], value[row], cache[:, row], position, **options
        )
        close(found[row, :, 0], right, dtype=dtype, slack=8, floor=1.0, name=f"row {row}")
        cache[0, row, :, position], cache[1, row, :, position] = key[row], value[row]
    for mine, right in zip(kept, cache, strict=True):
        assert torch.equal(mine.cpu().double(), right)


BY_COLUMNS = [
    check_causal_softmax,
    check_masked_softmax,
    check_layer_norm,
    check_rms_norm,
    check_bias_gelu,
    check_glu,
    check_bias_add,
    check_rotary,
    check_split_heads,
    check_cross_entropy,
    check_sliced_cross_entropy,
    check_padded_cross_entropy,
    check_padding_beside_the_whole_vocabulary,
]
"""Checks of (kernels, device, dtype, columns)."""
