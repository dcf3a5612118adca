"""Training state on disk: written whole in the background, verified on load, resharded at will.

    RUN/checkpoints/step-00000500/
        config.json, model.safetensors     the model: `parcae.load` reads this folder
        optimiser/state.safetensors        every tensor of the optimiser
        tokenizer.json
        state.json                         step, data position, counters; sha256 of all the others

Sharded processes write `shard-*.safetensors` instead of one file, each its own part; the reader
(`torch.distributed.checkpoint` on safetensors) takes either, into whole tensors or shards of
another number of processes. Nothing is ever unpickled.

A checkpoint is written into a hidden folder and renamed when it is complete and on the disk, so
one that has its name is whole. What chance decides is a function of (seed, step, row), so step and
seed stand for all generators.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parcae.files import FileError, flush, read_json, sha256, write_json
from parcae.model.store import CONFIG_FILE, STATE_FILE, WEIGHTS_FILE
from parcae.training.distributed import Processes, Several

OPTIMISER = "optimiser"
FORMAT = "parcae-training-1"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, as live tensors and plain values."""

    step: int
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    header: Mapping[str, Any]
    """The model's config.json."""
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, processes: Processes, keep_last: int, keep_best: bool) -> None:
        self.folder = run / "checkpoints"
        self.tokenizer = run / "tokenizer.json"
        self.processes = processes
        self.keep_last, self.keep_best = keep_last, keep_best
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._newest: int | None = None
        if processes.is_first:  # which holds the run's folder: nobody else is writing here
            for left in self.folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, snapshot: Snapshot) -> None:
        """Copy now, write in the background. Waits for the one before, and raises its error.

        All processes come here, and to `wait`, together.
        """
        self.wait()
        if snapshot.step == self._newest:  # known to every process without asking the others
            return
        self._newest = snapshot.step
        hidden = self.folder / f".step-{snapshot.step:08d}"
        if isinstance(self.processes, Several) and self.processes.sharded:
            parts = [(hidden, snapshot.weights), (hidden / OPTIMISER, snapshot.optimiser)]
            write = _sharded_writer(parts, self.processes)
        elif self.processes.is_first:
            write = _whole_writer(hidden, _copy(snapshot.weights), _copy(snapshot.optimiser))
        else:
            return
        self._pending = self._writer.submit(self._finish, write, hidden, snapshot)

    def wait(self) -> None:
        """For the one that is being written; if any process failed at that, all raise an error."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.exception()
        self.processes.share(error)

    @property
    def failed(self) -> bool:
        """Whether this process knows already that `wait` will raise an error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _finish(self, write: Callable[[], None], hidden: Path, snapshot: Snapshot) -> None:
        try:
            write()
            if not self.processes.is_first:
                return
            write_json(hidden / CONFIG_FILE, snapshot.header)
            if self.tokenizer.exists():
                shutil.copyfile(self.tokenizer, hidden / self.tokenizer.name)
            files = sorted(path for path in hidden.rglob("*") if path.is_file())
            for path in files:
                flush(path)
            sums = {str(path.relative_to(hidden)): sha256(path) for path in files}
            state = {"format": FORMAT, "step": snapshot.step, **snapshot.state, "files": sums}
            write_json(hidden / STATE_FILE, {**state, "sha256": _checksum(state)})
            flush(hidden)
            hidden.rename(self.path(snapshot.step))
            flush(self.folder)
            self._prune()
        except (OSError, SafetensorError, CheckpointException) as error:
            shutil.rmtree(hidden, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error).strip()
            raise FileError(
                f"{self.path(snapshot.step)}: the checkpoint could not be written "
                f"({reason}). Earlier ones are whole: make room, then go on with "
                "--resume."
            ) from error

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.keep_last :])
        if self.keep_best and (best := self.best()) is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                doomed = self.folder / f".step-{step:08d}"
                self.path(step).rename(doomed)  # never half a folder under a valid name
                shutil.rmtree(doomed, ignore_errors=True)

    def best(self) -> int | None:
        """The step with the lowest validation loss at the depth the model is used at."""
        losses = {}
        for step in self.steps():
            try:
                loss = read_json(self.path(step) / STATE_FILE).get("validation_loss")
            except FileError:
                continue
            if loss is not None:
                losses[step] = loss
        return min(losses, key=losses.__getitem__) if losses else None

    def latest(self) -> tuple[int, list[str]] | None:
        """The newest step whose files are all as they were written, and what was wrong above."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                verify(self.path(step))
                return step, problems
            except OSError as error:
                problems.append(str(error))
        if problems:
            raise FileError(f"no checkpoint can be used: {' '.join(problems)}")
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename those that were damaged, so that they are neither kept as the last nor in the way
        of the ones that will be written again."""
        if self.processes.is_first:
            for later in self.steps():
                if later > step:
                    aside = self.folder / f"damaged-step-{later:08d}"
                    shutil.rmtree(aside, ignore_errors=True)
                    self.path(later).rename(aside)

    def load(
        self, step: int, weights: Mapping[str, Tensor], optimiser: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Fill live tensors in place; returns the plain state."""
        folder = self.path(step)
        self._newest = step
        fill(weights, folder, self.processes)
        fill(optimiser, folder / OPTIMISER, self.processes)
        return read_json(folder / STATE_FILE)


def verify(folder: Path) -> None:
    """Every file is there and has the checksum it was written with."""
    state = read_json(folder / STATE_FILE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FileError(f"{folder / STATE_FILE}: not a training checkpoint of this version.")
    if state.pop("sha256", None) != _checksum(state):
        raise FileError(f"{folder / STATE_FILE}: damaged, its checksum differs.")
    for name, expected in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise FileError(f"{path}: missing.")
        if sha256(path) != expected:
            raise FileError(f"{path}: damaged, its checksum differs.")


def _checksum(state: Mapping[str, Any]) -> str:
    """Of plain values, as they come back from JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def fill(tensors: Mapping[str, Tensor], folder: Path, processes: Processes) -> None:
    """Read safetensors files into tensors of the same names, whole or sharded."""
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    _check_names(folder, {n: t.shape for n, t in tensors.items()}, stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process is known
        alone = not isinstance(processes, Several)
        group = None if alone else processes.quiet_group
        load(dict(tensors), storage_reader=reader, no_dist=alone, process_group=group)


def _check_names(folder: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    problems = [f"missing {name}" for name in wanted if name not in stored]
    problems += [f"left over {name}" for name in stored if name not in wanted]
    problems += [
        f"{name} is {[*stored[name].size]}, not {[*shape]}"
        for name, shape in wanted.items()
        if name in stored and stored[name].size != shape
    ]
    if problems:
        raise FileError(f"{folder}: does not fit this run: {'; '.join(problems[:5])}.")


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _whole_writer(
    folder: Path, weights: dict[str, Tensor], optimiser: dict[str, Tensor]
) -> Callable[[], None]:
    def write() -> None:
        (folder / OPTIMISER).mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        save_file(optimiser, folder / OPTIMISER / "state.safetensors")

    return write


def _sharded_writer(
    parts: list[tuple[Path, Mapping[str, Tensor]]], processes: Several
) -> Callable[[], None]:
    """Each process copies its shards now; all of them write theirs together later."""
    mesh = init_device_mesh("cpu", (processes.size,))
    staged = [(folder, {n: _stage(t, mesh) for n, t in part.items()}) for folder, part in parts]

    def write() -> None:
        for folder, tensors in staged:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(tensors, storage_writer=writer, process_group=processes.quiet_group)

    return write


def _stage(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy in the memory of the CPU, sharded as it was."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    local = tensor.to_local().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
