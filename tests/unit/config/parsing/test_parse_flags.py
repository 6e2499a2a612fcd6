"""From the command line to sections."""

from dataclasses import dataclass
from typing import Literal

import pytest
from problems import problem
from scripts import run_script

from megatron.common.errors import ConfigError
from megatron.common.version import VERSION
from megatron.config.config import parse_config
from megatron.config.parsing.declaration import setting
from megatron.config.parsing.flags import Legacy, field_docstrings, parse_sections
from megatron.config.parsing.parser import peek


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    num_things: int
    """Number of things, at most 100%."""

    rate: float = 0.5
    """A rate."""

    name: str | None = None
    """A name."""

    sizes: list[int] | None = None
    """Some sizes."""

    fast: bool = False
    """Go fast."""

    safe: bool = True
    """Do not be safe."""

    style: Literal["round", "square"] = "round"
    """A style."""

    colour: str = setting("red", flag="--color", older=("--colour", "--couleur"))
    """A colour."""

    two_words: bool = setting(True, flag="--without-two-words")
    """No two words."""


@dataclass(frozen=True, kw_only=True)
class More:
    """More options."""

    depth: int = 1
    """A depth."""


OLD = (
    Legacy("--things", "write --num-things instead", takes=1, refused=True),
    Legacy("--quick", "everything is quick"),
    Legacy("--pair", "pairs are not needed", takes=2),
    Legacy("--rest", "100% of the rest is ignored", takes="*"),
)


def parse(line, **keywords):
    parsed = parse_sections(
        line.split(), {"options": Options, "more": More}, legacy=OLD, **keywords
    )
    return parsed.sections["options"]


def notices(line):
    return parse_sections(line.split(), {"options": Options}, legacy=OLD).notices


def test_what_is_not_said_has_its_default():
    assert parse("--num-things 3") == Options(num_things=3)


def test_every_kind_of_field_is_read():
    line = (
        "--num-things=3 --rate 1e-3 --name n --sizes 1 2 3 --fast --no-safe --style square "
        "--color blue --without-two-words"
    )
    assert parse(line) == Options(
        num_things=3,
        rate=0.001,
        name="n",
        sizes=[1, 2, 3],
        fast=True,
        safe=False,
        style="square",
        colour="blue",
        two_words=False,
    )


def test_flags_go_to_their_sections():
    sections = parse_sections(
        ["--depth", "2", "--num-things", "3"], {"options": Options, "more": More}
    ).sections
    assert sections == {"options": Options(num_things=3), "more": More(depth=2)}


def test_two_spellings_of_a_flag_may_agree_but_not_differ():
    assert parse("--num-things 1 --color blue --colour blue").colour == "blue"
    with problem("--color blue and --colour red are one flag"):
        parse("--num-things 1 --color blue --colour red")


@pytest.mark.parametrize("option", ["--color", "--colour", "--couleur"])
def test_older_spellings_are_read(option):
    assert parse(f"--num-things 3 {option} blue").colour == "blue"


def test_numbers_may_have_underscores():
    assert parse("--num-things 9_765_625 --sizes 1_000").num_things == 9765625
    assert parse("--num-things 9_765_625 --sizes 1_000").sizes == [1000]


def test_blanks_after_a_backslash_are_named():
    with problem("space after a backslash at the end of a line"):
        parse_sections(["--num-things", "3", "--fast", " "], {"options": Options})


def test_underscores_and_hyphens_spell_the_same_flag():
    assert parse("--num_things 3 --sizes 1").num_things == 3
    assert parse("--num_things=3").num_things == 3
    assert peek(["--num_things=3"]).get("num_things") == "3"


def test_the_last_word_wins():
    assert parse("--num-things 3 --num-things 4").num_things == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: --num-things"),
        ("--num-things x", "--num-things … int … 'x'"),
        ("--num-things 2.5", "--num-things … int … '2.5'"),
        ("--num-things 3 --rate fast", "--rate … 'fast' … number"),
        ("--num-things 3 --style oval", "--style … choice: 'oval'"),
        ("--num-things 3 --sizes", "--sizes … one argument"),
        ("--num-things 3 --fast=True", "--fast … no value … 'True'"),
        ("--num-things 3 --nmae n", "--nmae … --name?"),
        ("--num-things 3 --rest-of", "--rest-of … --help-all"),
        ("--num-things 3 --thigns 4", "--thigns … --num-things"),
        ("--num-things 3 --fast True", "--fast … no value … True; leave True out"),
        ("--num-things 3 --fast off", "--fast … no value … off; leave --fast out"),
        ("--num-things 3 --rat 4", "--rat; … --rate?"),
        ("--num-things 3 --xyz=4", "--xyz … --help-all"),
        ("--num-things 3 stray", "stray … --NAME VALUE"),
        ("--things 3 --num-things 3", "--things: … --num-things"),
    ],
)
def test_a_mistake_is_one_message(line, message):
    with problem(message):
        parse(line)


