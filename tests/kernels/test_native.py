"""Compiling, caching and refusing the compiled kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltafl.kernels import build, native


def real() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


posix = pytest.mark.skipif(os.name != "posix", reason="the kernels need POSIX")
compiler = pytest.mark.skipif(real() is None, reason="there is no C compiler")

Load = Callable[..., native._Loaded]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A compiler that does not optimise: no test here is about speed."""
    return executable(tmp_path / "quickcc", f'#!/bin/sh\nexec {real()} "$@" -O0\n')


@pytest.fixture
def load(cache: Path, quick: str, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the kernels as the first use of a process does, with a cache and a compiler."""
    monkeypatch.setattr(
        build.platformdirs, "user_cache_dir", lambda *_, **__: str(cache / "deltafl")
    )

    def first_use(cc: str = quick) -> native._Loaded:
        monkeypatch.setenv("CC", cc)
        return native._try_load()

    return first_use


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


# Computes something small with the kernels or without; the result must be right either way.
SCRIPT = """
import torch
from deltafl import kernels
assert kernels.native._loaded is None  # importing compiles nothing
inputs = torch.arange(50.0).sin().view(1, 2, 5, 5)
weight = torch.arange(36.0).cos().view(2, 2, 3, 3).requires_grad_()
bias = torch.tensor([0.1, -0.2])
found = kernels.conv_pool_relu(inputs, weight, bias)
right = kernels.reference(inputs, weight, bias)
assert torch.allclose(found, right, atol=1e-5)
for maps in (found, right):
    maps.square().sum().backward()
print(kernels.available(), kernels.reason(), type(found.grad_fn).__name__)
"""


def start(cache: Path, **changes: str) -> subprocess.Popen[str]:
    """Run the script in a process of its own: a library stays loaded in the one that loads it."""
    kept = {key: value for key, value in os.environ.items() if key not in {"CC", "DELTAFL_NATIVE"}}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env={**kept, "XDG_CACHE_HOME": str(cache), "HOME": str(cache), **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@posix
@compiler
def test_several_processes_at_once_then_from_the_cache(cache: Path, quick: str) -> None:
    for process in [start(cache, CC=quick) for _ in range(3)]:
        assert finish(process).startswith("True None _ConvPoolRelu")
    (library,) = libraries(cache)
    assert not list(cache.rglob(".building-*"))
    assert library.stat().st_mode & 0o077 == 0
    assert library.parent.stat().st_mode & 0o077 == 0

    before = library.stat()
    assert finish(start(cache, CC=quick)).startswith("True None")
    assert libraries(cache) == [library]
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert library.stat().st_ino == before.st_ino


@posix
@compiler
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["damaged", "planted"])
def test_a_library_that_is_not_ours_is_made_anew(
    cache: Path, quick: str, load: Load, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "key", lambda *_: "name")
    folder = cache / "deltafl" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    planted = folder / "kernels-name.so"
    planted.write_bytes(b"not a library")
    planted.chmod(mode)
    assert load().reason is None
    assert libraries(cache) == [planted]
    assert planted.stat().st_size > 1000
    assert planted.stat().st_mode & 0o077 == 0


def test_switched_off(cache: Path) -> None:
    output = finish(start(cache, DELTAFL_NATIVE="0"))
    assert output.startswith("False DELTAFL_NATIVE=0 switches it off ReluBackward")
    assert not list(cache.iterdir())


@posix
def test_no_compiler(cache: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    output = finish(start(cache, PATH=str(nothing)))
    assert output.startswith("False there is no C compiler: install gcc or clang")


@posix
@pytest.mark.parametrize(
    ("fake", "why"),
    [
        ("#!/bin/sh\necho 'fake: broken' >&2\nexit 1\n", "the C compiler fails: fake: broken"),
        ("#!/bin/sh\nexit 1\n", "the C compiler fails: exit code 1"),
        ("#!/bin/sh\nexit 0\n", "the compiled library cannot be loaded"),
        ("not a program", "the C compiler does not run"),
    ],
    ids=["complains", "fails", "makes nothing", "cannot run"],
)
def test_a_broken_compiler(load: Load, tmp_path: Path, fake: str, why: str) -> None:
    loaded = load(executable(tmp_path / "fakecc", fake))
    assert loaded.library is None
    assert loaded.reason is not None
    assert loaded.reason.startswith(why)


@posix
@compiler
def test_a_compiler_that_does_not_know_march_native(
    cache: Path, load: Load, tmp_path: Path
) -> None:
    fake = f"""#!/bin/sh
for argument; do
    [ "$argument" = -march=native ] && {{ echo "no such processor" >&2; exit 1; }}
done
exec {real()} "$@" -O0
"""
    assert load(executable(tmp_path / "oldcc", fake)).reason is None
    assert len(libraries(cache)) == 1


@posix
@compiler
@pytest.mark.parametrize(
    "fault",
    [
        "s/(next > best)/(next < best)/",
        "s/count += position >= 0/count += position > 0/",
        "s/left\\[o\\] += w/left[o] -= w/",
        "s/\\* GROUP + 1\\] += g/* GROUP + 1] -= g/",
        "s/y += take(shortcut/y -= take(shortcut/",
        "s/running_mean\\[c\\] = /running_mean[c] += /",
        "s/(g - lost/(g + lost/",
    ],
    ids=[
        *("forward", "backward", "narrow forward", "narrow filters"),
        *("norm forward", "running mean", "norm backward"),
    ],
)
def test_a_library_that_computes_nonsense_is_refused(
    load: Load, tmp_path: Path, fault: str
) -> None:
    fake = f"""#!/bin/sh
[ "$1" = --version ] && exec {real()} --version
sed '{fault}' | {real()} "$@" -O0
"""
    loaded = load(executable(tmp_path / "badcc", fake))
    assert loaded.library is None
    assert loaded.reason == "the compiled library computes something else than torch"


@posix
@compiler
def test_a_cache_that_others_can_write_is_not_used(cache: Path, load: Load) -> None:
    folder = cache / "deltafl" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load().reason is None
    assert not libraries(cache)
    # Neither is one that others could move away and replace.
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    assert load().reason is None
    assert not libraries(cache)


@posix
@compiler
def test_a_cache_that_cannot_be_written(cache: Path, load: Load) -> None:
    (cache / "deltafl").write_text("a file where a folder should be")
    assert load().reason is None


@posix
@compiler
def test_the_first_use_may_be_anywhere(load: Load) -> None:
    """Its check needs gradients, float32 and the CPU, and no random numbers, whatever is set."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            assert load().reason is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


@posix
def test_any_surprise_is_a_reason(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise() -> None:
        raise ValueError("what is this")

    monkeypatch.setattr(build, "cache_folder", surprise)
    monkeypatch.setattr(build, "compiler", lambda: ["cc"])
    assert load().reason == "ValueError: what is this"


@posix
def test_the_name_of_a_build_depends_on_all_that_goes_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = "cc 1"
    monkeypatch.setattr(build, "_run", lambda command: version)
    monkeypatch.setattr(build, "_processor", lambda: "fast")
    keys = [build.key(b"source", ["cc", "-O3"]), build.key(b"other", ["cc", "-O3"])]
    keys.append(build.key(b"source", ["cc", "-O2"]))
    version = "cc 2"
    keys.append(build.key(b"source", ["cc", "-O3"]))
    monkeypatch.setattr(build, "_processor", lambda: "slow")
    keys.append(build.key(b"source", ["cc", "-O3"]))
    assert len(set(keys)) == len(keys)


def test_the_processor_is_the_same_one_each_time() -> None:
    assert build._processor() == build._processor()
    assert "MHz" not in build._processor()
