"""Packages that only some parts need: requirements.txt has them, a training node may lack them."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.common.errors import ConfigError


@contextmanager
def needed_for(what: str, package: str) -> Iterator[None]:
    """Import in the `with` block; a package that is missing becomes a message.

    Args:
        what: what needs it, such as a flag.
        package: what pip calls it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs a package that is not installed: pip install {package} ({error})"
        ) from error
