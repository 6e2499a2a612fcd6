"""An S3 server on the loopback address, and a proxy before it that cuts connections."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from megatron.common import remote_files

BUCKET = "s3://corpora"
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


@dataclass
class Store:
    """Address of the server, and the proxy that clients connect to."""

    url: str
    proxy: "CuttingProxy"


class CuttingProxy:
    """A TCP proxy that resets a connection after `after` bytes of replies, `cuts` times."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self.cuts = self.cut = 0
        self.after = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def cut_next(self, cuts: int, *, after: int) -> None:
        """Cut `cuts` replies from now on, each when `after` bytes of it have passed."""
        self.cuts, self.after, self.cut = cuts, after, 0

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for pump in (self._requests, self._replies):
                    threading.Thread(target=pump, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := server.recv(1 << 16):
                passed += len(data)
                if self.cuts and passed > self.after:
                    self.cuts -= 1
                    self.cut += 1
                    client.sendall(data[: len(data) // 2])
                    break
                client.sendall(data)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def object_store() -> Iterator[Store]:
    """Start a server with the bucket `BUCKET`, and point the environment at a proxy before it.

    Requests that fail are repeated in this process without long pauses.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = CuttingProxy((host, port))
    variables = {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{proxy.port}",
    }
    S3FileSystem.clear_instance_cache()
    try:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            patched.setattr(remote_files, "FIRST_PAUSE_S", 0.01)
            boto3.client("s3").create_bucket(Bucket=BUCKET.removeprefix("s3://"))
            yield Store(f"http://{host}:{port}", proxy)
    finally:
        S3FileSystem.clear_instance_cache()
        proxy.close()
        server.stop()
