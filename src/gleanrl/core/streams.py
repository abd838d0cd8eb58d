"""Random state that must not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved() -> Iterator[None]:
    """Leave torch, numpy and Python random state as they were, whatever the body draws.

    CUDA devices are included if they were in use before.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    cuda_states = torch.cuda.get_rng_state_all() if in_use else []
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if in_use:
            torch.cuda.set_rng_state_all(cuda_states)
