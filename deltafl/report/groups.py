"""Which runs belong together: a line of a chart is a mean over runs that differ by seed alone.

Optimizers are compared within a setting. Whatever else differs between the runs of a report, a
learning rate or a number of clients, becomes part of a label: different things are never averaged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from deltafl import optim
from deltafl.experiment.config import Config
from deltafl.report.labels import setting_label
from deltafl.report.runs import RunView


class Setting(NamedTuple):
    """Where optimizers are compared."""

    task: str
    alpha: float | None
    """None is a federation whose clients are alike (IID)."""
    objective: str
    server: str
    setup: str
    """What else tells this setting from others of the report; often nothing."""

    @property
    def spread(self) -> str:
        """How heterogeneous the clients are, in words."""
        return "IID" if self.alpha is None else f"α = {self.alpha:g}"


class Line(NamedTuple):
    """What is averaged over seeds."""

    setting: Setting
    optimizer: str
    """The label, with what tells variants of one optimizer apart."""
    name: str
    """The optimizer as the configuration names it."""


def arrange(runs: Sequence[RunView]) -> dict[Line, list[RunView]]:
    """Return the runs of every line, in the order of tables; one run a seed, the furthest."""
    facts = [_facts(run) for run in runs]
    settings = _settings(runs, facts)
    names = [run.config.client.optimizer for run in runs]
    labels = Counter(optimizer_label(name) for name in set(names))
    lines: dict[Line, dict[int, RunView]] = defaultdict(dict)
    for name in sorted(set(names), key=_catalog_order):
        title = optimizer_label(name)
        title = name if labels[title] > 1 else title  # two modules may have a class of one name
        mine = [place for place, other in enumerate(names) if other == name]
        variants = _varying(((settings[place], facts[place]) for place in mine), _of_optimizer)
        for place in mine:
            suffix = _label(facts[place], variants)
            seeds = lines[Line(settings[place], f"{title}, {suffix}".removesuffix(", "), name)]
            run, seed = runs[place], runs[place].config.run.seed
            if seed not in seeds or _progress(run) > _progress(seeds[seed]):
                seeds[seed] = run
    ordered = sorted(lines, key=lambda line: _setting_order(line.setting))
    return {line: [run for _, run in sorted(lines[line].items())] for line in ordered}


def _settings(runs: Sequence[RunView], facts: Sequence[dict[str, Any]]) -> list[Setting]:
    """Return the setting of every run; what tells setups apart is the same in all of a task."""
    bases = [_base(run) for run in runs]
    tasks = [(run.config.task, run.scale) for run in runs]
    setups = {
        task: _varying(
            (
                (base, fact)
                for base, fact, mine in zip(bases, facts, tasks, strict=True)
                if mine == task
            ),
            lambda name: not _of_optimizer(name),
        )
        for task in set(tasks)
    }
    return [
        Setting(*base, setup=_setup(task[1], _label(fact, setups[task])))
        for base, fact, task in zip(bases, facts, tasks, strict=True)
    ]


def federations(lines: Mapping[Line, Sequence[RunView]]) -> dict[Setting, Config]:
    """Return a configuration of each setting: its smallest seed stands for the others."""
    configs: dict[Setting, Config] = {}
    for line, runs in lines.items():
        known = configs.get(line.setting)
        if known is None or runs[0].config.run.seed < known.run.seed:
            configs[line.setting] = runs[0].config
    return configs


def optimizer_label(name: str) -> str:
    """Return the label of the catalog, or the last part of an import path; imports nothing."""
    if name in optim.names():
        return optim.lookup(name).label
    return name.replace(":", ".").rpartition(".")[2] or name


def finals(lines: Mapping[Line, Sequence[RunView]]) -> pd.DataFrame:
    """Return a row a finished run, for `summarise`; a setting's label is its task."""
    return _frame(
        (line, {"seed": run.config.run.seed, "final_accuracy": run.final})
        for line, runs in lines.items()
        for run in runs
        if run.final is not None
    )


def curves(lines: Mapping[Line, Sequence[RunView]]) -> pd.DataFrame:
    """Return a row a run and evaluated round, for `accuracy_curves`."""
    return _frame(
        (line, {"seed": run.config.run.seed, "round": round_, "test_accuracy": accuracy})
        for line, runs in lines.items()
        for run in runs
        for round_, accuracy in run.curve
    )


