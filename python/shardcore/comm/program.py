"""The order of collectives that the ranks are known to share, and the comparison before anything else is entered.

Where units are gathered on demand, a branch that depends on the rank lets ranks enter different collectives. On gloo
those of different sizes end the process without a Python error, and those of equal sizes mix up data; so a difference
must be found before. A rank compares notes through the job's store only where it leaves the order of the last step, or
the number of its forwards: if ranks part, one of them does so. Then they go on by turns (:mod:`branches`).
"""

from __future__ import annotations

from itertools import takewhile

from shardcore.comm import branches, watch
from shardcore.comm.branches import Guest
from shardcore.mesh import Axis

STEP = "gradient flags"
"""What ranks agree on at the end of a step: no rank enters it while others have a backward more to reduce."""


class _Forwards:
    """The forwards before the first backward of a step, with gradients or without, against those of the last step.

    A forward gathers in the same order each time, so that the order alone does not tell how many there are: after one
    of them, some ranks might run another (a longer text, one batch more to evaluate) while others go on to backward.
    """

    def __init__(self) -> None:
        self._known: list[bool] = []
        self._current: list[bool] = []

    def begin(self, *, with_gradients: bool) -> bool:
        """A forward begins; whether ranks might differ here. Of several in a row without gradients, which no backward
        follows, the first is enough: who leaves the row notices.
        """
        was_apart, last = self._are_apart(), self._current[-1:]
        self._current.append(with_gradients)
        goes_on = was_apart and last == [with_gradients] == [False]
        return self._are_apart() and not goes_on

    def end(self) -> bool:
        """The first backward begins; whether ranks might differ here. Where one forward with gradients comes after
        another they have compared notes, or will.
        """
        return self._current != self._known and not (self._are_apart() and self._current[-1])

    def end_step(self) -> None:
        """The next step is compared with this one."""
        self._known, self._current = self._current, []

    def forget(self) -> None:
        """The step is not finished."""
        self._current = []

    def _are_apart(self) -> bool:
        return self._current != self._known[: len(self._current)]


class Program:
    """Collectives of one model since the last boundary, against those of the step before. A step begins with the
    agreement (:data:`STEP`) that ends the one before it.
    """

    def __init__(self, *, gathers_in_forward: bool) -> None:
        self._known: list[str] = []
        self._current: list[str] = []
        self._skipped = 0
        """Of the known order, what does not come in this part of a step."""
        self._departed = False
        self._num_partings = 0
        self._forwards = _Forwards() if gathers_in_forward else None
        self._crossing = ""
        """At the next gather ranks might differ although the order is known: what this rank does there."""

    def invite_to_gather(self, axis: Axis, unit: str, numel: int, guest: Guest | str) -> None:
        """Let ranks that do not use ``unit`` join its gather of ``numel`` elements, or say what keeps them from it. In
        the same order on all ranks.
        """
        known = branches.branches_of(axis)
        if isinstance(guest, str):
            known.obstacle = guest
        else:
            known.invite(known.gathers, watch.label_of("gather", unit, numel), guest)

    def invite_to_reduce(self, axis: Axis, unit: str, numel: int, guest: Guest) -> None:
        """Let ranks without gradients of ``unit`` join the reduction of its ``numel`` elements. In the order of
        reductions.
        """
        known = branches.branches_of(axis)
        known.invite(known.reductions, watch.label_of("reduce", unit, numel), guest)

    def takes_turns(self, axis: Axis) -> bool:
        """Whether the ranks of the axis are on different branches, and agree on each collective."""
        return branches.branches_of(axis).are_apart

    def enter(self, axis: Axis, label: str) -> None:
        """This rank is about to run a collective; unless the last step ran the same here, all ranks confirm it first.
        Ranks on different branches have agreed to take turns, and need not.

        Raises:
            RankMismatchError: another rank is about to run another one that cannot be joined. None of them has been
                entered.
        """
        watch.refuse_fork(label)
        watch.start_unfinished()
        crossing, self._crossing = self._crossing if _is_gather(label) else "", ""
        is_known = self._is_known(label) and not crossing
        if self.takes_turns(axis) or is_known or branches.all_enter(axis, label + crossing):
            return
        branches.part(axis, label)

    def end(self) -> None:
        """A boundary that all ranks pass: the order so far is known now."""
        self._end_part()
        if self._forwards is not None:
            self._forwards.forget()

    def end_step(self) -> None:
        """A step is about to be agreed on. One that has ended early departs from the known order by that."""
        is_short = not self._departed and self._skipped + len(self._current) < len(self._known)
        self._end_part()
        self._departed = is_short
        if self._forwards is not None:
            self._forwards.end_step()

    def begin_forward(self, *, with_gradients: bool) -> None:
        """A forward before the first backward of a step begins, perhaps one of an evaluation: it gathers in the order
        of a step's forward. Not collective: at its next gather this rank may ask the others.
        """
        if not all(map(_is_step, self._current)):
            self._end_part()
            self._skipped = len(list(takewhile(_is_step, self._known)))
        self._crossing = ""
        if self._forwards is not None and self._forwards.begin(with_gradients=with_gradients):
            self._crossing = f" in a forward {'with' if with_gradients else 'without'} gradients"

    def begin_backward(self) -> None:
        """The first backward of a step begins. Not collective: at its next gather this rank may ask the others."""
        self._crossing = " in backward" if self._forwards is not None and self._forwards.end() else ""

    def _end_part(self) -> None:
        if self._departed:
            self._known = self._current
        self._current, self._departed, self._skipped = [], False, 0

    def _is_known(self, label: str) -> bool:
        if self._num_partings != watch.board().num_partings:  # since then ranks may know different orders
            self._num_partings = watch.board().num_partings
            self._known, self._current, self._skipped = [], [], 0
        if not self._current and _is_step(label) and not any(map(_is_step, self._known[:1])):
            self._known.insert(0, label)  # the first agreement of all: the next step begins with it
            self._current.append(label)
            return False
        position = self._skipped + len(self._current)
        self._current.append(label)
        known = position < len(self._known) and self._known[position] == label
        self._departed = self._departed or not known
        return not self._departed


def _is_gather(label: str) -> bool:
    return label.startswith("gather ")


def _is_step(label: str) -> bool:
    return f" {STEP} " in label
