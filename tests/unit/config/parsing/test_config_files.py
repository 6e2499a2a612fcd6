"""Flags from a YAML file."""

import pytest
from problems import problem
from tiny import tiny_argv, tiny_config

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.parsing.files import file_flags, with_file_flags


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return write_text


def test_every_kind_of_value_becomes_words(write):
    file = write(
        "num_layers: 4\n"
        "training:\n"
        "  rampup_batch_size: [16, 16, 5_859_375]\n"
        "  lr: 1e-4\n"
        "  min-lr: 1.0e-5\n"
        "bf16: true\n"
        "checkpoint-activations: false\n"
        "load: null\n"
        "split: 949, 50, 1\n"
        "deepspeed_config: ds.json\n"
        "DDP-impl: local\n"
        "--log-interval: 5\n"
    )
    assert file_flags(file) == [
        "--num-layers=4",
        "--rampup-batch-size",
        "16",
        "16",
        "5859375",
        "--lr=1e-4",
        "--min-lr=1e-05",
        "--bf16",
        "--split=949, 50, 1",
        "--deepspeed-config=ds.json",
        "--DDP-impl=local",
        "--log-interval=5",
    ]


def test_the_file_gives_what_the_command_line_leaves_out(write):
    file = write("seq_length: 12\nmicro_batch_size: 3\nbf16: true\nseed: 7\n")
    without = ("--seq-length", "--micro-batch-size")
    config = tiny_config("--config", str(file), without=without)
    assert (config.model.seq_length, config.training.micro_batch_size) == (12, 3)
    assert (config.training.seed, config.precision.bf16) == (7, True)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_the_command_line_wins_over_the_file_wherever_it_is_named(write, place):
    words = ["--config", str(write("num_layers: 9\ndata_path: [a, b]\nseed: 7\n"))]
    argv = [*words, *tiny_argv()] if place == "before" else tiny_argv(*words)
    config, _ = parse_config(argv)
    assert (config.model.num_layers, config.data.data_path) == (2, ["corpus"])
    assert config.training.seed == 7


def test_without_a_file_the_words_are_those_of_the_command_line():
    assert with_file_flags(["--lr", "1"], {}) == ["--lr", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "run.yaml is not YAML: "),
        ("a: 1\nlr: 1\nlr: 2\n", "run.yaml … line 3, column 1: lr … 2"),
        ("a:\n  - b: 1\n    b: 1\n", "line 3, column 5: b stands twice, first in line 2"),
        ("- a\n- b\n", "run.yaml: expected `flag: value` lines, found ['a', 'b']"),
        ("", "run.yaml: expected `flag: value` lines, found None"),
        ("just words", "run.yaml: expected `flag: value` lines, found 'just words'"),
        ("no_such_flag: 1", "run.yaml, line 1: unknown key no_such_flag"),
        ("max_seq_length: 1", "run.yaml, line 1: --max-seq-length: write --seq-length instead"),
        ("num_layers: two", "run.yaml, line 1: num_layers: invalid int value: 'two'"),
    ],
)
def test_a_mistake_in_the_file_is_one_message(write, text, message):
    with problem(message):
        tiny_config("--config", str(write(text)))


def test_all_mistakes_of_a_file_are_reported_at_once_with_their_lines(write):
    file = write(
        "network:\n  num-layer: 2\n  hidden-size: wide\n\nbf16: true\nlrr: 1\nseed: [1, x]\n"
    )
    with pytest.raises(ConfigError) as caught:
        tiny_config("--config", str(file), "--sedd", "3")
    assert list(caught.value.problems) == [
        f"{file}, line 2: unknown key num-layer; did you mean num-layers?",
        f"{file}, line 3: hidden-size: invalid int value: 'wide'",
        f"{file}, line 6: unknown key lrr; did you mean lr?",
        f"{file}, line 7: seed takes fewer values; x is too many",
        "unknown flag --sedd; did you mean --seed?",
    ]


