"""``load_safetensors``: what the file holds, in a model of any state; each rank reads what it keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import shardcore as sc
from shardcore.errors import CheckpointError
from shardcore.integrations import SafetensorsFile
from shardcore.testing import run_spmd, spmd
from zero.built import Gain, Plain, assert_equal, empty, hugging_face
from zero.twin import whole_parameters

STATES = ["meta", "empty_init", "sharded_init", "whole", "sharded"]


def model_in(state: str, build: Callable[[], nn.Module], stage: int) -> nn.Module:
    """A model with other values than the file's, or none."""
    torch.manual_seed(99)
    if state == "meta":
        return empty(build)
    if state in ("empty_init", "sharded_init"):
        with getattr(sc, state)():
            return build()
    return build() if state == "whole" else sc.shard(build(), stage=stage)


def reference(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build()


def loaded(state: str, build: Callable[[], nn.Module], stage: int, path: Path, **options: Any) -> nn.Module:
    model = model_in(state, build, stage)
    assert sc.load_safetensors(model, path, **options) == ([], [])
    return model if state == "sharded" else sc.shard(model, stage=stage)


def check_load(state: str, stage: int, path: Path) -> None:
    expected = reference(Plain)
    model = loaded(state, Plain, stage, path)
    if state == "meta":  # its buffer is in no file, and the module's method draws it
        expected.gain.shift = model.gain.shift
    elif state in ("whole", "sharded", "sharded_init"):
        torch.manual_seed(99)
        expected.gain.shift = Plain().gain.shift
    else:
        expected.gain.shift = model.gain.shift
    assert_equal(model, expected)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 3), pytest.param(1, 3, marks=pytest.mark.full), (3, 1), pytest.param(2, 0, marks=pytest.mark.full)],
)
def test_every_state_takes_the_files_values(state: str, world: int, stage: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(reference(Plain), str(path))
    run_spmd(check_load, world, state, stage, path)


def check_hugging_face(name: str, path: Path) -> None:
    build = hugging_face(name)
    model = loaded("meta", build, 3, path)
    expected = type(model).from_pretrained(path)
    assert_equal(model, expected)
    with sc.sharded_init():
        model = type(expected).from_pretrained(path)
    assert_equal(sc.shard(model), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_hugging_faces_folders_of_several_files(name: str, tmp_path: Path) -> None:
    """With an index, tied weights, and rotary frequencies that no file has; ``from_pretrained`` gives the same."""
    reference(hugging_face(name)).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    run_spmd(check_hugging_face, 2, name, tmp_path)


def check_converted(path: Path) -> None:
    build = hugging_face("mixtral")
    with pytest.raises(CheckpointError, match=r"call it inside shardcore\.sharded_init"):
        loaded("meta", build, 3, path)
    cls = type(build())
    with sc.sharded_init():
        model = cls.from_pretrained(path)
    assert_equal(sc.shard(model), cls.from_pretrained(path))


def test_a_folder_whose_names_are_converted_says_how(tmp_path: Path) -> None:
    """Experts are stored one by one, and are one tensor in the model."""
    reference(hugging_face("mixtral")).save_pretrained(tmp_path)
    run_spmd(check_converted, 2, tmp_path)


@spmd(world=4)
def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    build = lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))  # noqa: E731
    path = tmp_path / f"model{sc.Mesh().rank}.safetensors"
    save_file(reference(build).state_dict(), path)
    read = [0]
    plain = SafetensorsFile.read_bytes

    def counted(self: SafetensorsFile, offset: int, out: torch.Tensor) -> None:
        read[0] += out.nbytes
        plain(self, offset, out)

    whole = sum(param.nbytes for param in build().parameters())
    SafetensorsFile.read_bytes = counted  # type: ignore[method-assign]
    try:
        for state in ("meta", "sharded"):
            read[0] = 0
            model = loaded(state, build, 3, path)
            kept = sum(sc.local_shard(param)[0].nbytes for param in model.parameters())
            assert read[0] == (kept if state == "sharded" else whole / 4), state
    finally:
        SafetensorsFile.read_bytes = plain  # type: ignore[method-assign]


@spmd(world=2)
def test_all_problems_at_once_on_every_rank(tmp_path: Path) -> None:
    model = sc.shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)))
    before = whole_parameters(model)
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    del state["0.bias"]
    state["1.weight"] = torch.zeros(3, 2)
    state["2.weight"] = state["2.weight"].half()
    state["3.weight"] = torch.zeros(1)
    path = tmp_path / f"{sc.Mesh().rank}.safetensors"
    save_file(state, path)
    with pytest.raises(CheckpointError) as error:
        sc.load_safetensors(model, path)
    for text in [
        "1 missing in the file: 0.bias",
        "1 unexpected in the file: 3.weight",
        "1.weight (file [3, 2], model [2, 3])",
        "2.weight (file torch.float16, model torch.float32); cast=True",
    ]:
        assert text in str(error.value), text
    after = whole_parameters(model)
    assert all(torch.equal(after[name], value) for name, value in before.items()), "nothing was changed"
    missing = path if sc.Mesh().rank == 0 else tmp_path / "nowhere.safetensors"
    with pytest.raises(CheckpointError, match=r"cannot open .*nowhere.*\(ranks \[1\]\)"):
        sc.load_safetensors(model, missing, strict=False, cast=True)


