"""Train a GPT on real text, sharded over every rank there is.

    shardcore-launch --nproc-per-node auto examples/train_gpt.py --stage 3

One process works as well: ``python examples/train_gpt.py``. The library's part is `train` (or `train_with_engine`,
the same by a DeepSpeed-style configuration file); everything else is plain torch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import gpt
import shardcore as sc
import text
from progress import Progress, say, sum_over_ranks

WARMUP_STEPS = 40
NUM_VALIDATION_WINDOWS = 256


def train(args: argparse.Namespace, model: nn.Module, mesh: sc.Mesh, batches: Iterator, progress: Progress) -> None:
    """The native way: shard the model, wrap the optimizer, and write the loop as ever."""
    sc.shard(model, mesh, stage=args.stage, units="auto", precision=sc.Precision(param=args.precision))
    optim = sc.optimizer(
        torch.optim.AdamW, decay_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True, max_grad_norm=1.0
    )
    schedule = LambdaLR(optim, lambda step: warmup_cosine(step, args.steps))
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulation):
            loss = next_token_loss(model, next(batches)).mean() / args.accumulation
            loss.backward()
            progress.add(loss)
        optim.step()
        optim.zero_grad()
        progress.end_step(step, optim.param_groups[0]["lr"], optim.grad_norm)
        schedule.step()


def train_with_engine(args: argparse.Namespace, engine: Any, batches: Iterator, progress: Progress) -> None:
    """The drop-in way: the configuration file said it all, and the engine keeps the books."""
    for step in range(1, args.steps + 1):
        lr = engine.get_lr()[0]
        for _ in range(args.accumulation):
            loss = next_token_loss(engine, next(batches)).mean()
            engine.backward(loss)
            engine.step()
            progress.add(loss / args.accumulation)
        progress.end_step(step, lr, engine.get_global_grad_norm())


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Nats per token of each window: int64 [batch, time + 1] -> float32 [batch]."""
    output = model(tokens[:, :-1])
    logits = getattr(output, "logits", output)  # models of `transformers` return them in an object
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return loss.view(len(tokens), -1).mean(dim=1)


def decay_groups(model: nn.Module) -> list[dict]:
    """Parameter groups: weight decay for matrices, none for gains and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def warmup_cosine(step: int, num_steps: int) -> float:
    """Factor of the learning rate: up in a line, then down along a cosine to a twentieth."""
    warmup = min(WARMUP_STEPS, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


# --------------------------------------------------------------------------------------------------------------- data


def training_batches(dataset: text.Windows, mesh: sc.Mesh, micro_batch: int, seed: int) -> Iterator[torch.Tensor]:
    """This rank's batches without end, int64 [micro_batch, time + 1]; a new order every epoch."""
    sampler = sc.data.sampler(dataset, mesh, seed=seed)
    loader = DataLoader(dataset, batch_size=micro_batch, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"the text gives {len(dataset)} windows, too few for one batch of {mesh.data_world} ranks")
    while True:
        for tokens in loader:
            sampler.advance(len(tokens))
            yield tokens.to(mesh.device)


