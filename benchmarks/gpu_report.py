"""Tables in Markdown of the checks and speeds of one GPU."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

_GIB = 2**30


def report(result: dict[str, Any]) -> Iterator[str]:
    """Yield how the results were made, the table of checks, and that of speeds."""
    device = result["device"]
    yield (
        f"{device['name']}, torch {device['torch']}, CUDA {device['cuda']}, commit "
        f"{result['commit']}, {result['date']}, `{result['command']}`, {result['seconds']:.0f} "
        "seconds."
    )
    yield ""
    yield from check_table(result["parts"])
    yield from found_lines(result["parts"])
    if result["speed"]:
        yield ""
        yield from speed_table(result["speed"])


def check_table(parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each part: how many of its checks passed, failed and were not run."""
    yield "| part | passed | failed | not run | seconds | budget |"
    yield "|---|---|---|---|---|---|"
    for part in parts:
        counts = [part[kind] for kind in ("passed", "failed", "not_run")]
        cells_ = [part["name"], *counts, f"{part['seconds']:.0f}", part["budget"]]
        yield f"| {' | '.join(map(str, cells_))} |"


def found_lines(parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each check that measured something."""
    found = [check for part in parts for check in part["checks"] if check["found"]]
    if found:
        yield ""
    for check in found:
        texts = (f"{name}: {value}" for name, value in check["found"].items())
        yield f"* `{check['check'].partition('::')[2]}`: {'; '.join(texts)}"


def speed_table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the results of train_gpu.py."""
    device = result["device"]
    peak = device["peak_flops"]
    stated = f"{peak / 1e12:.0f} TFLOP/s" if peak else "unknown"
    rate = device["matmul_flops"] / 1e12
    yield (
        f"Matrix products in bf16: peak of the data sheet {stated}, measured {rate:.1f} TFLOP/s. "
        "MFU in brackets is that of the plain loop."
    )
    yield ""
    rows = [cells(row, device) for row in result["rows"]]
    if rows:
        yield f"| {' | '.join(rows[0])} |"
        yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(row.values())} |"


def cells(row: dict[str, Any], device: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column; "-" where there is no result."""
    ours, plain = row["ours"], row["plain"]
    seconds = [side.get("seconds") for side in (ours, plain)]
    tokens = row["batch"] * row["seq_length"]
    named = f"{row['size']}, {row['batch']} x {row['seq_length']}, {row['dtype']}"
    flags = row["flags"] and f" `{row['flags']}`"
    return {
        "network, batch, dtype": named + flags,
        "tokens/s": f"{tokens / seconds[0]:,.0f}" if seconds[0] else ours["error"],
        "plain loop": (f"{tokens / seconds[1]:,.0f}" if seconds[1] else plain.get("error", "-")),
        "ratio": f"{seconds[1] / seconds[0]:.3f}" if seconds[0] and seconds[1] else "-",
        "MFU of the peak": _mfus(row, seconds, device["peak_flops"]),
        "of the measured rate": _mfus(row, seconds, device["matmul_flops"]),
        "peak GiB (plain; predicted)": (
            f"{_gib(ours)} ({_gib(plain)}; {row['predicted_bytes'] / _GIB:.1f})"
        ),
        "kernels": ours.get("kernels", "-"),
        "attention": re.sub(r"[|`]", " ", ours.get("attention", "-")),
    }


def _mfus(row: dict[str, Any], seconds: Sequence[float | None], rate: float | None) -> str:
    ours, plain = (f"{row['flops'] / s / rate:.1%}" if s and rate else "-" for s in seconds)
    return f"{ours} ({plain})"


def _gib(side: dict[str, Any]) -> str:
    peak = side.get("peak_bytes")
    return f"{peak / _GIB:.1f}" if peak else "-"
