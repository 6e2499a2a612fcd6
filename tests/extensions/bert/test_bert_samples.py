"""Samples of BERT: equal to Megatron's byte for byte, cached by all they depend on."""

import json
from dataclasses import replace

import numpy as np
import pytest
from masked_corpora import SEED, corpus_in, digest, digest_of, run, sentences_of, tokenizer_of
from problems import problem
from sentence_corpora import thousand_documents, write_sentences
from tiny import tiny_config, tiny_objective, tiny_plan
from tokenizers import BertWordPieceTokenizer

from megatron.common.errors import DataError
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets, view_of
from megatron.extensions.bert.data import BertDataset
from megatron.extensions.bert.flags import bert_samples, bert_sentences
from megatron.extensions.masked_lm.data import SentenceDataset
from megatron.extensions.masked_lm.data_masking import MaskingVocabulary
from megatron.extensions.masked_lm.flags import MaskedLMConfig
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

BERT_KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpus_in(tmp_path_factory.mktemp("sentences"))


def bert(corpus, seq_length, *, head=True):
    config = MaskedLMConfig(bert_binary_head=head)
    return BertDataset(
        sentences_of(corpus, seq_length, bert_sentences(config)),
        plan=bert_samples(config, seq_length=seq_length),
        vocabulary=MaskingVocabulary.of(tokenizer_of(corpus), "cls", "sep", "mask", "pad"),
        seed=SEED,
    )


@pytest.mark.parametrize(
    ("seq_length", "head", "size", "hashed"),
    [
        (128, True, 5532, "b2ce39916d39e98b"),
        (512, True, 5832, "9cbed0d9abb7e4f5"),
        (128, False, 5641, "3a1256118c866b3e"),
    ],
)
def test_samples_of_bert_are_those_of_megatron(corpus, seq_length, head, size, hashed):
    dataset = bert(corpus, seq_length, head=head)
    assert len(dataset) == size
    assert digest_of(dataset, BERT_KEYS) == hashed


def test_the_first_sample_of_bert(corpus):
    dataset = bert(corpus, 128)
    sample = dataset[0]
    assert [(p.document, p.stop) for p in dataset.origin(0).pieces][0][0] == 6678
    assert (int(sample["is_random"]), int(sample["truncated"])) == (0, 1)
    assert (int(sample["padding_mask"].sum()), int(sample["types"].sum())) == (128, 53)
    assert np.flatnonzero(sample["loss_mask"]).tolist() == [
        *(63, 64, 65, 75, 76, 77, 79, 80, 81, 82, 83, 91, 94, 95, 96, 103, 104, 113),
    ]
    assert sample["text"][:6].tolist() == [2, 623, 570, 517, 464, 411]
    assert sample["text"][63:66].tolist() == [26, 4, 440]
    hashes = {
        "text": "3991ec4827850ed7",
        "types": "738a0737bef1dbd2",
        "labels": "810eace324de564e",
        "loss_mask": "2fc611d742f27745",
        "padding_mask": "01476cf1a34744ed",
    }
    assert {name: digest(sample[name]) for name in hashes} == hashes


def test_figures_of_all_samples_of_bert(corpus):
    dataset = bert(corpus, 128)
    count, unmasked = np.zeros(6, np.int64), []
    for i in range(len(dataset)):
        sample = dataset[i]
        masked = sample["loss_mask"] == 1
        count += [
            sample["is_random"],
            sample["truncated"],
            masked.sum(),
            sample["padding_mask"].sum(),
            (sample["text"][masked] == 4).sum(),
            (sample["text"][masked] == sample["labels"][masked]).sum(),
        ]
        if not masked.any():
            unmasked.append(i)
    assert count.tolist() == [2760, 4411, 89402, 631702, 71588, 8895]
    assert (unmasked[:5], len(unmasked)) == ([156, 241, 460, 584, 1249], 18)
    # A sample without a masked token is complete: no label, and nothing to divide by.
    sample = dataset[156]
    assert set(sample["labels"].tolist()) == {-1}
    assert int(sample["padding_mask"].sum()) > 3


def test_a_random_pad_leaves_no_hole_in_the_padding_mask(corpus):
    dataset, holes = bert(corpus, 128), 0
    for i in range(2000):
        sample = dataset[i]
        real = int(sample["padding_mask"].sum())
        assert sample["padding_mask"].tolist() == [1] * real + [0] * (128 - real)
        holes += int((sample["text"][:real] == 0).any())
    assert holes == 5


def test_a_token_of_another_vocabulary_is_an_error(tmp_path, corpus):
    dataset = write_sentences(tmp_path / "other", [4, 4], [0, 2], [5, 6, 7, 5000, 5, 6, 7, 8])
    config = MaskedLMConfig()
    bad = BertDataset(
        SentenceDataset(
            dataset,
            range(1),
            num_samples=1,
            seq_length=16,
            seed=1,
            sentences=bert_sentences(config),
        ),
        plan=bert_samples(config, seq_length=16),
        vocabulary=MaskingVocabulary.of(tokenizer_of(corpus), "cls", "sep", "mask", "pad"),
        seed=1,
    )
    with problem("token 5000 … 1002", DataError):
        bad[0]


