"""Tensors in shared memory that stay shared with worker processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from gleanrl.memory.shared import FileAddress


def by_reference(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a function, and arguments, that make ``tensor`` over the same memory in a worker.

    ``None`` if it is not in shared memory that has a file descriptor (``share_memory_()``), or if
    it is more than memory: a leaf with gradients, quantized, nested or conjugate. This process has
    to keep the tensor until the worker has called the function.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        return None
    more = tensor.requires_grad, tensor.is_quantized, tensor.is_conj(), tensor.is_neg()
    if any(more) or not tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
        return None
    if get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]  # torch's
        return None
    file, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    if file < 0:  # a mapped file
        return None
    place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _mapped, (FileAddress.of(file), nbytes, *place)


def _mapped(
    address: FileAddress,
    nbytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return a tensor over the memory of the file at ``address``."""
    own = address.open()
    try:
        make: Any = torch.UntypedStorage
        storage = make._new_shared_fd_cpu(own, nbytes)  # as torch.multiprocessing does
    finally:
        os.close(own)
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(stride))
