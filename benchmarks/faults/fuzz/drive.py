"""One target under atheris, which keeps inputs that reach new code and goes on from them.

`python -m benchmarks.faults.fuzz` starts this; libFuzzer reads the options after the name.
"""

from __future__ import annotations

import importlib
import sys
import warnings

import atheris

# Where inputs are taken apart: the project, and what it hands bytes of somebody else's to.
INSTRUMENTED = ["deltafl", "gzip", "http", "json", "tarfile", "tomllib", "zipfile", "PIL"]


def main() -> None:
    """Fuzz the target named first on the command line."""
    name = sys.argv.pop(1)
    for module in [*sys.modules]:  # atheris itself has brought some of them
        if module.partition(".")[0] in INSTRUMENTED:
            del sys.modules[module]
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        targets = importlib.import_module("benchmarks.faults.fuzz.targets").TARGETS
    warnings.simplefilter("ignore")
    target = targets[name]
    target.warm_up()
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