def _frame(rows: Iterator[tuple[Line, dict[str, Any]]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            # Tables know task and alpha; what else there is goes with the task.
            "task": ", ".join(filter(None, (setting.task, *extras(setting)))),
            "alpha": setting.alpha,
            "optimizer": optimizer,
        }
        | numbers
        for (setting, optimizer, _), numbers in rows
    )


def extras(setting: Setting) -> list[str]:
    """Return what is not as usual in a setting: its objective, its server, its setup."""
    usual = Config()
    return [
        *([setting.objective] if setting.objective != usual.client.objective else []),
        *([setting.server] if setting.server != usual.server.optimizer else []),
        *([setting.setup] if setting.setup else []),
    ]


def label(setting: Setting) -> str:
    """Return the whole name of a setting."""
    named = setting_label(setting.task, setting.alpha)
    return ", ".join([named, *extras(setting)])


# What a setting is named by, or what changes no accuracy that is shown.
_NAMED = {
    "task",
    "federation.alpha",
    "federation.partition",
    "client.optimizer",
    "run.seed",
    "run.eval_every",
    "run.record_step_sizes",
    "run.device",
}
_NAMED_SECTIONS = ("client.objective", "server.")


def _of_optimizer(name: str) -> bool:
    return name == "client.lr" or name.startswith("client.options.")


def _facts(run: RunView) -> dict[str, Any]:
    """Return every dotted field that may tell two runs apart."""
    leaves = dict(_leaves(run.config.identity))
    if leaves["data_sha256"] is not None:
        leaves["data_sha256"] = leaves["data_sha256"][:12]  # enough to tell two data sets apart
    return {
        name: value
        for name, value in leaves.items()
        if name not in _NAMED and not name.startswith(_NAMED_SECTIONS)
    }


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(value) if isinstance(value, list) else value


def _base(run: RunView) -> tuple[str, float | None, str, str]:
    config = run.config
    iid = config.federation.partition == "iid"
    server = {"lr": config.server.lr, "weighting": config.server.weighting, **config.server.options}
    return (
        config.task,
        None if iid else config.federation.alpha,
        _named(config.client.objective, config.client.objective_options),
        _named(config.server.optimizer, server),
    )


def _named(name: str, options: Mapping[str, Any]) -> str:
    given = [f"{key} {_text(value)}" for key, value in options.items() if value is not None]
    return " ".join([name, *([f"({', '.join(given)})"] if given else [])])


def _varying(
    facts: Iterable[tuple[Hashable, dict[str, Any]]], wanted: Callable[[str], bool]
) -> list[str]:
    """Return the fields with several values within some group."""
    groups: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for group, fact in facts:
        groups[group].append(fact)
    names = dict.fromkeys(name for each in groups.values() for fact in each for name in fact)
    return [
        name
        for name in filter(wanted, names)
        if any(len({fact.get(name) for fact in each}) > 1 for each in groups.values())
    ]


def _label(fact: Mapping[str, Any], names: Sequence[str]) -> str:
    """Name the fields that are not as usual; where all is about one field, its usual value too."""
    usual = _usual()
    return ", ".join(
        f"{name.rpartition('.')[2].replace('_', ' ')} {_text(fact.get(name))}"
        for name in names
        if fact.get(name) != usual.get(name) or (len(names) == 1 and usual.get(name) is not None)
    )


@cache
def _usual() -> dict[str, Any]:
    return dict(_leaves(Config().identity))


def _setup(scale: str | None, label: str) -> str:
    return ", ".join(filter(None, (scale and f"{scale} scale", label)))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, tuple):
        return "–".join(map(_text, value))
    return str(value)


def _progress(run: RunView) -> tuple[bool, int]:
    return run.summary is not None, run.done


def _catalog_order(name: str) -> tuple[int, str]:
    known = optim.names()
    return (known.index(name) if name in known else len(known), name)


def _setting_order(setting: Setting) -> tuple[Any, ...]:
    """Sort settings from alike to heterogeneous clients, as the paper's tables do."""
    alpha = float("inf") if setting.alpha is None else setting.alpha
    unusual = ", ".join(extras(setting))
    return (setting.task, -alpha, len(unusual), unusual)  # the usual one first
