"""``python -m benches``: every measurement, one after the other; names choose some, ``--save`` keeps the results."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

COMMANDS = {
    "train": "e2e/train.py",
    "startup": "e2e/startup.py",
    "checkpoint": "e2e/checkpoint.py",
    "offload": "e2e/offload.py",
    "tensor": "e2e/tensor.py",
    "overhead": "micro/overhead.py",
    "activation": "micro/activation.py",
    "collectives": "micro/collectives.py",
    "io": "micro/io.py",
    "cpu-adam": "micro/cpu_adam.py",
    "schedules": "micro/schedules.py",
}


def main() -> None:
    """Run the chosen commands; the exit status is that of the first that failed."""
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds that count, in each (default: its own)")
    parser.add_argument("--save", action="store_true", help="keep the results in benches/results")
    args = parser.parse_args()
    for name in args.names:
        if name not in COMMANDS:
            parser.error(f"no measurement is called {name!r}; there are {', '.join(COMMANDS)}")
    options = [f"--rounds={args.rounds}"] if args.rounds else []
    options += ["--save"] if args.save else []
    for name in args.names or COMMANDS:
        status = subprocess.call([sys.executable, str(Path(__file__).parent / COMMANDS[name]), *options])
        if status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
