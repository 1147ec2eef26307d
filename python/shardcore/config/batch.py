"""The batch triangle: train batch = micro batch x accumulation steps x data-parallel world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardcore.config.sections import BatchConfig
from shardcore.errors import ConfigError, DropInConfigError


@contextmanager
def drop_in_errors() -> Iterator[None]:
    """Inside, every `ConfigError` is raised as a `DropInConfigError`, wherever it comes from."""
    try:
        yield
    except DropInConfigError:
        raise
    except ConfigError as error:
        raise DropInConfigError(str(error)).with_traceback(error.__traceback__) from error.__cause__


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """One solution of the triangle: ``train_batch_size == micro_batch_size * accumulation_steps * data_world``."""

    train_batch_size: int
    """Samples per optimizer step over the whole job."""
    micro_batch_size: int
    """Samples per rank per forward and backward."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    data_world: int
    """Number of data-parallel ranks."""


def check_numbers(batch: BatchConfig, data_world: int | None) -> str | None:
    """What is wrong with the given numbers whatever the rest of the triangle says, or None.

    ``data_world`` may be None: not known yet. It is then only absent from the text.
    """
    for name, value in _named(batch).items():
        if value < 1:
            return f"{_given(batch, data_world)}: {name} is {value} but must be at least 1; set it to 1 or more"
    if batch.train_batch_size is None and batch.micro_batch_size is None:
        return (
            f"{_given(batch, data_world)}: neither train_batch_size nor train_micro_batch_size_per_gpu is given; "
            "set at least one of them"
        )
    return None


def solve_batch(batch: BatchConfig, data_world: int) -> BatchSizes:
    """Completes and checks the triangle for ``data_world`` data-parallel ranks.

    A missing accumulation count follows from the other two, and is 1 where only one of the sizes is given.
    Every division must come out even.

    Raises:
        ConfigError: a number is below 1, no size is given, the numbers contradict each other, or the file was
            written for another number of ranks. The text has all given numbers, the world, and one remedy.
    """
    if data_world < 1:
        raise ConfigError(f"data_world must be at least 1, got {data_world}; pass the number of data-parallel ranks")
    problem = check_numbers(batch, data_world)
    if problem is not None:
        raise ConfigError(problem)
    _check_world(batch, data_world)
    train, micro, steps = batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps
    if train is not None and micro is not None and steps is None:
        steps = _quotient(batch, train, f"train_micro_batch_size_per_gpu {micro}", micro, data_world)
    elif train is not None and micro is None:
        factor = "" if steps is None else f"gradient_accumulation_steps {steps}"
        micro = _quotient(batch, train, factor, steps or 1, data_world)
    micro, steps = micro or 1, steps or 1
    return BatchSizes(
        train_batch_size=_checked_product(batch, micro, steps, data_world),
        micro_batch_size=micro,
        accumulation_steps=steps,
        data_world=data_world,
    )


def _check_world(batch: BatchConfig, data_world: int) -> None:
    if batch.data_parallel_size not in (None, data_world):
        raise ConfigError(
            f"{_given(batch, data_world)}: data_parallel_size is {batch.data_parallel_size}, but the job has "
            f"{data_world} data-parallel ranks; start {batch.data_parallel_size}, or leave the key out"
        )


def _checked_product(batch: BatchConfig, micro: int, steps: int, data_world: int) -> int:
    """The train batch that follows from the other two; it must be the given one, if one is given."""
    train, product = batch.train_batch_size, micro * steps * data_world
    if train in (None, product):
        return product
    raise ConfigError(
        f"{_given(batch, data_world)}: train_batch_size is {train}, but train_micro_batch_size_per_gpu x "
        f"gradient_accumulation_steps x world is {micro} x {steps} x {data_world} = {product}; "
        f"set train_batch_size to {product}, or leave one of the three out"
    )


def _quotient(batch: BatchConfig, train: int, factor_text: str, factor: int, data_world: int) -> int:
    """``train`` over (``factor`` times the world), if that comes out even."""
    divisor = factor * data_world
    if train % divisor == 0:
        return train // divisor
    product = f"{factor_text} x world {data_world} = {divisor}" if factor_text else f"world {data_world}"
    multiple = -(-train // divisor) * divisor
    raise ConfigError(
        f"{_given(batch, data_world)}: train_batch_size {train} is not divisible by {product}; "
        f"set train_batch_size to a multiple of {divisor}, such as {multiple}"
    )


def _named(batch: BatchConfig) -> dict[str, int]:
    """The numbers of the triangle that are given, under the names of the configuration file."""
    pairs = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
    }
    return {name: value for name, value in pairs.items() if value is not None}


def _given(batch: BatchConfig, data_world: int | None) -> str:
    parts = [f"{name}={value}" for name, value in _named(batch).items()]
    if data_world is not None:
        parts.append(f"world={data_world}")
    return ", ".join(parts) or "batch sizes"
