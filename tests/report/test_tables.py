from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from deltafl.errors import UserError
from deltafl.report import sentence, summarise, to_csv, to_latex, to_markdown, to_rich

Accuracies = dict[tuple[str, float | None, str], Sequence[float]]


def runs(accuracies: Accuracies) -> pd.DataFrame:
    """One row a run from {(task, alpha, optimizer): accuracies by seed}."""
    return pd.DataFrame(
        [
            {
                "task": task,
                "alpha": alpha,
                "optimizer": optimizer,
                "seed": seed,
                "final_accuracy": accuracy,
            }
            for (task, alpha, optimizer), seeds in accuracies.items()
            for seed, accuracy in enumerate(seeds)
        ],
        columns=["task", "alpha", "optimizer", "seed", "final_accuracy"],
    )


TWO_SETTINGS: Accuracies = {
    ("digits", 1.0, "SGD"): [0.90, 0.92],
    ("digits", 1.0, "Adam"): [0.70, 0.70],
    ("digits", 1.0, "Δ-SGD"): [0.912, 0.902],
    ("digits", 0.1, "SGD"): [0.84, 0.86],
    ("digits", 0.1, "Adam"): [0.865, 0.867],
    ("digits", 0.1, "Δ-SGD"): [0.88, 0.87],
}


def one_setting(**means: float) -> pd.DataFrame:
    names = {"delta": "Δ-SGD"}
    return summarise(
        runs({("digits", 0.1, names.get(name, name)): [mean] for name, mean in means.items()})
    )


def test_summary_has_exact_numbers_in_the_given_order() -> None:
    summary = summarise(runs(TWO_SETTINGS))
    expected = pd.DataFrame(
        {
            "task": ["digits"] * 6,
            "alpha": [1.0] * 3 + [0.1] * 3,
            "optimizer": ["SGD", "Adam", "Δ-SGD"] * 2,
            "mean": [91.0, 70.0, 90.7, 85.0, 86.6, 87.5],
            "std": [2**0.5, 0.0, 0.5**0.5, 2**0.5, 0.02**0.5, 0.5**0.5],
            "n": [2] * 6,
            "difference": [0.0, 21.0, 0.3, 2.5, 0.9, 0.0],
            "best": [True, False, True, False, False, True],
        }
    )
    pd.testing.assert_frame_equal(summary, expected, check_exact=False, rtol=0, atol=1e-8)


def test_one_seed_has_no_deviation() -> None:
    summary = one_setting(SGD=0.5)
    assert summary["std"].tolist() == [0.0]
    assert summary["n"].tolist() == [1]
    assert "| SGD | **50.0** |" in to_markdown(summary)


def test_half_a_point_still_counts_as_best_as_in_the_paper() -> None:
    summary = one_setting(Adam=0.850, delta=0.845, SGD=0.8449)
    assert summary["best"].tolist() == [True, True, False]


def test_the_order_of_the_seeds_does_not_break_a_tie() -> None:
    seeds = [0.1, 0.7, 0.3, 0.55]
    summary = summarise(runs({("t", 1.0, "A"): seeds, ("t", 1.0, "B"): seeds[::-1]}))
    assert summary["difference"].tolist() == [0.0, 0.0]


