"""Whatever is given to a plan function, it gives a value or a clear error: no panic, no abort, no OverflowError."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

# No count between what is small and what is refused at once: a plan for a million ranks is valid, and takes its time.
INTEGERS = [-(10**400), -(2**63), -1, 0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63, 2**64, 10**400]
FLOATS = [math.nan, math.inf, -math.inf, -0.0, 0.5, 5e-324, 1e308, -1e308]
ONE: st.SearchStrategy[Any] = st.sampled_from([*INTEGERS, *FLOATS, None, True, "", "x", "1f1b", (), {}, b"x"])
ABSURD: st.SearchStrategy[Any] = ONE | st.lists(ONE, max_size=4) | st.lists(st.lists(ONE, max_size=3), max_size=3)

PARAMS = [("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)]
COSTS: dict[str, Any] = {
    "forward": 1.0,
    "input_grad": 1.0,
    "weight_grad": 1.0,
    "hop": 0.1,
    "activation": 1.0,
    "stash": None,
    "fused_backward": None,
}
SCHEDULE = plan.pipeline_schedule("1f1b", 2, 3)
LAYOUT = plan.shard_layout(PARAMS, num_shards=4)


def coordinate(**arguments: Any) -> plan.PrefetchCoordinator:
    """A coordinator after one use of a unit."""
    unit, phase = arguments.pop("unit"), arguments.pop("phase")
    coordinator = plan.PrefetchCoordinator(**arguments)
    coordinator.begin()
    coordinator.enter(unit, phase)
    coordinator.leave(unit, phase)
    return coordinator


def simulate(**arguments: Any) -> plan.Simulation:
    return SCHEDULE.simulate(**arguments)


def draw(max_width: Any, microseconds: Any, rank: Any, forward: Any, hop: Any) -> Any:
    """Every form of a simulation."""
    run = SCHEDULE.simulate(forward, 1, 1, hop)
    run.to_svg()
    return run.to_ascii(max_width=max_width), run.to_perfetto(microseconds=microseconds), run.memory(rank)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "groups": (plan.groups, {"params": PARAMS, "num_shards": 2, "segment_nbytes": None, "alignment": 256}),
    "shard_layout": (plan.shard_layout, {"params": PARAMS, "num_shards": 2, "alignment": 256}),
    "parameter": (
        lambda name, numel, dtype, trainable: plan.shard_layout([(name, numel, dtype, trainable)], 2),
        {"name": "w", "numel": 10, "dtype": "bf16", "trainable": True},
    ),
    "ranges": (lambda rank: LAYOUT.ranges(rank), {"rank": 0}),
    "reshard": (plan.reshard, {"old": LAYOUT, "new": plan.shard_layout(PARAMS, num_shards=3)}),
    "share_writes": (
        lambda start, stop, **others: plan.share_writes([[(0, start, stop)], [(0, 0, 2)]], **others),
        {"start": 0, "stop": 4, "itemsizes": [2]},
    ),
    "plan_shards": (
        plan.plan_shards,
        {"units": [("a", PARAMS)], "num_shards": 2, "segment_nbytes": 100, "alignment": 256},
    ),
    "prefetch": (
        plan.prefetch,
        {
            "trace": [("a", "forward"), ("b", "forward", 1.0), ("a", "backward", 1.0, 1)],
            "sizes": {"a": 100, "b": 50},
            "budget": 150,
            "objective": "bytes",
            "latency": 0.0,
            "bandwidth": 10.0,
            "prefetch_nbytes": None,
            "max_live_nbytes": None,
            "max_reuse_nbytes": None,
            "persistence_nbytes": 0,
        },
    ),
    "use": (
        lambda unit, phase, seconds, span, nbytes: plan.prefetch([(unit, phase, seconds, span)], {"a": nbytes}),
        {"unit": "a", "phase": "forward", "seconds": 1.0, "span": 1, "nbytes": 10},
    ),
    "PrefetchCoordinator": (
        coordinate,
        {
            "units": [("a", 100), ("b", 50)],
            "budget": 150,
            "objective": "time",
            "prefetch_nbytes": None,
            "max_live_nbytes": None,
            "max_reuse_nbytes": None,
            "persistence_nbytes": 0,
            "unit": 0,
            "phase": "forward",
        },
    ),
    "pipeline_schedule": (
        plan.pipeline_schedule,
        {"name": "zb-v", "num_ranks": 2, "num_microbatches": 3, "num_chunks": None, "costs": (1, 1, 1)},
    ),
    "costs": (
        lambda **costs: plan.pipeline_schedule("v-half", 2, 3, costs=costs),
        COSTS,
    ),
    "two streams": (lambda **costs: plan.pipeline_schedule("dualpipe-v", 2, 4, costs=costs), COSTS),
    "evaluation_schedule": (
        plan.evaluation_schedule,
        {"placement": [0, 1, 1, 0], "num_microbatches": 3, "num_chains": 1},
    ),
    "Action": (plan.Action, {"kind": "F", "stage": 0, "microbatch": 0, "slot": 0, "with_next": False}),
    "PipelineSchedule": (
        plan.PipelineSchedule,
        {
            "programs": [["0F0", "0B0"]],
            "placement": [0],
            "num_microbatches": 1,
            "name": "mine",
            "num_slices": 1,
            "num_chains": 1,
            "gating": "all",
            "comm": "blocking",
            "lowering": {"zero_stage": 2, "receives_ahead": 2, "tied": []},
        },
    ),
    "lowering": (
        lambda **options: plan.PipelineSchedule([["0F0", "0B0"]], [0], 1, lowering=options),
        {"zero_stage": 2, "reduce": "once", "tied": [[0, 1]], "receives_ahead": 2, "max_unsharded": 2},
    ),
    "with_programs": (SCHEDULE.with_programs, {"programs": [["0F0"], ["1F0"]]}),
    "program": (lambda rank: (SCHEDULE.program(rank), SCHEDULE.stages(rank)), {"rank": 0}),
    "lower": (
        SCHEDULE.lower,
        {
            "zero_stage": 3,
            "reduce": "once",
            "optimizer": "barrier",
            "tied": [[0, 1]],
            "receives_ahead": 2,
            "max_unsharded": 2,
            "costs": (1, 1, 1, 0.5),
        },
    ),
    "simulate": (
        simulate,
        {
            **COSTS,
            "latency": {(0, 1): 0.5},
            "message": [1.0, 1.0],
            "bandwidth": 10.0,
            "overlap": True,
            "composite": 1.0,
        },
    ),
    "latency": (
        lambda sender, receiver, time: SCHEDULE.simulate(1, 1, 1, latency={(sender, receiver): time}),
        {"sender": 0, "receiver": 1, "time": 0.5},
    ),
    "check": (
        SCHEDULE.check,
        {"comm": "directed", "memory_cap": 2.0, "activation": 1.0, "stash": None, "capacity": None},
    ),
    "forms of a simulation": (
        draw,
        {"max_width": 80, "microseconds": 1000.0, "rank": 0, "forward": 1.0, "hop": 0.1},
    ),
    "synthesize": (
        plan.synthesize,
        {
            **COSTS,
            "num_ranks": 2,
            "num_microbatches": 2,
            "memory_cap": 2.0,
            "objective": "makespan",
            "placement": [0, 1],
        },
    ),
    "partition_layers": (plan.partition_layers, {"weights": [1.0, 2.0, 3.0], "num_parts": 2, "cut_nbytes": [1, 2]}),
    "partition_marked": (
        plan.partition_marked,
        {"marked": [True, False, True], "num_parts": 2, "cut_nbytes": [1, 2]},
    ),
    "partition_uniform": (plan.partition_uniform, {"num_layers": 4, "num_parts": 2}),
    "partition_by_class": (
        plan.partition_by_class,
        {"class_names": ["Embedding", "Block"], "pattern": "block", "num_parts": 1},
    ),
    "check_boundaries": (plan.check_boundaries, {"boundaries": [0, 1, 2], "num_layers": 2}),
    "from_megatron_layout": (plan.from_megatron_layout, {"text": "Et*3|tt|L"}),
    "to_megatron_layout": (
        plan.to_megatron_layout,
        {"layers": ["embedding", "decoder", "loss"], "boundaries": [0, 1, 3]},
    ),
    "place_tiles": (plan.place_tiles, {"tiles": [(10, [4, 4]), (3, [2])]}),
    "tile": (lambda numel, itemsize: plan.place_tiles([(numel, [itemsize])]), {"numel": 10, "itemsize": 4}),
    "plan_swap": (plan.plan_swap, {"order": [0, 1, 2], "residents": [1, None]}),
    "host_memory": (
        lambda **options: dataclasses.astuple(plan.host_memory(homes=plan.Homes(states="nvme"), **options)),
        {"shards": [LAYOUT], "rank": 0, "options_of": {"bias": 1}},
    ),
    "Homes": (
        lambda **options: dataclasses.astuple(plan.host_memory([LAYOUT], plan.Homes(**options))),
        {
            "params": "nvme",
            "grads": "cpu",
            "states": "cpu",
            "ratio": 0.5,
            "tile_numel": 100,
            "num_tiles": 2,
            "host_param_nbytes": 1000,
            "master": "fp32",
            "kept": ("fp32", "bf16"),
            "device_is_host": False,
        },
    ),
    "first_difference": (plan.first_difference, {"first": LAYOUT.to_json(), "second": "{}"}),
    "from_text": (plan.PipelineSchedule.from_text, {"text": SCHEDULE.to_text()}),
    "from_json": (plan.PipelineSchedule.from_json, {"text": SCHEDULE.to_json()}),
    "from_torch_csv": (plan.PipelineSchedule.from_torch_csv, {"text": SCHEDULE.to_torch_csv(), "name": "mine"}),
}


def test_every_public_function_is_called_here() -> None:
    made_elsewhere = {
        "HostMemory",
        "PrefetchPlan",
        "ShardLayout",
        "ShardPlan",
        "Simulation",
        "Synthesis",
        "schedule_names",
    }
    assert set(plan.__all__) - made_elsewhere <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_sensible_arguments_give_a_value(name: str) -> None:
    call, arguments = CALLS[name]
    if name == "lowering":
        arguments = {**arguments, "tied": []}
    assert all(map(math.isfinite, floats(call(**arguments))))


@pytest.mark.parametrize("name", CALLS)
@settings(deadline=None)
@given(data=st.data())
def test_absurd_arguments_give_a_value_or_a_clear_error(name: str, data: st.DataObject) -> None:
    call, arguments = CALLS[name]
    keys = data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True))
    absurd = {key: data.draw(ABSURD, label=key) for key in keys}
    found, refusal = outcome(lambda: call(**{**arguments, **absurd}))
    assert refusal is None or refusal
    assert "internal error" not in (refusal or "")
    assert all(map(math.isfinite, floats(found)))


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call gives, or the message of the error that it may raise (PlanError is a ValueError)."""
    try:
        return call(), None
    except (ValueError, TypeError) as error:
        return None, str(error)


