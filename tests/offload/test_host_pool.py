"""Host memory: exact, aligned, alive as long as it is used, and refused with a sum where there is too little."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload.given import DTYPES, data, engines, python
from shardcore import offload
from shardcore.errors import StorageError
from shardcore.offload import HostPool, host_pool

MIB = 1 << 20


def resident_nbytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nbytes", [129 * MIB, 129 * MIB + 1, 129 * MIB - 1, 1, 4096, 4097])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_d6_a_pool_takes_what_it_is_asked_for(nbytes: int, huge_pages: bool) -> None:
    gc.collect()
    before = resident_nbytes()
    pool = HostPool(nbytes, huge_pages=huge_pages)
    grown = resident_nbytes() - before
    assert pool.nbytes == nbytes
    assert nbytes <= pool.committed_nbytes < nbytes + os.sysconf("SC_PAGE_SIZE")
    if nbytes > MIB:
        assert nbytes * 0.95 <= grown <= nbytes * 1.1, "committed when made, and not rounded up"
    tensor = pool.tensor(nbytes, torch.uint8)
    assert tensor.numel() == nbytes
    assert pool.taken_nbytes == nbytes


def test_memory_is_given_back_when_pool_and_tensors_are_gone() -> None:
    pool = HostPool(64 * MIB)
    tensor = pool.tensor(100, torch.int64)
    tensor.fill_(7)
    with_pool = resident_nbytes()
    del pool
    gc.collect()
    assert with_pool - resident_nbytes() < 32 * MIB
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    assert with_pool - resident_nbytes() > 60 * MIB


def test_tensors_of_every_dtype_lie_side_by_side() -> None:
    sizes = [(numel, dtype) for dtype in DTYPES for numel in (0, 1, 3, 1000)]
    pool = HostPool(HostPool.required(sizes))
    tensors = [pool.tensor(numel, dtype) for numel, dtype in sizes]
    assert pool.taken_nbytes == pool.nbytes
    for index, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 512 == 0 or tensor.numel() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a tensor drags no neighbour along"
        assert tensor.view(torch.uint8).eq(0).all()
        tensor.view(torch.uint8).fill_(index + 1)
    for index, tensor in enumerate(tensors):
        assert tensor.view(torch.uint8).eq(index + 1).all()


def test_a_full_pool_shows_the_sum() -> None:
    pool = HostPool(1000)
    pool.tensor(100, torch.float32)
    with pytest.raises(
        StorageError, match=r"1000 bytes has 400 bytes taken and 488 bytes left: 492 bytes .*4 bytes miss"
    ):
        pool.tensor(123, torch.float32)
    assert pool.tensor(122, torch.float32).numel() == 122
    with pytest.raises(StorageError, match="nbytes is -4"):
        pool.tensor(-1, torch.float32)


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    with pytest.raises(StorageError, match=r"a host pool needs 16384\.00 GiB .* available: .* missing") as raised:
        HostPool(1 << 44)
    assert raised.value.errno == 12
    with pytest.raises(StorageError, match="nbytes is -1"):
        HostPool(-1)


LOCKED = """
    import os, resource
    from shardcore._core import HostMemory
    from shardcore.errors import StorageError
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    if os.getuid() == 0:
        os.setuid(65534)  # root may lock whatever it likes
    HostMemory(1 << 19, lock=True)
    try:
        HostMemory(4 << 20, lock=True)
    except StorageError as error:
        print(error)
"""


def test_more_than_may_be_locked_is_refused_with_the_sum() -> None:
    done = python(LOCKED)
    assert "`ulimit -l` allows 1.00 MiB (1048576 bytes) of locked memory" in done.stdout, done.stderr
    assert "= 3.00 MiB (3145728 bytes) missing" in done.stdout


# ------------------------------------------------------------------------------------------------------------ pinning


class FakeCudart:
    """CUDA's run time, as far as pinning goes."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 (the name is of CUDA)
        assert flags == 0
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.calls.append(("register", address, nbytes))
        return self.outcome

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 (the name is of CUDA)
        self.calls.append(("unregister", address, 0))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | Exception], FakeCudart]:
    def install(outcome: int | Exception) -> FakeCudart:
        fake = FakeCudart(outcome)
        stand_in = SimpleNamespace(is_available=lambda: True, cudart=lambda: fake)
        monkeypatch.setattr(torch, "cuda", stand_in)
        host_pool._warn_unpinned.cache_clear()
        return fake

    return install


def test_a_pool_is_registered_with_cuda_as_long_as_it_lives(cuda: Callable[[int], FakeCudart]) -> None:
    fake = cuda(0)
    pool = HostPool(5000)
    assert pool.pinned
    ((_, address, nbytes),) = fake.calls
    assert nbytes == 8192
    tensor = pool.tensor(5000, torch.uint8)
    assert tensor.data_ptr() == address
    del pool
    gc.collect()
    assert len(fake.calls) == 1
    del tensor
    gc.collect()
    assert fake.calls[1:] == [("unregister", address, 0)]


@pytest.mark.parametrize("outcome", [2, RuntimeError("no driver")], ids=["status", "exception"])
def test_d17_where_pinning_fails_the_memory_serves_with_one_warning(
    outcome: int | Exception, cuda: Callable[[int | Exception], FakeCudart], caplog: pytest.LogCaptureFixture
) -> None:
    cuda(outcome)
    with caplog.at_level(logging.WARNING, "shardcore"):
        pools = [HostPool(5000) for _ in range(3)]
    assert not any(pool.pinned for pool in pools)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ("no driver" if isinstance(outcome, Exception) else "returned 2") in caplog.text
    assert pools[0].tensor(5, torch.float32).eq(0).all()


def test_without_cuda_or_without_the_wish_nothing_is_pinned(cuda: Callable[[int], FakeCudart]) -> None:
    fake = cuda(0)
    assert not HostPool(5000, pin=False).pinned
    assert not HostPool(0).pinned
    assert fake.calls == []


# ------------------------------------------------------------------------------------------------------ with an engine


def test_registered_pools_move_the_same_bytes(tmp_path: Path) -> None:
    for engine in engines(block_nbytes=1 << 16):
        pool = HostPool(HostPool.required([(300_001, torch.uint8)] * 2))
        sent, received = pool.tensor(300_001, torch.uint8), pool.tensor(300_001, torch.uint8)
        assert pool.register(engine) == (engine.backend == "io_uring")
        sent.copy_(data(300_001))
        engine.write(tmp_path / "file", sent, 5)
        engine.read(tmp_path / "file", received, 5).wait()
        assert torch.equal(received, sent)


REFUSED = """
    import os, resource
    from shardcore._core import HostMemory, IoEngine
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    if os.getuid() == 0:
        os.setuid(65534)
    with IoEngine(queue_depth=8) as engine:
        print(engine.backend, engine.register(HostMemory(8 << 20)))
"""


def test_registration_that_ulimit_forbids_is_done_without() -> None:
    done = python(REFUSED)
    assert done.stdout.split() in (["io_uring", "False"], ["threads", "False"]), done.stderr


def test_the_door_holds_what_the_contract_names() -> None:
    assert {"HostPool", "IoEngine", "IoHandle", "Offload", "SwapFile"} <= set(offload.__all__)
