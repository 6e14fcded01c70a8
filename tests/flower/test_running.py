"""A federation that is up, and all that can be done with one; the tests of this file share it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sysconfig
from pathlib import Path

import pytest
from federations import CONFIG, Run, rows
from leftovers import nothing_left_behind, processes, wait_until

from deltafl import run
from deltafl.cli import main
from deltafl.flower import certificates
from deltafl.flower.launch import HOST, Federation, environment, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.federation,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # lies outside of what is looked at
    with nothing_left_behind() as scratch, Federation(["", "", ""]) as federation:
        federation.scratch = scratch
        yield federation


def test_a_run_handed_to_a_federation_that_is_up(federation, tmp_path, capsys):
    words = ["--federation.clients", "2", "--run.rounds", "1", "--evaluate-nodes"]
    where = ["--superlink", federation.address.superlink]
    ca = ["--root-certificates", str(federation.files.ca)]
    out = ["--out", str(tmp_path / "run")]
    assert main(["federate", *where, *ca, *words, *out]) == 0
    assert "weights_sha256" in capsys.readouterr().out
    nodes = rows(tmp_path / "run" / "nodes.jsonl")
    assert [row["client"] for row in nodes] == [0, 1]
    assert all(0 < row["accuracy"] <= 1 for row in nodes)
    assert main(["federate", *where, *words, *out]) == 2  # it does not know whom to trust
    assert "no SuperLink answers" in capsys.readouterr().err
    bad = ["--client.options", "nonsense=1"]
    assert main(["federate", *where, *ca, *words, *bad, "--out", str(tmp_path / "bad")]) == 2
    assert "has no option 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {
            "client.objective": "moon",
            "server.optimizer": "weighted-average",
            "federation.samples": (20, 60),
            "run.record_step_sizes": True,
        },
        {
            "client.objective": "fedprox",
            "client.optimizer": "sps",
            "server.optimizer": "fedadam",
            "federation.participation": 0.6,
        },
    ],
    ids=["moon", "fedprox"],
)
def test_experiments_have_the_bits_of_a_simulation(federation, tmp_path, fields):
    config = CONFIG.override(**{"federation.clients": 3, "run.rounds": 2} | fields)
    running = Run(federation, tmp_path / "run", config)
    found, wanted = running.summary(), run(config, out=tmp_path / "simulated")
    assert found["weights_sha256"] == wanted.summary["weights_sha256"]
    real = rows(tmp_path / "run" / "metrics.jsonl")
    assert [{**row, "seconds": 0} for row in real] == [
        {**row, "seconds": 0} for row in wanted.metrics
    ]
    memories = list(federation.folder.glob(f"memory-*/{config.hash}/*.safetensors"))
    if config.client.objective == "moon":
        # Every node has its own, and the server none.
        assert {path.parents[1].name for path in memories} == {"memory-0", "memory-1", "memory-2"}
        files = (tmp_path / "run").rglob("*.safetensors")
        assert [path.name for path in files] == ["checkpoint.safetensors"]
    else:
        assert memories == []


def test_strangers_are_refused(federation):
    key, _ = certificates.write_node_key(federation.folder, "stranger")  # not registered
    stranger = federation.start_node(7, key)
    words = ["--superlink", federation.address.superlink, "--insecure", "--max-retries", "2"]
    port = ["--host", HOST, "--port", str(free_port())]
    plain = federation.spawn(
        "flower-supernode", "plain", *words, *port, "--node-config", "partition-id=7"
    )
    assert stranger.wait() != 0
    assert plain.wait() != 0
    assert "Failed to activate SuperNode" in federation.last_words("node-7")
    assert "SuperNode ID" not in federation.last_words("plain")


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("flower-own-app", 'privacy="none" rounds=2'),
        ("flower-own-app", 'privacy="central" rounds=2'),
        ("flower-secagg", "rounds=1"),
    ],
    ids=["own app", "central privacy", "secure aggregation"],
)
def test_the_examples_of_apps_of_ones_own(federation, tmp_path, example, options):
    out, home = tmp_path / "out.json", tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        "[superlink.here]\n"
        f'address = "{federation.address.superlink}"\n'
        f'root-certificates = "{federation.files.ca}"\n'
    )
    subprocess.run(
        ["flwr", "run", EXAMPLES / example, "here", "--run-config", f'out="{out}" {options}'],
        check=True,
        env=environment(home),
    )
    wait_until(lambda: out.exists() and out.read_text(), lambda: federation.last_words("superlink"))
    report = json.loads(out.read_text())
    assert report.get("refused", {}) == {}
    assert report["accuracies"][-1] > report["accuracies"][0] + 0.3


def test_nobody_is_called(federation):
    """Telemetry and update checks are off in all that was started, and in what that started."""
    programs = processes(federation.scratch)
    assert len(programs) >= 8  # a SuperLink and three SuperNodes, with a helper each
    for pid, command in programs.items():
        if "janitor" in command:
            continue
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {b"FLWR_TELEMETRY_ENABLED=0", b"FLWR_DISABLE_UPDATE_CHECK=1"} <= set(told), command


DEPLOYMENT = EXAMPLES / "deployment"


@pytest.fixture
def proxy(federation, tmp_path):
    """nginx with the file of the guide, on loopback, with the paths and ports of the test."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed: make nginx")
    port, files = free_port(), federation.files
    text = (DEPLOYMENT / "nginx.conf").read_text()
    for place, ours in {
        "listen 443 ssl;": f"listen {HOST}:{port} ssl;",
        "https://127.0.0.1:8000;": f"https://{federation.address.superlink};",
        "/etc/flower/server.pem": str(files.certificate),
        "/etc/flower/server.key": str(files.key),
        "/etc/flower/ca.pem": str(files.ca),
        "superlink.example.org": "localhost",
    }.items():
        assert place in text
        text = text.replace(place, ours)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    logs = f"error_log {tmp_path}/error.log;\npid {tmp_path}/pid;\n"
    http = f"access_log off;\n{folders}{text}"
    configuration = tmp_path / "nginx.conf"
    # As root it would hand its workers to another user, who may not look into this folder.
    user = "user root;\n" if os.getuid() == 0 else ""
    configuration.write_text(f"{user}{logs}daemon off;\nevents {{}}\nhttp {{\n{http}}}\n")
    words = [nginx, "-p", tmp_path, "-c", configuration, "-e", tmp_path / "error.log"]
    subprocess.run([*words, "-t", "-q"], check=True)
    with subprocess.Popen(words) as process:
        try:
            yield f"{HOST}:{port}"
        finally:
            process.terminate()


