"""Evaluate a closure as if it had never happened.

Δ-SGD with the gradient difference on one batch (Algorithm 1, line 9) evaluates the loss twice a
step. Both evaluations must see the same randomness, or the difference measures the dropout mask
and not the curvature; and the extra one must leave no trace: not in BatchNorm's statistics, not
in the gradients, not in the random state.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Rehearsal:
    """Runs evaluations whose side effects are undone, for the parameters of one optimizer.

    Undone: gradients, buffers of every module that is called and gradients of its parameters,
    random state of torch (on the CPU and the devices of the parameters), numpy and Python. Not
    undone: anything else the closure does, so it should only evaluate, on a batch drawn outside.
    Modules are seen when they are called, also compiled ones (``torch.compile(module)``,
    ``module.compile()``); inside a compiled *function* they are not seen.
    """

    def __init__(self) -> None:
        # torch.compile(module) warns about global hooks. Muting a warning makes Python forget
        # which ones it has shown, so it is done only until the first run shows there is no need.
        self._compiled = True

    @contextmanager
    def __call__(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Undo what the body does, whether it ends well or raises."""
        with ExitStack() as stack:
            if self._compiled:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=".*when there are global hooks on")
            stack.enter_context(_same_random_state(params))
            trace = _Trace()
            stack.callback(trace.undo)
            trace.keep_gradients(params)
            watch = _Watch(trace)
            stack.callback(watch.stop)
            watch.start()
            yield
        self._compiled = watch.compiled


class _Trace:
    """What modules and parameters held before the rehearsal touched them."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []
        self._modules: set[nn.Module] = set()

    def keep_gradients(self, params: Sequence[Tensor]) -> None:
        for p in params:
            if p not in self._gradients:
                self._gradients[p] = p.grad
                # A copy, since a closure may add to the gradient or zero it in place.
                p.grad = None if p.grad is None else p.grad.clone()

    def keep_module(self, module: nn.Module) -> None:
        for part in module.modules():
            if part not in self._modules:
                self._modules.add(part)
                for name, buffer in part._buffers.items():
                    copy = None if buffer is None else buffer.detach().clone()
                    self._buffers.append((part, name, buffer, copy))
                self.keep_gradients(list(part.parameters(recurse=False)))

    def undo(self) -> None:
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer
            for p, gradient in self._gradients.items():
                p.grad = gradient


class _Watch:
    """Shows the trace every module this thread calls, outermost ones only.

    The hook is taken away while a module it has seen runs: its inner modules are known by then,
    and a compiler that traces them must not find a hook there.
    """

    def __init__(self, trace: _Trace) -> None:
        self.compiled = False
        self._trace = trace
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        self._handles = [register_module_forward_pre_hook(_untraced(self._enter))]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.compiled |= "_orig_mod" in module._modules
        self.stop()
        self._trace.keep_module(module)
        self._handles = [module.register_forward_hook(_untraced(self._leave))]

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.stop()
        self.start()


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep the compiler out of a hook, which ``module.compile()`` makes it meet.

    Only once there is a compiler: it takes longer to import than many a client trains.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disable: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable
    return disable(hook)


@contextmanager
def _same_random_state(params: Sequence[Tensor]) -> Iterator[None]:
    """Put every generator back where it was."""
    devices = {p.device for p in params if p.device.type not in ("cpu", "meta")}
    cpu = torch.get_rng_state()
    states = [(device, _device_state(device)) for device in devices]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        for device, state in states:
            torch.get_device_module(device).set_rng_state(state, *_index(device))
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _device_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return what the random functions of a device are given: MPS has one device, no index."""
    return () if device.type == "mps" else (device,)
