"""Triton's kernels against float64: on a GPU, or on a CPU in Triton's interpreter.

Without a GPU, TRITON_INTERPRET=1 runs these tests on a CPU, as one in `tests/unit/` does.
"""

import os
from dataclasses import replace

import pytest
import torch
from kernel_checks import (
    BY_COLUMNS,
    COLUMNS,
    DTYPES,
    check_add_norm,
    check_bias_add,
    check_bias_gelu,
    check_cross_entropy,
    check_decode_attention,
    check_dropout,
    check_glu,
    check_layer_norm,
    check_rms_norm,
    check_sliced_cross_entropy,
    check_split_heads,
)
from networks import gpt_steps
from stages import engine_of, random_model
from tiny import GEMMA_2, GEMMA_3, LLAMA, tiny_spec
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from megatron.fused_kernels import registry
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.rng import OrdinaryStream

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from megatron.fused_kernels.triton import decode_attention, heads, launch, norms, trial  # noqa: E402
from megatron.fused_kernels.triton.all import TRITON  # noqa: E402

if INTERPRETED:
    from triton_interpreter import patch_the_language_once

    patch_the_language_once()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", BY_COLUMNS, ids=lambda check: check.__name__)
def test_kernel_is_its_formula(check, dtype):
    for columns in COLUMNS:
        if not INTERPRETED or columns in interpreted(check, dtype):
            check(TRITON, DEVICE, dtype, columns)


def interpreted(check, dtype):
    """Return the columns that differ in the interpreter: one, part of a block, and several blocks.

    The interpreter computes in 16 bits as in 32, but for the rounding of what is stored.
    """
    if check is check_split_heads:  # several: test_tiles_of_several_rows_and_heads
        return [1, 17] if dtype == torch.float32 else [17]
    return [1, 17, 1000] if dtype == torch.float32 else [129]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_and_its_norm(dtype):
    for columns in (3, 129):
        check_add_norm(TRITON, DEVICE, dtype, columns)


def test_a_norm_wider_than_the_fused_gradients(monkeypatch):
    monkeypatch.setattr(norms, "_FUSED_SUMS", 64)
    for check in (check_layer_norm, check_rms_norm, check_add_norm):
        check(TRITON, DEVICE, torch.float32, 129)


@pytest.mark.parametrize("check", [check_cross_entropy, check_sliced_cross_entropy])
def test_a_vocabulary_longer_than_a_block(check):
    check(TRITON, DEVICE, torch.bfloat16, 5000)


@pytest.mark.parametrize("fewest_keys", [256, 100], ids=["one program", "split keys"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 6, "groups": 2, "width": 24},
        {"heads": 3, "groups": 3, "width": 64, "window": 100},
        {"heads": 2, "groups": 1, "width": 16, "sinks": torch.tensor([-1.0, 3.0])},
        {"heads": 4, "groups": 2, "width": 16, "slopes": torch.tensor([0.5, 0.25, 0.1, 0.01])},
        {"heads": 20, "groups": 1, "width": 80, "softcap": 2.0, "window": 7},
    ],
    ids=lambda options: " ".join(options),
)
def test_attention_of_a_decode_step(monkeypatch, options, fewest_keys):
    monkeypatch.setattr(decode_attention, "_FEWEST_KEYS", fewest_keys)
    dtypes = DTYPES
    if INTERPRETED:
        # It multiplies matrices in bf16 as if they were integers. In fp16 blocks of wide heads differ,
        # not the options, which change scores in 32 bits.
        dtypes = DTYPES[:2] if options["width"] in (24, 80) else DTYPES[:1]
    for dtype in dtypes:
        check_decode_attention(TRITON, DEVICE, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype):
    check_dropout(TRITON, DEVICE, dtype)


def test_tiles_of_several_rows(monkeypatch):
    """Tiles of 8 of 10 rows, and of 4 of 6: the last have fewer. By default these have one row."""
    monkeypatch.setattr(launch, "_TILES", 2)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 1)
    check_dropout(TRITON, DEVICE, torch.float32)
    for check in (check_bias_gelu, check_glu, check_bias_add):
        check(TRITON, DEVICE, torch.float32, 129)


def test_tiles_of_several_rows_and_heads(monkeypatch):
    """Tiles of 4 of 6 positions and of 4 of 10 heads: the last have fewer."""
    monkeypatch.setattr(launch, "_TILES", 5)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(heads, "_MOST_FEATURES", 1024)
    check_split_heads(TRITON, DEVICE, torch.float32, 65)


def test_recomputation_drops_the_same_features():
    grads = []
    for wrap in (lambda function, *inputs: function(*inputs), checkpoint):
        torch.manual_seed(0)
        y = torch.ones(4, 300, device=DEVICE, requires_grad=True)

        def close_half(y):
            return TRITON.bias_dropout_add(y, None, y, 0.5, True).square()

        keywords = {"use_reentrant": False} if wrap is checkpoint else {}
        wrap(close_half, y, **keywords).sum().backward()
        grads.append(y.grad)
    assert torch.equal(*grads)


