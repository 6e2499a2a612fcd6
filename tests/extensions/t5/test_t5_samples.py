"""Samples of T5: equal to Megatron's byte for byte."""

import json
import logging
from dataclasses import replace

import pytest
from masked_corpora import SEED, corpus_in, digest_of, run, sentences_of, tokenizer_of
from problems import problem, require_problem
from sentence_corpora import thousand_documents, write_sentences
from tiny import tiny_config, tiny_objective, tiny_plan
from tokenizers import BertWordPieceTokenizer

from megatron.common.errors import DataError
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets, view_of
from megatron.extensions.masked_lm.data_masking import MaskingVocabulary
from megatron.extensions.masked_lm.flags import MaskedLMConfig
from megatron.extensions.t5.data import T5Dataset
from megatron.extensions.t5.flags import t5_samples, t5_sentences
from megatron.tokenizer.build import tokenizer_problems
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

T5_KEYS = ("text_enc", "text_dec", "labels", "loss_mask", "truncated")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpus_in(tmp_path_factory.mktemp("sentences"))


def t5(corpus, seq_length, decoder, *, sentinels=100, mask_prob=0.15):
    config = MaskedLMConfig(decoder_seq_length=decoder, mask_prob=mask_prob)
    return T5Dataset(
        sentences_of(corpus, seq_length, t5_sentences(config)),
        plan=t5_samples(config, seq_length=seq_length),
        vocabulary=MaskingVocabulary.of(tokenizer_of(corpus, sentinels), "pad", "bos", "eos"),
        seed=SEED,
    )


@pytest.mark.parametrize(
    ("lengths", "size", "hashed"),
    [((512, 128), 6049, "68a8eb379733fe28"), ((128, 64), 5616, "00e6aff69da6c265")],
)
def test_samples_of_t5_are_those_of_megatron(corpus, lengths, size, hashed):
    dataset = t5(corpus, *lengths)
    assert len(dataset) == size
    assert digest_of(dataset, T5_KEYS) == hashed


def test_the_first_sample_of_t5_restores_the_text(corpus):
    dataset = t5(corpus, 128, 64)
    sample, raw = dataset[0], dataset.dataset[0]
    length = int(sample["dec_length"])
    assert sample["text_dec"][:3].tolist() == [1000, 1002, 798]
    assert sample["labels"][:length].tolist() == [
        *sample["text_dec"][1:length].tolist(),
        1001,
    ]
    # Decoding: each sentinel of the encoder stands for what follows it in the decoder.
    spans, span = {}, []
    for token in sample["text_dec"][1:length].tolist():
        if token >= 1002:
            span = spans[token] = []
        else:
            span.append(token)
    source = sample["text_enc"][: int(sample["enc_length"])].tolist()
    restored = [token for each in source for token in spans.get(each, [each])]
    assert restored == raw["tokens"][: int(raw["target_length"])].tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"sentinels": 5}, "the 5 sentinels"), ({"mask_prob": 0.5}, "--decoder-seq-length 128")],
)
def test_spans_without_sentinel_or_room_stay_in_the_text(corpus, change, words, caplog):
    dataset = t5(corpus, 512, 128, **change)
    with caplog.at_level(logging.WARNING):
        samples = [dataset[i] for i in range(60)]
    assert len(caplog.records) == 1
    assert words in caplog.text
    for i, sample in enumerate(samples):
        raw = dataset.dataset[i]
        sentinels = int((sample["text_dec"] >= 1002).sum())
        real = min(len(raw["tokens"]), int(raw["target_length"]))
        assert sentinels <= change.get("sentinels", 100)
        # Every token is in one of the two; the decoder has [BOS] besides.
        assert sample["enc_length"] + sample["dec_length"] == real + 2 * sentinels + 1


@pytest.mark.parametrize(("size", "warns"), [(40, True), (30, False)])
def test_long_documents_that_are_not_split_are_warned_of(tmp_path, caplog, size, warns):
    write_sentences(tmp_path / "c", [size] * 20, [*range(21)])
    with caplog.at_level(logging.WARNING):
        _, sets = run(str(tmp_path / "c"), "t5", "--decoder-seq-length", "8", "--split", "1")
    assert sets.train is not None
    assert ("first 30" in caplog.text and "--split-sentences" in caplog.text) == warns


def test_weighted_split_paths_take_fractions_of_the_documents(tmp_path):
    prefix = str(tmp_path / "corpus")
    _, starts = thousand_documents()
    write_sentences(prefix, *thousand_documents())
    config = tiny_config(
        *("--train-weighted-split-paths", f"t: 1 0.25:0.5 {prefix}"),
        *("--decoder-seq-length", "16", "--seq-length", "32"),
        without=("--data-path",),
    )
    decided = plan_samples(config, world_size=1, objective="t5")
    train = build_datasets(decided.data, seq_length=32, seed=SEED).train
    for i in range(decided.data.train.num_samples):
        sentences = [piece.document for piece in train.origin(i).pieces]
        assert starts[250] <= min(sentences) <= max(sentences) < starts[500]


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("t5", "--decoder-seq-length 8 --short-seq-prob 1.5", "--short-seq-prob 1.5 … 1"),
        ("t5", "", "--decoder-seq-length … missing"),
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
    plan = t5_samples(MaskedLMConfig(decoder_seq_length=64), seq_length=128)
    objective = replace(tiny_objective("t5", "--decoder-seq-length", "64"), own=plan)
    raw = sentences_of(corpus, 128, t5_sentences(MaskedLMConfig()))
    own, other = (
        view_of(objective, tiny_plan().masks, tokenizer, SEED)(raw)
        for tokenizer in (tokenizer_of(corpus, extra_ids=100), pretrained)
    )
    for i in range(20):
        # Its sentinels come two ids earlier, as it has no [BOS] and [EOS].
        found = other[i]["text_enc"] + 2 * (other[i]["text_enc"] >= 1000)
        assert found.tolist() == own[i]["text_enc"].tolist()
    sample = other[0]
    assert sample["text_dec"][0] == vocab["[CLS]"]
    assert sample["labels"][int(sample["dec_length"]) - 1] == vocab["[SEP]"]


def test_t5_needs_sentinels(corpus):
    decided = plan_samples(tiny_config("--decoder-seq-length", "8"), world_size=1, objective="t5")
    with problem("--vocab-extra-ids 100", DataError):
        view_of(decided.objective, decided.masks, tokenizer_of(corpus), SEED)
    # The default of 100 extra ids is not the user's: the message names types that take them.
    config = tiny_config("--tokenizer-type", "NullTokenizer", "--vocab-size", "9").tokenizer
    found = tokenizer_problems(**objective_tokenizer_arguments(config, "t5"))
    require_problem("--tokenizer-type NullTokenizer … tokens … BertWordPieceCase", found)


def test_token_files_are_those_of_the_corpus():
    assert tiny_plan("--decoder-seq-length", "4", objective="t5").data.prefixes == ["corpus"]


def test_the_tokenizer_is_wordpiece_with_sentinels():
    flags = ("--vocab-file", "v")
    config = tiny_config(*flags, without=("--tokenizer-type", "--vocab-size")).tokenizer
    arguments = objective_tokenizer_arguments(config, "t5")
    assert arguments["tokenizer_type"] == "BertWordPieceLowerCase"
    assert arguments["vocab_extra_ids"] == 100
    for given, expected in (("7", 7), ("0", 0)):
        config = tiny_config("--vocab-extra-ids", given).tokenizer
        assert objective_tokenizer_arguments(config, "t5")["vocab_extra_ids"] == expected
