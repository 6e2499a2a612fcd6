#!/usr/bin/env python
"""Estimate what a run will need before it is started: memory, time, traffic, disk, money.

Takes the flags of pretrain_gpt.py, needs neither GPU nor data, and refuses what training refuses.
With --search it looks for the fastest layouts instead. The exit code is 1 if the run, or every
layout, does not fit the given kind of GPU.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, ExitCode, raise_if_any
from megatron.config.config import (
    SECTIONS,
    Config,
    options_given,
    parse_config_for_checkpoint,
)
from megatron.config.data.tokenizer import without_idle_fields
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.optimization.training import global_batch_size_of
from megatron.config.parallelism.pipeline import flags_of_stages
from megatron.config.parsing.files import preset_vocabulary
from megatron.config.parsing.flags import options_of
from megatron.config.plan.plan import Plan, plan
from megatron.config.plan.samples import fewest_processes, with_some_data
from megatron.config.tools.planning import PlanningConfig
from megatron.planner.calibration import ROOFLINE, Calibration, read_calibration
from megatron.planner.devices import Device, device_of
from megatron.planner.search import DECIDED, faster_micro_batch, faster_partition, obstacle, search
from megatron.planner.speed import speed_of
from megatron.planner.summary import (
    device_lines,
    memory_lines,
    micro_batch_line,
    partition_line,
    run_lines,
    search_lines,
    work_lines,
)

TRAINING_DEVICES = ("auto", "cpu", "cuda")
NOT_NEEDED = {
    "schedule": {"lr": 1e-4},
    "training": {"micro_batch_size": 1},
}
"""Values for required flags of training that hardly matter to a plan."""

_ASSUMED_VOCABULARY = 50257
"""GPT-2's."""

_UNDECIDED = {section: dict.fromkeys(names) for section, names in DECIDED.items()}
"""Values of the fields that a search decides, which show whether the user has set them as well."""


def main(argv: Sequence[str]) -> None:
    """Print the plan of the run of `argv`.

    Raises:
        ConfigError: lists every problem.
    """
    words = _with_kind_of_gpu(argv)
    searches = options_given(words).get("search") is not None
    config, sections = parse_config_for_checkpoint(
        words,
        NOT_NEEDED | _UNDECIDED if searches else NOT_NEEDED,
        {"planning": PlanningConfig},
        description=__doc__ or "",
    )
    planning = sections["planning"]
    tokenizer, idle = without_idle_fields(config.tokenizer)
    config = with_some_data(replace(config, tokenizer=tokenizer), config.plugins.objective or "gpt")
    raise_if_any([*_problems(planning), *(_layout_problems(config) if searches else ())])
    for notice in idle:
        print(notice)
    if planning.vocabulary is None:
        planning = replace(planning, vocabulary=_known_vocabulary(config))
    if planning.vocabulary is None:
        print(
            f"a vocabulary of {_ASSUMED_VOCABULARY:,} tokens is assumed; --vocabulary N changes it"
        )
    if planning.search is None:
        _print_plan(config, planning)
    else:
        _print_search(config, planning, planning.search)


def _with_kind_of_gpu(argv: Sequence[str]) -> list[str]:
    """Return the flags with `--device h100-80gb` as `--gpu h100-80gb`.

    Training's own --device is cpu or cuda, and keeps its meaning.
    """
    words: list[str] = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--device=") else [word]
    for i, (word, value) in enumerate(pairwise(words)):
        if word == "--device" and value not in TRAINING_DEVICES:
            words[i] = "--gpu"
    return words


def _problems(planning: PlanningConfig) -> list[str]:
    problems = [
        f"{flag} {number} must be at least 1"
        for flag, number in (
            ("--search", planning.search),
            ("--show", planning.show),
            ("--gpus-per-node", planning.gpus_per_node),
            ("--vocabulary", planning.vocabulary),
        )
        if number is not None and number < 1
    ]
    if planning.mfu is not None and not 0 < planning.mfu <= 1:
        problems.append(f"--mfu {planning.mfu:g} must be more than 0 and at most 1")
    needs_kind = planning.mfu or planning.price_per_gpu_hour or planning.measured
    if planning.gpu is None and needs_kind:
        problems.append(
            "--mfu, --measured and --price-per-gpu-hour need the kind of GPU: give --gpu too"
        )
    if planning.mfu and planning.measured:
        problems.append("--mfu and --measured both decide the time of a step: leave one out")
    if planning.search is not None and planning.mfu:
        problems.append("--search takes no --mfu, which differs between layouts")
    return problems


