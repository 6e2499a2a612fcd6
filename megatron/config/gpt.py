"""GPT: a decoder."""

from megatron.common.registry import NETWORKS
from megatron.config.network_contract import Network


@NETWORKS.register("gpt")
class GPTNetwork(Network):
    """A decoder, whose tokens see the tokens before them."""

    name = "gpt"
    service = "prompts"
    use = "tools/generate_samples_gpt.py continues texts with it"
    usage = "generate with: tools/generate_samples_gpt.py --load {directory} --prompt TEXT"
    layers_in = "megatron.model.gpt.gpt_layers"
    caches = True
    takes_heads = True
    megatron_in = "megatron.checkpointing.megatron_lm.networks.GPTForm"
