"""The command line of ``shardcore-launch``; importable, and helpful, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardcore.errors import LaunchError
from shardcore.launch.plan import LaunchPlan, check_port, count_workers, default_environment, worker_command

_EXAMPLE = """example:
  shardcore-launch --nproc-per-node auto train.py --lr 3e-4
      one process per GPU (without GPUs: per CPU core) on this machine; everything after train.py goes to the script

exit status: that of the first worker that failed; 128 + n if signal n ended it; 2 for a wrong command line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``shardcore-launch``; returns the exit status."""
    options, script = _parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        plan = _plan(options, script)
    except LaunchError as error:
        print(f"shardcore-launch: {error}", file=sys.stderr)
        return 2
    from shardcore.launch.local import run  # torch starts here

    return run(plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardcore-launch",
        usage="shardcore-launch [options] script.py [script arguments]",
        description="Start one training process per GPU or CPU core of this machine.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus", default="auto", metavar="N",
        help="processes to start: N, 'gpu', 'cpu', or 'auto' (one per GPU, else per core); default auto")  # fmt: skip
    add(
        "--master-port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="port for the workers to meet; default a free one",
    )
    add(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all again up to N times; default 0",
    )
    add("--log-dir", "--log_dir", type=Path, metavar="DIR", help="also write each worker's output to files here")
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--no-python", "--no_python", action="store_true", help="run a program that is no Python script")
    return parser


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, script and its arguments). All after the script is the script's, untouched: argparse never sees it."""
    parser = _parser()
    takes_value = {s for a in parser._actions if a.nargs != 0 for s in a.option_strings}
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] in takes_value else 1
    options = parser.parse_args(arguments[:position])
    if position >= len(arguments):
        parser.error("no script given")
    return options, arguments[position:]


def _plan(options: argparse.Namespace, script: list[str]) -> LaunchPlan:
    if options.master_port is not None:
        check_port(options.master_port)
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts}: expected 0 or more")
    command = worker_command(script[0], script[1:], as_module=options.module, with_python=not options.no_python)
    num_workers = count_workers(options.nproc_per_node)
    return LaunchPlan(
        num_workers=num_workers,
        command=command,
        port=options.master_port,
        max_restarts=options.max_restarts,
        log_dir=options.log_dir,
        environment=default_environment(num_workers),
    )
