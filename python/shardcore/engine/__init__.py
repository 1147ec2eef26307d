"""DeepSpeed's loop as sugar over the composable functions: ``initialize`` and the ``Engine`` it returns."""

from shardcore.engine.build import ClientOptimizer, initialize
from shardcore.engine.engine import Engine

__all__ = ["ClientOptimizer", "Engine", "initialize"]