@torch.no_grad()
def validation_loss(model: nn.Module, dataset: text.Windows, mesh: sc.Mesh, micro_batch: int) -> float:
    """Mean over the same windows, evenly spaced, whatever the number of ranks. Collective."""
    num_windows = min(NUM_VALIDATION_WINDOWS, len(dataset))
    windows = Subset(dataset, [index * len(dataset) // num_windows for index in range(num_windows)])
    sampler = sc.data.sampler(windows, mesh, shuffle=False, tail="pad")
    model.eval()
    loader = DataLoader(windows, batch_size=4 * micro_batch, sampler=sampler)
    losses = torch.cat([next_token_loss(model, tokens.to(mesh.device)) for tokens in loader])
    model.train()
    losses = losses[: len(losses) - sampler.num_padding]
    total, count = sum_over_ranks(torch.stack([losses.sum(), losses.new_tensor(len(losses))])).tolist()
    return total / count


@torch.no_grad()
def write_sample(model: nn.Module, prompt: str, context: int, num_tokens: int, device: torch.device) -> str:
    """What the model writes after ``prompt``. Collective: a model sharded at stage 3 is gathered for each byte."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        output = model(torch.tensor([tokens[-context:]], device=device))
        logits = getattr(output, "logits", output)[0, -1, :256].float().cpu()
        tokens.append(int(torch.multinomial((logits / 0.8).softmax(dim=-1), 1, generator=generator)))
    text = bytes(tokens).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


# ------------------------------------------------------------------------------------------------------------- set-up


def build_model(args: argparse.Namespace) -> nn.Module:
    """The preset's GPT, or a causal language model of `transformers` made from a configuration file."""
    if args.hf is None:
        return gpt.GPT(gpt.PRESETS[args.model])
    settings = read_hf(args.hf)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError:
        raise SystemExit("--hf needs the package transformers: pip install transformers") from None
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    except ValueError as error:
        raise SystemExit(f"--hf {args.hf}: {shorten(str(error), 200)}") from None
    if config.vocab_size < 256:
        raise SystemExit(f"--hf: text is read as bytes, so vocab_size must be at least 256, not {config.vocab_size}")
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise SystemExit(
            f"--hf {args.hf}: `transformers` has no model that continues text for model_type {config.model_type!r}; "
            "give the configuration of one, such as gpt2, llama, qwen2 or mixtral"
        ) from None


def read_hf(path: Path) -> dict[str, Any]:
    """The settings of a model's ``config.json``."""
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"--hf {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"--hf {path}: not valid JSON: {error}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise SystemExit(f'--hf {path}: expected a JSON object with "model_type", as in a model\'s config.json')
    return settings


def complete(args: argparse.Namespace, model: nn.Module, mesh: sc.Mesh, engine: Any | None) -> None:
    """Fill in what was left to the program: by the model, the ranks, or the engine's configuration."""
    longest = model.config.context if args.hf is None else getattr(model.config, "max_position_embeddings", None)
    if args.seq is None:
        args.seq = model.config.context if args.hf is None else min(128, longest or 128)
    if longest is not None and args.seq > longest:
        raise SystemExit(f"--seq {args.seq} is longer than the model's context of {longest}; choose at most that")
    if engine is not None:
        args.accumulation = engine.gradient_accumulation_steps()
        args.batch = engine.train_batch_size()
        return
    if args.precision is None:
        args.precision = "bf16" if mesh.device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if args.lr is None:
        width = model.config.dim if args.hf is None else model.config.hidden_size
        args.lr = 0.32 / width  # a wider model wants a lower rate
    share = mesh.data_world * args.accumulation
    if args.batch is None:
        args.batch = math.ceil(8 / share) * share
    if args.batch % share:
        raise SystemExit(
            f"--batch {args.batch} sequences do not divide over {mesh.data_world} ranks x {args.accumulation} "
            f"accumulation steps; choose a multiple of {share}"
        )


def count(text: str) -> int:
    """A number of at least 1, on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    """A finite number above 0, on the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def in_units(number: int, unit: str) -> str:
    """``9.5M parameters``, ``74,112 parameters``: rounded where nothing is lost by it."""
    return f"{number / 1e6:.1f}M {unit}" if number >= 1e6 else f"{number:,} {unit}"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a GPT on real text, byte by byte.")
    option = parser.add_argument
    option("--model", choices=gpt.PRESETS, default="small", help="size of the built-in GPT (default: small)")
    option("--hf", type=Path, metavar="CONFIG.json", help="train a model of `transformers` made from this file instead")
    option("--text", type=Path, metavar="PATH", help="a file or folder to learn from (default: Python's own library)")
    option("--config", type=Path, metavar="DS.json", help="a DeepSpeed-style configuration, through the engine")
    option("--stage", type=int, choices=range(4), help="what is sharded: 0 nothing ... 3 everything (default: 2)")
    option(
        "--precision", choices=["fp32", "bf16", "fp16"], help="dtype of parameters (default: bf16 on GPUs, else fp32)"
    )
    option("--steps", type=count, default=800, help="optimizer steps (default: 800)")
    option("--batch", type=count, help="sequences per step, over all ranks (default: 8 or a little more)")
    option("--accumulation", type=count, help="micro-batches per step (default: 1)")
    option("--seq", type=count, help="tokens per sequence (default: the model's context)")
    option("--lr", type=rate, help="peak learning rate (default: 0.32 / width of the model)")
    option("--seed", type=int, default=0, help="of the weights and of the order of the data")
    option("--prompt", default="def ", help="what the sample at the end continues (default: 'def ')")
    option("--log-every", type=count, default=20, help="steps between progress lines")
    option("--validate-every", type=count, default=200, help="steps between validations")
    option("--out", type=Path, default=Path("runs/gpt"), help="folder for the model and the loss curve")
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt: expected at least one character")
    if args.config is None:
        args.stage = 2 if args.stage is None else args.stage
        args.accumulation = args.accumulation or 1
    else:
        for name in ("stage", "precision", "batch", "accumulation", "lr"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} and --config both given: the configuration file says it")
        if not args.config.is_file():
            parser.error(f"--config {args.config}: no such file")
    return args


def main() -> None:
    """Train, then show what was learned."""
    args = parse_arguments()
    mesh = sc.Mesh()
    torch.manual_seed(args.seed)
    model = build_model(args).to(mesh.device)
    engine = None
    if args.config is not None:
        engine, _, _, _ = sc.initialize(model=model, model_parameters=decay_groups(model), config=str(args.config))
    complete(args, model, mesh, engine)
    micro_batch = args.batch // (mesh.data_world * args.accumulation)
    train_text, valid_text = (text.Windows(part, args.seq) for part in text.load(args.text))
    if len(valid_text) == 0:
        raise SystemExit(f"the text holds {len(valid_text.content)} bytes for validation, fewer than --seq {args.seq}")
    numel = sum(p.numel() for p in model.parameters())
    say(
        f"{in_units(numel, 'parameters')} on {mesh.data_world} x {mesh.device.type}, "
        f"{in_units(len(train_text.content), 'bytes of text')}, {args.batch} x {args.seq} tokens per step"
    )
    progress = Progress(
        lambda: validation_loss(model, valid_text, mesh, micro_batch),
        num_steps=args.steps,
        tokens_per_step=args.batch * args.seq,
        every=args.log_every,
        validate_every=args.validate_every,
    )
    batches = training_batches(train_text, mesh, micro_batch, args.seed)
    if engine is None:
        train(args, model, mesh, batches, progress)
    else:
        train_with_engine(args, engine, batches, progress)

    say(f"\n{write_sample(model, args.prompt, args.seq, num_tokens=300, device=mesh.device)}\n")
    weights = sc.state_dict(model)
    if mesh.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, args.out / "model.pt")
        say(f"model: {args.out / 'model.pt'}")
        progress.draw(args.out / "loss.png")
    say(f"val loss {progress.valid_curve[-1][1]:.2f}")


if __name__ == "__main__":
    main()
