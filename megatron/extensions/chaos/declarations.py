"""The hook of --chaos, without torch."""

from megatron.common.registry import FLAG_HOOKS
from megatron.config.plugins import RunHook
from megatron.extensions.chaos.flags import chaos_problems

FLAG_HOOKS.declare("chaos", "megatron.extensions.chaos.hook", RunHook("chaos", chaos_problems))
