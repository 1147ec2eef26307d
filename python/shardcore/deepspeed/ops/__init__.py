"""``deepspeed.ops``: optimizers by DeepSpeed's names and arguments. Nothing is compiled when they are used."""

from shardcore.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
