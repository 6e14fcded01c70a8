"""`deltafl paper`: every table and figure of the paper, run here and shown beside the authors'."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tomli_w
from pydantic import BaseModel, Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltafl import optim
from deltafl.cli import arguments
from deltafl.cli.command import Command, console
from deltafl.cli.progress import RunProgress
from deltafl.errors import UserError, unknown
from deltafl.experiment import Config, Result
from deltafl.experiment.comparison import read_rates
from deltafl.experiment.config import Strict, validated
from deltafl.paper import recipes, scale
from deltafl.paper.only import Only
from deltafl.paper.recipes import Item
from deltafl.paper.records import Records
from deltafl.paper.repeating import repeat_all
from deltafl.paper.running import missing, run_missing
from deltafl.tensorfile import write_atomically

if TYPE_CHECKING:
    from deltafl.paper.cells import Result as Cell

RESULTS = Path("results/paper")
THEORY = "theory"

ScaleName = Literal["paper", "laptop"]


class ListOptions(Strict):
    """Where to look for what has been run."""

    results: Path = Field(RESULTS, description="folder of the records")


class PartOptions(ListOptions):
    """A part of a recipe."""

    only: list[str] = Field(
        [], description="tasks and optimizers by name, alpha=1,0.1 and seed=0, as words"
    )
    learning_rates: Path | None = Field(
        None, description="of the baselines, as deltafl tune writes them; none: the authors'"
    )

    def rates(self) -> dict[str, float]:
        """Return the learning rates that replace the authors'."""
        return read_rates(self.learning_rates) if self.learning_rates else {}


class RunOptions(PartOptions):
    """What to run, and where."""

    scale: ScaleName = Field(
        "laptop", description="the paper's setting, or a cut that takes minutes a run"
    )
    runs: Path = Field(Path("runs/paper"), description="folder of the run folders")
    plan: bool = Field(False, description="only say what would run")


class ShowOptions(PartOptions):
    """What to show."""

    scale: ScaleName | None = Field(
        None, description="none given: every scale of which something has been run"
    )
    json_: bool = Field(False, alias="json", description="print the cells for a program")
    out: Path | None = Field(None, description="folder for tables as Markdown, CSV and LaTeX")


class VerifyOptions(PartOptions):
    """Which records to repeat."""

    scale: ScaleName | None = Field(None, description="none given: both")


class FigureOptions(PartOptions):
    """What to draw."""

    scale: ScaleName | None = Field(
        None, description="none given: the paper's if it has been run, else the laptop's"
    )
    out: Path = Field(Path("results/paper/figures"), description="folder of the pictures")
    formats: list[Literal["svg", "png", "pdf", "html"]] = Field(
        ["svg", "png"], description="kinds of file"
    )


def show_list(_items: Sequence[Item], options: ListOptions) -> None:
    """Print every item with its place in the paper and how much of it has been run."""
    from deltafl.paper.cells import results  # noqa: PLC0415  (altair is slow to import)

    records = Records(options.results)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("name", "or", "what", *scale.SCALES):
        table.add_column(column, no_wrap=column != "what")
    for item in recipes.ITEMS.values():
        shares = []
        for chosen in scale.SCALES.values():
            cells = results(item, chosen, records, {})
            done, wanted = sum(c.n for c in cells), sum(c.wanted for c in cells)
            shares.append(f"{done}/{wanted}" if wanted else "–")
        table.add_row(item.name, item.alias, escape(item.title), *shares)
    console.print(table)
    console.print(
        f"\nruns done and in all, by scale, as recorded in {options.results}",
        soft_wrap=True,
        markup=False,
    )


