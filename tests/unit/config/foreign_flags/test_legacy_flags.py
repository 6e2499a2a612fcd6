"""Each flag of other systems gets its one sentence."""

import shlex
from dataclasses import dataclass, replace

import pytest
from problems import problem
from tiny import tiny_argv

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.parsing.flags import parse_sections

READ = [flag for flag in LEGACY if flag.becomes]
ACCEPTED = [flag for flag in LEGACY if not flag.refused and flag not in READ]
REFUSED = [flag for flag in LEGACY if flag.refused]


def words_of(flag):
    return [flag.option, *["1"] * (flag.takes if isinstance(flag.takes, int) else 2)]


def only_with(flag):
    return [flag.only_with, "hybrid"] if flag.only_with else []


def test_each_accepted_flag_tells_its_sentence_once_however_often_it_is_given():
    words = [word for flag in ACCEPTED for word in words_of(flag)]
    notices = parse_config(tiny_argv(*words, *words))[1]
    told = dict(reversed(notice.split(": ", 1)) for notice in notices)
    assert len(told) == len(notices)
    assert {reason: flags.split(", ") for reason, flags in told.items()} == {
        flag.reason: [each.option for each in ACCEPTED if each.reason == flag.reason]
        for flag in ACCEPTED
    }


def test_what_a_file_turns_off_is_off(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("use-torch-fsdp2: false\nsft: null\nqk-clip: false\n")
    config, notices = parse_config(tiny_argv("--config", str(file)))
    assert (config.deepspeed.zero_stage, config.plugins.objective, notices) == (None, None, ())
    file.write_text("no-such-flag: false\n")
    with problem("line 1: unknown key no-such-flag"):
        parse_config(tiny_argv("--config", str(file)))


def test_values_are_read_as_they_are_and_none_is_left_over():
    read = parse_config(tiny_argv("--tokenizer-special-tokens", "<|it's|>", "<b>"))[0]
    assert read.tokenizer.tiktoken_special_tokens == ["<|it's|>", "<b>"]
    with problem("--padded-vocab-size 64 65: 65"):
        parse_config(tiny_argv("--padded-vocab-size", "64", "65"))


def test_a_level_of_the_log_never_hides_the_progress():
    assert parse_config(tiny_argv("--logging-level", "40"))[0].logging.log_level is None


def test_a_flag_of_a_plugin_wins_over_one_of_another_system():
    @dataclass(frozen=True, kw_only=True)
    class Own:
        """Own flags."""

        qk_clip: int = 0
        """A number."""

    parsed = parse_sections(["--qk-clip", "3"], {"own": Own}, legacy=LEGACY)
    assert (parsed.sections["own"].qk_clip, parsed.notices) == (3, ())


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.option)
def test_each_refused_flag_is_the_one_problem(flag):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(*words_of(flag), *only_with(flag)))
    assert str(caught.value) == f"{flag.option}: {flag.reason}"


@pytest.mark.parametrize("flag", [each for each in REFUSED if each.only_with])
def test_what_has_no_effect_without_a_flag_is_accepted_without_it(flag):
    _, notices = parse_config(tiny_argv(*words_of(flag)))
    assert notices == (f"{flag.option}: it has no effect without {flag.only_with}",)


def test_refused_flags_of_one_reason_are_one_problem():
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv("--csa-window-size", "8", "--csa-dense-mode", "--use-mup"))
    sparse, mup = caught.value.problems
    assert sparse.startswith("--csa-window-size, --csa-dense-mode: sparse and indexed attention")
    assert mup.startswith("--use-mup: ")


@pytest.mark.parametrize("flag", READ, ids=lambda flag: flag.option)
def test_each_value_is_read_as_flags_of_ours(flag):
    for value, ours in flag.becomes.items():
        given = "8" if value == "*" else value
        config, notices = parse_config(tiny_argv(flag.option, *given.split()))
        expected, _ = parse_config(tiny_argv(*shlex.split(ours.replace("{}", given))))
        # An extension none of whose flags is given has no section.
        assert replace(config, extensions=expected.extensions) == expected
        assert len(notices) == 1


@pytest.mark.parametrize("flag", [each for each in READ if "*" not in each.becomes])
def test_other_values_are_refused_with_the_reason(flag):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(flag.option, "other"))
    assert str(caught.value) == f"{flag.option} other: {flag.reason}"


def test_the_last_of_two_flags_counts_whichever_system_it_is_of():
    foreign, ours = ("--attention-backend", "flash"), ("--attention-impl", "sdpa")
    read = "--attention-backend flash: read as --attention-impl flash"
    later, notices = parse_config(tiny_argv(*foreign, *ours))
    assert later.kernels.attention_impl == "sdpa"
    assert notices == (f"{read}; a later flag overrides --attention-impl",)
    later, notices = parse_config(tiny_argv(*ours, *foreign))
    assert (later.kernels.attention_impl, notices) == ("flash", (read,))


@pytest.mark.parametrize(
    "flag",
    ["--main-grads-dtype", "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"],
)
def test_gradients_in_32_bits_are_so_in_fp16(flag):
    precision = parse_config(tiny_argv("--fp16", flag, "fp32"))[0].precision
    assert precision.accumulate_allreduce_grads_in_fp32