def test_a_setting_without_alpha_is_a_setting() -> None:
    summary = summarise(runs({("iid", None, "SGD"): [0.5], ("iid", None, "Adam"): [0.25]}))
    assert summary["difference"].tolist() == [0.0, 25.0]
    assert to_markdown(summary).startswith(
        "| Optimizer | iid |\n| --- | ---: |\n| SGD | **50.0** |\n| Adam | 25.0 (−25.0) |\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="seed"), r"needs the column\(s\) seed"),
        (lambda frame: frame.iloc[:0], "nothing to show"),
        (lambda frame: frame.assign(final_accuracy=87.0), "between 0 and 1, got 87.0"),
        (lambda frame: frame.assign(final_accuracy=float("nan")), "one is missing"),
        (
            lambda frame: frame.assign(seed=3),
            r"SGD on digits, α = 1 has two runs with seed 3: give .* different labels",
        ),
    ],
)
def test_a_frame_that_cannot_be_summarised_is_refused(change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        summarise(change(runs(TWO_SETTINGS)))


def test_markdown_marks_the_best_and_the_differences() -> None:
    assert to_markdown(summarise(runs(TWO_SETTINGS))) == (
        "| Optimizer | digits, α = 1 | digits, α = 0.1 |\n"
        "| --- | ---: | ---: |\n"
        "| SGD | **91.0 ±1.4** | 85.0 ±1.4 (−2.5) |\n"
        "| Adam | 70.0 ±0.0 (−21.0) | 86.6 ±0.1 (−0.9) |\n"
        "| Δ-SGD | **90.7 ±0.7** | **87.5 ±0.7** |\n"
        "\n"
        "Final test accuracy (%), mean ± standard deviation over n = 2 seeds. Bold: within 0.5 "
        "points of the best of its column; otherwise the points below that best follow.\n"
    )


def test_markdown_keeps_a_pipe_in_a_label_inside_its_cell() -> None:
    table = to_markdown(summarise(runs({("a|b", 1.0, "x|y"): [0.5]})))
    assert "| Optimizer | a\\|b, α = 1 |" in table
    assert "| x\\|y | **50.0** |" in table


def test_the_note_says_when_seeds_differ_in_number() -> None:
    frame = runs({("t", 1.0, "SGD"): [0.5], ("t", 1.0, "Adam"): [0.5, 0.6, 0.7]})
    assert "over n = 1 to 3 seeds." in to_markdown(summarise(frame))
    assert "Final test accuracy (%) over n = 1 seed." in to_markdown(summarise(frame.iloc[:2]))


def cells(summary: pd.DataFrame, column: int) -> list[Text]:
    found = [cell for cell in to_rich(summary).columns[column].cells if isinstance(cell, Text)]
    assert found
    return found


def test_terminal_cells_are_coloured_by_the_rules_of_the_paper() -> None:
    best, near, at_two, far = cells(one_setting(A=0.90, B=0.89, C=0.88, D=0.8799), 1)
    assert (best.plain, best.style) == ("90.0", "bold green")
    assert (near.plain, near.spans[0].style) == ("89.0 −1.0", "dim")
    assert (at_two.plain, at_two.spans[0].style) == ("88.0 −2.0", "dim")
    assert (far.plain, far.spans[0].style) == ("88.0 −2.0", "bright_magenta")
    assert far.plain[far.spans[0].start : far.spans[0].end] == "−2.0"


def test_terminal_table_prints_optimizers_in_order_and_a_dash_where_nothing_ran() -> None:
    accuracies = dict(TWO_SETTINGS)
    del accuracies["digits", 0.1, "Adam"]
    summary = summarise(runs(accuracies))
    assert [cell.plain for cell in cells(summary, 0)] == ["SGD", "Adam", "Δ-SGD"]
    assert [cell.plain for cell in cells(summary, 2)] == ["85.0 ±1.4 −2.5", "–", "87.5 ±0.7"]
    screen = io.StringIO()
    Console(file=screen, width=100).print(to_rich(summary))
    assert "α = 0.1" in screen.getvalue()
    assert "n = 2 seeds" in screen.getvalue()


def test_a_label_is_text_and_not_markup() -> None:
    summary = summarise(runs({("t", 1.0, "SGD [bold]"): [0.5]}))
    assert cells(summary, 0)[0].plain == "SGD [bold]"


def test_latex_is_set_as_in_the_paper() -> None:
    accuracies = {("a_b", 1.0, "Δ-SGD"): [0.9], ("a_b", 1.0, "SGD (↓)"): [0.8]}
    accuracies |= {("a_b", 1.0, "SPS"): [0.89], ("a_b", 0.1, "SPS"): [0.2]}
    assert to_latex(summarise(runs(accuracies))) == (
        "\\begin{tabular}{lrr}\n"
        "\\toprule\n"
        "Optimizer & a\\_b, $\\alpha$ = 1 & a\\_b, $\\alpha$ = 0.1 \\\\\n"
        "\\midrule\n"
        "$\\Delta$-SGD & \\textcolor{green!50!black}{\\textbf{90.0}} & -- \\\\\n"
        "SGD ($\\downarrow$) & 80.0$_{\\textcolor{magenta}{\\downarrow(10.0)}}$ & -- \\\\\n"
        "SPS & 89.0$_{\\downarrow(1.0)}$ & \\textcolor{green!50!black}{\\textbf{20.0}} \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


def test_csv_reads_back_as_the_summary() -> None:
    summary = summarise(runs(TWO_SETTINGS))
    text = to_csv(summary)
    assert text.splitlines()[2] == "digits,1.0,Adam,70.0,0.0,2,21.0,False"
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text)), summary, check_dtype=False)


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (
            summarise(runs(TWO_SETTINGS)),
            "Δ-SGD (untuned) is at worst 0.3 points behind the best over 2 settings, the smallest "
            "such gap; the next most robust, SGD, falls 2.5 behind; the worst, Adam, 21.0.",
        ),
        (
            one_setting(SGD=0.80, delta=0.90, SPS=0.3),
            "On digits, α = 0.1, Δ-SGD (untuned) reaches the best accuracy, 90.0 %; the next "
            "best, SGD, falls 10.0 points behind; the worst, SPS, 60.0.",
        ),
        (
            one_setting(SGD=0.9, Adam=0.8, delta=0.7, SPS=0.3),
            "On digits, α = 0.1, SGD reaches the best accuracy, 90.0 %; the next best, Adam, "
            "falls 10.0 points behind; Δ-SGD (untuned) falls 20.0 behind; the worst, SPS, 60.0.",
        ),
        (
            one_setting(SGD=0.9, Adam=0.8, delta=0.1),
            "On digits, α = 0.1, SGD reaches the best accuracy, 90.0 %; the next best, Adam, "
            "falls 10.0 points behind; the worst, Δ-SGD (untuned), 80.0.",
        ),
        (
            one_setting(SGD=0.9, Adam=0.9),
            "On digits, α = 0.1, SGD and Adam reach the best accuracy, 90.0 %.",
        ),
        (
            one_setting(SGD=0.9, Adam=0.8998),
            "On digits, α = 0.1, SGD reaches the best accuracy, 90.0 %; the next best, Adam, "
            "falls under 0.1 points behind.",
        ),
        (one_setting(delta=0.9), "Only Δ-SGD ran, so there is nothing to compare."),
        (one_setting(delta=0.9).iloc[:0], "Only nothing ran, so there is nothing to compare."),
        (
            summarise(
                runs(
                    {
                        (task, 1.0, name): [accuracy]
                        for task in "ab"
                        for name, accuracy in {"X": 0.8, "Y": 0.7, "Z": 0.7}.items()
                    }
                )
            ),
            "X reaches the best accuracy in both settings; the next most robust, Y and Z, fall "
            "10.0 points behind.",
        ),
        (
            summarise(
                runs(
                    {
                        ("a", 1.0, "SGD"): [0.8],
                        ("b", 1.0, "SGD"): [0.8],
                        ("b", 1.0, "Δ-SGD"): [0.9],
                    }
                )
            ),
            "SGD is at worst 10.0 points behind the best over 2 settings, the smallest such gap; "
            "not ranked, as not run everywhere: Δ-SGD (untuned) (1 of 2 settings).",
        ),
        (
            summarise(runs({("a", 1.0, "SGD"): [0.8], ("b", 1.0, "Adam"): [0.9]})),
            "No optimizer ran in both settings; not ranked, as not run everywhere: "
            "SGD (1 of 2 settings) and Adam (1 of 2 settings).",
        ),
    ],
)
def test_sentence_says_what_the_numbers_say(summary: pd.DataFrame, expected: str) -> None:
    assert sentence(summary) == expected


