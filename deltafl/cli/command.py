"""What the commands share: their options on top of the configuration, help, and the console."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltafl.cli import arguments
from deltafl.errors import UserError
from deltafl.experiment.config import Config, read_toml, set_path, validated
from deltafl.untrusted import brief, inside

console = Console(highlight=False)


@dataclass(frozen=True)
class Command:
    """A sub-command: its options, what it does, and how it is used."""

    name: str
    summary: str
    options: type[BaseModel]
    run: Callable[..., None]
    examples: tuple[str, ...]
    positional: str = ""

    def __call__(self, words: Sequence[str]) -> None:
        """Read the words after the command's name and run it."""
        if {"-h", "--help"} & set(words):
            self.help()
            return
        self.run(read(self.options, words, self.positional))

    def help(self) -> None:
        """Print what the command does and every option with its default."""
        usage = f"deltafl {self.name} {self.positional} [OPTIONS]".replace("  ", " ")
        console.print(f"[bold]{escape(usage)}[/]\n\n{escape(self.summary)}\n")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", max_width=24)
        table.add_column()
        section = ""
        for name, field in arguments.options(self.options):
            if (head := name.rpartition(".")[0]) != section:
                section = head
                table.add_row("")
            default = field.get_default(call_default_factory=True, validated_data={})
            words = " ".join(default) if isinstance(default, list) else default
            shown = "" if words in (None, PydanticUndefined, "", {}, ()) else f" \\[{words}]"
            table.add_row(
                f"--{name}",
                escape(arguments.kind(field)),
                f"{escape(field.description or '')}{shown}",
            )
        console.print(table)
        console.print("\n[bold]Examples[/]")
        for example in self.examples:
            console.print(f"  {escape(example)}", soft_wrap=True)


Options = TypeVar("Options", bound=BaseModel)


def read(model: type[Options], words: Sequence[str], positional: str) -> Options:
    """Build a command's options from the words, and from the file that the first may name.

    A positional word other than a TOML file is the option of its name: DIR is --dir.
    """
    files, values = arguments.parse(model, words)
    if len(files) > (1 if positional else 0):
        raise UserError(f"unexpected {files[-1]!r}: options start with --, see --help")
    tree: dict[str, Any] = {}
    toml = positional == "[CONFIG.toml]"
    if files and toml:
        tree = read_toml(Path(files[0]))
        check_file(model, tree, files[0], values)
    elif files:
        tree = {positional.lower(): files[0]}
    for path, value in values.items():
        set_path(tree, path, value)
    where = f"in {files[0]} or on the command line" if files and toml else "on the command line"
    return validated(model, tree, where)


def check_file(
    model: type[BaseModel], tree: dict[str, Any], file: str, said: Collection[str]
) -> None:
    """Refuse what a file, which may be somebody else's, must not decide alone.

    A path that leads out of the working directory, code to import, and another machine to work
    on: each is followed when the user has `said` so on the command line.
    """
    for name, field in model.model_fields.items():
        if Path not in (arguments.members(field.annotation) + _members_of_list(field.annotation)):
            continue
        given = None if name in said else tree.get(name)
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, str) and not inside(Path(path), Path.cwd()):
                raise _beyond(name, path, file, "leads out of this folder")
    for name, given in (
        ("optimizers", tree.get("optimizers")),
        ("client.optimizer", _below(tree, "client").get("optimizer")),
    ):
        for optimizer in given if isinstance(given, list) else [given]:
            code = isinstance(optimizer, str) and (":" in optimizer or "." in optimizer)
            if code and name not in said:
                raise _beyond(name, optimizer, file, "is code to import")
    address = _below(tree, "engine").get("address")
    away = isinstance(address, str) and address.rpartition(":")[0] not in ("", *LOOPBACK)
    if away and "engine.address" not in said:
        raise _beyond("engine.address", address, file, "is another machine")


LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def _beyond(name: str, value: object, file: str, why: str) -> UserError:
    option = f"--{name.replace('_', '-')}"
    return UserError(
        f"{name} {brief(value)} in {file} {why}: if you trust it, give {option} on the command line"
    )


def _below(tree: dict[str, Any], section: str) -> dict[str, Any]:
    inner = tree.get(section)
    return inner if isinstance(inner, dict) else {}


def _members_of_list(annotation: Any) -> list[Any]:
    return [inner for member in arguments.members(annotation) for inner in get_args(member)]


def config_of(options: Config) -> Config:
    """Return the configuration without what only the command knows."""
    return Config.model_validate(options.model_dump(include=set(Config.model_fields)))


def refusals(summary: Mapping[str, Any]) -> str:
    """Say how many updates were refused, and how many rounds were left with none, if any."""
    refused, unchanged = summary["refused_updates"], summary.get("unchanged_rounds", 0)
    text = f", {refused} updates refused" if refused else ""
    return text + (f", {unchanged} rounds without any kept the old weights" if unchanged else "")
