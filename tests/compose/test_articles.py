"""Complete DeepSpeed files, as articles on it print them, with the articles' loop and an ordinary model: ZeRO-2 with
fp16, ZeRO-3 with everything offloaded, and pipeline, tensor and data parallelism in one. Sizes are reduced.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from compose.recipes import named
from compose.training import TOLERANCE, batch, build
from shardcore.errors import ConfigError
from shardcore.protocols import part_of_whole
from shardcore.testing import run_spmd, spmd
from zero.twin import DTYPES, apply, collect

FOLDER = Path(__file__).with_name("articles")
STEPS, NUM_MICRO_BATCHES = 3, 4
"""Micro-batches of a step, over two data-parallel ranks."""
FILES = {"zero2": 2, "zero3_offload": 2, "3d": 8}
"""The ranks of each."""


def model_of(name: str, dtype: str = "fp32") -> nn.Module:
    """A tiny model, the same on every rank."""
    return build(named(f"{name} z1 pp1 tp1 - cp1 ep1 keep {dtype} g1 device none"))


def read(name: str, **changes: Any) -> dict[str, Any]:
    """The file, with some sections exchanged."""
    return {**json.loads((FOLDER / f"{name}.json").read_text()), **changes}


def dtype_of(config: dict[str, Any]) -> str:
    return next((name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")), "fp32")


def train(config: dict[str, Any], name: str, folder: str) -> tuple[Any, list[float], list[float]]:
    """The articles' loop. Collective."""
    path = Path(folder) / f"{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = model_of(name, dtype_of(config))
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        batches = batches_of(engine, step)
        for each in batches:
            loss = engine(each)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        mean = sc.comm.sum_over_ranks(torch.tensor(total), engine.mesh["dp"], "loss") / engine.mesh.data_world
        losses.append(float(mean))
        norms.append(engine.get_global_grad_norm())
    return engine, losses, norms


def batches_of(engine: Any, step: int) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step; over pipeline stages the step's whole batch."""
    rank, world = engine.mesh.data_rank, engine.mesh.data_world
    found = [batch(step, i) for i in range(rank, NUM_MICRO_BATCHES, world)]
    if engine.is_pipeline:
        return [{key: torch.cat([each[key] for each in found]) for key in found[0]}]
    return found


Alone = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train_alone(config: dict[str, Any], name: str) -> Alone:
    """The reference: plain torch, fp32 masters beside 16-bit parameters."""
    dtype = dtype_of(config)
    model = model_of(name, dtype)
    for param in model.parameters():
        param.data = param.data.to(DTYPES[dtype])
    trained = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(masters, **config["optimizer"]["params"])
    section = config.get("scheduler")
    scheduler = section and sc.optim.build_scheduler(optimizer, section["type"], dict(section["params"]))
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for i in range(NUM_MICRO_BATCHES):
            loss = model(**batch(step, i), use_cache=False).loss
            (loss / NUM_MICRO_BATCHES * 256).backward()
            collect(trained, masters, 1.0)
            total += float(loss.detach()) / NUM_MICRO_BATCHES
        norms.append(apply(optimizer, trained, masters, config["gradient_clipping"], 256.0))
        losses.append(total)
        if scheduler:
            scheduler.step()
    return losses, norms, dict(model.named_parameters(remove_duplicate=False))


def follow(config: dict[str, Any], name: str, alone: Alone, folder: str) -> None:
    engine, losses, norms = train(config, name, folder)
    near = TOLERANCE[dtype_of(config)]
    torch.testing.assert_close(losses, alone[0], rtol=near, atol=near)
    torch.testing.assert_close(norms, alone[1], rtol=near, atol=near)
    if dtype_of(config) == "fp32":
        check_parameters(engine.module, alone[2])


