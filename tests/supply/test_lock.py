"""What CI installs is written down, by version and checksum, and is what the project asks for."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"([a-z0-9-]+)==([^ ]+) --hash=sha256:([0-9a-f]{64})")
LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.lock"))


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "a line without exactly a name, a version and a checksum"
    return {line[1]: line[2] for line in found if line}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_a_version_and_a_checksum(name: str) -> None:
    assert locked(name)
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text
    assert "--index" not in text
    assert text.startswith("# CPython 3.11 Linux x86_64\n")


def asked(extras: set[str]) -> list[Requirement]:
    """What the project itself asks for, its own extras taken apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    todo, seen = sorted(extras), set()
    while todo:
        extra = todo.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            need = Requirement(line)
            if need.name == "deltafl":
                todo += need.extras
            else:
                wanted.append(need)
    return wanted


def test_the_lock_holds_all_that_the_project_asks_for() -> None:
    versions = locked("ci.lock")
    pins = {r.name: r for r in map(Requirement, (ROOT / "constraints.txt").read_text().split())}
    assert str(pins["torch"].specifier).startswith("==")
    assert "torch" not in versions
    assert not [name for name in versions if name.startswith(("nvidia-", "cuda-", "triton"))]
    for need in asked({"dev", "docs"}):
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name != "torch":
            assert name in versions, f"{name} is not in the lock: make lock"
            assert versions[name] in need.specifier, f"{name} has moved on: make lock"
    assert {"hatchling", "editables"} <= versions.keys()  # the project is built without a network


def test_the_bill_of_materials_lists_what_is_locked_and_nothing_of_this_machine() -> None:
    path = ROOT / "results" / "sbom.cdx.json"
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert not {"serialNumber"} & bill.keys()
    assert "timestamp" not in bill["metadata"]
    assert "://" not in path.read_text().replace(bill["$schema"], "")
    listed = {re.sub(r"[-_.]+", "-", one["name"]).lower() for one in bill["components"]}
    needed = {re.sub(r"[-_.]+", "-", need.name).lower() for need in asked({"dev", "docs"})}
    assert needed <= listed
    page = (ROOT / "docs" / "licences.md").read_text()
    assert all(f"| {name} |" in page for name in listed - {"deltafl"})
