"""How much memory a host could still give, in trees of files like those of Linux."""

from types import SimpleNamespace

import psutil
import pytest

from megatron.common.host_memory import available_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 50 kB: a function that puts this process into a group."""
    available = SimpleNamespace(available=50 * 1024)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)

    def enter(line):
        (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{line}\n")
        return tmp_path / "cgroup", tmp_path / "groups"

    return enter


def limit(group, names, most, used, idle=0):
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{most}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {idle}\nactive_file 9\n")


@pytest.mark.parametrize(
    ("line", "mounted", "names"),
    [
        ("0::/job/step", ".", V2),
        ("0::/job/step", "unified", V2),
        ("4:memory:/job/step", "memory", V1),
    ],
)
def test_the_tightest_group_around_this_process_counts(machine, line, mounted, names):
    own, groups = machine(line)
    assert available_bytes(own, groups) == 50 * 1024
    limit(groups / mounted, names, "max" if names == V2 else 2**63 - 4096, 9)
    limit(groups / mounted / "other", names, 10, 10)
    assert available_bytes(own, groups) == 50 * 1024
    limit(groups / mounted / "job", names, 5000, 4000)
    assert available_bytes(own, groups) == 1000
    limit(groups / mounted / "job" / "step", names, 900, 400)
    assert available_bytes(own, groups) == 500


@pytest.mark.parametrize(
    ("line", "mounted", "names"), [("0::/", ".", V2), ("4:memory:/", "memory", V1)]
)
def test_files_that_lie_in_memory_unused_are_given_up(machine, line, mounted, names):
    own, groups = machine(line)
    limit(groups / mounted, names, 5000, 4900, idle=3000)
    assert available_bytes(own, groups) == 3100


def test_in_a_container_the_group_may_be_called_as_outside(machine):
    own, groups = machine("0::/system.slice/docker-1.scope")
    limit(groups, V2, 5000, 4000)
    assert available_bytes(own, groups) == 1000


def test_a_group_over_its_limit_leaves_nothing(machine):
    own, groups = machine("0::/")
    limit(groups, V2, 4000, 4001)
    assert available_bytes(own, groups) == 0


def test_without_groups_the_machine_counts(machine, tmp_path):
    machine("0::/")
    assert available_bytes(tmp_path / "none", tmp_path) == 50 * 1024


def test_this_machine_has_some():
    assert available_bytes() > 2**20
