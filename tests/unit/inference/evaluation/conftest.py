"""A folder of an untrained transformers model, which the tools of tasks/ evaluate."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Spelled
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast
from untrained import LENGTH, WRITTEN


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A folder of an untrained transformers model, its network and its tokenizer."""
    folder = tmp_path_factory.mktemp("theirs")
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trained.decoder = Spelled()
    alphabet = ByteLevel.alphabet()
    trained.train_from_iterator(
        [WRITTEN],
        BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = GPT2TokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.4,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config).eval()
    # Beginnings of words are often the most likely.
    words = [i for token, i in tokenizer.get_vocab().items() if token.startswith("Ġ")]
    model.transformer.wte.weight.data[words] *= 4
    model.save_pretrained(folder)
    return folder, model, tokenizer
