"""Continue text with a trained GPT: a prompt, a file of prompts, or nothing at all.

The network's sizes and the tokenizer are those of the checkpoint; flags that repeat them must
agree.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron import log
from megatron.checkpoint.compare import require_same_model
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.names import published_tags
from megatron.config.config import Config, parse_config_for_checkpoint
from megatron.config.flags import value_in
from megatron.config.generation import GenerationConfig
from megatron.errors import CheckpointError, ConfigError, DataError, raise_if_any
from megatron.plan.model_spec import ModelSpec, plan_model
from megatron.plan.tokenizer_plan import gpt_tokenizer_arguments
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tool import run_tool

Continue = Callable[[Iterable[list[int]]], Iterator[list[int]]]
"""Prompts in, each with its continuation out."""


def main(argv: Sequence[str]) -> None:
    """Generate what the command line `argv` asks for."""
    log.configure(rank=0)
    parse = partial(
        parse_config_for_checkpoint,
        extra={"generation": GenerationConfig},
        description=__doc__ or "",
    )
    load = value_in(argv, "--load")
    if load is None:
        if {"-h", "--help"} & set(argv):
            parse(argv, {})  # prints the help and leaves
        raise ConfigError("--load is missing: the directory that a run saved to with --save")
    folder, manifest = newest_checkpoint(Path(load))
    config, own = parse(argv, manifest.config)
    wishes: GenerationConfig = own["generation"]
    raise_if_any(mode_problems(wishes))
    tokenizer = build_tokenizer(**gpt_tokenizer_arguments(config.tokenizer))
    spec = plan_model(
        config,
        vocab_size=tokenizer.vocab_size,
        tensor=manifest.plan["parallel"]["tensor"],
    )
    require_same_model(manifest.plan, {"model": asdict(spec)}, str(folder))
    prompts = read_prompts(wishes)
    continue_all = load_generator(folder, manifest, spec, tokenizer, config, wishes)
    if wishes.num_samples:
        write_samples(wishes, tokenizer, continue_all)
    else:
        write_continuations(wishes, prompts, tokenizer, continue_all)


def newest_checkpoint(directory: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint of `directory` and its manifest.

    Raises:
        CheckpointError: there is none.
    """
    tags = published_tags(directory)
    if not tags:
        raise CheckpointError(f"--load {directory} holds no complete checkpoint")
    return directory / tags[0], read_manifest(directory / tags[0])


def mode_problems(wishes: GenerationConfig) -> Iterator[str]:
    """Yield every reason why it is not clear what to generate."""
    modes = {
        "--prompt": wishes.prompt is not None,
        "--sample-input-file": wishes.sample_input_file is not None,
        "--num-samples": wishes.num_samples > 0,
    }
    asked = [flag for flag, on in modes.items() if on]
    if len(asked) != 1:
        yield f"give exactly one of {', '.join(modes)}; found {' and '.join(asked) or 'none'}"
    if wishes.num_samples and not wishes.genfile:
        yield "--num-samples needs --genfile: the file to write the texts to"
    if wishes.out_seq_length < 1:
        yield f"--out-seq-length {wishes.out_seq_length} must be at least 1"


def read_prompts(wishes: GenerationConfig) -> list[str]:
    """Return the texts to continue.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if wishes.sample_input_file is None:
        return [wishes.prompt] if wishes.prompt is not None else []
    try:
        prompts = Path(wishes.sample_input_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--sample-input-file {wishes.sample_input_file}: {error}") from error
    if not prompts:
        raise DataError(f"--sample-input-file {wishes.sample_input_file} is empty")
    return prompts


def load_generator(
    folder: Path,
    manifest: Manifest,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    config: Config,
    wishes: GenerationConfig,
) -> Continue:
    """Return what continues prompts with the checkpoint's model, batch by batch."""
    # After the flags are checked: torch takes seconds to import.
    import torch

    from megatron.checkpoint.weights import read_whole_weights
    from megatron.generation.generate import generate
    from megatron.generation.load import build_gpt
    from megatron.generation.sampling import Sampling, sampling_problems
    from megatron.training.device import prepare_process

    sampling = Sampling(
        greedy=wishes.greedy,
        temperature=wishes.temperature,
        top_k=wishes.top_k,
        top_p=wishes.top_p,
    )
    raise_if_any(sampling_problems(sampling, vocab_size=spec.vocab_size))
    launch, device = prepare_process(config.parallel)
    if launch.world_size > 1:
        raise ConfigError("generation runs in one process: start it with plain python")
    torch.manual_seed(config.training.seed)
    generate_batch = partial(
        generate,
        build_gpt(spec, read_whole_weights(folder, manifest), device),
        max_new_tokens=wishes.out_seq_length,
        max_length=spec.max_position_embeddings,
        eod=tokenizer.eod,
        vocab_size=spec.vocab_size,
        sampling=sampling,
        device=device,
    )

    def continue_all(prompts: Iterable[list[int]]) -> Iterator[list[int]]:
        waiting = iter(prompts)
        while batch := list(islice(waiting, config.training.micro_batch_size)):
            yield from generate_batch(batch)

    return continue_all


def write_samples(wishes: GenerationConfig, tokenizer: Tokenizer, continue_all: Continue) -> None:
    """Write texts made up from nothing to --genfile, one JSON object a line."""
    rows = continue_all([tokenizer.eod] for _ in range(wishes.num_samples))
    with open(str(wishes.genfile), "w", encoding="utf-8") as out:
        for row in rows:
            finished = row[-1] == tokenizer.eod
            text = tokenizer.decode(row[1:-1] if finished else row[1:])
            record = {"text": text, "length": len(row) - 1, "finished": finished}
            out.write(json.dumps(record) + "\n")
    print(f"wrote {wishes.num_samples} samples to {wishes.genfile}")


def write_continuations(
    wishes: GenerationConfig,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    continue_all: Continue,
) -> None:
    """Write every prompt and what follows it: to the terminal, or to the output file."""
    # A blank line is a prompt too: it is continued like the beginning of a document.
    encoded = [tokenizer.encode(prompt) or [tokenizer.eod] for prompt in prompts]
    file = wishes.sample_output_file
    if wishes.sample_input_file is not None:
        file = file or wishes.sample_input_file + ".out"
    with open(file, "w", encoding="utf-8") if file else nullcontext(sys.stdout) as out:
        for prompt, start, row in zip(prompts, encoded, continue_all(encoded), strict=True):
            new = [token for token in row[len(start) :] if token != tokenizer.eod]
            out.write(f"Context:\n{prompt}\n\nMegatron-LM:\n{tokenizer.decode(new)}\n\n")
            out.flush()
    if file:
        print(f"wrote {len(prompts)} continued prompts to {file}")


if __name__ == "__main__":
    run_tool(main)
