"""The key table as a page for people: ``python -m shardcore.config.page > docs/config.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect

from shardcore.config import sections
from shardcore.config.keys import Entry, Field, Ignored, Misplaced, Removed, Unsupported
from shardcore.config.sections import SECTIONS, default_of
from shardcore.config.table import TABLE

_INTRODUCTION = """# The configuration file

`shardcore.initialize(config=...)` takes DeepSpeed's JSON as a dict, a path (comments and trailing commas are welcome)
or base64 text. The table says what each key does; a key that is not in it is an error that names the nearest one
(at the top level: an error if it is one or two letters off, else a note). Keys that begin with `x-` are yours. All
problems of a file are reported at once. `Config.explain()` shows what a file decides. "None" in a description is a key
that is left out.

`"auto"` inside a section is the default, and is noted in the log; at the top level it is an error: where a trainer
around it fills the value in for DeepSpeed, write the number. The drop-in module `shardcore.deepspeed` differs in this:
where the file does not say, clipping is 1.0, as in DeepSpeed 0.19.8 (older versions, and this library natively, do not
clip), and AdamW's weight decay is 0 (natively torch's 0.01); and configuration errors are AssertionErrors as well.
Either way a warm-up gives its first value to one update, where DeepSpeed's schedules give it to two (over 4 steps 0,
0.25, 0.5, 0.75, 1, not 0, 0, 0.25, 0.5, 0.75), `"Adam"` is AdamW unless `adam_w_mode` is false, as in DeepSpeed, and an
optimizer that is passed in stands in place of the section `optimizer`.

| key | what it does | default |
|---|---|---|
"""


def key_page() -> str:
    """The page as Markdown, one row per key of the table."""
    meanings = _meanings()
    rows = [f"| `{path}` | {_effect(entry, meanings)} | {_default(entry)} |" for path, entry in TABLE.items()]
    return _INTRODUCTION + "\n".join(rows) + "\n"


def _meanings() -> dict[str, str]:
    """What each field of a section says of itself in the source, by "section.field"."""
    names = {section.__name__: name for name, section in SECTIONS.items()}
    found = {}
    for section in ast.parse(inspect.getsource(sections)).body:
        if isinstance(section, ast.ClassDef) and section.name in names:
            for entry, told in zip(section.body, section.body[1:], strict=False):
                match entry, told:
                    case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[f"{names[section.name]}.{field}"] = " ".join(text.split())
    return found


def _effect(entry: Entry, meanings: dict[str, str]) -> str:
    match entry:
        case Field(target=target):
            return meanings[target].replace("|", "\\|")
        case Ignored(reason=reason):
            return f"accepted, changes nothing: {reason}"
        case Unsupported(reason=reason):
            return f"refused unless it asks for nothing: {reason}"
        case Removed(reason=reason):
            return f"refused: {reason}"
        case Misplaced(hint=hint):
            return f"an error: {hint}"


def _default(entry: Entry) -> str:
    if not isinstance(entry, Field):
        return ""
    default = default_of(entry.target)
    return "" if default is dataclasses.MISSING or default is None else f"`{default}`"


if __name__ == "__main__":
    import sys

    sys.stdout.write(key_page())
