"""Training that BigScience's program began goes on here as it would have gone on there."""

import copy
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
import torch.nn.functional as F
from foreign_files import bloom_layers, write_bloom_as_bigscience
from transformers import BloomConfig, BloomForCausalLM

from megatron.checkpointing.megatron_lm.convert import Conversion, convert
from megatron.checkpointing.saved_run import checkpoint_flags
from megatron.checkpointing.train_state import TrainState
from megatron.config.config import Config, parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT, gpt_batch
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.setup import build_engine, build_process_groups
from megatron.training.setup import choose as choose_kernels

VOCAB, SEQ, TAKEN, LR, DECAY = 48, 16, 8, 1e-2, 0.1
SIZES = {"tensor_ranks": 2, "stages": 2, "replicas": 3, "rows": VOCAB}


def rows(number):
    return torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(number))


def their_steps(model, optimizer, numbers):
    """Take steps with plain PyTorch; return their losses."""
    losses = []
    for number in numbers:
        tokens = rows(number)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def their_training():
    """Return a BLOOM and its optimizer after some steps."""
    torch.manual_seed(3)
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    their_steps(model, optimizer, range(TAKEN))
    return model, optimizer


def shards_of(model, optimizer):
    """Return a function from (number of a layer, name, …, rank) to the states of that shard."""
    laid_out = {}
    for state in ("exp_avg", "exp_avg_sq"):
        moments = copy.deepcopy(model)
        with torch.no_grad():
            for mine, theirs in zip(moments.parameters(), model.parameters(), strict=True):
                mine.copy_(optimizer.state[theirs][state])
        laid_out[state] = bloom_layers(moments, tensor_ranks=2, rows=VOCAB)
    return lambda number, name, parts, rank: {
        state: layers[number][name][rank] for state, layers in laid_out.items()
    }


def our_engine(plan):
    distributed.start("gloo")
    kernels, _ = choose_kernels(plan, torch.device("cpu"))
    return build_engine(plan, build_process_groups(plan), GPT(), kernels)


@pytest.mark.parametrize("zero_stage", ["0", "1", "2"])
def test_the_next_steps_are_those_of_the_program_that_began(
    group, tmp_path, monkeypatch, zero_stage
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    model, optimizer = their_training()
    write_bloom_as_bigscience(
        model, tmp_path / "theirs", states=shards_of(model, optimizer), **SIZES
    )
    conversion = Conversion(source=tmp_path / "theirs", output=tmp_path / "ours", flags=("", ""))
    needed = {"micro_batch_size": 1, "lr": 1, "train_iters": 1, "data_path": ["none"]}
    lines = list(convert(conversion, lambda found: Config.of(**needed, **found)))
    flags = (
        f"--use-checkpoint-args --load {tmp_path / 'ours'} --micro-batch-size 2 --lr {LR} "
        f"--train-iters 20 --weight-decay {DECAY} --adam-beta2 0.95 --clip-grad 0 --data-path none "
        f"--attention-dropout 0 --hidden-dropout 0 --zero-stage {zero_stage} "
        "--no-load-rng --override-opt_param-scheduler"
    ).split()
    config, _ = parse_config(flags, defaults=checkpoint_flags(flags).flags)
    decided = plan(config, world_size=1, vocab_size=VOCAB, device="cpu")
    engine, state = our_engine(decided), TrainState()
    resume(engine, decided, state, choose_checkpoint(decided))
    assert state.iteration == 9
    assert f"--load {tmp_path / 'ours'} --no-load-rng --override-opt_param-scheduler" in lines[1]
    engine.set_lr(LR)
    engine.set_weight_decay(DECAY)
    following = range(TAKEN, TAKEN + 4)
    ours = [float(engine.train_batch(iter([gpt_batch(rows(n))]))) for n in following]
    without = copy.deepcopy(model)
    theirs = their_steps(model, optimizer, following)
    assert ours == pytest.approx(theirs, rel=1e-5)
    # The states matter: without them the second step is another one.
    anew = torch.optim.AdamW(without.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    assert their_steps(without, anew, following)[1:] != pytest.approx(theirs[1:], rel=1e-3)
