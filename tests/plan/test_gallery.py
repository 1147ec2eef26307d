"""The gallery of schedules is what its command writes, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shardcore import plan
from shardcore.plan import gallery

DOCS = Path(__file__).parents[2] / "docs"
FILES = gallery.gallery()
CODE = re.findall(r"```python\n(.*?)```", FILES[gallery.PAGE], re.DOTALL)


def test_the_page_is_fresh() -> None:
    written = {gallery.PAGE, *(f"{gallery.FOLDER}/{path.name}" for path in (DOCS / gallery.FOLDER).glob("*"))}
    assert written == set(FILES), "run: python -m shardcore.plan.gallery docs"
    for name, content in FILES.items():
        assert (DOCS / name).read_text() == content, f"{name} is stale; run: python -m shardcore.plan.gallery docs"


def test_every_schedule_is_shown() -> None:
    assert {exhibit.name for exhibit in gallery.EXHIBITS} == set(plan.schedule_names())


@pytest.mark.parametrize("exhibit", gallery.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_pictures_show_every_computation(exhibit: gallery.Exhibit) -> None:
    picture = ElementTree.fromstring(FILES[f"{gallery.FOLDER}/{exhibit.name}.svg"])
    schedule = gallery.schedule_of(exhibit)
    schedule.check()
    num_cells = sum(len(schedule.program(rank)) for rank in range(schedule.num_ranks))
    assert len(picture.findall(".//{*}rect")) >= num_cells


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / gallery.FOLDER).mkdir()
    (tmp_path / gallery.FOLDER / "gone.svg").write_text("<svg/>")
    command = [sys.executable, "-m", "shardcore.plan.gallery"]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=60)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == set(FILES)
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (wrong.returncode, "usage: " in wrong.stderr) == (2, True)


@pytest.mark.parametrize("code", CODE, ids=range(len(CODE)))
def test_examples_run(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, gallery.PAGE, "exec"), names)
    for name, value in names.items():
        if name.startswith("test_"):
            # A machine with other work is slow, which says nothing about the example.
            settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])(value)()
