"""The gallery of pipeline schedules as a page: ``python -m shardcore.plan.gallery docs``."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from shardcore._core import PipelineSchedule, Simulation, evaluation_schedule, pipeline_schedule

NUM_RANKS, NUM_MICROBATCHES = 4, 8
"""Small enough for every cell of a picture to be read."""

PAGE = "pipeline-schedules.md"
FOLDER = "schedules"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exhibit:
    """One schedule of the gallery."""

    name: str
    """As ``pipeline_schedule`` takes it."""
    text: str
    """What it does, and when to choose it."""


EXHIBITS = (
    Exhibit(
        name="gpipe",
        text=(
            "All forwards, then all backwards. The simplest, and the most memory: every micro-batch is held at once."
        ),
    ),
    Exhibit(
        name="1f1b",
        text=(
            "After a warm-up each rank alternates one forward and one backward. The bubble of GPipe, but the "
            "first rank holds as many micro-batches as there are ranks, and no more. The default where nothing "
            "else is known."
        ),
    ),
    Exhibit(
        name="eager-1f1b",
        text=(
            "1F1B with twice the warm-up: a message has a whole step to arrive. Choose it where hops are slow and "
            "there is memory for twice the activations."
        ),
    ),
    Exhibit(
        name="interleaved",
        text=(
            "Each rank holds several stages, so the pipeline fills and drains in smaller steps: the bubble is "
            "divided by the number of chunks, at that many times the messages. That is where the micro-batches are a "
            "multiple of the ranks: one more takes most of the gain away."
        ),
    ),
    Exhibit(
        name="looped-bfs",
        text=(
            "Several stages a rank, all micro-batches through a stage before the next one: parameters are "
            "gathered once for each stage and step, which suits sharded parameters. The memory of GPipe."
        ),
    ),
    Exhibit(
        name="zb-h1",
        text=(
            "The backward is split: the input gradient, for which the rank before waits, comes first, and weight "
            "gradients fill what would be idle. About a third of the bubble of 1F1B in the same memory."
        ),
    ),
    Exhibit(
        name="zb-h2",
        text=(
            "Twice the warm-up, twice the memory: at equal costs no rank is idle between its first and last "
            "action. Only an optimizer that steps each stage by itself (post-validation) gains that; behind a "
            "barrier it is no better than ZB-H1, and worse where there are few micro-batches (at 4 ranks and 4 "
            "micro-batches 25% idle against 20%)."
        ),
    ),
    Exhibit(name="interleaved-zb", text="Interleaved, with a split backward: both ways to a smaller bubble in one."),
    Exhibit(
        name="zb-v",
        text=(
            "Each rank holds two stages on the two arms of a V, so that the last stage stands on the first rank. "
            "No idle time within a rank at equal costs, in the memory of 1F1B."
        ),
    ),
    Exhibit(
        name="v-half", text="The V with about half of the memory of 1F1B, for a bubble between those of 1F1B and ZB-V."
    ),
    Exhibit(name="v-min", text="The V with about a third of the memory of 1F1B, where memory decides."),
    Exhibit(
        name="dualpipe-v",
        text=(
            "A V whose forwards and backwards are overlapped in pairs, so that the communication of one hides "
            "behind the computation of the other: for mixtures of experts."
        ),
    ),
    Exhibit(
        name="dualpipe",
        text=("Two copies of the model, one from each end: overlapped pairs as in DualPipeV at twice the parameters."),
    ),
    Exhibit(
        name="seq-1f1b",
        text=(
            "1F1B over slices of the sequence: the bubble of a long sequence is divided by the number of slices, and "
            "its activations nearly so. For causal attention. It counts slices where others count micro-batches. A "
            "plan only: the pipeline engine does not run it yet."
        ),
    ),
)

_HEAD = """# Pipeline schedules

<!-- Written by `python -m shardcore.plan.gallery docs`. -->

A schedule says what each rank of a pipeline computes, sends and receives, and in which order. Schedules are plans:
made, checked, simulated and drawn without torch and without a GPU. What is wrong with one is a
`shardcore.errors.PlanError`, which is a `ValueError`.

