"""Every error that shardcore raises on purpose.

Each class also inherits the builtin that callers of similar libraries already catch, so ``except ValueError``
keeps working. A message says what went wrong, where (qualified name, rank, axis), what was expected and what
was found, and what to do instead.
"""

from __future__ import annotations


class ShardcoreError(Exception):
    """Base of all errors raised by shardcore."""


class ConfigError(ShardcoreError, ValueError):
    """A configuration value, or a combination of values, cannot be honoured."""


class DropInConfigError(ConfigError, AssertionError):
    """A `ConfigError` for scripts that catch AssertionError, since DeepSpeed checks its configuration by assertion."""


class PlanError(ShardcoreError, ValueError):
    """A plan (layout, schedule, move list) cannot be made from its input, or is not valid."""


class StateError(ShardcoreError, RuntimeError):
    """A call came at a moment when it has no meaning; the message says what to call first."""


class RankMismatchError(ShardcoreError, RuntimeError):
    """Ranks that must do the same thing did not; the message names the ranks and the first difference."""


class RankFailedError(RankMismatchError):
    """Another rank failed, so this one cannot go on; carries that rank's message."""


class StorageError(ShardcoreError, OSError):
    """Reading or writing host memory or disk failed.

    As in every ``OSError``, ``errno`` and ``filename`` name the fault and the file, where there are such.
    """

    offset: int | None = None
    """The byte of the file at which the fault showed."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CheckpointError(ShardcoreError, RuntimeError):
    """A checkpoint is damaged, incomplete, or does not fit the model."""


class LaunchError(ShardcoreError, RuntimeError):
    """Worker processes could not be started, or one of them failed."""
