"""One self-contained HTML page about many runs, which asks no host for anything.

The numbers are worked out here and embedded as JSON; assets/page.js draws them. Nothing of a run
becomes markup: the JSON cannot close its script, and the script only ever sets text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from deltafl import optim
from deltafl.errors import UserError
from deltafl.experiment.config import Config
from deltafl.report import groups
from deltafl.report.command import command
from deltafl.report.figures import CLASS_COLORS, MAX_POINTS, line_styles, spread
from deltafl.report.groups import Line, Setting, arrange, optimizer_label
from deltafl.report.partitions import Holdings, federation_key
from deltafl.report.runs import RunView, StepTrace
from deltafl.report.tables import sentence, summarise
from deltafl.version import __version__

Theirs = Callable[[Config], float | None]
"""The accuracy another source, such as the paper, gives for a configuration, in percent."""

MAX_STEPS = 4 * MAX_POINTS
"""Local steps kept of a run; whole rounds are left out, so that the shape of a round stays."""


def page(
    runs: Sequence[RunView],
    *,
    theirs: Theirs = lambda _: None,
    title: str = "deltafl",
    partitions: Mapping[str, Holdings | str] | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        runs: What is shown; runs that differ by seed alone are averaged.
        theirs: The published accuracy of a configuration in percent, or None.
        title: The heading.
        partitions: What clients hold, by `federation_key`, or why that is not known.
        warnings: Lines about runs that are not shown.
    """
    if not runs:
        raise UserError("the page has nothing to show: no run was given")
    return document(
        content(runs, theirs=theirs, title=title, partitions=partitions, warnings=warnings)
    )


