"""Generated tokens against Hugging Face's `generate` with the same weights."""

import pytest
import test_gpt_against_hugging_face as gpt2
import test_llama_and_bloom as others
import torch
from checkpoints import in_transformers, spread_network
from stages import completed, engine_of

from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request

PROMPTS = [(3,), (1, 2, 3, 4), (10, 5)]
NEW = 8


def of_gpt2(group):
    model = spread_network(gpt2.SPEC, group)
    return gpt2.SPEC, model, gpt2.hugging_face(model.state_dict())


def of_other(group, case):
    flags, build = others.CASES[case]
    spec, model = others.network(group, flags)
    reference = build()
    reference.load_state_dict(in_transformers(spec, model.state_dict()), strict=False)
    return spec, model, reference


@pytest.mark.parametrize("case", ["gpt-2", *others.CASES])
def test_greedy_tokens_are_those_of_hugging_face(group, case):
    spec, model, reference = of_gpt2(group) if case == "gpt-2" else of_other(group, case)
    new = min(NEW, spec.positions.max_position_embeddings - max(map(len, PROMPTS)))
    reference.generation_config.eos_token_id = None
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            # Rows of the padded vocabulary are tokens like others to them.
            suppress_tokens=[*range(spec.vocabulary.vocab_size, spec.vocabulary.padded_vocab_size)]
            or None,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    requests = [
        Request(prompt=prompt, max_new_tokens=new, sampling=SamplingParams(greedy=True))
        for prompt in PROMPTS
    ]
    found = completed(engine_of(model, spec, rows=2), *requests)
    assert [list(done.tokens) for done in found] == expected
    assert len({token for tokens in expected for token in tokens}) > 1
