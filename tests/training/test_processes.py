"""Two processes train what one does, sharded or copied, and read each other's checkpoints.

Runs that are compared are computed in float64; see test_optim_ranks.py for the reason.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parcae.config import ConfigError
from parcae.data.loader import Loader
from parcae.model import build, create
from parcae.model.looped import LoopedModel
from parcae.recipe import merge
from parcae.training import corpora, distributed, trainer
from parcae.training.corpora import open_corpora, prepare_corpora
from parcae.training.distributed import open_workers
from parcae.training.learner import Learner
from parcae.training.run import train
from parcae.training.settings import RunConfig, recipe_to_dict, resolve_recipe
from training import runs

pytestmark = pytest.mark.slow
STEPS = 20
TOLERANCE = 1e-9


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_rank(rank, size, port, function, arguments):
    torch.set_num_threads(1)
    if size:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in names.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    function(*arguments)


def together(size, function, *arguments):
    """Run a function in `size` processes as torchrun would; 0 is one process without it."""
    context, port = runs.clean_processes(), free_port()
    workers = [
        context.Process(target=as_rank, args=(rank, size, port, function, arguments))
        for rank in range(max(1, size))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def form_group(port, restart):
    """As torchrun's processes do, whose restarts share one store; rank 1 comes late."""
    names = {"TORCHELASTIC_USE_AGENT_STORE": True, "GROUP_WORLD_SIZE": 1}
    names |= {"TORCHELASTIC_RESTART_COUNT": restart, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in names.items()})
    if os.environ["RANK"] == "1":
        time.sleep(2 * restart)
    with open_workers(RunConfig(device="cpu")):
        torch.distributed.barrier()
        if restart == 0:
            os._exit(0)  # dies without a word


def test_a_restart_does_not_connect_to_processes_that_died():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    for restart in range(2):
        together(2, form_group, store.port, restart)


def go(recipe, out, resume=False, stop_after=None):
    if stop_after is not None:
        real = trainer.Trainer._train_step

        def one_step(run):
            real(run)
            if run.learner.step >= stop_after:
                os.kill(os.getpid(), 15)

        trainer.Trainer._train_step = one_step
    train(recipe, out, resume=resume)


def record_rows(path):
    """Append [step, row, its tokens] and [step, row, its depth] of this process's rows."""
    take, draw = Loader.__next__, LoopedModel.draw
    stream = path.open("a", buffering=1)

    def recorded_batch(loader):
        batch, step = take(loader), loader.step - 1
        rows = range(loader._rank, loader.config.global_batch, loader._world_size)
        for row, tokens in zip(rows, batch.inputs.tolist(), strict=True):
            stream.write(json.dumps([step, row, tokens]) + "\n")
        return batch

    def recorded_draw(model, seed, step, rows, length):
        drawn = draw(model, seed, step, rows, length)
        for row, depth in zip(rows, drawn["loops"].loops, strict=True):
            stream.write(json.dumps([step, row, depth]) + "\n")
        return drawn

    Loader.__next__, LoopedModel.draw = recorded_batch, recorded_draw


def go_in_float64(recipe, out, *arguments):
    runs.compute_in_float64()
    record_rows(out.with_suffix(".rows"))
    go(recipe, out, *arguments)