def document(payload: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page around its content; a live one asks its own server for more."""
    return Template(_asset("page.html")).substitute(
        policy=policy(live=live),
        # A folder's name may hold bytes that are no text.
        title=html.escape(str(payload["title"]).encode(errors="replace").decode()),
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=embedded({**payload, "live": live}),
    )


def policy(*, live: bool = False) -> str:
    """Return what the page may load and run: its own style and script, and a live one its data."""
    rules = [
        "default-src 'none'",
        f"style-src '{_hash(_asset('page.css'))}'",
        f"script-src '{_hash(_asset('page.js'))}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


def embedded(payload: Mapping[str, Any]) -> str:
    """Return JSON that is inert inside a script element, whatever its strings say."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))  # also escapes U+2028
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content(
    runs: Sequence[RunView],
    *,
    theirs: Theirs = lambda _: None,
    title: str = "deltafl",
    partitions: Mapping[str, Holdings | str] | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return all the page shows as plain JSON values."""
    lines = arrange(runs)
    place_of = {id(run): place for place, line in enumerate(lines.values()) for run in line}
    return {
        "title": title,
        "version": __version__,
        "warnings": list(warnings),
        "settings": [
            {
                "task": setting.task,
                "spread": setting.spread,
                "objective": setting.objective,
                "server": setting.server,
                "setup": setting.setup,
                "label": groups.label(setting),
                "extras": groups.extras(setting),
            }
            for setting in _settings(lines)
        ],
        "sentences": _sentences(lines),
        "optimizers": _optimizers(lines),
        "lines": _lines(lines, theirs),
        "runs": [
            _run(run, place_of.get(id(run)))
            for run in sorted(runs, key=lambda run: place_of.get(id(run), len(lines)))
        ],
        "partitions": _partitions(lines, partitions or {}),
        "classColors": CLASS_COLORS,
    }


def _settings(lines: Mapping[Line, Sequence[RunView]]) -> list[Setting]:
    return list(dict.fromkeys(line.setting for line in lines))


def _optimizers(lines: Mapping[Line, Sequence[RunView]]) -> list[dict[str, Any]]:
    """Return the look of every optimizer; variants share a colour and differ by their dashes."""
    names = {line.optimizer: line.name for line in lines}
    order = [*optim.names(), *sorted(set(names.values()) - set(optim.names()))]
    styles = line_styles([optimizer_label(name) for name in dict.fromkeys(names.values())])
    seen: dict[str, int] = {}
    looks = []
    for label, name in sorted(names.items(), key=lambda item: order.index(item[1])):
        style = styles[optimizer_label(name)]
        variant = seen[name] = seen.get(name, -1) + 1
        dash = _VARIANT_DASHES[(variant - 1) % len(_VARIANT_DASHES)] if variant else style.dash
        looks.append(
            {
                "name": label,
                "color": style.color,
                "width": style.width,
                "dash": " ".join(map(str, dash)) if dash != [1, 0] else "",
                "ours": name.startswith("delta-sgd"),
            }
        )
    return looks


_VARIANT_DASHES = [[2, 2], [8, 3], [8, 3, 2, 3], [1, 4]]


def _lines(lines: Mapping[Line, Sequence[RunView]], theirs: Theirs) -> list[dict[str, Any]]:
    settings = {setting: place for place, setting in enumerate(_settings(lines))}
    cells = _cells(lines)
    return [
        {
            "setting": settings[line.setting],
            "optimizer": line.optimizer,
            **_mean_curve(runs),
            "final": cells.get((groups.label(line.setting), line.optimizer)),
            "theirs": theirs(runs[0].config),
            "going": [[run.done, run.config.run.rounds] for run in runs if run.summary is None],
        }
        for line, runs in lines.items()
    ]


def _cells(lines: Mapping[Line, Sequence[RunView]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the final table by (setting, optimizer), marked as all of our tables are."""
    if not any(run.final is not None for runs in lines.values() for run in runs):
        return {}
    # A setting's whole label stands for it: the table need not know what it is made of.
    table = summarise(_labelled(lines))
    return {
        (str(row["task"]), str(row["optimizer"])): {
            "mean": float(row["mean"]),
            "std": float(row["std"]),
            "n": int(row["n"]),
            "below": float(row["difference"]),
            "best": bool(row["best"]),
        }
        for _, row in table.iterrows()
    }


def _labelled(lines: Mapping[Line, Sequence[RunView]]) -> Any:
    frame = groups.finals(lines)
    labels = [
        groups.label(line.setting)
        for line, runs in lines.items()
        for run in runs
        if run.final is not None
    ]
    return frame.assign(task=labels, alpha=float("nan"))


def _sentences(lines: Mapping[Line, Sequence[RunView]]) -> dict[str, str]:
    """Say for each task, once something is finished, what its runs show."""
    said = {}
    for task in dict.fromkeys(line.setting.task for line in lines):
        mine = {line: runs for line, runs in lines.items() if line.setting.task == task}
        frame = groups.finals(mine)
        if not frame.empty:
            said[task] = sentence(summarise(frame))
    return said


def _mean_curve(runs: Sequence[RunView]) -> dict[str, list[Any]]:
    """Return mean and sample deviation over seeds at few enough rounds; accuracies in percent."""
    accuracies: dict[int, list[float]] = {}
    losses: dict[int, list[float]] = {}
    for run in runs:
        for place, (round_, accuracy) in enumerate(run.curve):
            accuracies.setdefault(int(round_), []).append(100.0 * accuracy)
            loss = run.losses[place] if run.losses else None
            losses.setdefault(int(round_), []).extend([] if loss is None else [loss])
    rounds = sorted(accuracies)
    kept = [rounds[place] for place in spread(len(rounds))] if rounds else []
    curve: dict[str, list[Any]] = {"rounds": kept, "n": [len(accuracies[r]) for r in kept]}
    for name, values in (("accuracy", accuracies), ("loss", losses)):
        moments = [_moments(values[round_]) for round_ in kept]
        curve[name] = [mean for mean, _ in moments]
        curve[f"{name}Deviation"] = [deviation for _, deviation in moments]
    return curve


def _moments(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return mean and sample deviation, as far as there are enough values."""
    if not values:
        return None, None
    deviation = _short(float(np.std(values, ddof=1))) if len(values) > 1 else None
    return _short(float(np.mean(values))), deviation


def _short(value: float | None, digits: int = 5) -> float | None:
    """Drop digits below a pixel, which only make the page large, and what JSON cannot write."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _run(run: RunView, line: int | None) -> dict[str, Any]:
    summary = run.summary or {}
    seconds = summary.get("seconds") or run.seconds
    return {
        "name": run.name or run.config.run_name,
        "line": line,
        "optimizer": optimizer_label(run.config.client.optimizer),
        "task": run.config.task,
        "seed": run.config.run.seed,
        "scale": run.scale,
        "done": run.done,
        "total": run.config.run.rounds,
        "finished": run.summary is not None,
        "accuracy": run.final,
        "latest": run.curve[-1][1] if run.curve else None,
        "best": summary.get("best_test_accuracy"),
        "loss": summary.get("final_test_loss"),
        "seconds": seconds,
        "refused": summary.get("refused_updates", run.refused),
        "diverged": (summary.get("diverged") or {}).get("reason"),
        "when": summary.get("finished"),
        "sha256": summary.get("weights_sha256"),
        "native": summary.get("native_kernels"),
        "versions": dict(summary.get("versions") or {}),
        "command": command(run.config),
        "config": run.config.to_toml(),
        "steps": _steps(run.steps),
    }


def _steps(traces: Sequence[StepTrace]) -> list[list[Any]]:
    """Return [round, first step, smoothness, growth, eta] of evenly spread rounds."""
    total = sum(len(trace.eta) for trace in traces)
    rounds = min(len(traces), max(1, MAX_STEPS * len(traces) // max(total, 1)))
    kept = np.round(np.linspace(0, len(traces) - 1, num=rounds)).astype(int)
    return [
        [
            traces[place].round,
            traces[place].start,
            *(
                [_short(value, 4) for value in values[:MAX_STEPS]]
                for values in (traces[place].smoothness, traces[place].growth, traces[place].eta)
            ),
        ]
        for place in kept
    ]


def _partitions(
    lines: Mapping[Line, Sequence[RunView]], partitions: Mapping[str, Holdings | str]
) -> list[dict[str, Any]]:
    """Return a picture for each federation, and which settings it belongs to."""
    places = {setting: place for place, setting in enumerate(_settings(lines))}
    pictures: dict[str, dict[str, Any]] = {}
    for setting, config in groups.federations(lines).items():
        key = federation_key(config)
        if key not in partitions:
            continue
        if key not in pictures:
            pictures[key] = {"settings": [], "seed": config.run.seed, **_picture(partitions[key])}
        pictures[key]["settings"].append(places[setting])
    return list(pictures.values())


def _picture(found: Holdings | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"note": found}
    # Only what is held: with a small alpha nearly every count is zero.
    held = [[[label, count] for label, count in enumerate(row) if count] for row in found.counts]
    return {"classes": list(found.classes), "clients": found.clients, "held": held}


@cache
def _asset(name: str) -> str:
    return resources.files("deltafl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
