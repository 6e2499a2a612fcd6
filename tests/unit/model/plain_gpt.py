"""A GPT of any options, spelled out in plain torch: slow, in float64, and independent of ours.

Every head, group and feature is counted out from the rows of the weights.
"""

import math

import torch
from tiny import with_changes
from torch import Tensor


def plain_logits(weights, spec, tokens_bs, positions_bs, seen_bss):
    """Return [b, s, V] from {name: whole float64 weight}; `seen_bss` says which keys count."""
    embed = "tied_modules.embed" if spec.vocabulary.tied_embeddings else "1"
    table = weights[f"{embed}.word_embeddings.weight"]
    x = table[tokens_bs] * (spec.hidden_size**0.5 if spec.vocabulary.scaled_embedding else 1)
    x = x * spec.vocabulary.embedding_multiplier
    if spec.norm.embed_layernorm:
        x = norm(weights, f"{embed}.word_embeddings.norm", x, spec)
    if spec.positions.position_embedding == "learned":
        x = x + weights[f"{embed}.position_embeddings.weight"][positions_bs]
    for layer in range(3, 3 + spec.num_layers):
        x = plain_layer(weights, spec, layer, x, positions_bs, seen_bss)
    last = 4 + spec.num_layers
    x = norm(weights, f"{last}", x, spec)
    head = (
        table if spec.vocabulary.tied_embeddings else weights[f"{last + 1}.word_embeddings.weight"]
    )
    logits = x @ head.T / spec.vocabulary.logit_divisor
    return capped(logits, spec.vocabulary.logit_softcap)


def capped(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def plain_layer(weights, spec, layer, x, positions_bs, seen_bss):
    normed = before(weights, f"{layer}.input_layernorm", x, spec)
    is_local = spec.attention.window and layer - 2 not in spec.attention.full_attention_layers
    if is_local:
        distances = torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))
        seen_bss = seen_bss & (distances < spec.attention.window)
    seen_as = unstretched(spec) if is_local and spec.positions.rotary_local_base else spec
    if layer - 2 in spec.positions.unrotated_layers:
        seen_as = with_changes(spec, position_embedding="none")
    y = attention(weights, seen_as, f"{layer}.self_attention", normed, positions_bs, seen_bss)
    y = behind(weights, f"{layer}.attention_output_layernorm", y, spec)
    if spec.parallel_residual:
        beside = before(weights, f"{layer}.post_attention_layernorm", x, spec)
        return x + y + mlp_output(weights, spec, layer, beside)
    x = (normed if spec.norm.residual_after_norm else x) + y
    normed = before(weights, f"{layer}.post_attention_layernorm", x, spec)
    y = mlp_output(weights, spec, layer, normed)
    return (normed if spec.norm.residual_after_norm else x) + y


def mlp_output(weights, spec, layer, x):
    y = mlp(weights, spec, f"{layer}.mlp", x)
    return behind(weights, f"{layer}.mlp_output_layernorm", y, spec)


def before(weights, name, x, spec):
    return norm(weights, name, x, spec) if spec.norm.input_norm else x


def behind(weights, name, y, spec):
    y = norm(weights, name, y, spec) if spec.norm.sandwich_norm else y
    return y * spec.residual_multiplier


def unstretched(spec):
    plain = {"rotary_interpolation": 1.0, "rope_scaling": 1.0, "rope_attention_factor": 1.0}
    return with_changes(
        spec, rotary_base=spec.positions.rotary_local_base, rope_rule="llama3", **plain
    )


def norm(weights, name, x, spec):
    weight = weights[f"{name}.weight"] + (1 if spec.norm.layernorm_1p else 0)
    if spec.norm.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + spec.norm.norm_epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + spec.norm.norm_epsilon).sqrt() * weight + weights[f"{name}.bias"]


