"""A small vocabulary in GPT-2's two files."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TRAINING_TEXT = [
    "The lobster's claws aren't the same; they've been there since 1999, haven't they?",
    "hello hello hello world world   the  then  there",
    "Größe naïve 日本語 日本 числа числа 😀😀",
]


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory):
    """Train 256 bytes, some merges and <|endoftext|>; return the paths of the two files."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        TRAINING_TEXT,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    directory = tmp_path_factory.mktemp("gpt2")
    trained.model.save(str(directory))
    return directory / "vocab.json", directory / "merges.txt"
