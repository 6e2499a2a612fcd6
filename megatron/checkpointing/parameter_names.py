"""Names of a network's parameters in checkpoints, and the module names that they stand for.

In checkpoints of ours a name starts with the layer's number in the pipeline, or with
`tied_modules.embed` for an embedding that is the output layer too. Module names do not depend on
either; they are those of Megatron-LM's checkpoints of version 3.
"""

TABLES = ("word_embeddings.", "position_embeddings.", "tokentype_embeddings.")
"""Beginnings of the names of an embedding's weights, inside its layer."""

SHARED_POSITIONS = "shared_positions."
"""Beginning of the name of the positions that encoder and decoder share."""

FIRST_LAYER = 3
"""Number of the first transformer layer."""

_TIED, _UNTIED = "tied_modules.embed", "1"
_FINAL_NORM, _OUTPUT = 1, 2
"""Numbers of the layers after the transformer layers, from the first free number on."""


def is_of_vocabulary(name: str) -> bool:
    """Whether a parameter has one row for each token, padding of the vocabulary included."""
    return name.endswith(("word_embeddings.weight", ".output_bias"))


def tied_module(name: str, *, tied: bool) -> str | None:
    """Return the module of a weight that layers share, by its name inside a layer; None of others.

    Args:
        tied: whether the embedding is the output layer too.
    """
    if name.startswith(SHARED_POSITIONS):
        return "tied_modules.positions"
    return _TIED if tied and name.startswith(TABLES) else None


def module_name(name: str, num_layers: int) -> str:
    """Translate a parameter name of a checkpoint, such as 3.mlp.dense_4h_to_h.weight.

    Returns:
        embedding.word_embeddings.weight, layers.0.mlp.dense_4h_to_h.weight, final_layernorm.weight
        or output_layer.weight; other names unchanged.
    """
    if name.startswith(f"{_TIED}."):
        return name.replace(_TIED, "embedding", 1)
    number, _, rest = name.partition(".")
    if number == _UNTIED:
        return f"embedding.{rest}"
    layer = int(number) - FIRST_LAYER if number.isdigit() else -1
    if 0 <= layer < num_layers:
        return f"layers.{layer}.{rest}"
    if layer == num_layers + _FINAL_NORM:
        return f"final_layernorm.{rest}"
    if layer == num_layers + _OUTPUT:
        return rest.replace("word_embeddings", "output_layer", 1)
    return name


def parameter_name(module: str, num_layers: int, *, tied: bool) -> str:
    """Invert `module_name`.

    Args:
        tied: whether the embedding is the output layer too.
    """
    part, _, rest = module.partition(".")
    match part:
        case "embedding":
            return f"{_TIED if tied else _UNTIED}.{rest}"
        case "layers":
            number, _, rest = rest.partition(".")
            return f"{FIRST_LAYER + int(number)}.{rest}"
        case "final_layernorm":
            return f"{FIRST_LAYER + num_layers + _FINAL_NORM}.{rest}"
        case "output_layer":
            return f"{FIRST_LAYER + num_layers + _OUTPUT}.word_embeddings.{rest}"
    return module
