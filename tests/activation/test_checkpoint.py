"""``activation.checkpoint`` gives what the plain call gives, to the last bit, whatever goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardcore as sc
from activation.blocks import Block, results, seeded
from shardcore import protocols
from shardcore.activation import checkpoint
from shardcore.errors import ConfigError
from shardcore.testing.twin import assert_bitwise

OFFLOADS = [None, "cpu"]


class Scales(NamedTuple):
    """A named tuple among the arguments."""

    first: torch.Tensor
    second: float | None


def odd_arguments(
    x: torch.Tensor,
    nothing: None,
    flag: bool,
    count: int,
    tiny: torch.Tensor,
    *,
    options: dict[str, Any],
    scales: Scales,
) -> dict[str, Any]:
    y = F.dropout(x * tiny, 0.5) if flag and nothing is None else x
    for extra in options["extras"]:
        y = y + extra * count
    return {"y": (y * scales.first, None, count), "more": [torch.tanh(y), Scales(y.sin(), scales.second)]}


def call_oddly(run: Callable[..., Any], weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        output = run(
            odd_arguments, y, None, True, 3, weight[0, :1], options={"extras": [weight.sum(0), 2.0], "name": "a"},
            scales=Scales(y.cos(), None),
        )  # fmt: skip
        assert output["y"][1:] == (None, 3)
        assert isinstance(output["more"][1], Scales)
        return output["y"][0] + output["more"][0] * output["more"][1].first

    return call


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_any_arguments_and_outputs(offload: str | None) -> None:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def recomputed(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(fn, *args, offload=offload, **kwargs)

    expected = results(call_oddly(plainly, weight), [weight], 3, 4)
    assert_bitwise(results(call_oddly(recomputed, weight), [weight], 3, 4), expected)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strides", ["transposed", "expanded", "sliced", "scalar", "empty"])
def test_inputs_of_any_strides(strides: str, offload: str | None) -> None:
    def call(run: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = {
                "transposed": lambda: x.t(),
                "expanded": lambda: x[:1].expand(3, 4),
                "sliced": lambda: x[:, ::2],
                "scalar": lambda: x.sum(),
                "empty": lambda: x[:0],
            }[strides]()
            strides_seen.append(y.stride())
            return run(lambda z: strides_seen.append(z.stride()) or (z.exp() * z).sin().sum(), y)

        return inner

    strides_seen: list[tuple[int, ...]] = []
    expected = results(call(plainly), [], 3, 4)
    assert_bitwise(results(call(lambda fn, y: checkpoint(fn, y, offload=offload)), [], 3, 4), expected)
    assert len(set(strides_seen)) == 1


@pytest.mark.parametrize("offload", OFFLOADS)
def test_n8_dropout_is_repeated_under_autocast(offload: str | None) -> None:
    block = seeded(lambda: nn.Sequential(Block(), Block()))

    def call(x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(block[1], run(block[0], x)).float()

    params = list(block.parameters())
    expected = results(lambda x: call(x, plainly), params, 4, 7)
    assert_bitwise(results(lambda x: call(x, lambda m, y: checkpoint(m, y, offload=offload)), params, 4, 7), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_16_bit_blocks(dtype: torch.dtype) -> None:
    block = seeded(Block).to(dtype)

    def call(x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
        return run(block, x.to(dtype)).float()

    params = list(block.parameters())
    expected = results(lambda x: call(x, plainly), params, 4, 7)
    for offload in OFFLOADS:

        def recomputed(m: nn.Module, y: torch.Tensor, offload: str | None = offload) -> Any:
            return checkpoint(m, y, offload=offload)

        assert_bitwise(results(lambda x: call(x, recomputed), params, 4, 7), expected)


@pytest.fixture
def own_generator() -> Iterator[torch.Generator]:
    """A generator beside torch's default ones, registered for recomputation."""
    generator = torch.Generator().manual_seed(7)
    protocols.register_random_source(generator)
    yield generator
    protocols.random_sources().remove(generator)  # type: ignore[attr-defined]


def test_registered_generators_are_repeated(own_generator: torch.Generator) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=own_generator)
        return (x * noise).tanh() * torch.rand(x.shape)

    found = []
    for run in (plainly, checkpoint):
        own_generator.manual_seed(7)
        found.append([*results(lambda x, run=run: run(noisy, run(noisy, x)), [], 3, 4), own_generator.get_state()])
    assert_bitwise(found[1], found[0])


def test_the_callers_containers_change_once() -> None:
    """A list to which the function appends (a block's hidden states, say) gets one entry."""
    collected: list[torch.Tensor] = []

    def collecting(x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        into.append(x.exp())
        return into[-1] * x

    x = torch.ones(3, requires_grad=True)
    (checkpoint(collecting, x, collected).sum() + collected[0].sum()).backward()
    assert len(collected) == 1
    torch.testing.assert_close(x.grad, 3 * torch.ones(3).exp())


@pytest.mark.parametrize("offload", OFFLOADS)
def test_two_backwards_through_one_graph(offload: str | None) -> None:
    block = seeded(Block)
    x = torch.randn(4, 7, requires_grad=True)
    torch.manual_seed(1)
    once = torch.autograd.grad(block(x).sum(), x)[0]
    torch.manual_seed(1)
    loss = checkpoint(block, x, offload=offload).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_bitwise(x.grad, 2 * once)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_regions_inside_regions(offload: str | None) -> None:
    first, second = seeded(lambda: nn.ModuleList([Block(), Block()]))

    def nested(run: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: run(lambda y: run(second, run(first, y)), x)

    params = [*first.parameters(), *second.parameters()]
    expected = results(nested(plainly), params, 4, 7)
    assert_bitwise(results(nested(lambda fn, y: checkpoint(fn, y, offload=offload)), params, 4, 7), expected)


def test_e11_integer_inputs() -> None:
    embedding = seeded(lambda: nn.Embedding(9, 4))
    tokens = torch.tensor([[1, 2, 2], [8, 0, 1]])
    embedding(tokens).square().sum().backward()
    expected, embedding.weight.grad = embedding.weight.grad, None
    checkpoint(embedding, tokens).square().sum().backward()
    assert_bitwise(embedding.weight.grad, expected)


def test_without_gradients_the_function_is_called_as_it_is() -> None:
    kept = torch.ones(2)
    with torch.no_grad():
        assert checkpoint(lambda x: x, kept) is kept


def test_an_exception_in_the_function_comes_out() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        checkpoint(fails, torch.ones(2, requires_grad=True))
    assert not sc.activation.is_inside()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "disk"}, "offload='disk': expected None or 'cpu'"),
        ({"use_reentrant": False}, "use_reentrant.*remove it"),
        ({"preserve_rng_state": True}, "preserve_rng_state.*remove it"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), **options)


def test_an_input_written_in_place_is_an_error_in_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    loss = checkpoint(torch.exp, y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
