"""From the configuration's keys to the grid of shards and copies, and to what travels over it."""

from __future__ import annotations

from shardcore import zero
from shardcore.config import Config
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh

_HPZ = "zero_optimization.zero_hpz_partition_size"


def tensor_mesh(config: Config, mesh: Mesh, failure: type[ConfigError], *, is_given: bool) -> Mesh:
    """The mesh with the tensor axis that the configuration asks for. Collective over all ranks.

    Args:
        mesh: over all ranks; it is replaced unless the caller has given it.

    Raises:
        ConfigError: a size that does not divide the ranks, or another one than the given mesh's.
    """
    num_ranks = config.tensor.num_ranks
    if num_ranks == 1:
        return mesh
    if is_given and mesh["tp"].size != num_ranks:
        raise failure(
            f"tensor_parallel.tp_size: {num_ranks}, but the mesh that was given has {mesh['tp'].size} tensor-parallel "
            f"ranks; make it by Mesh(tp={num_ranks}, ...), or take the key out"
        )
    if mesh.world % num_ranks:
        divisors = [n for n in range(1, mesh.world + 1) if mesh.world % n == 0]
        raise failure(
            f"tensor_parallel.tp_size: {num_ranks} does not divide the {mesh.world} ranks of the job; choose one of "
            f"{divisors}"
        )
    return mesh if is_given else Mesh(tp=num_ranks, device=mesh.device)


def data_world(config: Config, mesh: Mesh, *, is_given: bool) -> int | None:
    """The number of data-parallel ranks on the mesh that :func:`tensor_mesh` will make; None where it will refuse."""
    num_ranks = config.tensor.num_ranks
    if is_given:
        return mesh.data_world if num_ranks in (1, mesh["tp"].size) else None
    return None if mesh.world % num_ranks else mesh.data_world // num_ranks


def hybrid_mesh(config: Config, mesh: Mesh, failure: type[ConfigError], *, is_given: bool) -> Mesh:
    """The mesh with the shards and copies that the configuration asks for. Collective over all ranks.

    Args:
        mesh: over all ranks; it is replaced unless the caller has given it.

    Raises:
        ConfigError: sizes that do not divide the data-parallel ranks, or another grid than the given mesh's.
    """
    network, num_ranks = config.network, mesh["dp"].size
    by_shards = network.mics_shard_size > 0
    if not by_shards and network.replicate_size == 1:
        return mesh
    name = "mics_shard_size" if by_shards else "replicate_size"
    count = network.mics_shard_size if by_shards else network.replicate_size
    if num_ranks % count:
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise failure(
            f"zero_optimization.{name}: {count} does not divide the {num_ranks} data-parallel ranks; choose one of "
            f"{divisors}"
        )
    copies = num_ranks // count if by_shards else count
    if not is_given:
        return Mesh(replicate=copies, replicate_inside=network.replicate_inside, tp=mesh["tp"].size, device=mesh.device)
    if mesh["replicate"].size != copies:
        raise failure(
            f"zero_optimization.{name}: {count} makes {copies} copies of the model on {num_ranks} data-parallel ranks, "
            f"but the mesh that was given has {mesh['replicate'].size}; make it by Mesh(replicate={copies}, ...), or "
            "take the key out"
        )
    return mesh


def communication(config: Config, mesh: Mesh, failure: type[ConfigError]) -> zero.Communication:
    """What travels in fewer bits or over fewer links.

    Raises:
        ConfigError: second shards that do not divide the shard axis.
    """
    network, num_shards = config.network, mesh["shard"].size
    if num_shards % network.hpz_partition_size:
        divisors = [n for n in range(1, num_shards + 1) if num_shards % n == 0]
        raise failure(
            f"{_HPZ}: {network.hpz_partition_size} does not divide the {num_shards} ranks over which the model is "
            f"sharded; choose one of {divisors}, best the ranks of a node"
        )
    return zero.Communication(
        gather="int8" if network.quantized_weights else None,
        gather_frozen="int8" if network.quantized_frozen_weights else None,
        reduce="int4" if network.quantized_gradients else None,
        secondary=network.hpz_partition_size if network.hpz_partition_size > 1 else None,
        hierarchical=network.hierarchical,
    )
