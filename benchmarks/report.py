"""A run of the benchmarks as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Table:
    """Rows of text below a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Outcome:
    """What an item found: tables, remarks, and every number for the JSON."""

    title: str
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


IDLE = 0.5
BUSY = (
    "\n**The machine was not idle when this run began: do not quote these numbers.** Loops on "
    "several threads suffer most, because OpenMP's threads spin while they wait for each other."
)
LEGEND = (
    "Seconds a round without evaluation unless a table says otherwise. *MAD* is the median "
    "absolute deviation, *IQR* the range from the first to the third quartile, *n* the number of "
    "rounds. *ratio* is the median over the reference's median. All systems of a table were "
    "measured in turns in one run (A B C A B C ...); *ratio by repeat* compares the blocks that "
    "lie side by side."
)


def write(
    folder: Path, name: str, about: Mapping[str, Any], outcomes: Mapping[str, Outcome]
) -> Path:
    """Write NAME.md and NAME.json, and return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "about": about,
        "items": {item: asdict(outcome) for item, outcome in outcomes.items()},
    }
    _replace(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
    page = folder / f"{name}.md"
    _replace(page, _markdown(about, outcomes))
    return page


def _markdown(about: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    hardware = about["hardware"]
    lines = [
        "# Benchmarks",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, "
        f"{hardware['system']}. {about['started']}, `{about['command']}`, "
        f"{about['minutes']:.0f} minutes.",
        f"Load average (1, 5, 15 min) before: {_numbers(about['load_before'])}; "
        f"after: {_numbers(about['load_after'])}.",
        *([BUSY] if about["load_before"][0] > IDLE else []),
        "",
        *(f"- {name}: {text}" for name, text in about["software"].items()),
        "",
        LEGEND,
    ]
    for outcome in outcomes.values():
        lines += ["", f"## {outcome.title}"]
        for table in outcome.tables:
            lines += ["", f"**{table.title}**", "", _row(table.columns)]
            lines += [_row(["---"] * len(table.columns)), *map(_row, table.rows)]
        if outcome.notes:
            lines += ["", *(f"- {note}" for note in outcome.notes)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
