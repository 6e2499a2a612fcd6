"""Values of nested JSON by dotted keys."""

from collections.abc import Mapping
from typing import Any


def value_at(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at the dotted `key`; `default` where it is absent or "auto"."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return default if node == "auto" else node
