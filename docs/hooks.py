"""Fill in the parts of the site that the code knows better than a writer does.

`<!-- insert: NAME -->` in a page is replaced by what the function of that name returns, so tables
of options, optimizers and data sets cannot go stale. An unknown name stops the build. Words after
the name are handed to the function.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deltafl import data, models, objective, optim, server
from deltafl.cli import arguments
from deltafl.cli.command import Command
from deltafl.data.catalog import CATALOG
from deltafl.data.text.catalog import TEXTS
from deltafl.experiment import Config
from deltafl.models import pretrained

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Let pages show the figures that the reproduction drew; mkdocs calls this."""
    for path in sorted((ROOT / "results" / "paper" / "figures").glob("*.svg")):
        place = f"images/paper/{path.name}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the insert lines of a page; mkdocs calls this."""

    def insert(found: re.Match[str]) -> str:
        name, *words = found[1].split()
        return INSERTS[name](*words)

    return re.sub(r"<!-- insert: ([^>]+) -->", insert, markdown)


def readme() -> str:
    """The README, its links turned so that they start from the pages' folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def benchmarks() -> str:
    """The last run of the benchmarks, its headings below those of the page."""
    text = (ROOT / "results" / "benchmarks" / "latest.md").read_text(encoding="utf-8")
    return text.partition("\n")[2].replace("\n## ", "\n### ")


def faults(name: str) -> str:
    """What came out of attacks that take longer than a test."""
    files = sorted((ROOT / "results" / "faults").glob(f"{name}*.md"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files) or "Not run yet."


def benchmark(name: str) -> str:
    """One item of the last run of the benchmarks: its tables, and what they were measured on."""
    from benchmarks import items, report  # noqa: PLC0415  (a project of its own)

    known = report.read(ROOT / "results" / "benchmarks" / "latest.json")
    if name not in known:
        minutes = items.ITEMS[name].minutes
        return f"Not measured yet: `python -m benchmarks --only {name}` takes {minutes:g} minutes."
    return report.section(known[name]).replace("## ", "### ", 1)


def paper_item(name: str, scale: str) -> str:
    """A table or figure of the paper, ours beside theirs, from the committed records."""
    from deltafl.paper import recipes, tables  # noqa: PLC0415  (altair is slow to import)
    from deltafl.paper.cells import results  # noqa: PLC0415
    from deltafl.paper.records import Records  # noqa: PLC0415
    from deltafl.paper.scale import lookup  # noqa: PLC0415

    item = recipes.lookup(name)
    records = Records(ROOT / "results" / "paper")
    cells = results(item, lookup(scale), records, {})
    run = {cell.case.task for cell in cells if cell.n}
    shown = [cell for cell in cells if cell.case.task in run]
    return tables.to_markdown(item, shown).replace("## ", "### ", 1) if shown else "Not run yet."


def options() -> str:
    """Every section of the configuration as a table."""
    sections = [("", Config)]
    sections += [
        (name, field.annotation)
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    ]
    return "\n\n".join(_section(name, model) for name, model in sections)


def _section(name: str, model: type[BaseModel]) -> str:
    heading = f"## `[{name}]`" if name else "## At the top"
    rows = (
        (
            f"`{option.replace('-', '_')}`",
            _cell(arguments.kind(field)),
            _default(field),
            _cell(text),
        )
        for option, field in arguments.options(model)
        if "." not in option and (text := field.description or "")
    )
    table = _table(("key", "values", "default", "meaning"), rows)
    return f"{heading}\n\n{(model.__doc__ or '').strip()}\n\n{table}"


def command_options() -> str:
    """What each command takes beside the configuration."""
    from deltafl.cli import COMMANDS  # noqa: PLC0415  (imports every command)

    shared = {name for name, _ in arguments.options(Config)}
    rows = [
        (
            f"`deltafl {command.name}`",
            f"`--{name}`",
            _default(field),
            _cell(field.description or ""),
        )
        for command in COMMANDS.values()
        if isinstance(command, Command)
        for name, field in arguments.options(command.options)
        if name not in shared
    ]
    return _table(("command", "option", "default", "meaning"), rows)


def optimizers() -> str:
    """The catalog of client optimizers."""
    rows = (
        (
            f"`{name}`",
            entry.label,
            _pairs(entry.options),
            ", ".join(f"{rate:g}" for rate in entry.grid) or "nothing to tune",
            _cell(entry.summary),
        )
        for name in optim.names()
        for entry in (optim.lookup(name),)
    )
    return _table(("name", "in tables", "defaults", "grid of `deltafl tune`", "what it is"), rows)


def names_of_models() -> str:
    """The second half of a task."""
    return ", ".join(f"`{name}`" for name in models.names())


def names_of_data() -> str:
    """The first half of a task."""
    return ", ".join(f"`{name}`" for name in data.names())


def names_of_objectives() -> str:
    """The losses a client may minimise."""
    return ", ".join(f"`{name}`" for name in objective.names())


def names_of_aggregates() -> str:
    """The ways to aggregate a round's updates."""
    return ", ".join(f"`{name}`" for name in server.aggregates())


