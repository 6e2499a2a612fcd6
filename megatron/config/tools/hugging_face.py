"""Flags of the tools that convert to Hugging Face transformers and back."""

from dataclasses import dataclass
from typing import Literal

from megatron.common.registry import EXPORTERS
from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A checkpoint to be written for transformers. The tokenizer is the training run's."""

    load: str
    """The --save directory of a run, of which the newest checkpoint is read, or the folder of one
    checkpoint."""

    save: str
    """Folder to write; it must be new or empty."""

    exporter: str = setting("transformers", names=EXPORTERS)
    """Format to write: transformers, safetensors with our own names of parameters, NeMo's .nemo
    archive or mp_autoresume checkpoint (nemo, nemo-autoresume), or a plugin exporter's."""

    model_type: str | None = None
    """Model type in transformers (default: the first that can express the network)."""

    target_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, older=("--torch-dtype",))
    """Dtype of the weights (default: as in training)."""

    chat_template: str | None = None
    """File with the Jinja chat template that the model was trained with, written with the tokenizer
    (default: the template of the training conversations, recorded in the checkpoint, or else the
    tokenizer's)."""

    replace_chat_template: bool = False
    """Write the template of --chat-template even if the training conversations had another."""

    max_shard_size: str = "5GB"
    """Maximum size of a file of weights, such as 5GB or 500MB; a larger tensor gets a separate
    file."""

    without_mtp: bool = False
    """Leave out the layers of multi-token prediction, which most model types do not have. The
    network predicts the next token without them."""

    verify: bool = True
    """Skip the check that runs both models on a sample and refuses to write one whose logits differ.
    The check takes the memory of one model in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters to be written for PEFT."""

    load: str
    """The --save directory of a run with --lora-rank, of which the newest checkpoint is read, or
    the folder of one checkpoint."""

    save: str
    """Folder to write; it must be new or empty."""

    base_model: str = ""
    """Folder, or name on the hub, of the model without adapters, by which PEFT finds it."""

    model_type: str | None = None
    """Model type in transformers (default: the first that can express the network)."""


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
    """Run the tokenizer's custom Python code, if it has any. Custom code of a model is never
    run."""

    target_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, older=("--torch-dtype",))
    """Dtype of the next run (default: config.json's). The weights are stored in fp32, without
    loss."""

    seq_length: int | None = None
    """Sequence length of the next run (default: the model's maximum length, but at most 4096)."""

    with_mtp: bool = False
    """Import the layers of multi-token prediction too, which files may have after the last layer, to
    train them further."""

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
    """Must be 1: transformers shards a model when it loads it."""

    target_pp: int = setting(1, flag="--target_pp")
    """Must be 1, likewise."""

    for_release: bool = setting(False, flag="--for_release")
    """Omit the training progress from the model card."""
