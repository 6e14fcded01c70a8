"""The peers' own virtual environments, made from requirements/ on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
INSTALL_SECONDS = 1800

# Nobody is told that a benchmark runs, and nothing is looked up.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class UnavailableError(Exception):
    """A peer cannot be installed; the message says why."""


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, installing it if it is not there yet."""
    wanted = HERE / "requirements" / f"{peer}.txt"
    constraints = ROOT / "constraints.txt"
    digest = hashlib.sha256(wanted.read_bytes() + constraints.read_bytes()).hexdigest()
    folder = HERE / ".envs" / peer
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not (stamp.exists() and stamp.read_text() == digest):
        print(f"==> installing {peer} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run(*pip, "-c", str(constraints), "-r", str(wanted))
        stamp.write_text(digest)
    return python


def versions(peer: str) -> dict[str, str]:
    """Return the versions that matter in a peer's environment."""
    code = (
        "import importlib.metadata as m, json;"
        "names = [d.metadata['Name'] for d in m.distributions()];"
        "print(json.dumps({n: m.version(n) for n in names"
        " if n in ('pfl', 'flwr', 'ray', 'torch', 'numpy')}))"
    )
    python = HERE / ".envs" / peer / "bin" / "python"
    if not python.exists():
        return {}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    import json  # noqa: PLC0415

    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            env={**os.environ, **QUIET},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"its installation took over {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(f"it cannot be installed: {reason}")