def test_all_unknown_flags_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--num-things 3 --nmae n --xyz 2 --color red")
    assert caught.value.problems == (
        "unknown flag --nmae; did you mean --name?",
        "unknown flag --xyz; --help-all lists all flags",
    )


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--num-things x --rate fast --name ok --style oval --xyz 2")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("argument --num-things", "argument --rate", "argument --style"),
        "unknown flag --xyz; --help-all lists all flags",
    ]


def test_a_misspelt_flag_that_is_required_is_told_with_its_right_spelling():
    with problem("unknown flag --num-thing; did you mean --num-things?"):
        parse("--num-thing 3")


def test_flags_without_effect_are_noticed_once_each():
    assert notices("--quick --num-things 3 --pair a b --quick") == (
        "--quick: everything is quick",
        "--pair: pairs are not needed",
    )
    assert notices("--num-things 3") == ()


def test_notices_do_not_stay_for_the_next_command_line():
    notices("--num-things 3 --quick")
    assert notices("--num-things 3") == ()


def test_defaults_can_be_replaced():
    saved = {"num_things": 7, "fast": True, "safe": False, "colour": "blue", "sizes": [4]}
    assert parse("", defaults=saved) == Options(
        num_things=7, fast=True, safe=False, colour="blue", sizes=[4]
    )
    assert parse("--num-things 8 --sizes 5", defaults=saved).num_things == 8
    assert parse("--num-things 8 --sizes 5", defaults=saved).sizes == [5]


def test_help_shows_every_flag_with_its_sentence(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--help", description="What this does.")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for words in ("What this does.", "at most 100%", "Do not be safe."):
        assert words in text
    with pytest.raises(SystemExit):
        parse("--help-legacy")
    assert "100% of the rest" in capsys.readouterr().out


def help_of(capsys, word):
    with pytest.raises(SystemExit) as left:
        parse_config([word], description="Pretrain.")
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_is_what_a_beginner_needs(capsys):
    text = help_of(capsys, "--help")
    lines = text.splitlines()
    assert lines[0].endswith("[flags]")
    order = [
        text.index(f"\n{words}") for words in ("To begin with:", "  --num-layers N", "  --load")
    ]
    assert order == sorted(order)
    assert lines.index("To begin with:") < 20
    assert "(default: 1)" in text
    assert "--norm-epsilon" not in text
    assert len(lines) < 100


def test_all_flags_have_a_help_of_their_own(capsys):
    text = help_of(capsys, "--help-all")
    order = [text.index(f"\n{words}") for words in ("To begin with:", "Model:\n", "  --ffn-hidden")]
    assert order == sorted(order)
    # Headings are words, each flag is listed once, and those of other systems are elsewhere.
    assert "Config:" not in text
    assert text.count("\n  --num-layers ") == 1
    assert "--use-mcore-models" not in text


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("tools/generate_samples_gpt.py", ("--prompt PROMPT", "--load LOAD")),
        ("tools/run_text_generation_server.py", ("--port N", "--load LOAD")),
        ("tools/plan.py", ("--search N", "--num-layers N")),
        ("tools/preprocess_data.py", ("--input INPUT", "--tokenizer-type")),
    ],
)
def test_the_help_of_a_tool_begins_with_its_own_flags(tool, flags):
    done = run_script(tool, "--help")
    assert done.returncode == 0
    places = [done.stdout.index(f"\n  {flag}") for flag in flags]
    assert places == sorted(places)
    assert done.stdout[: places[0]].count("\n") < 60
    assert "--norm-epsilon" not in done.stdout
    assert "--object-storage-cache-path" in run_script(tool, "--help-all").stdout


def test_the_flags_of_other_systems_have_a_help_of_their_own(capsys):
    text = help_of(capsys, "--help-legacy")
    assert "Flags of other systems:" in text
    assert "--use-mcore-models" in text
    assert "--num-layers " not in text
    assert "Model:" not in text


def test_the_version_is_told(capsys):
    assert help_of(capsys, "--version").split()[-1] == VERSION


def test_docstrings_are_the_strings_under_the_fields():
    docs = field_docstrings(More)
    assert docs == {"depth": "A depth."}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--load a --save b", "a"),
        ("--save b --load=a=c", "a=c"),
        ("--save b", None),
        ("--load", None),
        ("--loader a", None),
    ],
)
def test_one_value_can_be_read_without_the_rest(line, found):
    assert peek(line.split()).get("load") == found


def test_all_flags_that_are_refused_or_unknown_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--things 4 --quikc --things 5 --rest 1 2")
    assert caught.value.problems == (
        "--things: write --num-things instead",
        "unknown flag --quikc; did you mean --quick?",
        "the following arguments are required: --num-things",
    )
