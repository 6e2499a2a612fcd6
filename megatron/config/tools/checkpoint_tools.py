"""Flags of the tools that inspect and convert checkpoints."""

from dataclasses import dataclass
from typing import Literal

from megatron.common.registry import NETWORKS
from megatron.config.parsing.declaration import setting


def architectures() -> dict[str, str]:
    """Return the names of networks by --model-type, without those that count as another one."""
    names = NETWORKS.with_extensions()
    return {name.upper(): name for name in names if not NETWORKS.get_class(name).in_place_of}


@dataclass(frozen=True, kw_only=True)
class UniversalConfig:
    """A checkpoint to be converted to a universal one, without a layout."""

    input_folder: str = setting(flag="--input_folder")
    """Folder of one checkpoint: global_stepN in the directory of --save."""

    output_folder: str = setting(flag="--output_folder")
    """Folder to write; latest_universal next to it then names it."""

    num_extract_workers: int = setting(4, flag="--num_extract_workers")
    """Processes that read and write; each holds one tensor. There is one pass over the tensors, so
    the larger of this and --num_merge_workers is taken."""

    num_merge_workers: int = setting(2, flag="--num_merge_workers")
    """See --num_extract_workers."""


@dataclass(frozen=True, kw_only=True)
class LookConfig:
    """The checkpoint to inspect."""

    path: str
    """Folder of one checkpoint, or directory of several, of which the newest is read; may be given
    as the first argument."""

    parameters: bool = False
    """Also list every tensor."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """A checkpoint to be written in the files of Megatron-LM."""

    input_folder: str = setting(flag="--input_folder")
    """Folder of one checkpoint: global_stepN in the directory of --save."""

    output_folder: str = setting(flag="--output_folder")
    """Directory to write, which is a --load of Megatron-LM's."""

    target_tp: int = setting(1, flag="--target_tp")
    """Tensor-parallel ranks of the run that will load it."""

    target_pp: int = setting(1, flag="--target_pp")
    """Pipeline stages of that run."""

    for_release: bool = setting(False, flag="--for_release")
    """Omit the number of consumed samples."""


@dataclass(frozen=True, kw_only=True)
class FileConfig:
    """The file of a checkpoint to inspect."""

    file: str
    """A file that torch saved; may be given as the first argument."""


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """The checkpoint whose files to inspect."""

    folder: str
    """Folder of one checkpoint, or directory of several, of which the newest is taken."""

    target_tp: int | None = setting(None, flag="--target_tp")
    """Show the shapes for this tensor-parallel size (default: the checkpoint's)."""

    target_pp: int | None = setting(None, flag="--target_pp")
    """Show the layers of this number of pipeline stages (default: the checkpoint's)."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """A checkpoint to be resharded to another layout; axes without a flag stay as they are."""

    input_folder: str = setting(flag="--input_folder")
    """Folder of one checkpoint: global_stepN in the directory of --save."""

    output_folder: str = setting(flag="--output_folder")
    """Directory to write the checkpoint in, as a run writes to --save."""

    target_tp: int | None = setting(None, flag="--target_tp")
    """Tensor-parallel ranks."""

    target_pp: int | None = setting(None, flag="--target_pp")
    """Pipeline stages."""

    target_dp: int | None = setting(None, flag="--target_dp")
    """Replicas."""


@dataclass(frozen=True, kw_only=True)
class ConversionConfig:
    """A checkpoint of one system to be written as one of another."""

    model_type: Literal["GPT", "BERT", "T5", "RETRO"]
    """Architecture of the network; another one in the files is an error."""

    load_dir: str
    """Directory of the checkpoint."""

    save_dir: str
    """Directory to write."""

    loader: (
        Literal[
            "own",
            "megatron",
            "torch_dist",
            "bigscience",
            "llama_meta",
            "hugging_face",
            "llama2_hf",
        ]
        | None
    ) = None
    """Format of the files (default: detected): this program's (own), Megatron-LM's (megatron, or
    torch_dist for its distributed checkpoints), its DeepSpeed forks' (bigscience), Meta's for Llama
    (llama_meta), or transformers' (hugging_face, llama2_hf)."""

    saver: Literal["own", "megatron"] | None = None
    """Format to write (default: megatron for mp_rank files of Megatron-LM, else own)."""

    ckpt_format: Literal["torch", "torch_dist"] = "torch"
    """Format of Megatron-LM's files: mp_rank files for given ranks (torch), or distributed ones that
    any ranks load (torch_dist), also of experts."""

    target_tensor_parallel_size: int | None = None
    """Tensor-parallel ranks that Megatron-LM's files are written for (default: 1). Our own files
    are written for any."""

    target_pipeline_parallel_size: int | None = None
    """Pipeline stages that they are written for (default: 1)."""


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """A dense checkpoint to be written with experts."""

    load: str
    """The --save directory of a run, of which the newest checkpoint is read, or the folder of one."""

    save: str
    """Directory to write, which is a --load of training with --finetune."""

    moe_upcycling_granularity: int = 1
    """Slices of an MLP: each expert has one of them (default: a complete copy)."""


@dataclass(frozen=True, kw_only=True)
class PartitionsConfig:
    """A checkpoint of Megatron-LM's in --load to be written to --save for other ranks."""

    model_type: Literal["GPT", "BERT", "T5", "RACE", "MNLI", "QQP"]
    """Architecture of the network: GPT, BERT or T5; classifiers are not merged."""

    target_tensor_model_parallel_size: int = 1
    """Tensor-parallel ranks to write for."""

    target_pipeline_model_parallel_size: int = 1
    """Pipeline stages to write for."""
