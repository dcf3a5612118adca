"""Files made by someone else, or damaged: one line about what is wrong, before memory is taken.

The same is tried with random changes in tests/fuzz.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import fake_runs
import parcae
from conftest import randomised, tiny
from model.test_golden import HEADER
from parcae import console, files
from parcae.cli import main
from parcae.config import ConfigError
from parcae.data.inspection import inspect
from parcae.data.preparation import prepare
from parcae.data.shards import HEAD, ShardedDocuments
from parcae.data.sources import find_files
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.perplexity import read_wikitext
from parcae.evaluation.tasks import read_items
from parcae.files import FileError
from parcae.laws.summary import markdown
from parcae.laws.table import read_table
from parcae.runs import best_checkpoint, read_status
from parcae.runs.checkpoints import verify_checkpoint, write_state
from parcae.runs.layout import checkpoint_path
from parcae.sweeps.folder import SweepFolder


@pytest.fixture
def model(tmp_path):
    return parcae.save(randomised(tiny()), tmp_path / "model")


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    text = folder / "text.txt"
    text.write_text("\n".join(f"words and numbers {i}" for i in range(200)))
    tokenizer = Tokenizer.train([text.read_text()], 300)
    prepare([text], tokenizer, folder / "shards", validation_fraction=0.0)
    return folder / "shards"


@pytest.fixture
def shards(prepared_once, tmp_path):
    return shutil.copytree(prepared_once, tmp_path / "shards")


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_model(folder, **changes):
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    change_json(path, model={**tree["model"], **changes})


def reseal(path, change):
    tree = json.loads(path.read_text())
    del tree["seal"]
    change(tree)
    files.write_sealed(path, tree)


@pytest.mark.parametrize(
    "change",
    [
        {"core_layers": 10**6},
        {"core_layers": 9_000},
        {"width": 2 * 10**9},
        {"context_length": 3 * 10**7},
        {"context_length": 10**12},
        {"vocab_size": 10**30},
        {"vocab_size": 10**400},
        {"value_layers": list(range(5))},
    ],
)
@pytest.mark.timeout(20)
def test_sizes_are_refused_before_they_take_memory(change, model):
    change_model(model, **change)
    with pytest.raises((ConfigError, FileError)) as error:
        parcae.load(model)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("change", [{"n_layers_in_prelude": 10**9}, {"vocab_size": 1e30}])
@pytest.mark.timeout(20)
def test_sizes_of_a_release_are_refused(change, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**HEADER, **change}))
    torch.save({"transformer.wte.weight": torch.zeros(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileError, match=next(iter(change)) + "|weights have 1 tensors"):
        parcae.load(tmp_path)


def test_a_pickle_is_neither_unpacked_nor_expanded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HEADER))
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transformer.wte.weight": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(FileError, match="not a dictionary of plain tensors"):
        parcae.load(tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(FileError, match="compressed"):
        parcae.load(tmp_path)


@pytest.mark.slow
def test_each_bit_of_a_pickle_may_be_wrong(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HEADER))
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transformer.wte.weight": torch.zeros(2, 2)}, path)
    whole = path.read_bytes()
    for place in range(0, 700, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(FileError):
            parcae.load(tmp_path)


def test_weights_of_eight_bits(model):
    path = model / "model.safetensors"
    weights = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}
    save_file(weights, path)
    with pytest.raises(FileError, match="float8_e4m3fn, not floats of 16, 32 or 64 bits"):
        parcae.load(model)


def test_a_file_named_as_a_shard(model):
    (model / "model.safetensors").unlink()
    (model / "shard-of-something.safetensors").write_text("text")
    with pytest.raises(FileError, match="shards of weights cannot be read"):
        parcae.load(model)


def test_a_shard_with_a_hostile_header(model):
    (model / "model.safetensors").unlink()
    (model / "shard-00001-of-00001.safetensors").write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(FileError, match="shards of weights cannot be read"):
        parcae.load(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[model]\nwidth = " + "9" * 5000, "not valid TOML"),
        ("[model]\nwidth = 0x" + "f" * 5000, "model.width: "),
        ("[model]\nwidth = " + "[" * 5000, "not valid TOML"),
        ("a" + ".a" * 5000 + " = 1", "nested more than 64"),
        ("#" * (2 << 20), "too many for a recipe"),
        ('[data]\nsources = ["x"]\nglobal_batch = 1000000000000', "data.global_batch"),
        ("[model]\nwidth = " + "{a = 1, b = [" + "'x'," * 9999 + "]}", "model.width: expected"),
    ],
)
def test_a_recipe_that_is_deep_or_huge(content, problem, tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    tables = {"model": "", "data": 'sources = ["x"]', "budget": "steps = 1"}
    others = [f"[{name}]\n{text}" for name, text in tables.items() if f"[{name}]" not in content]
    path.write_text("\n".join([content, *others]))
    assert main(["plan", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert len(line) < 1000


@pytest.mark.timeout(20)
def test_a_pipe_is_no_recipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "recipe.toml")
    for path in (tmp_path / "recipe.toml", "/dev/zero", tmp_path):
        assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(FileError, match="a pipe or a device"):
        files.read_json(tmp_path / "recipe.toml")


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 5000, "[" * 200 + "]" * 200])
def test_numbers_that_json_does_not_have(value, tmp_path):
    path = tmp_path / "sealed.json"
    path.write_text(f'{{"a": {value}, "seal": "0"}}')
    with pytest.raises(FileError):
        files.read_sealed(path, "Delete it.")


def test_a_vocabulary_has_a_largest_size(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("text")
    arguments = ["tokenizer", "train", str(tmp_path / "text.txt"), "--size", str(10**12)]
    assert main([*arguments, "--out", str(tmp_path / "tokenizer.json")]) == 2
    assert "size: 1,000,000,000,000 entries are too many" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tokenizer_with_a_pattern_that_never_ends(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(["hello world " * 50], 300).save(path)
    change_json(
        path, normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    )
    with pytest.raises(FileError, match="the tokenizer cannot encode this text"):
        Tokenizer.load(path).encode("a" * 40 + "b")


def test_a_token_outside_of_the_vocabulary(shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    path = shards / manifest["shards"]["train"][0]["file"]
    content = bytearray(path.read_bytes())
    content[len(HEAD) + 3] = 0xFF
    path.write_bytes(content)
    with pytest.raises(FileError, match="is not in the vocabulary of 300"):
        inspect(shards, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../outside"},
        {"file": "/etc/passwd"},
        {"file": "link"},
        {"file": 3},
        {"documents": 10**15},
        {"tokens": -1},
        {"bytes": "many"},
        {"unknown": 1},
    ],
)
def test_a_manifest_that_was_made_by_someone_else(change, shards):
    name = json.loads((shards / "manifest.json").read_text())["shards"]["train"][0]["file"]
    shutil.copyfile(shards / name, shards.parent / "outside")
    (shards / "link").symlink_to(shards.parent / "outside")
    reseal(shards / "manifest.json", lambda tree: tree["shards"]["train"][0].update(change))
    with pytest.raises(FileError):
        ShardedDocuments.open(shards, verify=True)


def test_the_type_of_tokens_is_one_of_two(shards):
    reseal(shards / "manifest.json", lambda tree: tree.update(dtype="O"))
    with pytest.raises(FileError, match="is none of tokens"):
        ShardedDocuments.open(shards)


def test_the_files_of_a_checkpoint_are_in_it(tmp_path):
    (tmp_path / "outside").write_text("text")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "outside")
    write_state(folder, 1, {})
    with pytest.raises(FileError, match="'link' is named as a file of it, but is not in it"):
        verify_checkpoint(folder)


def test_a_loss_that_is_no_number_chooses_no_checkpoint(tmp_path):
    checkpoints = [tmp_path / "a", tmp_path / "b"]
    for path, loss in zip(checkpoints, ("low", 3.0), strict=True):
        path.mkdir()
        (path / "state.json").write_text(json.dumps({"validation_loss": loss}))
    assert best_checkpoint(checkpoints) == checkpoints[1]


@pytest.mark.parametrize(
    "change",
    [{"status": "odd"}, {"status": None}, {"steps": "3"}, {"validation": {"x": {}}}],
)
def test_a_result_of_wrong_types(change, tmp_path):
    result = fake_runs.result(3)
    (tmp_path / "result.json").write_text(json.dumps({**result, **change}))
    with pytest.raises(FileError, match=r"result\.json: a value is missing or wrong"):
        read_status(tmp_path)
    del result["diagnosis"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(FileError, match="no 'diagnosis'"):
        read_status(tmp_path)


def test_files_of_a_sweep_of_wrong_types(tmp_path):
    folder = SweepFolder(tmp_path)
    wrong = r"sweep\.json: a value is missing or wrong"
    outside = r"'\.\./x' is named as a file of it, but is not in it"
    for runs, message in (([{"name": "x"}], wrong), (3, wrong), ([{"name": "../x"}], outside)):
        files.write_sealed(tmp_path / "sweep.json", {"format": 1, "runs": runs})
        with pytest.raises(FileError, match=message):
            folder.read_plan()
    for content in ("[]", '{"a": 1}'):
        (tmp_path / "failed.json").write_text(content)
        with pytest.raises(FileError, match="not an object of texts"):
            folder.read_failures()


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "a\x1b]0;title\x07\x9b2J.toml")]) == 2
    error = capsys.readouterr().err
    assert "a\\x1b]0;title\\x07\\x9b2J.toml" in error
    assert error.rstrip("\n").isprintable()
    with console.out.capture() as captured:
        console.print_text("\x1b[2Jtext\n")
        console.out.print("wrote \x1b[2J", highlight=False)
        console.out.print(console.table("\x1b[2J", ["a"], [["\x1b[2J"]]))
        console.print_text("name \u202efdp.exe, half a pair \ud800, \u2066 but emoji 👩‍👩‍👧")
    assert "\x1b" not in captured.get()
    assert "name \\u202efdp.exe, half a pair \\ud800, \\u2066 but emoji 👩‍👩‍👧" in captured.get()


@pytest.mark.slow
def test_names_in_a_summary_are_no_html(tmp_path):
    from parcae.experiments.paper_runs import paper_table

    result = parcae.fit(paper_table(("140m",)), starts=2, bootstrap_samples=0)
    name = "<script>alert(1)</script>"
    result.models[name] = result.models.pop(next(iter(result.models)))
    object.__setattr__(result.models[name], "model", name)
    assert "<script" not in markdown(result)


RECIPE = """
[data]
sources = ["builtin"]
global_batch = 4
[budget]
steps = 1
"""
LOADING = {
    "eval": ("eval", "RUN", "--val-data", "text.txt", "--out", "out"),
    "generate": ("generate", "RUN", "text"),
    "depth": ("depth", "RUN", "text"),
    "export": ("export", "RUN", "out"),
    "import": ("import", "CHECKPOINT", "out"),
    "serve": ("serve", "RUN", "--port", "0"),
    "train": ("train", "recipe.toml", "--start-from", "RUN", "--out", "out"),
}
"""Every command that loads a model."""


@pytest.fixture
def loading(tmp_path, monkeypatch):
    """Runs one of these commands on a model folder; none of them may get as far as to serve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parcae.serving.server.Server.run", lambda *_: pytest.fail("it serves"))
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def load(name, run, checkpoint):
        paths = {"RUN": str(run), "CHECKPOINT": str(checkpoint)}
        return main([paths.get(word, word) for word in LOADING[name]])

    return load


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADING)
def test_no_command_uses_a_changed_checkpoint(name, loading, tmp_path, capsys):
    run = tmp_path / "run"
    checkpoint = checkpoint_path(run, 2)
    parcae.save(randomised(tiny(vocab_size=300)), checkpoint)
    Tokenizer.train(["some text and more text " * 20], 300).save(checkpoint / "tokenizer.json")
    (run / "recipe.toml").write_text(RECIPE)
    write_state(checkpoint, 2, {})
    text = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(text.replace("50000.0", "10000.0"))
    assert text != (checkpoint / "config.json").read_text()
    assert loading(name, run, checkpoint) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("parcae: ")
    assert "config.json: damaged, its checksum differs" in error


