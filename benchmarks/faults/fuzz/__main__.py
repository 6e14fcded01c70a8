"""Fuzz the targets by coverage: `python -m benchmarks.faults.fuzz [NAME ...] [--runs N]`.

It needs atheris (`make fuzz` installs it). Each target runs in a process of its own, with a limit
on its memory and on the time of one input; what broke it is left in the folder of the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.fuzz.corpus import regressions
from benchmarks.faults.fuzz.targets import TARGETS
from benchmarks.machine import hardware

SECONDS = 120
"""An input may take so long, on a machine that is busy with other things."""
MEGABYTES = 2048
"""A process may hold so much; torch alone is a quarter of it."""
LONGEST = 16384
LINE = re.compile(rb"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/\S+.*rss: (\d+)Mb")


def main() -> int:
    """Fuzz, write and print what came of it; 1 if anything broke."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder of the results")
    given = parser.parse_args()
    if strange := set(given.names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(strange))}; there are {', '.join(TARGETS)}")
    results = [fuzz(name, given.runs, given.out) for name in given.names or TARGETS]
    print(table(results))
    return int(any(result["faults"] for result in results))


def fuzz(name: str, runs: int, out: Path) -> dict[str, Any]:
    """Fuzz one target, and return what came of it."""
    corpus, broken = out / "corpus" / name, out / "broken" / name
    for folder in (corpus, broken):
        folder.mkdir(parents=True, exist_ok=True)
    target = TARGETS[name]
    for content in (*target.intact, *regressions(name)):
        (corpus / hashlib.sha1(content).hexdigest()).write_bytes(content)
    words = "".join(
        '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words
    )
    dictionary = out / f"{name}.dict"
    dictionary.write_text(words)
    command = [
        *(sys.executable, "-m", "benchmarks.faults.fuzz.drive", name, str(corpus)),
        *(f"-runs={runs}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}"),
        *(f"-max_len={LONGEST}", f"-artifact_prefix={broken}/", "-seed=1", "-use_value_profile=0"),
        *([f"-dict={dictionary}"] if words else []),
    ]
    start = time.monotonic()
    log = out / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DELTAFL_NATIVE": "0"},
            check=False,
        ).returncode
    lines = LINE.findall(log.read_bytes())
    done, edges, features, kept, megabytes = map(int, lines[-1]) if lines else (0,) * 5
    result = {
        "target": name,
        "reads": target.reads,
        "runs": done,
        "edges": edges,
        "features": features,
        "kept": kept,
        "megabytes": megabytes,
        "seconds": round(time.monotonic() - start, 1),
        "faults": int(code != 0),
        "machine": hardware(),
    }
    (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{name}: {done} inputs, {edges} edges, exit code {code}", file=sys.stderr, flush=True)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| input | inputs | edges | kept | MB | faults |", "|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['reads']} | {row['runs']:,} | {row['edges']} | {row['kept']} | "
        f"{row['megabytes']} | {row['faults']} |"
        for row in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