def floats(found: Any) -> Iterator[float]:
    """The floats in a result, and those that it has as properties."""
    if isinstance(found, float):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from floats(item)
    else:
        for name in (
            "makespan",
            "span",
            "busy",
            "bubble_span",
            "bubble_makespan",
            "peak",
            "value",
            "lower_bound",
            "gap",
        ):
            if hasattr(found, name):
                yield from floats(getattr(found, name))
        for name in ("stalls", "exposed", "exposed_on_demand"):
            if hasattr(found, name):
                yield from floats(getattr(found, name))


def test_a_number_too_large_is_told_from_one_too_small() -> None:
    with pytest.raises(PlanError, match=r"num_ranks is 4294967296: expected at most 2\^32 - 1"):
        plan.pipeline_schedule("1f1b", 2**32, 4)
    with pytest.raises(PlanError, match="num_ranks is -1: expected at least 1"):
        plan.pipeline_schedule("1f1b", -1, 4)
    with pytest.raises(PlanError, match=r"num_parts is 4611686018427387904: expected at most 2\^24"):
        plan.partition_uniform(2**62, 2**62)
    with pytest.raises(PlanError, match="boundary 1 is -1"):
        plan.check_boundaries([0, -1], 2)
    with pytest.raises(PlanError, match="too large"):
        plan.partition_layers([10**400], 1)


