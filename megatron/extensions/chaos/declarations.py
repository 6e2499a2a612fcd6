"""The hook of --chaos, without torch."""

from megatron.common.registry import HOOKS
from megatron.config.plugins import RunHook
from megatron.extensions.chaos.flags import chaos_problems

HOOKS.declare("chaos", "megatron.extensions.chaos.hook", RunHook("chaos", chaos_problems))