def check_parameters(module: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Adam turns the rounding of very small gradients into steps, so a few elements move further apart than sums do."""
    with sc.summon(module):
        for name, param in module.named_parameters():
            expected = part_of_whole(param, whole[name].detach())
            torch.testing.assert_close(param.detach(), expected, rtol=1e-3, atol=1e-3)


@cache
def _alone(name: str, model: str, dtype: str) -> Alone:
    config = read(name) if dtype != "fp32" else in_fp32(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_alone(config, model)
    finally:
        torch.set_num_threads(threads)


def in_fp32(name: str, **changes: Any) -> dict[str, Any]:
    """The file without its 16-bit section."""
    return {key: value for key, value in read(name, **changes).items() if key not in ("fp16", "bf16")}


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FILES)
def test_the_file_as_it_is(name: str, model: str, tmp_path: Path) -> None:
    config = read(name)
    run_spmd(follow, FILES[name], config, model, _alone(name, model, dtype_of(config)), str(tmp_path), timeout=110)


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("name", FILES)
def test_the_file_in_fp32(name: str, model: str, tmp_path: Path) -> None:
    run_spmd(follow, FILES[name], in_fp32(name), model, _alone(name, model, "fp32"), str(tmp_path), timeout=110)


@pytest.mark.parametrize("stage", [0, 2, pytest.param(3, marks=pytest.mark.full)])
def test_stages_of_zero_in_three_dimensions(stage: int, tmp_path: Path) -> None:
    """At four ranks, without copies, too: two stages of the pipeline by two tensor-parallel ranks."""
    changes: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 4}
    config = in_fp32("3d", **changes)
    run_spmd(follow, 4, config, "gpt2", _alone("3d", "gpt2", "fp32"), str(tmp_path), timeout=110)


SHARED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ulysses": ("llama", 4, {"sequence_parallel_size": 2}),
    "ring": ("gpt2", 4, {"sequence_parallel_size": 2, "sequence_parallel_attention": "ring"}),
    "sequence and tensor": ("llama", 4, {"sequence_parallel_size": 2, "tensor_parallel": {"tp_size": 2}}),
    "experts": ("mixtral", 2, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    "experts, sequence, copies": (
        "mixtral",
        8,
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "sequence_parallel_size": 2,
            "zero_optimization": {"replicate_size": 2},
        },
    ),
}
"""The model, the ranks, and the keys."""


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("what", SHARED)
def test_parts_of_sequences_and_experts(what: str, stage: int, tmp_path: Path) -> None:
    model, world, keys = SHARED[what]
    config = {key: value for key, value in in_fp32("3d").items() if key not in ("pipeline", "tensor_parallel")} | keys
    ranks_per_batch = keys.get("sequence_parallel_size", 1) * keys.get("tensor_parallel", {}).get("tp_size", 1)
    config["gradient_accumulation_steps"] = NUM_MICRO_BATCHES * ranks_per_batch // world
    config["zero_optimization"] = {"stage": stage, **keys.get("zero_optimization", {})}
    run_spmd(follow, world, config, model, _alone("3d", model, "fp32"), str(tmp_path), timeout=110)


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "pipeline": {"stages": 2},
}


@spmd(world=2, timeout=110)
def test_each_rank_holds_its_stages_only() -> None:
    """The user's model is still at hand; what other ranks run has left it, and a use of it is no silent zero."""
    model = model_of("gpt2")
    engine, *_ = sc.initialize(model=model, config=CONFIG)
    params = dict(model.named_parameters(remove_duplicate=False))
    here = {name for name, _ in engine.module.named_parameters()}
    kept = {name for name, param in params.items() if not param.is_meta}
    assert here <= kept
    assert kept - here <= {"lm_head.weight", "transformer.wte.weight"}, "names of one parameter"
    assert len(kept) < len(params)
    everywhere = sc.comm.exchange(sorted(here), engine.mesh["pp"], "names")
    assert set().union(*map(set, everywhere)) == set(params)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**batch(0, 0))


@spmd(world=2, timeout=110)
def test_groups_of_parameters_and_a_built_optimizer() -> None:
    """Every rank keeps all groups; options and schedulers hold for those parameters that it has."""
    losses = []
    for build_first in (True, False):
        model = model_of("llama")
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}, {"params": []}]
        config = {key: value for key, value in CONFIG.items() if not (build_first and key == "optimizer")}
        client = torch.optim.AdamW(groups, lr=1e-2) if build_first else None
        engine, optimizer, _, _ = sc.initialize(
            model=model, optimizer=client, model_parameters=None if build_first else groups, config=config
        )
        assert [group["weight_decay"] for group in optimizer.param_groups][:2] == [0.1, 0.0]
        assert len(optimizer.param_groups) == 3
        for step in range(2):
            whole = {k: torch.cat([batch(step, i)[k] for i in range(2)]) for k in ("input_ids", "labels")}
            engine.backward(engine(whole))
            engine.step()
        losses.append(float(engine.eval()(whole)))
    assert losses[0] == losses[1]


