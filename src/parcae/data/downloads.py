"""Download datasets of the Hugging Face hub, and single files of any server: resumable, verified.

    download("fineweb-edu-10bt", "data/fineweb-edu-10bt")
    fetch(url, RemoteFile("copa.jsonl", 12_345, sha256), Path("data/copa.jsonl"))

Files go to the given folder; there is no shared cache.

`huggingface_hub` lists the files (`HfApi`) and transfers them (`http_get`, which resumes after a
lost connection). `hf_hub_download` is not used because, as of version 2.4, it restarts a file from
the beginning after an interrupted process and compares sizes only. Hence three things are done
here: bytes are kept in a `.partial` file between processes, checksums are compared before a file
gets its name, and `.download.json` fixes the commit and the list of files, so that a resumed
download never mixes two revisions.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from parcae.config import ConfigError
from parcae.data.sources import Format, format_of
from parcae.files import (
    FileError,
    WriteError,
    atomic_path,
    interpreting,
    lock_folder,
    no_link,
    path_inside,
    read_sealed,
    sha256,
    write_sealed,
    writing,
)
from parcae.recipe import suggest
from parcae.schema import require_range

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
NAMES = {
    "fineweb-edu-10bt": f"{FINEWEB_EDU}:sample/10BT",
    "fineweb-edu-100bt": f"{FINEWEB_EDU}:sample/100BT",
    "fineweb-edu-350bt": f"{FINEWEB_EDU}:sample/350BT",
    "huginn": "tomg-group-umd/huginn-dataset",
}
RECORD = ".download.json"
PREFERRED: tuple[Format, ...] = ("parquet", "json-lines", "text")
NOT_DOCUMENTS = {"dataset_infos.json", "dataset_info.json", "license.txt", "readme.txt"}


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: its path in the repository, its size and its checksum."""

    path: str
    bytes: int
    sha256: str | None
    """None for small files that the hub stores in git."""
    blob_sha1: str | None = None
    """git's hash of the content, for files without sha256."""


@dataclass(frozen=True)
class Dataset:
    """A folder of a dataset repository at one commit."""

    repository: str
    folder: str
    revision: str
    """Branch, tag or commit given when the commit was fixed."""
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


Report = Callable[[RemoteFile, int], None]
"""Called with a file and the number of its bytes on disk."""


def _no_report(_file: RemoteFile, _bytes: int) -> None:
    pass


def download(
    name: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    first_files: int | None = None,
    endpoint: str | None = None,
    report: Report = _no_report,
) -> Dataset:
    """Download a dataset, or its first few files, into `folder`; call it again to resume.

    `name` is a key of `NAMES` or `owner/name[:folder]`. `revision` defaults to the one already in
    the folder, or to `main`. `endpoint` is another hub; the default is HF_ENDPOINT of the
    environment.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    folder = Path(folder)
    repository, subfolder = resolve(name)
    if first_files is not None:
        require_range("first_files", first_files, "Omit it to download all files.", at_least=1)
    with lock_folder(folder):
        dataset = _read_record(folder, repository, subfolder, revision)
        if dataset is None:
            dataset = _list_files(repository, subfolder, revision or "main", endpoint)
            for file in dataset.files:
                path_inside(folder, file.path)
            write_sealed(folder / RECORD, asdict(dataset))
        headers = build_hf_headers()
        for file in dataset.files[:first_files]:
            url = hf_hub_url(
                repository,
                file.path,
                repo_type="dataset",
                revision=dataset.commit,
                endpoint=endpoint,
            )
            fetch(url, file, path_inside(folder, file.path), headers=headers, report=report)
    return dataset


def resolve(name: str, other_names: Sequence[str] = ()) -> tuple[str, str]:
    """Repository and folder of a dataset name; `other_names` are suggested for a wrong one too."""
    full_name = NAMES.get(name, name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[^:]+)?", full_name):
        raise ConfigError(
            f"{name}: unknown dataset. {suggest(name, [*NAMES, *other_names])} Or write "
            "owner/name[:folder]."
        )
    repository, _, subfolder = full_name.partition(":")
    return repository, subfolder.strip("/")


def fetch(
    url: str,
    file: RemoteFile,
    target: Path,
    *,
    headers: Mapping[str, str] | None = None,
    report: Report = _no_report,
) -> None:
    """Download one file from any server, and compare its checksum.

    An interrupted download is resumed; a file with a wrong checksum is downloaded once more.
    `headers` are sent to the server, such as a token.
    """
    if target.exists() and is_intact(target, file):
        report(file, file.bytes)
        return
    partial = target.with_name(f".{target.name}.partial")
    with writing(target):
        partial.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        _transfer(url, file, partial, headers or {}, report)
        if is_intact(partial, file):
            with atomic_path(target) as temporary:
                partial.replace(temporary)
            report(file, file.bytes)
            return
        partial.unlink()
    raise FileError(
        f"{target}: the file sent by {urlsplit(url).hostname} has a wrong checksum and was "
        "deleted. Try again later."
    )


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Whether the file at `path` has the right size and checksum."""
    if path.stat().st_size != file.bytes:
        return False
    if file.sha256:
        return sha256(path) == file.sha256
    blob = b"blob %d\0" % file.bytes + path.read_bytes()
    return hashlib.sha1(blob).hexdigest() == file.blob_sha1  # noqa: S324 (the id that git gives it)


