"""`deltafl data`: the data sets, where they are, and how to get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from deltafl import data
from deltafl.cli.command import console
from deltafl.data import Status
from deltafl.errors import UserError, unknown


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
            escape(row.where) if row.here else f"[dim]{escape(row.where)}[/]",
            escape(row.licence),
        )
    console.print(table)
    console.print(
        f"data folder {data.folders()[0]} (DELTAFL_DATA changes it)", soft_wrap=True, markup=False
    )


def get(names: Sequence[str]) -> None:
    """Bring data sets to this machine."""
    if not names:
        raise UserError(f"data get needs names: {' '.join(data.names())}, or all")
    _each(names, data.get, "is here:")


def verify(names: Sequence[str]) -> None:
    """Check every byte of the data sets named, or of all that are here."""
    _each(names or [row.name for row in data.status() if row.here], data.verify, "is intact:")


def _each(names: Sequence[str], action: Callable[[str], Status], outcome: str) -> None:
    for name in data.names() if list(names) == ["all"] else names:
        row = action(name)
        console.print(f"{row.name} {outcome} {row.where}", soft_wrap=True, markup=False)


ACTIONS = {"list": show, "get": get, "verify": verify}


class DataCommand:
    """A command with actions of its own instead of options."""

    name = "data"
    summary = "List, get and verify the data sets. Each is checked against known checksums."

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
            "clients npm and apt."
        )


COMMAND = DataCommand()
