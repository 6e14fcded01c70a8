"""Final accuracies as a table, marked by the rules of the paper's Table 1.

The caption there: the best accuracy (± 0.5 points) of each setting is bold and green; every
other cell shows its difference from the best, in pink when that is more than 2 points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.table import Table
from rich.text import Text

from deltafl.errors import UserError
from deltafl.report.labels import (
    DELTA_SGD,
    SETTING,
    require,
    require_fractions,
    setting_label,
    settings,
)

BEST_WITHIN = 0.5
"""Points below the best within which a result still counts as best."""

FAR_BELOW = 2.0
"""Points below the best beyond which the difference is highlighted."""

# Finer than any test set resolves, coarser than the last bits of a float: equal results
# compare equal, and 0.5 points are 0.5.
_DECIMALS = 9

_MISSING = "–"


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean, spread and rank of every optimizer in every setting.

    Args:
        frame: One row a run: task, alpha, optimizer, seed, final_accuracy (0..1).

    Returns:
        One row per (task, alpha, optimizer) in the order of first appearance, with `mean` and
        `std` (sample deviation over seeds, 0 for one seed) in percent, `n` the number of
        seeds, `difference` the points below the best mean of that setting (0 for the best)
        and `best` whether that is within 0.5.
    """
    runs = [*SETTING, "optimizer", "seed"]
    require(frame, [*runs, "final_accuracy"], "the table")
    if frame["final_accuracy"].isna().any():
        raise UserError("the table needs the final accuracy of every run, and one is missing")
    require_fractions(frame["final_accuracy"], "the table")
    twice = frame[frame.duplicated(runs)]
    if not twice.empty:
        run = twice.iloc[0]
        raise UserError(
            f"{run['optimizer']} on {setting_label(run['task'], run['alpha'])} has two runs "
            f"with seed {run['seed']}: give different configurations different labels"
        )

    percent = frame.assign(accuracy=100.0 * frame["final_accuracy"])
    groups = percent.groupby([*SETTING, "optimizer"], sort=False, dropna=False)["accuracy"]
    summary = groups.agg(["mean", "std", "count"]).reset_index()
    summary = summary.rename(columns={"count": "n"}).fillna({"std": 0.0})
    summary = summary.round({"mean": _DECIMALS, "std": _DECIMALS})
    best = summary.groupby(SETTING, sort=False, dropna=False)["mean"].transform("max")
    summary["difference"] = (best - summary["mean"]).round(_DECIMALS)
    summary["best"] = summary["difference"] <= BEST_WITHIN
    return summary


def to_rich(summary: pd.DataFrame) -> Table:
    """Return the table for a terminal: a row an optimizer, a column a setting."""
    table = Table(caption=_note(summary), caption_justify="left")
    table.add_column("Optimizer", no_wrap=True)
    for task, alpha in settings(summary):
        table.add_column(setting_label(task, alpha, "\n"), justify="right", no_wrap=True)
    for optimizer, cells in _rows(summary):
        table.add_row(Text(optimizer), *(_rich_cell(cell) for cell in cells))
    return table


