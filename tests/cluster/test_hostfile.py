"""`deepspeed --hostfile` over two hosts: two ssh servers on loopback addresses, and pdsh."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from forked import run_job, steps
from ports import free_port

from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTS = ("127.0.0.2", "127.0.0.3")
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
TIMEOUT_S = 600
FLAGS = """
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --device cpu
    --micro-batch-size 1 --global-batch-size 4 --lr 0.01 --eval-iters 0 --zero-stage 1
    --tokenizer-type NullTokenizer --vocab-size 60 --log-interval 1 --save-interval 1000000
"""
STEPS = 6
ENDLESS = 1_000_000

_SERVER = """
ListenAddress {host}
Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
"""
_CLIENT = """
Port {port}
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
BatchMode yes
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts that can be reached through ssh; jobs are started in `folder`."""

    folder: Path
    servers: dict[str, subprocess.Popen[bytes]]

    def processes(self, *hosts: str) -> list[psutil.Process]:
        """Return all processes of jobs on `hosts`."""
        found = []
        for host in hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(self.servers[host].pid).children(recursive=True)
        return found

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """Start a training of one process on each host, as a user would."""
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        address = ["--master_addr", HOSTS[0], "--master_port", str(free_port())]
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return subprocess.Popen(
            [
                launcher,
                "--hostfile",
                "hosts",
                *address,
                str(REPOSITORY / "pretrain_gpt.py"),
                *flags,
            ],
            cwd=self.folder,
            env=os.environ | {"PATH": os.pathsep.join(path), "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def obstacle() -> str:
    """Return why there can be no hosts here; "" if there can."""
    missing = [name for name in ("pdsh", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if SSHD is None:
        missing.append("sshd")
    if missing:
        return f"not installed: {', '.join(missing)}"
    # sshd wants it, where a service makes it at the start of a system.
    separation = Path("/run/sshd")
    if os.geteuid() == 0:
        separation.mkdir(mode=0o755, exist_ok=True)
    try:
        for host in HOSTS:
            socket.create_server((host, 0)).close()
    except OSError as error:
        return f"{HOSTS}: {error}"
    return ""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why := obstacle():
        pytest.skip(why)
    folder, port = tmp_path_factory.mktemp("hosts"), free_port()
    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(key, check=True)
    (folder / "client").write_text(_CLIENT.format(port=port, folder=folder))
    (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    (folder / ".deepspeed_env").write_text(
        "OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=lo\n"
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    ssh.chmod(0o755)
    servers = {}
    try:
        for host in HOSTS:
            settings = folder / f"server-{host}"
            settings.write_text(_SERVER.format(host=host, port=port, folder=folder))
            with (folder / f"{host}.log").open("wb") as log:
                servers[host] = subprocess.Popen([SSHD, "-D", "-e", "-f", settings], stderr=log)
        for host in HOSTS:
            wait_for(folder, host, port)
        yield Hosts(folder, servers)
    finally:
        for process in Hosts(folder, servers).processes(*servers):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for server in servers.values():
            server.kill()
            server.wait()


def wait_for(folder: Path, host: str, port: int) -> None:
    """Return as soon as somebody answers."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, port), timeout=10).close()
            return
        except OSError:
            assert time.monotonic() < give_up_at, (folder / f"{host}.log").read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def flags(hosts: Hosts) -> list[str]:
    """The command line of all runs, but for --save and their length."""
    prefix, draw = hosts.folder / "corpus", random.Random(0)
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for _ in range(100):
            writer.append([*draw.choices(range(60), k=draw.randint(3, 30)), 60])
    return [*FLAGS.split(), "--data-path", str(prefix)]


def losses_of(save: Path) -> list[float]:
    return [step["lm_loss"] for step in steps(save)] if (save / "journal.jsonl").exists() else []


def test_two_hosts_take_the_steps_of_one(hosts: Hosts, flags: list[str]) -> None:
    save, length = hosts.folder / "two-hosts", ["--train-iters", str(STEPS)]
    job = hosts.start(*flags, "--save", str(save), *length)
    alone = hosts.folder / "one-host"
    run_job([*flags, "--save", str(alone), *length], alone, ranks=2).succeeded()
    output, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, output
    assert len(losses_of(alone)) == STEPS
    assert losses_of(save) == losses_of(alone)


def test_a_host_that_is_lost_ends_the_job(hosts: Hosts, flags: list[str]) -> None:
    save = hosts.folder / "lost-host"
    job = hosts.start(*flags, "--save", str(save), "--train-iters", str(ENDLESS))
    give_up_at = time.monotonic() + TIMEOUT_S
    while not losses_of(save):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < give_up_at
        time.sleep(0.2)
    everything = hosts.processes(*HOSTS)
    for process in hosts.processes(HOSTS[1]):
        # One may have ended with one that it served.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    output, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0, output
    _, alive = psutil.wait_procs(everything, timeout=TIMEOUT_S)
    assert [process.cmdline() for process in alive] == []
