"""Atomic writes, checksums, and locks of folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from parcae.machine import flush as flush

CHUNK_BYTES = 1 << 20


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


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an `OSError` while reading into a `FileError` that names the file."""
    try:
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
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    A killed process leaves the old file, or none; never half of one.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, to_json(value))


def to_json(value: Any) -> str:
    """Strict JSON: a NaN is an error, since most readers do not accept one."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: str | Path) -> Any:
    path = Path(path)
    try:
        with reading(path):
            return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON ({error}). Is it truncated?") from None


def write_sealed(path: str | Path, value: dict[str, Any]) -> None:
    """A JSON object with a checksum of its own content in the field `seal`."""
    write_json(path, {**value, "seal": _seal(value)})


def read_sealed(path: str | Path, remedy: str) -> dict[str, Any]:
    """What `write_sealed` wrote; an error if it was changed, so that keys need no further check."""
    value = read_json(path)
    seal = value.pop("seal", None) if isinstance(value, dict) else None
    if seal is None or seal != _seal(value):
        raise FileError(f"{path}: changed since it was written, or not by parcae. {remedy}")
    return value


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
def exclusive(folder: str | Path) -> Iterator[None]:
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
        try:
            locked = lock.acquire()
        except Timeout:
            raise InUseError(
                f"{folder}: another process{_owner(path)} is using it. "
                "Wait for it, or use another folder."
            ) from None
    with locked:
        with writing(folder, remedy), path.open("r+b", buffering=0) as stream:
            stream.truncate(0)
            write_all(stream, str(os.getpid()).encode())
        yield


def is_in_use(folder: str | Path) -> bool:
    """Whether another process holds the folder's lock now."""
    try:
        with exclusive(folder):
            return False
    except InUseError:
        return True


def _owner(lock: Path) -> str:
    """The owner's process id in brackets, where it can be read."""
    try:
        owner = lock.read_text("ascii", "replace").strip()
    except OSError:
        return ""
    return f" ({owner})" if owner else ""
