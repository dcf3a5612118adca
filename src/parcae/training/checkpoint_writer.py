"""Writes a run's checkpoints in the background, and reads them back into live tensors.

`parcae.runs` knows the files of a checkpoint. Sharded processes write `shard-*.safetensors` instead
of one file, each its own part; the reader (`torch.distributed.checkpoint` on safetensors) takes
either, into whole tensors or into shards of another number of processes. Nothing is unpickled.

A checkpoint is written into a hidden folder, which is renamed when all files are on disk. All
randomness is a function of (seed, step, row), so step and seed replace the state of generators.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parcae.files import FileError, flush, remove, write_json
from parcae.model import CONFIG_FILE, WEIGHTS_FILE
from parcae.model.store import save_tensors
from parcae.runs.checkpoints import (
    best_checkpoint,
    list_checkpoints,
    read_state,
    verify_checkpoint,
    write_state,
)
from parcae.runs.layout import (
    OPTIMISER_FILE,
    OPTIMISER_FOLDER,
    TOKENIZER_FILE,
    checkpoint_path,
    damaged_path,
    hidden_checkpoints,
    hidden_path,
    list_steps,
    step_of,
)
from parcae.training.distributed import ProcessGroupWorkers, Workers


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, as live tensors and plain values."""

    step: int
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    header: Mapping[str, Any]
    """The model's config.json."""
    state: Mapping[str, Any]


