"""Command line of the preprocessing tools: flags to a PreprocessSpec, and the printed result."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from megatron.common.errors import ConfigError
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.config.foreign_flags.run import TOKENIZER_LEGACY
from megatron.config.parsing.flags import Legacy, Parsed, parse_sections
from megatron.config.parsing.titles import BASICS_OF_TOKENIZERS
from megatron.config.plugins import PluginModulesConfig, load_plugins, modules_in
from megatron.config.run.urls import UrlConfig
from megatron.config.tools.preprocess import PreprocessConfig, WorkerTrialConfig
from megatron.data.preprocessing.assemble import Written
from megatron.data.preprocessing.block_encoder import KEYS
from megatron.data.preprocessing.preprocess import input_problems
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.readers.documents import Selection
from megatron.data.readers.inputs import STDIN, files_in
from megatron.data.readers.text_formats import TextSeparator
from megatron.data.token_files.publish import (
    collection_problems,
    key_problems,
    output_files,
    prefix_problems,
    replacement_notices,
    replacement_problems,
    report_of,
    stage_of,
)
from megatron.data.token_files.remote_pairs import deliver, upload_pair, with_local_output
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.chat import ChatTemplate, ChatTokenizer, read_chat_template
from megatron.tokenizer.fingerprint import describe, to_text
from megatron.tokenizer.types.options import keywords
from megatron.tokenizer.types.tokenizer import Tokenizer

_LEGACY = (
    Legacy("--keep-sequential-samples", "no effect: documents always keep the input's order"),
    Legacy("--partitions", "no effect: every worker writes its own shards", takes=1),
    Legacy("--datasets", "give the files to --input", takes="+", refused=True),
    *TOKENIZER_LEGACY,
)


@dataclass(frozen=True)
class PreprocessCommand:
    """Parsed command line of a preprocessing tool.

    Args:
        sections: further sections of the tool, by name.
        notices: printed before the work begins.
        output_url: --output-prefix, if it is a URL; the prefix in `spec` is a local one.
    """

    spec: PreprocessSpec
    sections: dict[str, Any]
    notices: tuple[str, ...]
    output_url: str = ""

    def final(self, path: str) -> str:
        """Return the URL at which an output is in the end; its path if --output-prefix is one."""
        return (self.output_url or self.spec.output_prefix) + path.removeprefix(
            self.spec.output_prefix
        )

    def deliver(self, results: Sequence[Written]) -> None:
        """Upload the files, if --output-prefix is a URL, and print the written files.

        Raises:
            DataError: the connection fails at every attempt.
        """
        if not self.output_url or not results:
            print_written(results)
            return
        for written in results:
            upload_pair(written.prefix, self.final(written.prefix))
        deliver([(report_of(self.spec.output_prefix), report_of(self.output_url))])
        print_written([replace(each, prefix=self.final(each.prefix)) for each in results])


def read_flags(
    argv: Sequence[str],
    *,
    description: str,
    extra: dict[str, type] | None = None,
    legacy: Sequence[Legacy] = (),
) -> PreprocessCommand:
    """Parse and check `argv`; see `parse_flags` and `to_command`."""
    return to_command(parse_flags(argv, description=description, extra=extra, legacy=legacy))


def parse_flags(
    argv: Sequence[str],
    *,
    description: str,
    extra: dict[str, type] | None = None,
    legacy: Sequence[Legacy] = (),
) -> Parsed:
    """Parse `argv` and import its plugins.

    Args:
        extra: further sections of the tool.
        legacy: accepted flags of older tools.

    Raises:
        ConfigError: listing all problems.
    """
    load_plugins(modules_in(argv))
    own = {"preprocess": PreprocessConfig, **(extra or {})}
    shared = {"tokenizer": TokenizerConfig, "plugins": PluginModulesConfig, "urls": UrlConfig}
    return parse_sections(
        argv,
        {**own, **shared},
        description=description,
        legacy=[*_LEGACY, *legacy],
        own=own,
        shared=shared,
        basics=BASICS_OF_TOKENIZERS,
    )


def to_command(parsed: Parsed) -> PreprocessCommand:
    """Build the command of parsed flags.

    Raises:
        ConfigError: listing all problems.
        DataError: the tokenizer's files are damaged.
    """
    config, output_url = with_local_output(_with_prefix(parsed.sections), parsed.sections["urls"])
    plugins: PluginModulesConfig = parsed.sections["plugins"]
    tokenizer: TokenizerConfig = parsed.sections["tokenizer"]
    default = "GPT2BPETokenizer" if tokenizer.merge_file else None  # no other type has merges
    tokenizer_args = tokenizer_arguments(tokenizer, default=default)
    problems = [
        *tokenizer_problems(**tokenizer_args),
        *_problems(config),
        *_output_problems(config, tokenizer_args),
    ]
    if problems:
        texts = [] if config.conversations else config.input
        keys = config.json_keys
        text, by_name = text_separator(config), is_text_by_name(config)
        raise ConfigError(*problems, *input_problems(texts, keys, text, by_name=by_name))
    # Files of the same names may have changed since an earlier command of this process.
    _build_tokenizer.cache_clear()
    _built_for_chats.cache_clear()
    spec = _spec(config, tokenizer_args, plugins.plugin or ())
    notices = [
        *parsed.notices,
        *_folder_notices(config.input),
        *_sentence_notices(config, tokenizer_args["tokenizer_type"]),
        *replacement_notices(spec.prefixes),
    ]
    return PreprocessCommand(spec, parsed.sections, tuple(notices), output_url)


def print_written(results: Sequence[Written]) -> None:
    """Print counts and report of the files that were written."""
    for written in results:
        print(summary(written))
        for line in written.report:
            print("  " + line)
    for warning in lost_texts(results):
        print(warning)


def summary(written: Written) -> str:
    """Return one line about a pair of token files."""
    bad = f" | bad lines, left out: {written.bad}" if written.bad else ""
    kept = written.empty - written.dropped
    empty = f" | documents without a token, kept: {kept}" if kept > 0 else ""
    unselected = f" | left out by --where: {written.unselected}" if written.unselected else ""
    return (
        f"{written.prefix}.bin, .idx: documents: {written.documents} | tokens: {written.tokens} | "
        f"bytes of both files: {written.bytes} | documents without a token, left out: "
        f"{written.dropped}{empty}{unselected}{bad}"
    )


def lost_texts(results: Sequence[Written]) -> Iterator[str]:
    """Yield a warning where texts were left out because another key had no token."""
    lost = sum(written.dropped - written.empty for written in results)
    if lost > 0:
        counts = ", ".join(f"{written.key}: {written.empty}" for written in results)
        yield (
            f"warning: a document without a token under one key was left out under all keys "
            f"(documents without a token: {counts}); --empty-documents per-key leaves it out under "
            "that key alone"
        )


def _spec(
    config: PreprocessConfig, tokenizer_args: Mapping[str, Any], modules: Sequence[str]
) -> PreprocessSpec:
    """Build the spec from the flags.

    Args:
        tokenizer_args: arguments of `build_tokenizer`.
        modules: of plugins, for worker processes.
    """
    make: partial[Tokenizer] = partial(_build_tokenizer, json.dumps(tokenizer_args), tuple(modules))
    make_encoder: Callable[[], Tokenizer] = make
    record = describe(make_encoder(), tokenizer_args)
    template = _template(config, tokenizer_args)
    record = replace(record, chat_template=template.source if template else "")
    known_by = {"name": record.name, "fingerprint": record.fingerprint}
    if template:
        make_encoder = partial(_built_for_chats, make, template)
        make_encoder()  # refuses a tokenizer that cannot do it
        known_by["chat template"] = hashlib.sha256(repr(template).encode()).hexdigest()
    return PreprocessSpec(
        inputs=tuple(config.input),
        text=text_separator(config),
        text_by_name=is_text_by_name(config),
        where=Selection(config.where[0], tuple(config.where[1:])) if config.where else None,
        output_prefix=str(config.output_prefix),
        json_keys=KEYS if template else tuple(config.json_keys),
        make_encoder=make_encoder,
        tokenizer=known_by,
        record=to_text(record),
        append_eod=config.append_eod,
        append_bos=config.append_bos,
        prepend_space=config.prepend_space,
        empty_documents=config.empty_documents,
        chats=config.conversations,
        split_sentences=config.split_sentences,
        lang=config.lang,
        keep_newlines=config.keep_newlines,
        dataset_impl=config.dataset_impl,
        workers=config.workers,
        chunk_size=config.chunk_size,
        max_memory_mb=config.max_memory_mb,
        on_error=config.on_error[0],
        bad_lines_path=config.on_error[1] if config.on_error[0] == "collect" else None,
        resume=config.resume,
        log_interval=config.log_interval,
    )


@cache
def _built_for_chats(make: Callable[[], Tokenizer], template: ChatTemplate) -> ChatTokenizer:
    return ChatTokenizer(make(), template)


@cache
def _build_tokenizer(tokenizer_args: str, modules: Sequence[str]) -> Tokenizer:
    load_plugins(modules)
    return build_tokenizer(**json.loads(tokenizer_args))


def _with_prefix(sections: Mapping[str, Any]) -> PreprocessConfig:
    """Return the preprocessing flags; a trial of worker counts needs no --output-prefix."""
    config: PreprocessConfig = sections["preprocess"]
    trial: WorkerTrialConfig | None = sections.get("trial")
    if config.output_prefix is None and trial is not None and trial.find_optimal_num_workers:
        return replace(config, output_prefix=str(Path(gettempdir(), "trial-of-workers")))
    return config


def _problems(config: PreprocessConfig) -> Iterator[str]:
    numbers = {
        "--workers": config.workers,
        "--chunk-size": config.chunk_size,
        "--max-memory-mb": config.max_memory_mb,
        "--log-interval": config.log_interval,
    }
    for flag, number in numbers.items():
        if number is not None and number < 1:
            yield f"{flag} {number}: give 1 or more"
    words = len(config.on_error)
    if config.on_error[0] not in ("stop", "skip", "collect"):
        yield f"--on-error {' '.join(config.on_error)}: give stop, skip, or collect FILE"
    elif words != 1 + (config.on_error[0] == "collect"):
        yield f"--on-error {config.on_error[0]}: collect has one FILE after it, the others none"
    if config.where is not None and len(config.where) < 2:
        yield f"--where {' '.join(config.where)}: give a key and the values of documents to convert"
    if not config.split_sentences and config.keep_newlines:
        yield "--keep-newlines: only sentences of --split-sentences lose white space; leave it out"
    if not config.split_sentences and config.lang != PreprocessConfig.lang:
        yield f"--lang {config.lang}: only --split-sentences uses a language; leave it out"
    yield from _conversation_problems(config)
    yield from _text_problems(config)
    if config.input.count(STDIN) > 1:
        yield "--input - -: standard input can be read only once"


def _folder_notices(inputs: Sequence[str]) -> Iterator[str]:
    for folder in filter(os.path.isdir, inputs):
        found, others = files_in(folder)
        counts = ", ".join(f"{count} {each or 'without'}" for each, count in sorted(others.items()))
        left = f"; left out, by suffix: {counts}; name them to read them" if others else ""
        yield f"--input {folder}: {len(found)} files{left}"


def _sentence_notices(config: PreprocessConfig, tokenizer_type: str) -> Iterator[str]:
    if tokenizer_type.startswith("BertWordPiece") and not config.split_sentences:
        yield (
            f"warning: {tokenizer_type} without --split-sentences: each document is one sequence, "
            "and objectives of masked tokens train on sentences"
        )


def _output_problems(config: PreprocessConfig, tokenizer_args: Mapping[str, Any]) -> Iterator[str]:
    if config.output_prefix is None:
        yield "--output-prefix is missing: give the path of the output, without suffix"
        return
    stage = stage_of(config.output_prefix)
    outputs = output_files(
        config.output_prefix,
        KEYS if config.conversations else config.json_keys,
        split_sentences=config.split_sentences,
    )
    single_file = ("vocab_file", "merge_file", "tokenizer_model")
    read = {
        "--input": [path for path in config.input if path != STDIN],
        "--chat-template": [config.chat_template or ""],
        **{f"--{name.replace('_', '-')}": [tokenizer_args.get(name) or ""] for name in single_file},
    }
    input_stem = Path(config.input[0]).name.partition(".")[0]
    yield from prefix_problems(config.output_prefix, input_stem.strip("-*?[]") or "corpus")
    yield from key_problems(config.json_keys)
    yield from replacement_problems(outputs, stage, read)
    for path in config.on_error[1:2]:
        yield from collection_problems(path, outputs, stage, config.input)


def text_separator(config: PreprocessConfig) -> TextSeparator | None:
    """Return the separator of documents in plain text; None if the flags do not say that there is any."""
    is_text = config.input_format == "text" or (
        config.input_format == "auto" and config.document_separator is not None
    )
    return (config.document_separator or "line") if is_text else None


def is_text_by_name(config: PreprocessConfig) -> bool:
    """Whether the names of inputs say what they hold; not with flags that text has no use for."""
    is_of_json = config.conversations or config.where or len(config.json_keys) > 1
    return config.input_format == "auto" and not is_of_json


def _text_problems(config: PreprocessConfig) -> Iterator[str]:
    if config.input_format == "json" and config.document_separator:
        yield (
            f"--document-separator {config.document_separator} is for plain text, and not for "
            "--input-format json; leave one of them out"
        )
    if text_separator(config) is None:
        return
    if len(config.json_keys) > 1:
        yield f"--json-keys {' '.join(config.json_keys)}: plain text has no keys; give one name"
    if config.where:
        yield f"--where {config.where[0]}: plain text has no metadata; leave it out"
    if config.conversations:
        yield "--conversations are JSON; leave --input-format and --document-separator out"


def _conversation_problems(config: PreprocessConfig) -> Iterator[str]:
    if not config.conversations:
        if config.chat_template:
            yield "--chat-template writes messages: add --conversations"
        return
    text_flags = {
        "--json-keys": config.json_keys != ["text"],
        "--where": config.where is not None,
        "--append-bos": config.append_bos,
        "--prepend-space": config.prepend_space,
        "--split-sentences": config.split_sentences,
        f"--empty-documents {config.empty_documents}": config.empty_documents != "drop",
    }
    for flag, given in text_flags.items():
        if given:
            yield f"{flag} is for texts; --conversations has no use for it"


def _template(config: PreprocessConfig, tokenizer_args: Mapping[str, Any]) -> ChatTemplate | None:
    if not config.conversations:
        return None
    return read_chat_template(
        config.chat_template,
        tokenizer_args["tokenizer_name_or_path"],
        keywords(tokenizer_args.get("tokenizer_kwargs") or ()),
    )
