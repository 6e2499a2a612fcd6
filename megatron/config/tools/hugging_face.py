"""Flags of the tools that convert to Hugging Face transformers and back."""

from dataclasses import dataclass
from typing import Literal

from megatron.common.registry import EXPORTERS
from megatron.config.parsing.declaration import setting

ModelType = Literal[
    "gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "megatron-bert"
]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A checkpoint to be written for transformers. The tokenizer is that of the training."""

    load: str
    """Directory that a run saved to, of which the newest checkpoint is taken, or the folder of one
    checkpoint."""

    save: str
    """Folder to write; it must be new or empty."""

    exporter: str = setting("transformers", names=EXPORTERS)
    """Format to write: transformers, safetensors with our own names of parameters, NeMo's .nemo
    archive or mp_autoresume checkpoint (nemo, nemo-autoresume), or that of a plugin's exporter."""

    model_type: ModelType | None = None
    """Architecture of transformers' (default: the first that expresses the network)."""

    target_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, older=("--torch-dtype",))
    """Dtype of the weights (default: that of the training)."""

    chat_template: str | None = None
    """File with the Jinja template that the model was trained to answer; it becomes that of the
    written tokenizer (default: the template of the training conversations, which the checkpoint
    holds, or else the tokenizer's own)."""

    replace_chat_template: bool = False
    """Write the template of --chat-template though the training conversations had another."""

    max_shard_size: str = "5GB"
    """Size of a file of weights, at most, as 5GB or 500MB; a larger tensor has one of its own."""

    verify: bool = True
    """Skip the check that runs both models on a sample and refuses to write one whose logits differ.
    The check takes the memory of one model in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters to be written for PEFT."""

    load: str
    """Directory that a run with --lora-rank saved to, of which the newest checkpoint is taken, or
    the folder of one checkpoint."""

    save: str
    """Folder to write; it must be new or empty."""

    base_model: str = ""
    """Folder, or name on the hub, of the model without adapters, by which PEFT finds it."""

    model_type: ModelType | None = None
    """Architecture of transformers' (default: the first that expresses the network)."""


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """A folder of transformers' to begin a run from."""

    load: str
    """Folder with config.json and the weights, in safetensors files or in torch's older ones."""

    save: str
    """Directory to write the checkpoint in, for --load and --finetune of pretrain_gpt.py."""

    tokenizer_name_or_path: str | None = None
    """Tokenizer of the model: a directory, or a name on the Hugging Face hub
    (default: that in --load, if there is one)."""

    trust_remote_code: bool = False
    """Run the Python code that comes with the tokenizer, if it needs some. Code that comes with a
    model is never run."""

    target_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, older=("--torch-dtype",))
    """Dtype of the run to come (default: that of config.json). The weights are kept in 32
    bits, which changes none."""

    seq_length: int | None = None
    """Tokens of a sample of the run to come (default: what the model was made for, but 4096 at
    most)."""

    verify: bool = True
    """Skip the check that runs both models on a sample and refuses to write one whose logits differ.
    The check takes the memory of one model in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """A checkpoint to be written for transformers, with the flags of older scripts."""

    input_folder: str = setting(flag="--input_folder")
    """Folder of one checkpoint, global_stepN, or directory of several, of which the newest is
    taken."""

    output_folder: str = setting(flag="--output_folder")
    """Folder to write; it must be new or empty."""

    target_tp: int = setting(1, flag="--target_tp")
    """Must be 1: transformers divides a model when it loads it."""

    target_pp: int = setting(1, flag="--target_pp")
    """Must be 1, likewise."""

    for_release: bool = setting(False, flag="--for_release")
    """Leave out of the card how far the model was trained."""
