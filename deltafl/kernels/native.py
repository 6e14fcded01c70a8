"""The compiled kernels: built with the system's C compiler on first use, checked, and loaded.

Nothing here is needed to be right, only to be fast: wherever a compiler is missing or anything
else goes wrong, `available` is false, `reason` says why, and callers use plain torch.
`DELTAFL_NATIVE=0` in the environment switches the kernels off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import platformdirs
import torch
from torch import Tensor
from torch.nn import functional as F

_SOURCE = "conv_pool_relu.c"
# No -ffast-math: NaN has to come through. Contraction (one rounding for a multiply-add) is what
# the speed rests on, and is off by default in some compilers.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi")
_TUNINGS = (("-march=native",), ())
_COMPILE_SECONDS = 120


class _UnavailableError(Exception):
    """Why there are no compiled kernels."""


def available() -> bool:
    """Say whether the compiled kernels can be used; the first call may compile them."""
    return _load().library is not None


def reason() -> str | None:
    """Return why they cannot be used, or None if they can."""
    return _load().reason


def forward(
    inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, *, record: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the pooled maps and, to `record` for `backward`, which positions won.

    All tensors are contiguous float32 on the CPU; `available` is true.
    """
    library = _load().library
    assert library is not None
    return library.forward(inputs, weight, bias, scale, record)


