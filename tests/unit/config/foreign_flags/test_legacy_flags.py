"""Each flag of other systems gets its one sentence."""

import pytest
from tiny import tiny_argv

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.foreign_flags.legacy import LEGACY

ACCEPTED = [flag for flag in LEGACY if not flag.refused]
REFUSED = [flag for flag in LEGACY if flag.refused]


def words_of(flag):
    return [flag.option, *["1"] * (flag.takes if isinstance(flag.takes, int) else 2)]


def test_each_accepted_flag_tells_its_sentence_once_however_often_it_is_given():
    words = [word for flag in ACCEPTED for word in words_of(flag)]
    notices = parse_config(tiny_argv(*words, *words))[1]
    assert notices == tuple(f"{flag.option}: {flag.reason}" for flag in ACCEPTED)


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.option)
def test_each_refused_flag_is_the_one_problem(flag):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(*words_of(flag)))
    assert str(caught.value) == f"{flag.option}: {flag.reason}"
