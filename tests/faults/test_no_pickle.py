"""Where the project unpickles, and that it is only ever what its own processes just pickled."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import deltafl
from deltafl.engine.workers import Worker

ROOT = Path(deltafl.__file__).parent
# Between the main process and the workers it starts; and Ray, whose own protocol is pickle.
PRIVATE = {"engine/worker.py", "engine/workers.py", "engine/shared.py", "engine/out_of_band.py"}
RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_only_the_engines_own_messages_are_pickled() -> None:
    assert {name for name, tree in modules() if imported(tree) & RUNS_CODE} == PRIVATE


def test_nothing_else_could_run_what_it_reads() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in CALLS, name
            if isinstance(called, ast.Attribute) and called.attr == "load":
                owner = called.value
                assert not (isinstance(owner, ast.Name) and owner.id == "torch"), name
                if isinstance(owner, ast.Name) and owner.id == "np":
                    given = {keyword.arg: keyword.value for keyword in node.keywords}
                    refused = given.get("allow_pickle")
                    assert isinstance(refused, ast.Constant), name
                    assert refused.value is False, name
            for keyword in node.keywords:
                if keyword.arg == "shell":
                    raise AssertionError(f"{name} starts a shell")


def test_nobody_else_can_reach_a_worker() -> None:
    worker = Worker()
    try:
        with socket.socket(fileno=os.dup(worker.connection.fileno())) as ours:
            # A pair has no name in any name space: only who inherits an end of it holds one.
            assert ours.family == socket.AF_UNIX
            assert ours.getsockname() == ""
            assert ours.getpeername() == ""
    finally:
        worker.close()
