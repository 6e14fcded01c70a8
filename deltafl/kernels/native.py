"""The compiled kernels: built with the system's C compiler on first use, checked, and loaded.

Nothing here is needed to be right, only to be fast: wherever a compiler is missing or anything
else goes wrong, `available` is false, `reason` says why, and callers use plain torch.
`DELTAFL_NATIVE=0` in the environment switches the kernels off.
"""

from __future__ import annotations

import os
import platform
import tempfile
import threading
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from deltafl.kernels import build
from deltafl.kernels.build import UnavailableError
from deltafl.kernels.library import Library

_SOURCES = ("common.c", "conv_pool_relu.c", "narrow_conv.c", "batch_norm_relu.c")
# No -ffast-math: NaN has to come through. Contraction (one rounding for a multiply-add) is what
# the speed rests on, and is off by default in some compilers.
_FLAGS = (
    *("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-shared", "-Wno-psabi"),
)
_TUNINGS = (("-march=native",), ())


def available() -> bool:
    """Say whether the compiled kernels can be used; the first call may compile them."""
    return _load().library is not None


def reason() -> str | None:
    """Return why they cannot be used, or None if they can."""
    return _load().reason


def narrow_pays() -> bool:
    """Say whether the kernel of narrow convolutions is there, and faster than torch."""
    library = _load().library
    return library is not None and library.narrow_pays


def library() -> Library:
    """Return the compiled kernels, which are `available`."""
    found = _load().library
    assert found is not None
    return found


def readable(*tensors: Tensor) -> bool:
    """Whether the kernels may read these tensors' memory."""
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
    ):
        return False
    for tensor in tensors:
        # Subclasses, and the tensors inside torch.func transforms, have no memory of their own.
        if (
            tensor.dtype is not torch.float32
            or tensor.device.type != "cpu"
            or type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_neg()
        ):
            return False
    return not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, torch.nn.Parameter)


def refuse_second_derivative(operation: str) -> None:
    """Refuse to be part of a graph, in a backward of an operation without a second derivative.

    Not `once_differentiable`, whose error torch.autograd.grad can walk around.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{operation} has no second derivative: leave out create_graph=True, or set "
            "DELTAFL_NATIVE=0 to use plain torch"
        )


@dataclass(frozen=True)
class _Loaded:
    library: Library | None
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
    except UnavailableError as error:
        return _Loaded(None, str(error))
    except Exception as error:  # whatever it is, plain torch still works
        return _Loaded(None, f"{type(error).__name__}: {error}")


def _build() -> Library:
    """Return a checked library: from the cache, or compiled, or the reason why not."""
    if os.name != "posix":
        raise UnavailableError(f"there is no support for {platform.system()} yet")
    files = resources.files(__package__)
    source = b"".join(files.joinpath(name).read_bytes() for name in _SOURCES)
    compiler = build.compiler()
    folder = build.cache_folder()
    problems = []
    for tuning in _TUNINGS:
        command = [*compiler, *_FLAGS, *tuning]
        try:
            if folder is not None:
                name = f"kernels-{build.key(source, command)}.so"
                return _cached(source, command, folder / name)
            with tempfile.TemporaryDirectory(prefix="deltafl-") as private:
                # A loaded library needs its file no longer.
                path = Path(private, "kernels.so")
                build.compile_to(path, source, command)
                return _checked(path)
        except UnavailableError as problem:
            problems.append(str(problem))
    raise UnavailableError("; ".join(dict.fromkeys(problems)))


def _cached(source: bytes, command: list[str], path: Path) -> Library:
    if build.ours(path):
        try:
            return _checked(path)
        except UnavailableError:
            pass  # damaged: make it anew
    build.compile_to(path, source, command)
    return _checked(path)


def _checked(path: Path) -> Library:
    """Load the library and compare it with torch on small cases."""
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"the compiled library cannot be loaded: {error}") from None
    # The first use may be under no_grad or inference_mode; the check needs gradients of its own.
    with torch.inference_mode(False), torch.enable_grad():
        right = _agrees_pool(library) and _agrees_narrow(library) and _agrees_norm(library)
    if not right:
        raise UnavailableError("the compiled library computes something else than torch")
    return library


def _wave(*shape: int) -> Tensor:
    """Return numbers to check with, and no random ones, which belong to the caller."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="cpu")
    return (count * 1.7 + 0.3 * (count % 7)).sin().view(shape)


