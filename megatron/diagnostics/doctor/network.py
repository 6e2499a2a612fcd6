"""Check the network: rendezvous, bandwidth and results of all-reduces, and clock skew."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.diagnostics.doctor.findings import MIB, Problem, Section, format_bytes
from megatron.training.process.environment import Launch

_TIMEOUT = timedelta(seconds=120)
_SIZES = ((4096, 20), (MIB, 10), (64 * MIB, 3))
"""Bytes of an all-reduce, and number of measurements."""

_PINGS = 5
_MOST_SKEW_S = 1.0
_MOST_CLOCKS = 8  # listed one by one


def join_ranks(launch: Launch) -> Section | None:
    """Join the process group of all ranks; return the problem if that fails.

    Communication: waits for every rank.
    """
    try:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        problem = Problem(
            f"rank {launch.rank} could not join the other {launch.world_size - 1} ranks: {first}",
            "every host must reach MASTER_ADDR:MASTER_PORT, also through firewalls; set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to their common interface, such as eth0",
        )
        return Section("network", {"state": "not connected"}, (problem,))
    return None


def network_section(launch: Launch, device: torch.device) -> Section:
    """Measure all-reduces over all ranks, with gloo and, on GPUs, with NCCL.

    Args:
        device: that this rank computes on.

    Communication: every rank must call this, in step.
    """
    facts: dict[str, str] = {"processes": f"{launch.world_size}, {launch.local_size} on this host"}
    problems: list[Problem] = []
    devices = {"gloo": torch.device("cpu")}
    if all_agree(device.type == "cuda"):
        torch.cuda.set_device(device)
        devices["nccl"] = device
    mend = "look for errors of the network and the devices; NCCL_DEBUG=INFO logs which devices NCCL uses"
    for backend, names in devices.items():
        group = dist.new_group(backend=backend, timeout=_TIMEOUT)
        for size, times in _SIZES:
            what = f"{backend} all-reduce of {format_bytes(size)}"
            try:
                seconds, is_right = time_all_reduce(size, times, group=group, device=names)
            except RuntimeError as error:
                last = str(error).strip().splitlines()[-1]
                problems.append(Problem(f"the {what} fails: {last}", mend))
                break
            facts[what] = format_speed(size, seconds, dist.get_world_size())
            if not is_right:
                problems.append(Problem(f"the {what} gives wrong sums", mend))
    return Section("network", facts, tuple(problems))


def time_all_reduce(
    size: int, times: int, *, group: dist.ProcessGroup, device: torch.device
) -> tuple[float, bool]:
    """Return the shortest time of several all-reduces in seconds, and whether all sums are right.

    Args:
        size: bytes of each rank's float32 tensor.

    Communication: all-reduces over `group`.
    """
    numbers = torch.ones(size // 4, device=device)
    world_size = dist.get_world_size()
    shortest, is_right = float("inf"), True
    for _ in range(times + 1):  # the first one connects
        numbers.fill_(dist.get_rank() + 1)
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        began_at = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - began_at)
        is_right &= bool((numbers == world_size * (world_size + 1) / 2).all())
    return shortest, is_right


def format_speed(size: int, seconds: float, world_size: int) -> str:
    """Format time and bus bandwidth of an all-reduce.

    Source: bus bandwidth as NVIDIA's nccl-tests define it: the bytes that each rank must send,
    2 (n - 1) / n of the size, over the time.
    """
    bus = size / seconds * 2 * (world_size - 1) / world_size
    return f"{seconds * 1e3:.3g} ms, bus bandwidth {bus / 1e9:.3g} GB/s"


def clock_section(ranks: Sequence[int], *, clock: Callable[[], float] = time.time) -> Section:
    """Measure the clock skew of `ranks` to rank 0; the result is on rank 0 only.

    Args:
        ranks: one of each host but rank 0's.
        clock: seconds since the epoch.

    Communication: rank 0 and those in `ranks` must call this; small messages between them.
    """
    if dist.get_rank():
        if dist.get_rank() in ranks:
            _answer_pings(clock)
        return Section("clocks", {})
    skews = {rank: _measure_skew(rank, clock) for rank in ranks}
    return Section("clocks", clock_facts(skews), tuple(clock_problems(skews)))


def clock_facts(skews: Mapping[int, float]) -> dict[str, str]:
    """Return the largest clock skews, and the number of smaller ones.

    Args:
        skews: seconds that each rank's clock is ahead of rank 0's.
    """
    worst = _worst_first(skews)[:_MOST_CLOCKS]
    facts = {f"rank {rank}": f"{1e3 * skews[rank]:+.3g} ms" for rank in worst}
    if len(skews) > len(worst):
        facts |= {"the others": f"{len(skews) - len(worst)}, with smaller skews"}
    return facts


def clock_problems(skews: Mapping[int, float]) -> Iterator[Problem]:
    """Yield the clocks that are wrong, the worst first."""
    wrong = [rank for rank in _worst_first(skews) if abs(skews[rank]) > _MOST_SKEW_S]
    mend = "synchronise the clocks of all hosts, with chrony or another NTP client"
    for rank in wrong[:_MOST_CLOCKS]:
        yield Problem(f"the clock of rank {rank} is {skews[rank]:+.1f} s from that of rank 0", mend)
    if more := len(wrong[_MOST_CLOCKS:]):
        yield Problem(f"the clocks of {more} more hosts are over {_MOST_SKEW_S:g} s off", mend)


def _worst_first(skews: Mapping[int, float]) -> list[int]:
    return sorted(skews, key=lambda rank: -abs(skews[rank]))


def all_agree(own: bool) -> bool:
    """Return whether `own` is true on every rank.

    Communication: one all-reduce.
    """
    result = torch.tensor([int(own)])
    dist.all_reduce(result, op=dist.ReduceOp.MIN)
    return bool(result.item())


def _answer_pings(clock: Callable[[], float]) -> None:
    now = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(now, src=0)
        now[0] = clock()
        dist.send(now, dst=0)


def _measure_skew(rank: int, clock: Callable[[], float]) -> float:
    """Return the clock skew of `rank` in seconds, by the ping with the shortest round trip.

    Source: the offset of NTP (RFC 5905, section 8), with one time stamp at the other end.
    """
    pings = []
    there = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        sent_at = clock()
        dist.send(there, dst=rank)
        dist.recv(there, src=rank)
        back_at = clock()
        pings.append((back_at - sent_at, there.item() - (sent_at + back_at) / 2))
    return min(pings)[1]
