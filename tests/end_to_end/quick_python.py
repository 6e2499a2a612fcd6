"""A `python` for the shells of tests: what it runs costs a fork instead of seconds of imports."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from forks import Descriptor, exit_codes, run_script

TIMEOUT_S = 600

# Programs that are no files, modules or standard input, as in `python -c`, go to the interpreter.
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

words = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
if not words or words[0][0] == "-" and words[0] not in ("-", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    call = json.dumps([sys.argv[0], words, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(line, [b"%10d" % len(call)], [0, 1, 2])
    line.sendall(call)
    fork = int(line.recv(10))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(fork, number))
    code = int(line.recv(10))
sys.exit(128 - code if code < 0 else code)
"""


def write_launchers(folder: Path, *, port: str) -> Path:
    """Write programs named python and deepspeed, which work as long as this process lives.

    Args:
        port: of the rendezvous of what deepspeed starts.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    real = Path(sys.executable).with_name("deepspeed")
    programs = {
        "python": _PROGRAM.format(python=sys.executable, address=_address()),
        "deepspeed": f'#!/bin/sh\nexec "{folder}/python" {real} --master_port {port} "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@cache
def _address() -> str:
    """Return where programs ask for forks."""
    address = f"\0{os.getpid()} {os.urandom(8).hex()}"
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen()
    threading.Thread(target=_serve, args=(door,), daemon=True).start()
    return address


def _serve(door: socket.socket) -> None:
    while True:
        line, _ = door.accept()
        threading.Thread(target=_run, args=(line,), daemon=True).start()


def _run(line: socket.socket) -> None:
    with line:
        size, numbers, _, _ = socket.recv_fds(line, 10, 3)
        with line.makefile("rb") as stream:
            call = json.loads(stream.read(int(size)))
        try:
            words = [Descriptor(line.fileno()), *call, *map(Descriptor, numbers)]
            (code,) = exit_codes(_run_script, [words], timeout_s=TIMEOUT_S, while_open=line)
        finally:
            for number in numbers:
                os.close(number)
        # No process listens any more once the test has ended.
        with contextlib.suppress(OSError):
            line.sendall(b"%d" % (1 if code is None else code))


def _run_script(line: Descriptor, program: str, *words: Any) -> None:
    os.write(line.number, b"%10d" % os.getpid())
    os.close(line.number)
    # What a launcher starts its processes with.
    sys.executable = program
    if words[0][:2] == ["-m", "deepspeed.launcher.launch"]:
        # It looks after its processes once a second, and once more when they have ended.
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(min(seconds, 0.05))
    run_script(*words)