@pytest.mark.parametrize("name", LOADING)
def test_no_command_runs_code_of_a_model(name, loading, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = {"model_type": "own-kind", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    assert loading(name, folder, folder) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("parcae: ")
    assert not (tmp_path / "executed").exists()


@pytest.mark.timeout(20)
def test_a_pipe_is_no_input(tmp_path):
    """It would be waited for forever."""
    names = ("tokenizer.json", "runs.csv", "runs.parquet", "tasks.jsonl", "text.txt", "merges.txt")
    for name in names:
        os.mkfifo(tmp_path / name)
    (tmp_path / "two").mkdir()
    (tmp_path / "merges.txt").rename(tmp_path / "two" / "merges.txt")
    (tmp_path / "two" / "vocab.json").write_text("{}")
    for read, name in (
        (Tokenizer.load, "tokenizer.json"),
        (Tokenizer.load, "two"),
        (read_table, "runs.csv"),
        (read_table, "runs.parquet"),
        (lambda path: read_items(path, "schema"), "tasks.jsonl"),
        (lambda path: find_files([path]), "text.txt"),
        (files.sha256, "text.txt"),
    ):
        with pytest.raises(FileError, match="a pipe or a device"):
            read(tmp_path / name)


def test_a_small_file_that_expands_to_a_large_one(tmp_path, monkeypatch):
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    monkeypatch.setattr("parcae.evaluation.tasks.LARGEST_FILE", 1000)
    for read in (lambda path: read_items(path, "schema"), read_wikitext):
        with pytest.raises(FileError, match=r"tasks\.jsonl\.gz: more than 0 MiB of data"):
            read(path)


def test_a_compressed_file_that_ends_too_early(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"some words " * 99)[:-9])
    for read in (read_wikitext, lambda path: DataFile(path, "test").sha256):
        with pytest.raises(FileError, match="not a complete gzip file"):
            read(path)


def test_a_name_with_a_line_break_is_shown_in_one_line(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "a\nparcae: all is well.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a\\nparcae: all is well.toml" in line
