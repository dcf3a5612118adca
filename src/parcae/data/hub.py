"""Datasets of the Hugging Face hub as local files: resumable, and verified by their sha256.

    download("fineweb-edu-10bt", "data/fineweb-edu-10bt")
    fetch(url, file, target, server, report)           one file, of any server

The first run fixes the revision and the list of files in `.download.json`; later runs check what
is here and fetch the rest, byte range by byte range, so that an interrupted download of any size
goes on where it was and never mixes two revisions. A file has its name only once its checksum is
right.

We fetch the bytes ourselves because `hf_hub_download` starts an interrupted file anew.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from parcae.config import ConfigError, require
from parcae.data.readers import Format, format_of
from parcae.files import (
    FileError,
    atomic_path,
    exclusive,
    read_sealed,
    write_all,
    write_sealed,
    writing,
)
from parcae.recipe import suggest

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
NAMES = {
    "fineweb-edu-10bt": f"{FINEWEB_EDU}:sample/10BT",
    "fineweb-edu-100bt": f"{FINEWEB_EDU}:sample/100BT",
    "fineweb-edu-350bt": f"{FINEWEB_EDU}:sample/350BT",
    "huginn": "tomg-group-umd/huginn-dataset",
}
HUB = "the hub"
RECORD = ".download.json"
PREFERRED: tuple[Format, ...] = ("parquet", "json-lines", "text")
NOT_DOCUMENTS = {"dataset_infos.json", "dataset_info.json", "license.txt", "readme.txt"}
CHUNK_BYTES = 1 << 20
ATTEMPTS = 5
RETRY_SECONDS = 0.5
TIMEOUT_SECONDS = 30
WORTH_ANOTHER_TRY = (408, 429, 500, 502, 503, 504)


class Unreachable(FileError):
    """The hub does not answer, or not now."""


@dataclass(frozen=True)
class RemoteFile:
    path: str
    bytes: int
    sha256: str | None
    """Of the content, for all files that the hub keeps outside git; the others have none."""
    blob_sha1: str | None = None
    """git's own name for the content of a file kept inside git."""


@dataclass(frozen=True)
class Server:
    name: str
    """What errors call it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of every request. A token goes in here, and so only to the server it is for."""


@dataclass(frozen=True)
class Dataset:
    """A folder of a dataset repository at one commit."""

    repository: str
    folder: str
    revision: str
    """The name that was asked for when the commit was fixed."""
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


Report = Callable[[RemoteFile, int], None]
"""Called with a file and how many of its bytes are here."""


def download(
    name: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    first_files: int | None = None,
    endpoint: str | None = None,
    report: Report = lambda _file, _bytes: None,
) -> Dataset:
    """Fetch a dataset, or its first few files, into `folder`; run it again to go on.

    `revision` is what the folder holds if it is left out, and `main` in a new folder. `endpoint` is
    a mirror of the hub; the environment's HF_ENDPOINT if it is left out.
    """
    folder = Path(folder)
    repository, inside = resolve(name)
    require(
        first_files is None or first_files >= 1,
        "first_files",
        f"{first_files} is not positive",
        "Use at least 1, or leave it out for all.",
    )
    with exclusive(folder):
        dataset = _pinned(folder, repository, inside, revision)
        if dataset is None:
            dataset = _list(repository, inside, revision or "main", endpoint)
            write_sealed(folder / RECORD, asdict(dataset))
        server = _hub()
        for file in dataset.files[:first_files]:
            fetch(_url(dataset, file, endpoint), file, folder / file.path, server, report)
    return dataset


def resolve(name: str, others: Sequence[str] = ()) -> tuple[str, str]:
    """Repository and folder behind one of our names, or behind `owner/name[:folder]`. `others` may
    have been meant where it is neither."""
    full = NAMES.get(name, name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[^:]+)?", full):
        raise ConfigError(
            f"{name}: not a dataset. {suggest(name, [*NAMES, *others])} Or write "
            "owner/name[:folder]."
        )
    repository, _, inside = full.partition(":")
    return repository, inside.strip("/")


def _pinned(folder: Path, repository: str, inside: str, revision: str | None) -> Dataset | None:
    path = folder / RECORD
    if not path.exists():
        return None
    record = read_sealed(path, "Delete it; the files here are checked and kept.")
    files = tuple(RemoteFile(**file) for file in record.pop("files"))
    dataset = Dataset(files=files, **record)
    if (dataset.repository, dataset.folder) != (repository, inside):
        raise FileError(
            f"{folder}: already holds {dataset.repository}:{dataset.folder}. Choose another folder."
        )
    if revision not in (None, dataset.revision, dataset.commit):
        raise FileError(
            f"{folder}: already holds revision {dataset.revision} ({dataset.commit[:12]}), and two "
            "are never mixed. Choose another folder, or leave --revision out."
        )
    return dataset


