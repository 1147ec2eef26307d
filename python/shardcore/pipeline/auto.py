"""``schedule="auto"``: a few steps are measured, then the best schedule for what they cost takes over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from shardcore import comm, plan
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh
from shardcore.pipeline.meter import Meter, synchronize

PROFILED = "zb-h1"
"""Runs I and W apart, so that both are measured, in the memory of 1F1B."""
_CAP = "1f1b"
_NUM_HOPS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSchedule:
    """How ``schedule="auto"`` measures and plans."""

    num_profiled_steps: int = 3
    """Steps that are timed, behind one that counts memory; as many are timed after the switch."""
    memory_nbytes: float | None = None
    """The most that a rank may hold of its micro-batches, in bytes; None: what 1F1B takes on the rank that needs most.
    """

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for values without meaning."""
        if self.num_profiled_steps < 1:
            raise ConfigError(f"AutoSchedule(num_profiled_steps={self.num_profiled_steps}): expected 1 or more")
        if self.memory_nbytes is not None and not self.memory_nbytes > 0:
            raise ConfigError(f"AutoSchedule(memory_nbytes={self.memory_nbytes}): expected a number of bytes, or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a micro-batch costs, one entry a stage: median seconds, most bytes; the largest of all data ranks."""

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    hop: float
    """Seconds of a message between neighbours, the slowest of all edges."""
    activation: list[float]
    """Bytes held from a forward to its input gradient."""
    stash: list[float]
    """Bytes held from there to the weight gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoReport:
    """What was found, for one number of micro-batches."""

    costs: Costs
    found_by: str
    """What found the schedule; see :func:`shardcore.plan.synthesize`."""
    gap: float
    """How much longer it takes than the certified bound, as a part of that."""
    predicted_s: Mapping[str, float]
    """Simulated seconds of a step by schedule: the one that was profiled, "auto", and 1F1B for comparison. Neither
    reductions over data-parallel ranks nor the optimizer are in it."""
    measured_s: Mapping[str, float]
    """The same as this rank saw it, reductions included, where there were steps to be timed."""

    def explain(self) -> str:
        """A table, in milliseconds."""
        lines = [f"schedule found by {self.found_by}, at most {100 * self.gap:.1f}% above the best"]
        lines.append(f"{'schedule':<12}{'predicted ms':>14}{'measured ms':>14}")
        for name, predicted in self.predicted_s.items():
            measured = f"{1e3 * self.measured_s[name]:.3f}" if name in self.measured_s else "-"
            lines.append(f"{name:<12}{1e3 * predicted:>14.3f}{measured:>14}")
        costs = self.costs
        lines.append(f"{'stage':<12}{'F ms':>10}{'I ms':>10}{'W ms':>10}{'F to I MB':>12}{'I to W MB':>12}")
        for stage, row in enumerate(zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)):
            times = "".join(f"{1e3 * each:>10.3f}" for each in row)
            lines.append(f"{stage:<12}{times}{costs.activation[stage] / 1e6:>12.2f}{costs.stash[stage] / 1e6:>12.2f}")
        return "\n".join([*lines, f"a message takes {1e3 * costs.hop:.3f} ms"])


@dataclass(slots=True)
class _Times:
    """Seconds of whole steps under one schedule."""

    wanted: int
    seconds: list[float] = field(default_factory=list)
    num_started: int = 0


class AutoTuner:
    """Measures the first steps of a pipeline, and makes its schedules. Every rank of the pipeline has one.

    The first step counts memory, the next ones time; from then on :meth:`schedule` gives another schedule on the same
    placement.
    """

    def __init__(self, options: AutoSchedule, mesh: Mesh) -> None:
        self._options = options
        self._mesh = mesh
        self._memory = Meter(mesh.device, counts_memory=True)
        self._times = Meter(mesh.device, counts_memory=False)
        self._steps = {name: _Times(options.num_profiled_steps) for name in (PROFILED, "auto")}
        self._made: dict[int, plan.Synthesis] = {}
        self.costs: Costs | None = None
        """None until the switch."""

    @property
    def _num_ranks(self) -> int:
        return self._mesh["pp"].size

    def schedule(self, num_microbatches: int) -> plan.PipelineSchedule:
        """The schedule of the next step. Collective over the mesh where it is made."""
        if self.costs is None:
            return plan.pipeline_schedule(PROFILED, self._num_ranks, num_microbatches)
        return self._synthesis(num_microbatches).schedule

    def meter(self) -> Meter | None:
        """What measures the step that is about to run; None where none is to be measured."""
        if self.costs is not None:
            return None
        return self._memory if self._steps[PROFILED].num_started <= 1 else self._times

    def switch_if_due(self, channels: Mapping[tuple[int, int], comm.Channel], num_microbatches: int) -> bool:
        """Whether the profile is complete now and the schedule has changed. Collective over the mesh.

        Raises:
            PlanError: on every rank; ``memory_nbytes`` is less than a micro-batch takes.
        """
        if self.costs is not None or len(self._steps[PROFILED].seconds) < self._options.num_profiled_steps:
            return False
        self.costs = self._agreed_costs(channels)
        try:
            self._synthesis(num_microbatches)
        except BaseException:
            self.costs = None
            raise
        return True

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """A step from where all ranks begin to where all are done."""
        times = self._steps[PROFILED if self.costs is None else "auto"]
        times.num_started += 1
        if times.num_started == 1 or len(times.seconds) >= times.wanted:  # the first meets cold caches
            yield
            return
        synchronize(self._mesh.device)
        start = time.perf_counter()
        yield
        synchronize(self._mesh.device)
        times.seconds.append(time.perf_counter() - start)

    def report(self, num_microbatches: int) -> AutoReport | None:
        """What was found for steps of so many micro-batches; None before the switch."""
        made = self._made.get(num_microbatches)
        if self.costs is None or made is None:
            return None
        times = (self.costs.forward, self.costs.input_grad, self.costs.weight_grad, self.costs.hop)
        schedules = {name: plan.pipeline_schedule(name, self._num_ranks, num_microbatches) for name in (PROFILED, _CAP)}
        return AutoReport(
            costs=self.costs,
            found_by=made.found_by,
            gap=made.gap,
            predicted_s={
                name: schedule.simulate(*times).makespan
                for name, schedule in {
                    PROFILED: schedules[PROFILED],
                    "auto": made.schedule,
                    _CAP: schedules[_CAP],
                }.items()
            },
            measured_s={name: median(each.seconds) for name, each in self._steps.items() if each.seconds},
        )

    def _synthesis(self, num_microbatches: int) -> plan.Synthesis:
        if num_microbatches not in self._made:
            made = self._synthesize(num_microbatches)
            for name in ("pp", "dp"):
                comm.agree_on(
                    "the schedule made by schedule='auto'",
                    made.schedule.digest(),
                    made.schedule.to_json(),
                    self._mesh[name],
                    plan.first_difference,
                )
            self._made[num_microbatches] = made
        return self._made[num_microbatches]

    def _synthesize(self, num_microbatches: int) -> plan.Synthesis:
        costs: dict[str, Any] = {} if self.costs is None else asdict(self.costs)
        cap = self._options.memory_nbytes
        if cap is None:
            usual = plan.pipeline_schedule(_CAP, self._num_ranks, num_microbatches)
            cap = max(usual.simulate(**costs).peak)
        return plan.synthesize(self._num_ranks, num_microbatches, **costs, memory_cap=cap)

    def _agreed_costs(self, channels: Mapping[tuple[int, int], comm.Channel]) -> Costs:
        """What all ranks plan with. Collective over the mesh."""
        axis = self._mesh["pp"]
        stage = axis.rank  # one stage a rank
        seconds = self._times.seconds
        mine = [median(seconds[kind, stage]) for kind in "FIW"]
        mine += [float(most.get(stage, 0)) for most in (self._memory.activation_nbytes, self._memory.stash_nbytes)]
        mine.append(self._measure_hops(channels))
        mine = [max(each) for each in zip(*comm.exchange(mine, self._mesh["dp"], "costs"), strict=True)]
        forward, input_grad, weight_grad, activation, stash, hops = zip(
            *comm.exchange(mine, axis, "costs of stages"), strict=True
        )
        return Costs(
            forward=list(forward),
            input_grad=list(input_grad),
            weight_grad=list(weight_grad),
            hop=max(hops),
            activation=list(activation),
            stash=list(stash),
        )

    def _measure_hops(self, channels: Mapping[tuple[int, int], comm.Channel]) -> float:
        """Half of the time of a message there and back, of the size that this rank's stage sends."""
        ranks, position = self._mesh["pp"].ranks, self._mesh["pp"].rank
        slowest = 0.0
        for stage in range(len(ranks) - 1):
            here, there = ranks[stage], ranks[stage + 1]
            if position not in (stage, stage + 1):
                continue
            nbytes = self._memory.message_nbytes.get(stage, 0)
            ball = torch.zeros(nbytes, dtype=torch.uint8, device=self._mesh.device)
            times = [
                self._throw(channels[here, there], channels[there, here], ("HOP", stage, i), ball)
                for i in range(_NUM_HOPS)
            ]
            if position == stage:
                slowest = max(slowest, median(times[1:]) / 2)
        return slowest

    def _throw(self, out: comm.Channel, back: comm.Channel, tag: comm.Tag, ball: torch.Tensor) -> float:
        """Seconds from a message's start to its return, where it starts."""
        synchronize(ball.device)
        start = time.perf_counter()
        if out.axis.rank == 0:
            out.send(tag, b"", [ball], ahead=1)
            back.expect(tag, ahead=1).wait()
        else:
            payload = out.expect(tag, ahead=1).wait().payload
            back.send(tag, b"", [payload], ahead=1)
        synchronize(ball.device)
        seconds = time.perf_counter() - start
        for channel in (out, back):
            channel.flush()
        return seconds
