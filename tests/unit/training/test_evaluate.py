"""The loss on held-out data."""

import math

from tiny import tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.training.evaluate import Evaluation
from megatron.training.loop.journal import Journal, read_journal

FLAGS = ["--eval-interval", "5", "--eval-iters", "2", "--global-batch-size", "8"]


class FakeEngine:
    """The loss of each evaluation step is the next number of the stream."""

    def __init__(self, terms=None):
        self.micro_batches = []
        self.terms = terms
        self.lengths = set()

    def set_seq_length(self, tokens, *, micro_batch_size):
        self.lengths.add(tokens)
        self.micro_batch_size = micro_batch_size

    def evaluate(self, batches, num_micro_batches):
        self.micro_batches.append(num_micro_batches)
        return next(batches)

    def pop_loss_terms(self):
        return next(self.terms) if self.terms else {}


class Recorder:
    def __init__(self):
        self.seen = []

    def after_evaluation(self, *words, others):
        self.seen.append(words[:3])
        self.others = others


def evaluation(losses=(2.0, 4.0), names=("valid",), flags=(), **where):
    starts = []

    def valid(consumed_samples):
        starts.append(consumed_samples)
        return iter(losses)

    made = Evaluation(
        where.get("engine") or FakeEngine(where.get("terms")),
        dict.fromkeys(names, valid),
        tiny_plan(*FLAGS, *flags),
        journal=where.get("journal"),
        tensorboard=where.get("tensorboard"),
    )
    return made, starts


def test_the_loss_is_the_mean_over_global_batches():
    engine = FakeEngine()
    made, _ = evaluation(engine=engine)
    assert made.validate(TrainState(), "now") == {"valid": 3.0}
    assert engine.micro_batches == [4, 4]


def test_evaluation_takes_batches_of_its_own_sizes():
    flags = ("--eval-global-batch-size", "18", "--eval-micro-batch-size", "3")
    engine = FakeEngine()
    made, starts = evaluation(flags=flags, engine=engine)
    state = TrainState(iteration=5)
    made.after_step(state, step=None)
    assert (engine.micro_batches, engine.micro_batch_size) == ([6, 6], 3)
    assert (starts, state.valid_samples) == ([0], 36)


def test_without_iterations_nothing_is_evaluated():
    """Data of a downstream task are there all the same: each epoch ends with its scores."""
    made, _ = evaluation(flags=("--eval-iters", "0"))
    assert made.validate_at_end(TrainState()) == {}


def test_a_loss_of_several_terms_is_logged_by_term(messages, tmp_path):
    journal, tensorboard = Journal(tmp_path), Recorder()
    means = ({"lm loss": 1.0, "sop loss": 0.5}, {"lm loss": 2.0, "sop loss": 0.25})
    made, _ = evaluation(
        losses=(1.5, 2.25), terms=iter(means), journal=journal, tensorboard=tensorboard
    )
    assert made.validate(TrainState(), "now") == {"valid": 1.875}
    assert "| lm loss value: 1.500000E+00 | lm loss PPL: 4.481689E+00 | sop loss" in messages[0]
    (record,) = read_journal(tmp_path)
    assert (record["lm_loss"], record["sop_loss"]) == (1.5, 0.375)
    assert (tensorboard.seen[0][1], tensorboard.others) == (1.5, {"sop_loss": 0.375})


def test_metrics_of_an_objective_are_logged_and_recorded(messages, tmp_path):
    made, _ = evaluation(
        terms=iter(({"Top-5 hits": 0.5}, {"Top-5 hits": 0.75})), journal=Journal(tmp_path)
    )
    made.validate(TrainState(), "now")
    assert "| lm loss PPL: 2.008554E+01 | Top-5 hits value: 6.250000E-01 | " in messages[0]
    (record,) = read_journal(tmp_path)
    assert (record["lm_loss"], record["top_5_hits"]) == (3.0, 0.625)


