"""Preallocated files: private to their owner, of fixed size, striped over folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.given import data, engines, names
from shardcore.errors import StorageError
from shardcore.offload import SwapFile

PAGE = 4096


def test_d4_files_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    for engine in engines():
        files = [SwapFile(engine, [tmp_path], nbytes) for nbytes in (10_000, 7_001, 10_000)]
        sent = [data(file.nbytes, seed) for seed, file in enumerate(files)]
        for _ in range(3):
            for file, tensor in zip(files, sent, strict=True):
                engine.write(file, tensor)
        for file, tensor in zip(files, sent, strict=True):
            received = torch.empty_like(tensor)
            engine.read(file, received).wait()
            assert torch.equal(received, tensor)


def test_d5_a_tensor_larger_than_any_buffer_is_cut_in_pieces(tmp_path: Path) -> None:
    for engine in engines(queue_depth=1):
        sent = torch.randn(2501)
        file = SwapFile(engine, [tmp_path], sent.nbytes)
        for start in range(0, 2501, 1000):
            engine.write(file, sent[start : start + 1000], start * 4)
        received = torch.empty_like(sent)
        engine.read(file, received).wait()
        assert torch.equal(received, sent)


@pytest.mark.parametrize("num_folders", [1, 2, 3])
def test_stripes_alternate_between_folders(num_folders: int, tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{index}" for index in range(num_folders)]
    for engine in engines():
        file = SwapFile(engine, folders, 100_001, stripe_nbytes=2 * PAGE)
        sent, received = data(90_000), torch.empty(90_000, dtype=torch.uint8)
        engine.write(file, sent, 10_001)
        engine.read(file, received, 10_001).wait()
        assert torch.equal(received, sent)
        head = torch.ones(10_001, dtype=torch.uint8)
        engine.read(file, head).wait()
        assert head.eq(0).all()
        assert [names(folder) for folder in folders] == [[]] * num_folders


def test_d3_nothing_is_left_after_a_clean_end(tmp_path: Path) -> None:
    for _ in range(2):
        for engine in engines():
            file = SwapFile(engine, [tmp_path / "made" / "here"], 5000)
            engine.write(file, data(5000)).wait()
            assert file.swept == []
        assert names(tmp_path / "made" / "here") == []


def test_bytes_outside_the_file_are_refused(tmp_path: Path) -> None:
    for engine in engines():
        file = SwapFile(engine, [tmp_path], 1000)
        with pytest.raises(StorageError, match=r"offset is 1: expected offset \+ 1000 bytes of data inside this swap"):
            engine.write(file, data(1000), 1)
        with pytest.raises(StorageError, match="nbytes is -1"):
            SwapFile(engine, [tmp_path], -1)
        with pytest.raises(StorageError, match="number of folders is 0"):
            SwapFile(engine, [], 10)
        with pytest.raises(StorageError, match="stripe_nbytes is 100: expected a multiple of"):
            SwapFile(engine, [tmp_path], 10, stripe_nbytes=100)