def to_markdown(summary: pd.DataFrame) -> str:
    """Return the table as Markdown, with a line below that explains the marks."""
    header = ["Optimizer", *(setting_label(*setting) for setting in settings(summary))]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for optimizer, cells in _rows(summary):
        lines.append([optimizer, *(_markdown_cell(cell) for cell in cells)])
    rows = ("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
    return "\n".join(rows) + f"\n\n{_note(summary)}\n"


def to_latex(summary: pd.DataFrame) -> str:
    """Return a tabular set as in the paper; it needs the packages booktabs and xcolor."""
    header = ["Optimizer", *(setting_label(*setting) for setting in settings(summary))]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        " & ".join(map(latex_text, header)) + r" \\",
        r"\midrule",
    ]
    for optimizer, cells in _rows(summary):
        row = [latex_text(optimizer), *(_latex_cell(cell) for cell in cells)]
        lines.append(" & ".join(row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def to_csv(summary: pd.DataFrame) -> str:
    """Return the summary as CSV at full precision, for other programs to read."""
    return summary.to_csv(index=False, lineterminator="\n")


def sentence(summary: pd.DataFrame) -> str:
    """Say in one sentence what the comparison shows, whoever comes out ahead.

    Optimizers are ranked by their worst gap to the best over all settings, which is what a
    user without the means to tune cares for. One that did not run in every setting has no
    such worst gap: it is named, but not ranked.
    """
    where = settings(summary)
    ran = summary.groupby("optimizer", sort=False).size()
    names = [str(name) for name in ran.index]
    if len(names) < 2:
        return f"Only {_join(names) or 'nothing'} ran, so there is nothing to compare."

    worst = summary.groupby("optimizer", sort=False)["difference"].max()
    ranked = [name for name in names if ran[name] == len(where)]
    # Equal gaps share a place: to call one of them "the next" would be untrue.
    gaps = sorted({float(worst[name]) for name in ranked})
    places = [(gap, [name for name in ranked if worst[name] == gap]) for gap in gaps]

    if places:
        clauses = [_lead(places[0], where, summary), *_followers(places, len(where))]
    else:
        clauses = [f"No optimizer ran in {_every(len(where))}"]
    partial = [
        f"{_name(name)} ({ran[name]} of {len(where)} settings)"
        for name in names
        if name not in ranked
    ]
    if partial:
        clauses.append(f"not ranked, as not run everywhere: {_join(partial)}")
    return "; ".join(clauses) + "."


_Place = tuple[float, list[str]]
"""A worst gap, and the optimizers that share it."""


def _lead(place: _Place, where: Sequence[tuple[str, float | None]], summary: pd.DataFrame) -> str:
    """Say how the most robust optimizers fare."""
    gap, names = place
    who = _join(map(_name, names))
    one = len(names) == 1
    if len(where) == 1:
        top = f"{summary['mean'].max():.1f} %"
        verb = "reaches" if one else "reach"
        return f"On {setting_label(*where[0])}, {who} {verb} the best accuracy, {top}"
    if gap == 0:
        verb = "reaches" if one else "reach"
        return f"{who} {verb} the best accuracy in {_every(len(where))}"
    verb = "is" if one else "are"
    return (
        f"{who} {verb} at worst {_points(gap)} points behind the best over "
        f"{len(where)} settings, the smallest such gap"
    )


def _every(number: int) -> str:
    return "both settings" if number == 2 else f"all {number} settings"


def _followers(places: Sequence[_Place], number: int) -> Iterator[str]:
    """Say how the next, Δ-SGD wherever it stands, and the last fare."""
    next_best = "the next best" if number == 1 else "the next most robust"
    for position, (gap, names) in enumerate(places[1:], start=1):
        who = _join(map(_name, names))
        verb = "falls" if len(names) == 1 else "fall"
        if position == 1:
            unit = " points" if places[0][0] == 0 else ""
            yield f"{next_best}, {who}, {verb} {_points(gap)}{unit} behind"
        elif position == len(places) - 1:
            yield f"the worst, {who}, {_points(gap)}"
        elif DELTA_SGD in names:
            yield f"{who} {verb} {_points(gap)} behind"


def _name(optimizer: str) -> str:
    """Return the label, and for Δ-SGD the reminder that nobody chose its step size."""
    return f"{optimizer} (untuned)" if optimizer == DELTA_SGD else optimizer


def _points(gap: float) -> str:
    """Round a gap to a tenth, without letting a small one pass for none."""
    return "under 0.1" if 0 < gap < 0.05 else f"{gap:.1f}"


def _join(names: Iterator[str] | Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *head, tail = [*names] or [""]
    return f"{', '.join(head)} and {tail}" if head else tail


def _rows(summary: pd.DataFrame) -> Iterator[tuple[str, list[pd.Series | None]]]:
    """Yield every optimizer with its cells in the order of the settings, None where not run."""
    # Labels, not values, are the keys: a missing alpha is unequal to itself.
    cells = {
        (row["optimizer"], setting_label(row["task"], row["alpha"])): row
        for _, row in summary.iterrows()
    }
    columns = [setting_label(*setting) for setting in settings(summary)]
    for optimizer in summary["optimizer"].unique():
        yield str(optimizer), [cells.get((optimizer, column)) for column in columns]


def _value(cell: pd.Series) -> str:
    """Return "87.3 ±0.4"; one seed has no deviation to show."""
    return f"{cell['mean']:.1f}" + (f" ±{cell['std']:.1f}" if cell["n"] > 1 else "")


def _rich_cell(cell: pd.Series | None) -> Text:
    if cell is None:
        return Text(_MISSING, style="dim")
    if cell["best"]:
        return Text(_value(cell), style="bold green")
    style = "bright_magenta" if cell["difference"] > FAR_BELOW else "dim"
    return Text.assemble(_value(cell), " ", (f"−{cell['difference']:.1f}", style))


def _markdown_cell(cell: pd.Series | None) -> str:
    if cell is None:
        return _MISSING
    if cell["best"]:
        return f"**{_value(cell)}**"
    return f"{_value(cell)} (−{cell['difference']:.1f})"


def _latex_cell(cell: pd.Series | None) -> str:
    if cell is None:
        return "--"
    value = _value(cell).replace("±", r"$\pm$")
    if cell["best"]:
        return rf"\textcolor{{green!50!black}}{{\textbf{{{value}}}}}"
    below = rf"\downarrow({cell['difference']:.1f})"
    if cell["difference"] > FAR_BELOW:
        below = rf"\textcolor{{magenta}}{{{below}}}"
    return rf"{value}$_{{{below}}}$"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{special: f"\\{special}" for special in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "Δ": r"$\Delta$",
        "α": r"$\alpha$",
        "↓": r"$\downarrow$",
    }
)


def latex_text(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return text.translate(_LATEX)


def _note(summary: pd.DataFrame) -> str:
    """Return the line that explains the marks and says how many seeds stand behind them."""
    low, high = summary["n"].min(), summary["n"].max()
    seeds = f"n = {low}" if low == high else f"n = {low} to {high}"
    shown = "Final test accuracy (%)" + (", mean ± standard deviation" if high > 1 else "")
    return (
        f"{shown} over {seeds} seed{'s' if high > 1 else ''}. Bold: within {BEST_WITHIN} points "
        "of the best of its column; otherwise the points below that best follow."
    )
