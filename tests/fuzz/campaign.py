"""Give every reader of outside data files with random changes, and see that it refuses them well.

    export PYTHONPATH=tests:benchmarks
    python -m fuzz.campaign --cases 100000 --seed 0 --out results/fuzz.json
    python -m fuzz.campaign --cases 7000 --only manifest --out results/fuzz.json    # once more
    python -m fuzz.campaign --only manifest --case 4711     # repeat one case

A reader may succeed, or raise `ConfigError` or `FileError` with a message of one line. Any other
error, a hang, a growth of memory, a process or a connection that it starts, a file that it opens or
changes outside of its folder is a failure.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fuzz.targets import TARGETS, Target
from machine_name import machine_name
from parcae.config import ConfigError
from parcae.files import FileError, remove

SECONDS = 10
"""Of CPU time. A case that takes longer, or ten times as long by the clock, is taken for one that
never ends."""
TIMERS = {
    signal.ITIMER_PROF: (signal.SIGPROF, SECONDS),
    signal.ITIMER_REAL: (signal.SIGALRM, 10 * SECONDS),
}
MEMORY = 512 << 20
"""Bytes by which the memory of the process may grow in a case."""
ADDRESS_SPACE = 4 << 30
"""Bytes that may be reserved beyond those of the process at the start."""
LONGEST_MESSAGE = 2000
REPLACED = 0.03
"""Share of the cases in which a file is something else: see `replaced`."""
HUGE = 6 << 30
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen")
FORBIDDEN += ("socket.connect", "socket.bind", "pickle.find_class")
CHANGES = ("shutil.rmtree", "os.remove", "os.rename", "os.rmdir", "os.link")
"""Forbidden, but for readers that write, in their folder."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OUTSIDE = "etc/passwd"
"""The end of the paths in `mutations.TEXTS` that lead out of a folder; nobody may open it."""


class Hang(BaseException):
    """A case took too long; no code that catches `Exception` may catch it."""


class Forbidden(BaseException):
    """A case started a process, opened a connection, or changed or opened a file it may not."""


_active = False
_writable = ""
"""The folder in which the case that is running may change files."""


def _audit(event: str, arguments: tuple) -> None:
    if not _active:
        return
    wrong = event in FORBIDDEN
    if event == "open" and isinstance(arguments[0], str | bytes):
        path = os.fsdecode(arguments[0])
        wrong = path.endswith(OUTSIDE) or bool(arguments[2] & WRITING and not _is_inside(path))
    elif event in CHANGES and arguments[-1] in (-1, None):  # else relative to an open folder
        paths = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
        wrong = not all(_is_inside(os.fsdecode(path)) for path in paths)
    if wrong:
        raise Forbidden(f"{event} {arguments!r:.200}")


def _is_inside(path: str) -> bool:
    path = os.path.abspath(path)
    return path == os.devnull or bool(_writable and path.startswith(_writable + os.sep))


sys.addaudithook(_audit)
sys.dont_write_bytecode = True  # by modules that are imported in a case


def _stop(*_: object) -> None:
    raise Hang(f"more than {SECONDS} s of CPU time, or {10 * SECONDS} s")


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bound the address space, and turn the alarm into an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, _stop) for number, _ in TIMERS.values()}
    if pages:
        most = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_case(target: Target, folder: Path, seed: int, case: int) -> str | None:
    """Run one case; returns what is wrong with it, None if nothing is."""
    rng = random.Random(f"{target.name}/{seed}/{case}")
    name = rng.choice(list(target.files))
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(target.files[name](whole, rng))
    try:
        with own_copy(target, folder) as copy:
            if target.in_files and rng.random() < REPLACED:
                with replaced(copy / name, rng) as is_changed:
                    problem = _read(target, copy)
                    problem = problem or ("a file outside was changed" if is_changed() else None)
            else:
                problem = _read(target, copy)
    finally:
        path.write_bytes(whole)
    return problem and f"{target.name}, {name}, case {case}: {problem}"