```python
from shardcore import plan

schedule = plan.pipeline_schedule("zb-h1", num_ranks=4, num_microbatches=8)
schedule.check(comm="blocking", memory_cap=4)  # raises PlanError with the failing cell marked
run = schedule.simulate(forward=1, input_grad=1, weight_grad=1, hop=0.1)
print(run.makespan, run.bubble_makespan, run.peak)
print(run.to_ascii())  # or to_svg(), to_perfetto()
lowered = schedule.lower(zero_stage=2, optimizer="barrier")  # with its messages, reductions and optimizer steps
print([str(action) for action in lowered.program(0)][:4])
costs = {{"forward": 1.0, "input_grad": 1.0, "weight_grad": 0.8, "hop": 0.3}}  # measured ones order the messages best
assert schedule.lower(costs=costs).simulate(**costs).makespan == schedule.simulate(**costs).makespan
```

The table is for {num_ranks} ranks and {num_microbatches} micro-batches; a forward, an input gradient and a weight
gradient of a micro-batch on a rank take 1 each, and messages take no time. The bubble is the part of the ranks' time
that is idle: against the *makespan*, the time until the last rank is done, which is what a step costs where all ranks
wait for the global gradient norm; and against the *span*, the longest time from a rank's own first action to its own
last one, which is what the papers on zero-bubble schedules report. Memory is in activations of one micro-batch on one
rank. Numbers for your own costs come from `simulate`; `plan.synthesize` searches for the best schedule under a memory
cap.

| schedule | bubble (makespan) | bubble (span) | peak memory of the ranks |
|---|---|---|---|
"""

_TAIL = """## Evaluation

The same placements run forward only. Neighbouring stages on one rank, as at the turn of a V, exchange nothing.

```python
from shardcore import plan

evaluation = plan.evaluation_schedule([0, 1, 2, 3, 3, 2, 1, 0], 8)  # the rank of every stage; micro-batches
evaluation.check()
print(evaluation.simulate(1, 0, 0).to_ascii())
```

A program without any backward is an evaluation, and passes `check()` as one; a program with some backwards must have
all of them.

![evaluation on a V]({folder}/evaluation.svg)

## Programs with communication

`lower()` adds messages, and with its options gathers, reductions, sums over weights that stages share, and optimizer
steps. A program of your own may hold them as well. `check()` then holds it to what it was lowered for: no kind of
action that the options do not have; each reduction, sum and step once, behind the gradients that it needs; parameters
gathered where a stage computes, and no more stages at once than `max_unsharded`; no more receives posted ahead than
`receives_ahead`; and no ranks that wait for each other, in messages or in sums.

```python
from shardcore import plan

first = ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0TIED_REDUCE", "0REDUCE", "0OPTIM"]
last = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1TIED_REDUCE", "1REDUCE", "1OPTIM"]
options = {"zero_stage": 1, "optimizer": "barrier", "tied": [[0, 1]]}  # as keyword arguments of lower()
plan.PipelineSchedule([first, last], [0, 1], num_microbatches=1, lowering=options).check()
assert plan.PipelineSchedule([first, last], [0, 1], num_microbatches=1).lowering["tied"] == [[0, 1]]
```

Without `lowering`, as in a file of torch's, the options are those that the actions themselves suggest.

An action is written as its stage, its kind and its micro-batch: `2F0`, `3SEND_B1`, a receive with the stage that
receives. Its kind is `F`, `B` (a whole backward), `I` and `W` (its input and weight gradient), `SEND_F`, `RECV_F`,
`SEND_B` or `RECV_B`; and without a micro-batch `UNSHARD`, `RESHARD`, `REDUCE`, `TIED_REDUCE` or `OPTIM`. `@1` behind a
receive, and behind what reads it, is the slot that it fills, if not the first; `&` behind a computation joins it with
the next one (`["0F3&", "1B2"]`). `schedule.to_text()` writes a whole schedule like that, joined ones as `0F3&1B2`, and
`from_text` reads exactly what it wrote: one space between actions, a line feed behind every line, nothing else.

