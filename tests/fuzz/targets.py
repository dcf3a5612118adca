"""The readers of outside data: a small valid input of each, what is changed in it, and the call."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet
import torch

import fake_runs
import parcae
from conftest import randomised, tiny
from fuzz import mutations as change
from model.test_golden import HEADER, release_name
from parcae.data.inspection import inspect
from parcae.data.preparation import prepare
from parcae.data.readers import read_documents
from parcae.data.shards import PreparedFolder, ShardedDocuments
from parcae.data.sources import find_files
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.item_scores import scores_of_run
from parcae.evaluation.tasks import READERS, read_items
from parcae.experiments.paper_runs import paper_table
from parcae.files import write_json, write_sealed
from parcae.hub.export import export
from parcae.laws.table import read_table, write_table
from parcae.model import release_format
from parcae.recipe import build, parse_flags, write_toml
from parcae.report.runs import read_run
from parcae.runs import (
    best_checkpoint,
    last_step,
    list_checkpoints,
    read_metrics,
    read_result,
    read_status,
)
from parcae.runs.checkpoints import last_state, write_state
from parcae.runs.layout import checkpoint_path
from parcae.sweeps.folder import SweepFolder
from parcae.training.settings import recipe_from_file, recipe_from_tree

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

TEXT = "".join(f"### part {i}\nsome words, and numbers such as {i * i}\n" for i in range(40))


@dataclass(frozen=True)
class Target:
    """A reader of files from outside."""

    name: str
    write: Callable[[Path], object]
    """Writes a valid input into a folder."""
    read: Callable[[Path], object]
    files: Mapping[str, change.Mutation]
    """By the name of a file in the folder: how it is changed."""
    weight: float = 1.0
    """Its share of the cases of a campaign."""


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 300)


def copied(write: Callable[[Path], object]) -> Callable[[Path], object]:
    """`write`, done once in a process, then copied."""

    @functools.cache
    def once() -> tempfile.TemporaryDirectory:
        folder = tempfile.TemporaryDirectory(prefix="parcae-fuzz-input-")
        write(Path(folder.name))
        return folder

    return lambda folder: shutil.copytree(once().name, folder, dirs_exist_ok=True)


def write_recipe(folder: Path) -> None:
    tree = fake_runs.recipe(data={"sources": ["builtin"], "weights": [1.0], "micro_batch": 2})
    (folder / "recipe.toml").write_text(write_toml(tree))


def write_flags(folder: Path) -> None:
    flags = [
        "--model.width",
        "64",
        "--model.heads",
        "2",
        "--data.sources=['a', 'b']",
        "--model.loop.mean_loops=2.5",
    ]
    (folder / "flags").write_text("\n".join(flags))


def read_flags(folder: Path) -> None:
    text = (folder / "flags").read_bytes().decode("utf-8", "surrogateescape")
    tree = parse_flags(text.split("\n"))
    build(parcae.ModelConfig, tree.get("model", {}))


@copied
def write_shards(folder: Path) -> None:
    text = folder.parent / f"{folder.name}.txt"
    text.write_text(TEXT)
    prepare([text], tokenizer(), folder / "shards", validation_fraction=0.0)
    text.unlink()
    for path in (folder / "shards").iterdir():
        if not path.name.startswith("."):
            path.rename(folder / path.name)
    shutil.rmtree(folder / "shards")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / manifest["shards"]["train"][0]["file"]).rename(folder / "shard")
    manifest["shards"]["train"][0]["file"] = "shard"
    del manifest["seal"]
    write_sealed(folder / "manifest.json", manifest)


def read_manifest(folder: Path) -> None:
    documents = ShardedDocuments.open(folder, verify=True)
    if "totals" in documents.manifest:
        PreparedFolder(folder, documents.manifest).table()


def read_shard(folder: Path) -> None:
    documents = ShardedDocuments.open(folder)
    for index in range(len(documents.lengths)):
        documents.tokens(index).sum()
    inspect(folder, 8)


def write_model(folder: Path) -> None:
    parcae.save(randomised(tiny(width=16, heads=2, vocab_size=300)), folder)
    tokenizer().save(folder / "tokenizer.json")


def write_sharded(folder: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    write_model(folder)
    weights = parcae.load(folder).state_dict()
    (folder / "model.safetensors").unlink()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(dict(weights), storage_writer=writer, no_dist=True)
    next(folder.glob("shard-*")).rename(folder / "shard-00001-model-00001-of-00001.safetensors")


def write_release(folder: Path) -> None:
    config = release_format._translate(HEADER, {"value_tables.1.weight": torch.empty(0)}, (1, 3, 5))
    weights = {release_name(k): v.clone() for k, v in parcae.create(config).state_dict().items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    (folder / "config.json").write_text(json.dumps(HEADER))
    torch.save(weights, folder / "pytorch_model.bin")


@copied
def write_exported(folder: Path) -> None:
    write_model(folder / "model")
    export(folder / "model", folder / "exported")
    for path in (folder / "exported").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "exported")


def write_checkpoint(folder: Path) -> None:
    write_recipe(folder)
    for step, loss in ((1, 3.0), (2, 2.5)):
        checkpoint = checkpoint_path(folder, step)
        write_model(checkpoint)
        state = {"validation_loss": loss, "recipe": fake_runs.recipe(), "sources": [{"train": ""}]}
        write_state(checkpoint, step, state)
    checkpoint_path(folder, 2).rename(folder / "checkpoints" / "step-2")


def read_checkpoint(folder: Path) -> None:
    best_checkpoint(list_checkpoints(folder))
    if (state := last_state(folder)) is not None:
        recipe_from_tree(state["recipe"])
    parcae.open_checkpoint(folder / "checkpoints" / "step-2")
    parcae.load(folder, best=True)


def write_run(folder: Path) -> None:
    fake_runs.looped_run(folder, steps=6)
    result = json.loads((folder / "result.json").read_text())
    more = {"diagnosis": None, "processes": 1, "torch": "2", "samples": []}
    write_json(folder / "result.json", {**result, **more})


def read_results(folder: Path) -> None:
    read_status(folder)
    read_result(folder)
    last_step(folder)
    read_metrics(folder)
    read_run(folder)


def read_tokenizer(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    ids = loaded.encode("some words, and 12 numbers \n\n éè")
    loaded.decode(ids)
    _ = loaded.sha256, loaded.bos, loaded.token_bytes, loaded.token_dtype


def write_runs_table(folder: Path) -> None:
    write_table(folder / "runs.csv", paper_table(("140m",)))


@copied
def write_fit(folder: Path) -> None:
    parcae.fit(paper_table(("140m",)), starts=20, bootstrap_samples=20).save(folder, figures=False)


def read_fit(folder: Path) -> None:
    parcae.predict(folder, flops=1e19, loss=3.0, loops=4, tokens=1e9)


def write_tasks(folder: Path) -> None:
    rows = {
        "multiple_choice": {"query": "q", "choices": ["a", "b"], "gold": 1},
        "schema": {"context_options": ["a", "b"], "continuation": "c", "gold": 0},
        "language_modeling": {"context": "a", "continuation": "b"},
    }
    for kind, row in rows.items():
        (folder / f"{kind}.jsonl").write_text(3 * (json.dumps(row) + "\n"))


def read_tasks(folder: Path) -> None:
    for kind in READERS:
        read_items(folder / f"{kind}.jsonl", kind)


def write_sweep(folder: Path) -> None:
    run = {"name": "a", "model": "m", "budget": 1e12, "settings": {}}
    run["recipe"] = fake_runs.recipe(data={"sources": [str(folder)]})
    write_sealed(folder / "sweep.json", {"format": 1, "runs": [run]})
    write_json(folder / "failed.json", {"a": "an error"})
    write_json(folder / "jobs.json", {"a": "12"})
    write_run(folder / "runs" / "a")
    evaluation = {"checkpoint": "x", "limit": None}
    evaluation["suites"] = {"val": {"by_loops": {"1": {"loss": 3.0}}}}
    write_json(folder / "runs" / "a" / "evaluation" / "result.json", evaluation)


def read_sweep(folder: Path) -> None:
    sweep = SweepFolder(folder)
    runs = sweep.read_plan()
    sweep.read_failures()
    sweep.read_jobs()
    sweep.rows(runs)
    for run in runs:
        scores_of_run(sweep.run_folder(run.name))


def write_documents(folder: Path) -> None:
    (folder / "a.jsonl").write_text(3 * (json.dumps({"text": "words", "id": 1}) + "\n"))
    (folder / "b.txt").write_text(TEXT)
    table = pyarrow.table({"text": ["some", "words"] * 20, "id": list(range(40))})
    pyarrow.parquet.write_table(table, folder / "c.parquet")


def read_sources(folder: Path) -> None:
    for _ in read_documents(find_files([folder])):
        pass


BODIES: dict[str, dict[str, object]] = {
    "completions": {
        "prompt": "def", "max_tokens": 2, "seed": 1, "temperature": 0.5, "top_p": 0.9, "n": 1,
        "stop": ["x"], "logprobs": 2, "stream": False, "num_loops": 2, "exit": "state:0.1",
    },
    "chat/completions": {
        "messages": [{"role": "user", "content": "def"}], "max_completion_tokens": 2, "seed": 1,
        "logprobs": True, "top_logprobs": 1, "num_loops": 2,
    },
    "trace": {"prompt": "def", "num_loops": 2, "top": 2, "position": 0},
}  # fmt: skip
"""Requests by their path below /v1."""


@functools.cache
def client() -> TestClient:
    """Of a server in this process that gives errors of its own on to us; it is never closed."""
    from fastapi.testclient import TestClient

    from serving_fixtures import make_app

    app = make_app(max_new_tokens=2, max_loops=2, max_choices=2, max_waiting=4, queue_seconds=5)
    return TestClient(app, base_url="http://localhost")


def write_requests(folder: Path) -> None:
    for path, body in BODIES.items():
        (folder / f"{path.replace('/', '-')}.json").write_text(json.dumps(body))


def send_requests(folder: Path) -> None:
    """Send those that were changed, or all."""
    texts = {path: (folder / f"{path.replace('/', '-')}.json").read_bytes() for path in BODIES}
    changed = {p: text for p, text in texts.items() if text != json.dumps(BODIES[p]).encode()}
    for path, text in (changed or texts).items():
        headers = {"Content-Type": "application/json"}
        answer = client().post(f"/v1/{path}", content=text, headers=headers)
        if answer.status_code not in (200, 400, 404, 413, 429) or not answer.content:
            raise AssertionError(f"{answer.status_code}: {answer.text[:300]}")
        if not changed and answer.status_code != 200:
            raise AssertionError(f"{path}: {answer.text[:300]}")


def load(folder: Path) -> None:
    parcae.load(folder)


TARGETS = (
    Target("recipe", write_recipe, lambda f: recipe_from_file(f / "recipe.toml"),
           {"recipe.toml": change.toml_file}, 3),
    Target("flags", write_flags, read_flags, {"flags": change.flip_bytes}, 3),
    Target("manifest", write_shards, read_manifest, {"manifest.json": change.sealed_file}, 3),
    Target("shard", write_shards, read_shard, {"shard": change.flip_bytes}, 1),
    Target("config", write_model, load, {"config.json": change.json_file}, 3),
    Target("weights", write_model, load, {"model.safetensors": change.safetensors_file}, 3),
    Target("sharded weights", write_sharded, load,
           {"shard-00001-model-00001-of-00001.safetensors": change.safetensors_file}, 1),
    Target("release", write_release, load,
           {"config.json": change.json_file, "pytorch_model.bin": change.zip_file}, 0.5),
    Target("exported", write_exported, load,
           {"config.json": change.json_file, "model.safetensors": change.safetensors_file}, 2),
    Target("checkpoint", write_checkpoint, read_checkpoint,
           {"checkpoints/step-2/state.json": change.state_file}, 0.3),
    Target("run", write_run, read_results,
           {"result.json": change.json_file, "metrics.jsonl": change.json_lines,
            "recipe.toml": change.toml_file}, 2),
    Target("tokenizer", write_model, read_tokenizer, {"tokenizer.json": change.json_file}, 2),
    Target("runs table", write_runs_table, lambda f: read_table(f / "runs.csv"),
           {"runs.csv": change.csv_file}, 1),
    Target("fit", write_fit, read_fit, {"fit.json": change.sealed_file}, 0.2),
    Target("tasks", write_tasks, read_tasks,
           {f"{kind}.jsonl": change.json_lines for kind in READERS}, 3),
    Target("sweep", write_sweep, read_sweep,
           {"sweep.json": change.sealed_file, "failed.json": change.json_file,
            "jobs.json": change.json_file, "runs/a/result.json": change.json_file,
            "runs/a/evaluation/result.json": change.json_file}, 1.5),
    Target("documents", write_documents, read_sources,
           {"a.jsonl": change.json_lines, "b.txt": change.flip_bytes,
            "c.parquet": change.flip_bytes}, 3),
    Target("requests", write_requests, send_requests,
           {f"{path.replace('/', '-')}.json": change.json_file for path in BODIES}, 0.5),
)  # fmt: skip
