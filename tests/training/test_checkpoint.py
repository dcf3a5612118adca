"""CheckpointWriter: which are kept, what writing costs training, and what damage does."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
import time

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_saver import save

from parcae import cli
from parcae.files import FileError
from parcae.recipe import write_toml
from parcae.runs import best_checkpoint, checkpoints, list_checkpoints
from parcae.runs.layout import checkpoint_path, list_steps
from parcae.training import checkpoint_writer as checkpoint
from parcae.training.checkpoint_writer import CheckpointWriter, Snapshot, SortedShardWriter
from parcae.training.distributed import Workers
from parcae.training.run import train
from parcae.training.settings import recipe_to_dict
from parcae.training.trainer import Trainer
from training import runs

CPU = Workers(torch.device("cpu"))


def snapshot(step, loss=None, size=10):
    weights = {"w": torch.full((size,), float(step))}
    state = {"validation_loss": loss, "other": [1, 2.5, None]}
    return Snapshot(step, weights, {"w.m": torch.zeros(size)}, {"format": "test"}, state)


def kept(store):
    store.wait()
    return list_steps(store.run)


def open_store(folder, keep_last=2, keep_best=True):
    return CheckpointWriter(folder, CPU, keep_last, keep_best)


def test_the_last_ones_are_kept(tmp_path):
    store = open_store(tmp_path, keep_last=3, keep_best=False)
    seen = []
    for step in (1, 2, 5, 8, 13):
        store.save(snapshot(step, loss=step))
        seen.append(kept(store))
    assert seen == [[1], [1, 2], [1, 2, 5], [2, 5, 8], [5, 8, 13]]


def test_the_best_one_outlives_the_last_ones(tmp_path):
    store = open_store(tmp_path)
    for step, loss in enumerate((3.0, 1.0, 2.0, None, 2.5, 1.5), start=1):
        store.save(snapshot(step, loss))
    assert kept(store) == [2, 5, 6]
    assert best_checkpoint(list_checkpoints(tmp_path)) == checkpoint_path(tmp_path, 2)
    store.save(snapshot(7, 0.5))
    assert kept(store) == [6, 7], "a better one takes its place"


def test_without_validation_there_is_no_best(tmp_path):
    store = open_store(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        store.save(snapshot(step))
    assert kept(store) == [3]
    assert best_checkpoint(list_checkpoints(tmp_path)) is None


@pytest.mark.slow
def test_the_best_of_a_run_survives(text, tmp_path, monkeypatch):
    """The validation of step 5 is made the best by hand."""
    real = Trainer._validate

    def validate(self):
        improved = real(self)
        if self.learner.step == 5:
            nominal, (_, losses) = self.recipe.model.loop.nominal_loops, self.last_validation
            losses[nominal] = type(losses[nominal])(0.001, 1.001, None)
            self.best_loss = 0.001
        return improved

    monkeypatch.setattr(Trainer, "_validate", validate)
    train(runs.recipe(text, budget={"steps": 12}), tmp_path / "run")
    assert list_steps(tmp_path / "run") == [5, 9, 12]


def test_a_copy_is_written_not_what_training_made_of_it(tmp_path):
    store, first = open_store(tmp_path), snapshot(1)
    hold = threading.Event()
    store._writer.submit(hold.wait)
    store.save(first)
    first.weights["w"].fill_(99.0)  # the next step
    hold.set()
    store.wait()
    target = {"w": torch.zeros(10)}
    store.load(1, target, {"w.m": torch.zeros(10)})
    assert target["w"].unique().tolist() == [1.0]


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(text, tmp_path, monkeypatch):
    plain, writing, enough = checkpoints.sha256, threading.Event(), threading.Event()
    during = []

    def slow(path):
        writing.set()
        enough.wait(timeout=60)
        return plain(path)

    real = Trainer._train_step

    def one_step(self):
        real(self)
        if writing.is_set() and not enough.is_set():
            during.append(self.learner.step)
            if len(during) == 3:
                enough.set()

    monkeypatch.setattr(checkpoints, "sha256", slow)
    monkeypatch.setattr(Trainer, "_train_step", one_step)
    quiet = {"checkpoint_every": 10, "validate_every": 0, "telemetry_every": 0}
    train(runs.recipe(text, budget={"steps": 20}, run=quiet), tmp_path / "run")
    assert len(during) == 3, "three steps were taken while a file was not finished"
    assert list_steps(tmp_path / "run") == [10, 20]


@pytest.mark.slow
def test_only_safetensors_and_json(text, tmp_path):
    train(runs.recipe(text, budget={"steps": 6}), tmp_path / "run")
    files = [p for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()]
    assert len(files) == 10
    assert {p.suffix for p in files} == {".safetensors", ".json"}
    for path in files:
        head = path.read_bytes()
        assert not head.startswith((b"PK", b"\x80")), f"{path} looks pickled"
        if path.suffix == ".json":
            json.loads(head)


@pytest.fixture
def stopped(text, tmp_path, monkeypatch):
    """A run that was ended after step 7, with checkpoints at 5 (the best) and 6 and 7."""
    real = Trainer._train_step

    class Killed(BaseException):
        pass

    def one_step(self):
        real(self)
        if self.learner.step == 7:
            self._save()
            self.checkpoints.wait()
            raise Killed

    recipe, run = runs.recipe(text, budget={"steps": 10}, run={"keep_last": 3}), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", one_step)
        with pytest.raises(Killed):
            train(recipe, run)
    assert list_steps(run) == [5, 6, 7]
    return recipe, run


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def change_a_number(path):
    """Still JSON, and still sensible."""
    content = json.loads(path.read_text())
    content["other"][1] += 1
    path.write_text(json.dumps(content))


DAMAGE = [
    ("model.safetensors", truncate, "model.safetensors: damaged"),
    ("model.safetensors", flip, "model.safetensors: damaged"),
    ("optimiser/state.safetensors", flip, "state.safetensors: damaged"),
    ("optimiser/state.safetensors", os.remove, "state.safetensors: missing"),
    ("config.json", os.remove, "config.json: missing"),
    ("tokenizer.json", flip, "tokenizer.json: damaged"),
    ("state.json", truncate, "not valid JSON"),
    ("state.json", change_a_number, "state.json: damaged"),
    ("state.json", os.remove, "state.json: missing"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damage_is_seen(name, damage, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"some": "thing"}')
    store = open_store(tmp_path)
    store.save(snapshot(3))
    store.save(snapshot(4))
    store.wait()
    assert store.latest() == (4, [])
    damage(checkpoint_path(tmp_path, 4) / name)
    step, (problem,) = store.latest()
    assert step == 3
    assert message in problem


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(stopped, text, tmp_path, capsys, one_thread):
    recipe, run = stopped
    truncate(run / "checkpoints" / "step-00000007" / "model.safetensors")
    flip(run / "checkpoints" / "step-00000006" / "optimiser" / "state.safetensors")
    result = train(recipe, run, resume=True)
    said = capsys.readouterr().out
    assert "step-00000007/model.safetensors: damaged" in said
    assert "step-00000006/optimiser/state.safetensors: damaged" in said
    assert "Resumed at step 5" in said
    assert result.status == "finished"
    store = open_store(run)
    assert list_steps(store.run) == [6, 9, 10], "6 is written again"
    assert store.latest() == (10, [])
    aside = sorted(path.name for path in (run / "checkpoints").glob("damaged-*"))
    assert aside == ["damaged-step-00000006", "damaged-step-00000007"]
    train(recipe, tmp_path / "whole")
    assert runs.curve(run) == runs.curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_newest_one_does_not_make_the_good_one_be_dropped(stopped):
    recipe, run = stopped
    truncate(run / "checkpoints" / "step-00000007" / "model.safetensors")
    recipe = runs.changed(recipe, run={"keep_last": 1, "keep_best": False})
    train(recipe, run, resume=True)
    assert open_store(run).latest() == (10, [])


@pytest.mark.slow
def test_where_all_are_damaged_there_is_an_error_and_nothing_is_lost(stopped, capsys):
    _, run = stopped
    for step in (5, 6, 7):
        truncate(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    before = sorted(run.rglob("*"))
    metrics = (run / "metrics.jsonl").read_bytes()
    assert cli.main(["train", "--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("parcae: no checkpoint can be used")
    assert error.count("\n") == 1
    assert sorted(run.rglob("*")) == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_leftovers_are_removed_and_strangers_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in (".step-00000003", "step-00000002-copy", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"half")
    store = open_store(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step-00000002-copy"]
    assert list_steps(store.run) == []
    assert store.latest() is None


def test_another_model_does_not_fit(tmp_path):
    store = open_store(tmp_path)
    store.save(snapshot(1))
    store.wait()
    with pytest.raises(FileError, match=r"w is \[10\], not \[4\]"):
        store.load(1, {"w": torch.zeros(4)}, {"w.m": torch.zeros(10)})
    with pytest.raises(FileError, match=r"missing v; left over w"):
        store.load(1, {"v": torch.zeros(10)}, {"w.m": torch.zeros(10)})


@pytest.fixture
def small_disk(tmp_path):
    """A file system with little room; made by root only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk(small_disk, text, tmp_path, capsys, one_thread):
    """Each checkpoint takes 0.8 MB, so a third does not fit while two are kept."""
    run, recipe = small_disk / "run", tmp_path / "recipe.toml"
    plan = runs.recipe(text, budget={"steps": 12}, run={"keep_best": False})
    recipe.write_text(write_toml(recipe_to_dict(plan)))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert "the checkpoint could not be written" in error
    assert "No space left on device" in error
    assert "--resume" in error
    store = open_store(run)
    assert list_steps(store.run) == [3, 6]
    assert store.latest() == (6, [])
    assert not list((run / "checkpoints").glob(".*")), "half a checkpoint would take the room"

    ballast.unlink()
    assert cli.main(["train", "--resume", str(run)]) == 0
    train(plan, tmp_path / "whole")
    assert runs.curve(run) == runs.curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_disk_that_is_full_for_the_log(text, tmp_path, capsys, monkeypatch):
    real = Trainer._train_step

    def one_step(self):
        if self.learner.step == 4:
            os.dup2(os.open("/dev/full", os.O_WRONLY), self.log._stream.fileno())
        real(self)

    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(write_toml(recipe_to_dict(runs.recipe(text))))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", one_step)
        assert cli.main(["train", str(recipe), "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "metrics.jsonl: cannot be written (No space left on device)" in error
    assert open_store(run).latest() == (3, [])
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert [line[0] for line in runs.lines(run, "train")] == list(range(1, 21))


@pytest.mark.slow
def test_a_failed_write_is_told_at_once(text, tmp_path, monkeypatch):
    """Not at the next checkpoint, which may be hours away."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reached = []
    real = Trainer._train_step

    def one_step(self):
        real(self)
        reached.append(self.learner.step)
        time.sleep(0.02)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    monkeypatch.setattr(Trainer, "_train_step", one_step)
    recipe = runs.recipe(text, budget={"steps": 60}, run={"checkpoint_every": 10})
    recipe = runs.changed(recipe, run={"validate_every": 0, "telemetry_every": 0})
    with pytest.raises(FileError, match="No space left"):
        train(recipe, tmp_path / "run")
    assert 10 <= max(reached) < 15


def fail_to_write(recipe, out, rank, port, log):
    """One of two processes; only the first, or with shards both, finds the disk full."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.save_tensors = full
    checkpoint.HuggingFaceStorageWriter.write_data = full
    try:
        train(recipe, out)
    except FileError as error:
        log.write_text(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_up_together(kind, text, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = runs.recipe(text, run={"parallel": kind, "keep_best": False})
    logs, context = [tmp_path / f"{rank}.log" for rank in range(2)], runs.clean_processes()
    workers = [
        context.Process(
            target=fail_to_write, args=(recipe, tmp_path / "run", rank, port, logs[rank])
        )
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    first, second = (log.read_text() for log in logs)
    assert "No space left on device" in first
    assert "another process" in second or "No space left on device" in second
    assert list_steps(tmp_path / "run") == []


def test_equal_shards_are_equal_files(tmp_path):
    tensors = {f"é{index}": torch.full((3, index), float(index)) for index in range(1, 6)}
    files = []
    for number in range(8):
        folder = tmp_path / str(number)
        save(tensors, storage_writer=SortedShardWriter(folder, save_distributed=True), no_dist=True)
        (path,) = folder.iterdir()
        files.append(path.read_bytes())
    assert len(set(files)) == 1
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert all(torch.equal(file.get_tensor(name), tensors[name]) for name in tensors)
