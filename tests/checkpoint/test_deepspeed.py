"""Checkpoints that DeepSpeed made (``fixtures/make_deepspeed.py``) are imported, and training goes on as its own."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore as sc
import shardcore.deepspeed as deepspeed
from checkpoint.fixtures import small
from shardcore import cli
from shardcore.checkpoint.stored import open_checkpoint
from shardcore.checkpoint.unpickling import Inert, read_pickled
from shardcore.deepspeed.utils import zero_to_fp32
from shardcore.errors import CheckpointError
from shardcore.testing import run_spmd

FIXTURES = Path(small.__file__).parent
PRECISION = {
    "zero1": "fp32", "zero2": "fp32", "zero3": "fp32", "universal1": "fp32", "universal3": "fp32", "pipeline": "fp32",
    "zero1-fp16": "fp16", "zero2-bf16": "bf16", "zero3-bf16": "bf16",
}  # fmt: skip
TOLERANCE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}
"""Of losses: DeepSpeed sums 16-bit gradients in their own dtype."""


def expected(name: str) -> dict[str, torch.Tensor]:
    """Masters and moments, as DeepSpeed told them."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted((FIXTURES / name.replace("universal", "zero")).glob("expected-*.pt")):
        found.update(torch.load(file))
    return found


def losses_of(name: str) -> list[float]:
    """Of DeepSpeed's next steps."""
    folder = FIXTURES / name.replace("universal", "zero")
    found: list[float] = json.loads((folder / "expected.json").read_text())["losses"]
    return found


@pytest.mark.parametrize("name", PRECISION)
def test_masters_moments_and_counters_are_deepspeeds(name: str, tmp_path: Path) -> None:
    report = sc.checkpoint.import_deepspeed(FIXTURES / name, tmp_path)
    assert report.path == tmp_path / "global_step3"
    assert any("'note'" in note and "left out" in note for note in report.notes)
    assert sc.checkpoint.verify(tmp_path) == []
    stored, _ = open_checkpoint(tmp_path)
    assert stored.client_state == {"epoch": 4, "words": ["a", 2]}
    seen = expected(name)
    assert seen
    for key, value in seen.items():
        state, _, parameter = key.rpartition(" ")
        found = stored.whole((f"state/{state}", parameter) if state else ("weight", parameter))
        assert torch.equal(found, value), key
    trained = {key for key in seen if " " not in key}
    weights = stored.training["weights"]
    assert {key for key, info in weights.items() if info["trainable"]} == trained
    optimizer = stored.training["optimizer"]
    assert (optimizer["class"], optimizer["num_steps"], optimizer["num_skipped_steps"]) == ("AdamW", 3, 0)
    assert [set(names) for _, names in optimizer["values"]] == [trained]
    if name == "pipeline":
        assert weights["tied_modules.embed.weight"]["aliases"] == ["0.weight"]
        return
    assert weights["embed.weight"]["aliases"] == ["head.weight"]
    assert {key for key, info in weights.items() if not info["trainable"]} == {"still.weight", "still.bias"}
    assert stored.whole(("buffer", "count")).tolist() == [3]


def go_on(name: str, folder: str, stage: int) -> list[float]:
    """Load what was imported, and train on."""
    model = small.Small()
    settings = small.config(stage, PRECISION[name])
    world = sc.Mesh(device="cpu").data_world
    settings["train_micro_batch_size_per_gpu"] = small.ROWS // world
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=small.groups_of(model), config=settings)
    path, client_state = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step3"
    assert client_state == {"epoch": 4, "words": ["a", 2]}
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 0, 24)
    losses = []
    for step in range(small.NUM_STEPS, small.NUM_STEPS + small.NUM_MORE):
        loss = engine(small.batch(step, engine.global_rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        ("zero1", 1, 2),
        ("zero2", 2, 2),
        ("zero3", 3, 2),
        ("zero3", 1, 1),
        ("universal1", 3, 2),
        ("universal3", 2, 1),
        ("zero1-fp16", 1, 2),
        ("zero2-bf16", 2, 2),
        ("zero3-bf16", 0, 1),
    ],
)
def test_training_goes_on_as_deepspeeds_own(name: str, stage: int, world: int, tmp_path: Path) -> None:
    sc.checkpoint.import_deepspeed(FIXTURES / name, tmp_path)
    ranks = run_spmd(go_on, world, name, str(tmp_path), stage)
    losses = [sum(each) / world for each in zip(*ranks, strict=True)]
    assert losses == pytest.approx(losses_of(name), rel=TOLERANCE[PRECISION[name]])


