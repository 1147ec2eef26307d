"""The launcher on one machine: real processes, real signals. Tests named after a fault carry its id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.launching import launch, living
from shardcore.errors import LaunchError
from shardcore.launch import LaunchPlan, main
from shardcore.launch.plan import check_port, count_workers, default_environment, num_cores


def test_l1_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    status, errors = launch(tmp_path, "run-exit:3").end()
    assert status == 3
    last = errors.strip().splitlines()[-1]
    assert "rank 1" in last
    assert "exit code 3" in last
    assert socket.gethostname() in last


def test_l1_success_is_zero(tmp_path: Path) -> None:
    run = launch(tmp_path, "run")
    status, _ = run.end()
    assert status == 0
    assert [r["RANK"] for r in run.records(2)] == ["0", "1"]
    assert {r["WORLD_SIZE"] for r in run.records(2)} == {"2"}


def test_l16_a_kill_is_explained(tmp_path: Path) -> None:
    status, errors = launch(tmp_path, f"run-kill:{int(signal.SIGKILL)}").end()
    assert status == 128 + signal.SIGKILL
    assert "SIGKILL" in errors
    assert "memory" in errors


def test_l3_nothing_survives_a_failed_rank(tmp_path: Path) -> None:
    """The other rank ignores SIGTERM and has a child of its own."""
    run = launch(tmp_path, "linger-exit:7")
    records = run.records(2)
    start = time.monotonic()
    status, _ = run.end()
    assert status == 7
    assert time.monotonic() - start < 12
    assert living(records) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_l3_nothing_survives_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    run = launch(tmp_path, "linger")
    records = run.records(2)
    run.process.send_signal(number)
    assert run.end()[0] == 128 + number
    assert living(records) == []


def test_l4_ctrl_c_twice(tmp_path: Path) -> None:
    run = launch(tmp_path, "linger")
    records = run.records(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert living(records) == []


def test_l8_l10_l11_workers_get_what_was_given(tmp_path: Path) -> None:
    arguments = ["a b", '--x={"k": 1}', "", "--y=*", "--", "--nproc-per-node", "9"]
    given = {"CUDA_VISIBLE_DEVICES": "2,3", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = launch(tmp_path, "run", *arguments, environment=given)
    assert run.end()[0] == 0
    for record in run.records(2):
        assert record["argv"] == arguments
        assert record["python"] == sys.executable
        assert record["CUDA_VISIBLE_DEVICES"] == given["CUDA_VISIBLE_DEVICES"]
        assert record["PYTHONPATH"] == given["PYTHONPATH"]


def test_l12_two_launches_at_once(tmp_path: Path) -> None:
    runs = [launch(tmp_path / name, "run") for name in ("a", "b")]
    assert [run.end()[0] for run in runs] == [0, 0]
    assert all({r["WORLD_SIZE"] for r in run.records(2)} == {"2"} for run in runs)


def test_l12_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        status, errors = launch(tmp_path, "run", options=("--master-port", str(port))).end()
    assert status == 2
    assert str(port) in errors


def test_a_free_port_may_be_named(tmp_path: Path) -> None:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    assert launch(tmp_path, "run", options=("--master_port", str(port))).end()[0] == 0


def test_restarts_start_all_again(tmp_path: Path) -> None:
    status, _ = launch(tmp_path, "run-exit:5", options=("--max-restarts", "1")).end()
    assert status == 5
    assert (tmp_path / "attempts.txt").read_text().split().count("1") == 2


def test_output_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert launch(tmp_path, "run", options=("--log-dir", str(logs))).end()[0] == 0
    kept = "".join(path.read_text() for path in logs.rglob("stdout.log"))
    assert "hello from 0" in kept
    assert "hello from 1" in kept


def test_cores_are_shared_out_unless_said_otherwise(tmp_path: Path) -> None:
    assert default_environment(1) == {"OMP_NUM_THREADS": str(num_cores())}
    assert default_environment(10**6) == {"OMP_NUM_THREADS": "1"}
    run = launch(tmp_path, "run", environment={"OMP_NUM_THREADS": "5"})
    assert run.end()[0] == 0
    assert {r["OMP_NUM_THREADS"] for r in run.records(2)} == {"5"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no script"),
        (["missing.py"], "missing.py"),
        (["--nproc-per-node", "0", __file__], "positive number"),
        (["--nproc-per-node", "many", __file__], "'many'"),
        (["--max-restarts", "-1", __file__], "--max-restarts"),
        (["--master-port", "99999", __file__], "65535"),
        (["--unknown", __file__], "--unknown"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_help_needs_no_torch_and_shows_an_example() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom shardcore.launch import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert not e.code"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "example:" in shown
    assert "exit status" in shown


def test_workers_are_counted() -> None:
    assert count_workers("3") == 3
    assert count_workers("cpu") == num_cores()
    assert count_workers("auto") >= 1
    with pytest.raises(LaunchError, match="65535"):
        check_port(0)
    assert LaunchPlan(num_workers=1, command=("true",)).max_restarts == 0
