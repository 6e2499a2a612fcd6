"""Where the server and the harness find chat templates, and the tokens of fill-in-the-middle."""

from types import SimpleNamespace

import pytest
from chat_models import TEMPLATE, write_tokenizer
from servers import Bytes
from tiny import tiny_config, tiny_objective

from megatron.inference.loading.loaded_model import chat_prompts_of, fim_tokens_of
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.tokenizer import Vocabulary


def source_of(*flags, template=""):
    objective = tiny_objective("gpt", *flags)
    data = SimpleNamespace(chat_template=template)
    manifest = SimpleNamespace(objective=objective, data=data)
    return SimpleNamespace(config=tiny_config(*flags), manifest=manifest)


def test_a_template_is_the_files_then_the_checkpoints_then_the_tokenizers(tmp_path):
    folder = write_tokenizer(tmp_path)
    tokenizer = PretrainedFromHF(folder)
    flags = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)]
    recorded = "recorded {{ messages[0].content }} {{ eos_token }}"
    file = tmp_path / "own.jinja"
    file.write_text("own {{ messages[0].content }}")
    request = [{"role": "user", "content": "a"}]
    of_tokenizer = chat_prompts_of(source_of(*flags), tokenizer, None)
    assert of_tokenizer.source == TEMPLATE
    megatrons = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    assert chat_prompts_of(source_of(*megatrons), tokenizer, None).source == TEMPLATE
    of_checkpoint = chat_prompts_of(source_of(*flags, template=recorded), tokenizer, None)
    assert of_checkpoint.text(request) == "recorded a <|endoftext|>"
    of_file = chat_prompts_of(source_of(*flags, template=recorded), tokenizer, str(file))
    assert of_file.text(request) == "own a"
    assert chat_prompts_of(source_of(), Bytes(), None) is None


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        (["--fim-rate", "0.5"], True),
        ([], False),
        (["--fim-rate", "0.5", "--fim-spm-rate", "1"], False),
    ],
)
def test_tokens_of_a_gap_are_those_of_a_model_that_has_learned_to_fill_it(flags, known):
    class WithGap(Bytes):
        def vocabulary(self):
            texts = [*map(str, range(250)), "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
            return Vocabulary(texts, "")

    found = fim_tokens_of(source_of(*flags), WithGap())
    assert (found is not None) == known
    if found:
        assert (found.prefix, found.middle, found.suffix) == (250, 251, 252)
