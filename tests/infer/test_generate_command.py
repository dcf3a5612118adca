"""`parcae generate`: the texts are those of the plain sampler, whoever asks and however."""

from __future__ import annotations

import inspect
import io
import json
import re
import signal

import pytest
import torch

from conftest import randomised, tiny
from parcae import console
from parcae.cli import main
from parcae.commands import generation_output, repl
from parcae.commands.generate import OPTIONS, unescape
from parcae.config import LoopConfig
from parcae.data.tokenizer import Tokenizer
from parcae.infer import TEMPERATURE
from parcae.infer.engine import Engine
from parcae.infer.network import open_network
from parcae.infer.sampling import Sampling
from parcae.infer.sequence import Meter, Piece, TextStream
from parcae.model.store import save
from reference import generate

pytestmark = pytest.mark.slow

TEXT = "def main(argument):\n    return argument.value + other.value\n" * 4
TOKENIZER = Tokenizer.train([TEXT], 280)
CONFIG = tiny(vocab_size=TOKENIZER.vocab_size + 5, context_length=64)
PROMPT = "def other("
IDS = [TOKENIZER.bos, *TOKENIZER.encode(PROMPT)]


@pytest.fixture(scope="module")
def model():
    return randomised(CONFIG)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(model, folder)
    TOKENIZER.save(folder / "tokenizer.json")
    return folder


def test_the_command_has_the_defaults_of_the_call():
    parameters = inspect.signature(Engine.request).parameters
    assert {option.name: option.default for option in OPTIONS} == {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "prompt", "stop_tokens")
    }
    assert parameters["temperature"].default == Sampling().temperature == TEMPERATURE


def test_bytes_that_are_no_character_are_written_as_numbers():
    assert generation_output.quoted(b"a\n") == r"'a\n'"
    assert generation_output.quoted("é".encode()) == "'é'"
    assert generation_output.quoted(b"\xe6\x97") == r"'\xe6\x97'"


def spell(ids):
    stream = TextStream(TOKENIZER)
    return "".join(map(stream.push, ids)) + stream.finish()


def expected(model, prompt=IDS, **options):
    options = {"max_new_tokens": 12, "temperature": 0.8, "stop_tokens": [TOKENIZER.bos], **options}
    return generate(model, prompt, **options)


def as_json(capsys, *words):
    assert main(["generate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--temperature", "0", "--loops", "7"], {"temperature": 0, "loops": 7}),
        (["--seed", "5", "--top-k", "9"], {"seed": 5, "top_k": 9}),
        (["--top-p", "0.7", "--min-p", "0.01"], {"top_p": 0.7, "min_p": 0.01}),
        (["--repetition-penalty", "1.4", "--draft-loops", "2"], {"repetition_penalty": 1.4}),
    ],
)
def test_the_text_is_that_of_the_plain_sampler(capsys, model, folder, flags, options):
    assert main(["generate", str(folder), "--max-new-tokens", "12", *flags, PROMPT]) == 0
    captured = capsys.readouterr()
    assert captured.out == PROMPT + spell(expected(model, **options)) + "\n"
    assert "tokens/s" in captured.err
    assert "the first after" in captured.err


def test_json_tells_all(capsys, model, folder):
    told = as_json(capsys, folder, PROMPT, "--max-new-tokens", "12", "--logprobs", "2")
    made = expected(model)
    assert told["tokens"] == made
    assert told["text"] == spell(made)
    assert told["loops"] == [4] * 12
    assert told["finish"] == "length"
    assert told["prompt_tokens"] == len(IDS)
    assert told["tokens_per_second"] > 0 < told["seconds_to_first_token"]
    # Prelude and coda once, two core layers at four loops; keys and values of 48 floats.
    assert told["cache_bytes_per_token"] == (2 + 2 * 4) * 2 * 48 * 4
    assert told["cache_bytes"] == 64 * told["cache_bytes_per_token"]
    assert told["weight_bytes"] == open_network(model).weight_bytes
    row = torch.tensor([[*IDS, *made]])
    chances = model(row, loops=4, state="zero").logits[0].log_softmax(-1)
    for place, one in enumerate(told["logprobs"]):
        here = chances[len(IDS) - 1 + place]
        assert one["token"] == made[place]
        assert one["logprob"] == pytest.approx(here[made[place]].item(), abs=1e-4)
        assert [best["token"] for best in one["alternatives"]] == here.topk(2).indices.tolist()


