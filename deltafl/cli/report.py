"""`deltafl report`: a page about the runs of a folder, to keep or to watch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from deltafl.cli.command import Command, console
from deltafl.errors import UserError
from deltafl.experiment.config import Strict
from deltafl.paper.recipes import published_for
from deltafl.tensorfile import write_atomically

if TYPE_CHECKING:
    from deltafl.report.runs import RunView


class ReportOptions(Strict):
    """Which runs, and what is made of them."""

    dir: Path = Field(
        Path("runs"),
        description="folder with run folders in or below it, or with records of deltafl paper",
    )
    out: Path | None = Field(None, description="the page; none: report.html in DIR")
    figures: Path | None = Field(None, description="folder for curves and tables as files, too")
    live: bool = Field(False, description="serve a page that follows runs while they go on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="port of the live page on this machine; 0: any that is free"
    )


def execute(options: ReportOptions) -> None:
    """Write the page, or serve it until Ctrl-C."""
    if options.live:
        if options.out is not None or options.figures is not None:
            raise UserError("--live serves a page and writes none: leave out --out and --figures")
        _serve(options)
    else:
        _write(options)


def _write(options: ReportOptions) -> None:
    from deltafl.paper.views import views  # noqa: PLC0415
    from deltafl.report.page import page  # noqa: PLC0415  (altair is slow to import)
    from deltafl.report.partitions import Partitions  # noqa: PLC0415
    from deltafl.report.runs import read_runs  # noqa: PLC0415

    runs, warnings = read_runs(options.dir)
    runs += views(options.dir)
    if not runs:
        reason = warnings[0] if warnings else "there is none in it or below it"
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        raise UserError(f"{options.dir} has no run that can be shown: {reason}{more}")
    for line in warnings:
        print(f"deltafl: {line}", file=sys.stderr)
    out = options.out or options.dir / "report.html"
    text = page(
        runs,
        theirs=published_for,
        title=_title(options.dir),
        partitions=Partitions().of(runs),
        warnings=warnings,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    going = sum(run.summary is None for run in runs)
    half = f", {going} of them not finished" if going else ""
    console.print(f"page {out}: {len(runs)} runs{half}", soft_wrap=True, markup=False)
    if options.figures is not None:
        _draw(runs, options.figures)


def _draw(runs: list[RunView], folder: Path) -> None:
    from deltafl import report  # noqa: PLC0415
    from deltafl.report.groups import arrange, curves, finals  # noqa: PLC0415

    lines = arrange(runs)
    folder.mkdir(parents=True, exist_ok=True)
    chart = report.accuracy_curves(curves(lines))
    for suffix in ("svg", "png", "pdf"):
        report.save(chart, folder / f"curves.{suffix}")
    finished = finals(lines)
    if finished.empty:
        console.print(f"curves in {folder}; no run is finished, so there is no table", markup=False)
        return
    summary = report.summarise(finished)
    for name, text in (
        ("table.md", report.to_markdown(summary)),
        ("table.csv", report.to_csv(summary)),
        ("table.tex", report.to_latex(summary)),
    ):
        write_atomically(folder / name, text.encode())
    console.print(f"curves and tables in {folder}", soft_wrap=True, markup=False)


def _serve(options: ReportOptions) -> None:
    from deltafl.report.live import LivePage, LiveServer  # noqa: PLC0415

    live = LivePage(options.dir, published_for, _title(options.dir))
    with LiveServer(live, options.port) as server:
        console.print(f"live page {server.address} (Ctrl-C ends it)", soft_wrap=True, markup=False)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("\nlive page ended", markup=False)


def _title(folder: Path) -> str:
    return folder.resolve().name or str(folder)


COMMAND = Command(
    "report",
    "Show the runs of a folder on one interactive page that needs no network. Runs that are not "
    "finished are shown as far as they are; --live follows them.",
    ReportOptions,
    execute,
    (
        "deltafl report runs/compare",
        "deltafl report runs/compare --out page.html --figures figures",
        "deltafl report runs --live --port 8000",
        "deltafl report results/paper --out reproduction.html",
    ),
    positional="DIR",
)
