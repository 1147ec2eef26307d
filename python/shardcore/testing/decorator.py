"""``@spmd``: a pytest test whose body runs on several ranks; ``run_spmd``: the same as a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from shardcore.testing.messages import FunctionRef, pickle_arguments
from shardcore.testing.pool import Run, SpmdSkip, shared_pool
from shardcore.testing.report import SpmdError

TIMEOUT_SECONDS = 60.0
"""Default time limit of one run on the ranks."""

GRACE_SECONDS = 15.0
"""Default time that the other ranks get after one rank failed."""


def run_spmd(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    init: bool = True,
    backend: str = "gloo",
    timeout: float = TIMEOUT_SECONDS,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world`` rank processes and return the results by rank.

    On each rank torch's default process group is initialised over ``backend`` on a fresh store, and ``RANK``,
    ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set. With
    ``init=False`` there is no process group (``torch.distributed.init_process_group`` works from the variables);
    at world 1 there are no variables either. Random seeds are 0 on every rank. Tensors travel as CPU copies.

    ``timeout`` limits the whole run and ``grace`` the time that the other ranks get once one has failed, in
    seconds; ranks still running then are reported with the Python stacks of all their threads.

    Raises ``SpmdError`` with every rank's part if any rank raises, dies or hangs; ``SpmdSkip`` if a rank called
    ``pytest.skip`` and none failed; ``TypeError`` for a function or an argument that cannot travel.
    """
    _check_world(world)
    run = Run(
        function=FunctionRef.of(getattr(function, "spmd_body", function)),
        arguments=pickle_arguments(args, kwargs or {}),
        world=world,
        backend=backend if init else None,
        timeout=timeout,
        grace=grace,
    )
    return shared_pool().run(run)


def spmd(
    world: int | Sequence[int],
    *,
    init: bool = True,
    backend: str = "gloo",
    timeout: float = TIMEOUT_SECONDS,
    grace: float = GRACE_SECONDS,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the body of a module-level pytest test on ``world`` ranks; options as in ``run_spmd``.

    A list of worlds parametrises the test. A body with a parameter ``world`` receives the number of ranks; other
    parameters are pytest's (parametrised values, fixtures) and go to every rank, so they must be picklable. The
    test passes if every rank returns, and is skipped if a rank calls ``pytest.skip``.

    >>> @spmd(world=[2, 4])
    ... def test_all_reduce(world):
    ...     x = torch.ones(3)
    ...     dist.all_reduce(x)
    ...     assert x[0] == world
    """
    worlds = [world] if isinstance(world, int) else list(world)
    for number in worlds:
        _check_world(number)

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        FunctionRef.of(body)  # refuses what ranks cannot find, at the place where it is written
        takes_world = "world" in inspect.signature(body).parameters

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            ranks = kwargs.pop("world", worlds[0])
            if takes_world:
                kwargs["world"] = ranks
            _run_test(body, ranks, kwargs, init=init, backend=backend, timeout=timeout, grace=grace)

        test.spmd_body = body  # type: ignore[attr-defined]
        return _as_pytest_test(test, body, worlds, parametrise=not isinstance(world, int))

    return decorate


def _run_test(body: Callable[..., Any], world: int, kwargs: dict[str, Any], **options: Any) -> None:
    try:
        run_spmd(body, world, kwargs=kwargs, **options)
    except SpmdSkip as skip:
        pytest.skip(str(skip))
    except SpmdError as error:
        failure = str(error)
    else:
        return
    pytest.fail(failure, pytrace=False)  # the ranks' traces are in the text; the harness's own says nothing


def _as_pytest_test(
    test: Callable[..., None], body: Callable[..., Any], worlds: list[int], *, parametrise: bool
) -> Callable[..., None]:
    """Give pytest the parameters it has to provide: the body's, and ``world`` exactly if it is parametrised."""
    signature = inspect.signature(body)
    parameters = [p for p in signature.parameters.values() if p.name != "world"]
    if parametrise:
        parameters.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
    test.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("world", worlds)(test) if parametrise else test


def _check_world(world: object) -> None:
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise ValueError(f"world is the number of ranks, an integer of at least 1; got {world!r}")
