"""The boundary to Rust: works without torch, lets other threads run, speaks through docstrings and stubs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

from shardcore import plan


def test_plans_work_without_torch() -> None:
    program = textwrap.dedent("""
        import sys
        sys.modules["torch"] = None  # from now on `import torch` raises ImportError
        from shardcore import plan
        from shardcore.errors import PlanError
        layout = plan.shard_layout([("w", 100, "torch.bfloat16", True)], num_shards=4)
        shards = plan.plan_shards([("block", [("w", 100, "bf16", True)])], num_shards=4)
        assert shards.groups[0][1] == layout
        schedule = plan.pipeline_schedule("zb-v", num_ranks=2, num_microbatches=3)
        schedule.lower().check()
        assert schedule.simulate(1, 1, 1).makespan >= 9
        assert plan.synthesize(2, 4, 1, 1, 1, memory_cap=2).schedule.num_ranks == 2
        try:
            plan.shard_layout([], num_shards=0)
        except PlanError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "num_shards is 0: expected at least 1\n"), done.stderr


@pytest.fixture
def no_preemption() -> Iterator[None]:
    """Inside, a thread gives the GIL up only of its own accord."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def other_thread_ran_during(work: Callable[[], object]) -> bool:
    """Whether a thread that was ready to run got the GIL while ``work`` ran."""
    ready, go = threading.Event(), threading.Lock()
    ran: list[bool] = []
    go.acquire()

    def other() -> None:
        ready.set()
        with go:
            ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    go.release()
    work()
    during = bool(ran)
    thread.join()
    return during


@pytest.mark.usefixtures("no_preemption")
def test_the_gil_is_released_while_rust_works() -> None:
    layout = plan.shard_layout([(f"parameter {index}", 7, "bf16", True) for index in range(200_000)], num_shards=4)
    schedule = plan.pipeline_schedule("interleaved", num_ranks=8, num_microbatches=512)
    for work in (layout.digest, layout.to_json, schedule.lower, lambda: schedule.simulate(1, 1, 1)):
        # On a busy machine the other thread may wake too late once; without a release it never runs.
        assert any(other_thread_ran_during(work) for _ in range(100)), work
    assert not other_thread_ran_during(lambda: sum(range(1_000_000))), "the probe sees releases that are none"


@pytest.mark.parametrize("name", plan.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(plan, name)
    assert inspect.getdoc(value)
    fields = getattr(value, "__dataclass_fields__", {})  # their docstrings stand in the source alone
    for member, attribute in vars(value).items() if inspect.isclass(value) else ():
        if member in fields:
            continue
        assert member.startswith("_") or inspect.getdoc(attribute), f"{name}.{member}"


def test_signatures_show_names_and_defaults() -> None:
    assert str(inspect.signature(plan.shard_layout)) == "(params, num_shards, *, alignment=256)"
    assert str(inspect.signature(plan.groups)) == "(params, num_shards, *, segment_nbytes=None, alignment=256)"
    assert str(inspect.signature(plan.prefetch)).startswith("(trace, sizes, budget=None, *, objective='bytes', ")
    assert str(inspect.signature(plan.plan_shards)) == "(units, num_shards, *, segment_nbytes=None, alignment=256)"
    assert str(inspect.signature(plan.pipeline_schedule)) == (
        "(name, num_ranks, num_microbatches, num_chunks=None, costs=None)"
    )
    assert str(inspect.signature(plan.PipelineSchedule.check)) == (
        "(self, /, comm=None, memory_cap=None, activation=1.0, stash=None, *, capacity=None)"
    )
    assert str(inspect.signature(plan.partition_layers)) == "(weights, num_parts, *, cut_nbytes=None)"
