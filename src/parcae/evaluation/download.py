"""Download of the files of evaluation tasks, resumable and verified by the sha256 in tasks.csv.

    download_tasks(files_of("core").files, "data/tasks")        then: --eval-data data/tasks

The files come from the llm-foundry repository at a fixed commit. A file without a known checksum is
not downloaded, because it could not be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from parcae.config import ConfigError
from parcae.data.hub import RemoteFile, Report, fetch, is_intact
from parcae.evaluation.suites import DOWNLOADABLE, SUITES
from parcae.evaluation.tasks import Task
from parcae.files import FileError, exclusive
from parcae.recipe import suggest

COLLECTION = "https://github.com/mosaicml/llm-foundry/raw/8c8dd48/scripts/eval/local_data"
NO_CHECKSUM = "no known checksum to verify it by"
ELSEWHERE = "not part of this collection"


@dataclass(frozen=True)
class TaskFiles:
    files: tuple[RemoteFile, ...]
    omitted: dict[str, tuple[str, ...]]
    """Names of tasks that cannot be downloaded, by reason."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def files_of(suite: str) -> TaskFiles:
    """The files of a suite."""
    entry = SUITES.get(suite)
    if entry is None or entry.files is None:
        raise ConfigError(f"suite: {suite!r} has no files. {suggest(suite, DOWNLOADABLE)}")
    return files_of_tasks(*entry.files())


def files_of_tasks(tasks: Iterable[Task], elsewhere: Iterable[str] = ()) -> TaskFiles:
    """The files of some tasks; `elsewhere` are names of tasks that the collection does not have."""
    files: dict[str, RemoteFile] = {}
    unknown = []
    for task in tasks:
        if task.sha256 is None or task.bytes is None:
            unknown.append(task.name)
        else:  # several tasks may share a file
            files[task.file] = RemoteFile(task.file, task.bytes, task.sha256)
    omitted = {NO_CHECKSUM: tuple(unknown), ELSEWHERE: tuple(elsewhere)}
    return TaskFiles(tuple(files.values()), {why: names for why, names in omitted.items() if names})


def download_tasks(
    files: Sequence[RemoteFile],
    folder: str | Path,
    *,
    collection: str = COLLECTION,
    report: Report = lambda _file, _bytes: None,
) -> None:
    """Download what is missing in `folder`; an interrupted download resumes when called again.
    `collection` is the address of the folder of files, such as a mirror."""
    folder = Path(folder)
    address = urlsplit(collection)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"mirror: {collection!r} is not an http(s) address such as {COLLECTION}.")
    with exclusive(folder):
        _refuse_other_files(files, folder)
        for file in files:
            url = f"{collection.rstrip('/')}/{file.path}"
            fetch(url, file, folder / file.path, report=report)


def _refuse_other_files(files: Sequence[RemoteFile], folder: Path) -> None:
    """Refuse to overwrite a file of the same name with another content: a download gets its name
    only when it is complete and verified, so the file has another origin."""
    paths = ((folder / file.path, file) for file in files)
    others = [str(path) for path, file in paths if path.exists() and not is_intact(path, file)]
    if others:
        raise FileError(
            f"{', '.join(others)}: exists with another content than tasks.csv expects. Move it "
            "away, or choose another folder."
        )
