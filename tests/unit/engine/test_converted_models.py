"""From an engine to transformers and into engines of other kinds."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from checkpoints import whole_weights
from tiny import tiny_config, tiny_plan
from transformers import AutoModelForCausalLM

from megatron.checkpointing.conversion.export import Export, ExportOptions, export
from megatron.checkpointing.hugging_face.import_model import ImportOptions, import_model
from megatron.checkpointing.manifest import Manifest, read_manifest, record_file, write_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.tensor_parallel.sharding import shard_of
from megatron.tokenizer.types.null import NullTokenizer

NETWORK = [
    *("--position-embedding-type", "rotary", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--make-vocab-size-divisible-by", "1", "--pad-vocab-size-to", "11"),
]


@pytest.mark.parametrize("saving", [["--zero-stage", "3"], ["--bf16", "--zero-stage", "2"]])
def test_what_an_engine_saved_is_evaluated_by_others(build, micro_batch, tmp_path, saving):
    flags = [*NETWORK, *saving]
    engine = build(*flags)
    engine.train_batch(iter([micro_batch(0)]))
    engine.save(tmp_path / "run", "global_step1", {})
    folder = tmp_path / "run" / "global_step1"
    named = engine.module.named_parameters()
    manifest = Manifest(
        state=TrainState(iteration=1, samples=1, tokens=1, valid_samples=1, skipped=1),
        plan=json.loads(json.dumps(tiny_plan(*flags).to_dict())),
        config=asdict(tiny_config(*flags)),
        versions={},
        partition_dims={name: shard.dim for name, p in named if (shard := shard_of(p))},
        files=tuple(map(record_file, sorted(folder.iterdir()))),
    )
    write_manifest(folder, manifest)
    arguments = {"tokenizer_type": "NullTokenizer", "vocab_size": 10}
    job = Export(
        source=folder,
        manifest=manifest,
        tokenizer=NullTokenizer(10),
        tokenizer_arguments=arguments,
        options=ExportOptions(),
    )
    written = export(job, tmp_path / "hf")
    assert written.dtype == ("bf16" if "--bf16" in saving else "fp32")
    assert all(one.is_equal for one in written.measured)

    imported = import_model(tmp_path / "hf", tmp_path / "ours", ImportOptions())
    again = read_manifest(imported.folder)
    weights = whole_weights(imported.folder, again)
    for name, weight in whole_weights(folder, manifest).items():
        assert torch.equal(weights[name], weight.float()), name

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    batch = micro_batch(1)
    tokens, labels = batch["tokens"], batch["labels"]
    with torch.no_grad():
        logits = reference(tokens).logits
    expected = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    for kind in ([], ["--zero-stage", "3"], ["--bf16", "--zero-stage", "1"]):
        other = build(*NETWORK, *kind)
        other.load_full(read_checkpoint(imported.folder, again, optimizer=False), optimizer=False)
        found = float(other.evaluate(iter([micro_batch(1)]), 1))
        assert found == pytest.approx(expected, rel=2e-2 if "--bf16" in kind else 1e-5), kind
