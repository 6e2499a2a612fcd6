"""The keys of DeepSpeed's JSON by section: a misspelled key is refused with the nearest known one.

DeepSpeed drops unknown top-level keys silently and refuses nested ones only after the engine has
been given the JSON. The table matches the installed version: a test compares the two. Here is also what
its values decide together: whether DeepSpeed takes its bf16 optimizer, and can reduce in buckets.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.parsing.json_tree import value_at

_QUANTIZED = "enabled num_bits q_type q_groups quantized_initialization post_init_quant"

_KEYS = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation gradient_clipping gradient_allreduce_op
        gradient_predivide_factor prescale_gradients communication_data_type
        seq_parallel_communication_data_type disable_allgather data_types fp16 bf16 torch_autocast
        zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer
        scheduler activation_checkpointing aio checkpoint datastates_ckpt pipeline tensor_parallel
        expert_parallel use_data_before_expert_parallelism curriculum_learning data_efficiency
        dataloader_drop_last hybrid_engine weight_quantization compile autotuning flops_profiler
        comms_logger tensorboard wandb comet csv_monitor timers wall_clock_breakdown
        memory_breakdown steps_per_print dump_state log_level disable_python_gc vocabulary_size
    """,
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
    """,
    "bf16": """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states
    """,
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size
        use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
        offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory
        cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold
        stage3_param_persistence_threshold model_persistence_threshold
        stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters
        max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save
        stage3_gather_16bit_weights_on_model_save module_granularity_threshold
        stage3_module_granularity_threshold use_all_reduce_for_fetch_params
        stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
        stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    """,
    "zero_optimization.offload_param": (
        "device nvme_path buffer_count buffer_size max_in_cpu pin_memory"
    ),
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio
        super_offload cpuadam_cores_perc
    """,
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio
        full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch
    """,
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "activation_checkpointing": """
        partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints
        synchronize_checkpoint_boundary profile
    """,
    "aio": ("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "checkpoint": """
        tag_validation load_universal use_node_local_storage parallel_write writer
        checkpoint_serialization
    """,
    "checkpoint.parallel_write": "pipeline_stage",
    "pipeline": """
        stages partition seed_layers activation_checkpoint_interval pipe_partitioned
        grad_partitioned use_reentrant
    """,
    "tensor_parallel": """
        dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend
        tensor_parallel tp injection_policy_tuple partition_config preset_model
        keep_module_on_host replace_with_kernel_inject kernel_inject
    """,
    "tensor_parallel.tensor_parallel": "tp_size tp_grain_size mpu tp_group",
    "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    "curriculum_learning": """
        enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config
    """,
    "curriculum_learning.schedule_config": (
        "total_curriculum_step difficulty_step root_degree difficulty max_step"
    ),
    "data_efficiency": "enabled seed data_sampling data_routing",
    "data_efficiency.data_sampling": (
        "enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching"
    ),
    "data_efficiency.data_routing": "enabled random_ltd",
    "hybrid_engine": """
        enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph
    """,
    "weight_quantization": _QUANTIZED,
    "compile": """
        deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation
        offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log
        offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather
        sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes
    """,
    "autotuning": """
        enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric
        metric_path model_info model_info_path mp_size arg_mappings max_train_batch_size
        min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
        num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials
    """,
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
    """,
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": """
        enabled samples_log_interval project workspace api_key experiment_name experiment_key
        online mode
    """,
    "csv_monitor": "enabled output_path job_name",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
}

SECTIONS: Mapping[str, frozenset[str]] = {
    section: frozenset(keys.split()) for section, keys in _KEYS.items()
}
"""Known keys by the dotted path of their section; what is under other keys is free."""

_NOT_TAKEN = {
    "bfloat16": 'write "bf16", the name that --bf16 owns',
    "amp": "this DeepSpeed has no apex AMP; write --bf16 or --fp16",
    "sequence_parallel_size": "write --ds-sequence-parallel-size",
    "data_parallel_size": "the number of processes decides it; take the key out",
    **dict.fromkeys(
        (
            *("nebula", "compression_training", "quantize_training", "sparse_gradients"),
            *("eigenvalue", "sparse_attention", "graph_harvesting", "progressive_layer_drop"),
            *("zero_optimization.mics_shard_size", "zero_optimization.zeropp_loco_param"),
            "zero_optimization.mics_hierarchical_params_gather",
        ),
        "this DeepSpeed has removed it; take the key out",
    ),
    "elasticity": "it lets the number of processes choose the batch; take the key out, and write "
    "--elastic, which keeps --global-batch-size and chooses the number of replicas",
}
"""Keys of other versions, by dotted path, and what to do about each."""

_RENAMED = {"aio.thread_count": "aio.intra_op_parallelism"}
"""Keys of older versions, by dotted path, and what they are called now."""


def renamed_keys(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of older versions in `content`, each with its name now, as dotted paths."""
    return {
        older: now
        for older, now in _RENAMED.items()
        if isinstance(block := content.get(older.partition(".")[0]), Mapping)
        and older.partition(".")[2] in block
    }


def key_notices(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key of an older version."""
    for older, now in renamed_keys(content).items():
        yield f"{older} in DeepSpeed's JSON is now {now}, which it sets"


def key_problems(block: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of every key of DeepSpeed's JSON that would have no effect, and its problem.

    Args:
        section: the dotted path of `block`.
    """
    for key, value in block.items():
        path = f"{section}.{key}" if section else key
        if path in _RENAMED:
            continue
        if path in _NOT_TAKEN:
            yield path, _NOT_TAKEN[path]
        elif key not in SECTIONS[section]:
            yield path, "unknown key" + _hint(key, section)
        elif path in SECTIONS and isinstance(value, Mapping):
            yield from key_problems(value, path)


def _hint(key: str, section: str) -> str:
    if near := difflib.get_close_matches(key, SECTIONS[section], n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    homes = sorted(home or "the top" for home, keys in SECTIONS.items() if key in keys)
    # "enabled" and its like are keys of many sections, so that none of them is a hint.
    return f"; it belongs in {homes[0]}" if len(homes) == 1 else "; take it out"


def has_bf16_optimizer(merged: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed takes its bf16 optimizer: ZeRO 1 on the device, with fp32 sums of bf16 gradients.

    Args:
        merged: what DeepSpeed gets.
    """
    device = value_at(merged, "zero_optimization.offload_optimizer.device", "none")
    return (
        bool(value_at(merged, "bf16.enabled", False))
        and value_at(merged, "data_types.grad_accum_dtype") == "fp32"
        and value_at(merged, "zero_optimization.stage", 0) == 1
        and device == "none"
    )


def reduces_in_fp32_at_once(merged: Mapping[str, Any]) -> bool:
    """Whether the bf16 optimizer has each gradient in its sum as it comes, and plain sums are reduced.

    Only then can buckets be reduced during the backward pass.

    Args:
        merged: what DeepSpeed gets.
    """
    return (
        has_bf16_optimizer(merged)
        and bool(value_at(merged, "bf16.immediate_grad_update", False))
        and value_at(merged, "communication_data_type") == "fp32"
        and value_at(merged, "gradient_predivide_factor", 1) == 1
        and not value_at(merged, "prescale_gradients", False)
    )
