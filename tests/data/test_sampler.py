"""The order of samples: covered exactly once, the same for any number of ranks, and resumable to the sample."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

import shardcore as sc
from shardcore import data
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd


@dataclass
class Place:
    """A position on a data mesh, as ``shardcore.Mesh`` gives it."""

    data_rank: int
    data_world: int


def samplers(num_samples: int, world: int, **options: Any) -> list[data.RankSampler]:
    """One sampler per rank over the same dataset."""
    return [data.sampler(range(num_samples), Place(rank, world), **options) for rank in range(world)]


def interleave(per_rank: list[list[int]]) -> list[int]:
    """Samples in the global order: one from each rank in turn."""
    assert len({len(indices) for indices in per_rank}) == 1, "ranks got different numbers of samples"
    return [index for turn in zip(*per_rank, strict=True) for index in turn]


def run_steps(sampler: data.RankSampler, batch_size: int, num_workers: int, num_steps: int | None) -> list[int]:
    """Samples that a training loop uses; it stops after ``num_steps`` batches, or at the end of the epoch."""
    context = "forkserver" if num_workers else None
    loader = DataLoader(
        list(range(sampler.num_samples)),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    used: list[int] = []
    for step, batch in enumerate(loader):
        if step == num_steps:
            break
        used += batch.tolist()
        sampler.advance(len(batch))
    return used


# ---------------------------------------------------------------------------------------------------------- coverage


@given(num_samples=st.integers(1, 60), world=st.integers(1, 9), seed=st.integers(0, 3), epoch=st.integers(0, 2))
def test_every_sample_once_and_the_ranks_stay_in_step(num_samples: int, world: int, seed: int, epoch: int) -> None:
    ranks = samplers(num_samples, world, seed=seed, tail="pad")
    for sampler in ranks:
        sampler.set_epoch(epoch)
    padding = sum(sampler.num_padding for sampler in ranks)
    order = interleave([list(sampler) for sampler in ranks])
    assert sorted(order[:num_samples]) == list(range(num_samples))
    assert len(order) == num_samples + padding
    assert 0 <= padding < world


@given(num_samples=st.integers(1, 60), world=st.integers(1, 9), shuffle=st.booleans())
def test_the_order_does_not_depend_on_the_number_of_ranks(num_samples: int, world: int, shuffle: bool) -> None:
    alone = list(data.sampler(range(num_samples), None, shuffle=shuffle))
    together = interleave([list(sampler) for sampler in samplers(num_samples, world, shuffle=shuffle, tail="pad")])
    assert together[:num_samples] == alone


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = set()
    for seed in range(3):
        sampler = data.sampler(range(100), None, seed=seed)
        orders |= {tuple(sampler) for _ in range(3)}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_the_datasets() -> None:
    sampler = data.sampler("abcdef", Place(1, 2), shuffle=False)
    assert list(sampler) == [1, 3, 5]
    assert list(sampler) == [1, 3, 5]


# --------------------------------------------------------------------------------------------------------------- N10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_n10_stop_at_seven_of_twenty_and_resume(num_workers: int) -> None:
    straight = list(data.sampler(range(20), None, seed=5))
    first = data.sampler(range(20), None, seed=5)
    used = run_steps(first, batch_size=1, num_workers=num_workers, num_steps=7)
    second = data.sampler(range(20), None, seed=5)
    second.load_state_dict(first.state_dict())
    used += run_steps(second, batch_size=1, num_workers=num_workers, num_steps=None)
    assert used == straight


@given(
    num_samples=st.integers(1, 60),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stop=st.integers(0, 20),
    epoch=st.integers(0, 2),
)
def test_n10_resume_on_another_number_of_ranks(
    num_samples: int, worlds: tuple[int, int], stop: int, epoch: int
) -> None:
    def start(world: int) -> list[data.RankSampler]:
        ranks = samplers(num_samples, world, seed=1, tail="pad")
        for sampler in ranks:
            sampler.set_epoch(epoch)
        return ranks

    (straight,) = start(1)
    before, after = start(worlds[0]), start(worlds[1])
    stop = min(stop, len(before[0]))
    used = [[index for _, index in zip(range(stop), sampler, strict=False)] for sampler in before]
    for sampler in before:
        sampler.advance(stop)
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    for sampler in after:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(states[0]["epoch"])
    if states[0]["epoch"] == epoch:
        rest = interleave([list(sampler) for sampler in after])
        assert (interleave(used) + rest)[:num_samples] == list(straight)
    else:
        assert stop == len(before[0])


def test_n10_a_finished_epoch_resumes_with_the_next() -> None:
    first = data.sampler(range(6), None)
    run_steps(first, batch_size=2, num_workers=0, num_steps=None)
    assert (first.epoch, first.position) == (0, 6)
    second = data.sampler(range(6), None)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.position) == (1, 0)
    assert list(second) == list(first)


def test_n10_a_position_nobody_reported_is_not_guessed() -> None:
    sampler = data.sampler(range(6), None)
    next(iter(sampler))
    with pytest.raises(StateError, match=r"handed out 1 .* call sampler\.advance"):
        sampler.state_dict()
    sampler.advance(0)
    assert sampler.state_dict()["position"] == 0


def test_a_loop_left_early_goes_on_where_it_stopped() -> None:
    straight = list(data.sampler(range(10), None))
    sampler = data.sampler(range(10), None)
    used = run_steps(sampler, batch_size=2, num_workers=0, num_steps=2)
    assert used + list(sampler) == straight


def test_a_loop_that_drops_the_last_batch_comes_to_the_next_epoch() -> None:
    sampler = data.sampler(range(7), None)
    loader = DataLoader(list(range(7)), batch_size=3, sampler=sampler, drop_last=True)
    for epoch in range(3):
        num_batches = 0
        for batch in loader:
            sampler.advance(len(batch))
            num_batches += 1
        assert (sampler.epoch, sampler.position, num_batches) == (epoch, 6, 2)
    resumed = data.sampler(range(7), None)
    resumed.load_state_dict(sampler.state_dict())
    assert len(list(resumed)) == 1
    assert list(resumed) == list(sampler)


def test_more_than_was_handed_out_cannot_be_consumed() -> None:
    sampler = data.sampler(range(6), None)
    with pytest.raises(StateError, match="handed out 0"):
        sampler.advance(1)
    iterator = iter(sampler)
    next(iterator)
    sampler.advance(1)
    with pytest.raises(StateError, match=r"makes 2 consumed samples, but this pass has handed out 1"):
        sampler.advance(1)


def test_set_epoch_keeps_the_position_of_the_epoch_under_way() -> None:
    sampler = data.sampler(range(10), None)
    run_steps(sampler, batch_size=2, num_workers=0, num_steps=1)
    sampler.set_epoch(0)
    assert sampler.position == 2
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.position) == (3, 0)


# --------------------------------------------------------------------------------------------------------------- N11


@pytest.mark.parametrize(("tail", "per_rank", "batches"), [("drop", 4, 2), ("pad", 5, 3)])
def test_n11_nine_samples_on_two_ranks(tail: str, per_rank: int, batches: int) -> None:
    ranks = samplers(9, 2, tail=tail)
    loaders = [DataLoader(list(range(9)), batch_size=2, sampler=sampler) for sampler in ranks]
    assert [len(sampler) for sampler in ranks] == [per_rank] * 2
    assert [len(loader) for loader in loaders] == [batches] * 2
    seen = [index for loader in loaders for batch in loader for index in batch.tolist()]
    assert len(set(seen)) == (8 if tail == "drop" else 9)


def test_n11_uneven_data_can_be_refused() -> None:
    with pytest.raises(ConfigError, match="9 samples cannot be dealt evenly to 2 data ranks"):
        data.sampler(range(9), Place(0, 2), tail="error")
    assert len(data.sampler(range(8), Place(0, 2), tail="error")) == 4


def test_n11_padding_weighs_nothing() -> None:
    values = torch.arange(9, dtype=torch.float64) ** 2
    total, count = 0.0, 0
    for sampler in samplers(9, 2, tail="pad"):
        indices = list(sampler)
        real = indices[: len(indices) - sampler.num_padding]
        total, count = total + values[real].sum().item(), count + len(real)
    assert count == 9
    assert total / count == values.mean().item()


def test_n11_a_resumed_remainder_that_is_uneven_can_be_refused() -> None:
    first = samplers(12, 2, tail="error")
    for sampler in first:
        run_steps(sampler, batch_size=2, num_workers=0, num_steps=1)
    onto_three = data.sampler(range(12), Place(0, 3), tail="error")
    with pytest.raises(ConfigError, match="8 samples cannot be dealt evenly to 3 data ranks"):
        onto_three.load_state_dict(first[0].state_dict())
    onto_four = data.sampler(range(12), Place(0, 4), tail="error")
    onto_four.load_state_dict(first[0].state_dict())
    assert len(list(onto_four)) == 2


# -------------------------------------------------------------------------------------------------------- wrong input


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "Stream has none"),
        ({"dataset": []}, "is empty"),
        ({"mesh": "dp"}, r"needs a shardcore\.Mesh"),
        ({"mesh": Place(2, 2)}, "data_rank 2 is not below data_world 2"),
        ({"mesh": Place(0, 0)}, "data_world must be a whole number of at least 1"),
        ({"mesh": Place(0, 7)}, "6 samples gives none to each of 7 data ranks"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"tail": "keep"}, "choose one of drop, pad, error"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data.sampler(**{"dataset": range(6), "mesh": None} | arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 7}, "num_samples=7, this sampler has num_samples=6"),
        ({"seed": 9}, "seed=9"),
        ({"shuffle": False}, "shuffle=False"),
        ({"version": 2}, "reads version 1"),
        ({"position": -1}, "position must be"),
        ({"extra": 0}, "but got .*extra"),
    ],
)
def test_a_foreign_state_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = data.sampler(range(6), None)
    before = sampler.state_dict()
    with pytest.raises(ConfigError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_epoch_and_count_must_be_whole_numbers() -> None:
    sampler = data.sampler(range(6), None)
    with pytest.raises(ConfigError, match="epoch"):
        sampler.set_epoch(-1)
    with pytest.raises(ConfigError, match="num_samples"):
        sampler.advance(-2)


@spmd(world=4)
def test_every_kind_of_mesh_gives_the_place_of_its_rank() -> None:
    rank = dist.get_rank()
    meshes = [
        sc.Mesh(),
        sc.Mesh(replicate=2),
        DeviceMesh("cpu", torch.arange(4)),
        DeviceMesh("cpu", torch.arange(4).reshape(2, 2)),
    ]
    for mesh in meshes:
        assert list(data.sampler(range(8), mesh, shuffle=False)) == [rank, rank + 4]
    pairs = data.sampler(range(8), sc.Mesh(tp=2), shuffle=False)
    assert (pairs.rank, pairs.world) == (rank // 2, 2)


def test_the_room_asks_no_process_group() -> None:
    code = "import sys; import shardcore.data, torch.distributed as dist; print(dist.is_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_tells_its_sampler_what_it_has_handed_out(workers: int, drop_last: bool) -> None:
    def loader() -> data.RankLoader:
        dataset = list(range(31))
        made = data.sampler(dataset, Place(1, 2), seed=4)
        return data.RankLoader(dataset, made, 4, num_workers=workers, drop_last=drop_last)

    straight = loader()
    expected = [batch.tolist() for _ in range(2) for batch in straight]
    assert [len(batch) for batch in expected] == 2 * ([4, 4, 4] if drop_last else [4, 4, 4, 3])
    for stop in range(len(expected)):
        first, second = loader(), loader()
        found = []
        while len(found) < stop:
            for batch in first:
                found.append(batch.tolist())
                if len(found) == stop:
                    break
        second.load_state_dict(first.state_dict())
        while len(found) < len(expected):
            found.extend(batch.tolist() for batch in second)
        assert found[: len(expected)] == expected


def test_a_loader_draws_nothing_from_torchs_random_numbers() -> None:
    dataset = list(range(8))
    loader = data.RankLoader(dataset, data.sampler(dataset), 2)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_is_not_asked_to_shuffle_what_its_sampler_orders() -> None:
    data = list(range(8))
    sampler = sc.data.sampler(data)
    for options in ({"shuffle": True}, {"batch_sampler": [[0]]}):
        with pytest.raises(
            ConfigError, match=r"the sampler says which samples.*shardcore\.data\.sampler\(dataset, mesh, s"
        ):
            sc.data.RankLoader(data, sampler, batch_size=2, **options)
    assert len(list(sc.data.RankLoader(data, sampler, batch_size=2, shuffle=False))) == 4
