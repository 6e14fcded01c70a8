"""Write the locks: every package of an environment, by version and checksum.

`make lock` runs this with the Python whose environment is locked. pip resolves and reports; nothing
is installed. torch is left out: its processor-only and its CUDA build share a version and differ in
their bytes, so its version is pinned in constraints.txt, and it is installed in a step of its own.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HERE = ROOT / "requirements"
# Built with hatchling, so that building the project asks for nothing that is not in the lock.
SETS = {
    "ci": (f"{ROOT}[dev,docs]", "hatchling>=1.26", "editables"),
    "tools": ("pip-audit", "cyclonedx-bom"),
    "fuzz": ("atheris",),
}
# What a CUDA build of torch asks for, and the processor-only one does not.
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")


def report(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return what pip would install into an empty environment, from the packages' own claims."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--report", str(place)),
            *("-c", str(ROOT / "constraints.txt"), *wanted),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return list(json.loads(place.read_text())["install"])


def lines(packages: list[dict[str, Any]]) -> list[str]:
    """Return a line a package: its name, its version, and the checksum of its file."""
    found = []
    for package in packages:
        about = package["metadata"]
        name = re.sub(r"[-_.]+", "-", about["name"]).lower()
        if name in ("deltafl", "torch") or OF_CUDA.match(name):
            continue
        sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(f"{name}=={about['version']} --hash=sha256:{sha256}")
    return sorted(found)


def here() -> str:
    """Return what a lock is for: the checksums are of files that fit one kind of machine."""
    version = ".".join(platform.python_version_tuple()[:2])
    python = f"{platform.python_implementation()} {version}"
    return f"# {python} {platform.system()} {platform.machine()}"


def fits(lock: Path) -> bool:
    """Say whether a lock was made for an interpreter and a machine like these."""
    return lock.exists() and lock.read_text(encoding="utf-8").partition("\n")[0] == here()


def main() -> int:
    """Write the locks, or with `fits NAME` say whether one can be used here."""
    if sys.argv[1:2] == ["fits"]:
        return int(not fits(HERE / f"{sys.argv[2]}.lock"))
    for name, wanted in SETS.items():
        found = lines(report(wanted))
        head = [
            here(),
            "# `make lock` writes this anew; for pip install --require-hashes --no-deps.",
        ]
        (HERE / f"{name}.lock").write_text("\n".join([*head, *found]) + "\n", encoding="utf-8")
        print(f"requirements/{name}.lock: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
