"""A server on 127.0.0.1 that speaks as much of the Hub's API as `snapshot_download` uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@dataclass
class Hub:
    """Repositories by name, each a folder, with one commit on the branch main."""

    repositories: dict[str, Path]
    gated: frozenset[str] = frozenset()
    broken: set[str] = field(default_factory=set)  # files whose download breaks off half-way, and then is refused
    downloads: Counter[str] = field(default_factory=Counter)  # "repository/file" to whole or partial GETs
    url: str = ""

    @contextmanager
    def serve(self) -> Iterator[Hub]:
        """The server, for as long as the block runs."""
        handler = type("Handler", (_Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        api = path.startswith("api/models/")
        name, folder = self._repository(path.removeprefix("api/models/"))
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/").split("/")
        action, revision = rest[0], rest[1] if len(rest) > 1 else "main"
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if not api:
            return self._file(name, folder / "/".join(rest[2:]), body)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if action == "tree":
            entries = [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": _etag(file),
                }
                for file in files
            ]
            return self._json(entries)
        siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
        return self._json(
            {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        )

    def _repository(self, path: str) -> tuple[str, Path | None]:
        for name, folder in self.hub.repositories.items():
            if path == name or path.startswith(name + "/"):
                return name, folder
        return path, None

    def _file(self, name: str, file: Path, body: bool) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        data = file.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        broken = file.name in self.hub.broken
        if body:
            self.hub.downloads[f"{name}/{file.name}"] += 1
            if broken and self.hub.downloads[f"{name}/{file.name}"] > 1:
                return self._refuse(404, "EntryNotFound")
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(data[start : len(data) // 2] if broken else data[start:])
            self.close_connection = broken

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
