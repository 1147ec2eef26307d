"""Rank processes that stay alive and are woken in turn; the others sleep in a blocking read meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

NUM_RANKS = 2
THREADS_PER_RANK = 1

Handler = Callable[[str, Any], Any]
"""(command, argument) -> answer; runs in the rank's process."""


class Arm:
    """The ranks of one arm, each a process of its own, with a process group between them."""

    def __init__(
        self, name: str, make: Callable[[str, Any], Handler], settings: Any, num_ranks: int = NUM_RANKS
    ) -> None:
        """Args:
        make: a function of module level; called in each rank as ``make(name, settings)``, it gives that rank's handler.
        """
        self.name = name
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, name, make, settings, rank, num_ranks, port), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._answers()  # each rank says that it is ready

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def ask(self, command: str, argument: Any = None) -> list[Any]:
        """Every rank's answer to the command; returns when all have answered and sleep again."""
        for connection in self._connections:
            connection.send((command, argument))
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                ok, answer = connection.recv()
            except EOFError:
                raise SystemExit(f"arm {self.name}: the process of rank {rank} ended") from None
            if not ok:
                raise SystemExit(f"arm {self.name}, rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers


def set_environment(rank: int, num_ranks: int, port: int) -> None:
    """What a launcher would set; must run before torch is imported, which reads the number of threads then."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=str(THREADS_PER_RANK),
        MKL_NUM_THREADS=str(THREADS_PER_RANK),
        CUDA_VISIBLE_DEVICES="",
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
    )


def _serve(
    connection: Connection,
    name: str,
    make: Callable[[str, Any], Handler],
    settings: Any,
    rank: int,
    num_ranks: int,
    port: int,
) -> None:
    set_environment(rank, num_ranks, port)
    try:
        handler = make(name, settings)
        connection.send((True, None))
        while (message := connection.recv()) is not None:
            connection.send((True, handler(*message)))
    except Exception:  # noqa: BLE001 - whatever it is, it is reported where the arm was asked
        connection.send((False, traceback.format_exc()))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
