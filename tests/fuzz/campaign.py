"""Give every reader of outside data files with random changes, and see that it refuses them well.

    export PYTHONPATH=tests:benchmarks
    python -m fuzz.campaign --cases 100000 --seed 0
    python -m fuzz.campaign --only manifest --case 4711     # repeat one case

A reader may succeed, or raise `ConfigError` or `FileError` with a message of one line. Any other
error, a hang, a growth of memory, a process or a connection that it starts is a failure.
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
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuzz.targets import TARGETS, Target
from machine_name import machine_name
from parcae.config import ConfigError
from parcae.files import FileError

SECONDS = 10
"""A case that takes longer is taken for one that never ends."""
MEMORY = 512 << 20
"""Bytes by which the memory of the process may grow in a case."""
ADDRESS_SPACE = 4 << 30
"""Bytes that may be reserved beyond those of the process at the start."""
LONGEST_MESSAGE = 2000
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen")
FORBIDDEN += ("socket.connect", "socket.bind", "shutil.rmtree", "os.remove", "os.rename")


class Hang(BaseException):
    """A case took too long; no code that catches `Exception` may catch it."""


class Forbidden(BaseException):
    """A case started a process, opened a connection, or changed files."""


_active = False


def _audit(event: str, arguments: tuple) -> None:
    if _active and event in FORBIDDEN:
        raise Forbidden(f"{event} {arguments!r:.200}")


sys.addaudithook(_audit)


def _stop(*_: object) -> None:
    raise Hang(f"more than {SECONDS} s")


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bound the address space, and turn the alarm into an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _stop)
    if pages:
        most = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def run_case(target: Target, folder: Path, seed: int, case: int) -> str | None:
    """Run one case; returns what is wrong with it, None if nothing is."""
    global _active
    rng = random.Random(f"{target.name}/{seed}/{case}")
    name = rng.choice(list(target.files))
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(target.files[name](whole, rng))
    peak = _peak_memory()
    problem = None
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _active = True
        try:
            target.read(folder)
        finally:
            _active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (ConfigError, FileError) as error:
        if "\n" in str(error) or len(str(error)) > LONGEST_MESSAGE:
            problem = f"message of {len(str(error))} characters: {str(error)[:300]!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        problem = f"{type(error).__name__} at {place}: {str(error)[:200]}"
    finally:
        path.write_bytes(whole)
    if problem is None and (grown := _peak_memory() - peak) > MEMORY:
        problem = f"memory grew by {grown >> 20} MiB"
    return problem and f"{target.name}, {name}, case {case}: {problem}"


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
            target.read(folder)  # without a change it must succeed
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
    parser.add_argument("--out", type=Path, help="JSON file of the counts")
    arguments = parser.parse_args()
    targets = [t for t in TARGETS if t.name in (arguments.only or [x.name for x in TARGETS])]
    if arguments.case is not None:
        print(fuzz(targets, 1, arguments.seed, arguments.case))
        return 0
    counts, failed = {}, 0
    total = sum(target.weight for target in targets)
    for target in targets:
        cases, started = math.ceil(arguments.cases * target.weight / total), time.monotonic()
        problems = fuzz([target], cases, arguments.seed)[target.name]
        seconds = time.monotonic() - started
        counts[target.name] = {"cases": cases, "failures": len(problems), "seconds": seconds}
        print(f"{target.name:<12} {cases:>7} cases {len(problems):>6} failures {seconds:>7.1f} s")
        failed += len(problems)
        kinds = collections.Counter(p.split(": ", 1)[1][:120] for p in problems)
        for kind, count in kinds.most_common(12):
            example = next(p for p in problems if kind in p)
            print(f"    {count:>5} x {example}")
        sys.stdout.flush()
        if arguments.out is not None:
            tree = {"machine": machine_name(), "seed": arguments.seed, "readers": counts}
            arguments.out.write_text(json.dumps(tree, indent=1) + "\n")
    print(f"{sum(c['cases'] for c in counts.values())} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