With slow hops the receives that `lower()` posts ahead (2 of a stage and direction, or as many as the programs need) may
be too few to cover them: simulate the lowered schedule as well, and raise `receives_ahead` where it takes longer.

`check(comm=...)` and `simulate` take links as they are. The ways to deliver messages, from the most forgiving: with
`"buffered"` a send never waits; with `"directed"`, `"pair-fifo"` and `"one-fifo"` messages queue for each direction of
two ranks, for both, or for all that a rank sends and receives; with `"blocking"` each waits for its partner; and
`capacity=n` lets a rank go on while at most `n` messages of a direction have not met their receive. In `simulate`,
`hop` is the latency of every message, `latency` that of single edges in its place; `message`, the size of a stage's
output, over `bandwidth` comes on top; `overlap=False` makes ranks wait for their messages, and `composite` scales what
joined computations take.

## A schedule for your own costs

`plan.synthesize` makes a schedule for times and sizes that you have measured or guessed: each a number for all ranks or
a list with one for each stage, with the latency of a hop and the most that a rank may hold. It tries every named
schedule of the placement, all forwards stage by stage with all backwards behind them (`breadth-first` in `found_by`:
good for slow hops), list scheduling and a local search, so it is never worse than a named schedule under the same cap;
says by how much no schedule can be better; and gives the same on every machine. Where latencies count or stages differ,
it gains a few per cent on ZB-H1 in the same memory. After a profile, call it again.

```python
from shardcore import plan

measured = {
    "forward": [1.0, 1.3, 1.1, 0.9],
    "input_grad": [1.1, 1.4, 1.2, 1.0],
    "weight_grad": [0.8, 1.0, 0.9, 0.7],
    "hop": 0.3,
}
made = plan.synthesize(4, 12, **measured, memory_cap=4)
print(made)  # what found it, its makespan, and the bound below which no schedule goes
made.schedule.check(comm="blocking", memory_cap=4)
named = plan.pipeline_schedule("zb-h1", 4, 12).simulate(**measured)
assert made.lower_bound <= made.value < named.makespan
```

`objective="span"` is for an optimizer that steps each rank by itself, `fused_backward` what a backward in one piece
costs (the result then has whole backwards where they pay), and `placement` the rank of every stage, for several a rank.

## Layers into stages

`plan.partition_layers(weights, num_parts)` makes the heaviest stage as light as it can be; no stage is ever empty,
and ties go to the cut that sends the fewest bytes, then to the most even weights; layers without weight count for
nothing. `partition_uniform`, `partition_by_class` (a regular expression on
class names) and `check_boundaries` (your own) give the same kind of boundaries.

```python
from shardcore import plan

assert plan.partition_layers([5, 1, 1, 1, 1, 1], num_parts=3) == [0, 1, 3, 6]
assert plan.partition_by_class(["Embedding", "Block", "Block", "Head"], "block", num_parts=2) == [0, 2, 4]
```

## Other people's formats

`schedule.to_torch_csv()` writes what `_load_csv` of torch's `torch.distributed.pipelining` reads (`waits=False` for
torch before 2.15), and `plan.PipelineSchedule.from_torch_csv(text)` reads what its `_dump_csv` writes, with or without
communication. Torch runs the parts of an overlapped pair one after the other, each when its own input is there; so
what was read has `gating` `"own"`, and may take less than a schedule of ours with the same programs, whose pairs wait
for both inputs.
`plan.from_megatron_layout("Et*3|(tt|)*29,m|L")` and `plan.to_megatron_layout(layers, boundaries)` speak the layout
string of Megatron's `--pipeline-model-parallel-layout`. Both name the place of every fault; nothing is skipped. Every
stage must have a layer: a string with an empty one, such as `E|(t|)*3,m|m||L`, is refused.

## Testing your own schedules

