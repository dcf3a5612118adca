"""Read TOML recipes and command-line flags into tables of settings; flags take precedence.

A recipe is a tree of tables. `[model]` may start from a preset and change keys of it:

    [model]
    preset = "parcae-10m"
    context_length = 256

    [model.loop]
    mean_loops = 4

and `--model.loop.mean_loops 6` on a command line overrides it
(`parcae.training.settings.with_flags`).
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from parcae.files import FileError, check_nesting, check_regular
from parcae.schema import ConfigError, Settings, shorten, suggest, type_hints, without_none

T = TypeVar("T")
S = TypeVar("S", bound=Settings)
Tree = dict[str, Any]
MAX_RECIPE_BYTES = 1 << 20


def build(table: type[S], values: Mapping[str, Any]) -> S:
    """A table of settings from plain values, such as a recipe's; an unknown key is an error.

    Values are checked by the table itself (see `parcae.schema`); here they only get its form: a
    mapping becomes a table, a list a tuple, and "none" no value.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{table.table}: expected a table of settings, got {shorten(values)}.")
    hints = type_hints(table)
    names = [field.name for field in dataclasses.fields(table)]  # type: ignore[arg-type]
    arguments = {}
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{table.key(name[:99])}: no such key. {suggest(name, names)}")
        arguments[name] = _in_form(hints[name], value)
    return table(**arguments)


def _in_form(hint: Any, value: Any) -> Any:
    inner = without_none(hint)
    if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, Settings):
        return build(inner, value)
    if isinstance(value, list) and typing.get_origin(inner) is tuple:
        return tuple(value)
    if value == "none" and inner is not hint:
        return None
    return value


def to_dict(config: Any) -> Tree:
    """The tree that `build` reads back; keys without a value are omitted, as in TOML."""
    tree: Tree = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value is not None:
            value = to_dict(value) if dataclasses.is_dataclass(value) else value
            tree[f.name] = list(value) if isinstance(value, tuple) else value
    return tree


def read_toml(path: str | Path) -> Tree:
    path = Path(path)
    try:
        check_regular(path)
        if (size := path.stat().st_size) > MAX_RECIPE_BYTES:
            raise ConfigError(
                f"{path}: {size:,} bytes are too many for a recipe, at most {MAX_RECIPE_BYTES:,}."
            )
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        check_nesting(tree)
        return tree
    except FileError as error:
        raise ConfigError(str(error)) from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe. Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, not a recipe. Name a .toml file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}). Is it a TOML file?") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also of an integer of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def from_file(path: str | Path, flags: Tree, make: Callable[[Tree, Tree], T]) -> T:
    """Call `make` with the tree of a recipe and the flags.

    An error that the recipe causes without the flags names its file; any other is the flags'.
    """
    tree = read_toml(path)
    try:
        return make(tree, flags)
    except ConfigError as error:
        if str(error) == _error_alone(tree, make):
            raise ConfigError(f"{path}: {error}") from None
        raise


def _error_alone(tree: Tree, make: Callable[[Tree, Tree], Any]) -> str | None:
    try:
        make(tree, {})
    except ConfigError as error:
        return str(error)
    return None


def recipe_path(source: str | Path) -> Path:
    """The file of a recipe that is given by its path, or by its name if it is part of parcae."""
    path = Path(source)
    is_name = len(path.parts) == 1 and path.suffix != ".toml" and not path.exists()
    return find_recipe(str(source)) if is_name else path


def find_recipe(name: str) -> Path:
    """The path of a recipe that is part of parcae: in the installed package or the source tree."""
    here = Path(__file__).parent
    folders = (here / "recipes", here.parents[1] / "recipes")
    for folder in folders:
        if (folder / f"{name}.toml").exists():
            return folder / f"{name}.toml"
    file = Path(f"{name}.toml")
    known = [path.stem for folder in folders for path in folder.glob("*.toml")]
    hint = suggest(name, [*known, str(file)] if file.exists() else known)
    raise ConfigError(f"{name}: parcae has no recipe of this name. {hint}")


def write_toml(tree: Mapping[str, Any]) -> str:
    return tomli_w.dumps(tree)


def parse_flags(arguments: Sequence[str]) -> Tree:
    """`--model.loop.mean_loops 4` or `--model.loop.mean_loops=4` as a tree; dashes may be used."""
    tree: Tree = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or "." not in flag:
            raise ConfigError(f"{flag}: not a setting. Write --table.key VALUE.")
        name, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag}: no value follows. Write {flag} VALUE.")
            text = rest.pop(0)
        *tables, leaf = name.replace("-", "_").split(".")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{flag}: {table} is a value in an earlier flag. Remove one.")
        node[leaf] = _parse_value(text)
    return tree


def check_tables(tree: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` for a table that is not known, whose keys would be ignored."""
    for name, table in tree.items():
        if name not in known:
            raise ConfigError(f"{name[:99]}: no such table. {suggest(name, known)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name}: expected a table of settings, got {shorten(table)}.")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` on top of `base`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _parse_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        check_nesting(value)
        return value
    except tomllib.TOMLDecodeError:
        if "\n" in text:
            raise ConfigError(f"{text!r}: a value must be on one line.") from None
        return text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shorten(text)}: not a valid value ({error}).") from None


def flatten(tree: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested tables as one table with keys such as `model.loop.mean_loops`; empty ones vanish."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{name}{separator}", separator) if nested else {name: value}
    return flat
