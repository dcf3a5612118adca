"""Atomic writes, checksums, and locks of folders."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from parcae.machine import flush as flush
from parcae.machine import process_exists

CHUNK_BYTES = 1 << 20
DEEPEST_NESTING = 64
"""Levels of lists and objects in JSON and TOML files; what parcae writes has less than ten."""
LARGEST_JSON = 64 << 20
"""Bytes of a JSON file, which takes up to 25 times as much memory."""
LARGEST_LINE, LARGEST_LINES = 16 << 20, 4 << 30
"""Bytes of a line, and of all lines, of a JSON Lines file that parcae has written."""
OLD_SECONDS = 24 * 3600
"""A temporary file of another machine is taken for abandoned after this time."""


class FileError(OSError):
    """A file that cannot be used. The message names it and says what to do."""


class WriteError(FileError):
    """A file could not be written: a full disk, a missing permission."""


class InUseError(FileError):
    """Another process has locked the folder."""


@contextlib.contextmanager
def writing(path: str | Path, remedy: str = "") -> Iterator[None]:
    """Turn an `OSError` while writing into a `WriteError` that names the file."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        problem = f"{path}: could not be written ({error.strerror or error})."
        raise WriteError(f"{problem} {remedy}".strip()) from error


def write_all(stream: IO[bytes], data: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered stream.

    Unbuffered on purpose: when a full disk refuses a write, a buffered stream tries again when it
    is closed, and the second error would hide the first.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]


def no_link(path: str, flags: int) -> int:
    """The opener (of `open`) of a file that is changed in place: a link, hard or symbolic, is
    refused, since the file may belong to another folder, and a pipe is not waited for."""
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | extra, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileError(f"{path}: a link or a pipe, not a file. Remove it.") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise FileError(f"{path}: not a file of its own, but a hard link or a pipe. Remove it.")
    return descriptor


def check_links(
    folder: Path, names: Iterable[str] | None = None, follow_links: bool = False
) -> None:
    """Raise FileError where a symbolic link leads out of a folder that is to be written to.

    `names`: the files and folders in it that are written, replaced or deleted; all by default.
    Unless `follow_links`, no link may be among them, or below them, whose target is outside.
    """
    if follow_links or not folder.is_dir():
        return
    inside = folder.resolve()
    paths = folder.iterdir() if names is None else (folder / name for name in names)
    for link in (link for path in paths for link in _links(path)):
        target = os.path.realpath(link)
        if not Path(target).is_relative_to(inside):
            raise FileError(
                f"{link}: a link that leads out of {folder}, to {target}. Remove it, or write "
                "there with `follow_links`."
            )


def _links(path: Path) -> Iterator[Path]:
    """All symbolic links that are at a path or below it."""
    if path.is_symlink():
        yield path
        return
    for parent, folders, others in os.walk(path):
        if "wandb" in Path(parent).relative_to(path.parent).parts:
            others = []  # W&B links to logs in its cache; files are not written through links
        yield from filter(Path.is_symlink, (Path(parent, name) for name in (*folders, *others)))


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, not what a link leads to, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def reading(path: str | Path, pipe: bool = False) -> Iterator[None]:
    """Turn an `OSError` while reading into a `FileError` that names the file.

    Unless `pipe`, a pipe or a device is refused, since its end might never come.
    """
    try:
        if not pipe:
            check_regular(Path(path))
        yield
    except FileError:
        raise
    except FileNotFoundError:
        raise FileError(f"{path}: no such file.") from None
    except OSError as error:
        raise FileError(
            f"{path}: cannot be read ({error.strerror or error}). Check its permissions."
        ) from None


