"""Train a tiny Llama in three dimensions, and show that it learns what one process learns.

    shardcore-launch --nproc-per-node 8 examples/train_3d.py

The configuration file, ``3d.json``, cuts an ordinary model of `transformers` into 2 pipeline stages, splits each layer
over 2 tensor-parallel ranks, and shards the optimizer over the 2 data-parallel ranks that are left (ZeRO-1). The loop
is that of any DeepSpeed script. At the end the first rank trains the same model alone, in plain torch on the same
batches, and draws both loss curves in one picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardcore.deepspeed as deepspeed
import text
from progress import say, sum_over_ranks

CONFIG = Path(__file__).with_name("3d.json")


def build_model(seed: int) -> nn.Module:
    """A Llama over bytes: 0.1M parameters, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )


def batches(args: argparse.Namespace, num_samples: int) -> Iterator[dict[str, torch.Tensor]]:
    """The global batch of each step, int64 [samples, time]: the same on every rank and for one process."""
    windows = text.Windows(text.load(args.text)[0], args.seq)
    if len(windows) == 0:
        raise SystemExit(f"the text holds fewer bytes than --seq {args.seq}; name a longer one with --text")
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(args.seed))
    for step in range(args.steps):
        chosen = [int(order[(step * num_samples + i) % len(order)]) for i in range(num_samples)]
        tokens = torch.stack([windows[index][: args.seq] for index in chosen])
        yield {"input_ids": tokens, "labels": tokens}


def train(args: argparse.Namespace) -> tuple[list[float], Any]:
    """The loss of each step over all ranks, by the engine. Collective."""
    model = build_model(args.seed)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if not engine.is_pipeline:
        raise SystemExit(f"{args.deepspeed_config}: pipeline.stages must be at least 2; train_gpt.py does the rest")
    rank, world = engine.mesh.data_rank, engine.mesh.data_world
    losses = []
    for step, batch in enumerate(batches(args, engine.train_batch_size()), start=1):
        mine = {name: tokens.chunk(world)[rank].to(engine.device) for name, tokens in batch.items()}
        loss = engine(mine)  # all micro-batches of the step, through all stages
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        report("3d", step, args.steps, losses)
    return losses, engine


def train_alone(args: argparse.Namespace) -> list[float]:
    """The loss of each step in one process, by plain torch."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    model = build_model(args.seed)
    options = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses = []
    for step, batch in enumerate(batches(args, config["train_batch_size"]), start=1):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        report("alone", step, args.steps, losses)
    return losses


def report(name: str, step: int, num_steps: int, losses: list[float]) -> None:
    """A line every ten steps."""
    if step == 1 or step % 10 == 0 or step == num_steps:
        say(f"{name:>5}: step {step:>4}/{num_steps}  loss {losses[-1]:.4f}")


def draw(path: Path, split: list[float], alone: list[float]) -> None:
    """Both curves as a PNG."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    steps = range(1, len(split) + 1)
    axes.plot(steps, alone, linewidth=6, alpha=0.35, label="one process, plain torch")
    axes.plot(steps, split, linewidth=1.2, label="8 ranks: 2 stages x 2 tensor-parallel x 2 data-parallel, ZeRO-1")
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    say(f"loss curves: {path}")


def parse_arguments() -> argparse.Namespace:
    """The command line, as a DeepSpeed script has it."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(description="Train a tiny Llama on 8 ranks."))
    parser.set_defaults(deepspeed_config=str(CONFIG))
    option = parser.add_argument
    option("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    option("--seq", type=int, default=64, help="bytes per sequence (default: 64)")
    option("--text", type=Path, metavar="PATH", help="a file or folder to learn from (default: Python's own library)")
    option("--seed", type=int, default=0, help="of the weights and of the order of the data")
    option("--out", type=Path, default=Path("runs/3d"), help="folder for the picture")
    args = parser.parse_args()
    if args.steps < 1 or args.seq < 2:
        parser.error("expected at least one step, and two bytes per sequence")
    return args


def main() -> None:
    """Train twice, and compare."""
    args = parse_arguments()
    losses, engine = train(args)
    if engine.global_rank == 0:
        alone = train_alone(args)
        args.out.mkdir(parents=True, exist_ok=True)
        draw(args.out / "loss.png", losses, alone)
        say(f"largest difference {max(abs(a - b) for a, b in zip(losses, alone, strict=True)):.1e}")
    sum_over_ranks(torch.zeros(()))  # the others wait, so that no rank leaves before the job is done


if __name__ == "__main__":
    main()