def bomb(kind):
    """Return YAML of nine levels, each of which names the one before nine times."""
    first, levels = {"list": ("[x]", "[{}]"), "map": ("{k: 1}", "{{{}}}"), "merge": ("{k: 1}", "")}[
        kind
    ]
    lines = [f"a0: &a0 {first}"]
    for i in range(1, 10):
        names = [f"*a{i - 1}"] * 9
        if kind == "map":
            names = [f"k{k}: {name}" for k, name in enumerate(names)]
        inner = ", ".join(names)
        lines.append(
            f"a{i}: &a{i} {{<<: [{inner}]}}"
            if kind == "merge"
            else f"a{i}: &a{i} {levels.format(inner)}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        *map(bomb, ("list", "map", "merge")),
        "a: &a [*a]",
        "a: &a {b: *a}",
    ],
)
def test_aliases_that_stand_for_too_much_end_at_once(write, text):
    file = write(text)
    assert file.stat().st_size < 1000
    with problem("run.yaml … aliases (*name)"):
        file_flags(file)


def test_aliases_and_merges_of_a_usual_size_are_expanded(write):
    text = "base: &base {lr: 1, seed: 2}\nrun: {<<: *base, seed: 3}\npaths: [&p x, *p]\n"
    assert file_flags(write(text)) == [
        "--lr=1",
        "--seed=2",
        "--lr=1",
        "--seed=3",
        "--paths",
        "x",
        "x",
    ]


def test_a_long_list_without_aliases_is_not_limited(write):
    text = f"data_path: [{', '.join(['p'] * 120_000)}]"
    assert len(file_flags(write(text))) == 120_001


def test_the_keys_of_a_file_are_limited(write):
    """Each takes time: to be read, and to be compared with the names of all flags."""
    with problem("more than 5000 keys"):
        file_flags(write("".join(f"key{i}: 1\n" for i in range(6000))))
    file = write("".join(f"keyword{i}: 1\n" for i in range(300)))
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(file)])
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "there may be further problems"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 5000, "its values are nested too deeply"),
        ("a: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("a: 2001-99-99", "is not YAML: month must be"),
    ],
)
def test_values_that_yaml_cannot_make_are_told(write, text, message):
    with problem(message):
        file_flags(write(text))


@pytest.mark.parametrize("value", ["false", "null"])
def test_an_unknown_flag_is_refused_whatever_its_value(write, value):
    with problem("line 1: unknown key no_such_flag"):
        tiny_config("--config", str(write(f"no_such_flag: {value}")))


def test_a_switch_that_is_on_by_default_can_be_turned_off_by_its_field(write):
    file = write("no-log-loss-scale-to-tensorboard: true")
    assert tiny_config("--config", str(file)).logging.log_loss_scale_to_tensorboard is False


def test_bytes_that_are_no_text_are_told(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"a: \xff")
    with problem("run.yaml … 'utf-8'"):
        file_flags(file)


def test_a_missing_file_is_told():
    with problem("--config nowhere.yaml: No such file or directory"):
        tiny_config("--config", "nowhere.yaml")


def test_the_flag_without_a_value_is_told():
    with problem("argument --config: expected one argument"):
        tiny_config("--config")


def test_variables_in_a_file_are_refused_all_at_once(write):
    with pytest.raises(ConfigError) as found:
        file_flags(write("save: ${RUNS}/a\ndata-path: [0.5, '${DATA}']\nprompt: 5 $ {a}"))
    first, second = found.value.problems
    assert "line 1: save: ${RUNS} is not expanded" in first
    assert "line 2: data-path: ${DATA} is not expanded" in second


def test_a_notice_names_what_overrides_a_file(write):
    file = write("lr: 1e-4\nrampup-batch-size: [2, 2, 8]\nseed: 3\n")
    words = ["--lr", "2e-4", "--rampup_batch_size", "2", "2", "16", "--seed", "3"]
    kept = tiny_argv("--config", str(file), *words[-2:], without=("--lr",))
    assert not any("overridden" in notice for notice in parse_config(kept)[1])
    _, notices = parse_config([*kept, *words])
    changes = "--lr 2e-4 (not 1e-4), --rampup-batch-size 2 2 16 (not 2 2 8)"
    assert f"--config {file} is overridden: {changes}" in notices
