"""Names of other trainers are answered with flags that are accepted here."""

import re

import pytest
from tiny import tiny_argv

from megatron.common.errors import ConfigError
from megatron.config.config import (
    ANY_NETWORK,
    SECTIONS,
    parse_config,
    parse_config_for_checkpoint,
)
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.foreign_flags.trainers import TRAINER_NAMES
from megatron.config.inference.generation import GenerationConfig
from megatron.config.parsing.flags import switch_words
from megatron.config.parsing.near_misses import OTHER_NAMES, plain
from megatron.config.tools.preprocess import PreprocessConfig, TokenizerTrainingConfig

TRAINER = """
    output_dir learning_rate per_device_train_batch_size num_train_epochs lr_scheduler_type
    logging_steps save_steps save_total_limit evaluation_strategy max_grad_norm
    gradient_checkpointing report_to resume_from_checkpoint packing tf32 fsdp remove_unused_columns
    model_name_or_path do_train eval_steps max_steps
    dataloader_num_workers block_size warmup_ratio torch_compile lora_r max_seq_length
"""
NANOGPT = """
    n_head n_embd n_layer learning_rate beta2 grad_clip out_dir always_save_checkpoint wandb_log
    init_from dtype max_iters dropout block_size warmup_iters
"""
LITGPT = """
    model_name precision train.epochs out_dir tokenizer_dir devices data resume num_nodes
    train.max_tokens
"""
TORCHTITAN = """
    training.seq_len parallelism.tensor_parallel_degree model.name checkpoint.enable optimizer.lr
"""
NEOX = """
    train_micro_batch_size_per_gpu gradient_clipping output-dir model steps train_batch_size
    max-epochs gpus
"""
NAMES = [*dict.fromkeys(f"{TRAINER} {NANOGPT} {LITGPT} {TORCHTITAN} {NEOX}".split())]
REFUSED = {plain(flag.option) for flag in LEGACY if flag.refused}
ACCEPTED = {*switch_words({**SECTIONS, "preprocessing": PreprocessConfig})} - REFUSED


def flags_in(text):
    # The launcher's own flag is not one of ours.
    return [plain(flag) for flag in re.findall(r"--[a-z][\w-]*", text) if flag != "--num_gpus"]


def problem_of(*words):
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(*words))
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_trainer_gets_a_flag_or_a_sentence(name):
    problem = problem_of(f"--{name}", "7")
    answer = problem.partition(f"--{name}")[2] or problem.partition(": ")[2]
    assert "--help" not in answer
    assert answer
    assert {*flags_in(answer)} <= ACCEPTED


@pytest.mark.parametrize("name", ["learning_rate", "n_embd", "train_batch_size", "fsdp"])
def test_a_key_of_a_file_gets_the_same_answer(name, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"training:\n  {name}: 7\n")
    problem = problem_of("--config", str(file))
    assert problem.startswith(f"{file}, line 2: unknown key {name}; write ")
    assert problem.endswith(TRAINER_NAMES[plain(name)].removeprefix("write --"))


def test_answers_name_flags_that_are_accepted():
    for name, answer in TRAINER_NAMES.items():
        assert {*flags_in(answer)} <= ACCEPTED, name
        assert f"--{name}" not in switch_words(SECTIONS), f"{name} needs no answer: it is a flag"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--deepspeed ds.json",
            "--deepspeed takes no value, not ds.json; write --deepspeed_config",
        ),
        ("--per_device_eval_batch_size 4", "write --eval-micro-batch-size"),
        ("--bf16 true", "--bf16 takes no value, not true; leave true out"),
        ("--optimizer adamww", "did you mean adamw?"),
        ("--optimizer ADAMWW", "did you mean adamw?"),
        ("--dataset openwebtext", "token files are named by --data-path"),
    ],
)
def test_values_of_other_trainers_get_an_answer(words, message):
    assert message in problem_of(*words.split())


@pytest.mark.parametrize(
    ("section", "others"),
    [
        (GenerationConfig, SECTIONS),
        (PreprocessConfig, {"tokenizer": TokenizerConfig}),
        (TokenizerTrainingConfig, {}),
    ],
)
def test_names_of_other_programs_are_answered_with_flags_of_the_tool(section, others):
    accepted = switch_words({**others, "own": section})
    for name, answer in OTHER_NAMES[section.__name__].items():
        assert {*flags_in(answer)} <= {plain(flag) for flag in accepted}, name
        assert f"--{name}" not in accepted, f"{name} needs no answer: it is a flag"


def test_generation_has_other_names_than_training():
    with pytest.raises(ConfigError, match="--max-tokens; write --out-seq-length"):
        parse_config_for_checkpoint(
            ["--max-tokens", "5"], ANY_NETWORK, {"generation": GenerationConfig}
        )
    assert problem_of("--max-tokens", "5").endswith("write --train-tokens")


def test_names_of_parts_are_read_without_case():
    config, _ = parse_config(tiny_argv("--optimizer", "AdamW", "--normalization", "rmsnorm"))
    assert config.optimizer.optimizer == "adamw"
    assert config.model.normalization == "RMSNorm"
    config, _ = parse_config(tiny_argv("--normalization", "layernorm"))
    assert config.model.normalization == "LayerNorm"
