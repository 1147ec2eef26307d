"""Collectives on flat buffers, and the watch that turns a hang into an error.

Everything that crosses ranks goes through this room: data by :mod:`collectives` and :mod:`p2p`, agreement on small
values by :mod:`agree`. Each collective is recorded in program order, so that ranks which part company are told where.
"""

from shardcore.comm.activations import Pending, equal_parts, gather_dim, pass_on, reduce_dim, sum_tensor, swap_rows
from shardcore.comm.agree import (
    agree_on,
    exchange,
    fingerprint,
    max_over_ranks,
    note_alike,
    note_choice,
    sum_over_ranks,
)
from shardcore.comm.branches import name_of_next_model, settle
from shardcore.comm.collectives import (
    Handle,
    all_reduce,
    broadcast,
    gather_shards,
    reduce_shards,
    reset_traffic,
    traffic,
    traffic_by_edge,
)
from shardcore.comm.files import write_dcp
from shardcore.comm.p2p import Channel, Message, Receipt, Tag, axes_over, channels, unpack
from shardcore.comm.program import STEP, Program
from shardcore.comm.quantized import packed_nbytes
from shardcore.comm.route import Coding, Route
from shardcore.comm.settings import agree_on_settings
from shardcore.comm.steps import After
from shardcore.comm.torch_calls import torch_call, world_group
from shardcore.comm.watch import (
    check_level,
    clear_failure,
    program_digest,
    raise_on_program_mismatch,
    report_failure,
    timeout_s,
)

__all__ = [
    "STEP",
    "After",
    "Channel",
    "Coding",
    "Handle",
    "Message",
    "Pending",
    "Program",
    "Receipt",
    "Route",
    "Tag",
    "agree_on",
    "agree_on_settings",
    "all_reduce",
    "axes_over",
    "broadcast",
    "channels",
    "check_level",
    "clear_failure",
    "equal_parts",
    "exchange",
    "fingerprint",
    "gather_dim",
    "gather_shards",
    "max_over_ranks",
    "name_of_next_model",
    "note_alike",
    "note_choice",
    "packed_nbytes",
    "pass_on",
    "program_digest",
    "raise_on_program_mismatch",
    "reduce_dim",
    "reduce_shards",
    "report_failure",
    "reset_traffic",
    "settle",
    "sum_over_ranks",
    "sum_tensor",
    "swap_rows",
    "timeout_s",
    "torch_call",
    "traffic",
    "traffic_by_edge",
    "unpack",
    "world_group",
    "write_dcp",
]