`shardcore.testing` has hypothesis strategies and assertions for programs of your own (it needs hypothesis: `pip
install 'shardcore-torch[testing]'`). `assert_schedule` holds a schedule to all that holds for every schedule and
shows the failing cell in its grid; `schedules` draws schedules to run your own engine or checker on,
`schedule_lowerings` what `lower` takes for one, `schedule_costs` costs with zeros and huge ratios, and
`schedule_mutants` schedules with one fault, which a checker must refuse.

```python
from hypothesis import given, strategies as st

from shardcore import plan, testing


def my_schedule(num_ranks: int, num_microbatches: int) -> plan.PipelineSchedule:
    \"\"\"All forwards, then all backwards from the last micro-batch to the first.\"\"\"
    programs = [
        [f"{rank}F{i}" for i in range(num_microbatches)] + [f"{rank}B{i}" for i in reversed(range(num_microbatches))]
        for rank in range(num_ranks)
    ]
    return plan.PipelineSchedule(programs, list(range(num_ranks)), num_microbatches, name="mine")


@given(shape=testing.pipeline_shapes(), data=st.data())
def test_my_schedule(shape, data):
    schedule = my_schedule(shape.num_ranks, shape.num_microbatches)
    testing.assert_schedule(schedule, memory_cap=shape.num_microbatches)
    costs = data.draw(testing.schedule_costs(schedule))
    assert schedule.simulate(**costs).makespan >= schedule.simulate(**costs | {"hop": 0}).makespan


@given(data=st.data())
def test_my_checker(data):
    schedule = data.draw(testing.schedules())
    lowered = schedule.lower(**data.draw(testing.schedule_lowerings(schedule)))
    lowered.check()
    mutant = data.draw(testing.schedule_mutants(lowered))
    try:
        mutant.check()  # put your own checker here
    except ValueError:
        return
    raise AssertionError(f"{mutant.kind} was not noticed")
```
"""


def schedule_of(exhibit: Exhibit) -> PipelineSchedule:
    """The schedule that the gallery shows under that name."""
    return pipeline_schedule(exhibit.name, NUM_RANKS, NUM_MICROBATCHES, costs=(1, 1, 1))


def gallery() -> dict[str, str]:
    """The page and its pictures: relative path -> content."""
    rows, sections, files = [], [], {}
    for exhibit in EXHIBITS:
        schedule = schedule_of(exhibit)
        run = schedule.simulate(1, 1, 1)
        rows.append(_row(exhibit, run))
        sections.append(
            f"## {exhibit.name}\n\n{textwrap.fill(exhibit.text, 120)}\n\n![{schedule!r}]({FOLDER}/{exhibit.name}.svg)\n"
        )
        files[f"{FOLDER}/{exhibit.name}.svg"] = run.to_svg()
    v_shape = [*range(NUM_RANKS), *reversed(range(NUM_RANKS))]
    evaluation = evaluation_schedule(v_shape, NUM_MICROBATCHES).simulate(1, 1, 1)
    files[f"{FOLDER}/evaluation.svg"] = evaluation.to_svg()
    head = _HEAD.format(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    tail = _TAIL.replace("{folder}", FOLDER)
    files[PAGE] = head + "\n".join(rows) + "\n\n" + "\n".join(sections) + "\n" + tail
    return files


def _row(exhibit: Exhibit, run: Simulation) -> str:
    low, high = min(run.peak), max(run.peak)
    peak = f"{high:g}" if low == high else f"{low:g} to {high:g}"
    name = f"[{exhibit.name}](#{exhibit.name})"
    return f"| {name} | {100 * run.bubble_makespan:.1f}% | {100 * run.bubble_span:.1f}% | {peak} |"


def main(arguments: list[str] | None = None) -> int:
    """Write the gallery into a folder; pictures that no schedule has any more are removed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(
            "usage: python -m shardcore.plan.gallery FOLDER\nexample: python -m shardcore.plan.gallery docs\n"
        )
        return 2
    folder = Path(arguments[0])
    files = gallery()
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for stale in (folder / FOLDER).glob("*.svg"):
        if f"{FOLDER}/{stale.name}" not in files:
            stale.unlink()
    for name, content in files.items():
        (folder / name).write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
