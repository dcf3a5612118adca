"""A process that has imported everything, and forks a child for every command it is asked to run.

    python -m faults.server        with the library of faults.c in LD_PRELOAD

A line of JSON comes in for each request, and one goes out. `start` runs a function of
`faults.commands` in a child, whose working directory is the folder of a cell, with a fault armed;
`wait` returns its exit code (negative for a signal) and the events that were counted.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from parcae import cli

KINDS = {"read": 1, "change": 2, "grow": 4, "fault": 0}
MODES = {"count": 0, "kill": 1, "fail once": 2, "fail from": 3, "short": 4}
IMPORTED = (
    "faults.commands",
    "matplotlib.pyplot",
    "parcae.evaluation.run",
    "parcae.experiments.reproduce",
    "parcae.data.synthetic",
    "parcae.hub.export",
    "parcae.laws.figures",
    "parcae.laws.fit",
    "parcae.laws.page",
    "parcae.report.page",
    "parcae.serving.server",
    "parcae.sweeps.run",
    "parcae.training.trainer",
    "shortcuts",
    "torch._inductor",
    "training.runs",
)


def main() -> None:
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = (
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
    )
    library.faults_clock.argtypes = (ctypes.c_long,)
    library.faults_count.restype = ctypes.c_long
    for name in IMPORTED:
        importlib.import_module(name)
    cli.parser()  # imports the commands
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            _answer(_start(library, **request["start"]))
        else:
            code = _wait(**request["wait"])
            counts = {name: library.faults_count(kind) for name, kind in KINDS.items()}
            _answer({"code": code, "counts": counts})


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _start(
    library: ctypes.CDLL,
    function: str,
    arguments: list[Any],
    folder: str,
    log: str,
    fault: dict[str, Any] | None,
) -> dict[str, int]:
    child = os.fork()
    if child:
        return {"process": child}
    code = 1
    try:
        _redirect(log)
        os.chdir(folder)
        if fault is not None:
            mode, kind = MODES[fault["mode"]], KINDS[fault["kind"]]
            library.faults_clock(fault["clock"])
            library.faults_arm(folder.encode(), mode, kind, fault["at"], fault["error"])
        module = importlib.import_module("faults.commands")
        code = getattr(module, function)(*arguments) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    sources = (os.devnull, f"{log}.out", f"{log}.err")
    for descriptor, path in enumerate(sources):
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)


def _wait(process: int, seconds: float) -> int | None:
    """The exit code; None, after it was killed, for a process that does not end."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