def run(items: Sequence[Item], options: RunOptions) -> None:
    """Run what is missing of the items."""
    if not items:
        raise UserError("paper run needs names, as in deltafl paper run table-1: see paper list")
    for item in items:
        if item.drawing == THEORY:
            _theory(item, options.results)
        elif item.drawing == "partitions":
            console.print(f"{item.name} needs no run: deltafl paper figure {item.name}")
    simulated = [item for item in items if item.cases]
    if not simulated:
        return
    chosen, rates = scale.lookup(options.scale), options.rates()
    records = Records(options.results)
    only = Only.parse(options.only)
    todo, wanted = missing(simulated, chosen, only, rates, records)
    names = ", ".join(item.place for item in simulated)
    console.print(
        f"{names} at scale {chosen.name} ({chosen.summary}): {wanted} runs, "
        f"{wanted - len(todo)} recorded in {options.results}, {len(todo)} to go. {_told(rates)}",
        soft_wrap=True,
        markup=False,
    )
    if options.plan:
        for config in todo:
            console.print(f"  {config.run_name}: {config.run.rounds} rounds", markup=False)
        return
    if todo:
        with _Lines(console, todo) as progress:
            run_missing(todo, chosen, records, options.runs, progress)
    for item in simulated:
        if item.drawing == "grid":
            _write_rates(item, chosen, records, options.results)
    if todo:
        console.print(f"deltafl paper show {' '.join(item.name for item in simulated)}")


def _told(rates: Mapping[str, float]) -> str:
    """Say which learning rates the baselines use."""
    chosen = {
        name: rates.get(name, optim.lookup(name).options["lr"])
        for name in recipes.BASELINES
        if optim.lookup(name).grid
    }
    whose = "given" if rates else "the authors' published choices"
    listed = ", ".join(f"{name} {rate:g}" for name, rate in chosen.items())
    return f"Learning rates, {whose}: {listed}."


class _Lines(RunProgress):
    """Progress that also leaves a line for every finished run, with the time left."""

    def __init__(self, console: Console, configs: Sequence[Config]) -> None:
        super().__init__(console)
        self._console = console
        self._left = list(configs)
        self._total = len(configs)
        self._spent: dict[str, list[float]] = {}

    def finished_run(self, result: Result) -> None:
        """Print the result beside the paper's."""
        super().finished_run(result)
        config = self._left.pop(0)
        seconds = float(result.summary["seconds"])
        self._spent.setdefault(config.task, []).append(seconds / _work(config))
        theirs = recipes.published_for(config)
        self._console.print(
            f"{self._total - len(self._left)}/{self._total} {config.task} "
            f"α = {config.federation.alpha:g} {config.client.optimizer} seed {config.run.seed}: "
            f"{result.final_test_accuracy:.1%}"
            f"{'' if theirs is None else f' (the paper: {theirs:.1f} %)'}, {seconds:.0f} s"
            f"{self._estimate()}",
            soft_wrap=True,
            markup=False,
        )

    def _estimate(self) -> str:
        if not self._left:
            return ""
        known = {task: sum(costs) / len(costs) for task, costs in self._spent.items()}
        usual = sum(known.values()) / len(known)
        left = sum(_work(config) * known.get(config.task, usual) for config in self._left)
        return f"; about {left / 60:.0f} min left"


def _work(config: Config) -> int:
    return config.run.rounds * config.client.epochs


def _write_rates(item: Item, chosen: scale.Scale, records: Records, folder: Path) -> None:
    """Write the best learning rates, once the whole grid has been run."""
    from deltafl.paper.cells import results  # noqa: PLC0415

    cells = results(item, chosen, records, {})
    if any(cell.n < cell.wanted for cell in cells):
        console.print("the grid is not complete: no learning rates are written")
        return
    best: dict[str, Cell] = {}
    for cell in cells:
        name = cell.case.optimizer
        if name not in best or (cell.ours or 0) > (best[name].ours or 0):
            best[name] = cell
    rates = {name: float(cell.case.changes["client.lr"]) for name, cell in best.items()}
    place = folder / f"learning-rates-{chosen.name}.toml"
    write_atomically(place, tomli_w.dumps({"learning_rates": rates}).encode())
    console.print(f"learning rates {place}: {rates}", soft_wrap=True, markup=False)


def _theory(item: Item, folder: Path) -> None:
    from deltafl.paper import theory  # noqa: PLC0415

    console.print(f"{item.place}: computing (a minute or so)")
    study = theory.STUDIES[item.name]
    frame = study.compute()
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{item.name}.csv"
    write_atomically(place, frame.to_csv(index=False).encode())
    for sentence in study.summary(frame):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"numbers {place}; deltafl paper figure {item.name}", soft_wrap=True)


