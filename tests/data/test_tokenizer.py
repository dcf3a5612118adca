"""The tokenizer: every string comes back, specials stay special, pieces change nothing."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.data.readers import read_documents
from parcae.data.sources import find_files
from parcae.data.tokenizer import SPECIALS, Tokenizer, safe_pieces
from parcae.data.tokenizer_training import compare_tokenizers, limit_characters, train_tokenizer
from parcae.files import FileError

AWKWARD = [
    "",
    "\0",
    "👩‍👩‍👧‍👦 zero-width \u200d\u200b\ufeff joiners",
    " \n \r\n\t  \n\nx  ",
    "don't DON'T we'LL ''' 1234567 ٣٤٥ Ⅷ ½",
    "漢字かな交じり文\u3000全角",
    "".join(map(chr, range(256))),
    "<|bos|><|eos|><|pad|> <|bos|>",
    "Ġ Ċ â",
]


def training_texts() -> list[str]:
    files = find_files(["builtin"])[:60]
    return [d.text for d in read_documents(files)] + AWKWARD


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(training_texts(), 1000)


def words(plain: tokenizers.Tokenizer, text: str) -> list[str]:
    parts = plain.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
    return [text[start:end] for _, (start, end) in parts]


def any_text() -> st.SearchStrategy[str]:
    lively = st.text(alphabet=" \n\r\t\u3000\x1c\x85aZé'’s1½9.-<|>_漢🙂\u0301\u200d", max_size=80)
    return st.one_of(st.text(st.characters(exclude_categories=["Cs"])), lively)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(text=any_text())
@example(text="".join(AWKWARD))
def test_every_string_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {0, 1, 2}
    assert tokenizer.bytes_per_token()[ids].sum() == len(text.encode())


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(text=any_text(), usual=st.integers(1, 12))
def test_pieces_give_the_ids_of_the_whole(tokenizer: Tokenizer, text: str, usual: int) -> None:
    pieces = list(safe_pieces(text, usual, longest=10**9))
    assert "".join(pieces) == text
    plain = tokenizers.Tokenizer.from_str(tokenizer.content)
    plain.encode_special_tokens = True
    assert [word for piece in pieces for word in words(plain, piece)] == words(plain, text)
    together = [number for piece in pieces for number in plain.encode(piece).ids]
    assert together == plain.encode(text).ids


@pytest.mark.slow
def test_long_real_text_in_pieces_gives_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    text = "".join(training_texts())
    assert len(list(safe_pieces(text))) > 20
    plain = tokenizers.Tokenizer.from_str(tokenizer.content)
    plain.encode_special_tokens = True
    assert tokenizer.encode(text) == plain.encode(text).ids


@pytest.mark.slow
def test_a_run_without_a_safe_place_is_cut_and_comes_back(tokenizer: Tokenizer) -> None:
    text = "x" * 300_000
    pieces = list(safe_pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 131_072
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_specials_have_fixed_ids_and_only_on_demand(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "a<|bos|>b <|eos|>\n<|pad|>"
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    for current in (tokenizer, Tokenizer.load(path)):
        assert current.bos == 0
        assert not set(current.encode(text)) & {0, 1, 2}
        assert [n for n in current.encode(text, allow_special=True) if n < 3] == [0, 1, 2]
        (document,) = current.encode_documents([text])
        assert document.tolist() == [0, *current.encode(text)]
        assert current.decode(current.encode(text, allow_special=True)) == text
    # what others do with the file: they find the specials unless told otherwise
    plain = tokenizers.Tokenizer.from_file(str(path))
    assert [plain.token_to_id(name) for name in SPECIALS] == [0, 1, 2]
    assert [n for n in plain.encode(text).ids if n < 3] == [0, 1, 2]
    plain.encode_special_tokens = True
    assert plain.encode(text).ids == tokenizer.encode(text)
    assert plain.encode_batch([text])[0].ids == tokenizer.encode(text)


@pytest.mark.slow
def test_transformers_reads_the_same_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in AWKWARD:
        assert fast.encode(text, split_special_tokens=True) == tokenizer.encode(text)
        assert fast.encode(text) == tokenizer.encode(text, allow_special=True)
        assert fast.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_the_split(tokenizer: Tokenizer) -> None:
    plain = tokenizers.Tokenizer.from_str(tokenizer.content)

    for expected in (
        ["Don", "'t", " we", "'LL", " it", "’s"],
        ["in", " ", "12", "34", "56", "7", " and", " ", "5"],
        ["say", ' "', "hi", '"!!\n\n', "next"],
        ["a", "  ", " b", "\n\n", " ", " c", "  "],
        ["x", ".y", "\t", "(z", ")"],
    ):
        assert words(plain, "".join(expected)) == expected


@pytest.mark.slow
def test_training_twice_gives_the_same_file(tokenizer: Tokenizer) -> None:
    """In another process too, where hash seeds differ."""
    code = (
        "import hashlib, sys; sys.path[:0] = sys.argv[1:];"
        "from test_tokenizer import Tokenizer, training_texts;"
        "content = Tokenizer.train(training_texts(), 1000).content;"
        "print(hashlib.sha256(content.encode()).hexdigest())"
    )
    folders = [str(Path(__file__).parent), *sys.path]
    other = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == hashlib.sha256(tokenizer.content.encode()).hexdigest()


def test_the_hash_is_of_the_content(tokenizer: Tokenizer) -> None:
    tree = json.loads(tokenizer.content)
    assert Tokenizer(json.dumps(tree)).sha256 == tokenizer.sha256
    tree["model"]["merges"][:2] = tree["model"]["merges"][1::-1]
    assert Tokenizer(json.dumps(tree)).sha256 != tokenizer.sha256


def test_its_text_names_size_and_hash(tokenizer: Tokenizer) -> None:
    expected = f"{tokenizer.vocab_size:,} entries, sha256 {tokenizer.sha256[:12]})"
    assert repr(tokenizer).endswith(expected)


def test_bytes_per_token(tokenizer: Tokenizer) -> None:
    table = tokenizer.bytes_per_token()
    assert table.shape == (tokenizer.vocab_size,) == (1000,)
    assert table[:3].tolist() == [0, 0, 0]
    assert (np.sort(table[3:259]) == 1).all()
    assert table[3:].min() == 1


def test_sizes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_dtype == np.dtype("<u2")
    assert Tokenizer.train(["abc"], 259).vocab_size == 259
    assert Tokenizer.train(["ab"], 5000).vocab_size == 260  # there is nothing more to merge
    with pytest.raises(ConfigError, match="size: 258 is too small"):
        Tokenizer.train(["abc"], 258)
    with pytest.raises(ConfigError, match="training texts are empty"):
        Tokenizer.train(["", ""], 300)


def test_budget() -> None:
    texts = ["aaaa", "bbbb", "cccc"]
    assert list(limit_characters(texts, 100, 0)) == texts
    assert list(limit_characters(texts, 100, 3)) == ["aaa", "bbb", "ccc"]
    assert list(limit_characters(texts, 5, 3)) == ["aaa", "bb"]
    assert list(limit_characters(texts, 4, 0)) == ["aaaa"]
    for characters in (float("nan"), float("inf"), -5, 0):
        with pytest.raises(ConfigError, match=r"characters: .* is out of range"):
            limit_characters(texts, characters, 0)
    with pytest.raises(ConfigError, match="document_cap: -5 is negative"):
        limit_characters(texts, 100, -5)


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such tokenizer"):
        Tokenizer.load(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(FileError, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path / "bad.json")

    (tmp_path / "empty.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    with pytest.raises(FileError, match=r"empty\.json: .*the vocabulary is empty"):
        Tokenizer.load(tmp_path / "empty.json")
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(FileError, match=r"vocab\.json: no such file"):
        Tokenizer.load(folder)
    for broken, problem in (
        ("{", r"vocab\.json: not valid JSON"),
        ("[1]", r"vocab\.json: ids must be from 0 to 2,097,151"),
        ('{"a": 4294967295, "b": 1, "ab": 2}', r"vocab\.json: ids must be from 0 to 2,097,151"),
        ('{"a": 0}', r"gpt2: vocab\.json and merges\.txt do not match"),
    ):
        (folder / "vocab.json").write_text(broken)
        with pytest.raises(FileError, match=problem):
            Tokenizer.load(folder)


def test_a_byte_level_vocabulary_without_all_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The library would drop what it cannot spell, and documents would come out empty."""
    tree = json.loads(tokenizer.content)
    tree["model"] |= {"vocab": {}, "merges": []}
    (tmp_path / "t.json").write_text(json.dumps(tree))
    with pytest.raises(FileError, match=r"t\.json: .*256 of the 256 bytes are missing"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_tokenizer_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    tokenizer.save(tmp_path / "t.json")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=r"t\.json: cannot be read \(Permission denied\)"):
        Tokenizer.load(tmp_path / "t.json")


