"""The command line: `python -m benchmarks all`, `quick`, or `--only ITEM ...`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.environments import ROOT
from benchmarks.items import ITEMS, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome


def main() -> None:
    """Measure, writing the results after every item, so that none is lost."""
    options = _parse()
    quick = options.what == "quick"
    chosen = [
        item
        for name, item in ITEMS.items()
        if (name in options.only if options.only else (item.quick > 0 or not quick))
    ]
    name = "quick" if quick else "latest"
    settings = Settings(options.repeats, options.rounds, quick)
    minutes = [item.quick if quick else item.minutes for item in chosen]
    # Taken once: what later items find at work is ourselves.
    load_before = machine.load()
    outcomes: dict[str, Outcome] = {}
    for place, item in enumerate(chosen):
        progress = Progress(item.name, 60 * minutes[place], 60 * sum(minutes[place + 1 :]))
        about: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "hardware": machine.hardware(),
            "load_before": load_before,
        }
        begun = time.monotonic()
        try:
            outcome = item.measure(settings, progress)
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
            progress.say(reason)
            outcome = Outcome(item.title, notes=[reason])
        about |= {
            "software": machine.software(),
            "load_after": machine.load(),
            "minutes": (time.monotonic() - begun) / 60,
        }
        outcome.about = about
        outcomes[item.name] = outcome
        page = report.write(options.out, name, outcomes, list(ITEMS))
    print(page.read_text(encoding="utf-8"))
    print(f"written to {page} and {page.with_suffix('.json')}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "quick"), default="all")
    parser.add_argument(
        "--only", nargs="+", choices=ITEMS, metavar="ITEM", help=f"of {', '.join(ITEMS)}"
    )
    parser.add_argument("--repeats", type=_positive, help="turns of all systems")
    parser.add_argument("--rounds", type=_positive, help="rounds of a system in a turn")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("use 1 or more")
    return value


if __name__ == "__main__":
    main()
