"""Peak memory of all processes of a system on W."""

from __future__ import annotations

from benchmarks import fleet
from benchmarks.federation import W
from benchmarks.items.base import Item, Settings
from benchmarks.memory import Monitor, Peak
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from benchmarks.session import FailedError, Session, System

TITLE = "Memory on W"
COLUMNS = ("system", "peak PSS, MB", "peak RSS, MB", "processes")


def peak(system: System, rounds: int) -> Peak:
    """Start a system, run some rounds, and return the peak of all its processes."""
    with Monitor() as monitor, Session(system, monitor.watch) as session:
        session.run(rounds)
    return monitor.peak


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Watch each system alone, from its start."""
    systems = [
        fleet.deltafl(W),
        fleet.loop(W, 2),
        fleet.loop_processes(W),
        fleet.pfl(W),
        fleet.flower(W),
    ]
    _, rounds = settings.choose(1, 20)
    outcome = Outcome(TITLE)
    lines: list[list[str]] = []
    progress.plan(len(systems))
    for system in systems:
        try:
            found = peak(system, rounds)
        except FailedError as error:
            lines.append([system.name, f"failed: {error}", "", ""])
            outcome.raw[system.name] = {"failure": str(error)}
        else:
            lines.append(
                [system.name, f"{found.pss:.0f}", f"{found.rss:.0f}", str(found.processes)]
            )
            outcome.raw[system.name] = vars(found)
        progress.step(f"{system.name}: {lines[-1][1]} MB")
    title = f"the sum over all processes, from the start to the end of {rounds} rounds"
    outcome.tables.append(Table(title, COLUMNS, lines))
    outcome.notes.append("PSS counts a page that processes share once, RSS once a process.")
    return outcome


ITEM = Item("memory", TITLE, 2, measure)
