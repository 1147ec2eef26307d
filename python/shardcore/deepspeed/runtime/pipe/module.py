"""``deepspeed.runtime.pipe.module``: the classes of :mod:`shardcore.deepspeed.pipe`."""

from shardcore.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
