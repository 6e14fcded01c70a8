"""How fast deltafl is, beside a hand-written loop and other simulators: `python -m benchmarks`."""
