"""The launcher on one machine: real processes, real signals. Tests named after a fault carry its id."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from launch.launching import launch, launch_worker, living

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
with open(f"total{dist.get_rank()}", "w") as file:
    file.write(f"{int(total)} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_PORT']}")
dist.destroy_process_group()
"""

RAISING = """
import atexit, time, torch
import shardcore as sc
mesh = sc.Mesh(device="cpu")
model = sc.shard(torch.nn.Linear(4, 4), mesh, stage=3)
if mesh.rank == 1:
    atexit.register(time.sleep, 5)
    raise ValueError("my own mistake")
model(torch.ones(1, 4))
"""

ENDING = """
import atexit, pathlib, sys, torch, torch.distributed as dist
import shardcore as sc

def show():  # after all that the library does at the end
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    pathlib.Path(f"threads{rank}").write_text(" ".join(names))

atexit.register(show)
if "own" in sys.argv:
    dist.init_process_group("gloo")
mesh = sc.Mesh(device="cpu")
rank = mesh.rank
model = sc.shard(torch.nn.Linear(4, 4), mesh, stage=3)
optimizer = sc.optimizer("sgd", model, lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
show()
assert "gloo" in pathlib.Path(f"threads{rank}").read_text()
if "own" in sys.argv:
    dist.destroy_process_group()
"""

RESUMING = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, saved = dist.get_rank(), 0
if os.path.exists("saved"):
    saved = int(open("saved").read())
for step in range(saved + 1, 6):
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        with open("steps", "a") as file:
            file.write(f"{step} ")
        if step % 2 == 0:
            with open("saved", "w") as file:
                file.write(str(step))
    if step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
