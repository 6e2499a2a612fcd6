"""Each flag of other systems gets its one sentence."""

import shlex

import pytest
from tiny import tiny_argv

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.foreign_flags.legacy import LEGACY

READ = [flag for flag in LEGACY if flag.becomes]
ACCEPTED = [flag for flag in LEGACY if not flag.refused and flag not in READ]
REFUSED = [flag for flag in LEGACY if flag.refused]


def words_of(flag):
    return [flag.option, *["1"] * (flag.takes if isinstance(flag.takes, int) else 2)]


def test_each_accepted_flag_tells_its_sentence_once_however_often_it_is_given():
    words = [word for flag in ACCEPTED for word in words_of(flag)]
    notices = parse_config(tiny_argv(*words, *words))[1]
    told = dict(reversed(notice.split(": ", 1)) for notice in notices)
    assert len(told) == len(notices)
    assert {reason: flags.split(", ") for reason, flags in told.items()} == {
        flag.reason: [each.option for each in ACCEPTED if each.reason == flag.reason]
        for flag in ACCEPTED
    }


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.option)
def test_each_refused_flag_is_the_one_problem(flag):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(*words_of(flag)))
    assert str(caught.value) == f"{flag.option}: {flag.reason}"


def test_refused_flags_of_one_reason_are_one_problem():
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv("--q-lora-rank", "8", "--kv-lora-rank", "8", "--use-mup"))
    latent, mup = caught.value.problems
    assert latent.startswith("--q-lora-rank, --kv-lora-rank: multi-head latent attention")
    assert mup.startswith("--use-mup: ")


@pytest.mark.parametrize("flag", READ, ids=lambda flag: flag.option)
def test_each_value_is_read_as_flags_of_ours(flag):
    for value, ours in flag.becomes.items():
        given = "8" if value == "*" else value
        config, notices = parse_config(tiny_argv(flag.option, *given.split()))
        expected, _ = parse_config(tiny_argv(*shlex.split(ours.replace("{}", given))))
        assert config == expected
        assert len(notices) == 1


@pytest.mark.parametrize("flag", [each for each in READ if "*" not in each.becomes])
def test_other_values_are_refused_with_the_reason(flag):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(flag.option, "other"))
    assert str(caught.value) == f"{flag.option} other: {flag.reason}"


def test_the_last_of_two_flags_counts_whichever_system_it_is_of():
    later, _ = parse_config(tiny_argv("--attention-backend", "flash", "--attention-impl", "sdpa"))
    assert later.kernels.attention_impl == "sdpa"
    later, _ = parse_config(tiny_argv("--attention-impl", "sdpa", "--attention-backend", "flash"))
    assert later.kernels.attention_impl == "flash"


@pytest.mark.parametrize(
    "flag",
    ["--main-grads-dtype", "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"],
)
def test_gradients_in_32_bits_are_so_in_fp16(flag):
    precision = parse_config(tiny_argv("--fp16", flag, "fp32"))[0].precision
    assert precision.accumulate_allreduce_grads_in_fp32
