"""Try every fault on every command, and count what was seen.

export PYTHONPATH=tests:benchmarks
python -m faults.campaign                          # every event: hours
python -m faults.campaign --sample 40 --only train --faults "kill -9"
python -m faults.campaign --only train --faults "kill -9" --event 117      # repeat one
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from faults.client import open_server
from faults.commands import COMMANDS
from faults.kinds import FAULTS
from faults.trial import Trial, Tried
from machine_name import machine_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, help="events of each cell (default: all)")
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="commands")
    parser.add_argument("--faults", action="append", choices=list(FAULTS))
    parser.add_argument("--event", type=int, help="repeat this one")
    parser.add_argument("--out", type=Path, help="JSON file of the counts, which are added to it")
    arguments = parser.parse_args()
    failed = 0
    with open_server() as server:
        for name in arguments.only or COMMANDS:
            trial = Trial(server, COMMANDS[name], arguments.sample)
            print(f"{name}: {trial.counts}", flush=True)
            for fault in arguments.faults or FAULTS:
                if not FAULTS[fault].commands(trial.command):
                    continue
                started = time.monotonic()
                tried = FAULTS[fault].run(trial, arguments.event)
                took = time.monotonic() - started
                print(f"{name:<16} {fault:<17} {took:6.1f} s {tried.plain()}", flush=True)
                for failure in tried.failures:
                    print(f"    {failure}", flush=True)
                failed += len(tried.failures)
                if arguments.out is not None:
                    record(arguments.out, name, fault, tried)
    print(f"{failed} failures")
    return 1 if failed else 0


def record(path: Path, command: str, fault: str, tried: Tried) -> None:
    """Set a cell of the file of counts."""
    tree = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    tree["machine"] = machine_name()
    tree["cells"].setdefault(command, {})[fault] = tried.plain()
    path.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