def test_limits_of_other_programs_do_not_apply(tokenizer: Tokenizer) -> None:
    plain = tokenizers.Tokenizer.from_str(tokenizer.content)
    plain.enable_truncation(5)
    plain.enable_padding(length=64)
    limited = Tokenizer(plain.to_str())
    text = "a text of more than five tokens, and fewer than sixty-four"
    assert limited.encode(text) == tokenizer.encode(text)
    assert limited.encode(text, allow_special=True) == tokenizer.encode(text)
    assert [d.tolist() for d in limited.encode_documents(["a", text])] == [
        d.tolist() for d in tokenizer.encode_documents(["a", text])
    ]


@pytest.mark.parametrize("foreign", ["normalizer", "added token", "prefix space"])
def test_only_what_splits_as_ours_is_cut(tokenizer: Tokenizer, foreign: str) -> None:
    plain = tokenizers.Tokenizer.from_str(tokenizer.content)
    tree = json.loads(tokenizer.content)
    if foreign == "normalizer":
        plain.normalizer = tokenizers.normalizers.Replace("y z", "Q")  # type: ignore[assignment]
    elif foreign == "added token":
        plain.add_tokens(["y z"])
    if foreign == "prefix space":
        tree["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
        plain = tokenizers.Tokenizer.from_str(json.dumps(tree))
    text = "y z" * 40_000
    assert Tokenizer(plain.to_str()).encode(text) == plain.encode(text).ids


def test_gpt2_layout_and_comparison(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A folder with GPT-2's two files, here with our own small vocabulary in them."""
    model = json.loads(tokenizer.content)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    other = Tokenizer.load(tmp_path)
    text = "The same letters, split another way: 12345\n\n"
    assert other.decode(other.encode(text)) == text
    (tmp_path / "t.txt").write_text(text)
    (tmp_path / "u.txt").write_text("more")
    sources = [tmp_path / name for name in ("t.txt", "u.txt")]
    comparison = compare_tokenizers([tokenizer, other], sources)
    rows = comparison.sources
    assert [row.source for row in rows] == [*map(str, sources), "all"]
    assert rows[0].tokens == (len(tokenizer.encode(text)), len(other.encode(text)))
    assert rows[2].text_bytes == len(text) + 4
    assert rows[2].tokens[0] == rows[0].tokens[0] + rows[1].tokens[0]
    table = comparison.table()
    assert [(row["tokenizer"], row["source"]) for row in table[:2]] == [
        ("tokenizer", str(sources[0])),
        ("tokenizer", str(sources[1])),
    ]
    assert table[0]["bytes_per_token"] == len(text) / len(tokenizer.encode(text))


def test_training_on_files_equals_training_on_their_texts(tmp_path: Path) -> None:
    texts = ["some text to learn from", "and some more text to learn from"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    reported: list[tuple[str, float, float]] = []

    def report(activity: str, done: float, total: float) -> None:
        reported.append((activity, done, total))

    from_files = train_tokenizer([tmp_path], 280, document_cap=15, report=report)
    assert from_files.content == Tokenizer.train([text[:15] for text in texts], 280).content
    total = sum(map(len, texts))
    assert reported == [
        ("reading", len(texts[0]), total),
        ("reading", total, total),
        ("merging", total, total),
    ]


def test_the_library_decodes_a_stream(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂 text"
    stream = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer.backend_tokenizer, token) for token in tokenizer.encode(text)]
    assert "".join(piece or "" for piece in pieces) == text


def build(model: Any, **parts: Any) -> tokenizers.Tokenizer:
    plain = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(plain, name, part)
    plain.add_special_tokens(["<s>"])
    return plain


def usual_tokenizers() -> dict[str, tokenizers.Tokenizer]:
    """Of the kinds that published models have."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

    split = pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    letters = {letter: n for n, letter in enumerate(" ▁abcdefghijklmnopqrstuvwxyz<")}
    scores = [("<unk>", 0.0), *((letter, -1.0) for letter in letters)]
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    unicode = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    metaspace = pre_tokenizers.Metaspace("▁", "always")
    bpe = models.BPE(letters, [], unk_token="<")
    bytes_ = {"decoder": decoders.ByteLevel(), "post_processor": processors.ByteLevel()}
    return {
        "Qwen, SmolLM2": build(
            models.BPE(alphabet, []),
            normalizer=normalizers.NFC(),
            pre_tokenizer=pre_tokenizers.Sequence([split, pre_tokenizers.Digits(), level]),
            **bytes_,
        ),
        "RoBERTa": build(
            models.BPE(alphabet, []), pre_tokenizer=pre_tokenizers.ByteLevel(), **bytes_
        ),
        "CLIP": build(
            models.BPE(letters, [], unk_token="<", end_of_word_suffix="</w>"),
            normalizer=normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()]),
            pre_tokenizer=pre_tokenizers.Sequence([split, level]),
            decoder=decoders.BPEDecoder("</w>"),
        ),
        "Llama 2": build(
            bpe,
            normalizer=normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            ),
            decoder=decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            ),
        ),
        "Gemma": build(
            bpe,
            normalizer=normalizers.Replace(" ", "▁"),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
            decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
        ),
        "BERT": build(
            models.WordPiece(letters, unk_token="<", continuing_subword_prefix="##"),
            normalizer=normalizers.BertNormalizer(),
            pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
            decoder=decoders.WordPiece(),
        ),
        "XLNet": build(
            models.Unigram(scores, 0),
            normalizer=normalizers.Sequence([*quotes, *unicode, precompiled(), spaces]),
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace]),
            decoder=decoders.Metaspace(),
        ),
        "ligatures": build(
            bpe,
            normalizer=normalizers.Sequence(
                [normalizers.Replace(chr(0x1F000 + n), "abc") for n in range(40)]
            ),
        ),
    }


def precompiled() -> Any:
    """SentencePiece's table of replacements: an index without entries, and two texts."""
    index = struct.pack("<256I", *(256 * [0]))
    table = struct.pack("<I", len(index)) + index + b"\xef\xb7\xba\0" + 18 * "ش".encode() + b"\0"
    return tokenizers.normalizers.Precompiled(table)


@pytest.mark.parametrize("name", usual_tokenizers())
def test_usual_tokenizers_are_not_taken_for_bombs(name: str, tmp_path: Path) -> None:
    plain = usual_tokenizers()[name]
    path = tmp_path / "tokenizer.json"
    plain.save(str(path))
    text = "some words and   ﷺ numbers éè 12\n" * (2000 if name == "XLNet" else 10)
    loaded = Tokenizer.load(path)
    assert loaded.encode(text) == plain.encode(text, add_special_tokens=False).ids
    ids = loaded.encode("some words")
    assert loaded.decode(ids) == plain.decode(ids, skip_special_tokens=False)


def bombs() -> dict[str, dict[str, Any]]:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    doubled = 40 * [normalizers.Replace("a", "aa")]
    levels = 40 * [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return {
        "normalizer": {"normalizer": normalizers.Sequence(doubled)},  # type: ignore[arg-type]
        "nested": {"normalizer": normalizers.Sequence([normalizers.Sequence(doubled)])},  # type: ignore[list-item, arg-type]
        "long": {"normalizer": normalizers.Replace("a", "a" * 1_000_000)},
        "in turn": {
            "normalizer": normalizers.Sequence(
                20 * [normalizers.Replace("a", "bb"), normalizers.Replace("b", "aa")]
            )
        },
        "empty": {"normalizer": normalizers.Sequence(20 * [normalizers.Replace(Regex(""), "a")])},
        "prepend": {"normalizer": normalizers.Prepend("a" * 1_000_000)},
        "compatible": {
            "normalizer": normalizers.Sequence(
                20 * [normalizers.NFKC(), normalizers.Replace("ل", "ﷺ")]
            )
        },
        "pre_tokenizer": {"pre_tokenizer": pre_tokenizers.Sequence(levels)},  # type: ignore[arg-type]
        "one token": {"decoder": decoders.Sequence(40 * [decoders.Replace("a", "aa")])},
        "between": {"decoder": decoders.Sequence(40 * [decoders.BPEDecoder("")])},
    }


@pytest.mark.parametrize("name", bombs())
def test_a_tokenizer_that_multiplies_texts_is_refused(name: str, tmp_path: Path) -> None:
    letters = {letter: n for n, letter in enumerate("abc")}
    plain = build(tokenizers.models.BPE(letters, []), **bombs()[name])
    plain.save(str(tmp_path / "t.json"))
    kind = "one token may be" if "decoder" in bombs()[name] else "may lengthen a text"
    with pytest.raises(FileError, match=rf"t\.json: not a valid tokenizer\.json \(.*{kind}"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_text_that_grows_much_is_refused(tmp_path: Path) -> None:
    """A factor that one text may have, but not all of a file."""
    letters = {letter: n for n, letter in enumerate("ab")}
    normalizer = tokenizers.normalizers.Replace("b", "a" * 5000)
    plain = build(tokenizers.models.BPE(letters, []), normalizer=normalizer)
    plain.save(str(tmp_path / "t.json"))
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert len(loaded.encode("a" * 100_000 + "b")) == 105_000
    for texts in (["b" * 100_000], ["b" * 100] * 100):
        with pytest.raises(FileError, match="makes the text more than 16 times longer"):
            loaded.encode_documents(texts)


@pytest.mark.parametrize("part", ["decoder", "pre_tokenizer", "model"])
def test_a_panic_of_the_library_is_one_line(
    tokenizer: Tokenizer, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads(tokenizer.content)
    broken = {
        "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 9},
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "model": {**tree["model"], "continuing_subword_prefix": 12 * "x"},
    }
    (tmp_path / "t.json").write_text(json.dumps({**tree, part: broken[part]}))
    with pytest.raises(FileError, match=r"t\.json: not a valid tokenizer\.json \(.*\)\. Use"):
        Tokenizer.load(tmp_path / "t.json")
    assert capfd.readouterr().err == ""


def test_dropout_is_switched_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tree = json.loads(tokenizer.content)
    tree["model"]["dropout"] = 0.9
    (tmp_path / "t.json").write_text(json.dumps(tree))
    with pytest.warns(UserWarning, match=r"t: encodings with a BPE dropout of 0\.9 are random; it"):
        loaded = Tokenizer.load(tmp_path / "t.json")
    text = "some words that were merged " * 20
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.sha256 == tokenizer.sha256
