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
from typing import Any

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
    parser.add_argument("--out", type=Path, help="JSON file of the counts; cells in it are skipped")
    arguments = parser.parse_args()
    failed = 0
    with open_server() as server:
        for name in arguments.only or COMMANDS:
            faults = [
                fault
                for fault in arguments.faults or FAULTS
                if FAULTS[fault].commands(COMMANDS[name])
                and not is_recorded(arguments.out, name, fault, arguments.sample)
            ]
            if not faults:
                continue
            trial = Trial(server, COMMANDS[name], arguments.sample)
            print(f"{name}: {trial.counts}", flush=True)
            for fault in faults:
                started = time.monotonic()
                tried = FAULTS[fault].run(trial, arguments.event)
                took = time.monotonic() - started
                print(f"{name:<16} {fault:<17} {took:6.1f} s {tried.to_dict()}", flush=True)
                for failure in tried.failures:
                    print(f"    {failure}", flush=True)
                failed += len(tried.failures)
                if arguments.out is not None:
                    record(arguments.out, name, fault, arguments.sample, tried)
    print(f"{failed} failures")
    return 1 if failed else 0


def read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"machine": machine_name(), "cells": {}}
    return json.loads(path.read_text())


def is_recorded(path: Path | None, command: str, fault: str, sample: int | None) -> bool:
    """Whether as many events were tried without a failure, in a campaign that was interrupted."""
    cell = read(path)["cells"].get(command, {}).get(fault)
    if cell is None or cell["failures"]:
        return False
    return cell["sample"] is None or (sample is not None and cell["sample"] >= sample)


def record(path: Path, command: str, fault: str, sample: int | None, tried: Tried) -> None:
    tree = read(path)
    cell = {"sample": sample, "machine": machine_name(), **tried.to_dict()}
    tree["cells"].setdefault(command, {})[fault] = cell
    path.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