def show(items: Sequence[Item], options: ShowOptions) -> None:
    """Print ours beside theirs."""
    from deltafl.paper import tables  # noqa: PLC0415
    from deltafl.paper.cells import verdict  # noqa: PLC0415

    records = Records(options.results)
    found = list(_cells(items or tuple(recipes.ITEMS.values()), options, records, bool(items)))
    if options.json_:
        json.dump([cell.as_json() for _, cells in found for cell in cells], sys.stdout, indent=1)
        print()
        return
    if not found:
        console.print(f"nothing has been run yet in {options.results}: deltafl paper list")
    for item, cells in found:
        console.print(f"[bold]{escape(f'{item.place}: {item.title}')}[/]")
        console.print(f"The paper: {item.claim}.", markup=False, soft_wrap=True)
        for table in tables.to_rich(item, cells, console.width):
            console.print(table)
        if not item.ablation and (said := verdict(cells)):
            console.print(said, markup=False, soft_wrap=True)
        console.print(tables.coverage(item, cells), markup=False, soft_wrap=True)
        console.print("ours / the paper's / difference; bold: within 0.5 of the best\n")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            stem = options.out / f"{item.name}-{cells[0].scale}"
            write_atomically(stem.with_suffix(".md"), tables.to_markdown(item, cells).encode())
            write_atomically(stem.with_suffix(".csv"), tables.to_csv(cells).encode())
            write_atomically(stem.with_suffix(".tex"), tables.to_latex(item, cells).encode())
            console.print(f"tables {stem}.md, .csv and .tex", markup=False, soft_wrap=True)


def verify(items: Sequence[Item], options: VerifyOptions) -> None:
    """Repeat the first rounds of recorded runs, and say which come out differently."""
    records, only, rates = Records(options.results), Only.parse(options.only), options.rates()
    found = {
        config.fingerprint: (config, record)
        for item in items or recipes.ITEMS.values()
        for name, chosen in scale.SCALES.items()
        if options.scale in (None, name)
        for _, config in item.runs(chosen, rates)
        if only.wants(config) and (record := records.get(config.fingerprint)) and record.curve
    }
    if not found:
        raise UserError(f"nothing of this is recorded in {options.results}: deltafl paper list")
    differing = 0
    start = time.monotonic()
    for done, repeat in enumerate(repeat_all(found.values()), start=1):
        differing += not repeat.same
        now = "no model left" if repeat.found is None else f"{repeat.found:.2%} now"
        left = (time.monotonic() - start) / done * (len(found) - done)
        console.print(
            f"{done}/{len(found)} {repeat.config.run_name}: round {repeat.round}, "
            f"{repeat.recorded:.2%} recorded, {'the same' if repeat.same else now}; "
            f"about {left / 60:.0f} min left",
            soft_wrap=True,
            markup=False,
        )
    if differing:
        raise UserError(
            f"{differing} of {len(found)} recorded runs do not repeat here: other code, another "
            "torch or another processor made them, as their records say; delete their lines in "
            f"{options.results} and run them again"
        )
    console.print(f"all {len(found)} repeat: no test sample is judged differently", markup=False)


def _cells(
    items: Iterable[Item], options: ShowOptions | FigureOptions, records: Records, asked: bool
) -> Iterable[tuple[Item, list[Cell]]]:
    """Yield the cells of every item at every scale asked for, or that has been run."""
    from deltafl.paper.cells import results  # noqa: PLC0415

    only, rates = Only.parse(options.only), options.rates()
    for item in items:
        if not item.cases:
            continue
        by_scale = {
            name: results(item, chosen, records, rates, only)
            for name, chosen in scale.SCALES.items()
            if options.scale in (None, name)
        }
        run = {name: cells for name, cells in by_scale.items() if any(cell.n for cell in cells)}
        if not run and asked:  # show the paper's numbers all the same
            run = dict([next(iter(by_scale.items()))])
        for cells in run.values():
            if cells:
                yield item, cells


