"""A misspelled key of DeepSpeed's JSON is refused at every depth, before anything is built."""

import json

import pytest
from problems import require_problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError, ExitCode
from megatron.config.parallelism.deepspeed_keys import SECTIONS, key_problems


@pytest.mark.parametrize(
    ("content", "path", "instead"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", "stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry",
            "pin_memory",
        ),
        ({"fp16": {"loss_scale_windw": 5}}, "fp16.loss_scale_windw", "loss_scale_window"),
        (
            {"curriculum_learning": {"schedule_config": {"dificulty": [8]}}},
            "curriculum_learning.schedule_config.dificulty",
            "difficulty",
        ),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype", "grad_accum"),
        ({"overlap_comm": True}, "overlap_comm", "zero_optimization"),
        ({"stage": 2}, "stage", "zero_optimization"),
        ({"bfloat16": {"enabled": True}}, "bfloat16", "bf16"),
        ({"elasticity": {"enabled": False}}, "elasticity", "take the key out"),
        ({"no_such_thing": 1}, "no_such_thing", "take it out"),
    ],
)
def test_a_misspelled_key_is_refused_with_what_to_write(content, path, instead):
    ((found, problem),) = key_problems(content)
    assert found == path
    assert instead in problem


def test_all_misspelled_keys_are_reported_at_once_with_the_other_problems(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"fp61": {}, "zero_optimization": {"stge": 2}, "fp16": 1}))
    with pytest.raises(ConfigError) as caught:
        tiny_plan("--deepspeed_config", str(file), "--seq-length", "-1")
    assert caught.value.exit_code == ExitCode.MISUSED
    message = str(caught.value)
    for part in (str(file), "fp61", "zero_optimization.stge", "fp16 is 1", "--seq-length -1"):
        assert part in message


def test_the_older_name_of_a_key_sets_it_with_a_notice(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"aio": {"thread_count": 4, "queue_depth": 8}}))
    plan = tiny_plan("--deepspeed_config", str(file))
    assert plan.deepspeed["aio"] == {"intra_op_parallelism": 4, "queue_depth": 8}
    require_problem("aio.thread_count … aio.intra_op_parallelism", plan.notices)


def test_what_stands_under_free_keys_is_not_looked_at():
    content = {
        "optimizer": {"type": "X", "params": {"anything": 1}},
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"metrics": {"mine": {}}}}},
        "checkpoint": {"writer": {"anything": {}}},
        "fp16": "auto",
    }
    assert not [*key_problems(content)]


class _Recorder(dict):
    """A JSON object that notes which keys DeepSpeed looks up in it."""

    def __init__(self, content, path, looked_up):
        super().__init__(
            {
                key: _Recorder(value, f"{path}.{key}".lstrip("."), looked_up)
                if isinstance(value, dict)
                else value
                for key, value in content.items()
            }
        )
        self.path, self.looked_up = path, looked_up

    def _note(self, key):
        self.looked_up.setdefault(self.path, set()).add(key)

    def get(self, key, default=None):
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key):
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self._note(key)
        return super().__getitem__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


READ_BY_HAND = {
    "data_types": {},
    "torch_autocast": {"enabled": False},
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "x", "params": {}},
    "activation_checkpointing": {},
    "aio": {},
    "checkpoint": {"parallel_write": {}},
    "autotuning": {},
    "flops_profiler": {},
    "data_efficiency": {"data_sampling": {}, "data_routing": {}},
    "timers": {},
}
"""Sections whose keys DeepSpeed looks up one by one; it has pydantic models of the others."""

NOT_OF_A_RUN = {"curriculum_learning", "curriculum_learning.schedule_config"}
"""Sections that our own training loop reads, and DeepSpeed knows no more."""


def looked_up_keys():
    from deepspeed.runtime.config import DeepSpeedConfig

    looked_up = {}
    config = DeepSpeedConfig(_Recorder({"train_batch_size": 1, **READ_BY_HAND}, "", looked_up))
    # Looked up only where processes have met, as in a test that ran before in this process.
    looked_up[""] |= {"sequence_parallel_size", "data_parallel_size"}
    # Of the pipeline's engine, which adds one to the defaults of the configuration.
    looked_up["pipeline"] = {*config.pipeline, "use_reentrant"}
    return looked_up


def models():
    """Return DeepSpeed's pydantic models by the section that each of them reads."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import leaf_module_config, offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": leaf_module_config.DeepSpeedZeroLeafModuleConfig,
        "tensor_parallel": TPTrainingConfig,
        "tensor_parallel.tensor_parallel": TPConfig,
        "tensor_parallel.tp": TPConfig,
        "hybrid_engine": HybridEngineConfig,
        "weight_quantization": WeightQuantConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "comet": monitor.CometConfig,
        "csv_monitor": monitor.CSVConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def keys_of(model):
    aliases = {field.alias for field in model.model_fields.values() if field.alias}
    return {*model.model_fields, *aliases}


def test_the_table_is_that_of_the_installed_deepspeed():
    looked_up = looked_up_keys()
    known = {section: keys_of(model) for section, model in models().items()}
    known["optimizer"] = looked_up["optimizer"]
    for section in (*READ_BY_HAND, "data_efficiency.data_sampling", "data_efficiency.data_routing"):
        known[section] = looked_up[section]
    known["checkpoint.parallel_write"] = looked_up["checkpoint.parallel_write"]
    known["pipeline"] = looked_up["pipeline"]
    refused = dict(key_problems(dict.fromkeys(looked_up[""], {})))
    known[""] = (looked_up[""] - refused.keys()) | {"curriculum_learning"}
    assert {s: k for s, k in SECTIONS.items() if s not in NOT_OF_A_RUN} == known
    # All that is refused has a sentence of its own: none of it is merely unknown.
    assert not [problem for problem in refused.values() if "unknown key" in problem]