def _transfer(
    url: str, file: RemoteFile, partial: Path, headers: Mapping[str, str], report: Report
) -> None:
    """Append the missing bytes to `partial`; try again as long as an attempt adds some."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils.tqdm import silent_tqdm

    while True:
        before = _size(partial)
        with writing(partial):
            stream = _PartialFile(partial, file, report)
        try:
            with stream, _readable_errors(file.path, urlsplit(url).hostname or url):
                http_get(
                    url,
                    stream,  # type: ignore[arg-type]
                    resume_size=before,
                    headers={**headers, "Accept-Encoding": "identity"},
                    expected_size=file.bytes,
                    tqdm_class=silent_tqdm,  # type: ignore[arg-type]
                )
            return
        except WriteError:
            raise
        except FileError:
            if _size(partial) > file.bytes:  # another content, such as a login page
                partial.unlink()
            if _size(partial) <= before:
                raise


class _PartialFile(io.FileIO):
    """A file open for appending that reports its size after each write."""

    def __init__(self, path: Path, file: RemoteFile, report: Report) -> None:
        super().__init__(path, "a", opener=no_link)
        self._path, self._file, self._report = path, file, report
        report(file, self.tell())

    def write(self, data: Any) -> int:
        with writing(self._path, "Free some space and run the same command again to resume."):
            rest = memoryview(data)
            while rest:
                rest = rest[super().write(rest) or 0 :]
        self._report(self._file, min(self.tell(), self._file.bytes))
        return len(data)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_record(
    folder: Path, repository: str, subfolder: str, revision: str | None
) -> Dataset | None:
    """The dataset of an earlier download into this folder; None in a new folder."""
    path = folder / RECORD
    if not path.exists():
        return None
    remedy = "Delete it; files that are complete are kept."
    record = read_sealed(path, remedy)
    with interpreting(path, remedy):
        files = tuple(RemoteFile(**file) for file in record.pop("files"))
        dataset = Dataset(files=files, **record)
        _check_types(dataset)
    if (dataset.repository, dataset.folder) != (repository, subfolder):
        other = f"{dataset.repository}:{dataset.folder}"[:200]
        raise FileError(f"{folder}: contains {other}. Choose another folder.")
    if revision not in (None, dataset.revision, dataset.commit):
        raise FileError(
            f"{folder}: contains revision {dataset.revision[:99]} ({dataset.commit[:12]}), not "
            f"{revision}. Choose another folder, or omit `revision`."
        )
    return dataset


def _check_types(dataset: Dataset) -> None:
    """Raise ValueError unless the values of a record are as `download` writes them."""
    texts = (dataset.repository, dataset.folder, dataset.revision, dataset.commit)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the repository, folder, revision or commit")
    for file in dataset.files:
        checksums = (file.sha256, file.blob_sha1)
        if not (
            isinstance(file.path, str)
            and isinstance(file.bytes, int)
            and all(isinstance(checksum, str | None) for checksum in checksums)
        ):
            raise ValueError("the path, size or checksum of a file")


def _list_files(repository: str, subfolder: str, revision: str, endpoint: str | None) -> Dataset:
    """The files with documents, at the commit that `revision` names now."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with _readable_errors(repository, "the hub"):
        api = HfApi(endpoint=endpoint)
        commit = api.dataset_info(repository, revision=revision).sha or revision
        tree = api.list_repo_tree(
            repository, subfolder or None, recursive=True, revision=commit, repo_type="dataset"
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
    for format in PREFERRED:  # JSON and text next to Parquet only describe the dataset
        if chosen := tuple(file for file in files if format_of(Path(file.path)) == format):
            return Dataset(repository, subfolder, revision, commit, chosen)
    raise FileError(f"{repository}:{subfolder}: no files with documents. Check the folder.")


@contextmanager
def _readable_errors(name: str, server: str) -> Iterator[None]:
    """Turn the errors of `huggingface_hub` and its HTTP client into `FileError`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except FileError:
        raise
    except GatedRepoError:
        raise FileError(
            f"{name}: access must be requested. Accept the terms on the hub and run `hf auth "
            "login`."
        ) from None
    except RepositoryNotFoundError:
        raise FileError(f"{name}: no such dataset on the hub, or it is private.") from None
    except HfHubHTTPError as error:
        raise FileError(f"{name}: refused by {server} ({_first_line(error)}).") from None
    except (OfflineModeIsEnabled, HTTPError, ConnectionError, TimeoutError) as error:
        raise FileError(
            f"{name}: cannot reach {server} ({_first_line(error)}). Check the network and run the "
            "same command again to resume."
        ) from None
    except (OSError, ValueError) as error:  # a wrong size, or more than 50 GB
        raise FileError(
            f"{name}: {server} did not send the expected file ({_first_line(error)}). Check for "
            "a proxy or a login page."
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
