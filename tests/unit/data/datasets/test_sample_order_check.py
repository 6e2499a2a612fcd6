"""Changes of the sample order are found from the plans, and agree with the samples."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from sentence_corpora import thousand_documents, write_sentences
from tiny import tiny_config, tiny_plan

from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.data.datasets.sample_order_check import other_order
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

LENGTHS = (20, 60, 80, 100, 159, 161, 230, 239, 245, 320)
"""Samples wanted; an epoch of the first corpus has 80."""


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    made = []
    for name, documents in (("a", 128), ("b", 40)):
        made.append(str(tmp_path_factory.mktemp("corpora") / name))
        with IndexedDatasetWriter(made[-1], "i4") as writer:
            for i in range(documents):
                writer.append(np.arange(5) + 1000 * i)
    return made


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations of which up to three fit into a sample, and some of which do not."""
    prefix = str(tmp_path_factory.mktemp("chats") / "c")
    for suffix in ("_tokens_document", "_loss_mask_document"):
        with IndexedDatasetWriter(prefix + suffix, "i4") as writer:
            for i in range(1, 100):
                writer.append(np.full(2 + i % 9, i))
    return [prefix]


def decided(prefixes, samples, *flags):
    words = ("--train-iters", str(samples // 2), "--data-path", *prefixes)
    words = (*words, "--split", "1,0,0", "--global-batch-size", "2")
    plan = tiny_plan(*words, *flags, without=("--data-path",)).data
    return replace(plan, train=replace(plan.train, num_samples=samples))


@pytest.mark.parametrize("data", ["one", "blend", "chats"])
@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_the_order_is_reported_as_another_when_it_is(prefixes, chats, data, order):
    paths = {"one": prefixes[:1], "blend": ["3", prefixes[0], "1", prefixes[1]], "chats": chats}
    kind = "conversations" if data == "chats" else "documents"
    plans = [
        replace(decided(paths[data], n, "--dataloader-type", order), kind=kind) for n in LENGTHS
    ]
    sets = [build_datasets(plan, seq_length=8, seed=3) for plan in plans]
    seen = {True: 0, False: 0}
    for then, before in zip(plans, sets, strict=True):
        for now, after in zip(plans, sets, strict=True):
            common = min(then.train.num_samples, now.train.num_samples)
            is_other = any(
                not np.array_equal(before.train[i]["tokens"], after.train[i]["tokens"])
                for i in range(common)
            )
            found = [*other_order(then, now, after.uses["train", now.train.name], seq_length=8)]
            assert bool(found) == is_other, (then.train.num_samples, now.train.num_samples, found)
            seen[is_other] += 1
    # Conversations are packed one after the other, however many are wanted.
    assert all(seen.values()) == ((data, order) != ("chats", "single"))


def test_reasons_name_flags_and_epochs(prefixes):
    now = decided(prefixes[:1], 100)
    uses = build_datasets(now, seq_length=8, seed=3).uses["train", now.train.name]
    then = decided(prefixes[:1], 60, "--dataloader-type", "cyclic")
    assert [*other_order(then, now, uses, seq_length=8)] == [
        "--dataloader-type was cyclic and is single",
        "the run has 100 training samples in all, and had 60: "
        f"{prefixes[0]} is shuffled over 2 epochs (the last shuffled apart), and was over 1 epoch",
    ]


def test_a_flag_without_a_value_is_named_as_not_given(prefixes):
    now = replace(decided(prefixes[:1], 100), split="", is_random=True)
    assert [*other_order(decided(prefixes[:1], 100), now, [], seq_length=8)] == [
        "--mock-data was not given and is True",
        "--split was 1,0,0 and is not given",
    ]


def test_another_surplus_is_a_reason_where_it_changes_the_epochs(prefixes):
    core = ("--sample-order", "megatron-core", "--mid-level-dataset-surplus")
    now = decided(["3", prefixes[0], "1", prefixes[1]], 100, *core, "0.005")
    uses = build_datasets(now, seq_length=8, seed=3).uses["train", now.train.name]
    for surplus, is_other in (("0.01", False), ("0.5", True)):
        then = decided(["3", prefixes[0], "1", prefixes[1]], 100, *core, surplus)
        reasons = [*other_order(then, now, uses, seq_length=8)]
        assert bool(reasons) == is_other
        assert all(f"surplus was {surplus} and is 0.005: " in reason for reason in reasons)


def test_sentences_keep_their_order_while_the_epochs_are_the_same(tmp_path):
    write_sentences(tmp_path / "c", *thousand_documents())

    def decided(*flags):
        config = tiny_config(
            *("--data-path", str(tmp_path / "c"), "--seq-length", "32", "--seed", "3", *flags)
        )
        return plan_samples(config, world_size=1, objective="bert").data

    def changes(then, now):
        uses = build_datasets(now, seq_length=32, seed=3).uses["train", now.train.name]
        saved = replace(then, cut=asdict(then.cut))  # as in a manifest
        return list(other_order(saved, now, uses, seq_length=32))

    short = decided("--train-iters", "10")
    assert changes(short, decided("--train-iters", "20")) == []
    (found,) = changes(short, decided("--train-iters", "20000"))
    assert "another number of epochs" in found
    (found,) = changes(short, decided("--train-iters", "10", "--short-seq-prob", "0.5"))
    assert "--short-seq-prob" in found