@contextlib.contextmanager
def own_copy(target: Target, folder: Path) -> Iterator[Path]:
    """A copy of the folder for a reader that writes; for others the folder itself."""
    if not target.writes:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="parcae-fuzz-copy-") as copy:
        yield Path(shutil.copytree(folder, copy, dirs_exist_ok=True))


@contextlib.contextmanager
def replaced(path: Path, rng: random.Random) -> Iterator[Callable[[], bool]]:
    """A link out of the folder, a pipe, a device, a huge file or a folder in place of a file.

    Yields whether what is outside has changed.
    """
    content = path.read_bytes()
    with tempfile.TemporaryDirectory(prefix="parcae-fuzz-outside-") as outside:
        target = Path(outside, path.name)
        path.rename(target)
        kind = rng.choice(("link", "pipe", "device", "huge", "folder"))
        if kind in ("link", "device"):
            path.symlink_to(target if kind == "link" else "/dev/zero")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.touch()
            os.truncate(path, HUGE)
        try:
            yield lambda: os.listdir(outside) != [path.name] or target.read_bytes() != content
        finally:
            remove(path)


def _read(target: Target, folder: Path) -> str | None:
    global _active, _writable
    peak = _peak_memory()
    try:
        for timer, (_, seconds) in TIMERS.items():
            signal.setitimer(timer, seconds)
        _active, _writable = True, str(folder) if target.writes else ""
        try:
            target.read(folder)
        finally:
            _active = False
            for timer in TIMERS:
                signal.setitimer(timer, 0)
    except (ConfigError, FileError) as error:
        if "\n" in str(error) or len(str(error)) > LONGEST_MESSAGE:
            return f"message of {len(str(error))} characters: {str(error)[:300]!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{type(error).__name__} at {place}: {str(error)[:200]}"
    grown = _peak_memory() - peak
    return f"memory grew by {grown >> 20} MiB" if grown > MEMORY else None


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fuzz(targets: Sequence[Target], cases: int, seed: int, first: int = 0) -> dict[str, list[str]]:
    """What is wrong, by target, in `cases` cases of each."""
    problems: dict[str, list[str]] = {}
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="parcae-fuzz-") as name:
            folder = Path(name)
            target.write(folder)
            with own_copy(target, folder) as copy:
                target.read(copy)  # without a change it must succeed
            with limits():
                found = (run_case(target, folder, seed, first + n) for n in range(cases))
                problems[target.name] = [problem for problem in found if problem]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[target.name for target in TARGETS])
    parser.add_argument("--case", type=int, help="repeat this one")
    parser.add_argument("--out", type=Path, help="JSON file of the counts; --only replaces some")
    arguments = parser.parse_args()
    targets = [t for t in TARGETS if t.name in (arguments.only or [x.name for x in TARGETS])]
    if arguments.case is not None:
        print(fuzz(targets, 1, arguments.seed, arguments.case))
        return 0
    counts: dict[str, dict[str, float]] = {}
    if arguments.only and arguments.out and arguments.out.exists():
        counts = json.loads(arguments.out.read_text())["readers"]
    failed = 0
    total = sum(target.weight for target in targets)
    for target in targets:
        cases, started = math.ceil(arguments.cases * target.weight / total), time.process_time()
        problems = fuzz([target], cases, arguments.seed)[target.name]
        seconds = time.process_time() - started
        counts[target.name] = {"cases": cases, "failures": len(problems), "seconds": seconds}
        print(f"{target.name:<12} {cases:>7} cases {len(problems):>6} failures {seconds:>7.1f} s")
        failed += len(problems)
        kinds = collections.Counter(p.split(": ", 1)[1][:120] for p in problems)
        for kind, count in kinds.most_common(12):
            example = next(p for p in problems if kind in p)
            print(f"    {count:>5} x {example}")
        sys.stdout.flush()
        if arguments.out is not None:
            in_order = {t.name: counts[t.name] for t in TARGETS if t.name in counts}
            tree = {"machine": machine_name(), "seed": arguments.seed, "readers": in_order}
            arguments.out.write_text(json.dumps(tree, indent=1) + "\n")
    print(f"{sum(c['cases'] for c in counts.values()):,} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
