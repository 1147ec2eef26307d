"""From what the caller hands in (a dict, a path, a base64 string) to plain dicts and lists."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardcore.errors import ConfigError

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)

Source = Mapping[str, Any] | str | os.PathLike[str]


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as the parser met it, duplicate keys and all."""


def read_source(source: Source) -> tuple[dict[str, Any], str]:
    """The configuration as fresh dicts and lists, and a label for messages.

    ``source`` is a mapping (copied, never modified), the path of a JSON file, or the base64 form of a JSON
    object. JSON may have comments (``//``, ``#``, ``/* */``) and trailing commas. A key that occurs twice in an
    object is an error.

    Raises:
        ConfigError: the file cannot be read, the text is no JSON object, or a key occurs twice.
    """
    if isinstance(source, Mapping):
        return {key: _copied(value) for key, value in source.items()}, "config"
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config: expected a dict, a path or a base64 string, got {type(source).__name__}")
    name = os.fspath(source)
    if isinstance(source, os.PathLike) or os.path.isfile(name):  # noqa: PTH113  a long base64 text is no valid Path
        return parse_json(_file_text(name), name), name
    if name.lstrip().startswith("{"):
        raise ConfigError("config: this string is JSON text; pass the dict from json.loads, or write it to a file")
    text = _base64_text(name)
    if text is None:
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise ConfigError(f"config {shown!r}: no such file, and not the base64 form of a JSON object; check the path")
    return parse_json(text, "base64 config"), "base64 config"


def parse_json(text: str, label: str) -> dict[str, Any]:
    """Parses JSON with comments and trailing commas; ``label`` names the text in errors.

    Raises:
        ConfigError: with line and column where the text is no JSON, with dotted paths for keys that occur twice.
    """
    # Blanks stand in for what is taken out, so that line and column in a message are those of the original.
    plain = _TRAILING_COMMA.sub(_blanked, _COMMENT.sub(_blanked, text))
    try:
        parsed = json.loads(plain, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{label}: not valid JSON at {where}: {error.msg}") from None
    if not isinstance(parsed, _Pairs):
        raise ConfigError(f"{label}: expected a JSON object at the top level, got {type(parsed).__name__}")
    duplicates: list[str] = []
    tree = _object(parsed, "", duplicates)
    if duplicates:
        paths = ", ".join(duplicates)
        raise ConfigError(f"{label}: each key may occur once, but these occur again: {paths}; keep one of each")
    return tree


def _blanked(match: re.Match[str]) -> str:
    found = match.group()
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _object(pairs: _Pairs, path: str, duplicates: list[str]) -> dict[str, Any]:
    """A plain dict; the full path of every key that occurs again is added to ``duplicates``."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        full = f"{path}.{key}" if path else key
        if key in tree:
            duplicates.append(full)
        tree[key] = _node(value, full, duplicates)
    return tree


def _node(value: Any, path: str, duplicates: list[str]) -> Any:
    if isinstance(value, _Pairs):
        return _object(value, path, duplicates)
    if isinstance(value, list):
        return [_node(item, f"{path}[{index}]", duplicates) for index, item in enumerate(value)]
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _file_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config file {name}: cannot be read: {reason}") from error


def _base64_text(encoded: str) -> str | None:
    """The decoded text if it can be a JSON object, else None. Both base64 alphabets are accepted."""
    try:
        raw = base64.b64decode(encoded.translate(str.maketrans("-_", "+/")), validate=True)
        text = raw.decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith(("{", "/", "#")) else None