def go_on_in_stages(folder: str, num_stages: int) -> list[float]:
    """The pipeline, on so many ranks."""
    pipe = deepspeed.PipelineModule(
        small.layers(deepspeed.pipe.LayerSpec, deepspeed.pipe.TiedLayerSpec),
        num_stages=num_stages,
        loss_fn=torch.nn.functional.cross_entropy,
        partition_method="uniform",
    )
    settings = {**small.config(1, "fp32"), "gradient_accumulation_steps": 2}
    engine, _, _, _ = deepspeed.initialize(model=pipe, model_parameters=small.groups_of(pipe), config=settings)
    engine.load_checkpoint(folder)
    steps = range(small.NUM_STEPS, small.NUM_STEPS + small.NUM_MORE)
    return [float(engine.train_batch(iter(small.micro_batches(step)))) for step in steps]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_pipeline_goes_on_in_any_number_of_stages(num_stages: int, tmp_path: Path) -> None:
    sc.checkpoint.import_deepspeed(FIXTURES / "pipeline", tmp_path)
    for losses in run_spmd(go_on_in_stages, num_stages, str(tmp_path), num_stages):
        assert losses == pytest.approx(losses_of("pipeline"), rel=TOLERANCE["fp32"])


@pytest.mark.parametrize("name", PRECISION)
def test_whole_weights_come_straight_from_deepspeeds_files(name: str, tmp_path: Path) -> None:
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(FIXTURES / name)
    assert {value.dtype for value in whole.values() if value.is_floating_point()} == {torch.float32}
    for key, value in expected(name).items():
        if " " not in key:
            assert torch.equal(whole[key], value), key
    if name != "pipeline":
        assert set(whole) == set(small.Small().state_dict())
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(small.Small(), FIXTURES / name)
        assert torch.equal(model.head.weight, whole["embed.weight"])
    sc.checkpoint.to_hf(FIXTURES / name, tmp_path / "out")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ckpt", "import-deepspeed", str(FIXTURES / "zero3"), str(tmp_path), "--num-files", "2"]
    assert cli.main([*arguments, "--strip", "still."]) == 0
    assert "global_step3" in capsys.readouterr().out
    assert cli.main(["ckpt", "ls", str(tmp_path / "global_step3")]) == 0
    assert "imported from DeepSpeed" in capsys.readouterr().out
    assert {"weight", "bias"} < set(sc.checkpoint.open_weights(tmp_path))


# ------------------------------------------------------------------------------------------------------------ faults


class Attack:
    """Runs a command when it is unpickled by anyone who lets it."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("attacked"),))


def test_nothing_that_a_file_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"tensor": torch.arange(3), "attack": Attack(), "fine": (1, "a")}, tmp_path / "file.pt")
    found = read_pickled(tmp_path / "file.pt")
    assert not Path("attacked").exists()
    assert isinstance(found["attack"], Inert)
    assert torch.equal(found["tensor"], torch.arange(3))
    assert found["fine"] == (1, "a")
    pickle.loads(pickle.dumps(Attack()))
    assert Path("attacked").exists(), "the attack is one"


def copy(name: str, folder: Path) -> Path:
    """A fixture that may be damaged; returns its checkpoint's folder."""
    shutil.copytree(FIXTURES / name, folder)
    return folder / "global_step3"


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    folder = copy("zero1", tmp_path / "missing")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 ranks saved their optimizer's state, and 1 files"):
        sc.checkpoint.import_deepspeed(folder, tmp_path / "out")
    folder = copy("zero3", tmp_path / "cut")
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt cannot be read"):
        sc.checkpoint.import_deepspeed(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is no checkpoint of DeepSpeed"):
        sc.checkpoint.import_deepspeed(tmp_path / "nowhere", tmp_path / "out")
    folder = copy("zero2", tmp_path / "split")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"tensor-parallel.*ds_to_universal"):
        sc.checkpoint.import_deepspeed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not sc.checkpoint.list_checkpoints(tmp_path / "out")


def load_it_directly(folder: str) -> str:
    engine, _, _, _ = deepspeed.initialize(model=small.Small(), config=small.config(1, "fp32"))
    with pytest.raises(CheckpointError, match="import-deepspeed") as raised:
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="import-deepspeed"):
        sc.checkpoint.load(folder, engine.module)
    return str(raised.value)


def test_an_engine_says_how_to_load_deepspeeds() -> None:
    run_spmd(load_it_directly, 1, str(FIXTURES / "zero2"))
