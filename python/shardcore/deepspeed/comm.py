"""``deepspeed.comm``: torch.distributed's calls, which take DeepSpeed's keywords of its log (``prof``, ``log_name``,
``debug``) as well and pay them no heed; ``torch.profiler`` shows the time of each call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from shardcore.comm import torch_call, world_group

_OF_THE_LOG = ("prof", "log_name", "debug")


def _without_log(name: str) -> Callable[..., Any]:
    function = torch_call(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key not in _OF_THE_LOG})

    return call


ReduceOp = torch_call("ReduceOp")
all_gather = _without_log("all_gather")
all_gather_into_tensor = allgather_fn = _without_log("all_gather_into_tensor")
all_gather_object = _without_log("all_gather_object")
all_reduce = inference_all_reduce = _without_log("all_reduce")
all_to_all = _without_log("all_to_all")
all_to_all_single = _without_log("all_to_all_single")
barrier = _without_log("barrier")
broadcast = _without_log("broadcast")
broadcast_object_list = _without_log("broadcast_object_list")
gather = _without_log("gather")
irecv = _without_log("irecv")
isend = _without_log("isend")
monitored_barrier = _without_log("monitored_barrier")
recv = _without_log("recv")
reduce = _without_log("reduce")
reduce_scatter = _without_log("reduce_scatter")
reduce_scatter_tensor = reduce_scatter_fn = _without_log("reduce_scatter_tensor")
scatter = _without_log("scatter")
send = _without_log("send")

destroy_process_group = torch_call("destroy_process_group")
get_all_ranks_from_group = torch_call("get_process_group_ranks")
get_global_rank = torch_call("get_global_rank")
get_rank = torch_call("get_rank")
get_world_size = torch_call("get_world_size")
is_available = torch_call("is_available")
is_initialized = torch_call("is_initialized")
new_group = torch_call("new_group")
get_world_group = world_group


def get_local_rank() -> int:
    """This rank's number on its machine, as the launcher set it; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))
