"""The live page: a server of this machine alone, whose page takes new data when a run has changed."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from caramba.artifacts.studio.page import build_data, build_page, find
from caramba.errors import ConfigError
from caramba.runs.index import stamp

_HOST = "127.0.0.1"
# What a report links to.
_SERVED = (".html", ".json", ".svg", ".png", ".pdf", ".csv", ".tex")


class _Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        # A page of another site could otherwise reach this server by a name of its own.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):
            self.send_error(403, f"this server answers to {_HOST} and localhost")
            return
        path = unquote(urlsplit(self.path).path, errors="surrogateescape")
        if path in ("/", "/index.html"):
            data = build_data(find(self.folder), out=self.folder)
            self._send("text/html; charset=utf-8", build_page(data, is_live=True).encode())
        elif path == "/data.json":
            data = build_data(find(self.folder), out=self.folder)
            self._send("application/json", json.dumps(data, allow_nan=False).encode())
        elif path == "/version":
            self._send("text/plain", folder_version(self.folder).encode())
        else:
            self._send_file(path)

    def _send_file(self, path: str) -> None:
        """Send a file of a run's artifacts; nothing else of this machine can be read."""
        file = Path(os.path.realpath(self.folder / path.replace("\0", "").lstrip("/")))
        root = Path(os.path.realpath(self.folder))
        is_artifact = file.is_relative_to(root) and "artifacts" in file.relative_to(root).parts
        if not is_artifact or file.suffix not in _SERVED or not file.is_file():
            self.send_error(404, "no such file of a run's artifacts")
            return
        self._send(mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes())

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests come every few seconds, and are not printed."""


def folder_version(folder: Path) -> str:
    """Return a text that changes when a run, or a file of one that the page shows, does."""
    found = find(folder)
    text = "\n".join(f"{run!s} {stamp(run)}" for run in found.runs)
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens, on a free port for 0.

    Raises:
        ConfigError: the port cannot be used.
    """
    handler = type("Handler", (_Handler,), {"folder": folder.absolute()})
    try:
        return ThreadingHTTPServer((_HOST, port), handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"studio: --port {port}: cannot listen there: {error}; give another, or 0") from None


def serve(folder: Path, port: int) -> int:
    """Serve until Ctrl-C."""
    with make_server(folder, port) as server:
        print(
            f"studio of {folder.absolute()}: http://{_HOST}:{server.server_address[1]} (Ctrl-C ends)",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
