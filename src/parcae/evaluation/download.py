"""Files of evaluation tasks, resumable, and verified by the sha256 in the table of tasks.

    download_tasks(wanted("core").files, "data/tasks")        then: --eval-data data/tasks

They come from the collection that the paper's table is made of, at one commit of it. A file whose
checksum is not known is left out: what came in its place could not be told from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from parcae.config import ConfigError
from parcae.data.hub import RemoteFile, Report, fetch, is_intact
from parcae.evaluation.tasks import Task, core, core_extended, tasks_named
from parcae.files import FileError, exclusive
from parcae.recipe import suggest

COLLECTION = "https://github.com/mosaicml/llm-foundry/raw/8c8dd48/scripts/eval/local_data"
SUITES = ("core", "core-extended", "zero-shot", "lambada")
NO_CHECKSUM = "no checksum is known, so what comes could not be verified"
ELSEWHERE = "not part of this collection"


@dataclass(frozen=True)
class Wanted:
    files: tuple[RemoteFile, ...]
    left_out: dict[str, tuple[str, ...]]
    """Names of tasks, by the reason."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def wanted(suite: str) -> Wanted:
    if suite == "core":
        return of_tasks(core())
    if suite == "core-extended":
        return of_tasks(core_extended())
    if suite == "zero-shot":
        return _zero_shot()
    if suite == "lambada":
        return of_tasks(tasks_named(["lambada_openai"]))
    raise ConfigError(f"suite: no files are known for {suite!r}. {suggest(suite, SUITES)}")


def of_tasks(tasks: Iterable[Task], elsewhere: Sequence[str] = ()) -> Wanted:
    files: dict[str, RemoteFile] = {}
    unknown = []
    for task in tasks:
        if task.sha256 is None or task.bytes is None:
            unknown.append(task.name)
        else:  # once, also where several tasks ask from it
            files[task.file] = RemoteFile(task.file, task.bytes, task.sha256)
    left_out = {NO_CHECKSUM: tuple(unknown), ELSEWHERE: tuple(elsewhere)}
    return Wanted(tuple(files.values()), {why: names for why, names in left_out.items() if names})


def download_tasks(
    files: Sequence[RemoteFile],
    folder: str | Path,
    *,
    collection: str = COLLECTION,
    report: Report = lambda _file, _bytes: None,
) -> None:
    """Fetch what is not yet in `folder`; run it again to go on. `collection` may be a mirror."""
    folder = Path(folder)
    address = urlsplit(collection)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"mirror: {collection!r} is not an address such as {COLLECTION}.")
    with exclusive(folder):
        _keep_others_files(files, folder)
        for file in files:
            url = f"{collection.rstrip('/')}/{file.path}"
            fetch(url, file, folder / file.path, report=report)


def _keep_others_files(files: Sequence[RemoteFile], folder: Path) -> None:
    """Ours have their names only once they are whole: another content is somebody's own version."""
    paths = ((folder / file.path, file) for file in files)
    others = [str(path) for path, file in paths if path.exists() and not is_intact(path, file)]
    if others:
        raise FileError(
            f"{', '.join(others)}: not what the table of tasks means by that name. Move it away, "
            "or choose another folder."
        )


def _zero_shot() -> Wanted:
    """Of each task the first file that can serve and is in the collection."""
    from parcae.evaluation.zero_shot import TASKS

    known = {task.file: task for task in core_extended()}
    served = {
        task.name: next((known[one.file] for one in task.candidates if one.file in known), None)
        for task in TASKS
    }
    elsewhere = [name for name, found in served.items() if found is None]
    return of_tasks([found for found in served.values() if found is not None], elsewhere)
