"""Check a run's flags: the kernels, compilers and tokenizer that it would use."""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from megatron.common.errors import ConfigError, MegatronError
from megatron.config.config import Config
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.plan.plan import Plan, plan
from megatron.config.plan.samples import fewest_processes, with_some_data
from megatron.diagnostics.doctor.findings import Problem, Section
from megatron.fused_kernels.registry import package_problems
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.fast import FastTokenizer, load_fast

_VOCABULARY = 50257  # of GPT-2; the tokenizer's files are not read for kernels


def plan_of(
    config: Config, device: torch.device, *, processes: int | None = None
) -> Plan | Problem:
    """Return the plan of `config` on `processes` processes, or the problem that rules it out.

    Args:
        processes: default: --world-size, or else the fewest that the flags allow.
    """
    objective = config.plugins.objective or "gpt"
    try:
        return plan(
            with_some_data(config, objective),
            world_size=processes or config.parallel.world_size or fewest_processes(config),
            vocab_size=_VOCABULARY,
            device=device.type,
            objective=objective,
        )
    except ConfigError as error:
        by = f" with {processes} processes" if processes else ""
        return Problem(
            f"the flags of the run are impossible{by}: " + "; ".join(error.problems),
            "change them, or leave them out",
        )


def kernels_section(
    config: Config, device: torch.device, *, is_example: bool, processes: int | None = None
) -> Section:
    """Return the implementation of each operation, as a run logs it at its start.

    Args:
        is_example: whether the flags are an example, not a run's flags.
        processes: of the run; see `plan_of`.
    """
    resolved = plan_of(config, device, processes=processes)
    if isinstance(resolved, Problem):
        return Section("kernels", {}, (resolved,))
    network = resolved.model
    facts = {
        "network": f"{network.num_layers} layers of width {network.hidden_size}, "
        f"{resolved.precision.dtype}"
        + (" (an example: no flags of a run were given)" if is_example else "")
    }
    problems = [
        Problem(*(text.strip() for text in problem.rsplit(":", 1)))
        for problem in package_problems(config)
    ]
    try:
        from megatron.training.setup import choose

        _, choices = choose(resolved, device)
    except ConfigError as error:
        problem = Problem("; ".join(error.problems), "leave the flag out")
        return Section("kernels", facts, (*problems, problem))
    except Exception as error:  # of any type: incompatible libraries
        problem = Problem(
            f"the libraries of a run cannot be imported: {type(error).__name__}: {error}",
            "install the versions of requirements.txt",
        )
        return Section("kernels", facts, (*problems, problem))
    facts |= {choice.operation: f"{choice.implementation} ({choice.why})" for choice in choices}
    return Section("kernels", facts, tuple(problems))


def compilers_needed(config: Config, device: torch.device) -> Mapping[str, str]:
    """Return the compilers that a run calls, each with its use.

    DeepSpeed's kernels for GPUs need CUDA's compiler as well, and are compiled with ninja.
    """
    needs = {}
    if device.type == "cuda" and find_spec("triton") and config.kernels.kernels != "reference":
        needs["gcc or clang"] = "Triton, whose kernels are compiled at their first use,"
    resolved = plan_of(config, device)
    if isinstance(resolved, Plan) and resolved.optimizer.impl == "deepspeed":
        user = f"DeepSpeed's {resolved.optimizer.name}, which is compiled at its first use,"
        needs |= dict.fromkeys(("g++ or clang", "ninja"), user)
        if device.type == "cuda" and not resolved.optimizer.on_cpu:
            needs["nvcc"] = user
    return needs


def tokenizer_section(config: Config) -> Section:
    """Return the tokenizer of a run, and the library that encodes its text."""
    has_library = find_spec("gigatoken") is not None
    facts = {
        "fast backend (gigatoken)": "installed" if has_library else "not installed",
        "reference (tokenizers)": "installed" if find_spec("tokenizers") else "not installed",
    }
    arguments = objective_tokenizer_arguments(config.tokenizer, config.plugins.objective or "gpt")
    if config.tokenizer.tokenizer_type is None and not config.tokenizer.vocab_file:
        facts["of the run"] = (
            "unknown: give the tokenizer flags of the run to see which library encodes"
        )
        return Section("tokenizer", facts)
    try:
        tokenizer = build_tokenizer(**arguments)
    except MegatronError as error:
        problem = Problem(f"the tokenizer cannot be loaded: {error}", "correct its flags")
        return Section("tokenizer", facts, (problem,))
    facts["of the run"] = f"{tokenizer.name}, {tokenizer.vocab_size} tokens"
    if isinstance(tokenizer, FastTokenizer):
        found = load_fast(tokenizer.reference)
        facts["encodes"] = f"the reference: {found}" if isinstance(found, str) else "gigatoken"
    else:
        facts["encodes"] = "the library of this type: it has no fast backend"
    return Section("tokenizer", facts)
