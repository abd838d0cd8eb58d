"""Datasets of the command line on a disk that is full."""

import shutil

import pytest
from disk_rig import MB, fill, rows, survives
from tensordict import TensorDict

from gleanrl.cli.dataset import Dataset, DatasetWriter
from gleanrl.memory.tensor_files import TensorFileError


def test_a_dataset_whose_disk_fills_up_is_whole(small_disk):
    disk = small_disk(4 * MB)

    def body():
        writer = DatasetWriter(disk / "data", 300)
        for first in range(0, 300, 10):
            writer.write(rows(first, 10), dict)
            if not first:
                fill(disk)
        writer.finish("complete", {})
        return writer.frames

    assert survives(body) == "300"
    dataset = Dataset(disk / "data")
    assert (dataset.metadata.status, dataset.metadata.frames) == ("complete", 300)
    assert dataset.read(("number",)).tolist() == list(range(300))
    assert TensorDict.load_memmap(disk / "data").shape == (300,)


def test_a_dataset_that_does_not_fit_is_refused_before_any_frame(small_disk, monkeypatch):
    disk = small_disk(MB)
    status = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: status)  # others take it meanwhile
    writer = DatasetWriter(disk / "data", 300)
    with pytest.raises(TensorFileError, match="cannot be reserved.*No space left"):
        writer.write(rows(0, 10), dict)
    writer.finish("failed", {})
    assert list(disk.iterdir()) == []
