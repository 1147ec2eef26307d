"""What is split, what is left whole, and what is refused, with its reason, leaving the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.protocols import find_pieces
from shardcore.tensor.heads import split_heads
from shardcore.testing import spmd, zoo
from tensor.hugging_face import batch, build, loss


class Attention(nn.Module):
    """Attention of an unknown class whose forward works on as many heads as its projections have."""

    def __init__(self, fused: bool = False, dim: int = 24, num_heads: int = 6) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.fused = dim // num_heads, num_heads, fused
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] to the same."""
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated perceptron; ``normed`` normalises hidden features, which no rank could do with a part of them."""

    def __init__(self, normed: bool = False, dim: int = 24, hidden: int = 33) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)
        self.normed = normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] to the same."""
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden.softmax(-1) if self.normed else hidden)


class Block(nn.Module):
    """A transformer's block of unknown classes."""

    def __init__(self, fused: bool, normed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attention, self.mlp = Attention(fused), Gated(normed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embedding, blocks, and a head that is the embedding."""

    def __init__(self, fused: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(51, 24)
        self.blocks = nn.ModuleList(Block(fused, normed) for _ in range(2))
        self.head = nn.Linear(24, 51, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids to logits."""
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(**options: bool) -> Model:
    """In double precision."""
    torch.manual_seed(0)
    return Model(**options).double()


def assert_twins(split: nn.Module, whole: nn.Module) -> None:
    """Forward, backward, and every gradient."""
    ids = batch()["input_ids"]
    out, expected = split(ids), whole(ids)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    out.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    found = dict(split.named_parameters())
    for name, param in whole.named_parameters():
        torch.testing.assert_close(
            found[name].grad, find_pieces(param=found[name]).local(param.grad), rtol=1e-10, atol=1e-9
        )


@pytest.mark.parametrize("fused", [False, True])
@spmd(world=2)
def test_blocks_of_unknown_classes_are_tried(fused: bool) -> None:
    whole, split = make(fused=fused), make(fused=fused)
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    report = sc.tensor.report(split)
    assert "blocks.*.mlp.gate_proj" in report
    assert "colwise, perceptron: 17/16 outputs  x2" in report
    assert ("qkv" if fused else "q_proj") + "  " in report
    assert "token" in report
    assert_twins(split, whole)


@spmd(world=2)
def test_a_block_that_is_not_the_sum_of_its_parts_stays_whole() -> None:
    whole, split = make(normed=True), make(normed=True)
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    assert "its output is not the sum of what parts of its weights give" in sc.tensor.report(split)
    assert_twins(split, whole)


class Learned(Gated):
    """Its hidden features are scaled by a parameter of its own, whose gradient no rank would see all of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * self.scale)


@spmd(world=2)
def test_a_block_with_parameters_of_its_own_stays_whole() -> None:
    model = nn.Sequential(Learned(), Gated())
    sc.tensor.parallelize(model, sc.Mesh(tp=2))
    assert type(model[0].up_proj) is nn.Linear
    assert "its own parameter 'scale' may be for all of its inside" in sc.tensor.report(model)
    assert type(model[1].up_proj) is not nn.Linear


@spmd(world=2)
def test_patterns_by_name() -> None:
    """Blocks whose attention has no module of its own, by hand."""
    mesh = sc.Mesh(tp=2)
    whole, split = zoo.build("tiny_gpt").double(), zoo.build("tiny_gpt").double()
    plan = {
        "qkv": "colwise_gather_output",
        "proj": "rowwise_split_input",
        "up": "colwise",
        "blocks.*.down": "rowwise",
        "token": "vocab",
        "head": "vocab",
        "norm": "replicate",
    }
    sc.tensor.parallelize(split, mesh, plan)
    assert split.blocks[0].up.weight.shape == (64, 32)
    assert split.blocks[0].qkv.weight.shape == (48, 32)
    assert split.token.weight.shape == (128, 32)
    assert split.head.weight is split.token.weight
    data = zoo.batch("tiny_gpt", 0, 2)
    value, expected = zoo.loss(split, data), zoo.loss(whole, data)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    value.backward()
    expected.backward()
    for name, param in whole.named_parameters():
        found = dict(split.named_parameters())[name]
        torch.testing.assert_close(found.grad, find_pieces(found).local(param.grad), rtol=1e-6, atol=1e-7)


@spmd(world=2)
def test_patterns_of_a_known_attention_split_its_heads() -> None:
    whole, split = build("qwen3"), build("qwen3")
    plan = {"self_attn.*_proj": "colwise", "o_proj": "rowwise", "gate_proj": "colwise", "up_proj": "colwise"}
    plan |= {"down_proj": "rowwise", "*_layernorm": "sequence"}
    sc.tensor.parallelize(split, sc.Mesh(tp=2), plan)
    assert "attention: 12 outputs" in sc.tensor.report(split)
    assert "sequence: " in sc.tensor.report(split)
    value, expected = loss(split, batch()), loss(whole, batch())
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-7)
    value.backward()
    expected.backward()
    for name, param in whole.named_parameters():
        found = dict(split.named_parameters())[name]
        torch.testing.assert_close(found.grad, find_pieces(found).local(param.grad), rtol=1e-5, atol=1e-6)


def contents(model: nn.Module) -> dict[str, object]:
    """Classes of modules, and identity and shape of parameters, by name."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    return kinds | {f"{name} ": (id(param), param.shape) for name, param in model.named_parameters()}


def refused(model: nn.Module, match: str, plan: object = "auto", **options: bool) -> None:
    """It is, on every rank, and nothing was changed."""
    mesh = sc.Mesh(tp=torch.distributed.get_world_size())
    before = contents(model)
    with pytest.raises(ConfigError, match=match):
        sc.tensor.parallelize(model, mesh, plan, **options)
    assert contents(model) == before
    assert all(find_pieces(p) is None for p in model.parameters())


@spmd(world=4)
def test_fault_f10_heads_that_do_not_divide() -> None:
    """Six heads on four ranks go two, two, one, one; two heads on four ranks cannot go at all."""
    model = Attention(dim=24, num_heads=6).double()
    whole = Attention(dim=24, num_heads=6).double()
    whole.load_state_dict(model.state_dict())
    for tensor in whole.state_dict().values():
        sc.comm.broadcast(tensor, sc.Mesh(tp=4)["tp"], 0, "start").wait()
    sc.tensor.parallelize(model, sc.Mesh(tp=4))
    assert "8/8/4/4 outputs" in sc.tensor.report(model)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), whole(x), rtol=1e-12, atol=1e-12)
    plan = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    refused(Attention(num_heads=2), "attention Attention cannot be split over 4 ranks: 2 heads < 4 ranks", plan)
    refused(nn.Sequential(Attention(num_heads=2)), "attention 0 cannot be split over 4 ranks: 2 heads < 4", plan)


