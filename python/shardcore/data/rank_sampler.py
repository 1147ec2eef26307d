"""One global order of samples per epoch, dealt to the ranks like cards.

The order depends on (seed, epoch) alone. From the position where a pass starts, sample number ``i`` goes to data rank
``i mod data_world``: the global batch of a step is the same set of samples whatever the number of ranks, as long as
ranks x batch size stays the same, and a run can stop anywhere and go on with more or fewer ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch
from torch.utils.data import IterableDataset, Sampler

from shardcore.errors import ConfigError, StateError

Tail = Literal["drop", "pad", "error"]


class DataMesh(Protocol):
    """What the sampler asks of a mesh; ``shardcore.Mesh`` is one."""

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank reads, 0 <= data_rank < data_world."""

    @property
    def data_world(self) -> int:
        """Into how many slices the global batch is split."""


class SamplerState(TypedDict):
    """Plain values that name one place in the order of samples; the same on every rank."""

    version: int
    epoch: int
    position: int
    """Samples of this epoch that all ranks together have consumed."""
    num_samples: int
    seed: int
    shuffle: bool


@dataclass(slots=True)
class _Pass:
    """One iteration over what is left of an epoch, counted in samples of this rank."""

    start: int
    """Global position from which it deals."""
    count: int
    """Samples this rank gets, equal on all ranks."""
    handed_out: int = 0
    reported: int | None = None
    """Samples the training loop says it has consumed; None until it says anything."""


def sampler(
    dataset: object, mesh: object | None = None, *, shuffle: bool = True, seed: int = 0, tail: Tail = "drop"
) -> RankSampler:
    """A sampler over this rank's share of ``dataset``, for ``torch.utils.data.DataLoader(dataset, sampler=...)``.

    Args:
        dataset: anything with ``len()``; only its length is used.
        mesh: a ``shardcore.Mesh`` (or any object with ``data_rank`` and ``data_world``), a 1-D or 2-D data-parallel
            torch ``DeviceMesh``, or None for a single rank. Ranks that differ only along tensor, context or pipeline
            axes share a data rank and so read the same samples.
        shuffle: a new random order each epoch; otherwise the order of the dataset.
        seed: with the epoch, fixes the order; the same on every rank.
        tail: what happens to the last samples where the ranks do not divide them evenly; see :class:`RankSampler`.

    Raises:
        ConfigError: the dataset has no length or too few samples, or an argument is out of range.
    """
    rank, world = _place_on(mesh)
    return RankSampler(_length_of(dataset), rank, world, shuffle=shuffle, seed=seed, tail=tail)


