from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deltafl.cli import main
from deltafl.experiment import Config, run
from deltafl.report.live import LivePage, LiveServer

SMALL = {
    "task": "digits-softmax",
    "federation": {"clients": 6, "samples": 30, "participation": 0.5},
    "client": {"batch_size": 8},
    "run": {"rounds": 5},
    "engine": {"kind": "inline"},
}


class Gate:
    """A listener that lets a run go on round by round."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.seen = threading.Semaphore(0)

    def started(self, config: Config, done: int) -> None:
        pass

    def finished_round(self, report: object) -> None:
        self.seen.release()
        assert self.permits.acquire(timeout=60)

    def finished(self, summary: dict[str, Any]) -> None:
        self.seen.release()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], LiveServer]]:
    servers = []

    def start(folder: Path) -> LiveServer:
        server = LiveServer(LivePage(folder, lambda _: None, "live"))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def finished(comparison: Path, tmp_path: Path) -> Path:
    source = next(comparison.glob("*delta-sgd*"))
    shutil.copytree(source, tmp_path / "runs" / "one")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


def ask(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{server.server_port}"} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_it_serves_its_page_and_its_data(serve: Any, finished: Path) -> None:
    server = serve(finished)
    status, headers, body = ask(server, "/")
    assert status == 200
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"connect-src &#x27;self&#x27;" in body or b"connect-src 'self'" in body
    status, headers, body = ask(server, "/data.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    (shown,) = json.loads(body)["runs"]
    assert shown["name"] == "one"
    status, again, body = ask(server, "/data.json", If_None_Match=headers["ETag"])
    assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
    status, head, body = ask(server, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(head["Content-Length"]) > 10_000


@pytest.mark.parametrize(
    "path",
    [
        "/one/config.toml",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/data.json/",
        "/data.json?x=1",
        "/favicon.ico",
        "secret.txt",
        "http://127.0.0.1/secret.txt",
    ],
)
def test_it_serves_nothing_else(serve: Any, finished: Path, path: str) -> None:
    status, _, body = ask(serve(finished), path)
    assert status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_only_get_and_head(serve: Any, finished: Path, method: str) -> None:
    status, headers, _ = ask(serve(finished), "/", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_the_host_must_be_this_machine(serve: Any, finished: Path) -> None:
    server = serve(finished)
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, "/data.json", Host=host)[0] == 403
    assert ask(server, "/data.json", Host=f"localhost:{port}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_a_poll_reads_only_what_changed(
    serve: Any, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(finished)
    _, first, _ = ask(server, "/data.json")
    monkeypatch.setattr("deltafl.report.runs._read", lambda *_: pytest.fail("read again"))
    _, second, _ = ask(server, "/data.json")
    assert first["ETag"] == second["ETag"]
    monkeypatch.undo()
    metrics = finished / "one" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    (finished / "one" / "summary.json").unlink()
    _, third, body = ask(server, "/data.json")
    assert third["ETag"] != first["ETag"]
    assert json.loads(body)["runs"][0]["done"] == 2


def test_a_folder_without_runs_waits_for_them(serve: Any, tmp_path: Path, finished: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    server = serve(empty)
    assert json.loads(ask(server, "/data.json")[2])["runs"] == []
    shutil.copytree(finished / "one", empty / "one")
    assert len(json.loads(ask(server, "/data.json")[2])["runs"]) == 1


def test_a_port_that_is_taken(serve: Any, finished: Path, capsys: Any) -> None:
    port = serve(finished).server_port
    assert main(["report", str(finished), "--live", "--port", str(port)]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly(finished: Path) -> None:
    words = [sys.executable, "-m", "deltafl", "report", str(finished), "--live"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[2]
        connection = http.client.HTTPConnection(address.split("/")[2], timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "live page ended" in out


def test_the_page_follows_a_run_in_progress(
    visit: Callable[..., Page], serve: Any, tmp_path: Path
) -> None:
    gate = Gate()
    config = Config.model_validate(SMALL)
    folder = tmp_path / "runs" / "going"
    folder.parent.mkdir()
    page = visit(serve(tmp_path / "runs").address)
    overview = page.locator("#overview")
    expect(overview).to_have_text("Waiting for the first run.")
    going = threading.Thread(
        target=run, args=(config,), kwargs={"out": folder, "listeners": [gate]}, daemon=True
    )
    going.start()
    assert gate.seen.acquire(timeout=60)
    begun = "1 run; 1 not finished, Δ-SGD at round 1 of 5"
    expect(overview).to_have_text(begun, timeout=20_000)
    expect(page.locator("#table td")).to_contain_text("round 1 of 5")
    page.locator("#runs summary").click()
    page.evaluate("window.same = true")
    gate.permits.release()
    assert gate.seen.acquire(timeout=60)
    expect(overview).to_contain_text("round 2 of 5", timeout=20_000)
    expect(page.locator("#curves .frame")).to_have_attribute("aria-valuemax", "2")
    gate.permits.release(10)
    going.join(timeout=60)
    expect(overview).to_have_text("1 run", timeout=20_000)
    summary = json.loads((folder / "summary.json").read_text())
    accuracy = 100 * summary["final_test_accuracy"]
    expect(page.locator("#table td span")).to_have_text(f"{accuracy:.1f}")
    # Never loaded anew, and what was unfolded still is.
    assert page.evaluate("window.same")
    expect(page.locator("#runs details[open]")).to_contain_text(summary["weights_sha256"])


def test_every_answer_says_what_a_browser_may_do_with_it(serve: Any, finished: Path) -> None:
    server = serve(finished)
    for path, method, status in (
        ("/", "GET", 200),
        ("/data.json", "GET", 200),
        ("/x", "GET", 404),
        ("/", "POST", 405),
    ):
        answer, headers, _ = ask(server, path, method)
        assert answer == status
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert policy.endswith("frame-ancestors 'none'")
        assert ("script-src 'sha256-" in policy) == (path == "/" and method == "GET")
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET <script>alert(1)</script> x y z\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\nHost: 127.0.0.1:2\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_like_everything_else(
    serve: Any, finished: Path, request_: bytes
) -> None:
    server = serve(finished)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 505")
    assert b"\r\nContent-Security-Policy: default-src 'none'" in answer
    assert b"\r\nContent-Type: text/plain" in answer
    assert b"script>" not in answer


def test_it_cannot_be_reached_from_elsewhere(serve: Any, finished: Path) -> None:
    server = serve(finished)
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.address_family == socket.AF_INET
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.server_port), timeout=5)