def _agrees_pool(library: Library) -> bool:
    """Whether pooled convolutions are those of torch."""
    factors = torch.tensor([0.0, 2.0, 1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float32, device="cpu")
    for outputs, kernel in ((7, 5), (3, 2)):
        inputs, weight = _wave(2, 3, 13, 16), _wave(outputs, 3, kernel, kernel)
        bias, scale = _wave(outputs), factors[:outputs].repeat(2, 1)
        exact = _exact(inputs, weight, bias)
        maps = F.conv2d(exact[0], exact[1], exact[2]) * scale.double()[:, :, None, None]
        expected = F.max_pool2d(maps, 2).relu()
        gradient = _slope(expected)
        found, winners = library.pool_forward(inputs, weight, bias, scale, record=True)
        assert winners is not None
        others = library.pool_backward(
            inputs, weight, scale, winners, gradient, to_inputs=True, to_filters=True
        )
        if not _same((found, *others), expected, exact, gradient):
            return False
    return True


def _agrees_narrow(library: Library) -> bool:
    """Whether narrow convolutions are those of torch."""
    for channels, outputs, kernel in ((3, 15, 3), (5, 2, 1)):
        inputs, weight = _wave(2, channels, 6, 9), _wave(outputs, channels, kernel, kernel)
        exact = _exact(inputs, weight)
        expected = F.conv2d(exact[0], exact[1], padding=kernel // 2)
        gradient = _slope(expected)
        found = library.narrow_forward(inputs, weight)
        others = library.narrow_backward(inputs, weight, gradient, to_inputs=True, to_weight=True)
        if not _same((found, *others), expected, exact, gradient):
            return False
    return True


def _agrees_norm(library: Library) -> bool:
    """Whether normalised maps are those of torch."""
    inputs, shortcut = _wave(2, 3, 5, 7), _wave(2, 3, 7, 5).mT.contiguous()
    norm = nn.BatchNorm2d(3, device="cpu", dtype=torch.float32)
    norm.weight.data, norm.bias.data = 1 + _wave(3), _wave(3)
    exact = _exact(inputs, norm.weight.detach(), norm.bias.detach(), shortcut)
    variance, mean = torch.var_mean(exact[0].detach(), (0, 2, 3))
    normed = F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True, eps=norm.eps)
    expected = (normed + exact[3]).relu()
    gradient = _slope(expected)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.fill_(1.0)
    found = library.norm_forward(inputs, norm, shortcut, relu=True)
    maps, mean_found, scale = found
    others = library.norm_backward(
        inputs, norm.weight, mean_found, scale, maps, gradient, to_shortcut=True
    )
    return (
        _same((maps, *others), expected, exact, gradient)
        and torch.allclose(norm.running_mean.double(), 0.9 + 0.1 * mean, atol=1e-6)
        and torch.allclose(norm.running_var.double(), 0.9 + 0.1 * variance, atol=1e-6)
    )


def _exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def _slope(outputs: Tensor) -> Tensor:
    """Return some gradient of the outputs."""
    return (outputs.detach() - 0.5).cos().float()


def _same(
    found: tuple[Tensor | None, ...], outputs: Tensor, leaves: list[Tensor], gradient: Tensor
) -> bool:
    """Whether ours are the outputs, and the gradients of the leaves."""
    gradients = torch.autograd.grad(outputs, leaves, gradient.double())
    return all(
        ours is not None and torch.allclose(ours.double(), right.detach(), rtol=1e-4, atol=1e-4)
        for ours, right in zip(found, (outputs, *gradients), strict=True)
    )