def make_offsets_floats(path: Path) -> None:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["0.bias"]["data_offsets"] = [float(offset) for offset in header["0.bias"]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def check_failure_of_one_rank(case: str, folder: Path) -> None:
    """Both ranks hear of it, and what they do next is in step."""
    rank = sc.Mesh().rank
    model = sc.shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    path = folder / f"{rank}.safetensors"
    save_file({name: torch.full_like(value, 7) for name, value in whole_parameters(model).items()}, path)
    rename: Callable[[str], Any] = lambda name: name  # noqa: E731
    plain = SafetensorsFile.read_bytes
    expected, cause = rf"{folder}/1\.safetensors", type(None)
    if rank == 1:
        if case == "raises":
            rename, cause = {}.__getitem__, CheckpointError
        elif case == "number":
            rename, cause = lambda name: 3, CheckpointError
        elif case == "header":
            make_offsets_floats(path)
            cause = CheckpointError
        elif case == "read":
            SafetensorsFile.read_bytes = lambda *_: [][0]  # type: ignore[method-assign]
            cause = IndexError
    try:
        with pytest.raises(CheckpointError, match=expected) as error:
            sc.load_safetensors(model, path, rename=rename)
    finally:
        SafetensorsFile.read_bytes = plain  # type: ignore[method-assign]
    assert type(error.value.__cause__) is cause
    assert "rank 1" in str(error.value) or "ranks [1]" in str(error.value)
    sc.load_safetensors(model, folder / "0.safetensors")
    assert all(torch.equal(value, torch.full_like(value, 7)) for value in whole_parameters(model).values())


@pytest.mark.parametrize("case", ["raises", "number", "header", "read"])
def test_whatever_fails_on_one_rank_is_an_error_on_all(case: str, tmp_path: Path) -> None:
    run_spmd(check_failure_of_one_rank, 2, case, tmp_path, timeout=20)


@spmd(world=2)
def test_what_the_file_has_not_is_initialised_and_what_it_has_is_kept(tmp_path: Path) -> None:
    """In one module too: the method that draws the bias writes to the weight, which keeps the file's values."""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    path = tmp_path / f"{sc.Mesh().rank}.safetensors"
    save_file({"0.weight": weight, "left.over": torch.zeros(2)}, path)
    model = empty(lambda: nn.Sequential(nn.Linear(3, 4), Gain(4)))
    left_out = sc.load_safetensors(model, path, strict=False)
    assert left_out.missing_keys == ["0.bias", "1.weight"]
    assert left_out.unexpected_keys == ["left.over"]
    model[0].weight.data.mul_(2)  # edits between loading and sharding count
    sc.shard(model)
    found = whole_parameters(model)
    assert torch.equal(found["0.weight"], weight * 2)
    assert all(value.isfinite().all() for value in found.values())


@spmd(world=2)
def test_conversion_renaming_and_masters(tmp_path: Path) -> None:
    """A 16-bit model takes rounded values, and its masters those; training goes on from there."""
    build = lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))  # noqa: E731
    expected = reference(build)
    path = tmp_path / f"{sc.Mesh().rank}.safetensors"
    save_file({f"old.{name}": value for name, value in expected.state_dict().items()} | {"x": torch.ones(1)}, path)
    rename = {"x": None}
    for stage in (1, 3):
        model = sc.shard(build(), stage=stage, precision=sc.Precision(param="bf16"))
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.0)
        sc.load_safetensors(model, path, cast=True, rename=lambda n: rename.get(n, n.removeprefix("old.")))
        for _ in range(2):
            found = whole_parameters(model)
            for name, value in expected.state_dict().items():
                assert torch.equal(found[name], value.bfloat16()), (stage, name)
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()  # writes the masters, which did not move, to the parameters
            optimizer.zero_grad()
    with pytest.raises(CheckpointError, match="rename gives 'same' for both"):
        sc.load_safetensors(model, path, rename=lambda name: "same")


@spmd(world=2)
def test_a_tie_takes_the_last_of_its_names(tmp_path: Path) -> None:
    model = empty(Plain)
    state = {name: tensor.contiguous() for name, tensor in reference(Plain).state_dict().items()}
    state["embed.weight"] = torch.zeros(17, 8)
    state["head.weight"] = torch.ones(17, 8)
    path = tmp_path / f"{sc.Mesh().rank}.safetensors"
    save_file(state, path)
    sc.load_safetensors(model, path)
    sc.shard(model)
    eager = Plain()
    eager.load_state_dict(state)
    assert model.head.weight is model.embed.weight
    assert torch.equal(whole_parameters(model)["embed.weight"], eager.embed.weight)


def test_the_error_of_a_damaged_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        sc.load_safetensors(nn.Linear(2, 2), path)
