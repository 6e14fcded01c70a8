"""Accuracy under attack: attack x share of bad clients x aggregation, on digits and Fashion-MNIST.

`python -m benchmarks.faults.attacks` writes results/faults/attacks.md and attacks.json. Runs are
ordinary runs of `deltafl run`, in folders below --runs, so what is done is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.progress import track

from benchmarks.machine import hardware, load, software
from deltafl import Config, run
from deltafl.experiment import DivergedError

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "results" / "faults"
SHARES = (0.01, 0.1, 0.2, 0.4)
# What else is refused leaves the bits that NaN leaves: tests/experiment/test_bad_clients.py.
REFUSED = ("nan",)
SERVERS: tuple[tuple[str, bool], ...] = (
    ("mean", False),
    ("median", False),
    ("trimmed-mean", False),
    ("multi-krum", False),
    ("geometric-median", False),
    ("geometric-median", True),
)
FEWER = (("mean", False), ("median", False), ("geometric-median", True))
DIGITS: dict[str, Any] = {
    "task": "digits-mlp",
    # All clients in every round: so a round's share of bad ones is that of the federation.
    "federation": {
        "clients": 100,
        "samples": 30,
        "replacement": True,
        "participation": 1.0,
        "alpha": 1.0,
    },
    "client": {"batch_size": 10},
    "run": {"rounds": 20, "eval_every": 20, "checkpoint_seconds": 3600},
    "engine": {"kind": "inline"},
}
FASHION: dict[str, Any] = {
    **DIGITS,
    "task": "fmnist-mlp",
    "federation": {**DIGITS["federation"], "clients": 20, "samples": 200},
    "client": {"batch_size": 30},
}


def configuration(
    base: dict[str, Any], alpha: float, attack: str, share: float, server: tuple[str, bool]
) -> dict[str, Any]:
    """Return the configuration of a cell, without its seed."""
    federation = {**base["federation"], "alpha": alpha}
    if share:
        federation |= {"attack": attack, "attackers": share}
    rule, mixing = server
    options: dict[str, Any] = {}
    if mixing:
        options["mixing"] = True
    if mixing or rule in ("trimmed-mean", "multi-krum"):
        options["attackers"] = max(0.2, share)  # who guards himself has to guess
    return {
        **base,
        "federation": federation,
        "server": {"aggregate": rule, "aggregate_options": options},
    }


def measure(job: tuple[dict[str, Any], int, Path]) -> dict[str, Any]:
    """Run one seed of a cell."""
    tree, seed, runs = job
    config = Config.model_validate({**tree, "run": {**tree["run"], "seed": seed}})
    try:
        result = run(config, out=runs / config.run_name)
    except DivergedError as diverged:
        result = diverged.result
    summary = result.summary
    federation = config.federation
    return {
        "task": config.task,
        "alpha": federation.alpha,
        "attack": federation.attack or "none",
        "share": federation.attackers,
        "rule": config.server.aggregate,
        "mixing": bool(config.server.aggregate_options.get("mixing", False)),
        "seed": seed,
        "accuracy": summary["final_test_accuracy"],
        "refused": summary["refused_updates"],
        "diverged": summary.get("diverged", {}).get("reason"),
        "weights_sha256": summary["weights_sha256"],
    }


def cells() -> list[dict[str, Any]]:
    """Return all cells: what is refused on the mean, sign flips on every rule."""
    return [
        *(
            configuration(DIGITS, 1.0, attack, share, SERVERS[0])
            for attack, share in itertools.product(REFUSED, SHARES)
        ),
        *(
            configuration(DIGITS, 1.0, "sign-flip", share, server)
            for share, server in itertools.product((0.0, *SHARES), SERVERS)
        ),
        *(
            configuration(DIGITS, 0.1, "sign-flip", share, server)
            for share, server in itertools.product((0.0, 0.2), SERVERS)
        ),
        *(
            configuration(FASHION, 1.0, "sign-flip", share, server)
            for share, server in itertools.product((0.2,), FEWER)
        ),
    ]


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the tables with what they were measured on."""
    seeds = sorted({row["seed"] for row in rows})
    text = [
        f"`{facts['command']}` on {facts['hardware']['cpu']}, {facts['hardware']['cores']} cores, "
        f"torch {facts['software']['torch']}. "
        f"Final test accuracy in percent, mean ± sample deviation over n = {len(seeds)} seeds "
        f"({', '.join(map(str, seeds))}), Δ-SGD clients, all in every round, 20 rounds.",
        "",
        "**Updates that are refused: digits-mlp, 100 clients, α = 1, the plain mean**",
        "",
        _line("attack", *(f"{share:.0%} bad" for share in SHARES), "refused at 40 %, a seed"),
        _line(*["---"] * (len(SHARES) + 2)),
    ]
    for attack in REFUSED:
        own = [row for row in rows if row["attack"] == attack]
        most = [row["refused"] for row in own if row["share"] == SHARES[-1]] or ["not run"]
        shown = [_cell([row for row in own if row["share"] == share]) for share in SHARES]
        text.append(_line(attack, *shown, str(most[0])))
    for task, alpha in (("digits-mlp", 1.0), ("digits-mlp", 0.1), ("fmnist-mlp", 1.0)):
        own = [
            row
            for row in rows
            if (row["task"], row["alpha"]) == (task, alpha)
            and row["attack"] in ("none", "sign-flip")
        ]
        if not own:
            continue
        shares = sorted({row["share"] for row in own})
        clients = 100 if task == "digits-mlp" else 20
        text += [
            "",
            f"**Sign flip times ten: {task}, {clients} clients, α = {alpha:g}**",
            "",
            _line("aggregate", *(f"{share:.0%} bad" for share in shares)),
            _line(*["---"] * (len(shares) + 1)),
        ]
        for rule, mixing in SERVERS if task == "digits-mlp" else FEWER:
            shown = [
                _cell(
                    [
                        row
                        for row in own
                        if (row["rule"], row["mixing"], row["share"]) == (rule, mixing, share)
                    ]
                )
                for share in shares
            ]
            text.append(_line(f"{rule}, mixing" if mixing else rule, *shown))
    return "\n".join(text) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "not run"
    values = [100 * row["accuracy"] for row in rows]
    broken = sum(row["diverged"] is not None for row in rows)
    spread = f" ±{stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + (f" ({broken} diverged)" if broken else "")


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    start = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:
        jobs = [
            (cell, seed, options.runs) for seed, cell in itertools.product(options.seeds, cells())
        ]
        rows = list(track(pool.map(measure, jobs, chunksize=4), "runs", total=len(jobs)))
    words = ["python -m benchmarks.faults.attacks", "--seeds", *map(str, options.seeds)]
    facts = {
        "command": " ".join(words),
        "hardware": hardware(),
        "software": {
            name: text for name, text in software().items() if not name.startswith("environment")
        },
        "load": load(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts | {"rows": rows}, indent=1)
    (options.out / "attacks.json").write_text(text + "\n", encoding="utf-8")
    (options.out / "attacks.md").write_text(markdown(rows, facts), encoding="utf-8")
    print(options.out / "attacks.md")


if __name__ == "__main__":
    main()
