"""A command to try faults on: its input, what it leaves undisturbed, how it continues."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.client import SECONDS, Ended, Fault, Server, ask, is_running
from faults.commands import CHECKPOINT_EVERY, Command
from faults.outcome import contents, differences, halves, leftovers


@dataclass
class Tried:
    """The tries of one cell."""

    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, seen: str, problems: Sequence[str]) -> None:
        if problems:
            self.failures.append(f"{name}: {'; '.join(problems[:4])}")
        else:
            self.seen[seen] += 1

    def to_dict(self) -> dict[str, Any]:
        tried = sum(self.seen.values()) + len(self.failures)
        return {"tried": tried, "failures": len(self.failures), "seen": dict(self.seen)}


class Trial:
    """A command with its input, and what it leaves undisturbed."""

    def __init__(self, server: Server, command: Command, sample: int | None = None) -> None:
        """`sample`: how many events to try of each fault; None for all."""
        self.server, self.command, self.sample = server, command, sample
        self.cell = server.cell
        self.template, self.finished = server.folder / "template", server.folder / "finished"
        self.killed = server.folder / "killed"
        for folder in (self.cell, self.template, self.finished):
            shutil.rmtree(folder, ignore_errors=True)
        self.cell.mkdir()
        problems = server.run(command.prepare).problems()
        assert not problems, problems
        shutil.copytree(self.cell, self.template)
        ended = self.run(fault=Fault())
        assert not ended.problems(), ended.problems()
        self.counts, self.answer = ended.counts, ended.out
        (self.cell / "out").mkdir(exist_ok=True)
        shutil.copytree(self.cell / "out", self.finished)
        self.expected = contents(self.finished)

    def reset(self, state: str = "new") -> None:
        """Make the folder of the cell as before the command, after it, or after it was killed."""
        shutil.rmtree(self.cell)
        shutil.copytree(self.template, self.cell)
        if state != "new":
            shutil.copytree(getattr(self, state), self.cell / "out")

    def interrupt(self) -> Path:
        """What a command leaves that is killed after two thirds of its changes."""
        shutil.rmtree(self.killed, ignore_errors=True)
        self.reset()
        self.run(fault=Fault("kill", "change", 2 * self.counts["change"] // 3))
        (self.cell / "out").mkdir(exist_ok=True)
        return Path(shutil.copytree(self.cell / "out", self.killed))

    def run(
        self, *, again: bool = False, fault: Fault | None = None, nan_step: int | None = None
    ) -> Ended:
        """The command, or what continues it; of a server, `out` is the text that it answers."""
        chosen = self.command.continued(self.cell) if again else self.command.arguments
        if self.command.serves:
            return self._serve(chosen, fault)
        return self.server.run("run", chosen, nan_step, fault=fault)

    def _serve(self, arguments: Sequence[str], fault: Fault | None) -> Ended:
        server = self.server
        process = server.start("run", arguments, fault=fault)
        text, end = "", time.monotonic() + SECONDS
        while time.monotonic() < end and is_running(process):
            if "Serving on " in (line := server.read("log.out")) and line.endswith("\n"):
                text = ask(line.split()[2])
                os.kill(process, signal.SIGTERM)
                break
            time.sleep(0.01)
        ended = server.wait(process)
        ended.out = text
        return ended

    def is_as_expected(self, ended: Ended) -> list[str]:
        """What differs from an undisturbed command."""
        if self.command.serves:
            return [] if ended.out == self.answer else [f"answer {ended.out!r}"]
        out = self.cell / "out"
        return differences(contents(out), self.expected) + leftovers(out)

    def continues(self) -> list[str]:
        """Run again without a fault; what is wrong then."""
        logged, saved = self._steps()
        ended = self.run(again=True)
        problems = ended.problems((0, 2))
        if ended.code == 2 and "exists" not in ended.err:
            problems.append(f"refused to continue: {ended.err[-300:]}")
        if logged and f"Resumed at step {saved}" not in ended.err + ended.out and saved:
            problems.append(f"did not resume at step {saved}: {ended.err[-300:]}")
        if saved < logged - 2 * CHECKPOINT_EVERY:
            problems.append(f"{logged} steps logged, but only {saved} saved")
        return problems + self.is_as_expected(ended)

    def _steps(self) -> tuple[int, int]:
        """Of `train`: the last step that was logged, and the last that was saved."""
        run = self.cell / "out/run"
        if self.command.name != "train" or not run.exists():
            return 0, 0
        saved = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
        log = run / "metrics.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        logged = 0
        for line in lines:
            with contextlib.suppress(ValueError):
                logged = json.loads(line)["step"]
        return logged, max(saved, default=0)

    def half_written(self) -> list[str]:
        return halves(self.cell / "out", self.expected, self.command.unfinished)

    def some(self, values: Sequence[int]) -> Sequence[int]:
        return values if self.sample is None else values[: self.sample]

    def events(self, kind: str, seed: int = 0) -> list[int]:
        total = self.counts[kind]
        if self.sample is None or self.sample >= total:
            return list(range(1, total + 1))
        rng = random.Random(f"{self.command.name}/{kind}/{seed}")
        return sorted(rng.sample(range(1, total + 1), self.sample))