def backward(
    inputs: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    winners: Tensor,
    gradient: Tensor,
    *,
    to_inputs: bool,
    to_filters: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of inputs, weight and bias; those not asked for are None."""
    library = _load().library
    assert library is not None
    return library.backward(inputs, weight, scale, winners, gradient, to_inputs, to_filters)


class _Library:
    """The functions of a loaded shared library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._forward = library.deltafl_conv_pool_relu_forward
        self._forward.argtypes = [ctypes.c_void_p] * 7
        self._backward = library.deltafl_conv_pool_relu_backward
        self._backward.argtypes = [ctypes.c_void_p] * 9

    def forward(
        self, inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, record: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, channels, height, width = inputs.shape
        outputs, _, kernel, _ = weight.shape
        pooled = batch, outputs, (height - kernel + 1) // 2, (width - kernel + 1) // 2
        maps = inputs.new_empty(pooled)
        winners = inputs.new_empty(pooled, dtype=torch.int32) if record else None
        failed = self._forward(
            (ctypes.c_int64 * 6)(batch, channels, outputs, height, width, kernel),
            inputs.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            _address(scale),
            maps.data_ptr(),
            _address(winners),
        )
        if failed:
            raise MemoryError("no memory for the convolution")
        return maps, winners

    def backward(
        self,
        inputs: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        winners: Tensor,
        gradient: Tensor,
        to_inputs: bool,
        to_filters: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        batch, channels, height, width = inputs.shape
        outputs, _, kernel, _ = weight.shape
        of_inputs = torch.empty_like(inputs) if to_inputs else None
        of_weight = torch.empty_like(weight) if to_filters else None
        of_bias = weight.new_empty(outputs) if to_filters else None
        failed = self._backward(
            (ctypes.c_int64 * 6)(batch, channels, outputs, height, width, kernel),
            inputs.data_ptr(),
            weight.data_ptr(),
            _address(scale),
            winners.data_ptr(),
            gradient.data_ptr(),
            _address(of_inputs),
            _address(of_weight),
            _address(of_bias),
        )
        if failed:
            raise MemoryError("no memory for the gradient of the convolution")
        return of_inputs, of_weight, of_bias


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class _Loaded:
    library: _Library | None
    reason: str | None


_SWITCHED_OFF = _Loaded(None, "DELTAFL_NATIVE=0 switches it off")
_loaded: _Loaded | None = None
_lock = threading.Lock()


def _load() -> _Loaded:
    """Load the library, once a process."""
    global _loaded  # noqa: PLW0603
    if os.environ.get("DELTAFL_NATIVE") == "0":
        return _SWITCHED_OFF
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _try_load()
    return _loaded


def _try_load() -> _Loaded:
    try:
        return _Loaded(_build(), None)
    except _UnavailableError as error:
        return _Loaded(None, str(error))
    except Exception as error:  # whatever it is, plain torch still works
        return _Loaded(None, f"{type(error).__name__}: {error}")


def _build() -> _Library:
    """Return a checked library: from the cache, or compiled, or the reason why not."""
    if os.name != "posix":
        raise _UnavailableError(f"there is no support for {platform.system()} yet")
    source = resources.files(__package__).joinpath(_SOURCE).read_bytes()
    compiler = _compiler()
    folder = _cache_folder()
    problems = []
    for tuning in _TUNINGS:
        command = [*compiler, *_FLAGS, *tuning]
        try:
            if folder is not None:
                name = f"conv_pool_relu-{_key(source, command)}.so"
                return _cached(source, command, folder / name)
            with tempfile.TemporaryDirectory(prefix="deltafl-") as private:
                # A loaded library needs its file no longer.
                path = Path(private, "conv_pool_relu.so")
                _compile(source, command, path)
                return _checked(path)
        except _UnavailableError as problem:
            problems.append(str(problem))
    raise _UnavailableError("; ".join(dict.fromkeys(problems)))


def _cached(source: bytes, command: list[str], path: Path) -> _Library:
    if _ours(path):
        try:
            return _checked(path)
        except _UnavailableError:
            pass  # damaged: make it anew
    _compile(source, command, path)
    return _checked(path)


def _compiler() -> list[str]:
    """Return the command of the system's C compiler."""
    for candidate in (os.environ.get("CC"), "cc", "gcc", "clang"):
        command = shlex.split(candidate or "")
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise _UnavailableError("there is no C compiler: install gcc or clang, or name one in CC")


def _compile(source: bytes, command: list[str], path: Path) -> None:
    """Compile to `path`, which appears complete or not at all."""
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        _run([*command, "-x", "c", "-", "-o", name], source)
        built = os.open(name, os.O_RDWR)
        try:
            os.fchmod(built, 0o700)
            os.fsync(built)
        finally:
            os.close(built)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], stdin: bytes = b"") -> str:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, timeout=_COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _UnavailableError(f"the C compiler does not run: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[0] if lines else f"exit code {done.returncode}"
        raise _UnavailableError(f"the C compiler fails: {why}")
    return done.stdout.decode(errors="replace")


def _key(source: bytes, command: list[str]) -> str:
    """Name a build by all it depends on: a home folder may be shared by different machines."""
    parts = [
        source,
        "\0".join(command).encode(),
        _run([command[0], "--version"]).encode(),
        _processor().encode(),
    ]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Identify the processor, and so what -march=native means."""
    known = "\n".join((platform.system(), platform.machine(), platform.processor()))
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return known
    # Not all lines: the clock frequency is another one each time.
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return "\n".join((known, *(line for line in lines if line.startswith(telling))))


def _cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if it cannot be written or trusted.

    Loading a library is running it. So nobody else may be able to put one there.
    """
    folder = Path(platformdirs.user_cache_dir("deltafl", appauthor=False)).absolute() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None
        trusted = _ours(folder) and all(map(_settled, folder.parents))
    except (OSError, RuntimeError):
        return None
    return folder if trusted else None


def _ours(path: Path) -> bool:
    """Whether `path` exists, belongs to this user, and nobody else can write it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (
        not stat.S_ISLNK(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _settled(parent: Path) -> bool:
    """Whether nobody but this user and root can exchange what is inside `parent`."""
    status = parent.stat()
    if status.st_uid not in {os.geteuid(), 0}:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not others_write or bool(status.st_mode & stat.S_ISVTX)


def _checked(path: Path) -> _Library:
    """Load the library and compare it with torch on small cases."""
    try:
        library = _Library(path)
    except (OSError, AttributeError) as error:
        raise _UnavailableError(f"the compiled library cannot be loaded: {error}") from None
    # The first use may be under no_grad or inference_mode; the check needs gradients of its own.
    with torch.inference_mode(False), torch.enable_grad():
        right = all(_agrees(library, *case) for case in _cases())
    if not right:
        raise _UnavailableError("the compiled library computes something else than torch")
    return library


def _cases() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield inputs, weight, bias and scale; no random numbers, which belong to the caller."""

    def wave(*shape: int) -> Tensor:
        count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="cpu")
        return (count * 1.7 + 0.3 * (count % 7)).sin().view(shape)

    factors = torch.tensor([0.0, 2.0, 1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float32, device="cpu")
    for outputs, kernel in ((7, 5), (3, 2)):
        scale = factors[:outputs].repeat(2, 1)
        yield wave(2, 3, 13, 16), wave(outputs, 3, kernel, kernel), wave(outputs), scale


def _agrees(library: _Library, inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> bool:
    exact = [tensor.double().requires_grad_() for tensor in (inputs, weight, bias)]
    maps = F.conv2d(exact[0], exact[1], exact[2]) * scale.double()[:, :, None, None]
    expected = F.max_pool2d(maps, 2).relu()
    gradient = (expected.detach() - 0.5).cos().float()
    gradients = torch.autograd.grad(expected, exact, gradient.double())
    found, winners = library.forward(inputs, weight, bias, scale, True)
    assert winners is not None
    found_gradients = library.backward(inputs, weight, scale, winners, gradient, True, True)
    return all(
        ours is not None and torch.allclose(ours.double(), right.detach(), rtol=1e-4, atol=1e-4)
        for ours, right in zip((found, *found_gradients), (expected, *gradients), strict=True)
    )
