"""Forms of the tables of other systems' flags: one reason for many flags, and what a flag is read as."""

from collections.abc import Iterator

from megatron.config.parsing.flags import Legacy


def accepted(reason: str, names: str) -> list[Legacy]:
    """Return flags that change nothing here, all for one reason.

    Args:
        names: without dashes, with spaces between; ~NAME is --no-NAME and --disable-NAME, the two
            forms in which Megatron-LM turns off what is on by default.
    """
    return [Legacy(option, reason, takes="*") for option in _options(names)]


def refused(reason: str, names: str, *, only_with: str = "") -> list[Legacy]:
    """Return flags that are refused for one reason; for `names` see `accepted`.

    Args:
        only_with: see `Legacy`.
    """
    return [
        Legacy(option, reason, takes="*", refused=True, only_with=only_with)
        for option in _options(names)
    ]


def read_as(names: str, reason: str, **becomes: str) -> list[Legacy]:
    """Return flags whose values stand for flags of ours; see `Legacy.becomes`.

    Args:
        names: see `accepted`.
        reason: why other values are refused.
        becomes: by value, our flags; `switch` for no value, and `other` for any other.
    """
    keys = {"switch": "", "other": "*"}
    values = {keys.get(value, value): words for value, words in becomes.items()}
    return [Legacy(option, reason, "*", becomes=values) for option in _options(names)]


def _options(names: str) -> Iterator[str]:
    for name in names.split():
        if name.startswith("~"):
            yield f"--no-{name[1:]}"
            yield f"--disable-{name[1:]}"
        else:
            yield f"--{name}"
