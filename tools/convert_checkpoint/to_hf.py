#!/usr/bin/env python
"""Export a checkpoint of any layout to Hugging Face transformers, or by a plugin, on the CPU.

Uses the tokenizer of the training; give its flags if its files have moved.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import Manifest, read_manifest
from megatron.checkpointing.megatron_lm.detect import foreign_checkpoint_in, system_of
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.remote import local_checkpoint, local_folder
from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, WrongCheckpointError, raise_if_any
from megatron.common.registry import EXPORTERS
from megatron.config.config import plugins_in
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.parsing.flags import parse_sections
from megatron.config.parsing.parser import Given, peek
from megatron.config.plugins import PluginModulesConfig, load_plugins, missing_plugins
from megatron.config.run.urls import UrlConfig, cache_of, urls_in
from megatron.config.tools.hugging_face import ExportConfig
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.chat import read_chat_template

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    log.configure(rank=0)
    given = peek(argv)
    load, cache = given.get("load"), cache_of(urls_in(given))
    directory = local_checkpoint(load, cache) if load else None
    loaded = _checkpoint_in(directory) if directory else None
    saved = loaded[1] if loaded else None
    modules = plugins_in(argv)
    load_plugins(modules)
    raise_if_any(missing_plugins(saved.config if saved else {}, modules))
    EXPORTERS.with_extensions()  # which --help lists
    exporters = {section.__name__: section for section in EXPORTERS.sections()}
    parsed = parse_sections(
        argv,
        {
            **{"export": ExportConfig, "tokenizer": TokenizerConfig},
            **{"plugins": PluginModulesConfig, "urls": UrlConfig, **exporters},
        },
        description=__doc__ or "",
        defaults=_tokenizer_of(given, saved) if saved else None,
    ).sections
    config: ExportConfig = parsed["export"]
    own_flags = EXPORTERS.flags_of(config.exporter, parsed)
    max_bytes = _bytes(config.max_shard_size)
    objective = saved.objective.name if saved else "gpt"
    arguments = objective_tokenizer_arguments(parsed["tokenizer"], objective)
    tokenizer = build_tokenizer(**arguments)
    template = read_chat_template(config.chat_template, None).source
    source, manifest = loaded or _checkpoint_in(Path(config.load))
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.conversion.export import Export, ExportOptions, export

    job = Export(
        source=source,
        manifest=manifest,
        tokenizer=tokenizer,
        tokenizer_arguments=arguments,
        options=ExportOptions(
            dtype=config.target_dtype,
            max_shard_bytes=max_bytes,
            model_type=config.model_type,
            chat_template=template,
            replaces_template=config.replace_chat_template,
            drops_predictions=config.without_mtp,
            verifies=config.verify,
        ),
    )
    with local_folder(config.save, cache) as output:
        exported = export(job, output, config.exporter, own_flags)
    print(f"{config.save} holds {source} as {exported or config.exporter}")


def _checkpoint_in(directory: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint and its manifest; refuse what another program wrote."""
    if system_of(directory) == "hugging_face":
        raise WrongCheckpointError(
            f"--load {directory} is in Hugging Face's format already (it has a config.json and no "
            "manifest.json): give the --save directory of a run"
        )
    if foreign := foreign_checkpoint_in(directory):
        raise WrongCheckpointError(f"--load {directory} is {foreign}")
    folder = checkpoint_of(directory)
    return folder, read_manifest(folder)


def _tokenizer_of(given: Given, saved: Manifest) -> dict[str, object]:
    """Return the tokenizer of the training, unless one of another type is given."""
    tokenizer = saved.tokenizer
    is_other = given.get("tokenizer_type") not in (None, tokenizer.tokenizer_type)
    if is_other:
        return {}
    if given.get("tokenizer_name_or_path") and tokenizer.tokenizer_type != "PretrainedFromHF":
        return {"tokenizer_type": "PretrainedFromHF"}
    return asdict(tokenizer)


def _bytes(size: str) -> int:
    """Return the bytes of a size such as 5GB."""
    number = size.upper().rstrip("BGIKM")
    unit = size.upper()[len(number) :]
    if not number.isdecimal() or int(number) < 1 or unit not in {"", *_UNITS}:
        raise ConfigError(f"--max-shard-size {size} is not a size such as 5GB or 500MB")
    return int(number) * _UNITS.get(unit, 1)


if __name__ == "__main__":
    run_tool(main)
