"""The order of collectives that the ranks are known to share, and the comparison before anything else is entered.

Where units are gathered on demand, a branch that depends on the rank lets ranks enter different collectives. On gloo
those of different sizes end the process without a Python error, and those of equal sizes mix up data; so a difference
must be found before. A rank compares notes through the job's store only where it leaves the order of the last step: if
ranks part, one of them does so.
"""

from __future__ import annotations

from shardcore.comm import watch


class Program:
    """Collectives of one model since the last boundary, against those of the step before."""

    def __init__(self) -> None:
        self._known: list[str] = []
        self._current: list[str] = []
        self._departed = False

    def enter(self, entry: watch.Entry) -> None:
        """This rank is about to run a collective; unless the last step ran the same here, all ranks confirm it first.

        Raises:
            RankMismatchError: another rank is about to run another one. None of them has been entered.
        """
        position = len(self._current)
        self._current.append(entry.label)
        known = position < len(self._known) and self._known[position] == entry.label
        self._departed = self._departed or not known
        if self._departed:
            watch.confirm(entry)

    def end(self) -> None:
        """A boundary that all ranks pass: the order so far is known now."""
        if self._departed:
            self._known = self._current
        self._current, self._departed = [], False
