"""The ground floor: writes that are whole or absent, checksums, locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHUNK_BYTES = 1 << 20


class FileError(OSError):
    """A file that cannot be used. The message names it and says what to do."""


class WriteError(FileError):
    """The disk or the folder did not take what was written; the work itself is not at fault."""


class InUseError(FileError):
    """Another process holds the folder."""


@contextlib.contextmanager
def writing(path: str | Path, remedy: str = "") -> Iterator[None]:
    """What the system says against writing, as an error that names the file."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        problem = f"{path}: could not be written ({error.strerror or error})."
        raise WriteError(f"{problem} {remedy}".strip()) from error


def write_all(stream: IO[bytes], data: bytes | memoryview) -> None:
    """To a stream without a buffer: one with a buffer would try again what a full disk refused,
    when it is closed, and the second error would hide the first."""
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """What the system says against reading, as an error that names the file."""
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
    """A temporary path beside `path`; on success it is flushed to disk and takes its name.

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
    """Strict JSON: a NaN is refused, since most readers would choke on it."""
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
    """What `write_sealed` wrote, or an error: no key needs a check of its own after this."""
    value = read_json(path)
    seal = value.pop("seal", None) if isinstance(value, dict) else None
    if seal is None or seal != _seal(value):
        raise FileError(f"{path}: changed since it was written, or not ours. {remedy}")
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
    """Hold `folder` against other processes; the lock goes with the process, even a killed one."""
    folder = Path(folder)
    remedy = "Choose another folder."
    with writing(folder, remedy):
        if folder.is_file():
            raise FileError(f"{folder}: a file, not a folder. {remedy}")
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / ".lock").open("a+b", buffering=0)
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read_owner(stream)
            raise InUseError(
                f"{folder}: another process{owner} is using it. Wait for it, or use another folder."
            ) from None
        with writing(folder, remedy):
            stream.truncate(0)
            write_all(stream, str(os.getpid()).encode())
        yield


def is_in_use(folder: str | Path) -> bool:
    """Whether another process holds it right now."""
    try:
        with exclusive(folder):
            return False
    except InUseError:
        return True


def _read_owner(stream: IO[bytes]) -> str:
    stream.seek(0)
    owner = stream.read().decode("ascii", "replace").strip()
    return f" ({owner})" if owner else ""


def flush(path: Path) -> None:
    """A file's content, or a folder's list of names, is on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
