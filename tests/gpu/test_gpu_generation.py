"""Generation on a GPU: greedy tokens of the CPU, the KV cache, 16 bits, sequences that come and go."""

from dataclasses import replace

import pytest
import torch
from host_syncs import CudnnAttention
from stages import random_model, whole_weights
from tiny import tiny_plan, tiny_spec
from torch.testing import assert_close
from trainings import VOCAB_SIZE

from megatron.fused_kernels.registry import choose_inference_kernels
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.decode_graphs import decode_capture
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.process_groups import lone_group

GREEDY = SamplingParams(greedy=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(device):
    large = device.type == "cuda"
    heads, width, length = (16, 1024, 512) if large else (4, 64, 64)
    return tiny_spec(
        num_layers=8 if large else 2,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        num_attention_heads=heads,
        head_dim=width // heads,
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=512,
    )


@pytest.fixture(scope="module")
def weights(spec, device):
    return whole_weights(random_model(lone_group(), spec))


def engine_of(spec, weights, device, *, dtype=torch.float32, recompute=False, graphs=True):
    groups = lone_groups()
    runner = ModelRunner(
        spec,
        weights,
        groups=groups,
        capture=decode_capture(spec, groups, device) if graphs else None,
        dtype=dtype,
        device=device,
        rows=0 if recompute else 4,
        kernels=choose_inference_kernels(
            tiny_plan().kernels, spec, tensor=1, dtype=dtype, device=device
        ),
    )
    return InferenceEngine(runner, rows=4, recompute=recompute)


def requests(new):
    """Return requests of several lengths, more than there are rows."""
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 11, 5, 7, 2, 13)
    return [
        Request(
            prompt=tuple(torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()),
            max_new_tokens=new - index,
            sampling=GREEDY,
        )
        for index, length in enumerate(lengths)
    ]


def tokens_of(engine, new):
    return [completion.tokens for completion in engine.generate(requests(new))]


def test_greedy_tokens_are_those_of_the_cpu_with_and_without_a_cache(spec, weights, device, caplog):
    """Sequences join and leave the rows of the cache, because there are more of them."""
    expected = tokens_of(engine_of(spec, weights, CPU, recompute=True), 12)
    assert tokens_of(engine_of(spec, weights, device), 12) == expected
    assert tokens_of(engine_of(spec, weights, device, graphs=False), 12) == expected
    assert tokens_of(engine_of(spec, weights, device, recompute=True), 12) == expected
    assert "without CUDA graphs" not in caplog.text


def test_log_probabilities_in_16_bits_are_those_of_32(spec, weights, device, record_property):
    scored = [replace(request, max_new_tokens=0, prompt_logprobs=True) for request in requests(12)]
    exact, rounded = (
        torch.tensor(
            [
                logprob
                for completion in engine_of(spec, weights, device, dtype=dtype).generate(scored)
                for logprob in completion.prompt_logprobs
            ]
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    record_property("largest difference", float((exact - rounded).abs().max()))
    assert_close(rounded, exact, rtol=5e-2, atol=5e-2)


def test_new_lengths_cost_nothing(gpu, spec, weights):
    """No attention backend plans anew for each length of the cache."""
    engine = engine_of(spec, weights, gpu, dtype=torch.bfloat16)
    with CudnnAttention() as attention:
        (one,) = engine.generate(requests(64)[:1])
    assert attention.allowed and not any(attention.allowed)
    assert len(one.tokens) == 64
