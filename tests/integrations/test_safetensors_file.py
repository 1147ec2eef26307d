"""Reading safetensors files: what its own library wrote, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardcore.errors import CheckpointError
from shardcore.integrations import open_safetensors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
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


def entry(start: int, stop: int, **fields: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]} | fields


def once_more(text: str) -> str:
    """The header of one tensor, in which what stands in the place of ``text`` stands twice."""
    return json.dumps({"__metadata__": {}, "a": entry(0, 4)}).replace(text, f"{text}, {text}")


ONE = entry(0, 4)
HEADERS: dict[str, tuple[object, int]] = {
    "one": ({"a": ONE}, 4),
    "out of order": ({"b": entry(4, 8), "a": ONE}, 8),
    "none": ({}, 0),
    "metadata": ({"__metadata__": {"a": "b"}, "a": ONE}, 4),
    "no metadata": ({"__metadata__": None, "a": ONE}, 4),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": ONE}, 4),
    "a list of metadata": ({"__metadata__": [], "a": ONE}, 4),
    "a field too many": ({"a": ONE | {"more": 1.5}}, 4),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, 4),
    "null": ({"a": None}, 0),
    "a list": ([], 0),
    "empty tensors between others": ({"b": ONE, "c": entry(4, 8), "a": entry(4, 4), "d": entry(8, 8)}, 8),
    "an empty tensor inside another": ({"b": ONE, "a": entry(2, 2)}, 4),
    "an empty tensor outside": ({"b": ONE, "a": entry(6, 6)}, 4),
    "the same bytes": ({"b": ONE, "a": ONE}, 4),
    "overlap": ({"b": ONE, "a": entry(3, 6)}, 6),
    "hole": ({"b": ONE, "a": entry(5, 6)}, 6),
    "a hole at the start": ({"a": entry(2, 4)}, 4),
    "a hole at the end": ({"a": ONE}, 5),
    "data of none": ({}, 3),
    "cut off": ({"a": ONE}, 3),
    "backwards": ({"a": entry(4, 0)}, 4),
    "fractions": ({"a": ONE | {"shape": [4.7]}}, 4),
    "a whole fraction": ({"a": ONE | {"shape": [4.0]}}, 4),
    "a bool": ({"a": entry(0, 1, shape=[True])}, 1),
    "text": ({"a": ONE | {"shape": "4"}}, 4),
    "two negative sizes": ({"a": ONE | {"shape": [-2, -2]}}, 4),
    "too large": ({"a": entry(0, 0, shape=[2**63, 2, 0])}, 0),
    "a size too large": ({"a": entry(0, 0, shape=[0, 2**64])}, 0),
    "large, but empty": ({"a": entry(0, 0, shape=[0, 2**63, 2])}, 0),
    "offsets of fractions": ({"a": ONE | {"data_offsets": [0.0, 4.0]}}, 4),
    "offsets of bools": ({"a": entry(0, 1, data_offsets=[False, True])}, 1),
    "three offsets": ({"a": ONE | {"data_offsets": [0, 4, 4]}}, 4),
    "one offset": ({"a": ONE | {"data_offsets": [4]}}, 4),
    "offsets of another kind": ({"a": entry(0, 4, data_offsets={"0": 0, "1": 4})}, 4),
    "a name twice": (once_more(json.dumps({"a": ONE})[1:-1]), 4),
    "a field twice": (once_more('"shape": [4]'), 4),
    "metadata twice": (once_more('"__metadata__": {}'), 4),
    "not a number": ('{"__metadata__": {"a": NaN}}', 0),
    "half a pair": ('{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', 0),
    "spaces around": ("  {}  ", 0),
    "another encoding": ('{"__metadata__": {}}'.encode("utf-16"), 0),
    "a mark of the encoding": ('{"__metadata__": {}}'.encode("utf-8-sig"), 0),
}


def write(path: Path, header: object, num_bytes: int) -> None:
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(num_bytes))


@pytest.mark.parametrize("case", HEADERS)
def test_what_its_own_library_takes_is_taken_and_nothing_else(case: str, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    write(path, *HEADERS[case])
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
    except SafetensorError:
        with pytest.raises(CheckpointError, match=r"some\.safetensors"):
            open_safetensors(path)
    else:
        assert open_safetensors(path).keys() == names


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("overlap", "tensor 'b' and tensor 'a' overlap"),
        ("hole", "1 bytes between tensor 'b' and tensor 'a' are no tensor's"),
        ("a hole at the end", "5 bytes of data; the tensors of its header take 4"),
        ("fractions", r"tensor 'a' .* shape \[4\.7\]; expected a list of integers >= 0"),
        ("offsets of fractions", r"tensor 'a' .* data_offsets \[0\.0, 4\.0\]; expected two integers"),
    ],
)
def test_the_error_names_the_tensors(case: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    write(path, *HEADERS[case])
    with pytest.raises(CheckpointError, match=match):
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
