"""Load the checkpoint of a server: engine, interfaces and page as its network declares."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.common.errors import raise_if_any
from megatron.common.registry import import_dotted
from megatron.config.architecture.architecture import network_named
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig, encoder_problems
from megatron.data.datasets.fim import FimTokens
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.encoder_runner import SerialEngine
from megatron.inference.loading.loaded_model import chat_prompts_of, fim_tokens_of, load_model
from megatron.inference.loading.model_source import ModelSource
from megatron.inference.server.app import INTERFACES, Interface
from megatron.inference.server.web.pages import GENERATION_PAGE
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A loaded network, and how it is served.

    Args:
        is_first: whether this process serves; other processes call `engine.follow`.
        page: HTML.
        chat: encodes conversations; None without a chat template.
        fim: special tokens of fill-in-the-middle; None if the model was not trained for it.
    """

    engine: InferenceEngine | SerialEngine
    tokenizer: Tokenizer
    is_first: bool
    interfaces: Sequence[Interface] = INTERFACES
    page: str = GENERATION_PAGE
    chat: ChatPrompts | None = None
    fim: FimTokens | None = None


def load_backend(
    source: ModelSource, generation: GenerationConfig, serving: ServingConfig
) -> Backend:
    """Load the network of a checkpoint.

    Raises:
        ConfigError: flags do not fit the network or the machine.
        CheckpointError: the checkpoint is damaged.

    Communication: every rank must call this, in step.
    """
    network = network_named(source.manifest.spec.architecture)
    if not network.served_in:
        return _prompts(source, generation, serving)
    raise_if_any(encoder_problems(serving, generation, network))
    backend: Backend = import_dotted(network.served_in)(source, generation)
    return backend


def _prompts(source: ModelSource, generation: GenerationConfig, serving: ServingConfig) -> Backend:
    loaded = load_model(source, generation, rows=source.config.training.micro_batch_size)
    is_first = loaded.is_first
    return Backend(
        engine=loaded.engine,
        tokenizer=loaded.tokenizer,
        is_first=is_first,
        chat=chat_prompts_of(source, loaded.tokenizer, serving.chat_template) if is_first else None,
        fim=fim_tokens_of(source, loaded.tokenizer) if is_first else None,
    )
