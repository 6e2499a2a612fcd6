"""The loop and when it ends."""

from dataclasses import replace

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.api import pretrain
from megatron.checkpointing.train_state import TrainState
from megatron.training.guards.stop import Stop
from megatron.training.loop.loop import Hook, Schedule, require_hooks, train


class FakeEngine:
    """Its loss is the number of the step, its norm ten times that; every third step overflows."""

    loss_scale, skipped_steps, grad_norm = 8.0, 0, None

    def __init__(self):
        self.calls = []

    def set_lr(self, lr):
        self.calls.append(("lr", lr))

    def set_embedding_lr(self, lr):
        self.calls.append(("embedding", lr))

    def set_weight_decay(self, weight_decay):
        self.calls.append(("decay", weight_decay))

    def set_global_batch_size(self, samples):
        self.calls.append(("size", samples))

    def set_seq_length(self, tokens):
        self.calls.append(("length", tokens))

    def train_batch(self, batches):
        step = next(batches)
        self.calls.append(("step", step))
        self.grad_norm = 10.0 * step
        self.skipped_steps += step % 3 == 0
        return step


class Recorder(Hook):
    def __init__(self):
        self.seen = []

    def after_step(self, state, step):
        self.seen.append((state.iteration, state.samples, step))


def growing(samples):
    return 2 if samples < 4 else 6


def run(iterations, *, state=None, hooks=(), exit_interval=0, **rates):
    state = state or TrainState()
    plan = replace(
        tiny_plan().training, train_iters=iterations, train_samples=100, exit_interval=exit_interval
    )
    engine = FakeEngine()
    reason = train(
        engine,
        iter(range(1, 100)),
        schedule=Schedule(
            lr=lambda state: state.tokens / 50,
            weight_decay=lambda samples: samples / 100,
            batch_size=growing,
            seq_length=lambda iteration: 5,
            **rates,
        ),
        state=state,
        hooks=hooks,
        stop=Stop(plan, started_from=state.iteration),
    )
    return reason, state, engine


def test_counters_add_up_over_a_growing_batch():
    _, state, _ = run(4)
    assert state == TrainState(iteration=4, samples=16, tokens=80, skipped=1)


def test_rate_decay_and_size_follow_from_what_was_consumed_before_the_step():
    _, _, engine = run(3)
    steps = [engine.calls[i : i + 5] for i in range(0, 15, 5)]
    assert [sorted(step[:4]) for step in steps] == [
        [("decay", 0.0), ("length", 5), ("lr", 0.0), ("size", 2)],
        [("decay", 0.02), ("length", 5), ("lr", 0.2), ("size", 2)],
        [("decay", 0.04), ("length", 5), ("lr", 0.4), ("size", 6)],
    ]
    assert [step[4] for step in steps] == [("step", 1), ("step", 2), ("step", 3)]


def test_a_rate_of_the_embedding_is_that_of_its_step():
    recorder = Recorder()
    _, _, engine = run(3, hooks=[recorder], embedding_lr=lambda state: state.samples / 10)
    assert [value for name, value in engine.calls if name == "embedding"] == [0.0, 0.2, 0.4]
    assert [step.embedding_lr for _, _, step in recorder.seen] == [0.0, 0.2, 0.4]
    run(1, hooks=[recorder])
    assert recorder.seen[-1][2].embedding_lr is None


def test_hooks_see_the_step_counted_already_in_their_order():
    first, second = Recorder(), Recorder()
    run(3, hooks=[first, second])
    assert [(iteration, samples) for iteration, samples, _ in first.seen] == [
        (1, 2),
        (2, 4),
        (3, 10),
    ]
    assert first.seen == second.seen


@pytest.mark.parametrize("hooks", [[Recorder], [None], [Recorder(), print], Recorder()])
def test_what_is_no_list_of_hooks_is_refused(hooks):
    with problem("hooks: … of Hook"):
        require_hooks(hooks, "hooks:")
    with problem("hooks: … of Hook"):
        pretrain(tiny_config(), hooks=hooks)


def test_a_step_tells_what_it_did():
    recorder = Recorder()
    run(3, hooks=[recorder])
    *_, (_, _, step) = recorder.seen
    assert (step.loss, step.lr, step.batch_size) == (3.0, 0.4, 6)
    assert (step.grad_norm, step.loss_scale, step.skipped) == (30.0, 8.0, True)
    assert step.seconds >= 0
    assert [step.skipped for _, _, step in recorder.seen] == [False, False, True]


def test_a_resumed_run_goes_on_from_its_state():
    state = TrainState(iteration=2, samples=4, tokens=20)
    _, state, engine = run(3, state=state)
    assert state == TrainState(iteration=3, samples=10, tokens=50)
    assert ("lr", 0.4) in engine.calls


def test_a_finished_run_takes_no_step():
    state = TrainState(iteration=3, samples=10)
    reason, state, engine = run(3, state=state)
    assert (reason, engine.calls) == ("training is done after 3 iterations", [])
    assert state.samples == 10


@pytest.mark.parametrize(("started_from", "ends_at"), [(0, 4), (3, 4), (4, 8), (5, 8), (9, 10)])
def test_a_run_leaves_at_the_next_multiple_of_the_exit_interval(started_from, ends_at):
    reason, state, _ = run(10, state=TrainState(iteration=started_from), exit_interval=4)
    assert state.iteration == ends_at
    expected = "training is done after 10 iterations"
    assert reason == (expected if ends_at == 10 else f"exiting program at iteration {ends_at}")


def test_pretrain_takes_a_config_and_no_dictionary():
    with problem("dict … make_config"):
        pretrain({"num_layers": 2})
