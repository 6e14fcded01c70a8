"""An item as tables: a table for each heterogeneity, a row an optimizer, a column a task.

A cell is ours, theirs and the difference. Best within 0.5 points of its column is bold, as in the
paper.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from deltafl.paper.cells import Result, best_of, verdict
from deltafl.paper.recipes import Item
from deltafl.report.tables import latex_text

Grid = tuple[float, list[str], list[tuple[str, list[Result | None]]]]
"""alpha, the tasks, and (label, cells) rows."""


def grids(cells: Sequence[Result]) -> Iterator[Grid]:
    """Yield a grid for each alpha, in the order of the cells."""
    for alpha in dict.fromkeys(cell.case.alpha for cell in cells):
        here = [cell for cell in cells if cell.case.alpha == alpha]
        tasks = list(dict.fromkeys(cell.case.task for cell in here))
        found = {(cell.case.label, cell.case.task): cell for cell in here}
        labels = dict.fromkeys(cell.case.label for cell in here)
        yield alpha, tasks, [(label, [found.get((label, t)) for t in tasks]) for label in labels]


def coverage(item: Item, cells: Sequence[Result]) -> str:
    """Say how much of the recipe has been run."""
    done, wanted = sum(cell.n for cell in cells), sum(cell.wanted for cell in cells)
    scale = cells[0].scale if cells else "?"
    text = f"{item.place}, scale {scale}: {done} of {wanted} runs done."
    missing = [cell for cell in cells if cell.n < cell.wanted]
    if done and missing:
        settings = dict.fromkeys(f"{c.case.task} α = {c.case.alpha:g}" for c in missing)
        shown = list(settings)[:4]
        more = f" and {len(settings) - 4} more" if len(settings) > 4 else ""
        text += f" Missing in {', '.join(shown)}{more}."
    return " ".join([text, *_provisos(item, cells)])


def _provisos(item: Item, cells: Sequence[Result]) -> Iterator[str]:
    """Say what stands between our numbers and theirs: another model, or a part of the data."""
    if item.stand_in:
        yield item.stand_in
    found = {(row.task, row.data) for cell in cells for row in cell.records if row.data}
    for task, part in sorted(found):
        yield f"{task}: trained on {part}."


_NOTE = (
    "Final test accuracy (%): ours / the paper's / the difference. Bold: within 0.5 points of the "
    "best of its column. ± is the deviation over seeds, ours and, where the paper gives one, "
    "theirs; one of our numbers without it has one seed."
)


_LABEL_WIDTH, _CELL_WIDTH = 18, 32


def to_rich(item: Item, cells: Sequence[Result], width: int) -> Iterator[Table]:
    """Yield tables for each heterogeneity, none wider than `width` characters."""
    ours, theirs = best_of(cells)
    fitting = max(1, (width - _LABEL_WIDTH) // _CELL_WIDTH)
    for alpha, tasks, rows in grids(cells):
        for start in range(0, len(tasks), fitting):
            part = slice(start, start + fitting)
            table = Table(title=f"{item.place}, α = {alpha:g}, scale {cells[0].scale}")
            table.add_column("Optimizer", no_wrap=True)
            for task in tasks[part]:
                table.add_column(task, justify="right", no_wrap=True)
            for label, row in rows:
                words = [_rich_cell(cell, ours, theirs) for cell in row[part]]
                table.add_row(Text(label), *words)
            yield table


def _rich_cell(cell: Result | None, ours: set[Result], theirs: set[Result]) -> Text:
    if cell is None:
        return Text("")
    mine = (_ours(cell), "bold green" if cell in ours else "")
    published = (_theirs(cell), "bold" if cell in theirs else "dim")
    return Text.assemble(mine, (" / ", "dim"), published, (f" / {_difference(cell)}", "dim"))


def to_markdown(item: Item, cells: Sequence[Result]) -> str:
    """Return the item as Markdown: its tables, the explanation, and the coverage."""
    ours, theirs = best_of(cells)
    parts = [f"## {item.place}: {item.title}", f"The paper: {item.claim}."]
    for alpha, tasks, rows in grids(cells):
        lines = [["Optimizer", *tasks], ["---", *["---:"] * len(tasks)]]
        for label, row in rows:
            words = []
            for cell in row:
                if cell is None:
                    words.append("")
                    continue
                mine = f"**{_ours(cell)}**" if cell in ours else _ours(cell)
                published = f"**{_theirs(cell)}**" if cell in theirs else _theirs(cell)
                words.append(f"{mine} / {published} / {_difference(cell)}")
            lines.append([label, *words])
        parts.append(f"α = {alpha:g}")
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    said = [] if item.ablation else [verdict(cells)]
    parts += [_NOTE, " ".join([*filter(None, said), coverage(item, cells)])]
    return "\n\n".join(parts) + "\n"


def to_csv(cells: Sequence[Result]) -> str:
    """Return the cells at full precision, a line each."""
    rows = [cell.as_json() for cell in cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["task"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_latex(item: Item, cells: Sequence[Result]) -> str:
    """Return a tabular for each heterogeneity; it needs the package booktabs."""
    ours, theirs = best_of(cells)
    blocks = []
    for alpha, tasks, rows in grids(cells):
        head = " & ".join(latex_text(word) for word in (f"{item.place}, α = {alpha:g}", *tasks))
        lines = [rf"\begin{{tabular}}{{l{'r' * len(tasks)}}}", r"\toprule", rf"{head} \\"]
        lines.append(r"\midrule")
        for label, row in rows:
            words = [latex_text(label)]
            for cell in row:
                if cell is None:
                    words.append("")
                    continue
                mine = _ours(cell).replace("±", r"$\pm$")
                mine = rf"\textbf{{{mine}}}" if cell in ours else mine
                published = _theirs(cell).replace("±", r"$\pm$")
                published = rf"\textbf{{{published}}}" if cell in theirs else published
                words.append(f"{mine} / {published} / {_difference(cell)}".replace("–", "--"))
            lines.append(" & ".join(words) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        blocks.append("\n".join(lines).replace("−", "$-$"))
    return "\n\n".join(blocks) + "\n"


def _ours(cell: Result) -> str:
    return "–" if cell.ours is None else _with_deviation(cell.ours, cell.std)


def _theirs(cell: Result) -> str:
    return "–" if cell.theirs is None else _with_deviation(*cell.theirs)


def _with_deviation(value: float, std: float | None) -> str:
    return f"{value:.1f}" + (f" ±{std:.1f}" if std is not None else "")


def _difference(cell: Result) -> str:
    if cell.difference is None:
        return "–"
    return f"{cell.difference:+.1f}".replace("-", "−")
