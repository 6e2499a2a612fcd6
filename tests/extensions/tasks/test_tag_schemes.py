"""Tag schemes: those that labels have, and labels that decide none."""

import pytest
from problems import problem, require_problem

from megatron.config.data.tag_schemes import tag_scheme_of
from megatron.extensions.tasks.data.text_flags import (
    TextTaskConfig,
    plan_text_task,
    text_task_problems,
)


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        ("O B-PER I-PER", "BIOES"),
        ("O B I", "BIOES"),
        ("O S-X E-X", "BIOES"),
        ("O B-PER I-PER L-PER U-PER", "BILOU"),
        ("O U-PER", "BILOU"),
        ("O B-N M-N E-N S-N", "BMES"),
        ("O PER WORK-OF-ART", "BIOES"),
        ("DET NOUN X", "BIOES"),
        ("", "BIOES"),
    ],
)
def test_labels_have_the_scheme_of_their_prefixes(labels, scheme):
    assert tag_scheme_of(labels.split()) == scheme


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("O B-PER L-PER S-PER", "B, L, S"),
        ("O B-PER _", "label _ … prefix … B-PER"),
        ("O B-PER domain=en", "domain=en … prefix"),
        ("O B_PER I_PER", "B_PER … B-PER"),
        ("O PER-B PER-I", "PER-B … tags"),
        ("O b-per i-per", "b-per … small letter"),
    ],
)
def test_labels_that_decide_no_scheme_are_refused(labels, words):
    with problem(f"{words} … --tag-scheme … BIO, BIOES, BIL"):
        tag_scheme_of(labels.split())
    config = TextTaskConfig(labels=labels.split())
    task = "token-classification"

    def problems(config):
        return [*text_task_problems(config, task, seq_length=8, num_files=0, has_folder=True)]

    require_problem(words, problems(config))
    config = TextTaskConfig(labels=labels.split(), tag_scheme="types")
    assert not problems(config)
    assert plan_text_task(config, task).tag_scheme == "types"


def test_rules_of_squad_follow_its_version():
    for version_2, given, rules in (
        *((False, None, "1.1"), (True, None, "2.0")),
        *((False, "2.0", "2.0"), (True, "1.1", "1.1")),
    ):
        config = TextTaskConfig(version_2_with_negative=version_2, squad_rules=given)
        assert plan_text_task(config, "question-answering").squad_rules == rules
