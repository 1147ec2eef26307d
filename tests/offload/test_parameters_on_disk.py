"""Parameters on a disk at stage 3: host memory within its budget, the disk's faults, and what else reads shards."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from offload.disks import mounted
from offload.given import CountedPool, names, python
from offload.homes import train_steps
from shardcore.errors import ConfigError, ShardcoreError, StorageError
from shardcore.offload import ShardStore, taking
from shardcore.offload.room import Resident, find_room
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from zero.following import seeded
from zero.models import ZOO, Vector
from zero.twin import whole_parameters

F32 = torch.float32


def blocks() -> nn.Module:
    """Eight blocks of 64 x 64."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])


def train_blocks(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Steps on random inputs; the losses."""
    losses = []
    for step in steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(inputs.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def break_disk() -> dict[int, int]:
    """Let every swap file of this process fail; copies of their descriptors to mend it with."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    files = [int(link.name) for link in links if link.is_symlink() and ".swap" in str(link.readlink())]
    assert files
    nothing = os.open(os.devnull, os.O_RDONLY)
    whole = {file: os.dup(file) for file in files}
    for file in files:
        os.dup2(nothing, file)
    os.close(nothing)
    return whole


def mend_disk(whole: dict[int, int]) -> None:
    for number, copy in whole.items():
        os.dup2(copy, number)
        os.close(copy)


@pytest.mark.parametrize("states", ["cpu", "nvme"])
@spmd(world=2)
def test_a_quarter_of_the_parameters_in_host_memory(
    states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pool is counted, and what the store has in its own at each of its calls."""
    mesh, bf16 = sc.Mesh(), sc.Precision(param="bf16")
    plain = sc.shard(seeded(blocks), mesh, stage=3, precision=bf16)
    expected = train_blocks(plain, sc.optimizer(sc.optim.CPUAdamW, plain, lr=1e-2), mesh.rank, range(4))

    CountedPool.taken.clear()
    monkeypatch.setattr(taking, "HostPool", CountedPool)
    budget = sum(group.nbytes for group in find_root(plain).groups) // 2 // 4
    offload = sc.Offload(params="nvme", states=states, path=tmp_path, host_param_nbytes=budget, tile_numel=1000)
    model = sc.shard(seeded(blocks), mesh, stage=3, precision=bf16, offload=offload)
    groups = find_root(model).groups
    unit = max(group.nbytes for group in groups) // 2
    num_masters = sum(group.shard_numel for group in groups) if states == "cpu" else 0
    assert sum(CountedPool.taken) - 4 * num_masters <= budget + unit
    store, most = groups[0].store, 0
    use = store._use

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal most
        shard = use(*args, **options)
        most = max(most, sum(resident.stop - resident.start for resident in store._residents.values()))
        return shard

    store._use = counting
    optimizer = sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)
    losses = train_blocks(model, optimizer, mesh.rank, range(4))
    assert unit <= most <= budget + unit
    assert store.read_nbytes > 3 * len(groups) * unit  # most of what a step uses is not in memory
    assert all(group._own.numel() == 0 for group in groups)
    assert losses == expected
    assert_bitwise(whole_parameters(model), whole_parameters(plain))


@spmd(world=1)
def test_shards_come_ahead_of_their_gathers(tmp_path: Path) -> None:
    """From the second step on, a plan is known, and shards are on their way before they are asked for."""
    model = sc.shard(seeded(blocks), stage=3, offload=sc.Offload(params="nvme", path=tmp_path))
    optimizer = sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)
    store = find_root(model).groups[0].store
    asked: list[bool] = []
    place = store._place

    def noting(index: int, *, is_ahead: bool, before: int = 0) -> bool:
        came = place(index, is_ahead=is_ahead, before=before)
        if came:
            asked.append(is_ahead)
        return came

    store._place = noting
    train_blocks(model, optimizer, 0, range(1))
    assert not any(asked)
    asked.clear()
    model(torch.zeros(1, 64)).sum().backward()
    assert sum(asked) > 0.7 * len(asked) > 8


@spmd(world=2)
def test_a_disk_that_fails_ends_the_step_on_every_rank(tmp_path: Path) -> None:
    mesh = sc.Mesh()
    offload = sc.Offload(params="nvme", path=tmp_path / str(mesh.rank), host_param_nbytes=0)
    model = sc.shard(seeded(blocks), mesh, stage=3, offload=offload)
    train_blocks(model, sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2), mesh.rank, range(2))
    if mesh.rank == 1:
        break_disk()
    with pytest.raises(Exception, match=r"shardcore-\d+.*\.swap at byte \d+") as raised:
        model(torch.zeros(1, 64))
    assert isinstance(raised.value, StorageError if mesh.rank == 1 else ShardcoreError)
    if mesh.rank == 1:
        assert ".swap" in str(raised.value.filename)


@spmd(world=1)
def test_a_mended_disk_goes_on(tmp_path: Path) -> None:
    mesh = sc.Mesh()
    model, plain = (
        sc.shard(seeded(blocks), mesh, stage=3, offload=offload)
        for offload in (sc.Offload(params="nvme", path=tmp_path, host_param_nbytes=0), None)
    )
    optimizers = [sc.optimizer(sc.optim.CPUAdamW, each, lr=1e-2) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train_blocks(each, optimizer, mesh.rank, range(2))
    whole = break_disk()
    with pytest.raises(StorageError, match="swap"):
        model(torch.zeros(1, 64))
    mend_disk(whole)
    sc.zero.reset_iteration(model)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train_blocks(each, optimizer, mesh.rank, range(2, 4))
    assert_bitwise(whole_parameters(model), whole_parameters(plain))


@spmd(world=1)
def test_what_cannot_be_written_stays_in_memory(tmp_path: Path) -> None:
    offload = sc.Offload(params="nvme", path=tmp_path, host_param_nbytes=0)
    store = ShardStore(offload, [(1000, F32)] * 3, torch.device("cpu"), sc.Mesh()["dp"])
    for index in range(3):
        store.fill(index).fill_(index)
    store.edit(1).add_(10)
    whole = break_disk()
    for _ in range(2):
        with pytest.raises(StorageError):
            store.read(0)
    mend_disk(whole)
    assert [float(store.read(index).mean()) for index in (0, 1, 2)] == [0.0, 11.0, 2.0]
    assert [float(store.copy(index, 5, 7).sum()) for index in (0, 1, 2)] == [0.0, 22.0, 4.0]


@spmd(world=1)
def test_a_full_disk_shows_before_training(tmp_path: Path) -> None:
    offload = {"params": "nvme", "host_param_nbytes": 0}
    with mounted("tmpfs", tmp_path / "small", 10) as disk:
        with pytest.raises(StorageError, match=r"has room for \d+ bytes and 12582912 are needed there"):
            sc.shard(Vector(3 << 20), stage=3, offload=sc.Offload(**offload, path=disk))
        assert names(disk) == []


@spmd(world=1)
def test_shards_of_any_order_and_size_keep_their_values(tmp_path: Path) -> None:
    """Random calls against a dictionary, with a room that holds a few."""
    draw = random.Random(0)
    for room in (0, 9000, 20_000):
        sizes = [draw.choice((0, 1, 100, 1000, 2000)) for _ in range(12)]
        offload = sc.Offload(params="nvme", path=tmp_path, host_param_nbytes=room)
        store = ShardStore(offload, [(numel, F32) for numel in sizes], torch.device("cpu"), sc.Mesh()["dp"])
        values = [torch.full((numel,), -1.0) for numel in sizes]
        for index, value in enumerate(values):
            store.fill(index).copy_(value)
        for number in range(400):
            index, call = draw.randrange(12), draw.choice(("read", "edit", "fill", "copy", "expect"))
            if call == "expect":
                store.expect([draw.randrange(12) for _ in range(30)])
            elif call == "copy":
                assert torch.equal(store.copy(index, 0, sizes[index]), values[index])
            elif call == "fill":
                values[index].fill_(number)
                store.fill(index).copy_(values[index])
            else:
                shard = getattr(store, call)(index)
                assert torch.equal(shard, values[index]), (room, number, call)
                if call == "edit":
                    values[index].add_(1)
                    shard.add_(1)


def test_room_is_where_it_is_missed_last() -> None:
    """Against all ranges of a memory of 16 bytes."""
    draw = random.Random(1)
    for _ in range(300):
        residents, at = [], 0
        while at < 14:
            at += draw.randrange(3)
            stop = min(at + draw.randrange(1, 5), 16)
            if at < stop:
                residents.append(Resident(len(residents), at, stop, last_use=draw.randrange(100)))
            at = stop
        needs = {r.index: draw.choice((None, *range(9))) for r in residents}
        stays = {r.index for r in residents if draw.random() < 0.3}
        nbytes = draw.randrange(1, 17)
        _compare_with_all_ranges(residents, nbytes, needs, stays)


def _compare_with_all_ranges(
    residents: list[Resident], nbytes: int, needs: dict[int, int | None], stays: set[int]
) -> None:
    best = None
    for start in range(17 - nbytes):
        inside = [r for r in residents if r.start < start + nbytes and r.stop > start]
        if stays.isdisjoint(r.index for r in inside):
            first = min((_missed(needs[r.index], r) for r in inside), default=(float("inf"), 1))
            best = first if best is None else max(best, first)
    found = find_room(
        residents, nbytes, 16, may_leave=lambda r: r.index not in stays, next_use=lambda r: needs[r.index]
    )
    if found is None:
        assert best is None
        return
    start, leaving = found
    assert leaving == [r for r in residents if r.start < start + nbytes and r.stop > start]
    assert min((_missed(needs[r.index], r) for r in leaving), default=(float("inf"), 1)) == best


def _missed(need: int | None, resident: Resident) -> tuple[float, int]:
    return (float("inf") if need is None else float(need)), -resident.last_use


@spmd(world=2)
def test_shards_are_read_and_written_from_outside(tmp_path: Path) -> None:
    """Loading, contexts, pieces and masters reach shards on a disk, with masters beside them, with states, and none."""
    mesh, bf16 = sc.Mesh(), sc.Precision(param="bf16")
    seen = []
    for home in (None, {"states": "cpu"}, {"states": "nvme", "tile_numel": 50}, {}):
        offload = None if home is None else sc.Offload(params="nvme", path=tmp_path, host_param_nbytes=0, **home)
        model = sc.shard(seeded(ZOO["frozen"].build), mesh, stage=3, precision=bf16, offload=offload)
        optimizer = sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)
        train_steps(model, optimizer, mesh, range(2))
        with torch.no_grad(), sc.summon(model, writeback=True):
            model.blocks[1].up.bias.add_(1.0)
        train_steps(model, optimizer, mesh, range(2, 4))
        weights = {name: value * 0.9 for name, value in whole_parameters(model).items()}
        sc.load_state_dict(model, weights)
        train_steps(model, optimizer, mesh, range(4, 6))
        model.load_state_dict({name: value * 1.1 for name, value in weights.items()})
        train_steps(model, optimizer, mesh, range(6, 8))
        pieces = {name: value.clone() for name, value in sc.state_dict(model, full=False).items()}
        seen.append([whole_parameters(model), pieces])
    for other in seen[1:]:
        assert_bitwise(other, seen[0])


@pytest.mark.parametrize("background", [False, True])
@spmd(world=2)
def test_checkpoints_from_and_to_a_disk(background: bool, tmp_path: Path) -> None:
    mesh, bf16 = sc.Mesh(), sc.Precision(param="bf16")
    homes: list[dict[str, Any]] = [{"states": "nvme", "tile_numel": 50}, {"states": "cpu"}, {}]
    offloads = [sc.Offload(params="nvme", path=tmp_path / "disk", host_param_nbytes=0, **home) for home in homes]

    def make(offload: sc.Offload | None, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sc.shard(seeded(ZOO["frozen"].build, seed), mesh, stage=3, precision=bf16, offload=offload)
        return model, sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)

    for number, offload in enumerate([*offloads, None]):
        model, optimizer = make(offload, 1)
        train_steps(model, optimizer, mesh, range(2))
        sc.checkpoint.save(tmp_path / str(number), model, optimizer, async_=background)
        train_steps(model, optimizer, mesh, range(2, 4))
        if background:
            sc.checkpoint.wait(model)
        other, its = make(offloads[number % 3] if offload is None else offloads[(number + 1) % 3], 2)
        sc.checkpoint.load(tmp_path / str(number), other, its)
        train_steps(other, its, mesh, range(2, 4))
        assert_bitwise(whole_parameters(other), whole_parameters(model))


@spmd(world=2)
def test_reading_states_leaves_parameters_in_use_alone(tmp_path: Path) -> None:
    """A save in the background reads states while forward and backward use the little memory that parameters have."""
    mesh = sc.Mesh()
    offload = sc.Offload(params="nvme", states="nvme", path=tmp_path, host_param_nbytes=0, tile_numel=50)
    model = sc.shard(seeded(ZOO["frozen"].build), mesh, stage=3, precision=sc.Precision(param="bf16"), offload=offload)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
    train_steps(model, optimizer, mesh, range(2))
    for group in find_root(model).groups:
        in_use = group.own_to_read
        values = in_use.clone()
        optimizer.read_pieces(lambda held, states: None)
        assert torch.equal(in_use, values)


@spmd(world=2)
def test_a_failed_save_of_states_on_a_disk_loses_nothing(tmp_path: Path) -> None:
    trained = []
    for fails in (False, True):
        mesh = sc.Mesh()
        offload = sc.Offload(states="nvme", path=tmp_path, tile_numel=37)
        model = sc.shard(seeded(ZOO["odd"].build), mesh, stage=2, precision=sc.Precision(param="bf16"), offload=offload)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
        train_steps(model, optimizer, mesh, range(2))
        if fails:
            _fail_after(optimizer, num_pieces=3)
        optimizer.read_pieces(lambda held, states: None)
        written = optimizer._update.store.written_nbytes
        optimizer.read_pieces(lambda held, states: None)
        assert optimizer._update.store.written_nbytes == written
        train_steps(model, optimizer, mesh, range(2, 4))
        trained.append(whole_parameters(model))
    assert_bitwise(trained[1], trained[0])


def _fail_after(optimizer: Any, num_pieces: int) -> None:
    seen = []

    def act(held: object, states: object) -> None:
        seen.append(held)
        if len(seen) > num_pieces:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        optimizer.read_pieces(act)


def test_d3_a_killed_training_leaves_nothing_and_another_follows(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        import torch
        import shardcore as sc

        model = sc.shard(torch.nn.Linear(64, 64), stage=3, offload=sc.Offload(params="nvme", path=sys.argv[1]))
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        print("trained", flush=True)
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    for end, code in (("killed", -9), ("quietly", 0)):
        outcome = python(program, tmp_path, end, timeout=110)
        assert (outcome.stdout.strip(), outcome.returncode) == ("trained", code), outcome.stderr
        assert names(tmp_path) == []


@spmd(world=1)
def test_deepspeeds_keys(tmp_path: Path) -> None:
    """``max_in_cpu`` counts elements of two bytes. The kernel of the CPU follows torch's within rounding to bf16."""
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 5000, "buffer_count": 5}
    results = []
    for zero in ({"stage": 3}, {"stage": 3, "offload_param": on_disk, "offload_optimizer": {"device": "cpu"}}):
        config = {
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": zero,
        }
        engine, _, _, _ = sc.initialize(model=seeded(blocks), config=config)
        for step in range(3):
            engine.backward(engine(torch.full((4, 64), step + 1.0, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        results.append(whole_parameters(engine.module))
        store = find_root(engine.module).groups[0].store
    assert store is not None
    assert 10_000 - 512 < store.host_nbytes <= 10_000
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": "nvme"}, r'params="nvme"\): give the folder'),
        ({"params": "cpu", "host_param_nbytes": 1}, r'no parameters rest on a disk; add params="nvme"'),
        ({"params": "nvme", "path": "/tmp", "host_param_nbytes": -1}, r"expected an integer of at least 0"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sc.Offload(**settings)
