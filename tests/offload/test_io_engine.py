"""Tensors to disk and back: every dtype, size, offset and view, on both back ends."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given as random_case
from hypothesis import settings
from hypothesis import strategies as st

from offload.given import BACKENDS, DTYPES, data, engines, python
from shardcore import offload
from shardcore.errors import ConfigError, StorageError


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, direct: str, tmp_path: Path) -> None:
    for engine in engines(direct=direct):
        for numel in (0, 1, 7, 1021, 5000):
            nbytes = numel * dtype.itemsize
            sent = (
                (data(nbytes) & (1 if dtype == torch.bool else 255)).view(dtype)
                if numel
                else torch.empty(0, dtype=dtype)
            )
            engine.write(tmp_path / "file", sent, offset=3).wait()
            received = torch.empty(numel, dtype=dtype)
            engine.read(tmp_path / "file", received, offset=3).wait()
            assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@random_case(
    pieces=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 30_000), st.integers(0, 5)), max_size=12),
    backend=st.sampled_from(BACKENDS),
)
def test_requests_in_flight_equal_requests_one_by_one(
    pieces: list[tuple[int, int, int]], backend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("io") / "file"
    model = data(60_000)
    with offload.IoEngine(backend=backend, queue_depth=3, block_nbytes=8192) as engine:
        engine.write(path, model.clone()).wait()
        for seed, (offset, nbytes, misaligned) in enumerate(pieces):
            sent = data(nbytes + misaligned, seed)[misaligned:]
            model[offset : offset + nbytes] = sent
            engine.write(path, sent, offset)
        received = torch.empty_like(model)
        engine.read(path, received).wait()
        assert torch.equal(received, model)
    assert path.read_bytes() == model.numpy().tobytes()


def test_views_and_shapes(tmp_path: Path) -> None:
    whole = torch.arange(1000.0).view(10, 100)
    for engine in engines():
        engine.write(tmp_path / "rows", whole[3:7])
        received = torch.zeros(10, 100)
        engine.read(tmp_path / "rows", received[3:7]).wait()
        assert torch.equal(received[3:7], whole[3:7])
        assert received[:3].eq(0).all()
        assert received[7:].eq(0).all()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(1).expand(4), "not contiguous"),
        (torch.zeros(4, device="meta"), "device meta"),
        (torch.zeros(4).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "lazy conjugate"),
    ],
    ids=["transposed", "expanded", "meta", "sparse", "conjugate"],
)
def test_a_tensor_that_is_no_row_of_bytes_is_refused(tensor: torch.Tensor, reason: str, tmp_path: Path) -> None:
    for engine in engines():
        for call in (engine.write, engine.read):
            with pytest.raises(StorageError, match=reason):
                call(tmp_path / "file", tensor)


def test_released_memory_is_refused(tmp_path: Path) -> None:
    released = torch.zeros(100)
    released.untyped_storage().resize_(0)
    for engine in engines():
        with pytest.raises(StorageError, match="its storage holds 0 bytes and it needs 400"):
            engine.write(tmp_path / "file", released)


def test_what_is_no_tensor_or_path_is_a_type_error(tmp_path: Path) -> None:
    for engine in engines():
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got <class 'list'>"):
            engine.write(tmp_path / "file", [1.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            engine.write(7, torch.zeros(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [-1, 2**63, 2**100])
def test_an_offset_out_of_range_is_refused(offset: int, tmp_path: Path) -> None:
    for engine in engines():
        with pytest.raises((StorageError, OverflowError), match=r"offset|int"):
            engine.write(tmp_path / "file", torch.zeros(1), offset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_depth": 0}, "queue_depth is 0: expected 1 to 4096 transfers at once"),
        ({"queue_depth": -1}, "queue_depth is -1: expected 1 to 4096 transfers at once"),
        ({"block_nbytes": 1000}, r"block_nbytes is 1000: expected a multiple of \d+ bytes"),
        ({"backend": "iouring"}, 'backend is "iouring": expected "auto", "io_uring" or "threads"'),
        ({"direct": "yes"}, 'direct is "yes": expected "auto", "on" or "off"'),
    ],
)
def test_a_setting_out_of_range_is_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offload.IoEngine(**options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- lifetime


def test_a_dropped_tensor_lives_until_its_request_has_ended(tmp_path: Path) -> None:
    for engine in engines():
        sent = data(1_000_000)
        expected, gone = sent.numpy().tobytes(), weakref.ref(sent)
        handle = engine.write(tmp_path / "file", sent)
        del sent
        handle.wait()
        gc.collect()
        assert (tmp_path / "file").read_bytes() == expected
        assert gone() is None, "a finished request holds no tensor"


def test_an_engine_that_goes_away_finishes_its_requests(tmp_path: Path) -> None:
    for backend in BACKENDS:
        engine = offload.IoEngine(backend=backend)
        sent = data(3_000_001)
        engine.write(tmp_path / "file", sent)
        del engine
        gc.collect()
        assert (tmp_path / "file").read_bytes() == sent.numpy().tobytes()


def test_autograd_notices_that_values_change(tmp_path: Path) -> None:
    for engine in engines():
        weight = torch.ones(3, requires_grad=True)
        engine.write(tmp_path / "file", torch.zeros(3)).wait()
        loss = (weight * weight).sum()
        engine.read(tmp_path / "file", weight).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            inference = torch.ones(3)
        engine.read(tmp_path / "file", inference).wait()
        assert inference.eq(0).all()


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    for backend in BACKENDS:
        engine = offload.IoEngine(backend=backend)
        handle = engine.write(tmp_path / "file", torch.ones(5))
        engine.close()
        engine.close()
        assert handle.done()
        handle.wait()
        with pytest.raises(StorageError, match="closed"):
            engine.write(tmp_path / "file", torch.ones(5))


def test_an_error_that_nobody_waited_for_is_raised_by_close(tmp_path: Path) -> None:
    for backend in BACKENDS:
        with pytest.raises(StorageError, match="No such file"), offload.IoEngine(backend=backend) as engine:
            engine.write(tmp_path / "no" / "file", torch.ones(5))


def test_an_error_under_way_is_not_replaced(tmp_path: Path) -> None:
    for backend in BACKENDS:
        with pytest.raises(KeyError) as raised, offload.IoEngine(backend=backend) as engine:  # noqa: PT012  as a user would
            engine.read(tmp_path / "none", torch.ones(5))
            raise KeyError("the first")
        assert "No such file" in raised.value.__notes__[0]


def test_threads_share_an_engine(tmp_path: Path) -> None:
    for engine in engines():
        failures: list[BaseException] = []

        def work(index: int, engine: offload.IoEngine = engine, failures: list[BaseException] = failures) -> None:
            try:
                for step in range(20):
                    sent, received = data(9_999, index * 100 + step), torch.empty(9_999, dtype=torch.uint8)
                    engine.write(tmp_path / "shared", sent, index * 9_999)
                    engine.read(tmp_path / "shared", received, index * 9_999).wait()
                    assert torch.equal(received, sent)
            except BaseException as error:  # noqa: BLE001 (told to the test)
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_thousands_of_requests_on_thousands_of_files(tmp_path: Path) -> None:
    for engine in engines():
        sent = [torch.full((3,), float(index)) for index in range(2500)]
        for index, tensor in enumerate(sent):
            engine.write(tmp_path / f"{index}", tensor)
        received = [torch.empty(3) for _ in sent]
        for handle in [engine.read(tmp_path / f"{index}", tensor) for index, tensor in enumerate(received)]:
            handle.wait()
        assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


# ------------------------------------------------------------------------------------------------------------ waiting


def test_other_python_threads_run_while_one_waits(tmp_path: Path) -> None:
    for engine in engines(block_nbytes=1 << 20):
        count, stop = [0], threading.Event()

        def spin(count: list[int] = count, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                count[0] += 1

        thread = threading.Thread(target=spin)
        thread.start()
        sent = torch.zeros(64 << 20, dtype=torch.uint8)
        before = count[0]
        engine.write(tmp_path / "file", sent).wait()
        during = count[0] - before
        stop.set()
        thread.join()
        assert during > 1000


INTERRUPTED = """
    import os, signal, sys, threading, time, torch
    from shardcore import offload
    tensor = torch.ones(100 << 20, dtype=torch.uint8)
    engines = [offload.IoEngine(backend=name, queue_depth=1, block_nbytes=4096) for name in ("io_uring", "threads")]
    for engine in engines:
        handle = engine.write(sys.argv[1] + engine.backend, tensor)
        for wait in (handle.wait, engine.close):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            start = time.monotonic()
            try:
                wait()
            except KeyboardInterrupt:
                print("interrupted", handle.done(), time.monotonic() - start < 2)
    os._exit(0)
