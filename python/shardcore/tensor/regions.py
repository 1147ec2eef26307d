"""Attention and perceptron blocks: a part of a model whose inside can be split over ranks.

A block is known by the names of its projections. Those that enter it are split by outputs, the one that leaves it by
inputs; between them each rank works on its heads, or its hidden features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.tensor.heads import Heads, rows_of, split_heads
from shardcore.tensor.layers import is_transposed
from shardcore.tensor.pieces import Range, even_ranges

_QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)
_FUSED_QUERY_KEY_VALUE = ("c_attn", "qkv_proj", "qkv", "Wqkv", "query_key_value")
_ATTENTION_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "out_lin", "wo", "o", "proj")
_PERCEPTRONS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc_in",), "fc_out"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("up",), "down"),
    (("intermediate.dense",), "output.dense"),
)
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_NUM_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("split_size", "all_head_size", "inner_dim")

_PER_HEAD = ("GPTNeoX",)
"""Classes whose fused weight has query, key and value of each head side by side, by the start of their names."""


@dataclass(eq=False, slots=True)
class Projection:
    """One linear layer at the edge of a region."""

    name: str
    module: nn.Module
    ranges: list[list[Range]]
    """For each rank, the outputs (or, for a leaving one, the inputs) that it takes."""
    num_sharing: int = 1
    """How many neighbouring ranks hold the same ranges, at least some of them."""


@dataclass(eq=False, slots=True)
class Region:
    """A block between projections that enter it and the one that leaves it."""

    name: str
    kind: str
    """``attention`` or ``perceptron``."""
    module: nn.Module
    """Its call contains the calls of the entering projections, and nothing that is not split before them."""
    entering: list[Projection] = field(default_factory=list)
    leaving: Projection | None = None
    attributes: list[dict[str, Any]] = field(default_factory=list)
    """For each rank, what attributes of ``module`` are to count its heads only."""
    num_heads: int = 1
    """Query heads of all ranks; 1 in a perceptron."""
    problem: str = ""
    """Why it cannot be split; empty where it can."""
    inner: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Modules inside with parameters of their own, which every rank holds."""

    @property
    def projections(self) -> list[Projection]:
        """All of them."""
        return [*self.entering, *([] if self.leaving is None else [self.leaving])]


def is_linear(module: nn.Module | None) -> bool:
    """Whether the module is exactly a linear layer, whose forward is known: torch's, or transformers' Conv1D."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."))


def num_outputs(linear: Any) -> int:
    """Of a whole linear layer."""
    return int(linear.weight.shape[1 if is_transposed(linear) else 0])


def num_inputs(linear: Any) -> int:
    """Of a whole linear layer."""
    return int(linear.weight.shape[0 if is_transposed(linear) else 1])


def find_regions(model: nn.Module, num_ranks: int) -> Iterator[Region]:
    """Every block of the model that looks like attention or a perceptron, with how it would be split."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module).__module__.startswith("torch.nn."):
            continue  # these use the weights of their parts without calling them
        for region in (_find_attention(name, module, modules, num_ranks), _find_perceptron(name, module, num_ranks)):
            if region is not None:
                known = {id(each.module) for each in region.projections}
                region.inner = [
                    (_join(name, path), child)
                    for path, child in region.module.named_modules()
                    if path and id(child) not in known and next(child.parameters(recurse=False), None) is not None
                ]
                own = next(iter(dict(region.module.named_parameters(recurse=False))), None)
                if own is not None and not known & {id(region.module)}:
                    region.problem = region.problem or f"its own parameter {own!r} may be for all of its inside"
                yield region


def _find_attention(name: str, module: nn.Module, modules: Mapping[str, nn.Module], num_ranks: int) -> Region | None:
    leaving = _attention_output(name, module, modules)
    if leaving is None:
        return None
    for names in _QUERY_KEY_VALUE:
        children = [getattr(module, each, None) for each in names]
        if all(is_linear(child) for child in children):
            region = Region(name, "attention", module)
            _split_attention(region, list(zip(names, children, strict=True)), leaving, num_ranks)
            return region
    for fused in _FUSED_QUERY_KEY_VALUE:
        child = getattr(module, fused, None)
        if is_linear(child) and not is_linear(getattr(module, "q_attn", None)):
            region = Region(name, "attention", module)
            _split_attention(region, [(fused, child)], leaving, num_ranks)
            return region
    return None


