"""Write the checkpoints of `trained/` with megatron-core 0.16.0, on a CPU: with optimizer states.

Needs the functions of make_torch_dist.py, which says how to install megatron-core:

    PYTHONPATH=MCORE:tests/foreign python -P tests/foreign/make_trained.py tests/foreign/trained

`expected.pt` has the losses of the steps after the checkpoint, as megatron-core takes them.
"""

import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from make_torch_dist import LENGTH, VOCAB, arguments, build, prepare

LR, DECAY, BETAS, TAKEN, FOLLOWING = 1e-2, 0.1, (0.9, 0.95), 7, 4
RUNS = {
    "gpt": {"network": "gpt", "form": "fully_reshardable"},
    "experts": {"network": "experts", "form": "fully_reshardable"},
    "undivided": {"network": "gpt", "form": None, "bf16": True},
    "buckets": {"network": "gpt", "form": "dp_reshardable", "learns": False},
    "expert_buckets": {"network": "experts", "form": "dp_reshardable", "learns": False},
}
"""Form of the states: by parameter, of the optimizer that is not distributed (None), or the default."""


def stub_cuda():
    """Let the distributed optimizer do without a GPU."""
    types = {torch.float32: "Float", torch.bfloat16: "BFloat16"}
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *given: (
        type_of(tensor, *given) if given else f"torch.cuda.{types[tensor.dtype]}Tensor"
    )
    torch.Tensor.cuda = lambda tensor: tensor
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(function):
    """Return a function that makes its tensor on the CPU."""

    def made(*words, device=None, **more):
        return function(*words, **more)

    return made


def rows(number):
    """Return the tokens of a step: [2, LENGTH + 1]."""
    return torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def optimizer_of(model, run):
    """Return the model in megatron-core's wrapper, and the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_distributed = run["form"] is not None
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True
        ),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        clip_grad=0.0,
        bf16=run.get("bf16", False),
        params_dtype=torch.bfloat16 if run.get("bf16") else torch.float32,
        use_distributed_optimizer=is_distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:
        # Megatron-LM's scheduler of the learning rate does this.
        group["weight_decay"] = DECAY * group["wd_mult"]
    return wrapped, optimizer


def steps(wrapped, optimizer, numbers, *, learns=True):
    """Take optimizer steps; return their losses."""
    losses = []
    for number in numbers:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = rows(number)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        loss = wrapped(tokens[:, :-1], positions, causal, labels=tokens[:, 1:]).mean()
        (loss * float(learns)).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(_, name, folder, address):
    """Train a network, save it, and go on."""
    from megatron.core import dist_checkpointing

    run = RUNS[name]
    args = arguments(run["network"])
    args.bf16 = run.get("bf16", False)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    stub_cuda()
    prepare(0, 1, address)
    model = build(run["network"], args)
    if args.bf16:
        model = model.bfloat16()
        model.config.params_dtype = model.config.pipeline_dtype = torch.bfloat16
        model.config.bf16 = True
    wrapped, optimizer = optimizer_of(model.train(), run)
    steps(wrapped, optimizer, range(TAKEN), learns=run.get("learns", True))
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    how = {"distrib_optim_sharding_type": run["form"], "chained_optim_avoid_prefix": True}
    how = how if run["form"] else {"chained_optim_avoid_prefix": True}
    sharded = model.sharded_state_dict(metadata=how)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": sharded}
    state["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=how)
    dist_checkpointing.save(state, str(iteration), content_metadata=how)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    following = range(TAKEN, TAKEN + FOLLOWING)
    torch.save({"losses": steps(wrapped, optimizer, following)}, folder / "expected.pt")
    dist.destroy_process_group()


def main(output, *names):
    """Write one archive per run, or for the named ones, into the folder `output`."""
    Path(output).mkdir(exist_ok=True)
    for name in names or RUNS:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            processes.spawn(train, (name, folder, f"{temporary}/meeting"), nprocs=1)
            with tarfile.open(Path(output) / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(folder, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
