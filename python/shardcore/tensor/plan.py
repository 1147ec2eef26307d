"""What is to be done with each module of a model, decided before anything is changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

from torch import nn

from shardcore.errors import ConfigError
from shardcore.protocols import whole_shape
from shardcore.tensor.experts import find_experts_in, why_not_split, why_unknown
from shardcore.tensor.layers import cannot_split, is_transposed
from shardcore.tensor.pieces import even_ranges
from shardcore.tensor.regions import Region, find_regions, is_linear, num_inputs, num_outputs
from shardcore.tensor.separable import why_inseparable
from shardcore.tensor.transformers_model import (
    causal_loss_of,
    layer_pattern,
    own_plan,
    vocabulary_layers,
    why_not_vouched,
)

STYLES = ("colwise", "rowwise", "vocab", "experts", "sequence", "replicate")
_WHOLE_ENDS = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}


@dataclass(eq=False, slots=True)
class Layer:
    """A layer outside of a region that is split by itself."""

    name: str
    module: nn.Module
    style: str
    whole_end: bool = False
    """The activation beyond it is whole: outputs are gathered, or inputs are split."""


@dataclass(eq=False, slots=True)
class TensorPlan:
    """All decisions about one model."""

    model: nn.Module
    num_ranks: int
    num_expert_ranks: int = 1
    regions: list[Region] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    experts: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Modules of experts that are split over both axes."""
    loss_head: Layer | None = None
    """The output projection whose logits need not be gathered for the model's own loss."""
    sequence: list[tuple[str, nn.Module]] = field(default_factory=list)
    """The blocks between which activations are split along the sequence, in the order of their calls."""
    whole: list[tuple[str, str]] = field(default_factory=list)
    """(module, why it is left whole)."""

    def lines(self) -> list[tuple[str, str]]:
        """(module, what is done with it), in the order of decisions."""
        found = []
        for region in self.regions:
            for each in region.entering:
                shared = f", each part on {each.num_sharing} ranks" if each.num_sharing > 1 else ""
                found.append((each.name, f"colwise, {region.kind}: {_sizes(each.ranges)} outputs{shared}"))
            if region.leaving is not None:
                found.append((region.leaving.name, f"rowwise, {region.kind}: {_sizes(region.leaving.ranges)} inputs"))
            found.extend((name, "replicate, gradients summed over tp") for name, _ in region.inner)
        for layer in self.layers:
            end = ", whole outside" if layer.whole_end else ""
            loss = "; logits stay split in the training loss" if layer is self.loss_head else ""
            found.append((layer.name, layer.style + end + loss))
        for name, module in self.experts:
            found.append((name, f"experts: {self._size_of(module)}"))
        found.extend((name, "sequence: activations split between its blocks") for name, _ in self.sequence)
        return found + [(name, f"left whole: {why}") for name, why in self.whole]

    def _size_of(self, experts: Any) -> str:
        num_experts, _, hidden = whole_shape(experts.down_proj)
        sizes = _sizes([[part] for part in even_ranges(hidden, self.num_ranks)])
        return f"{num_experts // self.num_expert_ranks} on each rank, {sizes} hidden features of each"

    def report(self) -> str:
        """One line for each kind of module."""
        kinds: dict[tuple[str, str], int] = {}
        for name, text in self.lines():
            key = (layer_pattern(name), text)
            kinds[key] = kinds.get(key, 0) + 1
        width = max((len(name) for name, _ in kinds), default=0)
        rows = [f"  {name:<{width}}  {text}" + (f"  x{n}" if n > 1 else "") for (name, text), n in kinds.items()]
        also = f" and {self.num_expert_ranks} expert-parallel ranks" if self.num_expert_ranks > 1 else ""
        return "\n".join([f"{type(self.model).__name__} over {self.num_ranks} tensor-parallel ranks{also}:", *rows])

    def digest(self) -> str:
        """Alike on ranks that would do the same."""
        names = [(name, tuple(param.shape)) for name, param in self.model.named_parameters()]
        return blake2b(f"{self.lines()}{names}".encode(), digest_size=8).hexdigest()


def _sizes(ranges: list[list[tuple[int, int]]]) -> str:
    sizes = [sum(stop - start for start, stop in each) for each in ranges]
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))


