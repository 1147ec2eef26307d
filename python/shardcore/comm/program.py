"""The order of collectives that the ranks are known to share, and the comparison before anything else is entered.

Where units are gathered on demand, a branch that depends on the rank lets ranks enter different collectives. On gloo
those of different sizes end the process without a Python error, and those of equal sizes mix up data; so a difference
must be found before. A rank compares notes through the job's store only where it leaves the order of the last step: if
ranks part, one of them does so. Then they go on by turns (:mod:`branches`).
"""

from __future__ import annotations

from itertools import takewhile

from shardcore.comm import branches, watch
from shardcore.comm.branches import Guest
from shardcore.mesh import Axis

STEP = "gradient flags"
"""What ranks agree on at the end of a step: no rank enters it while others have a backward more to reduce."""


class Program:
    """Collectives of one model since the last boundary, against those of the step before. A step begins with the
    agreement (:data:`STEP`) that ends the one before it.
    """

    def __init__(self) -> None:
        self._known: list[str] = []
        self._current: list[str] = []
        self._skipped = 0
        """Of the known order, what does not come in this part of a step."""
        self._departed = False
        self._num_partings = 0

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
        if self.takes_turns(axis) or self._is_known(label) or branches.all_enter(axis, label):
            return
        branches.part(axis, label)

    def end(self) -> None:
        """A boundary that all ranks pass: the order so far is known now."""
        if self._departed:
            self._known = self._current
        self._current, self._departed, self._skipped = [], False, 0

    def end_step(self) -> None:
        """A step is about to be agreed on. One that has ended early departs from the known order by that."""
        is_short = not self._departed and self._skipped + len(self._current) < len(self._known)
        self.end()
        self._departed = is_short

    def begin_forward(self) -> None:
        """A forward outside a step begins, as in an evaluation: it gathers in the order of a step's forward."""
        if not all(map(_is_step, self._current)):
            self.end()
            self._skipped = len(list(takewhile(_is_step, self._known)))

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


def _is_step(label: str) -> bool:
    return f" {STEP} " in label
