"""``@spmd`` under pytest itself: a file of tests is run by a pytest of its own, and its report read."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

TESTS = """
import os, signal, time
import pytest
import torch.distributed as dist
from shardcore.testing import spmd

@spmd(world=2)
def test_fails():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 is unhappy")
    dist.barrier()

@spmd(world=2, timeout=2)
def test_hangs():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()

@spmd(world=2)
def test_after_the_hang():
    dist.barrier()

@spmd(world=2)
def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

@spmd(world=2)
def test_skips():
    pytest.skip("not here")

@spmd(world=[1, 2])
def test_worlds(world):
    assert dist.get_world_size() == world

@pytest.mark.parametrize("number", [1, 2])
@spmd(world=2)
def test_parameters(number, tmp_path):
    assert tmp_path.is_dir()

@spmd(world=2)
def test_fixture_that_cannot_travel(capsys):
    pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ET.Element]:
    """Results by test, of a pytest that ended by itself."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junit-xml=report.xml",
        "test_suite.py",
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert run.stderr == "", "nothing is said after the summary"
    return {case.attrib["name"]: case for case in ET.parse(folder / "report.xml").iter("testcase")}


def failure_of(case: ET.Element) -> str:
    found = case.find("failure")
    assert found is not None, f"{case.attrib['name']} did not fail"
    return found.text or ""


def passed(case: ET.Element) -> bool:
    return not {"failure", "error", "skipped"} & {child.tag for child in case}


def test_a_failing_rank_fails_the_test_with_all_traces(report: dict[str, ET.Element]) -> None:
    text = failure_of(report["test_fails"])
    assert "(first: rank 1)" in text
    assert "ValueError: rank 1 is unhappy" in text
    assert "rank 0: traceback" in text
    assert "decorator.py" not in text, "the harness's own frames say nothing"


def test_a_hang_fails_alone_with_stacks(report: dict[str, ET.Element]) -> None:
    text = failure_of(report["test_hangs"])
    assert text.count("in test_hangs") == 2
    assert passed(report["test_after_the_hang"])


def test_a_killed_process_is_named(report: dict[str, ET.Element]) -> None:
    assert "SIGKILL" in failure_of(report["test_killed"])


def test_a_skip_is_a_skip(report: dict[str, ET.Element]) -> None:
    found = report["test_skips"].find("skipped")
    assert found is not None
    assert found.attrib["message"] == "not here"


@pytest.mark.parametrize("name", ["test_worlds[1]", "test_worlds[2]", "test_parameters[1]", "test_parameters[2]"])
def test_worlds_and_parameters_make_tests(report: dict[str, ET.Element], name: str) -> None:
    assert passed(report[name])


def test_a_fixture_that_cannot_travel_is_named(report: dict[str, ET.Element]) -> None:
    assert "argument 'capsys'" in failure_of(report["test_fixture_that_cannot_travel"])