def test_documents_of_one_sentence_end_with_their_number(tmp_path):
    write_sentences(tmp_path / "text_document", [20] * 100, range(101))
    with problem("97 … --split-sentences … --bert-no-binary-head", DataError):
        run(str(tmp_path / "text_document"), "bert")
    _, sets = run(str(tmp_path / "text_document"), "bert", "--bert-no-binary-head")
    assert len(sets.train[0]["sizes"]) == 1


def test_the_cache_depends_on_head_split_length_and_share(tmp_path):
    prefix = str(tmp_path / "corpus")
    write_sentences(prefix, *thousand_documents())
    seen = set()
    for flags in (
        [],
        ["--bert-no-binary-head"],
        ["--split", "50,40,10"],
        ["--short-seq-prob", "0.101"],
        ["--short-seq-prob", "0.3"],
        ["--train-iters", "50"],
    ):
        _, sets = run(prefix, "bert", *flags)
        rows = [str(sets.train.origin(i).pieces) for i in range(len(sets.train))]
        again = run(prefix, "bert", *flags)[1].train
        assert [str(again.origin(i).pieces) for i in range(len(again))] == rows
        seen.add((len(rows), digest(np.array([hash(row) for row in rows]))))
    assert len({path.name for path in (tmp_path / "corpus-index-cache").glob("*-rows.npy")}) >= 6
    assert len(seen) >= 4


def test_splits_count_documents_and_blends_seed_masks_by_the_corpus(tmp_path, corpus):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    sizes, starts = thousand_documents()
    for prefix in (first, second):
        write_sentences(prefix, sizes, starts)
    decided, sets = run(f"0.5 {first} 0.5 {second}", "bert", "--split", "60,30,10")
    limits = {"train": (0, 600), "valid": (600, 900), "test": (900, 1000)}
    for role, dataset in (
        ("train", sets.train),
        ("valid", sets.valid["valid"]),
        ("test", sets.test["test"]),
    ):
        low, high = (starts[bound] for bound in limits[role])
        for i in range(decided.data.train.num_samples if role == "train" else 4):
            sentences = [piece.document for piece in dataset.origin(i).pieces]
            assert low <= min(sentences) <= max(sentences) < high
    view = view_of(decided.objective, decided.masks, tokenizer_of(corpus), SEED)
    masked = build_datasets(decided.data, seq_length=32, seed=SEED, view=view).train
    texts = {}
    for i in range(8):
        origin = masked.origin(i)
        texts.setdefault(origin.sample, []).append(masked[i]["text"].tolist())
    # Equal corpora have equal samples of the same number, whichever places these have in the blend.
    assert any(len(found) == 2 for found in texts.values())
    assert all(each == found[0] for found in texts.values() for each in found)


def test_a_validation_split_without_a_usable_document_is_left_out(tmp_path):
    write_sentences(tmp_path / "c", [20] * 41, [*range(0, 41, 2), 41])
    _, sets = run(str(tmp_path / "c"), "bert", "--split", "20,0,1")
    assert sets.train is not None
    assert sets.test == {}


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("bert", "--mask-prob 0", "--mask-prob 0.0 … more than 0"),
        ("bert", "--mask-prob 1", "--mask-prob 1.0 … more than 0"),
        ("bert", "--seq-length 4", "--seq-length 4 … 5"),
        ("gpt", "--bert-no-binary-head", "--bert-no-binary-head … pretrain_bert.py"),
        ("bert", "--decoder-seq-length 8", "--decoder-seq-length … pretrain_t5.py"),
    ],
)
def test_what_makes_no_samples_is_refused(name, flags, words):
    with problem(words):
        plan_samples(tiny_config(*flags.split()), world_size=1, objective=name)


def test_hugging_face_tokenizers_have_the_same_masks(corpus, tmp_path):
    vocab = {token: i for i, token in enumerate(tokenizer_of(corpus).vocabulary().tokens[:1000])}
    backend = BertWordPieceTokenizer(vocab)
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    pretrained = PretrainedFromHF(tmp_path, extra_ids=100)
    plan = bert_samples(MaskedLMConfig(), seq_length=128)
    objective = replace(tiny_objective("bert"), own=plan)
    raw = sentences_of(corpus, 128, bert_sentences(MaskedLMConfig()))
    own, other = (
        view_of(objective, tiny_plan().masks, tokenizer, SEED)(raw)
        for tokenizer in (tokenizer_of(corpus, extra_ids=100), pretrained)
    )
    for i in range(20):
        assert other[i]["labels"].tolist() == own[i]["labels"].tolist()


def test_bert_needs_its_special_tokens(tmp_path):
    (tmp_path / "bare.txt").write_text("[UNK]\na\nb\n")
    bare = WordPieceTokenizer(tmp_path / "bare.txt", lower_case=True)
    decided = plan_samples(tiny_config(), world_size=1, objective="bert")
    with problem("no token … cls", DataError):
        view_of(decided.objective, decided.masks, bare, SEED)


def test_token_files_are_those_of_the_corpus():
    assert tiny_plan(objective="bert").data.prefixes == ["corpus"]


def test_the_tokenizer_is_wordpiece():
    flags = ("--vocab-file", "v")
    config = tiny_config(*flags, without=("--tokenizer-type", "--vocab-size")).tokenizer
    arguments = objective_tokenizer_arguments(config, "bert")
    assert arguments["tokenizer_type"] == "BertWordPieceLowerCase"
    assert arguments.get("vocab_extra_ids") is None
