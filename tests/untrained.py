"""What tests of evaluation look at: a text, and a plain way to the probabilities of its tokens."""

import sys
from importlib import util
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Spelled
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

LENGTH = 12
WRITTEN = (
    " = Valkyria =\n"
    'The 3,000 valley folk\'s role was well-known, as in "the war" (or so).\n'
    "The game began in 2010, and the valley's folk began to know the war in the game.\n"
)


def tool_of(name):
    """Return what a file in tasks/ does with its words."""
    file = Path(__file__).resolve().parents[1] / "tasks" / name
    spec = util.spec_from_file_location(f"tasks_{file.stem}", file)
    module = util.module_from_spec(spec)
    path = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@torch.no_grad()
def log_probabilities(model, context):
    """Return those of every next token, in float64."""
    return model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)


def write_untrained(folder):
    """Write an untrained transformers model to a folder; return these, its network and its tokenizer."""
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
