"""Training and decode steps on the fake GPU, one engine for each line of flags on stdin.

    python tests/fake_gpu/fake_steps.py FOLDER < LINES

A line is OBJECTIVE, then flags; or "decode", then flags of a GPT that generates. What a step did is
printed as a line of JSON: waits, operations and kernels; "error" if it failed. The device is compiled
to FOLDER.
"""

import gc
import json
import sys
import traceback
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_gpu import Seen, fake_gpu, load_device

VOCAB_SIZE = 500
COMMON = """
    --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 100 --clip-grad 1.0
    --data-path none --device cuda
"""


def run(seen: Seen, objective: str, flags: list[str]) -> None:
    """Train two steps; what the second did is in `seen`."""
    import torch

    from megatron.common.registry import OBJECTIVES
    from megatron.config.config import parse_config
    from megatron.config.plan.plan import plan
    from megatron.training import setup

    config, _ = parse_config([*COMMON.split(), *flags], objective=objective)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device="cuda", objective=objective)
    chosen = OBJECTIVES.get(objective, decided.objective.own_flags)()
    kernels, _ = setup.choose(decided, torch.device("cuda"))
    groups = setup.build_process_groups(decided)
    engine = setup.build_engine(decided, groups, chosen, kernels)
    engine.set_lr(1e-3)
    letters = {
        **chosen.letters(decided.model),
        "b": decided.batch.micro_batch_size,
        **dict.fromkeys("sS", decided.model.seq_length),
    }
    fields = chosen.batch_fields(decided.masks)
    batch = {
        name: torch.ones(field.sizes(letters), dtype=field.dtype, device="cuda")
        for name, field in fields.items()
    }
    for _ in range(2):
        seen.clear()
        float(engine.train_batch(repeat(batch)))
        float(engine.grad_norm)
    parameters = [*engine.module.parameters()]
    if not all(parameter.is_cuda for parameter in parameters):
        raise RuntimeError("a parameter is not on the GPU")


def decode(seen: Seen, flags: list[str]) -> None:
    """Run a decode step of three sequences, with the weights that layers begin with; it is in `seen`."""
    import torch

    from megatron.config.config import parse_config
    from megatron.config.model_plan import plan_model
    from megatron.config.network.kernels import plan_kernels
    from megatron.fused_kernels.registry import choose_inference_kernels
    from megatron.inference.loading.loaded_model import lone_groups
    from megatron.inference.runner import model_runner

    config, _ = parse_config([*COMMON.split(), *flags])
    spec = plan_model(config, vocab_size=VOCAB_SIZE, tensor=1)
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernels = choose_inference_kernels(
        plan_kernels(config.kernels, config.model, config.precision),
        spec,
        tensor=1,
        dtype=dtype,
        device=device,
    )
    with (
        patch.object(model_runner, "fill_parameters"),
        # Host memory cannot be pinned here.
        patch.object(
            model_runner, "to_device", lambda values, device: torch.tensor(values, device=device)
        ),
    ):
        runner = model_runner.ModelRunner(
            spec, {}, groups=lone_groups(), dtype=dtype, device=device, rows=4, kernels=kernels
        )
        runner.prefill([[1, 2, 3], [4], [5, 6]], [3, 1, 2])
        seen.clear()
        runner.decode([1, 2, 3], [3, 1, 2])


def start() -> None:
    """Begin a process group of this process, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.training.process.environment import Launch, export_launch

    export_launch(Launch(0, 1, 0, 1), "cuda")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    # DeepSpeed takes the kind of device from the environment when it is imported.
    from deepspeed.runtime.zero import utils as zero_utils

    from megatron.engine.deepspeed import distributed

    distributed.start("nccl")
    # They compare with what another rank sent: a number that is not known here.
    zero_utils.get_lst_from_rank0 = lambda numbers: numbers
    zero_utils.assert_lst_len_same_as_other_ranks = lambda numbers: None


def main() -> None:
    """Run every line."""
    load_device(Path(sys.argv[1]))
    with fake_gpu() as seen:
        start()
        gc.disable()  # looking through all that is imported takes a fifth of the time
        for line in sys.stdin.read().splitlines():
            objective, *flags = line.split()
            found = {}
            try:
                if objective == "decode":
                    decode(seen, flags)
                else:
                    run(seen, objective, flags)
            except Exception:
                found["error"] = traceback.format_exc()[-3000:]
            found |= {"waits": seen.waits, "kernels": seen.kernels, "operations": seen.operations}
            print(json.dumps({"line": line, **found}), flush=True)


if __name__ == "__main__":
    main()
