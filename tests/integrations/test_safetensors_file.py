"""Reading safetensors files: what its own library wrote, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardcore.errors import CheckpointError
from shardcore.integrations import open_safetensors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """One file with a tensor of each dtype and of unusual shapes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {str(d): (torch.randn(7, 11, generator=generator) * 4).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "none": torch.empty(0, 4), "one": torch.ones(1, 1, 1)}
    path = tmp_path_factory.mktemp("files") / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors


def test_every_dtype_and_shape_is_read_as_it_was_written(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = written
    stored = open_safetensors(path)
    assert stored.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert (stored[name].dtype, stored[name].shape) == (expected.dtype, tuple(expected.shape))
        out = torch.empty(expected.numel(), dtype=expected.dtype)
        stored[name].read(0, expected.numel(), out)
        assert bits(out) == bits(expected), name


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES[:4]), st.integers(0, 77), st.integers(0, 77), st.sampled_from([None, torch.float32]))
def test_ranges(
    written: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype, a: int, b: int, into: torch.dtype | None
) -> None:
    path, tensors = written
    start, stop = sorted((a, b))
    out = torch.empty(stop - start, dtype=into or dtype)
    open_safetensors(path)[str(dtype)].read(start, stop, out)
    assert torch.equal(out, tensors[str(dtype)].view(-1)[start:stop].to(out.dtype))


def test_conversion_goes_by_chunks(
    written: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = written
    monkeypatch.setattr("shardcore.integrations.safetensors_file.CHUNK_NBYTES", 24)
    out = torch.empty(70, dtype=torch.float64)
    open_safetensors(path)["torch.float32"].read(5, 75, out)
    assert torch.equal(out, tensors["torch.float32"].view(-1)[5:75].double())


def cut(data: bytes) -> bytes:
    return data[:-3]


def long_header(data: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + data[8:]


def wrong_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def unknown_dtype(data: bytes) -> bytes:
    return data.replace(b'"F32"', b'"F31"')


def wrong_shape(data: bytes) -> bytes:
    return data.replace(b"[2,3]", b"[2,4]")


@pytest.mark.parametrize("damage", [cut, long_header, wrong_json, unknown_dtype, wrong_shape, lambda data: data[:5]])
def test_a_damaged_file_is_refused_by_name(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    save_file({"w": torch.ones(2, 3)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors"):
        open_safetensors(path)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    stored = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends at byte"):
        stored["w"].read(0, 1000, torch.empty(1000))


def test_folders_and_indices(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        open_safetensors(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    assert set(open_safetensors(tmp_path)) == {"a"}
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="several"):
        open_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert set(open_safetensors(tmp_path)) == set(open_safetensors(index)) == {"a", "b"}
    for wrong, match in [
        ({"weight_map": {"c": "model-1.safetensors"}}, "lists 1 tensors"),
        ({"weight_map": {"a": "../model-1.safetensors"}}, "beside it"),
        ({"weight_map": {"a": "absent.safetensors"}}, "cannot open"),
        ({"weights": {}}, "not an index"),
    ]:
        index.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=match):
            open_safetensors(index)
    with pytest.raises(CheckpointError, match="cannot open"):
        open_safetensors(tmp_path / "nowhere.safetensors")
