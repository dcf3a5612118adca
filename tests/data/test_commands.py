"""The commands from end to end on the built-in corpus: train, compare, prepare, inspect."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

import pytest

from parcae.commands import data, tokenizer
from parcae.config import ConfigError
from parcae.data.shards import ShardedDocuments, read_manifest
from parcae.files import FileError


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    data.register(subparsers)
    tokenizer.register(subparsers)
    parsed = parser.parse_args([str(argument) for argument in arguments])
    return parsed.run(parsed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    texts = [
        f"Document {i} says that {i} loops are {i % 7} more than before.\n" for i in range(400)
    ]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(lines)
    return folder


@pytest.mark.slow
def test_from_text_to_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, vocabulary, out = folder / "texts.jsonl", folder / "t.json", folder / "shards"
    field = ("--text-field", "body")
    assert run("tokenizer", "train", source, "--size", "300", "--out", vocabulary, *field) == 0
    assert "300 entries" in capsys.readouterr().out

    assert run("tokenizer", "eval", vocabulary, "--on", source, *field) == 0
    assert "300" in capsys.readouterr().out

    options = ("--tokenizer", vocabulary, "--validation-fraction", "0.1")
    assert run("data", "prepare", source, "--out", out, *options, *field) == 0
    printed = capsys.readouterr().out
    held_out = len(ShardedDocuments.open(out, "validation", verify=True).lengths)
    kept = len(ShardedDocuments.open(out, verify=True).lengths)
    assert held_out + kept == 400
    assert str(held_out) in printed
    assert str(kept) in printed

    assert run("data", "inspect", out, "--context", "32", "--rows", "2", "--verify") == 0
    assert "all checksums of train are correct" in capsys.readouterr().out
    shard = out / "train-00000.shard"
    damaged = bytearray(shard.read_bytes())
    damaged[200] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(FileError, match="wrong checksum"):
        run("data", "inspect", out, "--verify")


def test_a_text_too_small_for_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("abab")
    run("tokenizer", "train", tmp_path / "a.txt", "--out", tmp_path / "t.json")
    assert "Use more text, or a smaller --size" in " ".join(capsys.readouterr().err.split())


def test_an_exchanged_tokenizer_is_noticed(folder: Path, tmp_path: Path) -> None:
    source, field = folder / "texts.jsonl", ("--text-field", "body")
    run("tokenizer", "train", source, "--size", "300", "--out", tmp_path / "t.json", *field)
    options = ("--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="--validation-fraction: cannot be combined with"):
        both = ("--validation", source, "--validation-fraction", "0.1")
        run("data", "prepare", source, *options, *field, *both)
    run("data", "prepare", source, *options, *field)
    run("tokenizer", "train", source, "--size", "259", "--out", tmp_path / "s.json", *field)
    (tmp_path / "out/tokenizer.json").write_bytes((tmp_path / "s.json").read_bytes())
    for verify in ((), ("--verify",)):
        with pytest.raises(FileError, match="not the tokenizer of these shards"):
            run("data", "inspect", tmp_path / "out", "--context", "32", *verify)


@pytest.mark.slow
def test_no_table_is_cut_off_in_a_pipe(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, field = folder / "texts.jsonl", ("--text-field", "body")
    names = [tmp_path / f"a-rather-long-folder/tokenizer-number-{i}.json" for i in range(3)]
    for name in names:
        run("tokenizer", "train", source, "--size", "280", "--out", name, *field)
    capsys.readouterr()
    run("tokenizer", "eval", *names, *(("--on", source) * 4), *field)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "a-rather-long-folder/tokenizer-number-2" in printed


def test_a_dataset_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown dataset"):
        run("data", "download", "fineweb", "--out", tmp_path)


def test_a_tokenizer_says_what_the_document_cap_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "book.txt.gz"
    text = " ".join(f"chapter{i}" for i in range(4000))
    source.write_bytes(gzip.compress(text.encode()))
    options = ("tokenizer", "train", source, "--size", "4000", "--out", tmp_path / "t.json")
    assert run(*options) == 0
    message = " ".join(capsys.readouterr().err.split())
    cut = len(text) - 10_000
    assert f"--document-cap 10000 cut {cut:,} (" in message
    assert "from 1 of 1 document." in message
    assert "--document-cap 0 uses whole documents" in message
    assert "Use more text" not in message

    assert run(*options, "--document-cap", "0") == 0
    assert "cut" not in capsys.readouterr().err


def test_the_limit_of_characters_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--text-field", "body", "--size", "300", "--characters", "90")
    source = folder / "texts.jsonl"
    assert run("tokenizer", "train", source, "--out", tmp_path / "t.json", *options) == 0
    message = " ".join(capsys.readouterr().err.split())
    assert "after 90 characters, the limit of --characters" in message
    assert "Raise --characters" in message


def test_one_document_cannot_be_held_out_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, vocabulary = tmp_path / "novel.txt", tmp_path / "t.json"
    text.write_text("It was a dark and stormy night.\n" * 9)
    run("tokenizer", "train", text, "--size", "270", "--out", vocabulary)
    run("data", "prepare", text, "--tokenizer", vocabulary, "--out", tmp_path / "shards")
    message = capsys.readouterr().err
    assert "split it with --separator or --document-start" in message
    assert "Increase" not in message


def test_separated_texts_from_a_file_to_shards(tmp_path: Path) -> None:
    source, vocabulary, out = tmp_path / "stories.txt", tmp_path / "t.json", tmp_path / "shards"
    stories = [f"Story {i} is about {i % 5} loops.\n" for i in range(50)]
    source.write_text("<|endoftext|>\n".join(stories))
    separator = ("--separator", "<|endoftext|>")
    assert run("tokenizer", "train", source, "--size", "300", "--out", vocabulary, *separator) == 0
    options = ("--tokenizer", vocabulary, "--validation-fraction", "0", *separator)
    assert run("data", "prepare", source, "--out", out, *options) == 0
    documents = ShardedDocuments.open(out)
    decode = documents.tokenizer().decode
    assert [decode(documents.tokens(i)[1:]) for i in range(len(documents.lengths))] == stories


@pytest.mark.slow
def test_a_separator_that_splits_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, vocabulary = tmp_path / "stories.txt", tmp_path / "t.json"
    source.write_text("<|endoftext|>\n".join(f"Story {i}.\n" for i in range(50)))
    for option in ("--separator", "--document-start"):
        note = f"{option[2:].replace('-', '_')}: '<eot>' splits the text file nowhere"
        wrong, out = (option, "<eot>"), tmp_path / option
        assert run("tokenizer", "train", source, "--size", "270", "--out", vocabulary, *wrong) == 0
        assert note in capsys.readouterr().err
        assert run("data", "prepare", source, "--tokenizer", vocabulary, "--out", out, *wrong) == 0
        assert note in capsys.readouterr().err
    right = ("--separator", "<|endoftext|>")
    assert run("tokenizer", "train", source, "--size", "270", "--out", vocabulary, *right) == 0
    assert "nowhere" not in capsys.readouterr().err
    lines = tmp_path / "lines.jsonl"  # several documents of another format do not hide it
    lines.write_text('{"text": "a"}\n{"text": "b"}\n')
    for separator in ("<eot>", "<|endoftext|>"):
        options = ("--separator", separator, "--tokenizer", vocabulary)
        assert (
            run("data", "prepare", source, lines, "--out", tmp_path / separator[1], *options) == 0
        )
        assert ("nowhere" in capsys.readouterr().err) == (separator == "<eot>")


def test_replaced_bytes_are_counted(folder: Path, tmp_path: Path, capsys) -> None:
    vocabulary = tmp_path / "t.json"
    run(
        "tokenizer",
        "train",
        folder / "texts.jsonl",
        "--size",
        "270",
        "--out",
        vocabulary,
        "--text-field",
        "body",
    )
    source, out = tmp_path / "latin.txt", tmp_path / "shards"
    source.write_bytes("für Jürgen\n".encode("latin1"))
    options = ("--tokenizer", vocabulary, "--out", out, "--validation-fraction", "0.999999")
    with pytest.raises(FileError, match="not UTF-8"):
        run("data", "prepare", source, *options)
    run("data", "prepare", source, *options, "--encoding-errors", "replace")  # in the same folder
    message = " ".join(capsys.readouterr().err.split())
    assert "2 characters of the text are U+FFFD" in message
    assert "none is left to train on" in message
    assert read_manifest(out)["replaced"] == 2


@pytest.mark.slow
def test_lines_that_separate_documents_are_found(folder, tmp_path, capsys):
    """Stories between lines of <|endoftext|>, as TinyStories has them: one document without
    --separator, which is refused; of several files each may be a document."""
    stories, vocabulary = tmp_path / "stories.txt", tmp_path / "t.json"
    stories.write_text("".join(f"Story {i}.\n<|endoftext|>\n" for i in range(200)))
    hint = f"{stories}: has lines '<|endoftext|>', but no separator is given."
    train = ("tokenizer", "train", stories, "--size", "270", "--document-cap", "100")
    assert run(*train, "--out", vocabulary) == 0
    assert hint in capsys.readouterr().err
    prepare = ("data", "prepare", stories, "--tokenizer", vocabulary)
    with pytest.raises(FileError, match=re.escape(hint)):
        run(*prepare, "--out", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    other = tmp_path / "story.txt"
    other.write_text("Another story.")
    held_out = ("--validation-fraction", "0.99999")
    assert run(*prepare[:3], other, *prepare[3:], *held_out, "--out", tmp_path / "two") == 1
    error = capsys.readouterr().err
    assert "none is left to train on" in error
    assert hint in error
    separated = ("--separator", "<|endoftext|>", "--validation-fraction", "0.1")
    assert run(*prepare, *separated, "--out", tmp_path / "all") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_an_option_that_was_given_is_not_recommended(folder, tmp_path, capsys):
    text, vocabulary, start = tmp_path / "a.txt", tmp_path / "t.json", ("--document-start", "^# ")
    text.write_text("One text without a heading. " * 50)
    train = ("tokenizer", "train", text, "--size", "270", "--document-cap", "100")
    assert run(*train, "--out", vocabulary, *start) == 0
    trained = capsys.readouterr().err
    fraction = ("--validation-fraction", "0")
    run(
        "data",
        "prepare",
        text,
        "--tokenizer",
        vocabulary,
        "--out",
        tmp_path / "s",
        *fraction,
        *start,
    )
    prepared = capsys.readouterr().err
    assert "document_start: '^# ' splits the text file nowhere" in trained
    assert "document_start: '^# ' splits the text file nowhere" in prepared
    assert "No documents are held out" in prepared
    for message in (trained, prepared):
        assert "--document-start" not in message
