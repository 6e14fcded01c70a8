"""Bytes that nobody meant are bad input, said in a line, and never anything else."""

from __future__ import annotations

import pickle
import resource
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from benchmarks.faults.fuzz.corpus import FOLDER, regressions
from benchmarks.faults.fuzz.guard import ForbiddenError
from benchmarks.faults.fuzz.target import Target
from benchmarks.faults.fuzz.targets import TARGETS
from deltafl import UserError

EXAMPLES = 150
TOKENS = (b"", b"\0", b"-1", b"null", b"[]", b"{}", b'""', b"1e999", b"9" * 400, b"../", b"NaN")

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, about what they are given


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    chosen = TARGETS[request.param]
    chosen.warm_up()
    return chosen


@st.composite
def altered(draw: st.DrawFn, chosen: Target) -> bytes:
    """An intact input with a few places written over, or no input at all."""
    content = draw(st.sampled_from([*chosen.intact, b""]))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        put = draw(st.sampled_from([*TOKENS, *chosen.words]) | st.binary(max_size=8))
        content = content[:place] + put + content[place + length :]
    return content


def test_whatever_the_bytes(target: Target) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(content=altered(target))
    def attempt(content: bytes) -> None:
        target(content)

    attempt()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000, f"{grown} kB for inputs of a few"


def test_what_once_broke_something(target: Target) -> None:
    for content in (*target.intact, *regressions(target.name)):
        target(content)


def test_every_regression_belongs_to_a_target() -> None:
    assert {folder.name for folder in FOLDER.iterdir()} <= set(TARGETS)


class Trap:
    def __reduce__(self) -> object:
        return (print, ("unpickled",))


def unpickle(content: bytes, _folder: Path) -> None:
    pickle.loads(content)


def start(_content: bytes, _folder: Path) -> None:
    subprocess.run(["true"], check=True)


def write_elsewhere(_content: bytes, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent)
    (folder / "link" / "escaped").write_text("out")


def fail(_content: bytes, _folder: Path) -> None:
    raise KeyError("no line for the user")


def refuse(_content: bytes, folder: Path) -> None:
    (folder / "inside").write_text("allowed")
    raise UserError("bad input")


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (unpickle, ForbiddenError),
        (start, ForbiddenError),
        (write_elsewhere, ForbiddenError),
        (fail, KeyError),
    ],
)
def test_the_targets_notice_what_is_forbidden(run, error) -> None:
    chosen = Target("x", "x", run, list)
    with pytest.raises(error):
        chosen(pickle.dumps(Trap()))
    Target("x", "x", refuse, list)(b"")