def test_exits_drafts_and_shared_slots_are_told(capsys, folder):
    words = [folder, PROMPT, "--max-new-tokens", "20", "--loops", "6"]
    early = as_json(capsys, *words, "--exit", "budget:2")
    assert early["loops"] == [6] + [2] * 19  # the first comes from the prompt, read in full
    assert early["mean_loops"] == pytest.approx(44 / 20)
    drafted = as_json(capsys, *words, "--draft-loops", "5")
    assert 0 < drafted["accepted"] <= drafted["drafted"]
    shared = as_json(capsys, *words, "--cache", "shared")
    assert shared["cache_bytes_per_token"] == (2 + 2) * 2 * 48 * 4
    half = as_json(capsys, *words, "--cache", "shared", "--cache-dtype", "bfloat16")
    assert 2 * half["cache_bytes_per_token"] == shared["cache_bytes_per_token"]
    small = as_json(capsys, *words, "--weight-dtype", "int8")
    assert small["weight_bytes"] < shared["weight_bytes"]
    assert main(["generate", *map(str, words), "--exit", "budget:2"]) == 0
    said = capsys.readouterr().err
    assert "2.20 of 6 loops per token\n█" + "▃" * 19 in said


@pytest.mark.slow
def test_a_stop_string_ends_the_text(capsys, model, folder):
    whole = spell(expected(model, max_new_tokens=30))
    stop = whole[8:10]
    told = as_json(
        capsys, folder, PROMPT, "--max-new-tokens", "30", "--stop", "never", "--stop", stop
    )
    assert told["text"] == whole[: whole.index(stop)]
    assert told["finish"] == "stop"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\n\n", "\n\n"),
        (r"a\tb", "a\tb"),
        (r"\\n", r"\n"),  # a backslash and an n
        (r"\\\n", "\\\n"),
        (r"\d", r"\d"),
        ("\\", "\\"),
    ],
)
def test_escapes_of_stop_strings(written, meant):
    assert unescape(written) == meant


def test_what_a_text_cost_reads_as_no_error(capsys, folder):
    assert main(["generate", str(folder), PROMPT, "--max-new-tokens", "3"]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"weights \S+ [KM]iB \(--weight-dtype float32\); cache \S+ KiB per token, \S+ [KM]iB "
        r"reserved \(--cache full\); layers in (C\+\+|PyTorch).*",
        last,
    )
    words = [str(folder), PROMPT, "--max-new-tokens", "3", "--cache-dtype", "bfloat16"]
    assert main(["generate", *words]) == 0
    assert "reserved (--cache full --cache-dtype bfloat16); " in capsys.readouterr().err


def test_rates_are_written_out():
    times = iter([0.0, 0.1, *(0.1 + 0.001 * i for i in range(1, 81))])
    meter = Meter(clock=lambda: next(times))
    pieces = [Piece(token=1, text="", loops=1, completion=None) for _ in range(80)]
    assert len(list(meter.watch(pieces))) == 80
    assert generation_output._speed(meter).startswith(
        "80 tokens, 1,000 tokens/s, the first after 100 ms"
    )