def _layout_problems(config: Config) -> list[str]:
    options = options_of(SECTIONS)
    if config.parallel.world_size is not None:
        return ["--search N sets the number of GPUs: leave --num-gpus or --world-size out"]
    given = [
        options[name]
        for section, names in DECIDED.items()
        for name in names
        if getattr(getattr(config, section), name) is not None
    ]
    if not given:
        return []
    return [f"--search decides {', '.join(given)} itself: leave out what it decides, or --search"]


def _print_plan(config: Config, planning: PlanningConfig) -> None:
    device = device_of(planning.gpu) if planning.gpu else None
    kind = "cpu" if config.parallel.device == "cpu" else "cuda"
    decided = _decide(config, planning)
    for notice in decided.notices:
        print(notice)
    for lines in (run_lines(decided), memory_lines(decided, device=kind), work_lines(decided)):
        print(*lines, sep="\n")
    if device:
        _print_times(config, planning, decided, device)
        if obstacle(decided, device):
            sys.exit(ExitCode.FAILED)


def _decide(config: Config, planning: PlanningConfig) -> Plan:
    return plan(
        config,
        world_size=config.parallel.world_size or fewest_processes(config),
        vocab_size=planning.vocabulary or _ASSUMED_VOCABULARY,
        device="cpu" if config.parallel.device == "cpu" else "cuda",
        objective=config.plugins.objective or "gpt",
    )


def _known_vocabulary(config: Config) -> int | None:
    """Return the vocabulary size by the tokenizer's file or the preset; None without them."""
    file, preset = config.tokenizer.vocab_file, config.training.preset
    if file and os.path.isfile(file):
        from megatron.tokenizer.build import build_tokenizer  # imports numpy, which no plan needs

        objective = config.plugins.objective or "gpt"
        return build_tokenizer(
            **objective_tokenizer_arguments(config.tokenizer, objective)
        ).vocab_size
    return preset_vocabulary(preset) if preset else None


def _print_times(config: Config, planning: PlanningConfig, decided: Plan, device: Device) -> None:
    """Print whether the run fits the kind of GPU, its time, and a larger micro-batch that is faster."""
    calibration = _calibration(planning, device, config)
    estimate = partial(
        speed_of,
        device=device,
        gpus_per_node=planning.gpus_per_node,
        mfu=planning.mfu,
        slowdown=calibration.slowdown,
    )
    speed = estimate(decided)
    lines = device_lines(
        decided,
        device,
        speed,
        calibration=calibration,
        price_per_gpu_hour=planning.price_per_gpu_hour,
    )
    print(*lines, sep="\n")
    if planning.mfu or obstacle(decided, device):
        return
    given = {"decide": partial(_decide, planning=planning), "estimate": estimate}
    if faster := faster_micro_batch(config, decided, device, **given):
        size, best = faster
        print(micro_batch_line(size, 1 - best.step_s / speed.step_s))
    if divided := faster_partition(config, decided, device, **given):
        flags, best = divided
        saved = 1 - best.step_s / speed.step_s
        print(partition_line(flags, saved, replaced=flags_of_stages(config.parallel)))


def _calibration(planning: PlanningConfig, device: Device, config: Config) -> Calibration:
    """Return the correction or replacement of the roofline estimate on `device`."""
    if planning.mfu:
        return Calibration(1.0, (1.0,), f"--mfu {planning.mfu:g}")
    found = read_calibration(planning.measured, device) if planning.measured else ROOFLINE
    if config.precision.fp8_format is None:
        return found
    return replace(
        found, source=f"{found.source}; --fp8-format is not estimated: times are those of bf16"
    )


def _print_search(config: Config, planning: PlanningConfig, num_gpus: int) -> None:
    if config.deepspeed.deepspeed_config:
        raise ConfigError(
            "--search decides what a DeepSpeed JSON sets as well: leave --deepspeed_config out"
        )
    if config.training.gradient_accumulation_steps is not None:
        raise ConfigError(
            "--search compares layouts on equal batches: give --global-batch-size in place of "
            "--gradient-accumulation-steps, which multiplies the replicas"
        )
    if global_batch_size_of(config.training, {}) is None:
        raise ConfigError("--search compares layouts on equal batches: give --global-batch-size")
    device = device_of(planning.gpu or "a100-80gb")
    calibration = _calibration(planning, device, config)
    logging.basicConfig(format="%(message)s")  # to stderr: the progress of a long search
    logging.getLogger("megatron").setLevel(logging.INFO)
    found = search(
        config,
        num_gpus=num_gpus,
        vocab_size=planning.vocabulary or _ASSUMED_VOCABULARY,
        device=device,
        gpus_per_node=planning.gpus_per_node,
        slowdown=calibration.slowdown,
    )
    lines = search_lines(
        found,
        most=planning.show,
        calibration=calibration,
        price_per_gpu_hour=planning.price_per_gpu_hour,
    )
    print(*lines, sep="\n")
    if not found.fitting:
        sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    run_tool(main)
