"""Runs one rank's program: a loop over its actions, and a table of what each kind does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardcore import comm, plan
from shardcore.pipeline import values
from shardcore.pipeline.gradients import Gradients
from shardcore.pipeline.meter import Meter
from shardcore.pipeline.randomness import RandomKey
from shardcore.pipeline.split import WeightGradients
from shardcore.pipeline.trace import Span

Mail = tuple[bytes, list[torch.Tensor]]
_UNMEASURED = nullcontext()


@dataclass(kw_only=True, slots=True)
class Step:
    """One run of a program: what goes in, and what has come out."""

    inputs: Sequence[Any]
    """Per micro-batch, for first stages."""
    labels: Sequence[Any]
    """Per micro-batch, for last stages."""
    factors: Sequence[float]
    """By what each micro-batch's loss is multiplied before backward, the loss scale included."""
    keys: Sequence[RandomKey | None]
    """Per micro-batch, what random numbers its layers draw; None leaves torch's own."""
    trains: bool
    keeps_outputs: bool = False
    computes_loss: bool = True
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per micro-batch, where the last stage runs."""
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a micro-batch from its forward to its backward."""

    inputs: list[torch.Tensor]
    """Those that another stage waits for a gradient of."""
    outputs: list[GradientEdge] = field(default_factory=list)
    loss: torch.Tensor | None = None


class Chain(Protocol):
    """The stages of this rank, as the executor calls them."""

    def __call__(
        self, stage: int, value: Any, skips: dict[str, Any], key: RandomKey | None
    ) -> tuple[Any, dict[str, Any]]:
        """Forward of one stage."""

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """The mean loss of a micro-batch."""