def rows_of(out):
    """Every row of every step with its tokens and its depth, whichever process it was on."""
    return sorted(set(out.with_suffix(".rows").read_text().splitlines()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, to hold the others to."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = runs.recipe(runs.write_text(folder), data={"global_batch": 8})
    together(0, go_in_float64, recipe, folder / "run")
    return recipe, folder / "run"


def with_parallel(recipe, kind):
    return runs.changed(recipe, run={"parallel": kind})


def assert_same_curve(out, reference, steps=STEPS):
    ours, theirs = runs.curve(out), runs.curve(reference)
    assert len(ours) == len(theirs) == steps
    for (step, *mine), (same, *yours) in zip(ours, theirs, strict=True):
        assert step == same
        assert mine == pytest.approx(yours, rel=TOLERANCE)
    losses = [line[1]["3"] for line in runs.lines(out, "validation", "losses")]
    assert losses == pytest.approx(
        [line[1]["3"] for line in runs.lines(reference, "validation", "losses")], rel=TOLERANCE
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_what_one_does(kind, alone, tmp_path):
    recipe, reference = alone
    together(2, go_in_float64, with_parallel(recipe, kind), tmp_path / "run")
    assert_same_curve(tmp_path / "run", reference)
    seen = runs.lines(tmp_path / "run", "telemetry", "state_norm")
    assert seen == [
        (step, pytest.approx(norm, rel=TOLERANCE))
        for step, norm in runs.lines(reference, "telemetry", "state_norm")
    ]


def test_two_processes_train_in_bfloat16_what_one_does_up_to_rounding(alone, tmp_path):
    mixed = {"run": {"precision": "bfloat16"}, "budget": {"steps": 4}}
    recipe = runs.changed(alone[0], **mixed)
    train(recipe, tmp_path / "one")
    for kind in ("ddp", "fsdp"):
        together(2, go, with_parallel(recipe, kind), tmp_path / kind)
        ours, theirs = runs.curve(tmp_path / kind), runs.curve(tmp_path / "one")
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(yours, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("fsdp", 2, 0), ("fsdp", 0, 2), ("ddp", 2, 0)]
)
def test_a_checkpoint_goes_on_with_another_number_of_processes(
    kind, before, after, alone, tmp_path
):
    recipe, reference = alone
    recipe = with_parallel(recipe, kind)
    together(before, go_in_float64, recipe, tmp_path / "run", False, 8)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
    together(after, go_in_float64, recipe, tmp_path / "run", True)
    assert_same_curve(tmp_path / "run", reference)
    assert rows_of(tmp_path / "run") == rows_of(reference)


def go_restarted(recipe, out):
    """As on two nodes of which only the second has counted the restart."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    go(recipe, out)


def test_processes_agree_that_torchrun_has_restarted_them(alone, tmp_path):
    recipe = runs.changed(with_parallel(alone[0], "ddp"), budget={"steps": 4})
    together(2, go, recipe, tmp_path / "run", False, 2)
    together(2, go_restarted, recipe, tmp_path / "run")
    assert [step for step, *_ in runs.curve(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_process_starts_from_the_same_weights(kind, alone, tmp_path):
    """Two processes from the weights of a run train what one does from them."""
    recipe, source = alone
    tables = recipe_to_dict(recipe) | {"budget": {"steps": 4}, "start": {"checkpoint": str(source)}}
    tuned = resolve_recipe(merge(tables, {"run": {"parallel": kind, "validate_every": 2}}))
    together(0, go_in_float64, tuned, tmp_path / "one")
    together(2, go_in_float64, tuned, tmp_path / "two")
    assert_same_curve(tmp_path / "two", tmp_path / "one", steps=4)
    assert runs.lines(tmp_path / "two", "validation", "losses")[0] == (
        0,
        {
            t: pytest.approx(x, rel=TOLERANCE)
            for t, x in runs.lines(source, "validation", "losses")[-1][1].items()
        },
    )


def test_depths_per_micro_batch_need_the_same_number_of_processes(alone, tmp_path, capfd):
    recipe = runs.changed(alone[0], model={"loop": {"draw_per": "micro-batch"}})
    together(2, go, recipe, tmp_path / "run", False, 2)
    with pytest.raises(ConfigError, match=r"model\.loop\.draw_per: .*, which was 2 and is 1"):
        train(recipe, tmp_path / "run", resume=True)


def test_a_sharded_checkpoint_is_a_model_that_loads(alone, tmp_path):
    import parcae

    recipe, reference = alone
    together(2, go_in_float64, with_parallel(recipe, "fsdp"), tmp_path / "run")
    ours = parcae.load(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}").state_dict()
    theirs = runs.weights(reference, STEPS)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=TOLERANCE) for name in theirs)


class Collectives(TorchDispatchMode):
    """Counts gathers and scatters by the number of elements of the whole."""

    def __init__(self):
        super().__init__()
        self.gathered, self.scattered = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if "allgather_base" in name:
            self.gathered.append(args[0].numel())
        if "reduce_scatter_base" in name:
            self.scattered.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def check_initial_weights(config, seed):
    """Shards of what one process would draw; never more than a block in one piece."""
    pieces, real = [], distributed.whole_parameters

    @contextmanager
    def whole_parameters(module):
        pieces.append(sum(p.numel() for p in module.parameters()))
        with real(module):
            yield

    distributed.whole_parameters = whole_parameters
    run = RunConfig(device="cpu", parallel="fsdp")
    with open_workers(run) as workers:
        model = build(config)
        workers.initialise(model, seed)
        alone = create(config, seed=seed).state_dict()
        assert set(alone) == set(model.state_dict())
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            assert p.to_local().numel() < alone[name].numel() or p.shape[0] == 1
            assert torch.equal(p.full_tensor(), alone[name]), name
        assert max(pieces) < sum(p.numel() for p in alone.values()) / 5


@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_shards_are_initialised_as_one_process_would(kind, tmp_path):
    text = runs.write_text(tmp_path)
    changes = {"core_layers": 4, "vocab_size": 97, **({} if kind == "parcae" else runs.RDM)}
    together(2, check_initial_weights, runs.recipe(text, model=changes).model, 7)


def count_gathers(recipe, out):
    with open_workers(recipe.run) as workers:
        if workers.is_first:
            prepare_corpora(recipe, out, lambda _: None)
        workers.barrier()
        learner = Learner(recipe, workers, open_corpora(recipe, out))
        learner.take_step(0.0)
        core = 2 * sum(p.to_local().numel() for p in learner.model.loop.parameters())
        with Collectives() as seen:
            learner.take_step(0.0)
        micro_steps = recipe.data.global_batch // workers.size // recipe.data.micro_batch
        assert micro_steps == 2
        padded = [n for n in seen.gathered if 0 <= n - core <= 2 * 64]
        assert len(padded) == micro_steps, (core, seen.gathered)
        assert len([n for n in seen.scattered if 0 <= n - core <= 2 * 64]) == 1
        learner.close()


def test_the_core_is_gathered_once_per_micro_step(tmp_path):
    text = runs.write_text(tmp_path)
    recipe = runs.recipe(
        text,
        model={"core_layers": 2, "loop": {"mean_loops": 5}},
        data={"global_batch": 8, "micro_batch": 2},
        run={"parallel": "fsdp"},
    )
    together(2, count_gathers, recipe, tmp_path / "run")


@pytest.mark.parametrize("rows", [4, 6])
def test_the_first_process_may_do_more_alone(rows, tmp_path):
    """Sampling is the first process's, and an odd number of validation batches is uneven."""
    recipe = runs.recipe(
        runs.write_text(tmp_path),
        budget={"steps": 3},
        run={
            "parallel": "fsdp",
            "validation_rows": rows,
            "sample_prompts": ["alpha", "beta"],
            "sample_tokens": 3,
        },
    )
    together(2, go, recipe, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "finished"
    assert len(result["samples"]) > 2


def go_slowly(recipe, out):
    distributed.TIMEOUT, distributed.POLL_SECONDS = timedelta(seconds=2), 0.1
    real = corpora.prepare_corpora

    def prepare(*arguments):
        time.sleep(6)
        real(*arguments)

    corpora.prepare_corpora = prepare
    train(recipe, out)


def test_the_others_wait_for_the_data_longer_than_for_a_collective(tmp_path):
    recipe = runs.recipe(runs.write_text(tmp_path), data={"global_batch": 8}, budget={"steps": 1})
    together(2, go_slowly, recipe, tmp_path / "run")
    assert len(runs.curve(tmp_path / "run")) == 1
