"""The interactive mode of `parcae generate`: prompts line by line, settings changed in between."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from parcae import console
from parcae.commands.generate import OPTIONS, Option
from parcae.commands.generation_output import print_summary, write_prompt, write_text
from parcae.config import ConfigError
from parcae.infer.engine import Engine, Prompt
from parcae.infer.sequence import Meter
from parcae.machine import StopSignals

HELP = r"""Every line is a prompt; a line that ends in \ continues on the next one.
/quit, an empty line or Ctrl-D quits. Ctrl-C stops the current text. /more continues the last text.
/NAME VALUE changes a setting, as in /loops 4; /NAME none resets it. Current settings:
"""
QUIT = ("/quit", "/q")
BY_FLAG = {option.flag: option for option in OPTIONS}


def run_repl(engine: Engine, options: dict[str, Any], source: Path) -> None:
    """Read prompts and write texts until an empty line or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    engine.request("", **options)  # invalid options end the command at once
    _print(f"{source}: type a prompt, or /help. /quit or an empty line quits.")
    repl = Repl(engine, options)
    while True:
        try:
            line = _read_line()
        except EOFError:
            _print("")
            return
        except KeyboardInterrupt:  # discard the line
            _print("")
            continue
        if not line or line.strip() in QUIT:
            return
        try:
            repl.handle(line)
        except ConfigError as error:
            _print(str(error))


class Repl:
    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        self.engine, self.options = engine, dict(options)
        self._tokens: list[int] = []
        """The last prompt and its text, which `/more` continues; they are in the cache."""

    def handle(self, line: str) -> None:
        """A prompt, or a command that begins with a slash."""
        if not line.startswith("/"):
            self._write(line)
        elif line == "/help":
            _print(HELP + "\n".join(map(self._describe, OPTIONS)))
        elif line == "/more":
            if not self._tokens:
                raise ConfigError("/more: there is no text yet. Type a prompt first.")
            if len(self._tokens) >= self.engine.config.context_length:
                raise ConfigError("/more: the model's context is full. Type a new prompt.")
            self._write(self._tokens)
        else:
            self._set(line)

    def _write(self, prompt: Prompt) -> None:
        request, meter = self.engine.request(prompt, **self.options), Meter()
        if isinstance(prompt, str):
            write_prompt(prompt)
        with (
            StopSignals((signal.SIGINT,)) as stop,
            contextlib.closing(self.engine.stream(request)) as pieces,
        ):
            for piece in meter.watch(pieces):
                write_text(piece.text)
                if stop.asked:
                    break
        self._tokens = [*request.prompt, *meter.tokens]
        write_text("\n")
        print_summary(self.engine, request, meter)

    def _set(self, line: str) -> None:
        """Change or show a setting; an invalid value leaves it unchanged."""
        flag, _, value = line[1:].partition(" ")
        option = BY_FLAG.get(flag)
        if option is None:
            raise ConfigError(f"/{flag}: no such setting. See /help.")
        if value.strip():
            changed = {**self.options, option.name: _parse(option, value)}
            self.engine.request("", **changed)
            self.options = changed
        _print(self._describe(option))

    def _describe(self, option: Option) -> str:
        value = self.options[option.name]
        if option.name == "stop":
            value = " ".join(map(repr, value)) or None
        return f"  /{option.flag:<20}{'none' if value is None else value!s:<10}  {option.help}"


def _parse(option: Option, text: str) -> Any:
    if text.strip() == "none":
        return option.default
    if option.name == "stop":
        return (option.read(text),)
    try:
        return option.read(text.strip())
    except ValueError:
        raise ConfigError(f"/{option.flag}: {text.strip()!r} is not a number. Give one.") from None


def _read_line() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def _print(text: str) -> None:
    console.print_text(text, console=console.err, style="cyan")