def test_prompts_from_files_and_pipes(capsys, monkeypatch, folder, tmp_path):
    words = [folder, "--max-new-tokens", "6"]
    plain = as_json(capsys, *words, PROMPT)
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert as_json(capsys, *words, f"@{tmp_path / 'prompt.txt'}")["tokens"] == plain["tokens"]
    for more in (["-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
        assert as_json(capsys, *words, *more)["tokens"] == plain["tokens"]
    assert as_json(capsys, *words, "")["prompt_tokens"] == 1  # BOS


def one_line_error(capsys, *words):
    assert main(["generate", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("parcae: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loops", "0"], "loops: 0 is out of range"),
        (["--exit", "kl"], "'kl' is not NAME:THRESHOLD"),
        (["--exit", "warmth:1"], "'warmth' is not a known exit rule. Known: state, kl, budget."),
        (["--cache", "some"], "not a policy"),
        (["--draft-loops", "4"], "4 loops cannot draft for 4"),
        (["--draft-loops", "2", "--exit", "kl:1"], "speculation needs a fixed depth"),
        (["--draft-loops", "2", "--cache", "shared"], "draft_loops: a cache that shares slots"),
        (["--tokenizer", "/nowhere.json"], "no such tokenizer"),
        (["--lops", "3"], "--lops: no such option"),
        (["another"], "another: a second prompt"),
    ],
)
def test_mistakes(capsys, folder, words, message):
    assert message in one_line_error(capsys, folder, PROMPT, *words)


def test_mistakes_of_folders_and_prompts(capsys, monkeypatch, folder, model, tmp_path):
    assert "no such folder" in one_line_error(capsys, tmp_path / "none", PROMPT)
    assert "recipe.toml is missing. Give a run" in one_line_error(capsys, tmp_path, PROMPT)
    (tmp_path / "recipe.toml").touch()
    assert "no checkpoint yet" in one_line_error(capsys, tmp_path, PROMPT)
    assert "no such file" in one_line_error(capsys, folder, "@nowhere.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in one_line_error(capsys, folder, f"@{tmp_path / 'latin.txt'}")
    assert "context holds 64" in one_line_error(capsys, folder, PROMPT * 40)
    save(model, tmp_path / "bare")
    assert "Give one with --tokenizer" in one_line_error(capsys, tmp_path / "bare", PROMPT)
    save(randomised(tiny(vocab_size=100)), tmp_path / "small")
    TOKENIZER.save(tmp_path / "small" / "tokenizer.json")
    assert "the model in" in one_line_error(capsys, tmp_path / "small", PROMPT)
    monkeypatch.setattr("sys.stdin", Keyboard())
    assert "--json: there is no prompt" in one_line_error(capsys, folder, "--json")


def test_a_broken_model_is_told_in_a_line(capsys, tmp_path):
    broken = randomised(CONFIG)
    with torch.no_grad():
        broken.embed.weight.fill_(torch.nan)
    save(broken, tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    assert main(["generate", str(tmp_path), PROMPT]) == 2
    assert "has diverged" in capsys.readouterr().err


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch, folder, *lines):
    """A conversation in which these lines are typed, then Ctrl-D."""
    left = iter(lines)

    def read(_prompt=""):
        for line in left:
            if line is KeyboardInterrupt:
                raise KeyboardInterrupt
            return line
        raise EOFError

    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("builtins.input", read)
    assert main(["generate", str(folder), "--max-new-tokens", "6"]) == 0


def test_a_conversation(capsys, monkeypatch, folder, model):
    typed(monkeypatch, folder, PROMPT, "/more", KeyboardInterrupt, "/loops 2", PROMPT)
    captured = capsys.readouterr()
    made = expected(model, max_new_tokens=6)
    more = expected(model, [*IDS, *made], max_new_tokens=6)
    shallow = expected(model, max_new_tokens=6, loops=2)
    texts = [PROMPT + spell(made), spell(more), PROMPT + spell(shallow), ""]
    assert captured.out == "\n".join(texts)
    assert f"{len(IDS) + 5} prompt tokens from the cache" in captured.err
    assert "2 loops for every token" in captured.err


def test_more_of_a_text_that_fills_the_context(capsys, monkeypatch, folder, model):
    typed(monkeypatch, folder, f"/max-new-tokens {model.config.context_length}", PROMPT, "/more")
    assert "/more: the model's context is full" in capsys.readouterr().err


@pytest.mark.parametrize("last", ["", "/quit", "/q", " /quit "])
def test_what_ends_a_conversation(capsys, monkeypatch, folder, last):
    typed(monkeypatch, folder, "a\\", "b", last, PROMPT)
    captured = capsys.readouterr()
    assert captured.out.startswith("a\nb")
    assert PROMPT not in captured.out
    assert "no such setting" not in captured.err


def test_settings_that_cannot_be_are_refused_and_left(capsys, monkeypatch, folder, model):
    wrong = ["/loops 0", "/exit kl", "/top-k many", "/nothing 3", "/more"]
    typed(monkeypatch, folder, "/temperature 0", *wrong, "/exit", "/help", PROMPT)
    captured = capsys.readouterr()
    made = expected(model, max_new_tokens=6, temperature=0)
    assert captured.out == PROMPT + spell(made) + "\n"
    for words in (
        "0 is out of range",
        "is not NAME:THRESHOLD",
        "'many' is not a number",
        "no such setting",
    ):
        assert words in captured.err
    assert "there is no text yet" in captured.err
    assert "/repetition-penalty" in captured.err


def test_settings_are_taken_back(capsys, monkeypatch, folder, model):
    typed(monkeypatch, folder, "/temperature 0", "/temperature none", "/stop x\\n", "/stop", PROMPT)
    captured = capsys.readouterr()
    assert captured.out == PROMPT + spell(expected(model, max_new_tokens=6)) + "\n"
    assert r"'x\n'" in captured.err


def test_an_interrupt_stops_the_text_only(capsys, monkeypatch, folder, model):
    def write(text, *around):
        generation_output.write_text(text, *around)
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    written = []
    monkeypatch.setattr(repl, "write_text", write)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        typed(monkeypatch, folder, PROMPT, "/more")
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    made = expected(model, max_new_tokens=9)
    assert captured.out == f"{PROMPT}{spell(made[:3])}\n{spell(made[3:])}\n"
    assert "3 tokens" in captured.err
    assert "interrupted" in captured.err


def test_a_terminal_is_not_given_control_characters(capsys, monkeypatch):
    generation_output.write_text("a\x1b[31m\tb\n")
    monkeypatch.setattr(console, "out", console.WideConsole(force_terminal=True))
    generation_output.write_text("a\x1b[31m\tb\x9b\n")
    assert capsys.readouterr().out == "a\x1b[31m\tb\na␛[31m\tb�\n"


def test_a_meter_counts_from_the_first_token():
    times = iter([10.0, 12.0, 13.0, 14.0])
    meter = Meter(lambda: next(times))
    pieces = [Piece(7, "a", 3), Piece(8, "b", 5), Piece(None, "", 5)]
    assert [piece.text for piece in meter.watch(pieces)] == ["a", "b", ""]
    assert (meter.first, meter.rate, meter.mean_loops) == (2.0, 1.0, 4.0)
    assert (meter.tokens, meter.loops) == ([7, 8], [3, 5])
    assert Meter().rate is None
    assert Meter().mean_loops is None


def test_sparklines():
    assert console.sparkline(range(1, 9), 8) == ("▁▂▃▄▅▆▇█", 1)
    assert console.sparkline([1, 2, 3], 3) == ("▃▆█", 1)
    assert console.sparkline([1, 16], 16) == ("▁█", 1)
    assert console.sparkline([], 8) == ("", 1)
    assert console.sparkline([8, 8, 1, 1, 4], 8, most=3) == ("█▁▄", 2)


def test_sizes():
    assert [console.format_bytes(n) for n in (5, 2048, 3 << 20)] == ["5 B", "2 KiB", "3 MiB"]


def test_ids_beyond_the_tokenizer_spell_nothing():
    stream = TextStream(TOKENIZER)
    pushed = [stream.push(n) for n in (*TOKENIZER.encode("de"), TOKENIZER.vocab_size)]
    assert "".join(pushed) == "de"
    assert pushed[-1] == ""


def held_tensors(thing, seen):
    """Every tensor that can be reached from a network, by the memory it stands in."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return
    parts = []
    if isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    elif isinstance(thing, dict):
        parts = list(thing.values())
    elif getattr(thing, "__closure__", None):
        parts = [cell.cell_contents for cell in thing.__closure__]
    elif type(thing).__module__.startswith("parcae.infer"):
        parts = list(vars(thing).values())
    for part in parts:
        held_tensors(part, seen)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_tensors_held(weights, tied):
    config = tiny(tied_embeddings=tied, loop=LoopConfig(mean_loops=2))
    network = open_network(randomised(config), weights)
    seen = {}
    held_tensors(network, seen)
    tensors = {t.data_ptr(): t for t in seen.values() if isinstance(t, torch.Tensor)}
    counted = [t for t in tensors.values() if t.ndim == 2 or t.dtype == torch.int8]  # packed: int8
    matrices = sum(t.nbytes for t in counted)
    assert network.weight_bytes == matrices
