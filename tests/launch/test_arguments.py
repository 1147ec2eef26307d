"""The command line and the plan made from it; no process is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardcore.errors import LaunchError
from shardcore.launch import HostPlan, LaunchPlan, RankPlace, parse, plan_local


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def plan(*argv: str, num_gpus: int = 0, num_cores: int = 8, **environment: str) -> LaunchPlan:
    return plan_local(parse(argv), environment, num_gpus=num_gpus, num_cores=num_cores)


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus"])
def test_the_spellings_of_other_launchers_are_understood(script: str, option: str) -> None:
    assert parse([option, "3", script]).num_ranks == 3
    assert parse([f"{option}=3", script]).num_ranks == 3


def test_options_end_at_the_script(script: str) -> None:
    options = parse(["--standalone", "--nnodes=1", "--master_port", "1234", script, "--master_port", "5", "--", "-h"])
    assert options.master_port == 1234
    assert options.arguments == ("--master_port", "5", "--", "-h")
    assert parse(["--", script, "--"]).arguments == ("--",)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which program?"),
        (["--max-restarts"], "--max-restarts needs a value"),
        (["missing.py"], "no script at 'missing.py'"),
        (["--nproc-per-node", "0", "train.py"], "'0', expected a number of ranks, auto, gpu or cpu"),
        (["--nproc-per-node", "many", "train.py"], "'many'"),
        (["--max-restarts", "-1", "train.py"], "'-1'"),
        (["--master-port", "99999", "train.py"], "1 to 65535"),
        (["--master-prot", "1", "train.py"], "did you mean --master-port?"),
        (["--nprocs", "2", "train.py"], "did you mean --nproc-per-node?"),
        (["--standalone=yes", "train.py"], "--standalone=yes"),
        (["--nnodes", "2", "train.py"], "this machine only"),
        (["--node-rank", "1", "train.py"], "one machine only"),
        (["--include", "localhost:0,x", "train.py"], "'x' is not a device slot"),
        (["--include", "localhost@0", "train.py"], "unknown host 'localhost@0'"),
        (["--include", "worker-1:0", "train.py"], "unknown host 'worker-1'"),
        (["--include", "localhost", "train.py"], "names no device slot"),
        (["--include", "localhost:1,1", "train.py"], "names a slot twice"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    script: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_ranks_are_counted_by_devices_or_cores(script: str) -> None:
    assert plan(script, num_gpus=4).world == 4
    assert plan(script, num_cores=6).world == 6
    assert plan("--nproc-per-node", "cpu", script, num_gpus=4, num_cores=6).world == 6
    assert plan("--nproc-per-node", "3", script, num_gpus=4).world == 3
    assert plan("--include", "localhost:1,3", script, num_gpus=4).world == 2
    with pytest.raises(LaunchError, match="no GPU is visible"):
        plan("--nproc-per-node", "gpu", script)


def test_cores_are_shared_out_unless_said_otherwise(script: str) -> None:
    def threads(*argv: str, **environment: str) -> str | None:
        return plan(*argv, script, **environment).hosts[0].environment.get("OMP_NUM_THREADS")

    assert threads("--nproc-per-node", "3") == "2"
    assert threads("--nproc-per-node", "100") == "1"
    assert threads("--nproc-per-node", "3", OMP_NUM_THREADS="5") is None


@pytest.mark.parametrize(
    ("visible", "slots", "seen"), [("2,3", "1", "3"), ("GPU-8a, MIG-7f", "1,0", "MIG-7f,GPU-8a"), (None, "1", "1")]
)
def test_l8_slots_count_within_the_visible_devices(script: str, visible: str | None, slots: str, seen: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    (host,) = plan("--include", f"localhost:{slots}", script, **environment).hosts
    assert host.environment["CUDA_VISIBLE_DEVICES"] == seen


def test_l8_a_slot_that_is_not_visible_is_refused(script: str) -> None:
    with pytest.raises(LaunchError, match="no slot 2 among CUDA_VISIBLE_DEVICES=2,3"):
        plan("--include", "localhost:2", script, CUDA_VISIBLE_DEVICES="2,3")


def test_the_command_is_this_pythons(script: str) -> None:
    assert plan(script, "a b").command == (sys.executable, "-u", script, "a b")
    assert plan("-m", "json.tool", "x").command == (sys.executable, "-u", "-m", "json.tool", "x")
    assert plan("--no-python", "echo", "").command == ("echo", "")


def test_l13_ranks_are_numbered_through_unequal_hosts() -> None:
    hosts = tuple(HostPlan(host=name, num_ranks=n, environment={}) for name, n in (("a", 1), ("b", 3)))
    job = LaunchPlan(hosts=hosts, command=("true",), master_addr="a", master_port=None, max_restarts=0, log_dir=None)
    assert job.world == 4
    assert job.places()[0] == RankPlace(rank=0, local_rank=0, host="a")
    assert [(place.rank, place.local_rank) for place in job.places()] == [(0, 0), (1, 0), (2, 1), (3, 2)]


def test_help_needs_no_torch_and_shows_examples() -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom shardcore.launch import main\nmain(['--help'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "examples:" in shown
    assert "exit status" in shown
