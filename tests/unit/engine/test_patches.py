"""Names of DeepSpeed and torch that patches/ and its neighbours depend on still exist."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.config.parallelism.deepspeed_keys import has_bf16_optimizer
from megatron.engine.deepspeed import patches

NAMES = {
    "torch.distributed.distributed_c10d": (
        *("_world", "pg_map", "_set_pg_timeout", "_get_default_store"),
        *("default_pg_timeout", "default_pg_nccl_timeout"),
    ),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.comm.torch": ("__compatible_ops__",),
    "deepspeed.utils.groups": (
        *("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS"),
        *("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS"),
        "expert_tensor_parallel_world_size",
    ),
    "deepspeed.runtime.bf16_optimizer": (
        *("_hp_mapping", "_hp_grad", "_global_grad_norm", "get_grads_for_norm"),
        *("bf16_groups", "fp32_groups_gradients", "real_dp_process_group"),
        *("get_global_norm_of_tensors", "_update_hp_grad", "clear_hp_grads", "update_hp_grads"),
        *("fp32_groups_has_gradients", "fp32_groups_gradient_flat_partition"),
        *("bf16_partitioned_groups", "bf16_groups_flat", "see_memory_usage"),
    ),
    "deepspeed.runtime.engine": (
        *("_global_grad_norm", "_copy_recovery_script", "_get_all_ckpt_names"),
        *("_get_all_zero_checkpoints", "_get_ckpt_name", "_get_zero_ckpt_name"),
        *("MoE", "has_moe_layers", "_reduce_expert_gradients"),
        *("clip_fp32_gradients", "enable_backward_allreduce", "checkpoint_engine"),
        *("basic_optimizer", "save_zero_checkpoint", "is_fp16_supported"),
        *("allreduce_no_retain", "gradient_predivide_factor", "communication_data_type"),
    ),
    "deepspeed.runtime.pipe.engine": (
        *("_INSTRUCTION_MAP", "_hp_grad", "pipeline_enable_backward_allreduce"),
        *("reset_activation_shape", "_exec_forward_pass", "_exec_backward_pass"),
        *("_running_engine_backward", "ReduceTiedGrads"),
        *("_train_schedule", "_inference_schedule", "pipe_buffers", "grad_layer"),
    ),
    "deepspeed": ("PipelineEngine",),
    "deepspeed.runtime.pipe.module": (
        *("_synchronize_tied_weights", "_partition_layers", "_set_bounds", "ckpt_layer_path_list"),
        *("_build", "_topo", "forward_funcs", "_grid"),
    ),
    "deepspeed.runtime.state_dict_factory": ("check_ckpt_list", "ckpt_list"),
    "deepspeed.runtime.zero.stage_1_and_2": (
        *("_global_grad_norm", "_zero_padding", "_release_preflattened_grad_buffers"),
        *(
            "reset_cpu_buffers",
            "averaged_gradients",
            "get_grad_norm_direct",
            "norm_for_param_grads",
            "params_in_partition",
            "scaled_global_norm",
        ),
        *("complete_grad_norm_calculation_for_cpu_offload", "get_param_id", "param_id"),
        *("round_robin_bit16_groups", "round_robin_bit16_offsets", "real_dp_process_group"),
        *("update_lp_params", "scaled_global_norm"),
    ),
    "deepspeed.runtime.zero.stage3": (
        *("_global_grad_norm", "_unflatten_partitioned_parameters", "get_grad_norm_direct"),
        *("complete_grad_norm_calculation_for_cpu_offload", "norm_for_param_grads", "get_param_id"),
        *("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_groups"),
        *(
            "_get_norm_groups",
            "ds_process_group",
            "checkpoint_event_prologue",
            "checkpoint_event_epilogue",
        ),
    ),
    "deepspeed.utils.mixed_precision_linkage": ("_hp_mapping", "_index_in_param_group"),
    "deepspeed.utils.tensor_fragment": ("get_lp_grad_fragment", "lp_fragment_address"),
}
"""Module -> names in its source."""

OF_TORCH = ("_foreach_norm", "_foreach_mul_")


def identifiers(source: str) -> set[str]:
    """Return all names, attributes, definitions and strings of `source`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("attr", "id", "name", "value"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec
    assert spec.origin
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", NAMES)
def test_the_installed_release_has_every_name(module):
    assert {*NAMES[module]} - identifiers(source_of(module)) == set()


@pytest.mark.parametrize("name", OF_TORCH)
def test_torch_has_every_name(name):
    assert hasattr(torch, name)


def test_a_name_that_is_gone_is_found():
    module, name = "deepspeed.ops", "__compatible_ops__"
    source = source_of(module).replace(name, "_collect")
    assert {*NAMES[module]} - identifiers(source) == {name}


def test_every_private_name_of_the_patches_is_looked_for():
    files = sorted(Path(patches.__path__[0]).glob("*.py"))
    tree = ast.parse("\n".join(file.read_text(encoding="utf-8") for file in files))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
    }
    private = {name for name in used if name.startswith("_") and not name.endswith("__")} - own
    assert private - {*OF_TORCH}.union(*NAMES.values()) == set()


def test_gradients_of_a_lone_replica_stay_where_they_are(build, micro_batch, monkeypatch, tmp_path):
    copied = []
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True, "immediate_grad_update": False}}))
    monkeypatch.setattr(
        DeepSpeedEngine, "allreduce_and_copy", lambda self, bucket, *_: copied.append(bucket)
    )
    engine = build("--bf16", "--deepspeed_config", str(file))
    engine.train_batch(iter([micro_batch(0)]))
    assert not copied

    monkeypatch.setattr(DeepSpeedEngine, "gradient_predivide_factor", lambda self: 2.0)
    engine.train_batch(iter([micro_batch(0)]))
    assert copied


@pytest.mark.parametrize(
    ("flags", "sums"),
    [
        (("--bf16",), "fp32"),
        (("--bf16",), "bf16"),
        (("--bf16", "--zero-stage", "2"), "fp32"),
        ((), "fp32"),
    ],
)
def test_the_json_says_which_optimizer_deepspeed_takes(build, tmp_path, flags, sums):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"data_types": {"grad_accum_dtype": sums}}))
    engine = build(*flags, "--deepspeed_config", str(file))._engine
    assert isinstance(engine.optimizer, BF16_Optimizer) == has_bf16_optimizer(engine.config)
