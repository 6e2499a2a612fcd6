"""Which tokens a run reads: resolution of the data flags."""

import pytest
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.data.corpora import SourcePlan
from megatron.config.plan.validation import validate

NO_PATH = ("--data-path",)
TRAIN = ["--train-weighted-split-paths", "train: 1 0:0.9 a"]
VALID = "--valid-weighted-split-paths"


def problems(*flags, without=NO_PATH):
    with pytest.raises(ConfigError) as caught:
        validate(tiny_config(*flags, without=without), world_size=1, device="cpu")
    return caught.value.problems


def test_validation_data_last_for_every_evaluation():
    flags = "--global-batch-size 4 --train-iters 10 --eval-interval 3 --eval-iters 5"
    data = tiny_plan(*flags.split()).data
    assert data.train.num_samples == 40
    # After iterations 3, 6 and 9, and at the end.
    assert [(group.name, group.num_samples) for group in data.valid] == [("valid", 4 * 5 * 4)]
    assert [(group.name, group.num_samples) for group in data.test] == [("test", 5 * 4)]


def test_evaluation_data_last_for_batches_of_its_own_size():
    flags = "--train-iters 10 --eval-interval 3 --eval-iters 5 --eval-global-batch-size 6"
    data = tiny_plan(*flags.split()).data
    assert [group.num_samples for group in (*data.valid, *data.test)] == [4 * 5 * 6, 5 * 6]


def test_every_group_gets_as_many_samples_as_a_lone_one():
    flags = [*TRAIN, VALID, "en: 1 0.9:1 a", "fr: 2 0:0.5 b, 3 0.5:1 b", "--eval-iters", "5"]
    data = tiny_plan(*flags, "--train-iters", "10", "--eval-interval", "3", without=NO_PATH).data
    assert [(group.name, group.num_samples) for group in data.valid] == [("en", 40), ("fr", 40)]
    assert data.valid[1].sources == (
        SourcePlan(prefix="b", weight=2.0, start=0.0, end=0.5),
        SourcePlan(prefix="b", weight=3.0, start=0.5, end=1.0),
    )
    assert [group.is_blend for group in data.valid] == [False, True]
    assert data.test == ()
    assert data.split == ""


def test_no_evaluation_takes_no_data():
    data = tiny_plan("--eval-iters", "0").data
    assert (data.valid, data.test) == ((), ())


@pytest.mark.parametrize(
    ("words", "sources", "is_blend"),
    [
        (["a"], [("a", 1.0)], False),
        (["0.3", "a", "2", "b"], [("a", 0.3), ("b", 2.0)], True),
        (["1", "a"], [("a", 1.0)], True),
    ],
)
def test_a_data_path_is_a_prefix_or_a_blend(words, sources, is_blend):
    data = tiny_plan("--data-path", *words, without=NO_PATH).data
    for group in (data.train, *data.valid, *data.test):
        assert [(source.prefix, source.weight) for source in group.sources] == sources
        assert group.is_blend == is_blend
    assert data.split == "969, 30, 1"


def test_groups_come_from_a_file_too(tmp_path):
    file = tmp_path / "valid.txt"
    file.write_text('"en: 1 0.9:1 a" "fr: 1 0.9:1 b"\n')
    output = tiny_plan(*TRAIN, f"{VALID}-path", str(file), without=NO_PATH).data
    printed = tiny_plan(*TRAIN, VALID, "en: 1 0.9:1 a", "fr: 1 0.9:1 b", without=NO_PATH).data
    assert output == printed


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--data-path is missing: the prefix of a .bin/.idx pair"),
        (["--data-path", "a", "2", "c"], "--data-path has 3 values; give one prefix, or weights"),
        (
            ["--data-path", "a", "2"],
            "--data-path: 'a' before 2 is not a number, so it is no weight",
        ),
        (
            ["--data-path", "a", "b"],
            "--data-path a b: several prefixes need a weight before each, such as 0.5 a 0.5 b; for "
            "as much of each as it holds, merge them: tools/merge_preprocessed_data.py --datasets "
            "a b --output-prefix NEW",
        ),
        (["--data-path", "a", "b", "c"], "--data-path a b c: several prefixes need a weight"),
        (["--data-path", "-0.5", "b"], "--data-path: weight -0.5 of b must be 0 or more"),
        (["--data-path", "nan", "b"], "--data-path: weight nan of b must be 0 or more"),
        (["--data-path", "0", "a", "0", "b"], "--data-path: the weights are all 0"),
        ([*TRAIN, "--data-path", "a"], "--data-path and --train-weighted-split-paths both name"),
        ([*TRAIN, "--split", "1,1"], "--split is for --data-path; --train-weighted-split-paths"),
        ([VALID, "v: 1 0:1 a"], "--train-weighted-split-paths takes one group, 0 were given"),
        ([*TRAIN, "more: 1 0:1 a"], "--train-weighted-split-paths takes one group, 2 were given"),
        (
            [*TRAIN, f"{TRAIN[0]}-path", "file"],
            "--train-weighted-split-paths and --train-weighted-split-paths-path set the same",
        ),
        (
            [*TRAIN, VALID, "v: 1 0:1 a", "v: 1 0:1 b"],
            "--valid-weighted-split-paths has 2 groups named v",
        ),
        (
            [*TRAIN, f"{VALID}-path", "no/such/file"],
            "--valid-weighted-split-paths-path no/such/file: No such file",
        ),
    ],
)
def test_a_problem_is_told(flags, problem):
    assert [text for text in problems(*flags) if text.startswith(problem)]


def test_problems_of_all_groups_are_told_at_once():
    found = problems(TRAIN[0], "t: 1 0:2 a, x", VALID, "v: x 0:1 a")
    assert [text.partition(":")[0] for text in found] == [TRAIN[0], TRAIN[0], VALID]


def test_the_surplus_of_blends_is_positive_and_of_one_order():
    core = ("--sample-order", "megatron-core", "--mid-level-dataset-surplus")
    assert tiny_plan().data.blend_surplus == 0.005
    assert tiny_plan(*core, "0.2").data.blend_surplus == 0.2
    assert list(problems(*core, "0", without=())) == [
        "--mid-level-dataset-surplus 0.0 must be more than 0: an order by weights takes up to one "
        "sample more"
    ]
    assert list(problems(core[2], "0.01", without=())) == [
        "--mid-level-dataset-surplus 0.01 needs --sample-order megatron-core: the other order has a "
        "fixed surplus"
    ]
