"""Collectives on flat buffers, and the watch that turns a hang into an error.

Everything that crosses ranks goes through this room: data by :mod:`collectives`, agreement on small values by
:mod:`agree`. Each collective is recorded in program order, so that ranks which part company are told where.
"""

from shardcore.comm.agree import agree_on, exchange, max_over_ranks, sum_over_ranks
from shardcore.comm.branches import name_of_next_model
from shardcore.comm.collectives import (
    Handle,
    all_reduce,
    broadcast,
    gather_shards,
    reduce_shards,
    reset_traffic,
    traffic,
)
from shardcore.comm.program import Program
from shardcore.comm.watch import (
    RankFailedError,
    check_level,
    clear_failure,
    program_digest,
    raise_on_program_mismatch,
    report_failure,
)

__all__ = [
    "Handle",
    "Program",
    "RankFailedError",
    "agree_on",
    "all_reduce",
    "broadcast",
    "check_level",
    "clear_failure",
    "exchange",
    "gather_shards",
    "max_over_ranks",
    "name_of_next_model",
    "program_digest",
    "raise_on_program_mismatch",
    "reduce_shards",
    "report_failure",
    "reset_traffic",
    "sum_over_ranks",
    "traffic",
]
