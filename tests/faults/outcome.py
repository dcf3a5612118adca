"""What a command left: the files of two folders compared, but for times; halves and leftovers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TIMES = {"seconds", "training_seconds", "tokens_per_second", "peak_fraction", "core_minutes"}
MINUTES = re.compile(rb"[\d.]+ core-(minutes|hours)")
CHECKSUMS = {"state.json": ("sha256", "files"), "result.json": ("seal",)}
"""Fields that follow from the times, or from the order of metadata in shards."""
LEFT_OUT = ("*.log", "*/cpu.json")
"""Records of processes and of time."""


def contents(folder: Path) -> dict[str, str]:
    """By name in the folder: a digest of each file without times; hidden files are left out."""
    return {
        name: digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(fnmatch(name := path.relative_to(folder).as_posix(), x) for x in LEFT_OUT)
        and not _is_hidden(name)
    }


def digest(path: Path) -> str:
    data = path.read_bytes()
    try:
        if path.suffix == ".json":
            data = _plain(json.loads(data), CHECKSUMS.get(path.name, ()))
        elif path.suffix == ".jsonl":
            data = b"\n".join(_plain(json.loads(line)) for line in data.splitlines())
        elif path.suffix == ".safetensors":
            size = 8 + int.from_bytes(data[:8], "little")
            data = _plain(json.loads(data[8:size])) + data[size:]  # the order of metadata is random
        elif path.suffix == ".md":
            data = MINUTES.sub(b"", data)
    except ValueError:
        data += b"not JSON"
    return hashlib.sha256(data).hexdigest()


def _plain(tree: Any, left_out: Iterable[str] = ()) -> bytes:
    if isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key not in left_out}
    return json.dumps(_timeless(tree), sort_keys=True).encode()


def _timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _timeless(value) for key, value in tree.items() if key not in TIMES}
    return [_timeless(value) for value in tree] if isinstance(tree, list) else tree


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What is wrong with files, by name."""
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: extra" for name in found if name not in expected]
    both = (name for name in found if name in expected)
    return problems + [f"{name}: other" for name in both if found[name] != expected[name]]


def leftovers(folder: Path) -> list[str]:
    """Hidden files and folders, but for locks."""
    hidden = (path for path in folder.rglob(".*") if path.name != ".lock")
    return [f"{path.relative_to(folder)}: left over" for path in hidden]


def halves(folder: Path, expected: dict[str, str], unfinished: Iterable[str]) -> list[str]:
    """Files that have their final name, but not their final content."""
    complete, problems = set(), []
    for state in folder.rglob("step-*/state.json"):
        files = json.loads(state.read_bytes())["files"]
        wrong = [name for name, sum in files.items() if _sha256(state.parent / name) != sum]
        problems += [f"{state.parent / name}: checksum" for name in wrong]
        complete |= {path.relative_to(folder).as_posix() for path in state.parent.rglob("*")}
    for name, found in contents(folder).items():
        whole = name in complete or found == expected.get(name)
        if not whole and not any(fnmatch(name, pattern) for pattern in unfinished):
            problems.append(f"{name}: half")
    return problems


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
