"""What can stand behind a key of the configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.config.kinds import ANYTHING, Kind


@dataclass(frozen=True, slots=True)
class Field:
    """The key is honoured: it sets a field of `Config`."""

    target: str
    """Section and field, such as "zero.stage"."""
    kind: Kind
    """What the value may be."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The key is accepted, its value is checked, and nothing changes."""

    reason: str
    """Why nothing has to change."""
    kind: Kind = ANYTHING
    """What the value may be."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key asks for something that this version does not do; only values that ask for nothing are accepted."""

    reason: str
    """What is missing, or what happens in its place."""
    kind: Kind
    """What the value may be."""
    neutral: tuple[object, ...]
    """The values (after parsing) that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A key or a whole block for something this library does not do; it must be taken out.

    An object whose ``enabled`` is false, or a plain false, asks for nothing and is accepted.
    """

    reason: str
    """Why it is not there, or what to use in its place."""
    keys: tuple[str, ...] = ()
    """The names known inside a block; all of them go with it."""


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A key that has its meaning elsewhere; always an error."""

    hint: str
    """Where it belongs, or why it has no meaning here."""


Entry = Field | Ignored | Unsupported | Removed | Misplaced


def under(section: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries with their keys made into full dotted paths."""
    return {f"{section}.{key}": entry for key, entry in entries.items()}