def test_what_a_kernel_cannot_take_goes_to_the_reference():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=DEVICE)
    weight = torch.ones(5, dtype=torch.float64, device=DEVICE)
    angles = torch.rand(4, 2, dtype=torch.float64, device=DEVICE)
    target = torch.tensor([1, 3], device=DEVICE)
    pairs = [
        (
            kernels.scaled_causal_softmax(x, 0.5),
            kernels.scaled_masked_softmax(x, None, 0.5),
            kernels.layer_norm(x, weight, None, 1e-5),
            kernels.rms_norm(x, weight, 1e-5),
            kernels.bias_gelu(x, weight, "tanh"),
            kernels.glu(x[..., :4], None, "swiglu"),
            kernels.bias_dropout_add(x * 1, weight, x, 0.0, True),
            kernels.rotary(x, angles.cos(), angles.sin()),
            kernels.cross_entropy.full(x[0, 0, :2], target, x.size(-1)),
        )
        for kernels in (TRITON, REFERENCE)
    ]
    for mine, right in zip(*pairs, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_embedding": "alibi", "window": 4, "softmax_type": "off-by-one"},
        GEMMA_2,
        GEMMA_3,
        LLAMA | {"softmax_type": "learnable"},
    ],
    ids=["GPT", "ALiBi, windows, zero sinks", "Gemma 2", "Gemma 3", "Llama, sinks"],
)
@torch.inference_mode()
def test_decode_steps_of_kernels_are_those_of_references(group, changes):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "head_dim": 6}
    spec = tiny_spec(max_position_embeddings=24, **sizes | changes)
    model = random_model(group, spec)
    one, other = (
        engine_of(model, spec, rows=4, key_rounding=8, device=DEVICE, kernels=kernels).runner
        for kernels in (REFERENCE, TRITON)
    )
    texts = [[1, 2, 3, 4, 5], [6, 7], [8]]
    features = [each.prefill(texts, [5, 2, 1]) for each in (one, other)]
    assert_close(*(each[:, -1] for each in features), atol=2e-4, rtol=2e-4)
    for step in range(4):
        tokens = [(7 * step + row) % spec.vocabulary.vocab_size for row in range(3)]
        positions = [len(text) + step for text in texts]
        features = [each.decode(tokens, positions) for each in (one, other)]
        assert_close(*(each[:, -1] for each in features), atol=2e-4, rtol=2e-4)


@pytest.fixture
def new_memory_is_nan():
    """Fill what torch allocates with NaN: nothing may read it before it is written.

    Runs with --deterministic-mode turn that filling off.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize(
    ("attention", "changes"),
    [("sdpa", {}), ("fused-softmax", {}), ("sdpa", LLAMA | {"num_query_groups": 1})],
    ids=["sdpa", "fused-softmax", "llama"],
)
def test_a_gpt_of_kernels_is_a_gpt_of_references(group, attention, changes):
    results = []
    for kernels in (TRITON, REFERENCE):
        spec = tiny_spec(**changes, head_dim=6)
        model = SequentialModel(
            gpt_steps(
                spec,
                group=group,
                rng=OrdinaryStream(),
                mixed=False,
                kernels=replace(kernels, attention=attention),
            )
        )
        initialise(model, seed=1, std=0.3, num_layers=spec.num_layers)
        model.to(DEVICE)
        generator = torch.Generator().manual_seed(0)
        tokens, labels = torch.randint(11, (2, 2, 6), generator=generator).to(DEVICE)
        positions = torch.arange(6, device=DEVICE).expand(2, 6)
        mask = torch.ones(2, 6, device=DEVICE)
        batch = {"tokens": tokens, "positions": positions, "labels": labels, "loss_mask": mask}
        loss = next_token_loss(group, kernels)(model(batch), batch)
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss})
    # A GPU's exponentials are approximations.
    rtol = 1.3e-6 if INTERPRETED else 1e-4
    assert_close(*results, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("changes", [{"hidden_dropout": 0.1}, LLAMA], ids=["GPT", "Llama"])
def test_trials_run_the_kernels_of_layers_and_keep_rng_states(monkeypatch, changes, trains):
    called = []

    def record(name, function):
        def call(*args, **keywords):
            called.append(name)
            return function(*args, **keywords)

        return call

    names = {name for name in vars(TRITON) if callable(getattr(trial, name, None))}
    for name in names:
        monkeypatch.setattr(trial, name, record(name, getattr(trial, name)))
    spec = tiny_spec(**changes, head_dim=6)
    missing = {"queries, keys, values" if changes is LLAMA else "rotary positions"}
    state = torch.get_rng_state()
    for tensor in (1, 2):
        tried = trial.Trial(
            spec=spec, dtype=torch.float32, device=DEVICE, tensor=tensor, trains=trains
        )
        for operation in {*registry._FIELDS} - missing:
            trial.try_kernels(operation, tried)
    assert torch.equal(torch.get_rng_state(), state)
    assert {"add_norm", "scaled_causal_softmax", "scaled_masked_softmax"} < names
    assert names - {*called} == ({"bias_gelu"} if changes is LLAMA else {"glu", "rotary"})
