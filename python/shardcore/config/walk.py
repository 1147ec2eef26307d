"""Holding a configuration against the key table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardcore.config.config import IgnoredKey
from shardcore.config.keys import Field, Ignored, Misplaced, Removed, Unsupported
from shardcore.config.kinds import INVALID, parse, show
from shardcore.config.names import nearest, unknown_name
from shardcore.config.sections import default_of
from shardcore.config.table import SECTION_KEYS, TABLE

ESCAPE = "x-"
"""Keys that begin with this are the user's own."""
_TYPO_DISTANCE = 2


@dataclass(kw_only=True, slots=True)
class Findings:
    """What a walk brings home; later checks add to it."""

    values: dict[str, Any] = field(default_factory=dict)
    """Parsed values of honoured keys by their target, "section.field"."""
    given: dict[str, str] = field(default_factory=dict)
    """Target of each honoured key that the file sets, by the key's dotted path."""
    ignored: list[IgnoredKey] = field(default_factory=list)
    """Keys that were accepted and change nothing."""
    problems: list[str] = field(default_factory=list)
    """One line per mistake."""
    notes: list[str] = field(default_factory=list)
    """One line per thing the user should know."""
    escaped: list[str] = field(default_factory=list)
    """Dotted paths of the user's own keys."""

    def all_notes(self) -> list[str]:
        """The notes, and one line each for all keys without effect and for all the user's own keys."""
        notes = list(self.notes)
        if self.ignored:
            notes.append(f"without effect here (engine.config.explain() gives reasons): {_paths(self.ignored)}")
        if self.escaped:
            notes.append(f"your own keys, not read: {', '.join(self.escaped)}")
        return notes


def walk(raw: Mapping[Any, Any], findings: Findings, section: str = "") -> None:
    """Sorts every key of ``raw``, which stands at the dotted path ``section``, into ``findings``."""
    for name, value in raw.items():
        path = f"{section}.{name}" if section else str(name)
        if not isinstance(name, str):
            findings.problems.append(f"{path}: expected a string as key, got {show(name)}")
        elif name.startswith(ESCAPE):
            findings.escaped.append(path)
        elif path in TABLE:
            _take(path, value, findings)
        elif path in SECTION_KEYS:
            _enter(path, value, findings)
        else:
            _unknown(section, name, findings)


def _enter(path: str, value: object, findings: Findings) -> None:
    if isinstance(value, Mapping):
        walk(value, findings, path)
    elif value is not None:
        findings.problems.append(f"{path}: expected an object, got {show(value)}")


def _unknown(section: str, name: str, findings: Findings) -> None:
    """Inside a section an unknown key is a mistake; at the top level it may be another program's."""
    known = SECTION_KEYS[section]
    if section or nearest(name, known, _TYPO_DISTANCE) is not None:
        findings.problems.append(unknown_name(section, name, known))
        return
    homes = sorted(f"{home}.{name}" for home, names in SECTION_KEYS.items() if home and name in names)
    hint = f" (did you mean {' or '.join(homes)}?)" if homes else ""
    findings.notes.append(f"{name}: unknown top-level key, not read{hint}")


def _take(path: str, value: object, findings: Findings) -> None:
    """Applies the table's entry at ``path``; null stands for "not given"."""
    if value is None:
        return
    match TABLE[path]:
        case Field() as entry:
            _honour(path, entry, value, findings)
        case Ignored() as entry:
            if value == "auto" or _parsed(path, entry, value, findings) is not INVALID:
                findings.ignored.append(IgnoredKey(path=path, shown=show(value), reason=entry.reason))
        case Unsupported() as entry:
            _refuse_unless_neutral(path, entry, value, findings)
        case Removed(reason=reason):
            if not _asks_for_nothing(value):
                findings.problems.append(f"not supported by this library: {path}; remove it ({reason})")
        case Misplaced(hint=hint):
            findings.problems.append(f"{path}: {hint}")


def _honour(path: str, entry: Field, value: object, findings: Findings) -> None:
    if value == "auto":
        _resolve_auto(path, entry, findings)
        return
    parsed = _parsed(path, entry, value, findings)
    if parsed is INVALID:
        return
    other = next((key for key, target in findings.given.items() if target == entry.target), None)
    if other is not None and findings.values.get(entry.target) != parsed:
        findings.problems.append(f"{path} and {other} are two names of one setting and differ; keep one of them")
    findings.given[path] = entry.target
    findings.values[entry.target] = parsed


def _resolve_auto(path: str, entry: Field, findings: Findings) -> None:
    """Inside a section "auto" is the default; at the top level, or where there is no default, nothing supplies it."""
    default = default_of(entry.target)
    if "." not in path or default is dataclasses.MISSING:
        findings.problems.append(f'{path} is "auto" and nothing supplies it: write {entry.kind.expected} instead')
        return
    shown = "which the library chooses" if default is None else show(default)
    findings.notes.append(f'{path}: "auto" stands for the default, {shown}')


def _refuse_unless_neutral(path: str, entry: Unsupported, value: object, findings: Findings) -> None:
    if value == "auto":
        return
    parsed = _parsed(path, entry, value, findings)
    if parsed is not INVALID and parsed not in entry.neutral:
        accepted = " or ".join(show(neutral) for neutral in entry.neutral)
        findings.problems.append(f"{path}: {show(value)} is not supported ({entry.reason}); use {accepted}")


def _parsed(path: str, entry: Field | Ignored | Unsupported, value: object, findings: Findings) -> Any:
    return parse(entry.kind, path, value, findings.problems)


def _asks_for_nothing(value: object) -> bool:
    off = value.get("enabled") if isinstance(value, Mapping) else value
    return off is False or off == "auto"


def _paths(keys: list[IgnoredKey]) -> str:
    return ", ".join(key.path for key in keys)
