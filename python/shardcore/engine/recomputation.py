"""Activation checkpointing as the configuration file asks for it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from shardcore import activation
from shardcore.config import Config
from shardcore.mesh import Mesh
from shardcore.pipeline import Pipeline

_log = logging.getLogger("shardcore")


def recompute(config: Config, model: nn.Module, mesh: Mesh) -> None:
    """Let the model's blocks, or a pipeline's layers, be computed again in backward; before the model is sharded.

    A model that does so already, by its own code or by ``activation.wrap``, is left as it is; the log says so.

    Raises:
        ConfigError: there are no such blocks.
    """
    asked = config.activation
    policy = asked.effective_policy
    options: dict[str, Any] = {
        "partition": mesh["tp"] if asked.partition else False,
        "offload": "cpu" if asked.cpu else None,
        "contiguous": asked.contiguous,
        "num_checkpoints": asked.num_checkpoints,
        "synchronize": asked.synchronize,
        "profile": asked.profile,
    }
    if isinstance(model, Pipeline):
        if policy != "none" or asked.interval:
            settings = activation.Settings(
                **{**options, "partition": options["partition"] or None},
                policy="full" if policy == "none" else policy,
            )
            function = partial(activation.checkpoint_with, settings)
            model.recompute_by(function, asked.interval or None, asked.units or None)
    elif policy != "none" and (activation.is_wrapped(model) or activation.recomputes_by_itself(model)):
        _log.info(
            "activation_checkpointing: the model recomputes blocks by itself (activation.wrap, or Hugging Face's own "
            "checkpointing), so the section changes nothing"
        )
    elif policy != "none":
        activation.wrap(model, units=list(asked.units) or "auto", policy=policy, **options)
