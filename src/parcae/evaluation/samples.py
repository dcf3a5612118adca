"""Results item by item, in `samples.jsonl`: what a killed evaluation goes on from.

    {"task": "arc_easy", "seed": 1234, "index": 17, "data": "d2d12e59543a", ...}

A batch is appended by one write, so at worst the last line is half a line, and is dropped. What was
computed by another model, at other depths or on another file does not count.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parcae.evaluation.job import Job, Record
from parcae.files import FileError, atomic_path, read_sealed, reading, write_sealed, writing

SAMPLES = "samples.jsonl"
SETTINGS = "settings.json"
Place = tuple[str, int | None, str]
"""Task, seed, and the data it was asked from."""


class Samples:
    def __init__(self, folder: Path, settings: Mapping[str, Any], again: bool = False) -> None:
        """`settings`: whatever must be the same for results to belong together. `again` drops what
        the folder holds."""
        self.path = folder / SAMPLES
        self._lines: dict[Place, dict[int, str]] = defaultdict(dict)
        remedy = "Choose another folder by --out, or drop what is there by --again."
        if again:
            with writing(self.path):
                self.path.unlink(missing_ok=True)
        elif (folder / SETTINGS).exists() and self.path.exists():
            before = read_sealed(folder / SETTINGS, remedy)
            if changed := sorted(k for k in settings if settings[k] != before.get(k)):
                raise FileError(
                    f"{folder}: holds an evaluation with other {', '.join(changed)}. {remedy}"
                )
            self._read(remedy)
        elif self.path.exists():
            raise FileError(f"{self.path}: results without their settings. {remedy}")
        write_sealed(folder / SETTINGS, dict(settings))

    def _read(self, remedy: str) -> None:
        if not self.path.exists():
            return
        with reading(self.path):
            data = self.path.read_bytes()
        whole, newline, rest = data.rpartition(b"\n")
        if rest:  # half a line: the process was killed while it wrote
            with writing(self.path):
                os.truncate(self.path, len(whole) + len(newline))
        for number, line in enumerate(whole.decode("utf-8", "replace").split("\n"), start=1):
            if not line:
                continue
            try:
                held = json.loads(line)
                place = (held["task"], held["seed"], held["data"])
                self._lines[place][int(held["index"])] = line
            except (ValueError, KeyError, TypeError):
                raise FileError(f"{self.path}: line {number} is damaged. {remedy}") from None

    def has(self, job: Job, index: int) -> bool:
        return index in self._lines[_place(job)]

    def add(self, job: Job, records: Mapping[int, Record]) -> None:
        task, seed, data = place = _place(job)
        lines = {
            index: json.dumps(
                {"task": task, "seed": seed, "index": index, "data": data, **record},
                allow_nan=False,
            )
            for index, record in records.items()
        }
        remedy = "What was scored before is kept; make room and start again."
        with writing(self.path, remedy), self.path.open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{line}\n" for line in lines.values()))
        self._lines[place].update(lines)

    def of(self, job: Job) -> list[Record]:
        """All of a job's records, in order."""
        held = self._lines[_place(job)]
        return [json.loads(held[index]) for index in range(len(job))]

    def tidy(self) -> None:
        """Write the file anew, sorted: it does not tell in how many attempts it was made."""
        with atomic_path(self.path) as temporary, temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in self._sorted())

    def _sorted(self) -> Iterator[str]:
        for place in sorted(self._lines, key=lambda place: (place[0], place[1] or 0, place[2])):
            held = self._lines[place]
            yield from (held[index] for index in sorted(held))


def _place(job: Job) -> Place:
    return job.name, job.seed, job.source.sha256[:12]


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Of a finished evaluation."""
    path = folder / SAMPLES
    with reading(path), path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield json.loads(line)
            except ValueError:
                raise FileError(f"{path}: line {number} is not JSON. Is it truncated?") from None