class RankSampler(Sampler[int]):
    """The indices of one data rank; every rank gets the same number of them, so no rank waits for another at the end.

    **Uneven tail.** ``tail="drop"`` leaves out the last ``remaining % data_world`` samples of the epoch's order (others
    in each shuffled epoch). ``tail="pad"`` gives the ranks that would come short a sample from the beginning of the
    order; the last :attr:`num_padding` samples of such a rank are repeats and should weigh zero in a loss or a metric.
    ``tail="error"`` refuses.

    **Position.** A ``DataLoader`` with workers asks for indices long before the loop uses them, so a sampler cannot
    know by itself what was trained on. The loop tells: ``sampler.advance(len(batch))`` after each step; a
    :class:`RankLoader`, such as the engine's, does so by itself. From then on
    :meth:`state_dict` is exact, with or without workers. A loop that was left early goes on after the reported position
    when it iterates again. After a pass that ran to its end the next epoch begins, with its own order, also if
    ``set_epoch`` is never called.

    **Resume.** ``load_state_dict`` takes the state of any rank, from a run with any number of ranks: the samples that
    were not consumed follow in the same global order, dealt to the ranks there are now.
    """

    def __init__(
        self, num_samples: int, rank: int, world: int, *, shuffle: bool = True, seed: int = 0, tail: Tail = "drop"
    ) -> None:
        self.num_samples = num_samples
        self.rank = rank
        self.world = world
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self._epoch = 0
        self._position = 0
        self._pass: _Pass | None = None
        self._check_arguments()

    # ------------------------------------------------------------------------------------------------------ order

    def __len__(self) -> int:
        """Samples per rank in a whole epoch (a resumed epoch hands out fewer)."""
        return self._count_from(0)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from the reported position to the end of the epoch."""
        if self._is_used_up():
            self._epoch, self._position = self._epoch + 1, 0
        current = _Pass(start=self._position, count=self._count_from(self._position))
        self._pass = current
        return self._hand_out(current)

    @property
    def epoch(self) -> int:
        """The epoch whose order is being dealt, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have consumed, as far as reported."""
        return self._position

    @property
    def num_padding(self) -> int:
        """How many of the last samples that this rank gets in the current epoch are repeats: 0 or 1."""
        start = self._pass.start if self._pass is not None else self._position
        last = start + (self._count_from(start) - 1) * self.world + self.rank
        return int(last >= self.num_samples)

    @property
    def num_left(self) -> int:
        """Samples of this rank that the running pass has handed out, or will, beyond those reported."""
        current = self._pass
        return 0 if current is None else current.count - (current.reported or 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; a call for the epoch that is under way, say after a resume, keeps the position.

        Raises:
            ConfigError: ``epoch`` is not a whole number >= 0.
        """
        _check_whole("epoch", epoch, minimum=0)
        if epoch != self._epoch or self._is_used_up():
            self._epoch, self._position, self._pass = epoch, 0, None

    # --------------------------------------------------------------------------------------------------- position

    def advance(self, num_samples: int) -> None:
        """Report that this rank has consumed ``num_samples`` more samples; every rank reports the same number.

        Raises:
            ConfigError: the number is negative.
            StateError: more samples are reported than were handed out.
        """
        _check_whole("num_samples", num_samples, minimum=0)
        current = self._pass
        handed_out = current.handed_out if current is not None else 0
        reported = (current.reported or 0) + num_samples if current is not None else num_samples
        if reported > handed_out:
            raise StateError(
                f"advance({num_samples}) on data rank {self.rank} makes {reported} consumed samples, but this pass has "
                f"handed out {handed_out}; report each batch once, with the number of samples of this rank"
            )
        if current is not None:
            current.reported = reported
            self._position = current.start + reported * self.world

    def state_dict(self) -> SamplerState:
        """The place in the order after the last reported sample; the same on every rank.

        Raises:
            StateError: indices were handed out but the loop has not reported how many it consumed.
        """
        current = self._pass
        if current is not None and current.handed_out and current.reported is None:
            raise StateError(
                f"the sampler of data rank {self.rank} handed out {current.handed_out} samples of epoch {self._epoch}, "
                "and a DataLoader may have asked for more than the loop has used; call sampler.advance(samples in the "
                "batch) after each step (advance(0) if none was used)"
            )
        finished = self._count_from(self._position) == 0
        return SamplerState(
            version=1,
            epoch=self._epoch + 1 if finished else self._epoch,
            position=0 if finished else self._position,
            num_samples=self.num_samples,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which may come from a run with another number of ranks.

        Raises:
            ConfigError: the state is not one of this sampler: other keys, another dataset length, seed or shuffle, or
                a remainder that ``tail="error"`` refuses.
        """
        _check_keys(state)
        for key in ("num_samples", "seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise ConfigError(
                    f"the sampler state has {key}={state[key]!r}, this sampler has {key}={getattr(self, key)!r}: the "
                    "order would not go on where it stopped; build the sampler as in the run that saved the state"
                )
        _check_whole("epoch", state["epoch"], minimum=0)
        _check_whole("position", state["position"], minimum=0)
        self._count_from(state["position"])
        self._epoch, self._position, self._pass = state["epoch"], state["position"], None

    # --------------------------------------------------------------------------------------------------- internal

    def _check_arguments(self) -> None:
        _check_whole("seed", self.seed, minimum=0)
        _check_whole("data_world", self.world, minimum=1)
        _check_whole("data_rank", self.rank, minimum=0)
        if self.rank >= self.world:
            raise ConfigError(f"data_rank {self.rank} is not below data_world {self.world}")
        if self.tail not in get_args(Tail):
            raise ConfigError(f"tail={self.tail!r} is unknown; choose one of {', '.join(get_args(Tail))}")
        if len(self) == 0:
            raise ConfigError(
                f"a dataset of {self.num_samples} samples gives none to each of {self.world} data ranks; use more "
                'data, fewer ranks, or tail="pad"'
            )

    def _count_from(self, position: int) -> int:
        """Samples for each rank from the global ``position`` to the end of the epoch."""
        remaining = max(0, self.num_samples - position)
        whole, rest = divmod(remaining, self.world)
        if rest and self.tail == "error":
            raise ConfigError(
                f'{remaining} samples cannot be dealt evenly to {self.world} data ranks (tail="error"); make the '
                'number of samples a multiple of the ranks, or choose tail="drop" or tail="pad"'
            )
        return whole + int(rest > 0 and self.tail == "pad")

    def _is_used_up(self) -> bool:
        """Whether the next iteration begins the next epoch: all consumed, or a pass went to its end."""
        current = self._pass
        went_to_its_end = current is not None and current.handed_out == current.count
        return went_to_its_end or self._count_from(self._position) == 0

    def _hand_out(self, current: _Pass) -> Iterator[int]:
        for index in self._indices(current):
            current.handed_out += 1
            yield index

    def _indices(self, current: _Pass) -> Iterator[int]:
        """This rank's share of the epoch's order; beyond its end the order begins again (padding)."""
        numbers = range(current.start + self.rank, current.start + current.count * self.world, self.world)
        if not self.shuffle:
            return (number % self.num_samples for number in numbers)
        order = _permutation(self.num_samples, self.seed, self._epoch)
        return (int(order[number % self.num_samples]) for number in numbers)


def _permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """A random order, int64 [num_samples], from (seed, epoch) alone; epoch 1 of seed 0 is not epoch 0 of seed 1."""
    generator = torch.Generator()
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)  # 2^64 / golden ratio: seeds lie far apart
    return torch.randperm(num_samples, generator=generator)


def _check_keys(state: object) -> None:
    expected = SamplerState.__required_keys__
    found = set(state) if isinstance(state, Mapping) else {type(state).__name__}
    if not isinstance(state, Mapping) or found != expected:
        raise ConfigError(f"a sampler state has the keys {sorted(expected)}, but got {sorted(map(str, found))}")
    if state["version"] != 1:
        raise ConfigError(f"sampler state of version {state['version']!r}; this release reads version 1")


def _length_of(dataset: object) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"sampler() needs a dataset with a length, and {type(dataset).__name__} has none; split an iterable "
            "dataset by data_rank and data_world inside it"
        )
    length = len(dataset)
    if length == 0:
        raise ConfigError(f"the dataset ({type(dataset).__name__}) is empty")
    return length


def _place_on(mesh: object | None) -> tuple[int, int]:
    """(data rank, data world) of this process."""
    if mesh is None:
        return 0, 1
    if hasattr(mesh, "data_rank") and hasattr(mesh, "data_world"):
        return mesh.data_rank, mesh.data_world
    shape, coordinate = getattr(mesh, "shape", None), getattr(mesh, "get_coordinate", lambda: None)()
    if shape is None or coordinate is None or len(shape) > 2:
        raise ConfigError(
            "sampler() needs a shardcore.Mesh, a 1-D or 2-D data-parallel DeviceMesh that holds this rank, or None; "
            f"got {mesh!r}"
        )
    rank = 0
    for place, length in zip(coordinate, shape, strict=True):
        rank = rank * length + place
    return rank, prod(shape)


def _check_whole(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
