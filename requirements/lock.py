"""Write ci.lock: every package of the development environment, by version and checksum.

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements" / "ci.lock"
# Built with, so that building the project asks for nothing that is not in the lock.
BUILD = ("hatchling>=1.26", "editables")
# What a CUDA build of torch asks for, and the processor-only one does not.
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")


def report() -> list[dict[str, Any]]:
    """Return what pip would install into an empty environment, from the packages' own claims."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--report", str(place)),
            *("-c", str(ROOT / "constraints.txt"), f"{ROOT}[dev,docs]", *BUILD),
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


def main() -> None:
    """Write the lock."""
    where = f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}"
    head = [
        f"# {where}, {platform.system()} {platform.machine()}; `make lock` writes this file anew.",
        "# pip install --require-hashes --no-deps -r requirements/ci.lock; torch comes apart from",
        "# it, by the version in constraints.txt (docs/reliability.md says why).",
    ]
    LOCK.write_text("\n".join([*head, *lines(report())]) + "\n", encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {len(LOCK.read_text().splitlines()) - len(head)} packages")


if __name__ == "__main__":
    main()
