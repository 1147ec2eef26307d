"""A whole training program that makes one step and ends: what ``startup.py`` times."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches.e2e.trainer import Settings, make_handler
from benches.processes import set_environment


def main(arm: str, rank: str, num_ranks: str, port: str, model: str) -> None:
    """Import everything, build the model, shard it, make one step, and say so."""
    set_environment(int(rank), int(num_ranks), int(port))
    handle = make_handler(arm, Settings(model=model, batch=1, seq=64))
    handle("first step", None)
    print("first step done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
