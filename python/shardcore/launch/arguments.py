"""The command line of ``shardcore-launch``: its own options first, then the program and whatever belongs to it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for."""

    num_ranks: int | str
    """Ranks to start on this machine: a number, or ``auto``, ``gpu``, ``cpu``."""
    slots: tuple[str, ...] | None
    """Device slots to use, as positions among the visible devices; ``None`` uses all."""
    master_addr: str
    """Address at which rank 0's store is found."""
    master_port: int | None
    """Port of that store; ``None`` takes a free one."""
    max_restarts: int
    """How often all ranks are started anew after a failure."""
    log_dir: str | None
    """Folder for each rank's output; ``None`` keeps none."""
    run_as: str
    """``script``, ``module`` or ``program``: how to start ``program``."""
    program: str
    """Script path, module name or program."""
    arguments: tuple[str, ...]
    """The program's own arguments, untouched."""


EPILOG = """\
examples:
  shardcore-launch --nproc-per-node auto train.py --stage 3 --lr 3e-4
  shardcore-launch --nproc-per-node 2 --max-restarts 1 -m my_package.train
  CUDA_VISIBLE_DEVICES=4,5,6,7 shardcore-launch --include localhost:0,2 train.py

Options of shardcore-launch go before the script; everything after it is the script's.
Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
The exit status is that of the first rank that failed (128+n if signal n ended it), 0 if none did, 2 for bad usage.
Underscores in option names are read as hyphens.
"""

_FLAGS = ("-h", "--help", "-m", "--module", "--no-python", "--standalone")
_VALUES = (
    *("--nproc-per-node", "--num-gpus", "--include", "--master-addr", "--master-port", "--max-restarts", "--log-dir"),
    *("--nnodes", "--num-nodes", "--node-rank"),
)


def parse(argv: Sequence[str]) -> Options:
    """Read the command line. Prints to standard error and exits with status 2 if it cannot be understood."""
    parser = _parser()
    own, rest = _split(argv, parser)
    given = parser.parse_args(own)
    if not rest:
        parser.error("which program? Name the script to run after the options, as in: shardcore-launch train.py")
    run_as = "module" if given.module else "program" if given.no_python else "script"
    if run_as == "script" and not Path(rest[0]).is_file():
        parser.error(f"no script at {rest[0]!r} (for a module use -m, for another program --no-python)")
    return Options(
        num_ranks=given.nproc_per_node,
        slots=given.include,
        master_addr=given.master_addr,
        master_port=given.master_port,
        max_restarts=given.max_restarts,
        log_dir=given.log_dir,
        run_as=run_as,
        program=rest[0],
        arguments=tuple(rest[1:]),
    )


def _split(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Separate the launcher's options from the program and its arguments, which no parser may touch."""
    own: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, equals, value = rest.pop(0).partition("=")
        name = name.replace("_", "-")
        if name in _VALUES and not equals:
            if not rest:
                parser.error(f"{name} needs a value")
            equals, value = "=", rest.pop(0)
        elif name not in _VALUES and (name not in _FLAGS or equals):
            _refuse(name + equals + value, name, parser)
        own.append(name + equals + value)
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _refuse(token: str, name: str, parser: argparse.ArgumentParser) -> NoReturn:
    # Each option also by its first words, since those are what people remember: --nproc for --nproc-per-node.
    forms = {option[:end]: option for option in (*_FLAGS, *_VALUES) for end in _word_ends(option)}
    near = difflib.get_close_matches(name, forms, n=1)
    hint = f"did you mean {forms[near[0]]}? " if near and near[0] != name else ""
    parser.error(f"unknown option {token}: {hint}Options of the script go after the script")


def _word_ends(option: str) -> list[int]:
    """Where the words of ``--a-b-c`` end; the whole option last, so that it wins over another's beginning."""
    return [at for at in range(3, len(option)) if option[at] == "-"] + [len(option)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardcore-launch",
        usage="shardcore-launch [options] script.py [script arguments ...]",
        description="Start one process per rank on this machine and watch over them until all are done.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--num-gpus",
        type=_num_ranks,
        default="auto",
        metavar="N",
        help="ranks to start: a number, gpu, cpu, or auto (the default): one per GPU, without GPUs one per CPU core",
    )
    add("--include", type=_slots, metavar="localhost:0,2", help="use these of the visible devices only")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="address of rank 0's store (127.0.0.1)")
    add("--master-port", type=_port, metavar="PORT", help="its port (a free one)")
    add("--max-restarts", type=_count, default=0, metavar="N", help="start all ranks anew up to N times (0)")
    add("--log-dir", metavar="DIR", help="write each rank's output to DIR/rankR.out and DIR/rankR.err as well")
    add("-m", "--module", action="store_true", help="the program is a module, as in: python -m module")
    add("--no-python", action="store_true", help="the program is started as it is, not with this Python")
    one = "accepted with the value of a single machine"
    add("--nnodes", "--num-nodes", type=_one_machine, metavar="1", help=one)
    add("--node-rank", type=_first_machine, metavar="0", help=one)
    add("--standalone", action="store_true", help="accepted: a single machine needs no other")
    return parser


def _num_ranks(text: str) -> int | str:
    return text if text in ("auto", "gpu", "cpu") else _positive(text, "a number of ranks, auto, gpu or cpu")


def _positive(text: str, expected: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number of at least 0")
    return int(text)


def _port(text: str) -> int:
    port = _positive(text, "a port, 1 to 65535")
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a port, 1 to 65535")
    return port


def _slots(text: str) -> tuple[str, ...]:
    host, colon, listed = text.partition(":")
    if host not in ("localhost", "127.0.0.1"):
        raise argparse.ArgumentTypeError(f"{text!r}: unknown host {host!r}, only localhost can be included")
    slots = tuple(listed.split(",")) if colon else ()
    for slot in slots:
        if not slot.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: {slot!r} is not a device slot, expected as in localhost:0,2")
    if len(set(slots)) < len(slots):
        raise argparse.ArgumentTypeError(f"{text!r} names a slot twice")
    return slots or _raise_no_slots(text)


def _raise_no_slots(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} names no device slot, expected as in localhost:0,2")


def _one_machine(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"{text!r}: ranks can be started on this machine only, so the value is 1")
    return 1


def _first_machine(text: str) -> int:
    if text != "0":
        raise argparse.ArgumentTypeError(f"{text!r}: there is one machine only, so its rank is 0")
    return 0
