"""Findings of the doctor: facts and problems of each host, and the report as text and JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_HOSTS = 8  # listed by name


@dataclass(frozen=True)
class Problem:
    """Problem of a machine, and its remedy (`mend`)."""

    what: str
    mend: str


@dataclass(frozen=True)
class Section:
    """Facts of one subject by name, and the problems found with them."""

    title: str
    facts: Mapping[str, str]
    problems: Sequence[Problem] = ()


@dataclass(frozen=True)
class Examined:
    """Findings of one host."""

    host: str
    sections: Sequence[Section]


@dataclass(frozen=True)
class HostsOfProblem:
    """A problem, with the hosts that have it."""

    problem: Problem
    hosts: tuple[str, ...]


def problems_of(examined: Sequence[Examined]) -> list[HostsOfProblem]:
    """Return each problem once, with its hosts; also packages whose versions differ between hosts."""
    hosts: dict[Problem, dict[str, None]] = {}
    for one in examined:
        for problem in (problem for section in one.sections for problem in section.problems):
            hosts.setdefault(problem, {})[one.host] = None
    for problem in _differing_versions(examined):
        hosts[problem] = dict.fromkeys(one.host for one in examined)
    return [HostsOfProblem(problem, tuple(names)) for problem, names in hosts.items()]


def report_lines(examined: Sequence[Examined]) -> Iterator[str]:
    """Yield the lines of the report: shared facts once, the problems at the end."""
    titles = dict.fromkeys(section.title for one in examined for section in one.sections)
    for title in titles:
        values = _values(examined, title)
        if values:
            yield f"{title}:"
        width = max(map(len, values), default=0)
        for name, hosts_of in values.items():
            yield from (f"  {name:{width}}  {text}" for text in _values_with_hosts(hosts_of))
    found = problems_of(examined)
    for one in found:
        where = f" (on {_hosts(one.hosts)})" if len(examined) > 1 else ""
        yield f"PROBLEM: {one.problem.what}{where}: {one.problem.mend}"
    if not found:
        yield "no problems found"


def as_json(examined: Sequence[Examined]) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        "hosts": {
            one.host: {section.title: dict(section.facts) for section in one.sections}
            for one in examined
        },
        "problems": [
            {"problem": one.problem.what, "mend": one.problem.mend, "hosts": [*one.hosts]}
            for one in problems_of(examined)
        ],
    }


def _values(examined: Iterable[Examined], title: str) -> dict[str, dict[str, list[str]]]:
    """Return for each fact of the section `title` its values, and the hosts with each value."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in examined:
        for section in (section for section in one.sections if section.title == title):
            for name, value in section.facts.items():
                found.setdefault(name, {}).setdefault(value, []).append(one.host)
    return found


def _values_with_hosts(hosts_of: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for value, hosts in [*hosts_of.items()][:_MOST_HOSTS]:
        yield f"{value} ({_hosts(hosts)})" if len(hosts_of) > 1 else value
    if len(hosts_of) > _MOST_HOSTS:
        yield f"... and {len(hosts_of) - _MOST_HOSTS} other values"


def _hosts(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return ", ".join(hosts[:_MOST_HOSTS]) + more


VERSIONS = "versions"
"""Title of the section whose facts must be equal on all hosts."""


def _differing_versions(examined: Sequence[Examined]) -> Iterator[Problem]:
    for name, hosts_of in _values(examined, VERSIONS).items():
        if len(hosts_of) > 1:
            values = "; ".join(_values_with_hosts(hosts_of))
            yield Problem(
                f"hosts have different versions of {name}: {values}",
                "install the same on all of them",
            )


MIB = 1 << 20
GIB = 1 << 30


def format_bytes(number: float) -> str:
    """Format a number of bytes with a unit.

    >>> format_bytes(0), format_bytes(3 * GIB // 2)
    ('0 B', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
