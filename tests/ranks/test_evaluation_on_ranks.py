"""What is found of texts does not depend on how the model is divided, nor on how often it is there."""

import random
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from stages import engine_of, plain_logits, random_model
from tiny import tiny_spec

from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
from megatron.inference.evaluation.scoring import Score, Window
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.topology import Topology

SPEC = tiny_spec(max_position_embeddings=12, seq_length=12)
LAYOUTS = [
    Topology(pipeline=1, data=1, tensor=2),
    Topology(pipeline=2, data=1, tensor=1),
    Topology(pipeline=1, data=2, tensor=1),
]
DRAWS = random.Random(3)
# More than one share of work for two replicas of two rows, and an odd number.
WINDOWS = [
    Window(tuple(DRAWS.randrange(11) for _ in range(length)), DRAWS.choice((1, length - 1)))
    for length in DRAWS.choices(range(2, 14), k=131)
]
REQUESTS = [
    Request(prompt=(1, i), max_new_tokens=3 + i, sampling=SamplingParams(temperature=2.0), seed=i)
    for i in range(5)
]


def found(evaluator: DistributedEvaluator) -> tuple[list[Score], list[Completion]]:
    scores, completions = (
        [*evaluator.scores(WINDOWS, num_targets=sum(each.num_targets for each in WINDOWS))],
        evaluator.completions(REQUESTS),
    )
    evaluator.close()
    return scores, completions


def require_equal(scores: list[Score], others: list[Score]) -> None:
    assert [score.is_greedy for score in scores] == [score.is_greedy for score in others]
    assert [score.log_probability for score in scores] == pytest.approx(
        [score.log_probability for score in others], abs=1e-4
    )


def find_together(rank: int, expected: tuple[list[Score], list[Completion]]) -> None:
    model = random_model(lone_group(), SPEC)
    for layout in LAYOUTS:
        stage = engine_of(model, SPEC, rows=2, groups=build_groups(layout)).runner
        evaluator = DistributedEvaluator(stage, rows=2)
        if rank:
            evaluator.follow()
            continue
        scores, completions = found(evaluator)
        require_equal(scores, expected[0])
        assert completions == expected[1]


def test_any_layout_finds_what_the_plain_network_says(group: object, tmp_path: Path) -> None:
    model = random_model(group, SPEC)
    alone = found(DistributedEvaluator(engine_of(model, SPEC, rows=3).runner, rows=3))
    plain = []
    for window in WINDOWS:
        logits = plain_logits(model, SPEC, window.tokens[:-1])[-window.num_targets :]
        targets = torch.tensor(window.tokens[-window.num_targets :])
        total = logits.double().log_softmax(-1).gather(1, targets[:, None]).sum().item()
        plain.append(Score(total, bool((logits.argmax(-1) == targets).all())))
    require_equal(alone[0], plain)
    assert 3 < sum(score.is_greedy for score in plain) < 100
    run_on_ranks(2, find_together, tmp_path, alone)