def test_a_latency_where_no_messages_pass_is_refused() -> None:
    schedule = plan.pipeline_schedule("1f1b", 3, 4)
    with pytest.raises(PlanError, match="latency of edge 0->2: expected an edge over which messages pass: 0->1, 1->0"):
        schedule.simulate(1, 1, 1, latency={(0, 2): 1.0})


def test_without_overlap_a_program_that_deadlocks_is_refused() -> None:
    """Both ranks send before they receive: with overlap both messages are posted, without it neither goes on."""
    programs = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1@1", "0B1@1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1@1", "1F1@1", "1B1", "1SEND_B1"],
    ]
    schedule = plan.PipelineSchedule(programs, [0, 1], 2, comm="directed")
    assert schedule.simulate(1, 1, 1).makespan == 9
    with pytest.raises(PlanError, match=r"deadlock of .*0SEND_F1"):
        schedule.simulate(1, 1, 1, overlap=False)


INTERRUPTED = """
import os, signal, threading
from shardcore import plan
signal.signal(signal.SIGINT, signal.default_int_handler)
weights = [0.0] * 260_000
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    plan.partition_layers(weights, 1_000)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_long_partition_can_be_interrupted() -> None:
    """Ctrl-C comes while the ties of a quarter of a million layers are broken, which takes far longer than a second."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.returncode) == ("interrupted\n", 0), run.stderr


LEFT = """
import os, signal, threading, time
from shardcore import plan
signal.signal(signal.SIGINT, signal.default_int_handler)
schedule = plan.pipeline_schedule("1f1b", 512, 4096)
def job():
    {job}
start = time.monotonic()
job()
whole = time.monotonic() - start
threading.Timer(whole / 8, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    job()
except KeyboardInterrupt:
    print(time.monotonic() - start < 0.75 * whole)
"""


@pytest.mark.parametrize(
    "job", ["plan.synthesize(64, 512, 1, 1, 1, hop=0.3)", "schedule.lower(zero_stage=3)", "schedule.check('one-fifo')"]
)
def test_ctrl_c_does_not_wait_for_a_schedule(job: str) -> None:
    """Each takes about a second or more; the signal comes early, and is not kept until the end."""
    script = LEFT.format(job=job)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.returncode) == ("True\n", 0), run.stderr
