"""Ranks that share a BERT fill what one process fills."""

from pathlib import Path
from typing import Any

import pytest
from encoders import tokenizer_in
from masked_lms import BERT_SPEC, bert_runner
from ranks import run_on_ranks
from tiny import with_changes

from megatron.extensions.bert.inference import MaskedLM, MaskedLMRequest
from megatron.inference.engine.encoder_runner import SerialEngine
from megatron.inference.loading.loaded_model import lone_groups
from megatron.tensor_parallel.process_groups import Groups, build_groups
from megatron.tensor_parallel.topology import Topology


def inferred(folder: Path, groups: Groups) -> tuple[list[Any], list[float]]:
    """Return texts and numbers that one process, or all of `groups` in step, infer."""
    odd = with_changes(BERT_SPEC, padded_vocab_size=11)
    model = MaskedLM(bert_runner(odd, groups), tokenizer_in(folder))
    (filled,) = model.fill("a b [MASK] c", 3)
    numbers = [each.probability for each in filled]
    numbers += [*model.score("a b c"), model.in_order("a\tb c") or 0.0]
    return [each.token for each in filled], numbers


def infer_together(rank: int, folder: Path, expected: tuple[list[Any], list[float]]) -> None:
    """With tensor parallelism: as the tool does, and as the server does."""
    groups = build_groups(Topology(pipeline=1, data=1, tensor=2))
    texts, numbers = inferred(folder, groups)
    assert texts == expected[0]
    assert numbers == pytest.approx(expected[1], rel=1e-4)
    masked = MaskedLM(bert_runner(groups=groups), tokenizer_in(folder))
    bert = SerialEngine(masked.runner, masked)
    if rank:
        bert.follow()
        return
    bert.step()
    request = MaskedLMRequest(prompt=(), texts=("a [MASK]", "b [MASK]"), top=2)
    assert bert.run_alone(request, lambda: False) == []
    assert len(bert.run_alone(request)) == 2
    bert.close()


def test_tensor_ranks_fill_what_one_process_fills(tmp_path: Path) -> None:
    expected = inferred(tmp_path, lone_groups())
    run_on_ranks(2, infer_together, tmp_path, tmp_path, expected)