def names_of_servers() -> str:
    """What the server may do with the average."""
    return ", ".join(f"`{name}`" for name in server.names())


def data_sets() -> str:
    """The data sets with their sizes."""
    rows = (
        (
            f"`{entry.name}`",
            f"{entry.train:,}",
            f"{entry.test:,}",
            str(len(entry.classes)),
            "×".join(map(str, entry.shape)),
            f"{entry.bytes / 1e6:.1f}",
        )
        for entry in CATALOG.values()
    )
    texts = (
        (
            f"`{entry.name}`",
            f"{entry.whole.train:,}",
            f"{entry.whole.test:,}",
            str(len(entry.classes)),
            "text",
            "–",
        )
        for entry in TEXTS.values()
    )
    head = ("name", "train", "test", "classes", "C×H×W", "MB decoded")
    return _table(head, [*rows, *texts])


def data_licences() -> str:
    """What may be done with a data set, and whom to cite."""
    entries = (*CATALOG.values(), *TEXTS.values(), *pretrained.CATALOG.values())
    rows = ((f"`{entry.name}`", entry.licence, entry.citation) for entry in entries)
    return _table(("name", "licence", "cite"), rows)


def data_sources() -> str:
    """Where each set comes from, in the order in which it is tried."""
    rows = []
    for entry in CATALOG.values():
        if entry.builtin is not None:
            rows.append((f"`{entry.name}`", "inside scikit-learn's wheel", "–", "–"))
            continue
        folders = ", ".join(f"`{folder}`" for folder in entry.folders if folder != ".")
        hosts = sorted({item.url.split("/")[2] for item in entry.downloads})
        kind = type(entry.registry).__name__.lower()
        registry = "none" if entry.registry is None else f"{kind} `{entry.registry.package}`"
        rows.append((f"`{entry.name}`", folders, ", ".join(hosts) or "none", registry))
    for text in TEXTS.values():
        folders = ", ".join(f"`{folder}`" for folder in text.folders)
        urls = [file.url for file in text.whole.files if file.url]
        hosts = sorted({url.split("/")[2] for url in urls})
        rows.append((f"`{text.name}`", folders, ", ".join(hosts), "none"))
    for weights in pretrained.CATALOG.values():
        hub, registry = "the hub, when asked", "none"
        if weights.package is not None:
            hub, registry = "none", f"pip `{weights.package[0]}`"
        rows.append((f"`{weights.name}`", f"`{weights.name}`", hub, registry))
    head = ("name", "1. folders below a data folder", "2. canonical host", "3. package client")
    return _table(head, rows)


def digests() -> str:
    """The checksum every source of a set is held to."""
    rows = (
        (f"`{entry.name}`", part, f"`{digest}`")
        for entry in CATALOG.values()
        for part, digest in entry.digests.items()
    )
    return _table(("set", "array", "SHA-256 of its bytes"), rows)


def text_files() -> str:
    """The files a text set comes in, and the checksum each is held to."""
    rows = (
        (f"`{entry.name}`", f"`{file.name}`", edition.part or "all of it", f"`{file.checksum}`")
        for entry in TEXTS.values()
        for edition in entry.editions
        for file in edition.files
    )
    return _table(("set", "file", "what it holds", "checksum"), rows)


def members(module: str, *first: str) -> str:
    """Every public name of a module, for mkdocstrings; `first` come first, in that order."""
    found = importlib.import_module(f"deltafl.{module}")
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_")
        and callable(value)
        and str(getattr(value, "__module__", "")).startswith(found.__name__)
    ]
    names = getattr(found, "__all__", own)
    if missing := set(first) - set(names):
        raise ValueError(f"{found.__name__} has no {', '.join(sorted(missing))}")
    rest = [name for name in own if name in names and name not in first]
    return "\n\n".join(f"::: {found.__name__}.{name}" for name in [*first, *rest])


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default in (None, [], {}, ()):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list):
        return " ".join(f"`{item}`" for item in default)
    return f"`{default}`"


def _pairs(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "none"


def _cell(text: str) -> str:
    return text.replace("|", " or ")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


INSERTS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        readme,
        benchmarks,
        faults,
        benchmark,
        paper_item,
        options,
        command_options,
        optimizers,
        names_of_models,
        names_of_data,
        names_of_objectives,
        names_of_aggregates,
        names_of_servers,
        data_sets,
        data_licences,
        data_sources,
        digests,
        text_files,
        members,
    )
}
