"""Trainings that are saved in one setting and loaded in another, and what is compared between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardcore as sc
from shardcore.testing import zoo

ROWS = 12
"""Rows of a global batch: divisible by 1, 2, 3 and 4 ranks."""
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}),
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3, "fused": True}),
    "kernel": (sc.optim.CPUAdamW, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"states": "cpu"},
    "disk": {"states": "nvme", "tile_numel": 37, "num_tiles": 3},
    "parameters": {"params": "cpu", "states": "cpu"},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a training is spread over ranks."""

    model: str = "odd"
    stage: int = 3
    world: int = 2
    replicate: int = 1
    precision: str = "fp32"
    units: str | tuple[str, ...] = "auto"
    home: str = "device"
    optimizer: str = "adamw"


class WithLoss(nn.Module):
    """A model of the zoo, or any other, that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: zoo.Batch) -> torch.Tensor:
        """The mean loss of a batch."""
        return zoo.loss(self.model, batch)


@dataclass
class Training:
    """A model with all that trains it."""

    setting: Setting
    mesh: sc.Mesh
    model: nn.Module
    optimizer: Any
    scheduler: Any

    def steps(self, first: int, last: int) -> list[float]:
        """Train on the batches of these steps; the mean losses over the ranks' own."""
        return [self.step(number) for number in range(first, last)]

    def step(self, number: int) -> float:
        """One step on this rank's rows of the batch of that number."""
        whole = zoo.batch(self.setting.model, number, ROWS)
        loss = self.model(self.cast(zoo.rank_slice(whole, self.mesh.data_rank, self.mesh.data_world)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def cast(self, batch: zoo.Batch) -> zoo.Batch:
        """Floating inputs in the dtype of the parameters."""
        if self.setting.precision == "fp32":
            return batch
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.setting.precision]
        return {k: v.to(dtype) if v.is_floating_point() and k != "target" else v for k, v in batch.items()}

    def save(self, path: Path | str, **more: Any) -> Path:
        """Save everything."""
        return sc.checkpoint.save(path, self.model, self.optimizer, self.scheduler, **more)

    def load(self, path: Path | str, **more: Any) -> sc.checkpoint.Loaded:
        """Load everything."""
        return sc.checkpoint.load(path, self.model, self.optimizer, self.scheduler, **more)


def begin(setting: Setting, folder: Path | str = "", model: nn.Module | None = None, seed: int = 0) -> Training:
    """A training in this setting. Collective."""
    mesh = sc.Mesh(device="cpu", replicate=setting.replicate)
    module = WithLoss(model if model is not None else zoo.build(setting.model, seed))
    home = HOMES[setting.home]
    sc.shard(
        module,
        mesh,
        stage=setting.stage,
        units=setting.units,
        precision=sc.Precision(param=None if setting.precision == "fp32" else setting.precision),
        offload=sc.Offload(**home, path=folder if home.get("states") == "nvme" else None) if home else None,
    )
    cls, options = OPTIMIZERS[setting.optimizer]
    # Two groups, by name.
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in named if not name.endswith("bias")]},
        {"params": [param for name, param in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = sc.optimizer(cls, [group for group in groups if group["params"]], **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    return Training(setting, mesh, module, optimizer, scheduler)


Piece = tuple[str, str, int, int, torch.Tensor]
"""(state, name of the parameter, start, stop, values) on one rank; the master weight is the state "weight"."""


def look(training: Training) -> dict[str, Any]:
    """Everything on this rank that must survive, as copies."""
    optimizer = training.optimizer
    pieces: list[Piece] = []
    values: dict[str, dict[str, float]] = {}

    def note(held: Any, states: dict[str, torch.Tensor]) -> None:
        for state, value in states.items():
            name = "weight" if state == "master weight" else state
            pieces.append((name, held.slot.name, held.start, held.stop, value.clone()))
        values[held.slot.name] = {key: float(value) for key, value in held.values.items() if value is not None}

    optimizer.read_pieces(note)
    on_disk = {name for state, name, *_ in pieces if state == "weight"}
    root = training.model.__dict__["_shardcore_root"]
    for group in root.groups:
        group.adopt_edits_if_any()
        shard = group.master if group.master.numel() == group.own.numel() else group.own
        for slot in group.slots:
            start, stop, offset = group.local_range(slot)
            own = group.own[offset : offset + stop - start].clone()
            pieces.append(("own", slot.name, start, stop, own))
            if slot.name not in on_disk:
                pieces.append(("weight", slot.name, start, stop, shard[offset : offset + stop - start].clone()))
    return {
        "pieces": pieces,
        "values": values,
        "buffers": {name: buffer.clone() for name, buffer in training.model.named_buffers()},
        "scale": optimizer.loss_scale.state_dict(),
        "steps": (optimizer.num_steps, optimizer.num_skipped_steps),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "options": [
            {k: v for k, v in g.items() if k in ("betas", "weight_decay", "momentum")} for g in optimizer.param_groups
        ],
        "scheduler": training.scheduler.state_dict(),
    }


def joined(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """From every rank's pieces, each state of each parameter as one vector; copies must agree."""
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for rank in ranks:
        for state, name, start, stop, values in rank["pieces"]:
            have = found.setdefault(f"{state} of {name}", {})
            if stop > start:
                assert (start, stop) not in have or torch.equal(have[start, stop], values), f"copies of {name} differ"
                have[start, stop] = values
    whole = {}
    for name, pieces in found.items():
        covered, parts = 0, []
        for (start, stop), values in sorted(pieces.items(), key=lambda item: item[0]):
            assert start == covered, f"{name}: elements {covered} to {start} are nowhere"
            covered = stop
            parts.append(values)
        whole[name] = torch.cat(parts) if parts else torch.zeros(0)
    return whole


def assert_same(before: list[dict[str, Any]], after: list[dict[str, Any]], *, states: bool = True) -> None:
    """What was saved and what was loaded agree to the last bit, on whatever ranks."""
    saved, loaded = joined(before), joined(after)
    kinds = ("weight of",) if not states else ("weight of", "exp_avg", "momentum")
    names = [name for name in saved if name.startswith(kinds)]
    assert names
    for name in names:
        assert name in loaded, f"{name} is gone"
        first, second = saved[name], loaded[name]
        assert first.shape == second.shape, name
        common = torch.promote_types(first.dtype, second.dtype)
        if name.startswith("weight of") and first.dtype != second.dtype:  # a frozen or unsplit weight of 16 bits
            first = first.to(second.dtype)
            common = second.dtype
        assert torch.equal(first.to(common), second.to(common)), f"{name} differs"
    for name, values in loaded.items():
        if name.startswith("own of"):
            master = loaded[name.replace("own of", "weight of")]
            assert torch.equal(values, master.to(values.dtype)), f"parameter {name} is not its master"
    if states:
        assert_same_run(before, after)


def assert_same_run(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Counters, options, schedule and loss scale agree on every rank."""
    first = before[0]
    steps_of = {name: value for rank in before for name, value in rank["values"].items()}
    for rank in after:
        for key in ("steps", "lr", "options", "scheduler"):
            assert rank[key] == first[key], f"{key}: {rank[key]} instead of {first[key]}"
        if set(rank["scale"]) == set(first["scale"]):
            assert rank["scale"] == first["scale"]
        for name, value in rank["values"].items():
            assert value.get("step", 0.0) == steps_of.get(name, {}).get("step", 0.0), name


def nbytes_on_disk(folder: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.iterdir())


def index_of(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint."""
    found: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return found