"""


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    done = python(INTERRUPTED, tmp_path / "file")
    assert done.stdout.splitlines() == ["interrupted False True"] * 4, done.stderr


FORKED = """
    import os, sys, torch
    from shardcore import offload
    from shardcore.errors import StorageError

    def is_refused(call):
        try:
            call()
        except StorageError as error:
            return f"this is process {os.getpid()}" in str(error)

    tensor = torch.ones(50 << 20, dtype=torch.uint8)
    for backend in ("io_uring", "threads"):
        path = sys.argv[1] + backend
        engine = offload.IoEngine(backend=backend, queue_depth=1, block_nbytes=4096)
        handle = engine.write(path, tensor)
        child = os.fork()
        if child == 0:
            refused = map(is_refused, (lambda: engine.write(path, tensor), handle.wait, engine.close))
            refused = all(refused)
            del engine  # neither waits nor joins: the threads are the parent's
            with offload.IoEngine(backend=backend) as own:
                own.write(path + ".child", torch.ones(3)).wait()
            os._exit(0 if refused else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        handle.wait()
        engine.close()
        print(status, os.path.getsize(path), os.path.getsize(path + ".child"))
"""


def test_a_forked_child_is_told_and_makes_its_own(tmp_path: Path) -> None:
    done = python(FORKED, tmp_path / "file")
    assert done.stdout.splitlines() == [f"0 {50 << 20} 12"] * 2, (done.stdout, done.stderr)


UNFINISHED = """
    import sys, torch
    from shardcore import offload
    engines = [offload.IoEngine(backend=name, queue_depth=2, block_nbytes=4096) for name in ("io_uring", "threads")]
    for engine in engines:
        engine.write(sys.argv[1] + engine.backend, torch.ones(20 << 20, dtype=torch.uint8))
"""


def test_a_program_that_ends_without_waiting_ends(tmp_path: Path) -> None:
    done = python(UNFINISHED, tmp_path / "file")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_thread_before_the_first_engine_and_none_after_the_last() -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_threads()
    engine = offload.IoEngine(backend="threads")
    assert num_threads() == before
    engine.close()
    engine = offload.IoEngine(backend="io_uring")
    assert num_threads() == before + 1
    engine.close()
    deadline = time.monotonic() + 5
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
