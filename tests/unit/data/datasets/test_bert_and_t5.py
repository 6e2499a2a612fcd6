"""Samples of BERT and T5: equal to Megatron's byte for byte, cached by all they depend on."""

import json
import logging
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from sentence_corpora import thousand_documents, write_sentences, write_vocabulary
from tiny import tiny_config, tiny_objective, tiny_plan
from tokenizers import BertWordPieceTokenizer

from megatron.common.errors import ConfigError, DataError
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.plan import plan_samples
from megatron.data.datasets.datasets import build_datasets, view_of
from megatron.extensions.bert.data import BertDataset
from megatron.extensions.bert.flags import bert_samples, bert_sentences
from megatron.extensions.masked_lm.data import SentenceDataset
from megatron.extensions.masked_lm.data_masking import MaskingVocabulary
from megatron.extensions.masked_lm.flags import MaskedLMConfig
from megatron.extensions.t5.data import T5Dataset
from megatron.extensions.t5.flags import t5_samples, t5_sentences
from megatron.tokenizer.build import tokenizer_problems
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

SEED = 1234
BERT_KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated")
T5_KEYS = ("text_enc", "text_dec", "labels", "loss_mask", "truncated")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A thousand documents, and the file of their vocabulary."""
    folder = tmp_path_factory.mktemp("sentences")
    dataset = write_sentences(folder / "corpus", *thousand_documents())
    return dataset, write_vocabulary(folder / "vocab.txt")


def tokenizer_of(corpus, extra_ids=0):
    return WordPieceTokenizer(corpus[1], lower_case=True, extra_ids=extra_ids)


def sentences_of(corpus, name, seq_length, config):
    return SentenceDataset(
        corpus[0],
        range(1000),
        num_samples=5000,
        seq_length=seq_length,
        seed=SEED,
        sentences=(bert_sentences if name == "bert" else t5_sentences)(config),
    )


def bert(corpus, seq_length, *, head=True):
    config = MaskedLMConfig(bert_binary_head=head)
    return BertDataset(
        sentences_of(corpus, "bert", seq_length, config),
        plan=bert_samples(config, seq_length=seq_length),
        vocabulary=MaskingVocabulary.of(tokenizer_of(corpus), "cls", "sep", "mask", "pad"),
        seed=SEED,
    )


def t5(corpus, seq_length, decoder, *, sentinels=100, mask_prob=0.15):
    config = MaskedLMConfig(decoder_seq_length=decoder, mask_prob=mask_prob)
    return T5Dataset(
        sentences_of(corpus, "t5", seq_length, config),
        plan=t5_samples(config, seq_length=seq_length),
        vocabulary=MaskingVocabulary.of(tokenizer_of(corpus, sentinels), "pad", "bos", "eos"),
        seed=SEED,
    )


def digest(*arrays):
    content = sha256()
    for array in arrays:
        assert array.dtype == np.int64
        content.update(array.tobytes())
    return content.hexdigest()[:16]


def digest_of(dataset, keys, count=500):
    return digest(*(sample[key] for i in range(count) if (sample := dataset[i]) for key in keys))


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


@pytest.mark.parametrize(
    ("lengths", "size", "hashed"),
    [((512, 128), 6049, "68a8eb379733fe28"), ((128, 64), 5616, "00e6aff69da6c265")],
)
def test_samples_of_t5_are_those_of_megatron(corpus, lengths, size, hashed):
    dataset = t5(corpus, *lengths)
    assert len(dataset) == size
    assert digest_of(dataset, T5_KEYS) == hashed


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
    with pytest.raises(DataError, match="token 5000.*1002 tokens"):
        bad[0]


def run(prefix, name, *flags):
    config = tiny_config("--data-path", *prefix.split(), "--seq-length", "32", *flags)
    decided = plan_samples(config, world_size=1, objective=name)
    return decided, build_datasets(decided.data, seq_length=32, seed=SEED)


def test_documents_of_one_sentence_end_with_their_number(tmp_path):
    write_sentences(tmp_path / "text_document", [20] * 100, range(101))
    with pytest.raises(DataError) as caught:
        run(str(tmp_path / "text_document"), "bert")
    assert "97 with fewer sentences" in str(caught.value)
    assert "--split-sentences" in str(caught.value)
    assert "--bert-no-binary-head" in str(caught.value)
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
        ("bert", "--mask-prob 0", "--mask-prob 0.0 must be more than 0"),
        ("bert", "--mask-prob 1", "--mask-prob 1.0 must be more than 0"),
        ("t5", "--decoder-seq-length 8 --short-seq-prob 1.5", "--short-seq-prob 1.5 must be"),
        ("bert", "--seq-length 4", "--seq-length 4 must be at least 5"),
        ("t5", "", "--decoder-seq-length is missing"),
        ("gpt", "--bert-no-binary-head", "is for pretrain_bert.py"),
        ("bert", "--decoder-seq-length 8", "is for pretrain_t5.py"),
    ],
)
def test_what_makes_no_samples_is_refused(name, flags, words):
    with pytest.raises(ConfigError, match=words):
        plan_samples(tiny_config(*flags.split()), world_size=1, objective=name)


def test_hugging_face_tokenizers_have_the_same_masks(corpus, tmp_path):
    vocab = {token: i for i, token in enumerate(tokenizer_of(corpus).vocabulary().tokens[:1000])}
    backend = BertWordPieceTokenizer(vocab)
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    pretrained = PretrainedFromHF(tmp_path, extra_ids=100)
    flags = ("--decoder-seq-length", "64")
    masks = tiny_plan().masks
    for name, key in (("bert", "labels"), ("t5", "text_enc")):
        samples = bert_samples if name == "bert" else t5_samples
        plan = samples(MaskedLMConfig(decoder_seq_length=64), seq_length=128)
        raw = sentences_of(corpus, name, 128, MaskedLMConfig())
        objective = replace(tiny_objective(name, *(flags if name == "t5" else ())), own=plan)
        own, other = (
            view_of(objective, masks, tokenizer, SEED)(raw)
            for tokenizer in (tokenizer_of(corpus, extra_ids=100), pretrained)
        )
        for i in range(20):
            # Its sentinels come two ids earlier, as it has no [BOS] and [EOS].
            found = other[i][key] + 2 * ((other[i][key] >= 1000) if name == "t5" else 0)
            assert found.tolist() == own[i][key].tolist()
    sample = other[0]
    assert sample["text_dec"][0] == vocab["[CLS]"]
    assert sample["labels"][int(sample["dec_length"]) - 1] == vocab["[SEP]"]


def test_t5_needs_sentinels_and_bert_its_special_tokens(corpus, tmp_path):
    decided = plan_samples(tiny_config("--decoder-seq-length", "8"), world_size=1, objective="t5")
    with pytest.raises(DataError, match="--vocab-extra-ids 100"):
        view_of(decided.objective, decided.masks, tokenizer_of(corpus), SEED)
    # The default of 100 extra ids is not the user's: the message names types that take them.
    config = tiny_config("--tokenizer-type", "NullTokenizer", "--vocab-size", "9").tokenizer
    (problem,) = tokenizer_problems(**objective_tokenizer_arguments(config, "t5"))
    assert "--tokenizer-type NullTokenizer" in problem
    assert "needs these tokens" in problem
    assert "BertWordPieceCase" in problem
    (tmp_path / "bare.txt").write_text("[UNK]\na\nb\n")
    bare = WordPieceTokenizer(tmp_path / "bare.txt", lower_case=True)
    decided = plan_samples(tiny_config(), world_size=1, objective="bert")
    with pytest.raises(DataError, match="no token for cls"):
        view_of(decided.objective, decided.masks, bare, SEED)
