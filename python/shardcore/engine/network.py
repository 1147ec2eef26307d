"""From the configuration's keys to the grid of ranks, and to what travels over it."""

from __future__ import annotations

from math import prod

from shardcore import zero
from shardcore.config import Config
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh

_HPZ = "zero_optimization.zero_hpz_partition_size"
_KINDS = {
    "pp": ("pipeline.stages", "pipeline"),
    "tp": ("tensor_parallel.tp_size", "tensor-parallel"),
    "cp": ("sequence_parallel_size", "sequence-parallel"),
    "ep": ("expert_parallel.autoep_size", "expert-parallel"),
}
"""The key that gives the size of each axis, and what its ranks are called."""

_SHARE_A_BATCH = ("pp", "tp", "cp")


def make_mesh(config: Config, mesh: Mesh, failure: type[ConfigError], *, is_given: bool) -> Mesh:
    """The grid of stages, tensor-parallel ranks, ranks of a sequence or with other experts, copies and shards that the
    configuration asks for. Collective over all ranks.

    Args:
        mesh: over all ranks; it is replaced unless the caller has given it.

    Raises:
        ConfigError: sizes that do not divide the ranks, or others than the given mesh's.
    """
    sizes = _sizes(config)
    for name, num_ranks in sizes.items():
        key, kind = _KINDS[name]
        if is_given and num_ranks > 1 and mesh[name].size != num_ranks:
            raise failure(
                f"{key}: {num_ranks}, but the mesh that was given has {mesh[name].size} {kind} ranks; make it by "
                f"Mesh({name}={num_ranks}, ...), or take the key out"
            )
        if not is_given and mesh.world % num_ranks:
            raise failure(
                f"{key}: {num_ranks} does not divide the {mesh.world} ranks of the job; choose one of "
                f"{_divisors(mesh.world)}"
            )
    product = _ranks_per_batch(sizes)
    if not is_given and mesh.world % product:
        cut = {_KINDS[name][0]: sizes[name] for name in _SHARE_A_BATCH if sizes[name] > 1}
        raise failure(
            f"{' x '.join(cut)} = {' x '.join(map(str, cut.values()))} = {product} does not divide the {mesh.world} "
            f"ranks of the job; start a multiple of {product} ranks, or lower one of them"
        )
    data_ranks = mesh["dp"].size if is_given else mesh.world // product
    copies = _num_copies(config, data_ranks, failure)
    if not is_given and data_ranks // copies % sizes["ep"]:
        raise failure(
            f"{_KINDS['ep'][0]}: {sizes['ep']} does not divide the {data_ranks // copies} ranks over which each copy "
            f"of the model is sharded; choose one of {_divisors(data_ranks // copies)}"
        )
    asks_for_copies = config.network.mics_shard_size > 0 or copies > 1
    if not asks_for_copies and (is_given or product * sizes["ep"] == 1):
        return mesh
    if not is_given:
        inside = config.network.replicate_inside
        return Mesh(**sizes, replicate=copies, replicate_inside=inside, device=mesh.device)
    if mesh["replicate"].size != copies:
        name, count = _copies_key(config)
        raise failure(
            f"zero_optimization.{name}: {count} makes {copies} copies of the model on {mesh['dp'].size} data-parallel "
            f"ranks, but the mesh that was given has {mesh['replicate'].size}; make it by Mesh(replicate={copies}, "
            "...), or take the key out"
        )
    return mesh


def data_world(config: Config, mesh: Mesh, *, is_given: bool) -> int | None:
    """The number of data-parallel ranks on the mesh that :func:`make_mesh` will make; None where it will refuse."""
    sizes = _sizes(config)
    if is_given:
        fits = all(num_ranks in (1, mesh[name].size) for name, num_ranks in sizes.items())
        return mesh.data_world if fits else None
    product = _ranks_per_batch(sizes)
    return None if mesh.world % product else mesh.world // product


def _sizes(config: Config) -> dict[str, int]:
    return {
        "pp": config.pipeline.num_stages,
        "tp": config.tensor.num_ranks,
        "cp": config.sequence.num_ranks,
        "ep": config.experts.num_ranks,
    }


def _ranks_per_batch(sizes: dict[str, int]) -> int:
    """Ranks that read the same samples; those with other experts read their own."""
    return prod(sizes[name] for name in _SHARE_A_BATCH)


def _copies_key(config: Config) -> tuple[str, int]:
    """The key that says how many copies there are, and its number."""
    network = config.network
    if network.mics_shard_size > 0:
        return "mics_shard_size", network.mics_shard_size
    return "replicate_size", network.replicate_size


def _num_copies(config: Config, num_ranks: int, failure: type[ConfigError]) -> int:
    """Copies of the sharded model on so many data-parallel ranks."""
    name, count = _copies_key(config)
    if num_ranks % count:
        raise failure(
            f"zero_optimization.{name}: {count} does not divide the {num_ranks} data-parallel ranks; choose one of "
            f"{_divisors(num_ranks)}"
        )
    return num_ranks // count if name == "mics_shard_size" else count


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def communication(config: Config, mesh: Mesh, failure: type[ConfigError]) -> zero.Communication:
    """What travels in fewer bits or over fewer links.

    Raises:
        ConfigError: second shards that do not divide the shard axis.
    """
    network, num_shards = config.network, mesh["shard"].size
    if num_shards % network.hpz_partition_size:
        raise failure(
            f"{_HPZ}: {network.hpz_partition_size} does not divide the {num_shards} ranks over which the model is "
            f"sharded; choose one of {_divisors(num_shards)}, best the ranks of a node"
        )
    return zero.Communication(
        gather="int8" if network.quantized_weights else None,
        gather_frozen="int8" if network.quantized_frozen_weights else None,
        reduce="int4" if network.quantized_gradients else None,
        secondary=network.hpz_partition_size if network.hpz_partition_size > 1 else None,
        hierarchical=network.hierarchical,
    )
