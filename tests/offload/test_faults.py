"""Real faults on both back ends: exact data, or an error that names the file; no wrong byte, no hang, no leftover."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from offload.disks import MIB, mounted
from offload.given import data, engines, names, python
from shardcore import offload
from shardcore.errors import StorageError


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_full_disk_is_an_error_and_room_makes_it_work_again(kind: str, direct: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path / "small", 12) as disk:
        for engine in engines(direct=direct, block_nbytes=MIB):
            large, small = data(20 * MIB), data(3 * MIB + 5)
            with pytest.raises(StorageError, match=r"No space left.*free space there") as raised:
                engine.write(disk / "file", large).wait()
            assert raised.value.errno == errno.ENOSPC
            assert raised.value.filename == str(disk / "file")
            # Blocks are written side by side, so any of them may be the one that found no room.
            assert 0 <= raised.value.offset < large.numel()
            (disk / "file").unlink()
            engine.write(disk / "file", small).wait()
            assert (disk / "file").read_bytes() == small.numpy().tobytes()
            (disk / "file").unlink()


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_swap_file_shows_a_full_disk_at_the_start_and_keeps_its_room(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path / "small", 12) as disk:
        for engine in engines(block_nbytes=MIB):
            with pytest.raises(StorageError, match=r"has room for \d+ bytes and 20971520 are needed there") as raised:
                offload.SwapFile(engine, [disk], 20 * MIB)
            assert raised.value.errno == errno.ENOSPC
            swap = offload.SwapFile(engine, [disk], 4 * MIB)
            with pytest.raises(StorageError, match="No space left"):
                engine.write(disk / "fill", data(20 * MIB)).wait()
            sent, received = data(4 * MIB, 1), torch.empty(4 * MIB, dtype=torch.uint8)
            engine.write(swap, sent).wait()
            engine.read(swap, received).wait()
            assert torch.equal(received, sent)
            (disk / "fill").unlink()
            del swap
            assert [name for name in names(disk) if name != "lost+found"] == []


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path / "failing", 12) as disk:
        sent = data(4 * MIB)
        for engine in engines(block_nbytes=MIB, direct="on"):
            engine.write(disk / "file", sent).wait()
        subprocess.run(["sync", "-f", disk], check=True)
        os.truncate(tmp_path / "failing.img", 256 << 10)
        for engine in engines(block_nbytes=MIB, direct="on"):
            received = torch.empty_like(sent)
            with pytest.raises(StorageError, match=r"Input/output error.*dmesg") as raised:
                engine.read(disk / "file", received).wait()
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(disk / "file"))
        os.truncate(tmp_path / "failing.img", 12 * MIB)


def test_an_unreadable_file_is_an_error() -> None:
    for engine in engines():
        with pytest.raises(StorageError, match="cannot read /proc/self/mem at byte 0: Input/output error") as raised:
            engine.read("/proc/self/mem", torch.empty(8)).wait()
        assert (raised.value.errno, raised.value.filename, raised.value.offset) == (errno.EIO, "/proc/self/mem", 0)


def test_a_read_only_disk_is_read_and_not_written(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path / "small", 12) as disk:
        sent = data(100_001)
        (disk / "file").write_bytes(sent.numpy().tobytes())
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for engine in engines():
            received = torch.empty_like(sent)
            engine.read(disk / "file", received).wait()
            assert torch.equal(received, sent)
            for path in (disk / "file", disk / "new"):
                with pytest.raises(StorageError, match="Read-only file system") as raised:
                    engine.write(path, sent).wait()
                assert (raised.value.errno, raised.value.filename) == (errno.EROFS, str(path))
            with pytest.raises(StorageError, match="Read-only file system"):
                offload.SwapFile(engine, [disk], 4096)


def test_a_truncated_file_is_an_error_that_says_where_it_ends(tmp_path: Path) -> None:
    sent = data(100_000)
    for engine in engines():
        engine.write(tmp_path / "file", sent).wait()
        for end in (0, 1, 4096, 50_000, 99_999):
            os.truncate(tmp_path / "file", end)
            with pytest.raises(StorageError, match=r"the file ends at byte \d+; it is shorter") as raised:
                engine.read(tmp_path / "file", torch.empty_like(sent)).wait()
            assert raised.value.offset == end
            engine.write(tmp_path / "file", sent).wait()


def test_a_file_truncated_under_a_read_gives_the_data_or_an_error(tmp_path: Path) -> None:
    sent = data(4 * MIB)
    for engine in engines():
        for end in range(0, 4 * MIB, 700_001):
            (tmp_path / "file").write_bytes(sent.numpy().tobytes())
            received = torch.empty_like(sent)
            handle = engine.read(tmp_path / "file", received)
            os.truncate(tmp_path / "file", end)
            try:
                handle.wait()
            except StorageError as error:
                assert error.errno == errno.ENODATA  # noqa: PT017 (both outcomes are right)
            else:
                assert torch.equal(received, sent)


def test_a_removed_folder_is_an_error_and_a_swap_file_in_it_still_works(tmp_path: Path) -> None:
    sent = data(3 * MIB)
    for engine in engines(block_nbytes=MIB):
        folder = tmp_path / "folder"
        swap = offload.SwapFile(engine, [folder], 3 * MIB)
        under_way = engine.write(folder / "file", sent)
        shutil.rmtree(folder)
        under_way.wait()
        for call in (engine.write, engine.read):
            with pytest.raises(StorageError, match=r"No such file.*was removed") as raised:
                call(folder / "file", sent).wait()
            assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(folder / "file"))
        engine.write(swap, sent)
        received = torch.empty_like(sent)
        engine.read(swap, received).wait()
        assert torch.equal(received, sent)


def test_a_replaced_file_is_not_mistaken_for_the_old_one(tmp_path: Path) -> None:
    for engine in engines():
        old, new, received = data(50_000, 1), data(50_000, 2), torch.empty(50_000, dtype=torch.uint8)
        kept = engine.write(tmp_path / "file", old)
        kept.wait()
        (tmp_path / "other").write_bytes(new.numpy().tobytes())
        (tmp_path / "other").rename(tmp_path / "file")
        engine.read(tmp_path / "file", received).wait()
        assert torch.equal(received, new)


# --------------------------------------------------------------------------------------------- limits of the process

LIMITED = """
    import resource, sys, torch
    from pathlib import Path
    from shardcore import offload
    from shardcore.errors import StorageError
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    for backend in ("io_uring", "threads"):
        folder = Path(sys.argv[1]) / backend
        folder.mkdir()
        with offload.IoEngine(backend=backend) as engine:
            handles = [engine.write(folder / str(index), torch.full((2,), index)) for index in range(300)]
            for handle in handles:
                handle.wait()
            sizes = {(folder / str(index)).stat().st_size for index in range(300)}
            try:
                engine.write(folder / "large", torch.ones(100_000)).wait()
            except StorageError as error:
                print(sizes, error.errno, "ulimit -f" in str(error))