class Executor:
    """One rank's part of a lowered schedule, to be run once per step."""

    def __init__(
        self,
        schedule: plan.PipelineSchedule,
        position: int,
        ranks: Sequence[int],
        *,
        chain: Chain,
        channels: dict[tuple[int, int], comm.Channel],
        weight_gradients: WeightGradients,
    ) -> None:
        self._chain = chain
        self._weight_gradients = weight_gradients
        self._per_chain = schedule.num_stages // schedule.num_chains
        self._rank = ranks[position]
        self._rank_of = [ranks[place] for place in schedule.placement]
        self._channels = channels
        self._incoming = [channel for (_, receiver), channel in channels.items() if receiver == self._rank]
        table: dict[str, Callable[[int, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "SEND_F": lambda stage, i: self._send("F", stage + 1, i),
            "SEND_B": lambda stage, i: self._send("B", stage - 1, i),
            "RECV_F": lambda stage, i: self._expect("F", stage, i, stage - 1),
            "RECV_B": lambda stage, i: self._expect("B", stage, i, stage + 1),
            "REDUCE": lambda stage, _: self._gradients.stage_done(stage),
            "TIED_REDUCE": self._tied,
        }
        actions = [action for action in schedule.program(position) if action.kind in table]
        self._ahead = _most_ahead(schedule)
        self._names = [str(action) for action in actions]
        self._num_tied = sum(action.kind == "TIED_REDUCE" for action in actions)
        self._program = [
            (table[action.kind], action.stage, action.microbatch if action.microbatch is not None else -1)
            for action in actions
        ]

    def run(
        self, step: Step, gradients: Gradients, spans: list[Span] | None = None, meter: Meter | None = None
    ) -> None:
        """Run the program, note in ``spans`` when, and let ``meter`` measure it. Every rank of the pipeline runs its
        own at the same time.
        """
        self._step = step
        self._meter = meter
        self._gradients = gradients
        self._held: dict[tuple[int, int], _Held] = {}
        self._mail: dict[tuple[str, int, int], Mail] = {}
        self._receipts: dict[tuple[str, int, int], comm.Receipt] = {}
        self._closures: dict[tuple[int, int], list[Any]] = {}
        self._ties_left = self._num_tied
        for (act, stage, microbatch), name in zip(self._program, self._names, strict=True):
            for channel in self._incoming:
                channel.progress()
            if spans is None:
                act(stage, microbatch)
                continue
            start = time.time_ns()
            act(stage, microbatch)
            spans.append((name, start, time.time_ns()))
        if step.trains:
            gradients.finish()
        for (sender, _), channel in self._channels.items():
            if sender == self._rank:
                channel.flush()

    def is_first(self, stage: int) -> bool:
        """Whether micro-batches enter there."""
        return stage % self._per_chain == 0

    def is_last(self, stage: int) -> bool:
        """Whether the loss is computed there."""
        return stage % self._per_chain == self._per_chain - 1

    def _measured(self, kind: str, stage: int) -> AbstractContextManager[None]:
        return _UNMEASURED if self._meter is None else self._meter.computation(kind, stage)

    def _forward(self, stage: int, i: int) -> None:
        mail = None if self.is_first(stage) else self._take("F", stage, i)
        with self._measured("F", stage):
            self._compute_forward(stage, i, mail)

    def _compute_forward(self, stage: int, i: int, received: Mail | None) -> None:
        step = self._step
        skips: dict[str, Any] = {}
        leaves: list[torch.Tensor] = []
        if received is None:
            value = step.inputs[i]
        else:
            inner, tensors = received
            value, skips = values.load(inner, tensors)
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
        with torch.set_grad_enabled(step.trains):
            value, skips = self._chain(stage, value, skips, step.keys[i])
        held = _Held(leaves)
        if self.is_last(stage):
            self._finish(value, i, held)
        else:
            mail = values.dump((value, skips), f"output of stage {stage}")
            self._mail["F", stage + 1, i] = mail
            held.outputs = [get_gradient_edge(tensor) for tensor in mail[1] if tensor.requires_grad]
            if self._meter is not None:
                self._meter.note_message(stage, mail[1])
        if step.trains:
            self._held[stage, i] = held

    def _finish(self, value: Any, i: int, held: _Held) -> None:
        step = self._step
        if step.keeps_outputs:
            step.outputs[i] = value
        if not step.computes_loss:
            return
        with torch.set_grad_enabled(step.trains):
            loss = self._chain.loss(value, step.labels[i])
            step.losses[i] = loss.detach()
            if step.trains:
                held.loss = (loss.float() if loss.dtype.itemsize < 4 else loss) * step.factors[i]

    def _backward(self, stage: int, i: int) -> None:
        self._input_gradient(stage, i)
        self._weight_gradient(stage, i)

    def _input_gradient(self, stage: int, i: int) -> None:
        held = self._held.pop((stage, i))
        mail = None if self.is_last(stage) else self._take("B", stage, i)
        with self._measured("I", stage), self._weight_gradients.collected() as closures:
            if held.loss is not None:
                torch.autograd.backward(held.loss)
            elif mail is not None:
                grads = values.load(*mail)
                pairs = [(o, g) for o, g in zip(held.outputs, grads, strict=True) if g is not None]
                if pairs:
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            if not self.is_first(stage):
                grads = [leaf.grad for leaf in held.inputs]
                self._mail["B", stage - 1, i] = values.dump(grads, f"gradients of stage {stage}")
        self._closures[stage, i] = closures
        if self._meter is not None:
            self._meter.note_stash(stage, closures)

    def _weight_gradient(self, stage: int, i: int) -> None:
        closures = self._closures.pop((stage, i))
        with self._measured("W", stage), torch.no_grad():
            if closures:
                self._gradients.accumulate(grad for closure in closures for grad in closure())

    def _tied(self, stage: int, i: int) -> None:
        self._ties_left -= 1
        if not self._ties_left:
            self._gradients.sum_ties()

    def _send(self, kind: str, stage: int, i: int) -> None:
        description, tensors = self._mail.pop((kind, stage, i))
        channel = self._channels[self._rank, self._rank_of[stage]]
        channel.send((kind, stage, i), description, [tensor.detach() for tensor in tensors], self._ahead)

    def _expect(self, kind: str, stage: int, i: int, sender: int) -> None:
        channel = self._channels[self._rank_of[sender], self._rank]
        self._receipts[kind, stage, i] = channel.expect((kind, stage, i), self._ahead)

    def _take(self, kind: str, stage: int, i: int) -> Mail:
        """What another stage has for this one: from the wire, or from a neighbour on this rank."""
        receipt = self._receipts.pop((kind, stage, i), None)
        if receipt is not None:
            return values.receive(receipt.wait())
        return values.hand_over(*self._mail.pop((kind, stage, i)))


def _most_ahead(schedule: plan.PipelineSchedule) -> int:
    """The most receives of one stage and direction that any rank has posted and not used."""
    most = 0
    for rank in range(schedule.num_ranks):
        posted: Counter[tuple[str, int]] = Counter()
        for action in schedule.program(rank):
            if action.kind in ("RECV_F", "RECV_B"):
                posted[action.kind[-1], action.stage] += 1
                most = max(most, posted[action.kind[-1], action.stage])
            elif action.kind in ("F", "B", "I"):
                posted["F" if action.kind == "F" else "B", action.stage] -= 1
    return most