@contextlib.contextmanager
def interpreting(
    path: str | Path, remedy: str = "", passed_on: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn the errors of values that are missing or of a wrong type into a `FileError`.

    Only for code that takes a file's values apart: elsewhere it would hide mistakes. Errors of the
    types `passed_on` say already what is wrong.
    """
    try:
        yield
    except passed_on:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else f"{error}"
        reason = " ".join(reason.split())
        reason = reason if len(reason) < 300 else f"{reason[:300]}..."
        raise FileError(
            f"{path}: a value is missing or wrong ({reason}). {remedy}".strip()
        ) from error


def number(value: Any) -> Any:
    """A value of a file that must be a number; TypeError or OverflowError if it is not."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r:.100} is not a number")
    float(value)  # some integers are too large
    return value


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    The temporary file exists and is empty; no other process knew its name before. A killed process
    leaves the old file, or none; never half of one. Its temporary file is removed when the next
    process writes into the folder.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent.absolute())
            temporary.touch(exist_ok=False)  # O_EXCL, which follows no link either
            yield temporary
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        remove(temporary)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path`; on success it is flushed to disk and renamed to `path`.

    There must be nothing at `path`. What a killed process leaves is removed as for `atomic_path`.
    """
    path = Path(path)
    temporary = temporary_path(path)
    check_new(path)
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent.absolute())
            temporary.mkdir()
            yield temporary
            for file in (*temporary.rglob("*"), temporary):
                flush(file)
            check_new(path)  # another process may have been faster
            temporary.rename(path)
            flush(path.parent)
    finally:
        remove(temporary)


def check_new(folder: Path) -> None:
    """Raise FileError if there is something at the path of a new folder."""
    if folder.exists():
        raise FileError(f"{folder}: exists. Choose another folder, or remove it.")


def temporary_path(path: Path) -> Path:
    """A path beside `path` that nobody can guess, with a name that `_remove_abandoned` knows."""
    owner = f"{platform.node()}-{os.getpid()}"
    return path.with_name(f".{path.name}.{owner}.{secrets.token_hex(8)}.tmp")


@functools.cache  # once for each folder
def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files and folders of processes that no longer exist."""
    for path in folder.glob(".*.tmp"):
        match = re.fullmatch(r"\..+-(\d{1,10})\.[0-9a-f]{16}\.tmp", path.name, re.DOTALL)
        if match is None or process_exists(int(match[1])):
            continue
        with contextlib.suppress(OSError):  # another process was faster
            of_this_machine = f".{platform.node()}-{match[1]}." in path.name
            if of_this_machine or time.time() - path.lstat().st_mtime > OLD_SECONDS:
                remove(path)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8; halves of surrogate pairs, which JSON and file names may have, as \\ud800."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, to_json(value))


def to_json(value: Any) -> str:
    """Strict JSON: a NaN is an error, since most readers do not accept one."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def nan_to_none(value: Any) -> Any:
    """The same tree of JSON values with None for NaN and infinities, which JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): nan_to_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(inner) for inner in value]
    return value


def read_text(path: str | Path, largest: int = LARGEST_JSON, errors: str = "strict") -> str:
    """The text of a regular file; FileError if it has more than `largest` bytes."""
    with (
        open_file(path, largest) as stream,
        io.TextIOWrapper(stream, encoding="utf-8", errors=errors) as text,
    ):
        return text.read(largest)


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a JSON Lines file; FileError for one that is longer than any that is written."""
    with open_file(path, LARGEST_LINES) as stream:
        while line := stream.readline(LARGEST_LINE):
            if len(line) == LARGEST_LINE:
                raise FileError(f"{path}: a line of more than {LARGEST_LINE >> 20} MiB.")
            yield line


@contextlib.contextmanager
def open_file(path: str | Path, largest: int) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; FileError if it has more than `largest` bytes."""
    with reading(path), Path(path).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise FileError(f"{path}: {size:,} bytes; at most {largest:,} are read.")
        yield stream


def read_json(path: str | Path, largest: int = LARGEST_JSON) -> Any:
    """The content of a JSON file of finite numbers and moderate nesting."""
    path = Path(path)
    try:
        value = json.loads(read_text(path, largest), parse_constant=_refuse_constant)
        check_nesting(value)
        return value
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON ({error}). Is it truncated?") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def check_regular(path: Path) -> None:
    """Raise FileError for a pipe or a device, whose end might never come."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(f"{path}: a pipe or a device. Give a file.")


def check_nesting(value: Any) -> None:
    """Raise ValueError where lists and tables are nested too deeply for recursive functions."""
    level = [[value]]
    for _ in range(DEEPEST_NESTING + 1):
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [x for items in children for x in items if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST_NESTING} levels deep")


def path_inside(folder: Path, name: object) -> Path:
    """The path of a file that a manifest names; FileError where it is not within the folder.

    A symbolic link may lead to another file of the folder, not out of it.
    """
    if isinstance(name, str) and name and "\0" not in name and not Path(name).is_absolute():
        path = folder / name
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, a loop of links
            path.exists()  # an error if its name is too long
            if path.resolve().is_relative_to(folder.resolve()) and ".." not in Path(name).parts:
                return path
    raise FileError(f"{folder}: {name!r:.200} is named as a file of it, but is not in it.")


def write_sealed(path: str | Path, value: dict[str, Any]) -> None:
    """A JSON object with a checksum of its own content in the field `seal`."""
    write_json(path, {**value, "seal": _seal(value)})


def read_sealed(
    path: str | Path, remedy: str, required: bool = True, largest: int = LARGEST_JSON
) -> dict[str, Any]:
    """What `write_sealed` wrote; an error if it was changed, so that keys need no further check.

    Unless `required`, a file without a seal, as earlier versions wrote it, is accepted.
    """
    value = read_json(path, largest)
    if not required and isinstance(value, dict) and "seal" not in value:
        return value
    seal = value.pop("seal", None) if isinstance(value, dict) else None
    if seal is None or not _is_sealed(value, seal):
        raise FileError(f"{path}: changed since it was written, or not by parcae. {remedy}")
    return value


def _is_sealed(value: dict[str, Any], seal: object) -> bool:
    try:
        return _seal(value) == seal
    except ValueError:  # a number such as 1e999, which is read as infinity
        return False


def _seal(value: dict[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with reading(path), Path(path).open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock `folder` against other processes; the system frees the lock of a killed one.

    The file `.lock` holds the process id of the owner and stays when the lock is released.
    """
    folder = Path(folder)
    remedy = "Choose another folder."
    path = folder / ".lock"
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    with writing(folder, remedy):
        if folder.is_file():
            raise FileError(f"{folder}: a file, not a folder. {remedy}")
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.close(no_link(str(path), os.O_RDWR))  # `acquire` empties what it leads to
        try:
            locked = lock.acquire()
        except Timeout:
            raise InUseError(
                f"{folder}: another process{_owner(path)} is using it. "
                "Wait for it, or use another folder."
            ) from None
    with locked:
        with writing(folder, remedy), open(path, "r+b", 0, opener=no_link) as stream:
            stream.truncate(0)
            write_all(stream, str(os.getpid()).encode())
        yield


def is_in_use(folder: str | Path) -> bool:
    """Whether another process holds the folder's lock now."""
    try:
        with lock_folder(folder):
            return False
    except InUseError:
        return True


def _owner(lock: Path) -> str:
    """The owner's process id in brackets, where it can be read."""
    try:
        owner = read_text(lock, largest=100, errors="replace").strip()
    except OSError:
        return ""
    return f" ({owner})" if owner else ""
