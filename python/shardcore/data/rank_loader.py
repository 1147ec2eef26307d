"""A loader that tells its sampler what the loop has had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardcore.data.rank_sampler import RankSampler, SamplerState
from shardcore.errors import ConfigError


class RankLoader(DataLoader[Any]):
    """A DataLoader over one data rank's samples that counts each batch as consumed when it hands it out.

    So the position of its sampler is always known, with workers or without, and nobody calls ``sampler.advance``. A
    loop that was left early goes on after its last batch when it iterates again; one that ran to the end begins the
    next epoch, also where ``drop_last`` left samples out.

    Args:
        dataset: as torch's.
        sampler: this rank's :class:`RankSampler`.
        batch_size: samples per batch of this rank.
        **options: as torch's; not ``shuffle`` or ``batch_sampler``, which are the sampler's affair. Without a
            ``generator`` it gets its own, so that iterating anew draws nothing from torch's random numbers.

    Raises:
        ConfigError: ``shuffle`` or ``batch_sampler`` was given.
    """

    sampler: RankSampler
    batch_size: int

    def __init__(self, dataset: Any, sampler: RankSampler, batch_size: int, **options: Any) -> None:
        for name in ("shuffle", "batch_sampler"):
            if options.get(name):
                raise ConfigError(
                    f"RankLoader({name}={options[name]!r}): the sampler says which samples this rank reads, and in "
                    "which order; leave it out, and give the sampler shuffle=True or False by "
                    "shardcore.data.sampler(dataset, mesh, shuffle=...)"
                )
        options.setdefault("generator", torch.Generator().manual_seed(sampler.seed))
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches that are left of the epoch, else those of the next one."""
        for batch in super().__iter__():
            self.sampler.advance(min(self.batch_size, self.sampler.num_left))
            yield batch
        self.sampler.advance(self.sampler.num_left)

    def state_dict(self) -> SamplerState:
        """The position of its sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position, which may come from a run with another number of ranks.

        Raises:
            ConfigError: as :meth:`RankSampler.load_state_dict`.
        """
        self.sampler.load_state_dict(state)
