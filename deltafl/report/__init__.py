"""What came out: tables, figures and one sentence, from plain data frames, and the page.

Only `runs` reads run folders: tables and figures are handed their numbers, so that the command
line, the page and a notebook all show the same thing.
"""

from deltafl.report.figures import (
    accuracy_curves,
    every_run,
    final_accuracies,
    heterogeneity_bars,
    save,
    step_sizes,
)
from deltafl.report.labels import DELTA_SGD, PAPER_OPTIMIZERS
from deltafl.report.tables import (
    sentence,
    summarise,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
)

__all__ = [
    "DELTA_SGD",
    "PAPER_OPTIMIZERS",
    "accuracy_curves",
    "every_run",
    "final_accuracies",
    "heterogeneity_bars",
    "save",
    "sentence",
    "step_sizes",
    "summarise",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
]