def figure(items: Sequence[Item], options: FigureOptions) -> None:
    """Draw the items from the records."""
    from deltafl import report  # noqa: PLC0415
    from deltafl.paper import figures, theory  # noqa: PLC0415

    records = Records(options.results)
    for item in items or recipes.ITEMS.values():
        if item.drawing == THEORY:
            chart = theory.STUDIES[item.name].draw(options.results / f"{item.name}.csv")
            stem = item.name
        elif item.drawing == "partitions":
            chart, stem = figures.partitions(), item.name
        else:
            found = list(_cells([item], options, records, asked=bool(items)))
            if not found:
                continue
            cells = found[0][1]
            chart, stem = figures.draw(item, cells), f"{item.name}-{cells[0].scale}"
        for kind in options.formats:
            report.save(chart, options.out / f"{stem}.{kind}")
        kinds = ", ".join(f".{kind}" for kind in options.formats)
        console.print(f"{item.place}: {options.out / stem}{kinds}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Action(Command):
    """An action on items of the paper, which are named before the options."""

    def __call__(self, words: Sequence[str]) -> None:
        if {"-h", "--help"} & set(words):
            self.help()
        else:
            self.run(*self.read(words))

    def read(self, words: Sequence[str]) -> tuple[list[Item], BaseModel]:
        """Return the items that the words name, and the options."""
        names, tree = arguments.parse(self.options, words)
        if names and not self.positional:
            raise UserError(f"unexpected {names[0]!r}: see deltafl {self.name} --help")
        items = [recipes.lookup(name) for name in names]
        return items, validated(self.options, tree, "on the command line")


ACTIONS = {
    "list": _Action(
        "paper list",
        "List every table and figure of the paper, and how much of it has been run.",
        ListOptions,
        show_list,
        ("deltafl paper list",),
    ),
    "run": _Action(
        "paper run",
        "Run what is missing of tables and figures. Finished runs are skipped, a half-done one "
        "goes on where it stopped.",
        RunOptions,
        run,
        (
            "deltafl paper run table-1 --only fmnist-cnn alpha=0.1",
            "deltafl paper run table-1 --scale paper --only mnist-cnn sgd,delta-sgd seed=0",
            "deltafl paper run theory-nonconvex",
        ),
        positional="ITEM ...",
    ),
    "show": _Action(
        "paper show",
        "Print our numbers beside the paper's, with the difference and how much has been run.",
        ShowOptions,
        show,
        (
            "deltafl paper show table-1",
            "deltafl paper show fedadam --json",
            "deltafl paper show --out results/paper/tables",
        ),
        positional="[ITEM ...]",
    ),
    "verify": _Action(
        "paper verify",
        "Repeat the first rounds of recorded runs, and compare. It shows whether this code and "
        "this machine compute what is recorded.",
        VerifyOptions,
        verify,
        (
            "deltafl paper verify table-1 --only mnist-cnn",
            "deltafl paper verify --scale paper",
        ),
        positional="[ITEM ...]",
    ),
    "figure": _Action(
        "paper figure",
        "Draw tables and figures from what has been run.",
        FigureOptions,
        figure,
        ("deltafl paper figure figure-2 --formats svg pdf", "deltafl paper figure"),
        positional="[ITEM ...]",
    ),
}


class PaperCommand:
    """A command with actions of its own."""

    name = "paper"
    summary = "List, run, show, verify and draw the paper's tables and figures, each a recipe."

    def __call__(self, words: Sequence[str]) -> None:
        """Run an action; none is the list."""
        action, *rest = words or ["list"]
        if action in ("-h", "--help"):
            self.help()
        elif action in ACTIONS:
            ACTIONS[action](rest)
        else:
            raise unknown("action of deltafl paper", action, ACTIONS)

    def help(self) -> None:
        """Print the actions."""
        for action in ACTIONS.values():
            usage = f"deltafl {action.name} {action.positional}"
            console.print(f"[bold]{escape(usage):<36}[/] {escape(action.summary)}")
        console.print("\nEvery action has --help.")


COMMAND = PaperCommand()