def _attention_output(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[str, Any] | None:
    for each in _ATTENTION_OUTPUT:
        if is_linear(getattr(module, each, None)):
            return _join(name, each), getattr(module, each)
    if name.endswith(".self"):  # BERT's kind: the output projection is in a neighbour
        beside = name.removesuffix("self") + "output.dense"
        if is_linear(modules.get(beside)):
            return beside, modules[beside]
    return None


def _split_attention(region: Region, entering: list[tuple[str, Any]], leaving: tuple[str, Any], num_ranks: int) -> None:
    """Fill the region, or say why it cannot be split."""
    widths = _widths(region.module, entering, num_inputs(leaving[1]))
    if isinstance(widths, str):
        region.problem = widths
        heads: Heads | str = widths
    else:
        heads = split_heads(widths.num_heads, widths.num_kv_heads, num_ranks)
    if isinstance(heads, str) or isinstance(widths, str):
        region.problem = str(heads)
        region.entering = [Projection(_join(region.name, n), m, []) for n, m in entering]
        region.leaving = Projection(*leaving, [])
        return
    dim, region.num_heads = widths.head_dim, widths.num_heads
    query, key_value = rows_of(heads.query, dim), rows_of(heads.key_value, dim)
    if len(entering) == 3:
        rows = [[[each] for each in query], [[each] for each in key_value], [[each] for each in key_value]]
        sharing = [1, heads.num_sharing, heads.num_sharing]
    elif _is_per_head(region.module, entering[0][0]):
        rows, sharing = [[[each] for each in rows_of(heads.query, 3 * dim)]], [1]
    else:
        starts = [0, widths.num_heads * dim, (widths.num_heads + widths.num_kv_heads) * dim]
        query, key = rows_of(heads.query, dim), rows_of(heads.key_value, dim, starts[1])
        value = rows_of(heads.key_value, dim, starts[2])
        rows, sharing = [[list(parts) for parts in zip(query, key, value, strict=True)]], [heads.num_sharing]
    region.entering = [
        Projection(_join(region.name, n), m, r, s) for (n, m), r, s in zip(entering, rows, sharing, strict=True)
    ]
    region.leaving = Projection(*leaving, [[each] for each in query])
    region.attributes = [_attributes(region, widths, heads, rank) for rank in range(num_ranks)]


def _is_per_head(module: nn.Module, fused: str) -> bool:
    return fused == "query_key_value" and type(module).__name__.startswith(_PER_HEAD)


@dataclass(frozen=True, slots=True)
class _Widths:
    head_dim: int
    num_heads: int
    num_kv_heads: int


def _widths(module: Any, entering: list[tuple[str, Any]], inner: int) -> _Widths | str:
    """The heads of an attention module, or why they are not known."""
    head_dim = _number(module, _HEAD_DIM)
    if head_dim is None:
        count = _number(module, _NUM_HEADS)
        if count is None or inner % count:
            return "its head size is not known: it has no attribute " + ", ".join((*_HEAD_DIM, *_NUM_HEADS))
        head_dim = inner // count
    num_heads = inner // head_dim
    outputs = [num_outputs(layer) for _, layer in entering]
    if len(entering) == 3:
        fits = outputs[0] == inner and outputs[1] == outputs[2]
        widths = _Widths(head_dim, num_heads, outputs[1] // head_dim)
        total = [num_heads * head_dim, widths.num_kv_heads * head_dim, widths.num_kv_heads * head_dim]
    else:
        if entering[0][0] == "query_key_value" and not _is_per_head(module, "query_key_value"):
            return f"the order of heads in the fused weight of {type(module).__name__} is not known"
        widths = _Widths(head_dim, num_heads, (outputs[0] // head_dim - num_heads) // 2)
        fits, total = widths.num_kv_heads > 0, [(num_heads + 2 * widths.num_kv_heads) * head_dim]
    if not fits or total != outputs or num_heads * head_dim != inner:
        return f"projections of {outputs} outputs and one of {inner} inputs are no whole heads of {head_dim}"
    return widths


def _attributes(region: Region, widths: _Widths, heads: Heads, rank: int) -> dict[str, Any]:
    """What the module's attributes are for one rank. Sets the region's problem where one has another meaning."""
    num_heads = heads.query[rank][1] - heads.query[rank][0]
    num_kv_heads = heads.key_value[rank][1] - heads.key_value[rank][0]
    groups = widths.num_heads // widths.num_kv_heads
    changes: dict[str, Any] = {}
    for names, whole, part in (
        (_NUM_HEADS, widths.num_heads, num_heads),
        (_NUM_KV_HEADS, widths.num_kv_heads, num_kv_heads),
        (_NUM_GROUPS, groups, num_heads // num_kv_heads),
        (_WIDTHS, widths.num_heads * widths.head_dim, num_heads * widths.head_dim),
    ):
        for name in names:
            value = region.module.__dict__.get(name)
            if isinstance(value, int) and value == whole:
                changes[name] = part
            elif isinstance(value, int):
                region.problem = f"its {name} is {value}, but its weights have {whole}"
    config = region.module.__dict__.get("config")
    if config is not None and len(region.entering) == 1:  # fused ones cut their output by the configuration's counts
        counts = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
        changes["config"] = {name: n for name, n in counts.items() if getattr(config, name, None) is not None}
    return changes


def _find_perceptron(name: str, module: nn.Module, num_ranks: int) -> Region | None:
    for entering, leaving in _PERCEPTRONS:
        last = _at(module, leaving)
        layers = [(path, _at(module, path)) for path in entering]
        if not is_linear(last) or not all(is_linear(layer) for _, layer in layers):
            continue
        hidden = num_inputs(last)
        outer = module.get_submodule(entering[0].rpartition(".")[0])
        region = Region(_join(name, entering[0].rpartition(".")[0]), "perceptron", outer)
        num_parts = 2 if entering == ("gate_up_proj",) else 1
        if any(num_outputs(layer) != num_parts * hidden for _, layer in layers):
            region.problem = f"its projections do not have the {hidden} outputs that the last one takes"
        elif hidden < num_ranks:
            region.problem = f"{hidden} hidden features < {num_ranks} ranks"
        ranges = even_ranges(hidden, num_ranks) if not region.problem else []
        rows = [[(a + part * hidden, b + part * hidden) for part in range(num_parts)] for a, b in ranges]
        region.entering = [Projection(_join(name, path), layer, rows) for path, layer in layers if layer is not None]
        region.leaving = Projection(_join(name, leaving), module.get_submodule(leaving), [[each] for each in ranges])
        region.attributes = [{} for _ in ranges]
        return region
    return None


def _at(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None


def _number(module: Any, names: tuple[str, ...]) -> int | None:
    values = (module.__dict__.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _join(name: str, path: str) -> str:
    return ".".join(part for part in (name, path) if part)