def test_fault_f9_few_key_value_heads() -> None:
    shared = split_heads(8, 2, 4)
    assert not isinstance(shared, str)
    assert shared.query == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert shared.key_value == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert shared.num_sharing == 2
    assert split_heads(8, 2, 3) == "2 key-value heads < 3 ranks, and do not divide them"
    assert split_heads(2, 2, 4) == "2 heads < 4 ranks"
    assert split_heads(6, 4, 2) == "6 heads are no multiple of 4 key-value heads"
    uneven = split_heads(10, 5, 2)
    assert not isinstance(uneven, str)
    assert uneven.query == ((0, 6), (6, 10))


@spmd(world=2)
def test_refusals() -> None:
    refused(nn.Sequential(nn.Linear(4, 4)), "has nothing that can be split over 2 tensor-parallel ranks")
    refused(make(), "no module of Model matches 'q_porj'; did you mean", {"q_porj": "colwise"})
    refused(make(), "did you mean 'colwise'", {"q_proj": "colwize"})
    refused(make(), "must be split as a whole, with heads.*o_proj: replicate", {"*.[qkv]_proj": "colwise"})
    refused(make(), "would hold different parts of it: token: dim 0, even; head: whole", {"token": "vocab"})
    refused(make(), "'blocks.0.norm1' .LayerNorm. cannot be 'colwise'", {"norm1": "colwise"})
    refused(make(), "expected 'auto', or a dict", "automatic")
    refused(
        make(),
        r"block 'blocks\.1' has no module that is 'sequence'",
        {"mlp.up_proj": "colwise", "mlp.gate_proj": "colwise", "down_proj": "rowwise", "blocks.0.norm1": "sequence"},
    )
    refused(nn.Sequential(nn.Embedding(8, 4, sparse=True)), "sparse=True needs the whole table", {"0": "vocab"})
    refused(build("opt"), "sequence parallelism: block 'model.decoder.layers.0' has no attention", sequence=True)
    with torch.device("meta"):
        empty = make()
    refused(empty, "is on the meta device")


@spmd(world=2)
def test_one_ranks_problem_is_raised_by_all() -> None:
    mesh = sc.Mesh(tp=2)
    model = make() if mesh.rank == 0 else nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="nothing that can be split"):
        sc.tensor.parallelize(model, mesh)
    assert all(find_pieces(p) is None for p in model.parameters())
    with pytest.raises(RankMismatchError, match="the tensor-parallel plan differs"):
        sc.tensor.parallelize(make(fused=mesh.rank == 0), mesh)


@spmd(world=2)
def test_wrong_order_and_twice() -> None:
    mesh = sc.Mesh(tp=2)
    model = make()
    with pytest.raises(ConfigError, match="is not split over it"):
        sc.shard(model, mesh)
    sc.tensor.parallelize(model, mesh)
    with pytest.raises(StateError, match="is split already"):
        sc.tensor.parallelize(model, mesh)
    sc.shard(model, mesh, stage=1)
    with pytest.raises(StateError, match="sharded already"):
        sc.tensor.parallelize(model, mesh)
    with pytest.raises(ConfigError, match=r"mesh\['tp'\]"):
        sc.tensor.parallelize(make(), mesh["dp"])
    with pytest.raises(StateError, match="was not given to"):
        sc.tensor.report(make())


@spmd(world=2)
def test_an_optimizer_built_before_trains_the_parts() -> None:
    """Parameters stay the same objects."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sc.tensor.parallelize(model, sc.Mesh(tp=2))
    before = model.blocks[0].mlp.up_proj.weight.detach().clone()
    model(batch()["input_ids"]).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.blocks[0].mlp.up_proj.weight)


@spmd(world=1)
def test_one_rank_changes_nothing() -> None:
    model = make()
    assert sc.tensor.parallelize(model, sc.Mesh()) is model
    assert type(model.blocks[0].mlp.up_proj) is nn.Linear
    assert "over 1 tensor-parallel ranks" in sc.tensor.report(model)