def stated(text: str) -> tuple[str, float]:
    """Return the form of a clause's number, and the number."""
    if "reach" in text:
        return "exact", 0.0
    found = re.search(r"(under )?(\d+\.\d)", text)
    assert found, text
    return ("under" if found[1] else "rounded"), float(found[2])


NAMES = ["SGD", "SGDM (↓)", "Adam", "SPS", "Δ-SGD"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_sentence_states_gaps_that_an_independent_count_confirms(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=2, unique=True), "optimizers")
    tasks = data.draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]]), "tasks")
    # Ten thousandths of a point and a narrow range make ties and tiny gaps frequent.
    counts = st.one_of(st.integers(0, 10_000), st.integers(9_000, 9_005))
    hits = {(task, name): data.draw(counts) for task in tasks for name in names}

    text = sentence(summarise(runs({(t, 1.0, n): [h / 10_000] for (t, n), h in hits.items()})))

    # Integers: the oracle shares no rounding with what it judges.
    gap = {
        name: max(max(hits[task, other] for other in names) - hits[task, name] for task in tasks)
        for name in names
    }
    places = sorted(set(gap.values()))
    clauses = text.removesuffix(".").split("; ")
    named = [[name for name in names if mentions(name, clause)] for clause in clauses]
    for clause, who in zip(clauses, named, strict=True):
        assert len({gap[name] for name in who}) == 1, text
        assert who == [name for name in names if gap[name] == gap[who[0]]], text
        form, number = stated(clause)
        true = gap[who[0]] / 100
        if form == "exact":
            assert true == 0
        elif form == "under":
            assert 0 < true < number
        else:
            assert abs(number - true) <= 0.05 + 1e-9
    assert [places.index(gap[who[0]]) for who in named][:2] == list(range(min(2, len(places))))
    assert gap[named[-1][0]] == places[-1]
    if "Δ-SGD" in names:
        assert any("Δ-SGD" in who for who in named), text


def mentions(name: str, clause: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w]| \(↓)", clause) is not None
