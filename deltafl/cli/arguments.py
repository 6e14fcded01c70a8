"""The command line from the typed configuration: every field of a model is an option.

`--federation.alpha 0.1` sets a field of a section, `--seeds 0 1 2` a list, `--client.options
momentum=0.9` a mapping, and a flag alone a boolean. The model then validates the values, so the
command line, TOML and Python share one set of rules and one form of error.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deltafl.errors import UserError


def options(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name of every option of a model with its field, sections last."""
    sections = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
        elif name != "data_sha256":  # set by Python, where data can be given
            yield f"{prefix}{field.alias or name}".replace("_", "-"), field
    for name, section in sections:
        yield from options(section, f"{prefix}{name}.")


def parse(model: type[BaseModel], words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into the positional ones and {dotted field: value}, not yet validated."""
    known = dict(options(model))
    positional: list[str] = []
    values: dict[str, Any] = {}
    name = None
    collected: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name not in known:
                raise _unknown_option(name, known)
            if name in collected:
                raise UserError(f"--{name} is given twice: give it once")
            collected[name] = [value] if equals else []
        elif name is None:
            positional.append(word)
        else:
            collected[name].append(word)
    for option, given in collected.items():
        values[option.replace("-", "_")] = _value(option, known[option], given)
    return positional, values


def _unknown_option(name: str, known: dict[str, FieldInfo]) -> UserError:
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean --{near[0]}?" if near else "see --help"
    return UserError(f"unknown option --{name}: {hint}")


def _value(option: str, field: FieldInfo, words: list[str]) -> Any:
    """Turn the words after an option into a value that the model can validate."""
    kinds = [get_origin(member) or member for member in members(field.annotation)]
    if dict in kinds:
        return dict(_pair(option, word) for word in words)
    if bool in kinds and not words:
        return True
    if not words:
        raise UserError(f"--{option} needs a value")
    if list in kinds or (tuple in kinds and len(words) > 1):
        return words
    if len(words) > 1:
        raise UserError(f"--{option} takes one value, not {len(words)} ({' '.join(words)})")
    choices = [choice for member in members(field.annotation) for choice in _choices(member)]
    if words[0].lower() == "none" and type(None) in kinds and "none" not in choices:
        return None
    return words[0]


def _choices(member: Any) -> tuple[Any, ...]:
    return get_args(member) if get_origin(member) is Literal else ()


def _pair(option: str, word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UserError(f"--{option} takes name=value, not {word!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def members(annotation: Any) -> list[Any]:
    """Return the types a field accepts, without their annotations."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    if hasattr(annotation, "__metadata__"):
        return members(get_args(annotation)[0])
    return [annotation]


def kind(field: FieldInfo) -> str:
    """Say in a word or two what values an option takes."""
    words = []
    for member in members(field.annotation):
        origin = get_origin(member)
        if origin is Literal:
            words += [str(choice) for choice in get_args(member)]
        elif origin is tuple:
            words.append("LOW HIGH")
        elif origin is list:
            words.append(f"{_name(get_args(member)[0])} ...")
        elif origin is dict:
            words.append("NAME=VALUE ...")
        elif member is not type(None):
            words.append(_name(member))
    return "|".join(words)


def _name(member: Any) -> str:
    inner = members(member)[0]
    names = {int: "INT", float: "NUMBER", str: "NAME", bool: "true|false"}
    return names.get(inner, getattr(inner, "__name__", "VALUE").upper())
