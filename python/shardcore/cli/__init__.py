"""The command ``shardcore``: one subcommand a task. Parsing needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardcore.cli import ckpt
from shardcore.errors import ShardcoreError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shardcore`` and return its exit status: 0, 1 for a fault that was found, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="shardcore", description="Look at what shardcore saves.")
    ckpt.add_to(parser.add_subparsers(required=True, metavar="COMMAND"))
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return int(options.run(options))
    except ShardcoreError as error:
        print(f"shardcore: {error}", file=sys.stderr)
        return 1
