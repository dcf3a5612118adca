"""The readers of outside data: a small valid input of each, what is changed in it, and the call."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import torch
import zstandard
from PIL import Image
from safetensors.torch import load_file, save_file

import fake_runs
import parcae
from conftest import randomised, tiny
from fuzz import mutations as change
from model.test_golden import HEADER, release_name
from parcae.data import downloads, preparation
from parcae.data.inspection import inspect
from parcae.data.readers import read_documents
from parcae.data.shards import PreparedFolder, ShardedDocuments
from parcae.data.sources import Corpus, find_files
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation import zero_shot
from parcae.evaluation.item_scores import read_evaluation, scores_of_run
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.perplexity import read_passages, read_wikitext
from parcae.evaluation.results import Samples, format_record
from parcae.evaluation.tasks import read_items, read_lines
from parcae.experiments.paper_runs import paper_table
from parcae.experiments.reproduce import reproduce
from parcae.files import path_inside, write_json, write_sealed
from parcae.hub.export import export
from parcae.laws.table import read_table, write_table
from parcae.model import release_format
from parcae.recipe import build, merge, parse_flags, read_toml, write_toml
from parcae.report import page as report_page
from parcae.report.figures import LOOP, TRAINING
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
from parcae.sweeps.grid import Grid, plan_sweep
from parcae.training.settings import recipe_from_file, recipe_from_tree
from training import runs as training_runs

if TYPE_CHECKING:
    import h11
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
    writes: bool = False
    """Whether it changes files in its folder: it then reads a copy."""
    in_files: bool = True
    """Whether parcae reads the files itself."""


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


def read_sweep_recipe(folder: Path) -> None:
    plan_sweep(read_toml(folder / "recipe.toml"), Grid(mean_loops=(2,)))


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
    preparation.prepare([text], tokenizer(), folder / "shards", validation_fraction=0.0)
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


@copied
def write_unfinished(folder: Path) -> None:
    """A preparation that was stopped before its last file."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "shards").mkdir()
    work = preparation.Preparation(corpus(folder), tokenizer(), 200)
    state = preparation._begin(work, folder / "shards", lambda _update: None)
    preparation._write_parts(work, folder / "shards", state, lambda _update: None)


def corpus(folder: Path) -> Corpus:
    return Corpus(find_files([folder / "text.txt"]), validation_fraction=0.0)


def finish_preparation(folder: Path) -> None:
    preparation.write_shards(
        preparation.Preparation(corpus(folder), tokenizer(), 200), folder / "shards"
    )


def write_download(folder: Path) -> None:
    file = downloads.RemoteFile("data/a.parquet", 3, "0" * 64)
    dataset = downloads.Dataset("owner/name", "data", "main", "c0ffee", (file, file))
    write_sealed(folder / downloads.RECORD, dataclasses.asdict(dataset))


def read_download(folder: Path) -> None:
    """As `download` does, up to the transfer."""
    dataset = downloads._read_record(folder, "owner/name", "data", None)
    assert dataset is not None
    for file in dataset.files:
        path = path_inside(folder, file.path)
        if path.exists():
            downloads.is_intact(path, file)


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


