"""A plugin with a dataset, a hook and a metric, for the table of options."""

import logging

from megatron.common.registry import DATASETS, HOOKS, METRICS
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.training.loop.loop import Hook

log = logging.getLogger("megatron.option_plugin")


@DATASETS.register("option_dataset")
class OptionDataset(GPTDataset):
    def __getitem__(self, i):
        return {"tokens": super().__getitem__(i)["tokens"][::-1].copy()}


@HOOKS.register("option_hook")
class OptionHook(Hook):
    def __init__(self, run):
        self.run = run

    def after_step(self, state, step):
        log.info("hook behind a step of %d samples", step.batch_size)


@METRICS.register("option_metric")
def option_metric(run):
    return lambda state: {"option metric": float(state.iteration)}
