"""Whether recorded entries are values of an environment's spaces."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key
from gleanrl.envs.spaces import Actions
from gleanrl.memory.tensor_files import TensorFile


def decoder(
    space: gym.Space[Any], files: Mapping[Key, TensorFile], rows: int, *, batched: bool = False
) -> Actions | None:
    """Return what decodes ``rows`` recorded actions of ``space``, as numbers or one-hot vectors.

    Returns:
        ``None`` if the entries in ``files`` are no actions of this space.
    """
    for categorical in (True, False):
        with contextlib.suppress(ConfigError):
            actions = Actions(space, rows, categorical, batched=batched)
            if all(f.key in files and files[f.key].shape == f.shape for f in actions.fields):
                return actions
    return None