def _list(repository: str, inside: str, revision: str, endpoint: str | None) -> Dataset:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with _clear_errors(repository):
        api = HfApi(endpoint=endpoint)
        commit = api.dataset_info(repository, revision=revision).sha or revision
        tree = api.list_repo_tree(
            repository, inside or None, recursive=True, revision=commit, repo_type="dataset"
        )
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
    files = sorted(
        (
            RemoteFile(e.path, e.size, e.lfs.sha256 if e.lfs else None, e.blob_id)
            for e in entries
            if e.size and Path(e.path).name.lower() not in NOT_DOCUMENTS
        ),
        key=lambda file: file.path,
    )
    for wanted in PREFERRED:  # beside Parquet, JSON and text only describe a dataset
        if chosen := tuple(file for file in files if format_of(Path(file.path)) == wanted):
            return Dataset(repository, inside, revision, commit, chosen)
    raise FileError(f"{repository}:{inside}: no file with documents there. Check the folder.")


def _url(dataset: Dataset, file: RemoteFile, endpoint: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(
        dataset.repository,
        file.path,
        repo_type="dataset",
        revision=dataset.commit,
        endpoint=endpoint,
    )


def _hub() -> Server:
    from huggingface_hub.utils import build_hf_headers

    return Server(HUB, build_hf_headers())


def fetch(url: str, file: RemoteFile, target: Path, server: Server, report: Report) -> None:
    """One file, verified; an interrupted one goes on, a damaged one is fetched once more."""
    if target.exists() and is_intact(target, file):
        report(file, file.bytes)
        return
    partial = target.with_name(f".{target.name}.partial")
    with writing(target):
        partial.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        _fetch(url, file, partial, server, report)
        if is_intact(partial, file):
            with atomic_path(target) as temporary:
                partial.replace(temporary)
            return
        partial.unlink()
    raise FileError(
        f"{target}: what {server.name} sent does not have the right checksum. Nothing of it was "
        "kept; try again later."
    )


def _fetch(url: str, file: RemoteFile, partial: Path, server: Server, report: Report) -> None:
    """Append what is missing; give up after a few attempts in a row that brought nothing."""
    idle_attempts = 0
    while (here := _size(partial)) < file.bytes:
        report(file, here)
        problem = Unreachable(
            f"{file.path}: {server.name} sent less than the file. Try again later."
        )
        try:
            with _clear_errors(file.path, server.name):
                _append(url, file, partial, server, report)
        except Unreachable as error:
            problem = error
        if (now := _size(partial)) >= file.bytes:
            break
        idle_attempts = 0 if now > here else idle_attempts + 1
        if idle_attempts >= ATTEMPTS:
            raise problem
        time.sleep(RETRY_SECONDS * 2**idle_attempts)
    report(file, file.bytes)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append(url: str, file: RemoteFile, partial: Path, server: Server, report: Report) -> None:
    """One request. A server that ignores ranges sends all anew, and what is here is passed over,
    so that no answer, be it a login page, costs what was already fetched."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    here = _size(partial)
    headers = {**server.headers, "Accept-Encoding": "identity"}
    if here:
        headers["Range"] = f"bytes={here}-"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        known = 0 if response.status_code == 206 else here
        _check_answer(file, here - known, response)
        with writing(partial):
            stream = partial.open("ab", buffering=0)
        with stream:
            for chunk in response.iter_bytes(CHUNK_BYTES):
                new = chunk[known:][: file.bytes - here]
                known = max(0, known - len(chunk))
                _write(stream, new, partial)
                here += len(new)
                report(file, here)


def _check_answer(file: RemoteFile, start: int, response: Any) -> None:
    """It is the file from `start` on, as far as its headers tell."""
    length, span = (response.headers.get(f"Content-{name}") for name in ("Length", "Range"))
    if span is not None:
        right = span.startswith(f"bytes {start}-") and span.endswith(f"/{file.bytes}")
    else:
        right = length in (None, str(file.bytes - start))
    if not right:
        raise Unreachable(
            f"{file.path}: what came is not the file ({span or f'{length} bytes'} instead of "
            f"{file.bytes - start:,} bytes). Is a login page or a proxy in between? What is here "
            "is kept."
        )


def _write(stream: IO[bytes], data: bytes, path: Path) -> None:
    try:
        write_all(stream, data)
    except OSError as error:
        raise FileError(
            f"{path}: could not be written ({error.strerror}). Make room and run it again; "
            "what is here is kept."
        ) from error


def is_intact(path: Path, file: RemoteFile) -> bool:
    if path.stat().st_size != file.bytes:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.bytes)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.blob_sha1)


@contextmanager
def _clear_errors(wanted: str, server: str = HUB) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise FileError(
            f"{wanted}: asks for consent. Give it on the hub and log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise FileError(f"{wanted}: no such dataset on the hub, or it is private.") from None
    except HfHubHTTPError as error:
        later = error.response.status_code in WORTH_ANOTHER_TRY
        kind = Unreachable if later else FileError
        raise kind(f"{wanted}: {server} refused ({_first_line(error)}).") from None
    except (OfflineModeIsEnabled, *_connection_errors()) as error:
        raise Unreachable(
            f"{wanted}: {server} cannot be reached ({_first_line(error)}). Check the network; "
            "what is here is kept, and the same command goes on from it."
        ) from None


def _connection_errors() -> tuple[type[Exception], ...]:
    """What the hub's HTTP client raises, whichever library is behind it."""
    from huggingface_hub.utils import get_session

    module: Any = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return (module.TransportError, ConnectionError, TimeoutError)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
