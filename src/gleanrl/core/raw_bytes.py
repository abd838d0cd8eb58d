"""The memory of a tensor as bytes."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU; its memory stays the caller's."""
    # One element is contiguous whatever its strides are, which `view` alone would refuse.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
