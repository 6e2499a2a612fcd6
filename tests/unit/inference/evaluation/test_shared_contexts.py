"""Windows with one context, such as the choices of a question, run it once; scores stay the same."""

import pytest
import torch
from stages import engine_of, plain_logits, random_model
from tiny import LLAMA, tiny_spec

from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator, _by_context
from megatron.inference.evaluation.scoring import Window

SIZES = {"seq_length": 12, "max_position_embeddings": 12, "vocab_size": 11}
CONTEXTS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9), (7,), (8, 1, 2)]


def questions():
    """Return windows of four choices each, in turns."""
    choices = [(3,), (5, 7), (1, 1, 2), (4,)]
    return [Window((*context, *choice), len(choice)) for choice in choices for context in CONTEXTS]


def plain_score(model, spec, window, *, prefix=0):
    logits = plain_logits(model, spec, window.tokens[:-1], prefix=prefix)
    first = len(window.tokens) - window.num_targets
    targets = torch.tensor(window.tokens[first:])
    return float(logits[first - 1 :].log_softmax(-1).gather(1, targets[:, None]).sum())


@pytest.mark.parametrize("changes", [{}, LLAMA | {"window": 3, "rotary_dim": 4}])
@pytest.mark.parametrize("sees_prefix", [False, True])
def test_choices_of_a_question_run_its_context_once(group, changes, sees_prefix):
    spec = tiny_spec(**(SIZES | changes))
    model = random_model(group, spec)
    engine = engine_of(model, spec, rows=8, sees_prefix=sees_prefix)
    sizes = []
    engine.runner.model.get_submodule("3").register_forward_hook(
        lambda layer, inputs, output: sizes.append(tuple(output.hidden.shape[:2]))
    )
    windows = questions()
    evaluator = DistributedEvaluator(engine.runner, rows=8)
    found = [score.log_probability for score in evaluator.scores(windows, num_targets=28)]
    prefixes = [len(w.tokens) - w.num_targets if sees_prefix else 0 for w in windows]
    expected = [
        plain_score(model, spec, window, prefix=prefix)
        for window, prefix in zip(windows, prefixes, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-4)
    if sees_prefix:
        assert [batch for _, batch in sizes] == [8, 8]
    else:
        # Positions and rows: two contexts but for their last tokens, and targets of eight windows;
        # where a context has one token alone, windows run in full.
        assert sizes == [(5, 2), (3, 8), (5, 8)]


def test_windows_of_one_token_contexts_are_sorted_by_length():
    windows = [Window((1, *range(length)), length) for length in (2, 9, 5, 9)]
    assert [len(windows[index].tokens) for index in _by_context(windows)] == [10, 10, 6, 3]
    others = [Window((token, 3, 4)[:length], 1) for token in (5, 6) for length in (2, 3)]
    lengths = [len(others[index].tokens) for index in _by_context(others)]
    assert lengths == [3, 3, 2, 2]