def make_plan(
    model: nn.Module, num_ranks: int, plan: str | Mapping[str, str], *, sequence: bool, num_expert_ranks: int = 1
) -> TensorPlan:
    """Decide. Not collective.

    Raises:
        ConfigError: what was asked for cannot be done, or nothing can be split.
    """
    if isinstance(plan, str):
        if plan != "auto":
            raise ConfigError(f"parallelize(plan={plan!r}): expected 'auto', or a dict of module patterns to styles")
        made = _automatic(model, num_ranks, num_expert_ranks)
    else:
        made = _by_patterns(model, num_ranks, num_expert_ranks, plan)
    _keep_ties(made, explicit=not isinstance(plan, str))
    if sequence:
        made.sequence = _stack(made)
    if made.sequence:
        _check_sequence(made)
    if num_expert_ranks > 1 and not made.experts:
        why = "; ".join(f"{name}: {why}" for name, why in made.whole if "experts:" in why) or "none has been found"
        raise ConfigError(
            f"the mesh has ep={num_expert_ranks}, but {type(model).__name__} has no experts that can be split ({why}): "
            "make the mesh without ep, or build the model of shardcore.tensor.MixtureOfExperts"
        )
    if num_ranks > 1 and not (made.regions or made.layers or made.experts):
        why = "; ".join(f"{name}: {why}" for name, why in made.whole[:5]) or "no block of a known form"
        raise ConfigError(
            f"{type(model).__name__} has nothing that can be split over {num_ranks} tensor-parallel ranks ({why}). "
            "Give patterns, such as plan={'*.up': 'colwise', '*.down': 'rowwise'}"
        )
    return made


def _automatic(model: nn.Module, num_ranks: int, num_expert_ranks: int) -> TensorPlan:
    made = TensorPlan(model, num_ranks, num_expert_ranks)
    own = own_plan(model)
    tried: dict[object, str] = {}
    for region in find_regions(model, num_ranks):
        problem = region.problem or why_not_vouched(region, own)
        if problem and not region.problem and not region.inner:
            kind = (type(region.module), *(num_outputs(each.module) for each in region.projections))
            if kind not in tried:
                tried[kind] = why_inseparable(region)
            problem = tried[kind]
        if problem:
            made.whole.append((region.name or "model", f"{region.kind}: {problem}"))
        else:
            made.regions.append(region)
    for name, module in find_experts_in(model):
        _add_experts(made, name, module)
    _add_vocabulary(made)
    _add_unknown(made, own)
    return made


def _add_experts(made: TensorPlan, name: str, module: nn.Module, *, explicit: bool = False) -> None:
    """Split experts over the axes. What the mesh asks for in vain is refused: nothing else uses its ``ep``."""
    owner: Any = module
    problem = why_unknown(module)
    if not problem:
        num_experts, _, hidden = owner.down_proj.shape
        problem = why_not_split(num_experts, hidden, made.num_expert_ranks, made.num_ranks)
        explicit = explicit or made.num_expert_ranks > 1
    if not problem:
        made.experts.append((name, module))
    elif explicit:
        raise ConfigError(f"experts {name!r} cannot be split: {problem}")
    else:
        made.whole.append((name, f"experts: {problem}"))


def _add_vocabulary(made: TensorPlan) -> None:
    """Split the token embedding and the output projection by the vocabulary."""
    embedding, head = vocabulary_layers(made.model)
    names = {module: name for name, module in made.model.named_modules()}
    if embedding is None and head is None:
        embedding, head = _tied_pair(made.model)
    if embedding is not None and embedding in names:
        problem = _embedding_problem(embedding, made.num_ranks)
        if problem:
            made.whole.append((names[embedding], f"vocabulary: {problem}"))
        else:
            made.layers.append(Layer(names[embedding], embedding, "vocab"))
    if head is not None and head in names:
        if not is_linear(head) or num_outputs(head) < made.num_ranks:
            made.whole.append((names[head], f"vocabulary: {type(head).__name__} is no linear layer that can be split"))
            return
        layer = Layer(names[head], head, "vocab", whole_end=True)
        made.layers.append(layer)
        if causal_loss_of(made.model) is not None:
            made.loss_head = layer


def _embedding_problem(embedding: nn.Module, num_ranks: int) -> str:
    if type(embedding) is not nn.Embedding:
        return f"{type(embedding).__name__} is no plain nn.Embedding"
    if embedding.num_embeddings < num_ranks:
        return f"{embedding.num_embeddings} rows < {num_ranks} ranks"
    return cannot_split(embedding)