dist.destroy_process_group()
"""


def test_l1_the_first_failure_decides_and_is_shown_last(tmp_path: Path) -> None:
    """Rank 0 fails as well, a moment later and with another code."""
    status, errors = launch_worker(tmp_path, "run-exit:3").end()
    assert status == 3
    *before, words, last = errors.splitlines()
    assert words == "  | the true reason"
    for expected in ("rank 1", "exit code 3", socket.gethostname()):
        assert expected in last
    assert "the true reason" in before, "what ranks write is passed on as it comes"
    assert errors.count("shardcore-launch:") == 1


def test_the_rank_that_raised_is_named_and_not_the_one_that_waited_for_it(tmp_path: Path) -> None:
    """Who waits ends sooner than a rank that has much to clear away."""
    (tmp_path / "raising.py").write_text(RAISING)
    status, errors = launch("--nproc-per-node", "2", "raising.py", folder=tmp_path).end()
    assert status == 1
    assert "rank 1 (local rank 1" in errors.splitlines()[-1]
    assert "my own mistake" in errors.splitlines()[-2]


def test_l16_a_kill_is_explained(tmp_path: Path) -> None:
    status, errors = launch_worker(tmp_path, f"run-kill:{int(signal.SIGKILL)}").end()
    assert status == 128 + signal.SIGKILL
    assert "SIGKILL" in errors.splitlines()[-1]
    assert "ran out of memory" in errors
    assert "GiB" in errors


def test_l3_nothing_survives_a_failed_rank(tmp_path: Path) -> None:
    """All ranks ignore requests to stop, and have children that do so too, one of them in a session of its own."""
    run = launch_worker(tmp_path, "linger-exit:7")
    records = run.records(2)
    start = time.monotonic()
    assert run.end()[0] == 7
    assert living(records) == []
    assert time.monotonic() - start < 2 * 10, "the launcher itself ends in time"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_l3_nothing_survives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    run = launch_worker(tmp_path, "linger")
    records = run.records(2)
    run.process.send_signal(number)
    if number is signal.SIGKILL:
        assert run.process.wait(30) == -number
        assert living(records) == []
        run.end()
    else:
        status, errors = run.end()
        assert status == 128 + number
        assert errors == f"shardcore-launch: stopped by {number.name}\n"
        assert living(records) == []


def test_l4_ctrl_c_twice(tmp_path: Path) -> None:
    run = launch_worker(tmp_path, "linger")
    records = run.records(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    status, errors = run.end()
    assert status == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "shardcore-launch: stopped by SIGINT"
    assert living(records) == []


def test_l8_l10_l11_ranks_get_what_was_given(tmp_path: Path) -> None:
    arguments = ["a b", '--x={"k": 1}', "", "--y=*", "$$", "${local_rank}", "--", "--nproc-per-node", "9", "'\"\\"]
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    given = {"CUDA_VISIBLE_DEVICES": "2,GPU-8a56", "PYTHONPATH": path, "OMP_NUM_THREADS": "5"}
    options = ("--nproc_per_node=2", "--log-dir", "logs")
    run = launch_worker(tmp_path, "run", *arguments, options=options, environment=given)
    assert run.end()[0] == 0
    for rank, record in enumerate(run.records(2)):
        assert record["argv"] == arguments
        assert record["python"] == sys.executable
        seen = record["environ"]
        assert {name: seen[name] for name in given} == given
        assert [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "2"]
        assert (tmp_path / "logs" / f"rank{rank}.out").read_text() == f"hello from {rank}\n"
        assert (tmp_path / "logs" / f"rank{rank}.err").read_text() == ""


def test_l12_two_launches_at_once(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(ALL_REDUCE)
        runs.append(launch("--num_gpus", "2", "train.py", folder=tmp_path / name))
    assert [run.end()[0] for run in runs] == [0, 0]
    for run in runs:
        assert [(run.folder / f"total{rank}").read_text()[:6] for rank in range(2)] == ["2 of 2"] * 2


def test_l12_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        status, errors = launch_worker(tmp_path, "run", options=("--nproc-per-node", "1", "--master-port", port)).end()
    assert status == 2
    assert f"port {port}" in errors
    assert "--master-port" in errors
    assert not (tmp_path / "rank0.json").exists()


def test_a_module_meets_at_the_port_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(ALL_REDUCE)
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    run = launch("--nproc-per-node", "1", "--master_port", str(port), "-m", "package.train", folder=tmp_path)
    assert run.end()[0] == 0
    assert (tmp_path / "total0").read_text() == f"1 of 1 at {port}"


def test_l14_a_restart_resumes_where_it_was_saved(tmp_path: Path) -> None:
    """Killed at step 3, after the save at 2: steps 3 to 5 are done by the second attempt, whose group is a new one."""
    (tmp_path / "train.py").write_text(RESUMING)
    status, errors = launch("--nproc-per-node", "2", "--max-restarts", "2", "train.py", folder=tmp_path).end()
    assert status == 0, errors
    assert (tmp_path / "steps").read_text() == "1 2 3 3 4 5 "
    assert "all ranks start anew (1 of 2)" in errors
    assert "(2 of 2)" not in errors


def test_l14_failing_again_and_again_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nopen('attempts', 'a').write('x')\nsys.exit(5)\n")
    status, errors = launch("--nproc-per-node", "2", "--max-restarts", "1", "train.py", folder=tmp_path).end()
    assert status == 5
    assert len((tmp_path / "attempts").read_text()) >= 2
    assert errors.count("failed with exit code 5") == 2


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    status, errors = launch("--nproc-per-node", "1", "--no-python", "./nothing", "here", folder=tmp_path).end()
    assert status == 127
    assert "cannot start './nothing': No such file or directory" in errors


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    (tmp_path / "train.py").write_text("import json, os, sys; json.dump(sys.argv, open('argv.json', 'w'))")
    run = launch("--nproc-per-node", "1", "train.py", "x", folder=tmp_path, environment={"TMPDIR": str(folder)})
    assert run.end() == (0, "")
    assert json.loads((tmp_path / "argv.json").read_text()) == ["train.py", "x"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("who", ["own", "library"])
def test_no_thread_of_a_group_lives_when_the_interpreter_ends(who: str, tmp_path: Path) -> None:
    """One that frees a tensor then needs an interpreter that is gone, and aborts the finished job."""
    (tmp_path / "train.py").write_text(ENDING)
    status, errors = launch("--nproc-per-node", "2", "train.py", who, folder=tmp_path).end()
    assert status == 0, errors
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads{rank}").read_text()