def test_only_nodes_get_through_the_proxy_of_the_guide(federation, proxy, tmp_path, capsys):
    key, public = certificates.write_node_key(federation.folder, "far")
    federation.control.register(public, "far")
    outside = federation.spawn(
        "flower-supernode",
        "far",
        *("--superlink", proxy, "--root-certificates", str(federation.files.ca)),
        *("--auth-supernode-private-key", str(key), "--host", HOST, "--port", str(free_port())),
        *("--node-config", "partition-id=3"),
    )
    config = CONFIG.override(**{"federation.clients": 4, "run.rounds": 1})
    assert Run(federation, tmp_path / "run", config).summary()["refused_updates"] == 0
    outside.terminate()
    outside.wait()
    # Whoever reaches the SuperLink itself may ask it anything, and the proxy lets nobody do that.
    ca = federation.files.ca
    assert answer(federation.address.superlink, "/v1/control/list-nodes", ca) == 200
    for path in (
        "/v1/control/list-nodes",
        "/v1/runtime/pull-messages",
        "/v1/",
        "//v1/control/list-nodes",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1/fleet%2f..%2fcontrol/list-nodes",
    ):
        assert answer(proxy, path, ca) == 403, path
    # This one is for nodes by nginx's reckoning, and for nobody by the SuperLink's.
    assert answer(proxy, "/v1/control/list-nodes/../../fleet/pull-messages", ca) == 404
    words = ["--superlink", proxy, "--root-certificates", str(federation.files.ca)]
    words += ["--federation.clients", "3", "--out", str(tmp_path / "refused")]
    assert main(["federate", *words]) == 2
    assert "the SuperLink refuses: HTTP 403" in capsys.readouterr().err


def answer(address, path, ca):
    """Return the status of a request as it stands: other clients tidy paths up."""
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(address, context=context)
    with contextlib.closing(connection):
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/protobuf")
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_takes_the_units_of_the_guide(tmp_path):
    for name in ("superlink.service", "supernode.service"):
        text = (DEPLOYMENT / name).read_text()
        scripts = sysconfig.get_path("scripts")
        (tmp_path / name).write_text(text.replace("/opt/deltafl/bin/", f"{scripts}/"))
        done = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / name],
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        # What a unit says to a program, the program knows.
        command = re.search(r"ExecStart=/opt/deltafl/bin/((.*\\\n)*.*)", text)[1]
        known = subprocess.run(
            [Path(scripts) / command.split()[0], "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=environment(tmp_path),
        ).stdout
        options = re.findall(r"(?<=\s)--[a-z-]+", command)
        assert len(options) >= 6
        assert [option for option in options if option not in known] == []