def _tied_pair(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """An embedding and an output projection that share their weight."""
    heads = {id(m.weight): m for m in model.modules() if type(m) is nn.Linear}
    for module in model.modules():
        if type(module) is nn.Embedding and id(module.weight) in heads:
            return module, heads[id(module.weight)]
    return None, None


def _add_unknown(made: TensorPlan, own: dict[str, str]) -> None:
    """Name what the model's own plan would split, and this one does not."""
    done = {each.name for region in made.regions for each in (*region.projections,)}
    done |= {name for region in made.regions for name, _ in region.inner}
    done |= {layer.name for layer in made.layers} | {name for name, _ in (*made.whole, *made.experts)}
    parents = tuple(f"{name}." for name, _ in made.whole)
    for name, module in made.model.named_modules():
        style = next((style for pattern, style in own.items() if fnmatchcase(name, pattern)), None)
        if style is not None and name not in done and not name.startswith(parents):
            made.whole.append((name, f"{type(module).__name__}: a block of unknown form (its own plan: {style!r})"))


def _by_patterns(model: nn.Module, num_ranks: int, num_expert_ranks: int, plan: Mapping[str, str]) -> TensorPlan:
    made = TensorPlan(model, num_ranks, num_expert_ranks)
    styles = _matched(model, plan)
    regions = list(find_regions(model, num_ranks))
    taken: set[str] = set()
    for region in regions:
        asked = [styles.get(each.name) for each in region.projections]
        expected = ["colwise"] * len(region.entering) + ["rowwise"]
        if asked != expected:
            if region.kind == "attention" and any(style in ("colwise", "rowwise") for style in asked):
                names = ", ".join(
                    f"{p.name}: {s or 'replicate'}" for p, s in zip(region.projections, asked, strict=True)
                )
                raise ConfigError(
                    f"attention {region.name!r} must be split as a whole, with heads: colwise for what enters and "
                    f"rowwise for what leaves it; the plan says {names}"
                )
            continue
        if region.problem:
            where = f"{region.kind} {region.name or type(region.module).__name__}"
            raise ConfigError(f"{where} cannot be split over {num_ranks} ranks: {region.problem}")
        region.inner = _inside_heads(region)
        made.regions.append(region)
        taken.update(each.name for each in region.projections)
    modules = dict(model.named_modules())
    experts = dict(find_experts_in(model))
    for name, style in styles.items():
        if name in taken or style == "replicate":
            continue
        if style == "experts" and name in experts:
            _add_experts(made, name, modules[name], explicit=True)
        elif style == "sequence":
            made.sequence.append((name, modules[name]))
        else:
            made.layers.append(_single(name, modules[name], style, num_ranks))
    made.sequence = _blocks_around(made)
    return made


def _inside_heads(region: Region) -> list[tuple[str, nn.Module]]:
    """Modules that work on each head by itself, with parameters that all heads share."""
    if region.kind != "attention":
        return []
    head_dim = num_inputs(region.leaving.module) // region.num_heads if region.leaving is not None else 0
    for name, module in region.inner:
        for own, param in module.named_parameters(recurse=False):
            if param.numel() not in (1, head_dim):
                raise ConfigError(
                    f"attention {region.name!r} cannot be split by heads: {name}.{own} of shape {tuple(param.shape)} "
                    f"inside of it is not one for each of {head_dim} features of a head"
                )
    return region.inner


def _matched(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that a pattern names; the last pattern wins."""
    styles: dict[str, str] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if style not in STYLES and style not in _WHOLE_ENDS:
            near = difflib.get_close_matches(str(style), STYLES, 1)
            raise ConfigError(
                f"parallelize(plan={{{pattern!r}: {style!r}}}): expected one of {', '.join(STYLES)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not matched:
            known = {layer_pattern(name) for name in names} | {name.rpartition(".")[2] for name in names}
            near = difflib.get_close_matches(pattern, sorted(known), 1)
            raise ConfigError(
                f"parallelize(plan=...): no module of {type(model).__name__} matches {pattern!r}"
                + (f"; did you mean {near[0]!r}?" if near else "; patterns are those of model.named_modules()")
            )
        styles.update(dict.fromkeys(matched, style))
    return styles


def _single(name: str, module: nn.Module, style: str, num_ranks: int) -> Layer:
    """A layer that was named by itself, if it can be split so."""
    where = f"parallelize(plan=...): {name!r} ({type(module).__name__})"
    plain = _WHOLE_ENDS.get(style, style)
    if style == "vocab" and isinstance(module, nn.Embedding):
        problem = _embedding_problem(module, num_ranks)
        if problem:
            raise ConfigError(f"{where} cannot be split by its vocabulary: {problem}")
        return Layer(name, module, style)
    if style == "experts":
        raise ConfigError(f"{where} cannot be {style!r}: it has no 3-D weights gate_up_proj and down_proj")
    if not is_linear(module):
        raise ConfigError(f"{where} cannot be {style!r}: it is no plain linear layer or embedding")
    length = num_inputs(module) if plain == "rowwise" else num_outputs(module)
    if length < num_ranks:
        raise ConfigError(f"{where} cannot be {style!r}: {length} < {num_ranks} ranks")
    return Layer(name, module, plain, whole_end=style in _WHOLE_ENDS or style == "vocab")


def _keep_ties(made: TensorPlan, *, explicit: bool) -> None:
    """A weight that several modules share is cut once, so all of them must mean the same part of it."""
    users: dict[int, list[tuple[str, str]]] = {}
    owners = {
        id(each.module): _part_text(each.ranges, "rowwise" if each is r.leaving else "colwise", each.module)
        for r in made.regions
        for each in r.projections
    }
    owners |= {id(layer.module): _style_text(layer) for layer in made.layers}
    for name, module in made.model.named_modules(remove_duplicate=False):
        for _, param in module.named_parameters(recurse=False):
            if param.dim() > 1:
                users.setdefault(id(param), []).append((name, owners.get(id(module), "whole")))
    for shared in users.values():
        if len({text for _, text in shared}) > 1:
            if explicit:
                told = "; ".join(f"{name}: {text}" for name, text in shared)
                raise ConfigError(f"modules that share one weight would hold different parts of it: {told}")
            _leave_whole(made, {name for name, _ in shared})


def _part_text(ranges: object, style: str, module: nn.Module) -> str:
    outputs_first = (style == "colwise") != is_transposed(module)
    return f"dim {0 if outputs_first else 1} in parts {ranges}"


def _style_text(layer: Layer) -> str:
    if isinstance(layer.module, nn.Embedding):
        return "dim 0, even"
    outputs_first = (layer.style != "rowwise") != is_transposed(layer.module)
    return f"dim {0 if outputs_first else 1}, even"


def _leave_whole(made: TensorPlan, names: set[str]) -> None:
    made.regions = [r for r in made.regions if not names & {each.name for each in r.projections}]
    made.layers = [layer for layer in made.layers if layer.name not in names]
    if made.loss_head is not None and made.loss_head.name in names:
        made.loss_head = None
    known = {name for name, _ in made.whole}
    made.whole += [(n, "shares its weight with a module that cannot be split so") for n in sorted(names - known)]


def _stack(made: TensorPlan) -> list[tuple[str, nn.Module]]:
    """The model's one list of blocks that hold regions."""
    names = [region.name for region in made.regions]
    lists = [
        [(f"{name}.{i}", block) for i, block in enumerate(module)]
        for name, module in made.model.named_modules()
        if isinstance(module, nn.ModuleList) and any(region.startswith(f"{name}.") for region in names)
    ]
    if len(lists) != 1:
        raise ConfigError(
            "sequence parallelism needs one list of blocks that are split; "
            f"{type(made.model).__name__} has {len(lists)}"
        )
    return lists[0]


def _blocks_around(made: TensorPlan) -> list[tuple[str, nn.Module]]:
    """The whole list of blocks in which modules were named for sequence parallelism."""
    if not made.sequence:
        return []
    stack = _stack(made)
    named = [name for name, _ in made.sequence]
    for name, _ in stack:
        if not any(each == name or each.startswith(f"{name}.") for each in named):
            raise ConfigError(
                f"parallelize(plan=...): block {name!r} has no module that is 'sequence', but its neighbours have; all "
                "blocks of a list work on the same activations"
            )
    return stack


def _check_sequence(made: TensorPlan) -> None:
    """Blocks must consist of regions and of modules that work on each position by itself."""
    for name, block in made.sequence:
        inside = [region for region in made.regions if f"{region.name}.".startswith(f"{name}.")]
        known = {id(each.module) for region in inside for each in region.projections}
        known |= {id(module) for region in inside for _, module in region.inner}
        known |= {id(module) for _, module in (*made.experts, *_routers(made))}
        if not inside or any(region.module is block for region in inside):
            raise ConfigError(
                f"sequence parallelism: block {name!r} has no attention or perceptron module that is split"
            )
        for path, module in block.named_modules():
            has_own = next(module.parameters(recurse=False), None) is not None
            if has_own and id(module) not in known and "norm" not in type(module).__name__.lower():
                raise ConfigError(
                    f"sequence parallelism: {name}.{path} ({type(module).__name__}) is neither split nor a norm, and "
                    "may need the whole sequence"
                )


def _routers(made: TensorPlan) -> list[tuple[str, nn.Module]]:
    """What chooses the experts of each token, beside them; it works on each position by itself."""
    modules = dict(made.model.named_modules())
    names = [f"{name.rpartition('.')[0]}.{each}" for name, _ in made.experts for each in ("gate", "router")]
    return [(name, modules[name]) for name in names if name in modules]


def replicated_in_sequence(made: TensorPlan) -> Iterator[tuple[str, nn.Module]]:
    """Modules of sequence-parallel blocks whose parameters every rank holds, but the insides of regions."""
    inner = {id(module) for region in made.regions for _, module in region.inner}
    inner |= {id(each.module) for region in made.regions for each in region.entering}
    inner |= {id(module) for _, module in made.experts}
    for name, block in made.sequence:
        for path, module in block.named_modules():
            if id(module) not in inner and next(module.parameters(recurse=False), None) is not None:
                yield f"{name}.{path}", module
