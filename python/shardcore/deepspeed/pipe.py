"""``deepspeed.pipe``: a model as a list of layers, in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardcore.errors import ConfigError
from shardcore.mesh import Mesh
from shardcore.pipeline import LayerSpec, Pipeline, Recompute, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(Pipeline):
    """A pipeline over ``num_stages`` ranks, by DeepSpeed's arguments. Collective over all ranks.

    Layers built from specs draw their first weights from ``base_seed`` and their place in the list, so these do not
    depend on the number of stages (DeepSpeed's ``seed_layers=True``; without it, ranks would start alike by accident).
    Shapes may always differ between micro-batches (``dynamic_shape``).

    Args:
        layers: LayerSpecs, modules and functions.
        num_stages: ranks of the pipeline; or give a ``topology`` with an axis "pipe".
        loss_fn: ``(output, labels) -> loss``.
        partition_method: "uniform", "parameters", "type:REGEX", or "profile", which needs an ``example``.
        activation_checkpoint_interval: layers that are recomputed together in backward; 0: none.
        checkpointable_layers: class names; only groups of these are recomputed.
        example: beyond DeepSpeed's arguments, the inputs of a micro-batch that layers are measured on.
        schedule: beyond DeepSpeed's arguments, any that :class:`shardcore.pipeline.Pipeline` takes, "auto" among them.

    Raises:
        ConfigError: neither stages nor topology, both and contradicting, or an argument that is not supported.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        schedule: Any = "1f1b",
        num_chunks: int | None = None,
        example: Any = None,
    ) -> None:
        if seed_fn is not None:
            raise ConfigError("PipelineModule(seed_fn=...) is not supported: base_seed and the layer's place seed it")
        super().__init__(
            list(layers),
            Mesh(pp=_num_stages(num_stages, topology)),
            schedule=schedule,
            num_chunks=num_chunks,
            loss_fn=loss_fn,
            partition=partition_method,
            recompute=Recompute(
                interval=activation_checkpoint_interval,
                function=activation_checkpoint_func,
                classes=checkpointable_layers,
            ),
            seed=base_seed,
            example=example,
        )


def _num_stages(num_stages: int | None, topology: Any) -> int:
    if topology is None:
        if num_stages is None:
            raise ConfigError("PipelineModule needs num_stages, or a topology with an axis 'pipe'")
        return num_stages
    found = int(topology.get_dim("pipe"))
    if num_stages not in (None, found):
        raise ConfigError(f"PipelineModule(num_stages={num_stages}): the topology has {found}; give one of them")
    if topology.get_dim("model") > 1:
        raise ConfigError("PipelineModule: a topology with model parallelism is not supported yet")
    return found