@spmd(world=2, timeout=110)
def test_a_batch_of_another_length_is_refused() -> None:
    engine, *_ = sc.initialize(model=model_of("llama"), config=CONFIG)
    with pytest.raises(ConfigError, match=r"2 x 2 accumulation steps = 4 samples, got 2"):
        engine(batch(0, 0))
    with pytest.raises(ConfigError, match="is called as"):
        engine(batch(0, 0), labels=None)
    sc.comm.clear_failure()


@spmd(world=4, timeout=110)
def test_sizes_that_do_not_fit() -> None:
    def refused(model: nn.Module | None = None, mesh: sc.Mesh | None = None, **changes: Any) -> str:
        with pytest.raises(ConfigError) as found:
            deepspeed.initialize(model=model or model_of("llama"), config={**CONFIG, **changes}, mesh_param=mesh)
        assert isinstance(found.value, AssertionError)
        return str(found.value)

    assert "pipeline.stages: 3 does not divide the 4 ranks of the job; choose one of [1, 2, 4]" in refused(
        pipeline={"stages": 3}
    )
    assert "sequence_parallel_size: 3 does not divide the 4 ranks of the job" in refused(
        sequence_parallel_size=3, pipeline={}
    )
    assert "tensor_parallel.tp_size x sequence_parallel_size = 4 x 4 = 16 does not divide the 4 ranks" in refused(
        pipeline={}, tensor_parallel={"tp_size": 4}, sequence_parallel_size=4
    )
    assert "sequence_parallel_size: 2 together with pipeline.stages is not available yet" in refused(
        sequence_parallel_size=2
    )
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    assert "expert_parallel.autoep_size: 4 does not divide the 2 ranks over which each copy" in refused(**experts)
    assert "has no experts that can be split" in refused(pipeline={}, **experts)
    assert "1 sequence-parallel ranks; make it by Mesh(cp=2, ...)" in refused(
        mesh=sc.Mesh(), pipeline={}, sequence_parallel_size=2
    )
    assert "has no attention that Hugging Face's interface replaces" in refused(
        model=nn.Linear(2, 2), pipeline={}, sequence_parallel_size=2
    )
    assert "= 4 x 2 = 8 does not divide the 4 ranks" in refused(pipeline={"stages": 4}, tensor_parallel={"tp_size": 2})
    assert "the mesh that was given has 1 pipeline ranks" in refused(mesh=sc.Mesh(tp=2))
    assert "cannot be cut into stages" in refused(model=nn.Linear(2, 2))
    assert 'pipeline.partition: expected one of parameters, uniform, best, or "type:"' in refused(
        pipeline={"stages": 2, "partition": "profile"}
    )
    assert "both say how layers are dealt out" in refused(
        pipeline={"stages": 2, "partition": "uniform", "partition_method": "parameters"}
    )
    assert (
        "of class LamaDecoderLayer: the pipeline has none; its layers are of Embedding, LlamaDecoderLayer"
        in refused(activation_checkpointing={"policy": "full", "units": ["LamaDecoderLayer"]})
    )


@spmd(world=2, timeout=110)
def test_a_batch_that_is_a_dict_without_stages() -> None:
    """The same loop: its entries are the model's arguments, and the loss comes back."""
    config = {key: value for key, value in CONFIG.items() if key != "pipeline"}
    engine, *_ = sc.initialize(model=model_of("llama"), config=config)
    assert engine(batch(0, 0)).dim() == 0
    assert engine(**batch(0, 0)).logits.shape[-1] == 32
    assert engine({"input_ids": batch(0, 0)["input_ids"]}).logits.shape[-1] == 32

    class TakesABatch(nn.Linear):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch["batch"]).sum()

    engine, *_ = sc.initialize(model=TakesABatch(2, 2), config=config)
    assert engine({"batch": torch.ones(2), "more": torch.ones(2)}).dim() == 0
