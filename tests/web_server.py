"""A web server on the loopback address: files with ETags and ranges, and repositories as of a hub."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_REPOSITORY = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/tree/main(?:/(.*))?)?")
_RESOLVED = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/main/(.*)")


class Web:
    """Files by path; those of repositories are below `models/OWNER/NAME` and `datasets/OWNER/NAME`."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.files: dict[str, bytes] = {}

    def reply(self, target: str) -> bytes | list[dict] | dict | None:
        """Return a file, or what the interface of a hub answers; None if there is nothing."""
        path = target.partition("?")[0]
        if found := _RESOLVED.fullmatch(path):
            kind, repository, name = found.groups()
            return self.files.get(f"{'datasets' if kind else 'models'}/{repository}/{name}")
        found = _REPOSITORY.fullmatch(path)
        if not found:
            return self.files.get(path[1:])
        kind, repository, folder = found.groups()
        root = f"{kind}/{repository}/"
        names = [name.removeprefix(root) for name in self.files if name.startswith(root)]
        if "/tree/" not in path:
            return {"id": repository, "sha": "0" * 40} if names else None
        below = f"{folder}/" if folder else ""
        return list(self._entries(root, sorted(names), below, "recursive=true" in target.lower()))

    def _entries(
        self, root: str, names: list[str], below: str, is_recursive: bool
    ) -> Iterator[dict]:
        folders = set()
        for name in names:
            if not name.startswith(below):
                continue
            inner = name.removeprefix(below).split("/")
            for depth in range(1, len(inner)) if is_recursive else [1] * (len(inner) > 1):
                folder = below + "/".join(inner[:depth])
                if folder not in folders:
                    folders.add(folder)
                    yield {"type": "directory", "path": folder, "oid": "0" * 40}
            if is_recursive or len(inner) == 1:
                data = self.files[root + name]
                oid = hashlib.sha1(data).hexdigest()
                yield {"type": "file", "path": name, "size": len(data), "oid": oid}


@contextmanager
def web_server() -> Iterator[Web]:
    """Serve `files` while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = web.reply(self.path)
            if found is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                data = b""
            else:
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                etag, size = hashlib.sha1(data).hexdigest(), len(data)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                self.send_response(206 if wanted else 200)
                if wanted:
                    first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
                    data = data[first : last + 1]
                    self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
                self.send_header("ETag", f'"{etag}"')
                self.send_header("Accept-Ranges", "bytes")
                if not isinstance(found, bytes):
                    self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web = Web(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
