#!/usr/bin/env python
"""Show training samples as text or tokens, in the order in which training reads them.

For a run that has saved checkpoints, --load is enough: all other flags default to the run's.
Without it, give the command line of training, and for BERT or T5 also --objective bert or t5. The
flags of data, tokenizer, sequence length, seed and length of the run must equal the run's; further
flags may be left out.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.checkpointing.saved_run import read_saved_run
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, raise_if_any
from megatron.config.config import Config, options_given, parse_config_for_checkpoint
from megatron.config.data.objective import ObjectiveName
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.plan.samples import plan_samples
from megatron.config.tools.data_tools import SampleTextConfig
from megatron.data.datasets.datasets import build_datasets, view_of
from megatron.data.sampling.batch_sampler import Sample
from megatron.data.sampling.provenance import texts_of, tokens_of
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.fingerprint import describe, require_same
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.training.prepare import with_local_data

_SHOWN = 8  # tokens at either end, where not all are shown


def main(argv: Sequence[str]) -> None:
    """Write the samples of the command line `argv`."""
    run = read_saved_run(options_given(argv).get("load"))
    config, sections = parse_config_for_checkpoint(
        argv,
        run.config,
        {"samples": SampleTextConfig},
        description=__doc__ or "",
    )
    options: SampleTextConfig = sections["samples"]
    raise_if_any(range_problems(options))
    objective = config.plugins.objective or run.objective
    config = with_local_data(config, objective)
    tokenizer = tokenizer_for(config, options, objective)
    decided = plan_samples(
        config,
        world_size=config.parallel.world_size or run.world_size,
        objective=objective,
    )
    seed = decided.training.seed
    # Without a tokenizer nothing is rearranged, and where a prefix ends is not shown.
    view = view_of(decided.objective, decided.masks, tokenizer, seed) if tokenizer else None
    plan = replace(decided.data, valid=(), test=())
    if tokenizer:
        made_with = describe(tokenizer)
        for prefix in plan.prefixes:
            require_same(prefix, made_with)
    train = build_datasets(plan, seq_length=decided.seq_length, seed=seed, view=view).train
    first, stop = options.sample_id_range
    if stop > len(train):
        raise ConfigError(f"--sample-id-range {first} {stop}: the run has {len(train)} samples")
    file = options.output_file
    with open(file, "w", encoding="utf-8") if file else nullcontext(sys.stdout) as out:
        for i in range(first, stop):
            for line in lines_of(train[i], options, tokenizer):
                out.write(f"{i} {line}\n")


def range_problems(options: SampleTextConfig) -> Iterator[str]:
    """Yield the errors of the range and of the output options."""
    words = " ".join(map(str, options.sample_id_range))
    if len(options.sample_id_range) != 2:
        yield f"--sample-id-range {words}: give two numbers, the first sample and one past the last"
    elif not 0 <= options.sample_id_range[0] < options.sample_id_range[1]:
        yield f"--sample-id-range {words}: 0 <= first < second is needed"
    if options.all_tokens and not options.print_tokens:
        yield "--all-tokens needs --print-tokens"


def tokenizer_for(
    config: Config, options: SampleTextConfig, objective: ObjectiveName
) -> Tokenizer | None:
    """Return the run's tokenizer; None when neither text nor samples need it."""
    is_masked = declaration_of(objective).kind == "sentences"
    if not shows_text(options) and not config.fim.fim_rate and not is_masked:
        return None
    return build_tokenizer(**objective_tokenizer_arguments(config.tokenizer, objective))


def shows_text(options: SampleTextConfig) -> bool:
    """Whether samples are shown as text."""
    return options.print_text or not options.print_tokens


def lines_of(
    sample: Sample, options: SampleTextConfig, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield the forms in which `sample` is shown."""
    for name, tokens in tokens_of(sample).items() if options.print_tokens else ():
        shown = [tokens]
        if not options.all_tokens and len(tokens) > 2 * _SHOWN:
            shown = [tokens[:_SHOWN], tokens[-_SHOWN:]]
        ids = " ... ".join(" ".join(map(str, part)) for part in shown)
        yield f"{name}: {ids}" if name else ids
    if tokenizer and shows_text(options):
        yield from texts_of(sample, tokenizer)


if __name__ == "__main__":
    run_tool(main)
