"""Everything of Flower that deltafl leans on: a new version that changes it fails here first."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

SIGNATURES = {
    "flwr.serverapp:Grid.get_node_ids": ["self"],
    "flwr.serverapp:Grid.push_messages": ["self", "messages"],
    "flwr.serverapp:Grid.pull_messages": ["self", "message_ids"],
    "flwr.serverapp:ServerApp.main": ["self"],
    "flwr.serverapp.strategy:Strategy.configure_train": [
        *("self", "server_round", "arrays", "config", "grid"),
    ],
    "flwr.serverapp.strategy:Strategy.aggregate_train": ["self", "server_round", "replies"],
    "flwr.serverapp.strategy:Strategy.configure_evaluate": [
        *("self", "server_round", "arrays", "config", "grid"),
    ],
    "flwr.serverapp.strategy:Strategy.aggregate_evaluate": ["self", "server_round", "replies"],
    "flwr.serverapp.strategy:Strategy.summary": ["self"],
    "flwr.serverapp.strategy:DifferentialPrivacyServerSideFixedClipping": [
        *("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients", "accountant"),
    ],
    "flwr.clientapp:ClientApp.train": ["self", "action", "mods"],
    "flwr.clientapp:ClientApp.evaluate": ["self", "action", "mods"],
    "flwr.clientapp:ClientApp.query": ["self", "action", "mods"],
    "flwr.app:Error": ["code", "reason"],
    "flwr.app:Array.numpy": ["self"],
    "flwr.app:ArrayRecord.to_torch_state_dict": ["self", "keep_input"],
    "flwr.app.message:make_message": ["metadata", "content", "error"],
    "flwr.cli.build:build_fab_from_files": ["files"],
    "flwr.common.serde:fab_to_proto": ["fab"],
    "flwr.common.serde:user_config_to_proto": ["user_config"],
    "flwr.supercore.fab:Fab": ["hash_str", "content", "verifications"],
    "flwr.supercore.control:ControlHttpClient.from_server_address": [
        *("server_address", "insecure", "root_certificates", "interceptors", "retry_invoker"),
    ],
    "flwr.supercore.control:ControlHttpClient.StartRun": ["self", "request"],
    "flwr.supercore.control:ControlHttpClient.StopRun": ["self", "request"],
    "flwr.supercore.control:ControlHttpClient.StreamLogs": ["self", "request"],
    "flwr.supercore.control:ControlHttpClient.ListNodes": ["self", "request"],
    "flwr.supercore.control:ControlHttpClient.RegisterNode": ["self", "request"],
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": ["component_name"],
    "flwr.supercore.error:FlowerError.from_json": ["value"],
}
FIELDS = {
    "StartRunRequest": {"fab", "override_config", "federation"},
    "StartRunResponse": {"run_id"},
    "StopRunRequest": {"run_id"},
    "StreamLogsRequest": {"run_id", "after_timestamp"},
    "StreamLogsResponse": {"log_output", "latest_timestamp"},
    "RegisterNodeRequest": {"public_key", "name"},
    "ListNodesRequest": set(),
}
OPTIONS = {
    "flower-superlink": [
        *("--host", "--port", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ],
    "flower-supernode": [
        *("--superlink", "--root-certificates", "--auth-supernode-private-key"),
        *("--host", "--port", "--node-config"),
    ],
}


def test_the_version_is_the_one_that_was_tried():
    assert version("flwr").startswith("1.41.")


@pytest.mark.parametrize("place", SIGNATURES)
def test_signatures(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert list(inspect.signature(found).parameters) == SIGNATURES[place]


@pytest.mark.parametrize("name", FIELDS)
def test_requests(name):
    from flwr.proto import control_pb2

    fields = {field.name for field in getattr(control_pb2, name).DESCRIPTOR.fields}
    assert fields >= FIELDS[name]


def test_names():
    from flwr.app import MessageType
    from flwr.common.constant import ErrorCode
    from flwr.supercore import constant, telemetry
    from flwr.supercore.superexec import run_superexec

    assert (*("train", "evaluate", "query"),) == (
        MessageType.TRAIN,
        MessageType.EVALUATE,
        MessageType.QUERY,
    )
    assert isinstance(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, int)
    assert isinstance(ErrorCode.MESSAGE_UNAVAILABLE, int)
    assert constant.FLWR_DISABLE_UPDATE_CHECK == "FLWR_DISABLE_UPDATE_CHECK"
    assert hasattr(telemetry, "FLWR_TELEMETRY_ENABLED")
    assert run_superexec._TASK_POLL_INTERVAL_ENV == "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


@pytest.mark.parametrize("program", OPTIONS)
def test_options_of_programs(program):
    place = Path(sysconfig.get_path("scripts")) / program
    text = subprocess.run(
        [place, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "HOME": "/nowhere"},
    ).stdout
    assert [option for option in OPTIONS[program] if option not in text] == []


def test_secure_aggregation_is_for_the_old_interface_only():
    """When this fails, Flower has SecAgg+ for messages, and docs/federation.md is out of date."""
    from flwr.clientapp import mod

    assert not [name for name in dir(mod) if "secagg" in name.lower()]
