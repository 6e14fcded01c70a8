"""Named tensors with a little JSON in one file: safetensors, written atomically, checked on read.

Nothing is ever unpickled. A file that was cut short or changed is refused with one line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from deltafl.errors import UserError


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, types, shapes and bits, whatever the order of the mapping."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha.update(value.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    """Write tensors and JSON so that the file is either the old one or the whole new one."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(about or {})
    # One entry, because safetensors writes several in any order: equal content, equal bytes.
    metadata = {"deltafl": f"{_seal(text, plain)} {text}"}
    write_atomically(path, safetensors.torch.save(plain, metadata))


def _seal(about: str, tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{digest(tensors)} {about}".encode()).hexdigest()


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read back what `save` wrote, or say that the file is damaged."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for ever
            raise ValueError("not a file")
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        seal, _, text = metadata["deltafl"].partition(" ")
        about = json.loads(text)
        intact = isinstance(about, dict) and seal == _seal(text, tensors)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: delete its folder and start the run again") from None
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: delete it (or its folder) and start the run again")
    return tensors, about


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, then rename: a crash leaves the old file or the new one.

    The name beside it is fixed, so that a crash leaves at most one such file, which the next
    write replaces.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb", opener=_open_itself) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _open_itself(path: str, flags: int) -> int:
    """Open a file and not what a link of that name, which somebody laid there, leads to."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
