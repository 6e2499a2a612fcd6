"""Sizes in words."""

MIB = 1 << 20
GIB = 1 << 30


def told_bytes(number: float) -> str:
    """Return a number of bytes with a unit.

    >>> [told_bytes(n) for n in (0, 2048, 64 * MIB, 3 * GIB // 2)]
    ['0 B', '2 KiB', '64 MiB', '1.5 GiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
