"""SLURM itself on this machine: a controller, and nodes with names and processes of their own.

Everything is in namespaces, and ends when the process does that started it.
"""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import IO

import psutil
import pytest
from ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")
NODES = ("n1", "n2")
READ_ONLY = "read-only-on-n2"
TIMEOUT_S = 600
_START_TIMEOUT_S = 240
# What SLURM's jobs start: each node has its own.
_PYTHON = """#!/bin/sh
exec "{folder}/$(hostname)-programs/python" "$@"
"""

# Nodes 3 to 128 do not run: jobs of their size are accepted, and would wait.
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
GresTypes=gpu
FirstJobId={first_job}
KillWait=5
MessageTimeout=60
BatchStartTimeout=120
MinJobAge=3600
SlurmdTimeout=10
ReturnToService=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=32000 Gres=gpu:8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=32000 Gres=gpu:8
NodeName=n[3-128] NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=64 RealMemory=32000 Gres=gpu:8 State=CLOUD
PartitionName=test Nodes=n[1-2] Default=YES
PartitionName=large Nodes=n[1-128]
"""

# Reads orders, "start NODE" or "kill NODE", until stdin is closed.
_KEEPER = """
set -eu
mount --make-rprivate /
mount --bind hosts /etc/hosts
munged --foreground --force --key-file=munge.key --socket=$PWD/munge.sock \
  --pid-file=$PWD/munged.pid --log-file=$PWD/munged.log --seed-file=$PWD/munged.seed < /dev/null &
until [ -S munge.sock ]; do sleep 0.05; done
slurmctld -D -c < /dev/null &
declare -A nodes
while read -r order node; do
    if [ "$order" = kill ]; then
        kill -KILL "${nodes[$node]}"
    else
        unshare --mount --uts --pid --fork --kill-child --mount-proc \
          bash -c "$NODE" node "$node" < /dev/null &
        nodes[$node]=$!
    fi
done
"""
_NODE = """
hostname "$1"
if [ "$1" = n2 ]; then mount -t tmpfs -o ro none "$READ_ONLY"; fi
programs=$PWD/$1-programs
rm -rf "$programs"
PYTHONPATH=$MODULES_OF_TESTS "$EXECUTABLE" "$SERVES_PYTHON" "$programs" &
until [ -x "$programs/python" ]; do sleep 0.05; done
exec slurmd -D -N "$1"
"""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


def obstacle() -> str:
    """Return why no cluster can be started here; "" if it can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    if os.geteuid() or subprocess.run(namespaces, capture_output=True).returncode:
        return "only root can start a cluster, where namespaces are allowed"
    return ""


@dataclass(frozen=True)
class Cluster:
    """A running SLURM; jobs work in `folder`."""

    folder: Path
    environment: dict[str, str]
    orders: IO[str]
    logs: Path

    def run(self, *words: str, **variables: str) -> str:
        """Run a command as a user would who sits at this cluster; return what it prints."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *words: str, options: str = "", **variables: str) -> str:
        """Return the number of a new job of slurm/`script`."""
        file = str(REPOSITORY / "slurm" / script)
        return self.run("sbatch", "--parsable", *options.split(), file, *words, **variables).strip()

    def ask_to_stop(self, job: str) -> None:
        """Send what --signal=USR1@… sends when the time is nearly over."""
        # What scancel says of tasks of arrays means nothing: it fails, and the signal arrives.
        subprocess.run(["scancel", "--signal", "USR1", job], env=self.environment, timeout=60)

    def job_field(self, job: str, key: str) -> list[str]:
        """Return what SLURM says about `key` of a job, or of the tasks of an array by number."""
        found = {}
        for line in self.run("scontrol", "show", "job", "--oneliner", job).splitlines():
            fields = dict(word.partition("=")[::2] for word in line.split())
            # That of tasks that wait together is a range, perhaps with how many may run: 0-9%2.
            found[int(re.split("[-,%]", fields.get("ArrayTaskId", "0"))[0])] = fields[key]
        return [found[number] for number in sorted(found)]

    def end(self, *jobs: str) -> None:
        """Wait until jobs, or all tasks of their arrays, have ended, however that is."""
        for job in jobs:
            self.wait_until(lambda job=job: set(self.job_field(job, "JobState")) <= ENDED)

    def finish(self, *jobs: str) -> None:
        """Wait until jobs have ended, and insist that they have succeeded."""
        self.end(*jobs)
        for job in jobs:
            assert set(self.job_field(job, "JobState")) == {"COMPLETED"}, self.report()

    def log(self, job: str) -> str:
        """Return what a job, or all tasks of an array, have printed."""
        files = sorted(self.folder.glob(f"*-{job}.log")) or sorted(
            self.folder.glob(f"*-{job}-*.log")
        )
        return "\n".join(file.read_text() for file in files)

    def wait_until(self, happens: Callable[[], object]) -> None:
        """Ask until the answer is yes."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while not happens():
            assert time.monotonic() < give_up_at, self.report()
            time.sleep(0.2)

    def order(self, *words: str) -> None:
        """Start or kill a node."""
        print(*words, file=self.orders, flush=True)

    def states(self) -> dict[str, str]:
        """Return the state of each node that lives now and then."""
        printed = self.run(
            "sinfo", "--noheader", "--Node", "--format", "%N %T", "--nodes", "n[1-2]"
        )
        return dict(line.split() for line in printed.splitlines())

    def report(self) -> str:
        """Return all that can explain a failure."""
        files = [*self.folder.glob("*.log"), *self.logs.glob("*.log")]
        queue = self.run("squeue", "--all", "--states", "all")
        steps = self.run("scontrol", "show", "step")
        return "\n".join(
            [
                queue,
                steps,
                str(self.states()),
                *(f"{file}:\n{file.read_text()[-6000:]}" for file in files),
            ]
        )


