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

from parcae.files import FileError, flush, write_json
from parcae.model import CONFIG_FILE, WEIGHTS_FILE
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
from parcae.training.distributed import Processes, Several


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
        self.run = run
        self.processes = processes
        self.keep_last, self.keep_best = keep_last, keep_best
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._newest: int | None = None
        if processes.is_first:  # which holds the run's folder: nobody else is writing here
            for path in hidden_checkpoints(run):
                shutil.rmtree(path, ignore_errors=True)

    def save(self, snapshot: Snapshot) -> None:
        """Copy now, write in the background. Waits for the one before, and raises its error.

        All processes come here, and to `wait`, together.
        """
        self.wait()
        if snapshot.step == self._newest:  # known to every process without asking the others
            return
        self._newest = snapshot.step
        hidden = hidden_path(self.run, snapshot.step)
        if isinstance(self.processes, Several) and self.processes.sharded:
            parts = [(hidden, snapshot.weights), (hidden / OPTIMISER_FOLDER, snapshot.optimiser)]
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
            if (self.run / TOKENIZER_FILE).exists():
                shutil.copyfile(self.run / TOKENIZER_FILE, hidden / TOKENIZER_FILE)
            write_state(hidden, snapshot.step, snapshot.state)
            hidden.rename(checkpoint_path(self.run, snapshot.step))
            flush(hidden.parent)
            self._prune()
        except (OSError, SafetensorError, CheckpointException) as error:
            shutil.rmtree(hidden, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error).strip()
            raise FileError(
                f"{checkpoint_path(self.run, snapshot.step)}: the checkpoint could not be written "
                f"({reason}). Earlier ones are whole: make room, then go on with "
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
                shutil.rmtree(hidden, ignore_errors=True)

    def latest(self) -> tuple[int, list[str]] | None:
        """The newest step whose files are all as they were written, and what was wrong above."""
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
        """Rename those that were damaged, so that they are neither kept as the last nor in the way
        of the ones that will be written again."""
        if self.processes.is_first:
            for later in list_steps(self.run):
                if later > step:
                    aside = damaged_path(self.run, later)
                    shutil.rmtree(aside, ignore_errors=True)
                    checkpoint_path(self.run, later).rename(aside)

    def load(
        self, step: int, weights: Mapping[str, Tensor], optimiser: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Fill live tensors in place; returns the plain state."""
        folder = checkpoint_path(self.run, step)
        self._newest = step
        fill(weights, folder, self.processes)
        fill(optimiser, folder / OPTIMISER_FOLDER, self.processes)
        return read_state(folder)


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
        (folder / OPTIMISER_FOLDER).mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        save_file(optimiser, folder / OPTIMISER_FOLDER / OPTIMISER_FILE)

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
