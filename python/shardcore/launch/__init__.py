"""``shardcore-launch``: start the ranks of a job and see them through to the end.

The command line and the plan know no torch; only what starts processes does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardcore.errors import LaunchError
from shardcore.launch.arguments import Options, parse
from shardcore.launch.plan import HostPlan, LaunchPlan, RankPlace, plan_local
from shardcore.launch.signals import StopSignals

__all__ = ["HostPlan", "LaunchPlan", "Options", "RankPlace", "main", "parse", "plan_local"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shardcore-launch`` and return its exit status; 2 if no rank could be started."""
    options = parse(sys.argv[1:] if argv is None else argv)
    signals = StopSignals()
    try:
        from shardcore.launch.local import launch  # torch, seconds of import, is not for `--help`

        return launch(options, signals)
    except LaunchError as error:
        print(f"shardcore-launch: {error}", file=sys.stderr)
        return 2
    except BaseException:
        if signals.received is None:
            raise
        print(f"shardcore-launch: stopped by {signals.received.name}", file=sys.stderr)
        return 128 + signals.received