def test_a_run_that_is_to_end_waits_for_no_further_batch(messages):
    engine = FakeEngine()
    made, starts = evaluation(losses=(2.0, 4.0, 6.0, 8.0), engine=engine)
    requested = iter([False, True, False, False])
    made.stop_when(lambda: next(requested))
    state = TrainState(iteration=5)
    made.after_step(state, step=None)
    assert engine.micro_batches == [4]
    assert messages == ["the evaluation at iteration 5 is interrupted: the run is to end"]
    # Its samples count as seen: the next evaluation is that of an uninterrupted run.
    assert state.valid_samples == 16
    state.iteration = 10
    made.after_step(state, step=None)
    assert (starts, len(engine.micro_batches)) == ([0, 16], 3)


def test_evaluation_is_due_at_multiples_of_the_interval():
    made, starts = evaluation()
    state = TrainState()
    for iteration in range(1, 12):
        state.iteration = iteration
        made.after_step(state, step=None)
    # Each takes the samples behind those of the last one.
    assert starts == [0, 16]
    assert state.valid_samples == 32


def test_samples_of_the_evaluation_at_the_end_are_read_again_by_a_run_that_goes_on():
    made, starts = evaluation()
    state = TrainState(iteration=5, valid_samples=16)
    made.validate_at_end(state)
    assert (starts, state.valid_samples) == ([16], 16)


def test_the_line_is_the_one_that_tools_look_for(messages):
    evaluation()[0].after_step(TrainState(iteration=5), step=None)
    dashes, line, again = messages[0].split("\n")
    assert line == (
        "valid loss at iteration 5 | lm loss value: 3.000000E+00 | lm loss PPL: 2.008554E+01 | "
    )
    assert dashes == again == "-" * len(line)


def test_the_test_set_is_told_as_such(messages):
    state = TrainState()
    sets = {"test": lambda start: iter([1.0, 1.0]) if start == 0 else None}
    assert evaluation()[0].test(sets, state) == {"test": 1.0}
    assert "test loss at the end of training for test data | lm loss value: 1.0" in messages[0]
    assert state.valid_samples == 0


def test_perplexity_is_bounded():
    recorder = Recorder()
    evaluation([50.0, 50.0], tensorboard=recorder)[0].validate(TrainState(), "now")
    assert recorder.seen == [("valid", 50.0, math.exp(20))]


def test_the_journal_has_a_record(tmp_path):
    made, _ = evaluation(journal=Journal(tmp_path))
    made.validate(TrainState(iteration=5), "now")
    assert [*read_journal(tmp_path)] == [
        {"event": "evaluation", "set": "valid", "iteration": 5, "lm_loss": 3.0, "ppl": math.exp(3)}
    ]


def test_several_sets_are_told_under_their_names_and_read_in_step(messages, tmp_path):
    recorder = Recorder()
    made, starts = evaluation(
        names=("english", "code"), journal=Journal(tmp_path), tensorboard=recorder
    )
    state = TrainState(iteration=5, valid_samples=16)
    assert made.validate(state, "iteration 5") == {"english": 3.0, "code": 3.0}
    assert starts == [16, 16]
    assert state.valid_samples == 32
    assert [text.split("\n")[1].split(" | ")[0] for text in messages] == [
        "english loss at iteration 5",
        "code loss at iteration 5",
    ]
    assert [record["set"] for record in read_journal(tmp_path)] == ["english", "code"]
    assert [name for name, *_ in recorder.seen] == ["english", "code"]


def test_a_loss_that_is_no_number_has_no_perplexity(tmp_path):
    made, _ = evaluation([math.nan, 1.0], journal=Journal(tmp_path))
    made.validate(TrainState(), "now")
    (record,) = read_journal(tmp_path)
    assert (record["lm_loss"], record["ppl"]) == (None, None)


def test_evaluation_is_on_whole_samples():
    engine = FakeEngine()
    made, _ = evaluation(engine=engine)
    made.validate(TrainState(), "now")
    assert engine.lengths == {6}
