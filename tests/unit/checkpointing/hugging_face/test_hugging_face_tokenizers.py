"""What is exported with its tokenizer generates text by transformers alone."""

import json
import shutil

import pytest
import torch
from architectures import tool
from checkpoints import spread_network, write_checkpoint
from problems import problem
from tiny import batch_of, tiny_config
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, pipeline

from megatron.checkpointing.manifest import read_manifest, write_manifest
from megatron.common.errors import DataError, WrongDataError
from megatron.config.data.tokenizer import tokenizer_arguments
from megatron.config.plan.plan import plan
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.gpt2 import END_OF_TEXT

LINES = ["the lobster and the tide", "Größe and 日本 😀", "1 22 333 (a, b)\n\tand more"] * 9
TEXTS = ["the tide", "Größe 日本  and\n\t1 22", ""]


@pytest.fixture(scope="module")
def gpt2_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        LINES, vocab_size=300, special_tokens=[END_OF_TEXT], show_progress=False
    )
    trained.save_model(str(folder))
    return [
        *("--vocab-file", str(folder / "vocab.json")),
        *("--merge-file", str(folder / "merges.txt")),
    ]


@pytest.fixture(scope="module")
def llama_flags(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("llama") / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        # As the model of Llama 2 was trained.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    return ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", f"{prefix}.model"]


@pytest.fixture
def saved(group, tmp_path):
    """Return a function from flags to a tokenizer, a network and the directory of its checkpoint."""

    def save(*flags):
        config = tiny_config("--max-position-embeddings", "48", *flags)
        tokenizer = build_tokenizer(
            **tokenizer_arguments(config.tokenizer, default="GPT2BPETokenizer")
        )
        size = tokenizer.vocab_size
        spec = plan(config, world_size=1, vocab_size=size, device="cpu").model
        model = spread_network(spec, group)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        flags = ("--max-position-embeddings", "48", *flags)
        write_checkpoint(tmp_path / "saved", weights, *flags, vocab_size=size)
        return tokenizer, model, tmp_path / "saved"

    return save


def greedy(model, ids, count, vocab_size):
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.tensor([ids])
            logits = model(batch_of(tokens, torch.arange(len(ids))[None]))[0, -1, :vocab_size]
            ids = [*ids, int(logits.argmax())]
    return ids


def test_a_pipeline_of_transformers_continues_text_as_the_network_does(
    saved, gpt2_flags, tmp_path, capsys
):
    tokenizer, model, directory = saved(*gpt2_flags)
    tool("to_hf", "--load", directory, "--save", tmp_path / "hf")
    assert "holds no tokenizer" not in capsys.readouterr().out
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert [loaded(text)["input_ids"] for text in TEXTS] == [*map(tokenizer.encode, TEXTS)]
    assert (loaded.eos_token_id, len(loaded)) == (tokenizer.eod, tokenizer.vocab_size)

    config = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eod
    generate = pipeline("text-generation", model=str(tmp_path / "hf"))
    (found,) = generate("the tide", max_new_tokens=12, do_sample=False, return_full_text=True)
    expected = greedy(model, tokenizer.encode("the tide"), 12, tokenizer.vocab_size)
    assert tokenizer.eod not in expected
    assert found["generated_text"] == tokenizer.decode(expected)

    # Without a length: to the last position that the network has learned.
    (found,) = generate("the tide", do_sample=False, return_tensors=True)
    assert len(found["generated_token_ids"]) <= config["max_length"] == 48
    both = generate(["the tide", "the lobster and"], batch_size=2, max_new_tokens=3)
    assert len(both) == 2
    assert loaded.pad_token_id == config["pad_token_id"]
    collate = DataCollatorForLanguageModeling(loaded, mlm=False)
    assert collate([loaded("the tide"), loaded("the")])["input_ids"].shape[0] == 2
    alone = Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    assert [alone.encode(text).ids for text in TEXTS] == [*map(tokenizer.encode, TEXTS)]
    model_config = json.loads((tmp_path / "hf/config.json").read_text())
    assert model_config["n_ctx"] == model_config["n_positions"] == 48

    # The folder is a tokenizer of ours, too, and names one for the way back.
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "back")
    manifest = read_manifest(tmp_path / "back/global_step0")
    assert manifest.tokenizer.tokenizer_name_or_path == str(tmp_path / "hf")
    assert manifest.spec.vocabulary.vocab_size == tokenizer.vocab_size

    # A template of conversations goes along, before one that the tokenizer has.
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.content }}>ß{% endfor %}")
    words = ["--chat-template", tmp_path / "chat.jinja", "--no-verify"]
    own = shutil.copytree(tmp_path / "hf", tmp_path / "own") / "tokenizer_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"chat_template": "none"}))
    for number, flags in enumerate([(), ("--tokenizer-name-or-path", own.parent)]):
        output = tmp_path / f"chat-{number}"
        tool("to_hf", "--load", directory, "--save", output, *words, *flags)
        chats = AutoTokenizer.from_pretrained(output, local_files_only=True)
        messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "tide"}]
        assert chats.apply_chat_template(messages, tokenize=False) == "<the>ß<tide>ß"
    with problem("--chat-template nowhere: No such file", DataError):
        tool("to_hf", "--load", directory, "--save", tmp_path / "no", *words[:1], "nowhere")
    assert not (tmp_path / "no").exists()

    # That of the training goes along by itself, and goes before the tokenizer's.
    folder = directory / "global_step3"
    manifest = read_manifest(folder)
    learned = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    manifest.plan["data"]["chat_template"] = learned
    write_manifest(folder, manifest)
    flags = "--tokenizer-name-or-path", own.parent, "--no-verify"
    tool("to_hf", "--load", directory, "--save", tmp_path / "learned", *flags)
    chats = AutoTokenizer.from_pretrained(tmp_path / "learned", local_files_only=True)
    assert chats.apply_chat_template(messages, tokenize=False) == "[the][tide]"
    card = (tmp_path / "learned/README.md").read_text()
    assert "| chat template | that of the training conversations |" in card
    with problem("--chat-template … training … --replace-chat-template", WrongDataError):
        tool("to_hf", "--load", directory, "--save", tmp_path / "no", *words)
    assert not (tmp_path / "no").exists()
    words.append("--replace-chat-template")
    tool("to_hf", "--load", directory, "--save", tmp_path / "other-chat", *words)
    assert "<{{ m" in (tmp_path / "other-chat/chat_template.jinja").read_text()
    card = (tmp_path / "other-chat/README.md").read_text()
    assert "| chat template | another than that of the training conversations |" in card

    # A tokenizer that moved is found where the flags say.
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tmp_path / "hf" / name, moved)
    words = ["--tokenizer-name-or-path", moved, "--no-verify"]
    tool("to_hf", "--load", directory, "--save", tmp_path / "other", *words)
    assert (tmp_path / "other/vocab.json").read_bytes() == (moved / "vocab.json").read_bytes()
    assert "Not verified: converted with --no-verify." in (tmp_path / "other/README.md").read_text()


@pytest.mark.parametrize("form", [(), ("--tokenizer-sentencepiece-legacy",)])
def test_the_tokenizer_of_llama_goes_along(saved, llama_flags, form, tmp_path, capsys):
    flags = "--position-embedding-type rotary --normalization RMSNorm --swiglu"
    tokenizer, _, directory = saved(*llama_flags, *form, *flags.split(), "--disable-bias-linear")
    tool("to_hf", "--load", directory, "--save", tmp_path / "hf")
    messages = capsys.readouterr().out
    assert "holds no tokenizer" not in messages, messages
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert [loaded(text)["input_ids"] for text in TEXTS] == [*map(tokenizer.encode, TEXTS)]
    assert json.loads((tmp_path / "hf/config.json").read_text())["bos_token_id"] == 1
