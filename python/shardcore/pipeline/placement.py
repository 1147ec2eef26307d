"""Which rank holds what: layers, and copies of shared parameters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from shardcore import comm, plan
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh
from shardcore.pipeline.gradients import SharedWeight
from shardcore.pipeline.layers import BuiltLayer, Layer, Tie


class Placement:
    """The layers of every stage of a schedule, and the stages of this rank."""

    def __init__(
        self,
        mesh: Mesh,
        schedule: plan.PipelineSchedule,
        layers: Sequence[Layer],
        boundaries: Sequence[int],
        ties: Sequence[Tie],
    ) -> None:
        self.mesh = mesh
        self.ranks = mesh["pp"].ranks
        self.position = mesh["pp"].rank
        self.schedule = schedule
        self.boundaries = list(boundaries)
        self.per_chain = schedule.num_stages // schedule.num_chains
        self.stages = list(schedule.stages(self.position))
        self.classes = sorted({layer.class_name for layer in layers})
        """Names of the classes of all layers, on every rank."""
        counts = Counter(layer.class_name for layer in layers)
        self.repeated_classes = sorted(name for name, count in counts.items() if count > 1)
        """Those of several layers."""
        self._labels = [f"{layer.name} {layer.class_name}" for layer in layers]
        self._ties = ties

    @property
    def runs_an_end(self) -> bool:
        """Whether this rank runs a first or a last stage, and so needs data."""
        ends = (0, self.per_chain - 1)
        return any(stage % self.per_chain in ends for stage in self.stages)

    @property
    def tied_stages(self) -> list[list[int]]:
        """Groups of stages that share parameters; the copies of a bidirectional pipeline not among them."""
        groups = [sorted({self.stages_of(layer)[0] for layer, _ in tie.members}) for tie in self._ties]
        return [list(group) for group in dict.fromkeys(map(tuple, groups)) if len(group) > 1]

    def layers_of(self, stage: int) -> range:
        """Indices of the layers of a stage."""
        part = stage % self.per_chain
        return range(self.boundaries[part], self.boundaries[part + 1])

    def stages_of(self, layer: int) -> list[int]:
        """The stages that run a layer: one for each chain."""
        part = next(i for i in range(self.per_chain) if layer < self.boundaries[i + 1])
        return list(range(part, self.schedule.num_stages, self.per_chain))

    def explain(self) -> str:
        """One line per stage: its rank and its layers."""
        lines = []
        for stage, place in enumerate(self.schedule.placement):
            names = [self._labels[i] for i in self.layers_of(stage)]
            lines.append(f"stage {stage} on rank {self.ranks[place]}: {len(names)} layers: {', '.join(names)}")
        return "\n".join(lines)

    def edges(self) -> list[tuple[int, int]]:
        """(sender, receiver) of all messages of a step, as positions along the pipeline's axis."""
        found = set()
        for stage in range(self.schedule.num_stages - 1):
            a, b = self.schedule.placement[stage], self.schedule.placement[stage + 1]
            if (stage + 1) % self.per_chain and a != b:
                found |= {(a, b), (b, a)}
        return sorted(found)

    def holders(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Positions of the ranks that run any of these layers, ascending."""
        return tuple(sorted({self.schedule.placement[stage] for layer in layers for stage in self.stages_of(layer)}))

    def shared_weights(self, built: dict[int, BuiltLayer]) -> list[SharedWeight]:
        """Parameters of this rank of which other ranks hold copies; copies become equal. Collective over all ranks."""
        groups = [tuple(layer for layer, _ in tie.members) for tie in self._ties]
        sets = {self.holders(group) for group in [*groups, *((i,) for i in range(len(self._labels)))]}
        axes = comm.axes_over(self.mesh, "pp", (each for each in sets if len(each) > 1))
        tie_of = {member: tie for tie in self._ties for member in tie.members}
        found: dict[str, SharedWeight] = {}
        for index, layer in sorted(built.items()):
            if not isinstance(layer.module, nn.Module):
                continue
            for path, param in layer.module.named_parameters():
                tie = tie_of.get((index, path), Tie(f"{layer.name}.{path}", ((index, path),)))
                holders = self.holders(member for member, _ in tie.members)
                if len(holders) > 1:
                    found[tie.name] = SharedWeight(tie.name, param, axes[holders])
        shared = [weight for _, weight in sorted(found.items())]
        for weight in shared:
            comm.broadcast(weight.param.data, weight.axis, 0, f"tied {weight.name}").wait()
        return shared

    def check_agreement(self) -> None:
        """Raise on every rank unless all have made the same plan. Collective over the mesh."""
        document = json.dumps(
            {
                "schedule": self.schedule.digest(),
                "layers": self._labels,
                "boundaries": self.boundaries,
                "ties": [tie.name for tie in self._ties],
            }
        )
        for name in ("pp", "dp"):
            comm.agree_on("the pipeline plan", document, document, self.mesh[name], plan.first_difference)

    def check_every_rank_trains(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise on every rank if one of them has no parameters. Collective over the pipeline axis."""
        counts = comm.exchange(sum(param.numel() for param in parameters), self.mesh["pp"], "parameters of stages")
        empty = [self.ranks[i] for i, count in enumerate(counts) if not count]
        if empty:
            raise ConfigError(
                f"Pipeline: ranks {empty} would run layers without parameters (boundaries {self.boundaries}, counts "
                f"{counts}); choose another partition, or fewer ranks"
            )
