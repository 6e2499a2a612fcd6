"""Tag schemes: those that labels have, and labels that decide none."""

import pytest

from megatron.common.errors import ConfigError
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
    ("labels", "problem"),
    [
        ("O B-PER L-PER S-PER", "prefixes B, L, S of labels"),
        ("O B-PER _", "the label _ has no prefix, and others such as B-PER have"),
        ("O B-PER domain=en", "the label domain=en has no prefix"),
        ("O B_PER I_PER", "labels such as B_PER are no tags like B-PER"),
        ("O PER-B PER-I", "labels such as PER-B are no tags"),
        ("O b-per i-per", "labels such as b-per begin with a small letter"),
    ],
)
def test_labels_that_decide_no_scheme_are_refused(labels, problem):
    with pytest.raises(
        ConfigError, match=f"{problem}.*: write --tag-scheme: one of BIO, BIOES, BIL"
    ):
        tag_scheme_of(labels.split())
    config = TextTaskConfig(labels=labels.split())
    task = "token-classification"

    def problems(config):
        return [*text_task_problems(config, task, seq_length=8, num_files=0, has_folder=True)]

    assert [each for each in problems(config) if problem in each]
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
