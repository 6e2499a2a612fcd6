"""Length of a run in epochs of labelled files, and what is reported of epochs that cannot be."""

import pytest

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.data.downstream import downstream_problems
from megatron.training.epochs import with_steps_of_epochs

TASK = """
    --task MNLI --valid-data dev.tsv --num-layers 1 --hidden-size 8 --num-attention-heads 1
    --seq-length 8 --micro-batch-size 1 --lr 0
"""


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--epochs", "0"], "--epochs 0 needs --load"),
        (["--epochs", "1"], "--train-data is missing"),
        (["--epochs", "-1"], "--epochs -1 must be at least 0"),
    ],
)
def test_a_missing_flag_is_named_as_it_is_written(words, missing):
    config = with_steps_of_epochs(parse_config([*TASK.split(), *words])[0], world_size=1)
    assert not config.evaluation.eval_only
    found = downstream_problems(config.downstream, "classification", labelled=True, loads=False)
    assert missing in "\n".join(found)


def test_epochs_are_missing_where_no_flag_sets_the_length():
    with pytest.raises(ConfigError, match="--epochs is missing: how many times --task MNLI passes"):
        with_steps_of_epochs(parse_config(TASK.split())[0], world_size=1)
    config = parse_config([*TASK.split(), "--train-iters", "3"])[0]
    assert with_steps_of_epochs(config, world_size=1) == config
