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
    about: dict[str, Any] = field(default_factory=dict)
    """When, how and on what it was measured."""


IDLE = 0.5
BUSY = (
    "**The machine was not idle when this began: do not quote these numbers.** Loops on several "
    "threads suffer most, because OpenMP's threads spin while they wait for each other."
)
LEGEND = (
    "Seconds a round without evaluation unless a table says otherwise. *MAD* is the median "
    "absolute deviation, *IQR* the range from the first to the third quartile, *n* the number of "
    "rounds. *ratio* is the median over the reference's median. All systems of a table were "
    "measured in turns in one run (A B C A B C ...); *ratio by repeat* compares the blocks that "
    "lie side by side."
)


def write(folder: Path, name: str, outcomes: Mapping[str, Outcome], order: Sequence[str]) -> Path:
    """Write NAME.md and NAME.json, and return the first.

    Items that were not measured now stay as they were: each says when it was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}.json"
    known = read(place) | outcomes
    known = {item: known[item] for item in order if item in known}
    content = {item: asdict(outcome) for item, outcome in known.items()}
    _replace(place, json.dumps(content, indent=1) + "\n")
    page = folder / f"{name}.md"
    _replace(page, _markdown(known))
    return page


def read(place: Path) -> dict[str, Outcome]:
    """Return what a file of an earlier run has, by the names of the items."""
    if not place.exists():
        return {}
    items = json.loads(place.read_text(encoding="utf-8"))
    return {
        name: Outcome(**{**item, "tables": [Table(**table) for table in item["tables"]]})
        for name, item in items.items()
    }


def _markdown(outcomes: Mapping[str, Outcome]) -> str:
    sections = [f"# Benchmarks\n\n{LEGEND}\n", *map(section, outcomes.values())]
    return "\n".join(sections)


def section(outcome: Outcome) -> str:
    """Return an item's part of the page."""
    lines = [f"## {outcome.title}", "", *_where(outcome.about)]
    for table in outcome.tables:
        lines += ["", f"**{table.title}**", "", _row(table.columns)]
        lines += [_row(["---"] * len(table.columns)), *map(_row, table.rows)]
    if outcome.notes:
        lines += ["", *(f"- {note}" for note in outcome.notes)]
    return "\n".join(lines) + "\n"


def _where(about: Mapping[str, Any]) -> list[str]:
    """Say what a section was measured on, by which command, and how busy the machine was."""
    hardware = about["hardware"]
    software = "; ".join(f"{name} {text}" for name, text in about["software"].items())
    return [
        f"`{about['command']}`, {about['started']}, {about['minutes']:.0f} minutes, on "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, "
        f"{hardware['system']}; {software}. Load average (1, 5, 15 min) before: "
        f"{_numbers(about['load_before'])}; after: {_numbers(about['load_after'])}.",
        *(["", BUSY] if about["load_before"][0] > IDLE else []),
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
