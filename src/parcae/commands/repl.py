"""`parcae generate` without a prompt: one text after the other, settings changed in between."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from parcae import console
from parcae.commands.generate import OPTIONS, Option
from parcae.commands.generation_output import tell, write_prompt, write_text
from parcae.config import ConfigError
from parcae.infer.engine import Engine, Prompt
from parcae.infer.meter import Meter
from parcae.training.stop import StopSignals

HELP = r"""A line is a prompt; one that ends in \ goes on in the next. An empty line or Ctrl-D ends.
Ctrl-C stops the text that is being written. /more goes on with the last text.
A setting is changed by its name and a value, as in /loops 4; `none` takes it back. Now:
"""
BY_FLAG = {option.flag: option for option in OPTIONS}


def converse(engine: Engine, options: dict[str, Any], source: Path) -> None:
    """Until an empty line or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history, where there is such a thing)
    engine.request("", **options)  # a wrong flag ends the command, not each text
    _say(f"{source}: write a beginning, or /help. An empty line ends.")
    talk = Conversation(engine, options)
    while True:
        try:
            line = _read_line()
        except EOFError:
            _say("")
            return
        except KeyboardInterrupt:  # at the prompt: forget what was typed
            _say("")
            continue
        if not line:
            return
        try:
            talk.take(line)
        except ConfigError as error:
            _say(str(error))


class Conversation:
    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        self.engine, self.options = engine, dict(options)
        self._text: list[int] = []
        """Prompt and text as they stand now: what `/more` goes on with, all of it in the cache."""

    def take(self, line: str) -> None:
        """A prompt, or a line that begins with a slash."""
        if not line.startswith("/"):
            self._write(line)
        elif line == "/help":
            _say(HELP + "\n".join(map(self._shown, OPTIONS)))
        elif line == "/more":
            if not self._text:
                raise ConfigError("/more: there is no text yet. Begin one.")
            self._write(self._text)
        else:
            self._set(line)

    def _write(self, prompt: Prompt) -> None:
        request = self.engine.request(prompt, **self.options)
        meter = Meter()
        if isinstance(prompt, str):
            write_prompt(prompt)
        with (
            StopSignals((signal.SIGINT,)) as stop,
            contextlib.closing(self.engine.stream(prompt, **self.options)) as pieces,
        ):
            for piece in meter.watch(pieces):
                write_text(piece.text)
                if stop.asked:
                    break
        self._text = [*request.prompt, *meter.tokens]
        write_text("\n")
        tell(self.engine, request, meter)

    def _set(self, line: str) -> None:
        """Refused, and left as it was, where no text could be written with it."""
        flag, _, value = line[1:].partition(" ")
        option = BY_FLAG.get(flag)
        if option is None:
            raise ConfigError(f"/{flag}: no such setting. See /help.")
        if value.strip():
            changed = {**self.options, option.name: _value(option, value)}
            self.engine.request("", **changed)
            self.options = changed
        _say(self._shown(option))

    def _shown(self, option: Option) -> str:
        value = self.options[option.name]
        if option.name == "stop":
            value = " ".join(map(repr, value)) or None
        return f"  /{option.flag:<20}{'none' if value is None else value!s:<10}  {option.help}"


def _value(option: Option, text: str) -> Any:
    if text.strip() == "none":
        return option.default
    if option.name == "stop":
        return (option.read(text),)
    try:
        return option.read(text.strip())
    except ValueError:
        raise ConfigError(f"/{option.flag}: {text.strip()!r} is not a number. Try again.") from None


def _read_line() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def _say(words: str) -> None:
    console.err.print(words, style="cyan", highlight=False, markup=False, soft_wrap=True)
