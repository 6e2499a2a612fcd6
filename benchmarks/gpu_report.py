"""Tables in Markdown of what tests/gpu/prove.sh found on one GPU."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_GIB = 2**30


def report(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the tables of the parts that tests/gpu/prove.sh ran."""
    for result in results:
        device = result["device"]
        yield ""
        yield (
            f"`{result['command']}`: {device['name']}, torch {device['torch']}, CUDA "
            f"{device['cuda']}, commit {result['commit']}, {result['date']}, "
            f"{result['seconds']:.0f} seconds; {counts(result['checks'])}."
        )
        yield from found_lines(result["checks"])
        if speed := result.get("speed"):
            yield ""
            yield from speed_table(speed)
            if result["part"] == "where":
                yield from kernel_tables(speed["rows"])
        for name in ("generation", "kernels"):
            if rows := result.get(name):
                yield ""
                yield from table(rows)


def counts(checks: Sequence[dict[str, Any]]) -> str:
    """Return how many checks passed, failed and were not run."""
    outcomes = [check["outcome"] for check in checks]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "not run"))


def found_lines(checks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each check that measured something."""
    found = [check for check in checks if check["found"]]
    if found:
        yield ""
    for check in found:
        texts = (f"{name}: {value}" for name, value in check["found"].items())
        yield f"* `{check['check'].partition('::')[2]}`: {'; '.join(texts)}"


def kernel_tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the kernels of a step of each row, by time."""
    for row in rows:
        kernels = row["ours"].get("kernels_of_step", [])
        if kernels:
            yield ""
            yield f"{_named(row)}, a step of {1000 * row['ours']['seconds']:.1f} ms:"
            yield ""
        yield from table(
            {
                "kernel": f"`{kernel['name'].replace('|', ' ')}`",
                "calls": kernel["calls"],
                "ms": f"{kernel['ms']:.2f}",
                "of the step": f"{kernel['ms'] / 1000 / row['ours']['seconds']:.1%}",
            }
            for kernel in kernels
        )


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a table, whose columns are the keys of the rows."""
    rows = [*rows]
    if rows:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        for row in rows:
            yield f"| {' | '.join(str(row.get(column, '-')) for column in columns)} |"


def speed_table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the results of train_gpu.py."""
    device = result["device"]
    peak = device["peak_flops"]
    stated = f"{peak / 1e12:.0f} TFLOP/s" if peak else "unknown"
    rate, copied = device["matmul_flops"] / 1e12, device["copy_bytes_per_s"] / 1e12
    yield (
        f"Matrix products in bf16: peak of the data sheet {stated}, measured {rate:.1f} TFLOP/s. "
        f"Copies: {copied:.2f} TB/s, read and written. Of other programs: tokens/s, and the time of "
        "their step over ours."
    )
    yield ""
    yield from table(cells(row, device) for row in result["rows"])


def cells(row: dict[str, Any], device: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column; "-" where there is no result."""
    ours = row["ours"]
    seconds = ours.get("seconds")
    tokens = row["batch"] * row["seq_length"]

    def of_peer(peer: dict[str, Any]) -> str:
        if "seconds" not in peer:
            return peer["error"]
        ratio = f" ({peer['seconds'] / seconds:.3f})" if seconds else ""
        return f"{tokens / peer['seconds']:,.0f}{ratio}"

    return {
        "network, batch, dtype": _named(row),
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else ours["error"],
        **{name: of_peer(peer) for name, peer in row["peers"].items()},
        "MFU of the peak": _mfu(row, device["peak_flops"]),
        "of the measured rate": _mfu(row, device["matmul_flops"]),
        "peak GiB (predicted)": f"{_gib(ours)} ({row['predicted_bytes'] / _GIB:.1f})",
        "kernels": ours.get("kernels", "-"),
        "attention": re.sub(r"[|`]", " ", ours.get("attention", "-")),
    }


def _named(row: dict[str, Any]) -> str:
    flags = row["flags"] and f" `{row['flags']}`"
    return f"{row['size']}, {row['batch']} x {row['seq_length']}, {row['dtype']}{flags}"


def _mfu(row: dict[str, Any], rate: float | None) -> str:
    seconds = row["ours"].get("seconds")
    return f"{row['flops'] / seconds / rate:.1%}" if seconds and rate else "-"


def _gib(side: dict[str, Any]) -> str:
    peak = side.get("peak_bytes")
    return f"{peak / _GIB:.1f}" if peak else "-"
