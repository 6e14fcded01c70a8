"""A page that follows runs while they go on, served to this machine alone.

It serves the page and its data and nothing else: no path leads to a file. The Host header is
checked, so that a web site which points a name of its own at this machine (DNS rebinding) cannot
read it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deltafl.errors import UserError
from deltafl.report.page import Theirs, content, document, policy
from deltafl.report.partitions import Partitions
from deltafl.report.runs import RunReader
from deltafl.version import __version__

HOST = "127.0.0.1"
NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""What a browser may load for an answer that is not the page."""


class LivePage:
    """The page's data as bytes; made again only when a run folder has changed."""

    def __init__(self, folder: Path, theirs: Theirs, title: str) -> None:
        self._reader = RunReader(folder)
        self._partitions = Partitions()
        self._theirs = theirs
        self._title = title
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {}
        self._data = b""

    @property
    def policy(self) -> str:
        """What the page may load and run, and who may show it inside a page of theirs: nobody."""
        return f"{policy(live=True)}; frame-ancestors 'none'"

    def html(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            self._refresh()
            return document(self._content, live=True).encode()

    def data(self) -> tuple[bytes, str]:
        """Return what the page asks for again and again, and a tag that names its version."""
        with self._lock:
            self._refresh()
            return self._data, f'"{hashlib.sha256(self._data).hexdigest()[:16]}"'

    def _refresh(self) -> None:
        if not self._reader.refresh() and self._content:
            return
        runs = self._reader.runs
        self._content = content(
            runs,
            theirs=self._theirs,
            title=self._title,
            partitions=self._partitions.of(runs),
            warnings=self._reader.warnings,
        )
        self._data = json.dumps(self._content, allow_nan=False).encode()


class LiveServer(ThreadingHTTPServer):
    """Serves a live page on this machine; `address` says where."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot serve on port {port}: {error.strerror}; choose another --port"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that hangs up in the middle of an answer is no event."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of two paths."""

    server: LiveServer
    server_version = f"deltafl/{__version__}"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # a client that never finishes its request does not keep a thread for ever

    def do_GET(self) -> None:
        """Answer with the page or its data."""
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            body = self.server.page.html()
            self._send(body, "text/html; charset=utf-8", policy=self.server.page.policy)
        elif self.path == "/data.json":
            data, tag = self.server.page.data()
            if self.headers.get("If-None-Match") == tag:
                self._send(b"", "application/json", HTTPStatus.NOT_MODIFIED, tag)
            else:
                self._send(data, "application/json", tag=tag)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def handle_expect_100(self) -> bool:
        """Encourage nobody to send a body: none is ever read."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request at all as everything else is refused, with the same headers."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or ""
        self._refuse(HTTPStatus(code))

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Answer HEAD as GET, without its body, and refuse every other method."""
        if name == "do_HEAD":
            return self.do_GET
        if name.startswith("do_"):
            return self._not_allowed
        raise AttributeError(name)

    def _not_allowed(self) -> None:
        self.close_connection = True  # the body of the request was not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    def _is_ours(self) -> bool:
        port = self.server.server_port
        return self.headers.get_all("Host") in ([f"{HOST}:{port}"], [f"localhost:{port}"])

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(f"{status} {status.phrase}\n".encode(), "text/plain; charset=utf-8", status)

    def _send(
        self,
        body: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        tag: str | None = None,
        policy: str = NOTHING,
    ) -> None:
        self.request_version = self.protocol_version  # also to who asks in the manner of 1991
        self.send_response(status)
        headers = {
            # The page's own policy, inside it, allows its script; nothing else here has one.
            "Content-Security-Policy": policy,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        if tag is not None:
            headers["ETag"] = tag
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page that asks every second would fill the terminal."""
