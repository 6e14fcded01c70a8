"""Requests to the live page: whatever is sent, only its page and its data come back."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.faults.fuzz.target import Target
from deltafl.report.live import Handler
from deltafl.report.page import policy

PORT = 8000
PAGE, DATA = b"<!doctype html>the page", b'{"the": "data"}'
REFUSALS = (b"400", b"403", b"404", b"405", b"408", b"414", b"431", b"501", b"505")


@cache
def _server() -> Any:
    page = SimpleNamespace(
        html=lambda: PAGE, data=lambda: (DATA, '"tag"'), policy=policy(live=True)
    )
    return SimpleNamespace(server_port=PORT, page=page)


def _run(content: bytes, _folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        ours.sendall(content[:60_000])
        ours.shutdown(socket.SHUT_WR)
        Handler(theirs, ("127.0.0.1", 1), _server())
        theirs.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: ours.recv(65536), b""))
    for answer in answers.split(b"HTTP/1.1 ")[1:]:
        status = answer[:3]
        if status in (b"200", b"304"):
            body = answer.partition(b"\r\n\r\n")[2]
            assert body in (PAGE, DATA, b"")
        else:
            assert status in REFUSALS, answer
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
        assert b"\r\nContent-Security-Policy: " in answer
    assert not answers or answers.startswith(b"HTTP/1.1 ")


def _seeds() -> Sequence[bytes]:
    host = b"Host: 127.0.0.1:8000\r\n"
    return [
        b"GET / HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /data.json HTTP/1.1\r\n" + host + b'If-None-Match: "tag"\r\n\r\n',
        b"HEAD / HTTP/1.0\r\n" + host + b"\r\n",
        b"POST / HTTP/1.1\r\n" + host + b"Content-Length: 5\r\n\r\nhello",
        b"GET /../../etc/passwd HTTP/1.1\r\n" + host + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ]


TARGET = Target(
    "request",
    "HTTP requests to the live page",
    _run,
    _seeds,
    words=(b"GET", b"HTTP/1.1", b"Host:", b"Expect: 100-continue", b"Connection: keep-alive"),
)
