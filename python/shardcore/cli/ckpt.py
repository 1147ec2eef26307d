"""``shardcore ckpt``: what is in a checkpoint, whether it is sound, and forms of it for others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardcore import checkpoint

_EXAMPLES = """\
examples:
  shardcore ckpt ls runs/gpt                  the checkpoints of a run
  shardcore ckpt ls runs/gpt/step100          what one of them holds, and on which mesh it was saved
  shardcore ckpt verify runs/gpt              read every byte of all of them
  shardcore ckpt diff runs/a/step9 runs/b/step9
  shardcore ckpt to-hf runs/gpt exported --dtype bf16
  shardcore ckpt import-deepspeed old/run runs/gpt
  shardcore ckpt to-dcp runs/gpt exported
  shardcore ckpt reshard runs/gpt/step100 copies --num-files 4
"""


def add_to(commands: Any) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "ckpt",
        help="look at checkpoints",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    listing = _add(kinds, "ls", "what there is", _ls)
    listing.add_argument("path", type=Path, help="a run's folder, or one checkpoint in it")
    listing.add_argument("--tensors", action="store_true", help="every tensor, too")
    _add(kinds, "verify", "compare every checksum; status 1 for damage", _verify).add_argument("path", type=Path)
    comparing = _add(kinds, "diff", "the largest difference per tensor; status 1 for any", _diff)
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    exporting = _add(kinds, "to-hf", "weights as Hugging Face keeps them", _to_hf)
    exporting.add_argument("path", type=Path)
    exporting.add_argument("out", type=Path)
    exporting.add_argument("--tag")
    exporting.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of floating tensors; else the model's")
    exporting.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a file at most (10^9 bytes)")
    exporting.add_argument("--strip", default="", metavar="PREFIX", help="take this off the front of names")
    importing = _add(kinds, "import-deepspeed", "make a checkpoint of one of DeepSpeed's", _import_deepspeed)
    importing.add_argument("path", type=Path, help="DeepSpeed's folder of a run, or one checkpoint in it")
    importing.add_argument("out", type=Path, help="a run's folder, which is made")
    importing.add_argument("--tag")
    importing.add_argument("--strip", default="", metavar="PREFIX", help="take this off the front of names")
    importing.add_argument("--num-files", type=int, default=1)
    for name, text, run in (
        ("to-dcp", "for torch.distributed.checkpoint", _to_dcp),
        ("import-dcp", "make a checkpoint of one of torch.distributed.checkpoint's", _import_dcp),
    ):
        passing = _add(kinds, name, text, run)
        passing.add_argument("path", type=Path)
        passing.add_argument("out", type=Path)
        passing.add_argument("--tag", help="which checkpoint of a run's folder" if run is _to_dcp else "of the new one")
        passing.add_argument("--model-key", default="model", help="under which the model's state stands")
        passing.add_argument("--optimizer-key", default="optim", help="under which the optimizer's state stands")
    copying = _add(kinds, "reshard", "copy into another number of files", _reshard)
    copying.add_argument("path", type=Path)
    copying.add_argument("out", type=Path, help="a run's folder, which is made")
    copying.add_argument("--num-files", type=int, required=True)


def _add(kinds: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _ls(options: argparse.Namespace) -> int:
    is_run = not (options.path / "index.json").exists()
    if is_run:
        print(checkpoint.explain_run(options.path))
    else:
        print(checkpoint.explain_checkpoint(options.path, with_tensors=options.tensors))
    return 0


def _verify(options: argparse.Namespace) -> int:
    damages = checkpoint.verify(options.path)
    for damage in damages:
        print(f"{damage.path}: bytes {damage.start} to {damage.stop}: {damage.what}")
    if not damages:
        print(f"{options.path}: sound")
    return int(bool(damages))


def _diff(options: argparse.Namespace) -> int:
    found = checkpoint.diff(options.first, options.second)
    for difference in found:
        print(f"{difference.largest:.3e}  {difference.role} {difference.name}  {difference.note}")
    if not found:
        print("equal to the last bit")
    return int(bool(found))


def _to_hf(options: argparse.Namespace) -> int:
    files = checkpoint.to_hf(
        options.path,
        options.out,
        tag=options.tag,
        dtype=options.dtype,
        max_shard_nbytes=int(options.max_shard_gb * 1e9),
        rename=lambda name: name.removeprefix(options.strip),
    )
    for file in files:
        print(file)
    return 0


def _import_deepspeed(options: argparse.Namespace) -> int:
    report = checkpoint.import_deepspeed(
        options.path,
        options.out,
        tag=options.tag,
        rename=lambda name: name.removeprefix(options.strip),
        num_files=options.num_files,
    )
    print("\n".join([str(report.path), *report.notes]))
    return 0


def _to_dcp(options: argparse.Namespace) -> int:
    keys = {"model_key": options.model_key, "optimizer_key": options.optimizer_key}
    print(checkpoint.to_dcp(options.path, options.out, tag=options.tag, **keys))
    return 0


def _import_dcp(options: argparse.Namespace) -> int:
    keys = {"model_key": options.model_key, "optimizer_key": options.optimizer_key}
    report = checkpoint.import_dcp(options.path, options.out, tag=options.tag, **keys)
    print("\n".join([str(report.path), *report.notes]))
    return 0


def _reshard(options: argparse.Namespace) -> int:
    print(checkpoint.reshard(options.path, options.out, options.num_files))
    return 0