"""


def test_limits_of_the_process_are_kept_or_named(tmp_path: Path) -> None:
    done = python(LIMITED, tmp_path)
    assert done.stdout.splitlines() == [f"{{16}} {errno.EFBIG} True"] * 2, done.stderr


FORBIDDEN = """
    import ctypes, struct, sys, torch
    from shardcore import offload
    from shardcore.errors import StorageError
    # A seccomp filter, as containers have one: io_uring_setup (number 425) fails with EPERM.
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, program, 0, 0) != 0:
        sys.exit("no seccomp here")
    with offload.IoEngine() as engine:
        engine.write(sys.argv[1], torch.arange(5000)).wait()
        received = torch.empty(5000, dtype=torch.int64)
        engine.read(sys.argv[1], received).wait()
        print(engine.backend, torch.equal(received, torch.arange(5000)))
    try:
        offload.IoEngine(backend="io_uring")
    except StorageError as error:
        print(error.errno, error)
"""


def test_where_io_uring_is_forbidden_threads_do_the_work(tmp_path: Path) -> None:
    done = python(FORBIDDEN, tmp_path / "file")
    if "no seccomp here" in done.stderr:
        pytest.skip("this kernel filters no system calls")
    lines = done.stdout.splitlines()
    assert lines[0] == "threads True", done.stderr
    assert lines[1].startswith(f"{errno.EPERM} io_uring is refused here: Operation not permitted")


# ------------------------------------------------------------------------------------------------------------ kill -9

BUSY = """
    import sys, torch
    from shardcore import offload
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    engines = [offload.IoEngine(backend=name, block_nbytes=4096) for name in ("io_uring", "threads")]
    files = [offload.SwapFile(engine, [sys.argv[1]], tensor.nbytes) for engine in engines]
    while True:
        handles = [engine.write(file, tensor) for engine, file in zip(engines, files)]
        print("writing", flush=True)
        for handle in handles:
            handle.wait()
"""


def test_d3_a_killed_process_leaves_nothing_and_its_folder_serves_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    command = [sys.executable, "-c", textwrap.dedent(BUSY), folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert names(folder) == []
    for engine in engines():
        # Killed between making a file and taking its name away.
        left = folder / f"shardcore-{process.pid}-1234-0.swap"
        left.write_bytes(b"left behind")
        swap = offload.SwapFile(engine, [folder], MIB)
        assert swap.swept == [left]
        sent, received = data(MIB), torch.empty(MIB, dtype=torch.uint8)
        engine.write(swap, sent)
        engine.read(swap, received).wait()
        assert torch.equal(received, sent)
    assert names(folder) == []
