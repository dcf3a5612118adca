"""Text in pieces against text decoded at once, for whatever bytes a model may come up with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import GreedyEngine as Engine
from oracles import text_model, tokenizer
from parcae.data.tokenizer import Tokenizer
from parcae.infer.sequence import TextStream

ROUGH = ["👩‍👩‍👧", "é", "e\u0301", "\u200d", "ナ", "a", " ", "\n", "ab", "<|bos|>", "\ufffd", "𝔘"]


def ids_of(data: bytes) -> list[int]:
    """One token for each byte."""
    single = {spelled: i for i, spelled in enumerate(tokenizer().token_bytes) if len(spelled) == 1}
    return [single[bytes([byte])] for byte in data]


def stream(
    ids: list[int], stops: tuple[str, ...] = (), spelled: list[bytes] | None = None
) -> tuple[str, list[str], bool]:
    """What comes out, and whether a stop was met; `spelled` is a vocabulary made up for a test."""
    source = (
        tokenizer() if spelled is None else SimpleNamespace(token_bytes=spelled, is_byte_level=True)
    )
    text = TextStream(source, stops)  # type: ignore[arg-type]
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    return "".join(pieces), pieces, text.stopped


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Letter by letter: the stop that is complete first ends it, the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, tokenizer().vocab_size - 1), max_size=30))
def test_pieces_of_any_tokens_join_to_the_whole(ids):
    assert stream(ids)[0] == tokenizer().decode(ids)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=3) | st.sampled_from(ROUGH).map(str.encode), max_size=12))
@example([b"\xf0\x9f", b"\x91"])
@example([b"\xed\xa0\x80", b"\xc3"])
@example([b"\xe2\x80", b"a"])
def test_pieces_of_any_bytes_join_to_the_whole(parts):
    ids = ids_of(b"".join(parts))
    assert stream(ids)[0] == tokenizer().decode(ids)


def test_a_character_comes_out_whole():
    _, pieces, _ = stream(ids_of("a👩é".encode()))
    assert pieces == ["a", "", "", "", "👩", "", "é", ""]


def test_what_never_becomes_a_character_is_told_at_the_end():
    assert stream(ids_of(b"a\xf0\x9f"))[1] == ["a", "", "", "\ufffd"]


def test_specials_are_spelled_out_and_unknown_ids_are_silent():
    bos = tokenizer().bos
    assert stream([bos])[0] == "<|bos|>"
    assert stream([tokenizer().vocab_size + 3, *ids_of(b"a"), 10**6])[0] == "a"


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.text("abcé", max_size=5), max_size=10),
    stops=st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3).map(tuple),
)
@example(["abc"], ("abc", "b"))
@example(["xab", "c"], ("abc", "b"))
@example(["a", "a", "b"], ("ab", "aab"))
def test_stops_end_the_text_however_it_is_cut(parts, stops):
    """Into tokens of several letters, or into bytes."""
    text = "".join(parts)
    found, _, stopped = stream(ids_of(text.encode()), stops)
    spelled = [part.encode() for part in parts]
    assert stream([*range(len(parts))], stops, spelled)[::2] == (found, stopped)
    assert found == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in found for stop in stops)


def test_text_that_may_be_a_stop_is_held_back_and_released():
    assert stream(ids_of(b"abX"), ("abc",))[1] == ["", "", "abX", ""]
    assert stream(ids_of(b"xab"), ("abc",))[1] == ["x", "", "", "ab"]
    assert stream(ids_of(b"aabc"), ("abc",))[1] == ["", "a", "", "", ""]


@pytest.fixture
def engine() -> Engine:
    return Engine(text_model(), tokenizer())


OPTIONS = {"max_new_tokens": 40, "loops": 2, "temperature": 2.0, "seed": 4, "stop_tokens": ()}


def test_a_stream_is_the_text(engine):
    whole = engine.generate("import ", **OPTIONS)
    pieces = list(engine.stream("import ", **OPTIONS))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token for piece in pieces] == list(whole.tokens)
    assert [piece.loops for piece in pieces] == list(whole.loops)
    assert [piece.completion is None for piece in pieces] == [True] * 39 + [False]
    known = [token for token in whole.tokens if token < tokenizer().vocab_size]
    assert len(known) < 40, "no padded id was drawn; use another seed"
    assert whole.text == tokenizer().decode(known)


@pytest.mark.parametrize("place", [0, 7, -3])
def test_a_stop_string_is_not_part_of_the_text_but_of_the_tokens(engine, place):
    whole = engine.generate("import ", **OPTIONS)
    assert whole.text is not None
    place %= len(whole.text)
    stop = whole.text[place : place + 3]
    for options in ({}, {"draft_loops": 1, "draft_tokens": 3}):
        made = engine.generate("import ", stop=["never there", stop], **OPTIONS, **options)
        assert made.text == whole.text[: whole.text.index(stop)]
        assert made.finish == "stop"
        assert made.tokens == whole.tokens[: len(made.tokens)]
        before = [token for token in made.tokens[:-1] if token < tokenizer().vocab_size]
        assert stop not in tokenizer().decode(before)
        pieces = list(engine.stream("import ", stop=stop, **OPTIONS, **options))
        assert "".join(piece.text for piece in pieces) == made.text


def test_a_stop_string_that_only_begins_is_released(engine):
    whole = engine.generate("import ", **OPTIONS)
    assert whole.text is not None
    made = engine.generate("import ", stop=whole.text[-2:] + "and more", **OPTIONS)
    assert (made.text, made.finish) == (whole.text, "length")


def test_a_stop_token_is_neither_token_nor_text(engine):
    whole = engine.generate("import ", **OPTIONS)
    end = whole.tokens[9]
    made = engine.generate("import ", **{**OPTIONS, "stop_tokens": [end]})
    assert made.finish == "stop"
    assert made.tokens == whole.tokens[: whole.tokens.index(end)]
    last = list(engine.stream("import ", **{**OPTIONS, "stop_tokens": [end]}))[-1]
    assert last.token is None
    assert last.completion is not None
    assert last.completion.tokens == made.tokens


def test_tokenizers_that_do_not_spell_bytes():
    """Those of sentencepiece's kind write a space as a letter of its own."""
    import tokenizers

    words = ["hello", "▁world", "▁", "é"]
    vocabulary = {"<s>": 0} | {word: i + 1 for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    made.decoder = tokenizers.decoders.Metaspace()  # type: ignore[assignment]
    stream = TextStream(Tokenizer(made.to_str()), stops=("d",))
    ids = [1, 2, 3, 4]
    assert stream.push(1) == "hello"
    assert "".join(stream.push(i) for i in ids[1:]) + stream.finish() == " worl"
    whole = TextStream(Tokenizer(made.to_str()))
    assert "".join(whole.push(i) for i in ids) + whole.finish() == made.decode(ids)
    continued = TextStream(Tokenizer(made.to_str()), after=[4, 1])
    assert "".join(continued.push(i) for i in ids[1:]) == made.decode([1, *ids[1:]])[5:]