def attention(weights, spec, name, x, positions_bs, seen_bss):
    d, groups = spec.attention.head_dim, spec.attention.num_query_groups
    per_group = spec.attention.num_attention_heads // groups
    slopes = paper_slopes(spec.attention.num_attention_heads)
    distances = torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))

    def projected(row):
        y = x @ weights[f"{name}.query_key_value.weight"][row : row + d].T
        bias = weights.get(f"{name}.query_key_value.bias")
        return y if bias is None else y + bias[row : row + d]

    def mean_square(which, width):
        """Over all heads, whose rows are gathered one by one."""
        rows = [heads_of(which, head) for head in range(width // d)]
        return sum(projected(row).square().sum(-1, keepdim=True) for row in rows) / width

    def heads_of(which, head):
        if which == "k":
            return head * (per_group + 2) * d + per_group * d
        return head // per_group * (per_group + 2) * d + head % per_group * d

    def placed(row, which, head):
        y = projected(row)
        if spec.norm.qk_norm_across_heads:
            widths = {"q": spec.attention.query_features, "k": spec.attention.key_features}
            weight = weights[f"{name}.{which}_layernorm.weight"][head * d : (head + 1) * d]
            mean = mean_square(which, widths[which]) + spec.norm.norm_epsilon
            y = y / mean.sqrt() * (weight + (1 if spec.norm.layernorm_1p else 0))
        elif spec.norm.qk_layernorm:
            y = norm(weights, f"{name}.{which}_layernorm", y, spec)
        return turned(y, positions_bs, spec) if spec.positions.position_embedding == "rotary" else y

    mixed = []
    for head in range(spec.attention.num_attention_heads):
        first = head // per_group * (per_group + 2) * d
        query = placed(first + head % per_group * d, "q", head)
        key = placed(first + per_group * d, "k", head // per_group)
        value = projected(first + (per_group + 1) * d)
        scores = query @ key.mT / math.sqrt(spec.attention.query_scalar or d)
        scores = capped(scores, spec.attention.attention_softcap)
        if spec.positions.position_embedding == "alibi":
            scores = scores - slopes[head] * distances
        weights_bss = scores.masked_fill(~seen_bss, -math.inf).exp()
        total = weights_bss.sum(-1, keepdim=True)
        if spec.attention.softmax_type == "learnable":
            total = total + weights[f"{name}.sinks"][head].exp()
        elif spec.attention.softmax_type == "off-by-one":
            total = total + 1
        mixed.append(weights_bss / total @ value)
    y = torch.cat(mixed, -1) @ weights[f"{name}.dense.weight"].T
    return y + weights.get(f"{name}.dense.bias", 0)


def turned(x, positions_bs, spec):
    """Pairs of features as complex numbers, multiplied by e^(i angle)."""
    half = spec.positions.rotary_dim // 2
    angles = torch.stack(
        [
            positions_bs / spec.positions.rotary_interpolation * frequency(i, spec)
            for i in range(half)
        ],
        -1,
    ).double()
    factor = torch.exp(1j * angles) * spec.positions.rope_attention_factor
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * factor
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def frequency(i, spec):
    """The rule of Llama 3.1, case by case; 1 for `rope_scaling` leaves all as they are."""
    plain = spec.positions.rotary_base ** (-2 * i / spec.positions.rotary_dim)
    if spec.positions.rope_rule == "yarn":
        return yarn_frequency(i, plain, spec)
    if spec.positions.rope_rule == "longrope":
        is_short = spec.seq_length <= spec.positions.rope_original_length
        short, long = spec.positions.rope_short_factors, spec.positions.rope_long_factors
        return plain / (short if is_short else long)[i]
    wavelength = 2 * math.pi / plain
    length = spec.positions.rope_original_length
    low, high = spec.positions.rope_low_freq_factor, spec.positions.rope_high_freq_factor
    if wavelength < length / high:
        return plain
    if wavelength > length / low:
        return plain / spec.positions.rope_scaling
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / spec.positions.rope_scaling + smooth * plain


def yarn_frequency(i, plain, spec):
    """Pairs in front of the first bound turn as they did, those behind the last one slower."""
    bounds = []
    for turns in (spec.positions.rope_high_freq_factor, spec.positions.rope_low_freq_factor):
        # The (broken) number of the pair that makes so many turns within the trained length.
        angle = turns * 2 * math.pi / spec.positions.rope_original_length
        bounds.append(-math.log(angle, spec.positions.rotary_base) * spec.positions.rotary_dim / 2)
    if spec.positions.rope_truncation:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    first, last = max(bounds[0], 0), min(bounds[1], spec.positions.rotary_dim - 1)
    if i <= first:
        return plain
    if i >= last:
        return plain / spec.positions.rope_scaling
    share = (i - first) / (last - first)
    return plain * (1 - share) + plain / spec.positions.rope_scaling * share


def paper_slopes(heads):
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return paper_slopes(below) + paper_slopes(2 * below)[::2][: heads - below]


def mlp(weights, spec, name, x):
    inner = x @ weights[f"{name}.dense_h_to_4h.weight"].T
    inner = inner + weights.get(f"{name}.dense_h_to_4h.bias", 0)
    if spec.mlp.is_gated:
        inner = changed_pairs(inner, spec.mlp.glu_clamp or math.inf, spec.mlp.glu_offset)
    y = ACTIVATIONS[spec.mlp.activation](inner) @ weights[f"{name}.dense_4h_to_h.weight"].T
    return y + weights.get(f"{name}.dense_4h_to_h.bias", 0)


def changed_pairs(inner, clamp, offset):
    gate, up = inner[..., ::2], inner[..., 1::2]
    pairs = [gate.clamp(max=clamp), up.clamp(-clamp, clamp) + offset]
    return torch.stack(pairs, -1).flatten(-2)


def normal_distribution(x: Tensor) -> Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


ACTIVATIONS = {
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_erf": lambda x: x * normal_distribution(x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "geglu": lambda x: x[..., ::2] * normal_distribution(x[..., ::2]) * x[..., 1::2],
    "geglu_tanh": lambda x: ACTIVATIONS["gelu_tanh"](x[..., ::2]) * x[..., 1::2],
    "liglu": lambda x: x[..., ::2] * x[..., 1::2],
    "quick_geglu": lambda x: x[..., ::2] / (1 + torch.exp(-1.702 * x[..., ::2])) * x[..., 1::2],
    "reglu": lambda x: x[..., ::2].clamp(min=0) * x[..., 1::2],
    "swiglu": lambda x: x[..., ::2] / (1 + torch.exp(-x[..., ::2])) * x[..., 1::2],
}
