"""Packed tensors: the kernel and torch's operations give the same bits, and sums over ranks keep their promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardcore as sc
from shardcore import comm
from shardcore.comm import quantized
from shardcore.errors import ConfigError
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, 3e38]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Numbers of many magnitudes, some special, in any dtype."""
    numel = draw(st.sampled_from([0, 1, 2, 127, 128, 255, 256, 257, 700]) | st.integers(0, 900))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=random) * 10.0 ** draw(st.integers(-38, 30))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)) if numel else []:
        values[draw(st.integers(0, numel - 1))] = value
    return values.to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=150, deadline=None)
@given(source=tensors(), bits=st.sampled_from([4, 8]), feeds_back=st.booleans(), add=st.booleans())
def test_torch_and_the_kernel_give_the_same_bits(source: torch.Tensor, bits: int, feeds_back: bool, add: bool) -> None:
    size = quantized.packed_nbytes(source.numel(), bits)
    random = torch.Generator().manual_seed(source.numel())
    start = torch.randn(source.shape, generator=random)
    residuals = [start.bfloat16() if feeds_back else None for _ in range(2)]
    packed = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    quantized.pack(source, packed[0], bits, residuals[0])
    codes, scales = quantized._views(packed[1], source.numel(), bits)
    quantized.quantize_by_torch(source, codes, scales, bits, residuals[1])
    assert_same_numbers(packed[0], packed[1], source.numel(), bits)
    assert_bitwise(residuals[0], residuals[1])
    for dtype in DTYPES:
        targets = [start.to(dtype) for _ in range(2)]
        quantized.unpack(packed[0], targets[0], bits, add=add)
        quantized.dequantize_by_torch(*quantized._views(packed[0], source.numel(), bits), targets[1], bits, add=add)
        assert_bitwise(targets[0].isnan(), targets[1].isnan())  # a NaN's own bits may differ
        assert_bitwise(targets[0].nan_to_num(0.0), targets[1].nan_to_num(0.0))


def assert_same_numbers(first: torch.Tensor, second: torch.Tensor, numel: int, bits: int) -> None:
    """The same codes, and the same scales; a NaN's own bits may differ."""
    (codes, scales), (other_codes, other_scales) = (quantized._views(p, numel, bits) for p in (first, second))
    assert_bitwise(codes, other_codes)
    assert_bitwise(scales.isnan(), other_scales.isnan())
    assert_bitwise(scales.nan_to_num(0.0), other_scales.nan_to_num(0.0))


@pytest.mark.parametrize("bits", [4, 8])
def test_errors_that_are_fed_back_do_not_add_up(bits: int) -> None:
    """The mean of many rounds comes as near to the number as one rounding, divided by their count."""
    value = torch.linspace(-1, 1, 256)
    packed = torch.zeros(quantized.packed_nbytes(256, bits), dtype=torch.uint8)
    residual, total = torch.zeros(256, dtype=torch.bfloat16), torch.zeros(256)
    for _ in range(64):
        quantized.pack(value, packed, bits, residual)
        quantized.unpack(packed, total, bits, add=True)
    step = 1 / (7 if bits == 4 else 127)
    assert float((total / 64 - value).abs().max()) < step / 32


def test_bytes_of_a_packed_tensor() -> None:
    for numel in (0, 1, 255, 256, 257, 4096):
        blocks = math.ceil(numel / 256)
        assert comm.packed_nbytes(numel, 8) == 4 * blocks + 4 * math.ceil(numel / 4)
        assert comm.packed_nbytes(numel, 4) == 4 * blocks + 4 * math.ceil(numel / 8)


@pytest.mark.parametrize("link", [True, False], ids=["linked", "gloo"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("hierarchical", [False, True])
@spmd(world=4)
def test_reduction_and_gather_of_codes(bits: int, hierarchical: bool, link: bool) -> None:
    """Whole multiples of the step travel exactly, so that sums are exact; bytes are payload and scales."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCORE_HOST_LINK", "1" if link else "0")
        mesh = sc.Mesh(device="cpu", ranks_per_node=2)
        split = mesh.split("shard", 2)
        axis = split.axis if hierarchical else mesh["shard"]
        coding = comm.Coding(reduce_bits=bits, gather_bits=8)
        route = comm.Route(axis, split if hierarchical else None, coding)
        row = torch.ones(512)
        row[0::256] = 7.0  # the largest of each block: a step is 1 in four bits, and ends on a code in eight
        full = (row * 2.0**axis.rank).repeat(4)
        comm.reset_traffic()
        route.reduce(full, "test").wait()
        own = full.view(4, -1)[axis.rank]
        rtol = 0.0 if bits == 4 and not hierarchical else 0.05
        torch.testing.assert_close(own, row * 15, rtol=rtol, atol=0)
        rows = [(1, 1024), (1, 512)] if hierarchical else [(3, 512)]
        assert comm.traffic()["swap"] == sum(count * comm.packed_nbytes(numel, bits) for count, numel in rows)
        whole = torch.zeros(2048)
        whole.view(4, -1)[axis.rank] = torch.arange(512.0) * (axis.rank + 1)
        route.gather(whole, "test", exact=True).wait()
        assert_bitwise(whole, torch.cat([torch.arange(512.0) * (i + 1) for i in range(4)]))
        comm.reset_traffic()
        route.gather(whole, "test", exact=False).wait()
        sent = comm.traffic()["gather"]
        assert sent == (1 + 2 * 1 if hierarchical else 3) * comm.packed_nbytes(512, 8)
        step = torch.cat([torch.arange(512.0).view(2, 256).amax(1) * (i + 1) / 127 for i in range(4)])
        error = (whole.view(8, 256) - torch.cat([torch.arange(512.0) * (i + 1) for i in range(4)]).view(8, 256)).abs()
        assert bool((error.amax(1) <= step * 0.501).all())


@pytest.mark.parametrize("bits", [4, 8])
@spmd(world=2)
def test_one_infinite_gradient_reaches_the_sum(bits: int) -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    full = torch.ones(2 * 512)
    if axis.rank == 0:
        full[512 + 300] = math.inf  # in the second block of the other rank's shard
    comm.Route(axis, None, comm.Coding(reduce_bits=bits)).reduce(full, "test").wait()
    own = full.view(2, -1)[axis.rank]
    assert bool(own[:256].isfinite().all())
    assert bool(own[256:].isfinite().all()) == (axis.rank == 0)


def test_tensors_that_the_kernel_cannot_take_are_refused() -> None:
    values, packed = torch.ones(256), torch.zeros(quantized.packed_nbytes(256, 8), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="float64"):
        quantized.pack(values.double(), packed, 8)
    with pytest.raises(ConfigError, match="share memory"):
        quantized.unpack(packed, packed[4:].view(torch.float32), 8)
    with pytest.raises(ConfigError, match="have"):
        quantized.pack(torch.ones(300), packed, 8)
    with pytest.raises(ValueError, match="expected 4 or 8"):
        quantized.pack(values, packed, 5)