@contextmanager
def running_cluster(jobs: Path) -> Iterator[Cluster]:
    """Start two nodes of 64 cores and eight GPUs each, pretended ones; jobs work in `jobs`."""
    # The path of a socket may have 107 characters.
    folder = Path(mkdtemp(prefix="slurm-", dir="/tmp"))
    # Below those of jobs.
    ports = [*(free_port(11000, 20000) for _ in range(3)), "10001-10126"]
    # Jobs find ports by their numbers: another cluster of this machine is to have others.
    first_job = random.SystemRandom().randrange(1, 12000)
    settings = _CONF.format(folder=folder, ports=ports, first_job=first_job)
    (folder / "slurm.conf").write_text(settings)
    for number in range(8):
        os.mknod(folder / f"gpu{number}", 0o020666, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} n1 n2\n")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    (folder / "python").write_text(_PYTHON.format(folder=folder))
    (folder / "python").chmod(0o755)
    (jobs / READ_ONLY).mkdir()
    of_a_job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in of_a_job and not name.startswith(("SLURM_", "SBATCH_"))
    } | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "REPOSITORY": str(REPOSITORY),
        "PYTHON": str(folder / "python"),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "keeper.log").open("wb") as log:
        keeper = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"),
                *("bash", "-c", _KEEPER),
            ],
            cwd=folder,
            env=environment
            | {
                "NODE": _NODE,
                "READ_ONLY": str(jobs / READ_ONLY),
                "EXECUTABLE": sys.executable,
                "MODULES_OF_TESTS": os.pathsep.join(filter(None, sys.path)),
                "SERVES_PYTHON": str(Path(__file__).with_name("node_python.py")),
            },
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    cluster = Cluster(jobs, environment, keeper.stdin, folder)
    try:
        for node in NODES:
            cluster.order("start", node)
        idle = ["sinfo", "--noheader", "--format", "%D", "--states", "idle"]
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while subprocess.run(idle, env=environment, capture_output=True).stdout != b"2\n":
            printed = "\n".join(file.read_text() for file in folder.glob("*.log"))
            assert keeper.poll() is None and time.monotonic() < give_up_at, printed
            time.sleep(0.1)
        yield cluster
    finally:
        keeper.stdin.close()
        # The first process of the namespace ends when all others of it have; no process writes to
        # the folder any more.
        with suppress(psutil.NoSuchProcess):
            for first in psutil.Process(keeper.pid).children():
                first.kill()
        keeper.wait()
        shutil.rmtree(folder)


def cluster_in(jobs: Path) -> Iterator[Cluster]:
    """Yield a cluster of two nodes, n1 and n2; skip the tests where none can be started."""
    if why := obstacle():
        pytest.skip(why)
    with running_cluster(jobs) as running:
        yield running