def write_indexed(folder: Path) -> None:
    write_exported(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(file_of.values()):
        part = {name: tensor for name, tensor in weights.items() if file_of[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


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


@copied
def write_started(folder: Path) -> None:
    """A run that was stopped after its second step."""
    text = training_runs.write_text(folder)
    tree = merge(training_runs.TREE, {"data": {"sources": [str(text)]}})
    changes = {"validate_every": 1, "telemetry_every": 1, "checkpoint_every": 1, "keep_last": 1}
    parcae.train(merge(tree, {"budget": {"steps": 2}, "run": changes}), out=folder / "run")
    (folder / "run" / "result.json").unlink()


def resume(folder: Path) -> None:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        parcae.train(folder / "run", resume=True)


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


def read_report(folder: Path) -> None:
    """All of a report but the rendering of its figures."""
    runs = [read_run(folder)]
    with mock.patch("parcae.report.figures.finish"):
        for draw in (*TRAINING, *LOOP):
            draw(runs, "step")
    report_page.page(runs, [], [], [], folder, "step").encode(errors="backslashreplace")
    parcae.compare(folder).format("csv")


def read_tokenizer(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    loaded.encode("aé ﷺ中" * 200)
    ids = loaded.encode("some words, and 12 numbers \n\n éè")
    loaded.decode(ids)
    step = loaded.decode_stream()
    for number in ids:
        step(number)
    _ = loaded.sha256, loaded.bos, loaded.token_bytes, loaded.token_dtype


def write_two_files(folder: Path) -> None:
    """A tokenizer as GPT-2's."""
    model = json.loads(tokenizer().content)["model"]
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))


def write_chat(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}{% endif %}"
        "{{ m['content'] | trim }}{{ '\\n' * 2 }}{% endfor %}"
    )
    for name in ("a", "b"):
        (folder / name).mkdir()
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    config["chat_template"] = [{"name": "default", "template": template}]
    write_json(folder / "a" / "tokenizer_config.json", config)
    (folder / "b" / "chat_template.jinja").write_text(template)


def read_chat(folder: Path) -> None:
    from parcae.serving.models import ChatTemplate
    from parcae.serving.protocol import ApiError, Message

    for name in ("a", "b"):
        chat = ChatTemplate.read(folder / name, tokenizer())
        with contextlib.suppress(ApiError):  # as a request that is refused
            chat.encode([Message(role="user", content="some words")])


def write_runs_table(folder: Path) -> None:
    for ending in ("csv", "tsv", "parquet"):
        write_table(folder / f"runs.{ending}", paper_table(("140m",)))


def read_runs_table(folder: Path) -> None:
    for ending in ("csv", "tsv", "parquet"):
        read_table(folder / f"runs.{ending}")


@copied
def write_fit(folder: Path) -> None:
    parcae.fit(paper_table(("140m",)), starts=20, bootstrap_samples=20).save(folder, figures=False)


def read_fit(folder: Path) -> None:
    parcae.predict(folder, flops=1e19, loss=3.0, loops=4, tokens=1e9)


TASK_ROWS: dict[str, tuple[Callable[[Path], object], dict[str, object]]] = {
    "multiple_choice": (
        lambda p: read_items(p, "multiple_choice"),
        {"query": "q", "choices": ["a", "b"], "gold": 1},
    ),
    "schema": (
        lambda p: read_items(p, "schema"),
        {"context_options": ["a", "b"], "continuation": "c", "gold": 0},
    ),
    "language_modeling": (
        lambda p: read_items(p, "language_modeling"),
        {"context": "a", "continuation": "b"},
    ),
    "passages": (read_passages, {"context": "a", "continuation": "b"}),
    "own": (
        lambda p: read_lines(p, zero_shot._own),
        {"question": "q", "choices": ["a", "b"], "answer": "a"},
    ),
    "arc": (
        lambda p: read_lines(p, zero_shot._arc),
        {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
    ),
    "piqa": (
        lambda p: read_lines(p, zero_shot._piqa),
        {"goal": "g", "sol1": "a", "sol2": "b", "label": 1},
    ),
    "sciq": (
        lambda p: read_lines(p, zero_shot._sciq),
        {"support": "s", "question": "q", "choices": ["a", "b"], "gold": 0},
    ),
}
"""By name of a file: its reader, and a row of it."""


def write_tasks(folder: Path) -> None:
    for name, (_, row) in TASK_ROWS.items():
        (folder / f"{name}.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    (folder / "wiki.raw.gz").write_bytes(gzip.compress(b"\n = Title = \n\n some words \n" * 5))


def read_tasks(folder: Path) -> None:
    for name, (read, _) in TASK_ROWS.items():
        read(folder / f"{name}.jsonl")
    wikitext = folder / "wiki.raw.gz"
    read_wikitext(wikitext)
    _ = DataFile(wikitext, "test").sha256


def write_evaluation(folder: Path) -> None:
    common = {"seed": None, "data": "d0", "loops": [1, 4]}
    nats = {"nats": [3.0, None], "lost": [1]}
    records: list[dict[str, object]] = [
        {"task": "copa", **common, "seed": 1, "index": 0, "credit": [1, 0.5]},
        {"task": "copa", **common, "seed": 1, "index": 1, "loops": [1], "credit": [1]},
        {"task": "lambada", **common, "index": 0, "greedy": [True, False], "nats": [1.0, 2.0]},
        {"task": "val", **common, "index": 0, "rows": 2, "tokens": 3, "bytes": None, **nats},
    ]
    place = {"task": "wikitext", **common, "document": 0, "words": 2, "tokens": 3}
    records += [{**place, "index": i, "nats": [1.0, 2.0], "bytes": 9 * (1 - i)} for i in range(2)]
    (folder / "samples.jsonl").write_text("".join(f"{format_record(r)}\n" for r in records))
    suites = {"wikitext": {"sha256": "d0", "scored": 2, "by_loops": {"1": {}}}}
    result = {"checkpoint": "x", "looped": True, "loops": [1, 4], "context_length": 8}
    write_json(folder / "result.json", {**result, "suites": suites, "mean_loops": 4})
    write_sealed(folder / "settings.json", {"model": "m", "loops": [1, 4]})


def read_samples(folder: Path) -> None:
    read_evaluation(folder)
    samples = Samples(folder, {"model": "m", "loops": [1, 4]})
    samples.all()
    samples.sort()


def write_results(folder: Path) -> None:
    curve = {"step": [1, 2], "loss": [3.0, 2.5]}
    names = ("state_norm", "transition_norm", "input_norm", "readout_norm", "readout_expansion")
    telemetry = {"step": [1, 2], **{name: [1.0, 2.0] for name in names}}
    rows = [
        {
            "key": f"{draw}{seed}", "draw": draw, "seed": seed, "core_minutes": 1.5,
            "status": "finished", "losses": {"1": 3.0, "8": 2.5, "24": None}, "spikes": 0,
            "training": curve, "telemetry": telemetry, "state_norms": [1.0, 2.0],
        }
        for draw in ("with", "without")
        for seed in range(3)
    ]  # fmt: skip
    tree = {"experiment": "prelude-norm", "planned": 6, "runs": rows}
    write_json(folder / "results" / "prelude-norm.json", tree)
    (folder / "results" / "notes.md").write_text("Some notes.\n")


def judge_results(folder: Path) -> None:
    """Claims, table and page; figures are drawn, but not rendered, which takes a second."""
    pixel = Image.new("RGB", (1, 1))
    with mock.patch(
        "matplotlib.figure.Figure.savefig", lambda _, out, format: pixel.save(out, format)
    ):
        reproduce(
            "prelude-norm", scale="toy", out=folder / "out", results=folder / "results", redraw=True
        )


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
    (folder / "d.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "e.txt.zst").write_bytes(zstandard.compress(TEXT.encode()))
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


def write_http(folder: Path) -> None:
    """Requests with everything that is decided before their bodies are read."""
    body = json.dumps(BODIES["completions"])
    head = [
        "POST /v1/completions?a=b HTTP/1.1",
        "Host: localhost:8000",
        "Origin: http://localhost:8000",
        "Authorization: Bearer key",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Accept: */*",
    ]
    (folder / "post").write_text("\r\n".join(head) + "\r\n\r\n" + body, newline="")
    lines = ["GET /v1/models/tiny HTTP/1.1", *head[1:4]]
    (folder / "get").write_text("\r\n".join(lines) + "\r\n\r\n", newline="")


def send_http(folder: Path) -> None:
    """Parse as uvicorn does, without a socket; what its parser refuses never reaches us."""
    import h11

    for name in ("post", "get"):
        connection = h11.Connection(h11.SERVER)
        connection.receive_data((folder / name).read_bytes())
        body = b""
        try:
            request = connection.next_event()
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            continue
        if isinstance(request, h11.Request) and isinstance(event, h11.EndOfMessage):
            status, answer = asyncio.run(answer_of(request, body))
            if not 200 <= status < 500 or not answer:
                raise AssertionError(f"{status}: {answer[:300]!r}")


async def answer_of(request: h11.Request, body: bytes) -> tuple[int, bytes]:
    path, _, query = request.target.partition(b"?")
    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": request.method.decode(),
        "path": unquote(path.decode("ascii")), "raw_path": path, "query_string": query,
        "headers": [(key.lower(), value) for key, value in request.headers],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    received = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if not received:
            await asyncio.Event().wait()  # the client waits for its answer
        return received.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await client().app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def load(folder: Path) -> None:
    parcae.load(folder)


JSONL_GZ = change.compressed(change.json_lines, gzip.compress, gzip.decompress)
TEXT_GZ = change.compressed(change.flip_bytes, gzip.compress, gzip.decompress)
TEXT_ZST = change.compressed(change.flip_bytes, zstandard.compress, zstandard.decompress)

TARGETS = (
    Target("recipe", write_recipe, lambda f: recipe_from_file(f / "recipe.toml"),
           {"recipe.toml": change.toml_file}, 3),
    Target("recipe of a sweep", write_recipe, read_sweep_recipe,
           {"recipe.toml": change.toml_file}, 0.3),
    Target("flags", write_flags, read_flags, {"flags": change.flip_bytes}, 3, in_files=False),
    Target("documents", write_documents, read_sources,
           {"a.jsonl": change.json_lines, "b.txt": change.flip_bytes,
            "c.parquet": change.flip_bytes, "d.jsonl.gz": JSONL_GZ, "e.txt.zst": TEXT_ZST}, 3),
    Target("download", write_download, read_download,
           {downloads.RECORD: change.sealed_file}, 1),
    Target("preparation", write_unfinished, finish_preparation,
           {"shards/progress.json": change.sealed_file}, 0.5, writes=True),
    Target("manifest", write_shards, read_manifest, {"manifest.json": change.sealed_file}, 3),
    Target("shard", write_shards, read_shard, {"shard": change.flip_bytes}, 1),
    Target("tokenizer", write_model, read_tokenizer, {"tokenizer.json": change.tokenizer_file}, 2),
    Target("tokenizer in two files", write_two_files, read_tokenizer,
           {"vocab.json": change.json_file, "merges.txt": change.flip_bytes}, 1),
    Target("config", write_model, load, {"config.json": change.json_file}, 3),
    Target("weights", write_model, load, {"model.safetensors": change.safetensors_file}, 3),
    Target("sharded weights", write_sharded, load,
           {"shard-00001-model-00001-of-00001.safetensors": change.safetensors_file}, 1),
    Target("release", write_release, load,
           {"config.json": change.json_file, "pytorch_model.bin": change.zip_file}, 0.5),
    Target("exported", write_exported, load,
           {"config.json": change.json_file, "model.safetensors": change.safetensors_file}, 2),
    Target("indexed weights", write_indexed, load,
           {"model.safetensors.index.json": change.json_file,
            "part-1.safetensors": change.safetensors_file}, 1),
    Target("checkpoint", write_checkpoint, read_checkpoint,
           {"checkpoints/step-2/state.json": change.state_file}, 0.3),
    Target("resumed run", write_started, resume,
           {"run/checkpoints/step-00000002/state.json": change.state_file}, 0.1, writes=True),
    Target("run", write_run, read_results,
           {"result.json": change.json_file, "metrics.jsonl": change.json_lines,
            "recipe.toml": change.toml_file}, 2),
    Target("report", write_run, read_report,
           {"result.json": change.json_file, "metrics.jsonl": change.json_lines}, 0.1),
    Target("tasks", write_tasks, read_tasks,
           {**{f"{name}.jsonl": change.json_lines for name in TASK_ROWS},
            "wiki.raw.gz": TEXT_GZ}, 3),
    Target("evaluation", write_evaluation, read_samples,
           {"result.json": change.json_file, "settings.json": change.sealed_file,
            "samples.jsonl": change.sample_lines}, 1.5, writes=True),
    Target("sweep", write_sweep, read_sweep,
           {"sweep.json": change.sealed_file, "failed.json": change.json_file,
            "jobs.json": change.json_file, "runs/a/result.json": change.json_file,
            "runs/a/evaluation/result.json": change.json_file}, 1.5),
    Target("runs table", write_runs_table, read_runs_table,
           {"runs.csv": change.csv_file, "runs.tsv": change.flip_bytes,
            "runs.parquet": change.flip_bytes}, 1),
    Target("fit", write_fit, read_fit, {"fit.json": change.sealed_file}, 0.2),
    Target("results", write_results, judge_results,
           {"results/prelude-norm.json": change.json_file, "results/notes.md": change.flip_bytes},
           0.05, writes=True),
    Target("chat template", write_chat, read_chat,
           {"a/tokenizer_config.json": change.json_file,
            "b/chat_template.jinja": change.flip_bytes}, 1),
    Target("requests", write_requests, send_requests,
           {f"{path.replace('/', '-')}.json": change.json_file for path in BODIES}, 0.5,
           in_files=False),
    Target("http", write_http, send_http,
           {"post": change.http_request, "get": change.http_request}, 1, in_files=False),
)  # fmt: skip
