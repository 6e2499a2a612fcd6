"""How a checkpoint's model reads conversations, and texts with a gap."""

from dataclasses import replace

from megatron.config.data.objective import plan_objective
from megatron.config.data.tokenizer import gpt_tokenizer_arguments
from megatron.data.datasets.fim import FimTokens, fim_tokens
from megatron.inference.loading.model_source import ModelSource
from megatron.tokenizer.build import keywords
from megatron.tokenizer.chat import read_chat_template
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.tokenizer import Tokenizer


def chat_prompts_of(
    source: ModelSource, tokenizer: Tokenizer, file: str | None
) -> ChatPrompts | None:
    """Return how conversations are read, or None without a chat template.

    The template is that in `file`, or the one that the model was trained with as its checkpoint
    records it, or the tokenizer's.

    Raises:
        DataError: the file cannot be read.
    """
    flags = gpt_tokenizer_arguments(source.config.tokenizer)
    is_pretrained = flags["tokenizer_type"] == "PretrainedFromHF"
    name = flags["tokenizer_name_or_path"] if is_pretrained else None
    template = read_chat_template(file, name, keywords(flags.get("tokenizer_kwargs") or ()))
    recorded = source.manifest.plan.get("data", {}).get("chat_template", "")
    if recorded and file is None:
        template = replace(template, source=recorded)
    return ChatPrompts(tokenizer, template) if template.source else None


def fim_tokens_of(source: ModelSource, tokenizer: Tokenizer) -> FimTokens | None:
    """Return the special tokens of fill-in-the-middle; None if the model has not learned it.

    A model that has seen the suffix in front of the prefix alone has not learned the other order.
    """
    name = source.manifest.plan.get("objective", {}).get("name")
    if name != "gpt":
        return None
    objective = plan_objective(source.config.objective, source.config.fim, name)
    if not objective.fim.rate or objective.fim.spm_rate == 1:
        return None
    return fim_tokens(objective.fim, tokenizer)