class CheckpointWriter:
    """The checkpoints of one run."""

    def __init__(self, run: Path, workers: Workers, keep_last: int, keep_best: bool) -> None:
        self.run = run
        self.workers = workers
        self.keep_last, self.keep_best = keep_last, keep_best
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.newest: int | None = None
        """The step of the last checkpoint that was saved or loaded."""
        if workers.is_first:  # it holds the lock of the run folder
            for path in hidden_checkpoints(run):
                remove(path)

    def save(self, snapshot: Snapshot) -> None:
        """Copy now, write in the background. Waits for the previous one, and raises its error.

        All processes must call this, and `wait`, together.
        """
        self.wait()
        if snapshot.step == self.newest:  # known to every process without communication
            return
        self.newest = snapshot.step
        hidden = hidden_path(self.run, snapshot.step)
        if isinstance(self.workers, ProcessGroupWorkers) and self.workers.sharded:
            parts = [(hidden, snapshot.weights), (hidden / OPTIMISER_FOLDER, snapshot.optimiser)]
            write = _sharded_writer(parts, self.workers)
        elif self.workers.is_first:
            write = _whole_writer(hidden, _copy(snapshot.weights), _copy(snapshot.optimiser))
        else:
            return
        self._pending = self._writer.submit(self._finish, write, hidden, snapshot)

    def wait(self) -> None:
        """Wait until the checkpoint is written; if a process failed to, all raise an error."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.exception()
        self.workers.raise_together(error)

    @property
    def failed(self) -> bool:
        """Whether this process already knows that `wait` will raise an error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _finish(self, write: Callable[[], None], hidden: Path, snapshot: Snapshot) -> None:
        try:
            write()
            if not self.workers.is_first:
                return
            write_json(hidden / CONFIG_FILE, snapshot.header)
            if (self.run / TOKENIZER_FILE).exists():
                shutil.copyfile(self.run / TOKENIZER_FILE, hidden / TOKENIZER_FILE)
            write_state(hidden, snapshot.step, snapshot.state)
            hidden.rename(checkpoint_path(self.run, snapshot.step))
            flush(hidden.parent)
            self._prune()
        except (OSError, SafetensorError, CheckpointException) as error:
            remove(hidden)
            reason = getattr(error, "strerror", None) or str(error).strip()
            raise FileError(
                f"{checkpoint_path(self.run, snapshot.step)}: the checkpoint could not be written "
                f"({reason}). Earlier ones are complete: free some space, then continue with "
                "--resume."
            ) from error

    def _prune(self) -> None:
        checkpoints = list_checkpoints(self.run)
        kept = set(checkpoints[-self.keep_last :])
        if self.keep_best and (best := best_checkpoint(checkpoints)) is not None:
            kept.add(best)
        for path in checkpoints:
            if path not in kept:
                hidden = hidden_path(self.run, step_of(path))
                path.rename(hidden)  # never half a folder under a valid name
                remove(hidden)

    def latest(self) -> tuple[int, list[str]] | None:
        """The newest step whose checksums all match, and what is wrong with later ones."""
        problems: list[str] = []
        for step in reversed(list_steps(self.run)):
            try:
                verify_checkpoint(checkpoint_path(self.run, step))
                return step, problems
            except OSError as error:
                problems.append(str(error))
        if problems:
            raise FileError(f"no checkpoint can be used: {' '.join(problems)}")
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename later, damaged checkpoints, so that they neither count as the last ones nor are in
        the way of those that will be written again."""
        if self.workers.is_first:
            for later in list_steps(self.run):
                if later > step:
                    aside = damaged_path(self.run, later)
                    remove(aside)
                    checkpoint_path(self.run, later).rename(aside)

    def load(
        self, step: int, weights: Mapping[str, Tensor], optimiser: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Read into live tensors in place; returns state.json."""
        folder = checkpoint_path(self.run, step)
        self.newest = step
        read_tensors(weights, folder, self.workers)
        read_tensors(optimiser, folder / OPTIMISER_FOLDER, self.workers)
        return read_state(folder)


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, workers: Workers) -> None:
    """Read safetensors files in place into tensors of the same names, whole or sharded."""
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    _check_names(folder, {n: t.shape for n, t in tensors.items()}, stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        single = not isinstance(workers, ProcessGroupWorkers)
        group = None if single else workers.background_group
        load(dict(tensors), storage_reader=reader, no_dist=single, process_group=group)


def _check_names(folder: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    problems = [f"missing {name}" for name in wanted if name not in stored]
    problems += [f"left over {name}" for name in stored if name not in wanted]
    problems += [
        f"{name} is {[*stored[name].size]}, not {[*shape]}"
        for name, shape in wanted.items()
        if name in stored and stored[name].size != shape
    ]
    if problems:
        raise FileError(f"{folder}: does not match this run: {'; '.join(problems[:5])}.")


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _whole_writer(
    folder: Path, weights: dict[str, Tensor], optimiser: dict[str, Tensor]
) -> Callable[[], None]:
    def write() -> None:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
        (folder / OPTIMISER_FOLDER).mkdir()
        save_tensors(weights, folder / WEIGHTS_FILE, {"format": "pt"})
        save_tensors(optimiser, folder / OPTIMISER_FOLDER / OPTIMISER_FILE)

    return write


def _sharded_writer(
    parts: list[tuple[Path, Mapping[str, Tensor]]], workers: ProcessGroupWorkers
) -> Callable[[], None]:
    """Each process copies its shards now; the returned function writes them, on all together."""
    mesh = init_device_mesh("cpu", (workers.size,))
    staged = [(folder, {n: _stage(t, mesh) for n, t in part.items()}) for folder, part in parts]

    def write() -> None:
        for folder, tensors in staged:
            writer = SortedShardWriter(str(folder), save_distributed=True)
            save(tensors, storage_writer=writer, process_group=workers.background_group)

    return write


class SortedShardWriter(HuggingFaceStorageWriter):
    """Writes equal shards as equal files: safetensors orders a file's metadata at random."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            with Path(self.path, name).open("r+b") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size))
                ordered = json.dumps(
                    header, sort_keys=True, separators=(",", ":"), ensure_ascii=False
                )
                stream.seek(8)
                stream.write(ordered.encode().ljust(size))
            flush(Path(self.path, name))
        return written


def _stage(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy in CPU memory, sharded in the same way."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    local = tensor.to_local().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
