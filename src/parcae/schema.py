"""Tables of settings: frozen dataclasses whose fields carry a range and a line of help.

    @dataclass(frozen=True, kw_only=True)
    class LoopConfig(Settings, table="model.loop"):
        mean_loops: float = setting(8, "mean number of loops", at_least=1)

A table is checked once, when it is constructed: from Python, from a recipe or from a command line,
with the same messages; rules between several settings go into the table's `check`. Arguments of
functions are checked with `require` and `require_range`, which have the same messages.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

LARGEST_INTEGER = 1 << 1023
"""Larger ones have no float."""


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key and says how to fix it."""


class Names(Protocol):
    """The names that a setting may take where they are not fixed; see `parcae.registry`."""

    def check(self, name: object, key: str) -> None: ...


def require(condition: bool, key: str, problem: str, remedy: str) -> None:
    """Raise `ConfigError` with "key: problem. remedy" unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: {problem}. {remedy}")


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    names: Names | None = None,
) -> Any:
    """A field of a table: its default (a class for a table of its own), one line of help, the range
    of a number or of each number in a list, and the registry that a name must be in."""
    rules = {"help": help, "names": names}
    rules["range"] = Range(at_least=at_least, above=above, at_most=at_most, below=below)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


class Range(NamedTuple):
    """Limits of a number; it is finite in any case."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int | float)
            and (abs(value) < LARGEST_INTEGER if isinstance(value, int) else math.isfinite(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = [
            f"{name.replace('_', ' ')} {limit:,}"
            for name, limit in self._asdict().items()
            if limit is not None
        ]
        return " and ".join(limits) or "a finite number"


def require_range(key: str, value: float, remedy: str = "", **limits: float | None) -> None:
    """Raise `ConfigError` unless the number is finite and in the range; `limits` are `Range`'s."""
    allowed = Range(**limits)
    number = value if isinstance(value, int | float) else float(value)  # numpy's are neither
    if number not in allowed:
        problem = f"{key}: {shorten(value)} is out of range. It must be {allowed}."
        raise ConfigError(f"{problem} {remedy}".strip())


class Settings:
    """Base class of a table of settings: valid once it exists."""

    table: ClassVar[str] = ""
    """Where it stands in a recipe, such as "model.loop"."""

    def __init_subclass__(cls, table: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.table = table

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, key = getattr(self, field.name), self.key(field.name)
            _check(value, hints[field.name], key, field.metadata)
        self.check()

    def check(self) -> None:
        """Rules that need more than one setting."""

    @classmethod
    def key(cls, name: str) -> str:
        """The full name of a setting, such as "model.loop.mean_loops"."""
        return f"{cls.table}.{name}" if cls.table else name

    @classmethod
    def require(cls, condition: bool, name: str, problem: str, remedy: str) -> None:
        """Raise `ConfigError` about the setting `name` of this table unless the condition holds."""
        require(condition, cls.key(name), problem, remedy)


class Described(NamedTuple):
    """One setting, for a list of them."""

    table: type[Settings]
    name: str
    default: Any
    help: str


def describe(table: type[Settings]) -> Iterator[Described]:
    """Every setting of a table in order, then those of the tables within it."""
    hints, inner = type_hints(table), []
    for field in dataclasses.fields(table):  # type: ignore[arg-type]
        hint = without_none(hints[field.name])
        if isinstance(hint, type) and issubclass(hint, Settings):
            inner.append(hint)
        else:
            yield Described(table, field.name, field.default, field.metadata.get("help", ""))
    for nested in inner:
        yield from describe(nested)


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def without_none(hint: Any) -> Any:
    """`T` of `T | None`; any other type as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(option for option in typing.get_args(hint) if option is not type(None))
    return hint


def suggest(name: str, known: Sequence[str]) -> str:
    """How to fix a mistyped name: the nearest one, or all of them."""
    near = difflib.get_close_matches(name[:99], known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."


def shorten(value: object, characters: int = 200) -> str:
    """`repr` for messages: not longer than this, and of any value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= characters else f"{text[:characters]}..."


_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _check(value: Any, hint: Any, key: str, rules: Any) -> None:
    """One value against its type, its names and its range."""
    plain = without_none(hint)
    if value is None and plain is not hint:
        return
    if typing.get_origin(plain) is tuple:
        if not isinstance(value, tuple):
            example = f"[{json.dumps(value, default=str)}]" if len(shorten(value)) < 99 else "[...]"
            raise ConfigError(
                f"{key}: expected a list, got {shorten(value)}. Write {example}; "
                f"on a command line in quotes: --{key} '{example}'."
            )
        for item in value:
            _check(item, typing.get_args(plain)[0], key, rules)
        return
    if typing.get_origin(plain) is Literal:
        options = typing.get_args(plain)
        if value not in options:
            near = difflib.get_close_matches(shorten(value).strip("'"), options, n=1, cutoff=0.5)
            guess = f"Did you mean {near[0]}? " if near else ""
            known = ", ".join(map(str, options))
            raise ConfigError(f"{key}: {shorten(value)} is not an option. {guess}Known: {known}.")
        return
    if dataclasses.is_dataclass(plain):
        if not isinstance(value, plain):  # type: ignore[arg-type]
            raise ConfigError(f"{key}: expected a table of settings, got {shorten(value)}.")
        return
    accepted = (int, float) if plain is float else plain
    if not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool):
        expected = _EXPECTED.get(plain, getattr(plain, "__name__", plain))
        raise ConfigError(f"{key}: expected {expected}, got {shorten(value)}.")
    if plain in (int, float):
        limits = rules.get("range", Range())
        if value not in limits or (isinstance(value, int) and plain is int and abs(value) >> 63):
            raise ConfigError(f"{key}: {shorten(value)} is out of range. It must be {limits}.")
    if rules.get("names") is not None:
        rules["names"].check(value, key)
