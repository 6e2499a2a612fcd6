"""A tokenizer in the files that transformers reads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import normalizers, processors

from megatron.tokenizer.types.gpt2 import END_OF_TEXT
from megatron.tokenizer.types.hugging_face import load_with_transformers
from megatron.tokenizer.types.options import keywords
from megatron.tokenizer.types.tokenizer import Role, Tokenizer
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

_OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
_TEXTS = (
    "A sentence, with 12,345 numbers; and  two  spaces.",
    "def f(x):\n\treturn x  # tabs\n\n\nand lines",
    "Naïve café, Übermut, 東京, здравствуйте 🙂",
    " a blank in front",
)


_ROLES: tuple[Role, ...] = ("bos", "eos", "pad")


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return config.json's special token ids; "eos" is the end of a document, if there is one.

    Without a padding token, padding has the id of "eos", as in GPT-2.
    """
    ids = tokenizer.special_ids
    end = ids.get("eod", ids.get("eos"))
    found = {"bos": ids.get("bos", end), "eos": end, "pad": ids.get("pad", end)}
    return {f"{role}_token_id": found[role] for role in _ROLES}


def write_hugging_face_files(
    folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any], *, max_length: int
) -> str:
    """Write `tokenizer` to `folder` for `AutoTokenizer`; return why not, or "".

    The written tokenizer gives the same ids: a few texts are compared.

    Args:
        options: the options that `build_tokenizer` got.
        max_length: most tokens of a text.
    """
    kind = options["tokenizer_type"]
    match kind:
        case "GPT2BPETokenizer" if "eod" in tokenizer.special_ids:
            written = _write_gpt2(folder, options, max_length)
        case "GPT2BPETokenizer":
            return f"its vocabulary has no {END_OF_TEXT}, which transformers would add to it"
        case "PretrainedFromHF":
            written = _write_pretrained(folder, options)
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            written = _write_wordpiece(folder, tokenizer, kind, max_length)
        case "SentencePieceTokenizer" if options.get("tokenizer_sentencepiece_legacy"):
            return "it has tokens besides those of its model, which no class of transformers adds"
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            try:
                written = _write_sentencepiece(folder, tokenizer, options, max_length)
            except Exception as error:  # of many types: models that are not Llama's
                (folder / "tokenizer.model").unlink(missing_ok=True)
                return f"transformers does not load it: {_reason(error)}"
        case _:
            return f"transformers has no tokenizer that reads the files of {kind}"
    problem = _difference(folder, tokenizer)
    if not problem:
        written += _complete(folder, special_ids(tokenizer)["pad_token_id"])
        problem = _difference(folder, tokenizer)
    if problem:
        for name in written:
            (folder / name).unlink(missing_ok=True)
    return problem


def _write_gpt2(folder: Path, options: Mapping[str, Any], max_length: int) -> list[str]:
    shutil.copy(options["vocab_file"], folder / "vocab.json")
    shutil.copy(options["merge_file"], folder / "merges.txt")
    special = {f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **special}
    _write_json(folder / "tokenizer_config.json", {**config, "model_max_length": max_length})
    return ["vocab.json", "merges.txt", "tokenizer_config.json"]


def _write_pretrained(folder: Path, options: Mapping[str, Any]) -> list[str]:
    source = Path(options["tokenizer_name_or_path"])
    words, extra = options.get("tokenizer_kwargs"), options.get("vocab_extra_ids") or 0
    if source.is_dir() and not words and not extra:
        names = [name for name in _OF_TOKENIZERS if (source / name).is_file()]
        for name in names:
            shutil.copy(source / name, folder / name)
        return names
    loaded = load_with_transformers(str(source), keywords(words or ()))
    loaded.add_tokens([f"<extra_id_{i}>" for i in range(extra)], special_tokens=True)
    return [Path(file).name for file in loaded.save_pretrained(str(folder))]


def _write_wordpiece(folder: Path, tokenizer: Tokenizer, kind: str, max_length: int) -> list[str]:
    # Imported here: it takes seconds.
    from transformers import BertTokenizer

    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(tokenizer.vocabulary().tokens) + "\n", encoding="utf-8")
    loaded = BertTokenizer.from_pretrained(
        str(folder),
        do_lower_case=kind == "BertWordPieceLowerCase",
        model_max_length=max_length,
        local_files_only=True,
    )
    return [vocabulary.name, *(Path(file).name for file in loaded.save_pretrained(str(folder)))]


def _write_sentencepiece(
    folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any], max_length: int
) -> list[str]:
    # Imported here: it takes seconds.
    from transformers import LlamaTokenizer

    texts = tokenizer.vocabulary().tokens
    special: dict[str, Any] = {
        f"{role}_token": texts[i]
        for role, i in tokenizer.special_ids.items()
        if role in ("bos", "eos", "unk")
    }
    shutil.copy(options["tokenizer_model"], folder / "tokenizer.model")
    backend = LlamaTokenizer.from_pretrained(str(folder), **special).backend_tokenizer
    # As SentencePiece: a space is added before every text, also of one that begins with a space.
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = None
    bos = special.get("bos_token")
    begins_with_bos = options.get("tokenizer_sentencepiece_legacy") and bos is not None
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A" if begins_with_bos else "$A",
        pair=f"{bos} $A {bos} $B:1" if begins_with_bos else "$A $B:1",
        special_tokens=[(bos, tokenizer.special("bos"))] if begins_with_bos else [],
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    _write_json(folder / "tokenizer_config.json", {**config, "model_max_length": max_length})
    return ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"]


def _complete(folder: Path, pad: int | None) -> list[str]:
    """Add tokenizer.json and a padding token where there are none; return the files written.

    Programs without transformers read tokenizer.json alone; batches of texts need padding.
    """
    # Imported here: it takes seconds.
    from transformers import AutoTokenizer

    written = []
    loaded = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    if loaded.is_fast and not (folder / "tokenizer.json").exists():
        loaded.backend_tokenizer.save(str(folder / "tokenizer.json"))
        written.append("tokenizer.json")
    if loaded.pad_token is None and pad is not None:
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        _write_json(file, {**config, "pad_token": loaded.convert_ids_to_tokens(pad)})
        written.append(file.name)
    return written


def _difference(folder: Path, tokenizer: Tokenizer) -> str:
    """Return the difference of the tokenizer in `folder` from `tokenizer`; "" if there is none."""
    # Imported here: it takes seconds.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        # WordPiece encodes without [CLS] and [SEP], which transformers adds.
        adds = not isinstance(tokenizer, WordPieceTokenizer)
        others = [
            text
            for text in _TEXTS
            if loaded(text, verbose=False, add_special_tokens=adds)["input_ids"]
            != tokenizer.encode(text)
        ]
    except Exception as error:  # of many types: files, missing libraries
        return f"transformers does not load it: {_reason(error)}"
    return f"transformers finds other ids for {others[0]!r}" if others else ""


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
