"""Functions on rank processes: what a rank finds, what comes back, and what is said when ranks fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore as sc
from shardcore.comm import agree_on
from shardcore.testing import SpmdError, SpmdSkip, run_spmd, spmd


def failure(function: Any, world: int, *args: Any, **options: Any) -> SpmdError:
    """The error of a run that must fail."""
    with pytest.raises(SpmdError) as caught:
        run_spmd(function, world, *args, **options)
    return caught.value


# ---------------------------------------------------------------------------------------------- what a rank finds


@spmd(world=[1, 2, 4])
def test_ranks_form_a_group(world: int) -> None:
    rank = dist.get_rank()
    assert dist.get_world_size() == world
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [rank, rank, world, world]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("number", "word"), [(3, "three"), (4, "four")])
@spmd(world=2)
def test_parameters_and_fixtures_reach_every_rank(tmp_path: Path, number: int, word: str) -> None:
    (tmp_path / f"{word}{dist.get_rank()}").write_text(str(number))
    dist.barrier()
    assert [(tmp_path / f"{word}{rank}").read_text() for rank in range(2)] == [str(number)] * 2


@spmd(world=1, init=False)
def test_one_rank_may_have_no_group_and_no_variables() -> None:
    assert not dist.is_initialized()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)


@spmd(world=2, init=False)
def test_a_group_can_be_made_from_the_variables() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


@spmd(world=2)
def test_random_numbers_start_alike() -> None:
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


# ------------------------------------------------------------------------------------------------ what comes back


def tensors_by_rank(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    base = torch.arange(1000, dtype=torch.bfloat16)
    return {
        "view": base[rank : rank + 2] * scale,
        "parameter": torch.nn.Parameter(torch.full((2, 2), float(rank))),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }


def test_results_come_back_by_rank() -> None:
    for rank, result in enumerate(run_spmd(tensors_by_rank, 2, torch.tensor(2.0, dtype=torch.bfloat16))):
        assert result["view"].tolist() == [2.0 * rank, 2.0 * rank + 2]
        assert result["view"].dtype == torch.bfloat16
        assert isinstance(result["parameter"], torch.nn.Parameter)
        assert result["parameter"].tolist() == [[rank, rank]] * 2
        assert result["empty"].shape == (0, 3)
        assert result["scalar"].item() is True


def process_id() -> int:
    return os.getpid()


def test_processes_are_kept_from_run_to_run() -> None:
    first = run_spmd(process_id, 2)
    assert run_spmd(process_id, 2) == first
    assert run_spmd(process_id, 1) == first[:1]
    assert os.getpid() not in first


def change_surroundings() -> None:
    os.environ["LEFT_BY_A_TEST"] = "1"
    dist.barrier()


def surroundings() -> tuple[bool, str | None]:
    return dist.is_initialized(), os.environ.get("LEFT_BY_A_TEST")


def test_the_next_run_finds_a_clean_process() -> None:
    run_spmd(change_surroundings, 2)
    assert run_spmd(surroundings, 2, init=False) == [(False, None)] * 2


def store_key(key: str, value: str) -> bool:
    store = dist.distributed_c10d._get_default_store()
    found = store.check([key])
    dist.barrier()
    store.set(key, value)
    return bool(found)


def test_each_run_has_a_fresh_store() -> None:
    assert [run_spmd(store_key, 2, "key", "value") for _ in range(2)] == [[False, False]] * 2


def speak() -> None:
    print("spoken by", dist.get_rank())


def test_what_ranks_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_spmd(speak, 2)
    shown = capsys.readouterr().out
    assert "spoken by 0" in shown
    assert "spoken by 1" in shown


# ------------------------------------------------------------------------------------------------------- failures


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("last words")
        found = {"answer": 41}
        assert found["answer"] == 42
    dist.barrier()


def test_a_failure_shows_all_traces_and_names_the_first() -> None:
    error = failure(fail_on_rank_1, 2)
    text = str(error)
    assert error.first.rank == 1
    assert text.startswith("fail_on_rank_1 failed on 2 ranks (first: rank 1)")
    assert "assert 41 == 42" in text, "the values compared are shown, as pytest shows them"
    assert text.count("in fail_on_rank_1\n") == 2
    assert "dist.barrier()" in text, "the trace of the rank that waited"
    assert "last words" in text


def end_process_of_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 7"), ("kill", "signal 9 (SIGKILL)")])
def test_a_process_that_ends_is_named_and_replaced(how: str, said: str) -> None:
    error = failure(end_process_of_rank_1, 2, how)
    assert error.first.rank == 1
    assert error.first.kind == "died"
    assert said in str(error)
    assert len(run_spmd(process_id, 2)) == 2


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_leaves_its_stack() -> None:
    error = failure(crash, 1)
    assert "SIGSEGV" in error.first.message
    assert "in crash" in error.first.trace


def wait_for_each_other() -> None:
    if dist.get_rank() == 0:
        dist.barrier()  # blocked in C++
    threading.Event().wait()  # blocked in Python


def test_a_hang_ends_at_the_limit_with_every_stack() -> None:
    start = time.monotonic()
    error = failure(wait_for_each_other, 2, timeout=2)
    assert time.monotonic() - start < 20
    assert [report.kind for report in error.reports] == ["hung", "hung"]
    assert "barrier" in error.reports[0].trace
    assert "in wait_for_each_other" in error.reports[0].trace
    assert "in wait_for_each_other" in error.reports[1].trace
    assert "time limit of 2 s" in str(error)
    assert run_spmd(surroundings, 2, init=False) == [(False, None)] * 2


def raise_on_rank_0_and_sleep() -> None:
    if dist.get_rank() == 0:
        raise ValueError("no more")
    time.sleep(1000)


def test_ranks_that_do_not_follow_a_failure_are_waited_for_shortly() -> None:
    start = time.monotonic()
    error = failure(raise_on_rank_0_and_sleep, 2, grace=1)
    assert time.monotonic() - start < 20
    assert [report.kind for report in error.reports] == ["error", "hung"]
    assert "ValueError: no more" in str(error)
    assert "in raise_on_rank_0_and_sleep" in error.reports[1].trace


def fail_while_another_waits_through_shardcore() -> None:
    axis = sc.Mesh()["shard"]
    if dist.get_rank() == 1:
        raise ValueError("the true reason")
    agree_on("a plan", "digest", "", axis, lambda _mine, _theirs: None)


def test_a_failure_is_told_to_ranks_that_wait() -> None:
    error = failure(fail_while_another_waits_through_shardcore, 2)
    assert error.reports[0].error_type == "RankFailedError"
    assert "the true reason" in error.reports[0].message


def skip_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        pytest.skip("for a reason")


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_a_skip_on_any_rank_skips(ranks: list[int]) -> None:
    with pytest.raises(SpmdSkip, match="for a reason"):
        run_spmd(skip_on, 2, ranks)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_are_errors_as_in_the_test_process() -> None:
    assert failure(warn, 1).first.error_type == "UserWarning"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "careful")
        assert run_spmd(warn, 1) == [None]


class RaisesWhenCollected:
    def __del__(self) -> None:
        raise RuntimeError("raised while collected")


def raise_unseen() -> None:
    RaisesWhenCollected()


def test_an_exception_nobody_sees_is_seen() -> None:
    assert "raised while collected" in str(failure(raise_unseen, 1))


def leave_state(what: str) -> None:
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "grad":
        torch.set_grad_enabled(False)
    else:
        threading.Thread(target=time.sleep, args=(1000,), name="left-over").start()


@pytest.mark.parametrize(
    ("what", "said"), [("dtype", "get_default_dtype"), ("grad", "is_grad_enabled"), ("thread", "left-over")]
)
def test_state_left_behind_fails_the_run(what: str, said: str) -> None:
    error = failure(leave_state, 1, what)
    assert "left state behind" in str(error)
    assert said in str(error)
    assert run_spmd(surroundings, 1, init=False) == [(False, None)]


# ------------------------------------------------------------------------------------------------------ wrong use


def test_what_cannot_travel_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="top of its module"):
        run_spmd(inner, 2)
    with pytest.raises(TypeError, match="top of its module"):
        spmd(world=2)(lambda: None)
    with pytest.raises(TypeError, match=r"argument 'lock' of type lock"):
        run_spmd(process_id, 1, kwargs={"lock": threading.Lock()})


@pytest.mark.parametrize("world", [0, -1, True, 1.0, "2"])
def test_a_wrong_world_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match="number of ranks"):
        run_spmd(process_id, world)
    with pytest.raises(ValueError, match="number of ranks"):
        spmd(world=[2, world])


def test_the_test_process_has_no_group() -> None:
    assert not dist.is_initialized()
    assert "shardcore.testing.preload" not in sys.modules
