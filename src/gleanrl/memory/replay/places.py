"""Between what users call an index and flat places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.samplers import stamps_of
from gleanrl.memory.replay.storages import Storage


def shown(storage: Storage, places: torch.Tensor, flat: bool = False) -> torch.Tensor:
    """Return places as users see them: ``[n]``, or ``[n, 2]`` (step, env) for 2-D storages.

    Args:
        storage: Whose places.
        places: Slots, or flat places if ``flat``.
        flat: What ``places`` are.
    """
    envs = storage.envs
    if storage.ndim == 1:
        return places
    if not flat:
        places = (places.unsqueeze(1) * envs + torch.arange(envs)).flatten()
    return torch.stack([places.div(envs, rounding_mode="floor"), places % envs], 1)


def flat_places(storage: Storage, index: Any) -> torch.Tensor:
    """Return flat places for an index as users see it.

    Raises:
        ConfigError: it has the wrong shape or dtype, or is outside the storage.
    """
    found = torch.as_tensor(index).detach().cpu()
    if found.dtype.is_floating_point or found.dtype == torch.bool:
        raise ConfigError(f"places are integers, not {found.dtype}")
    found = found.long()
    if storage.ndim == 2:
        if found.shape[-1:] != (2,):
            raise ConfigError(f"places in [env, time] storages are [n, 2], not {list(found.shape)}")
        found = found[..., 0] * storage.envs + found[..., 1]
    found = found.reshape(-1)
    frames = storage.ledger.slots * storage.envs
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= frames):
        raise ConfigError(f"places go from 0 to {frames - 1}, not {found}")
    return found


def stored(storage: Storage, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat places that ``index`` selects and their stamps.

    Raises:
        IndexError: there is no whole row.
    """
    if isinstance(index, slice):
        top = storage.ledger.top
        slots = np.flatnonzero(storage.ledger.stamps[:top] > 0)
        places = torch.from_numpy(slots)
        if storage.envs > 1:
            places = (places.unsqueeze(1) * storage.envs + torch.arange(storage.envs)).flatten()
        places = places[torch.arange(len(places))[index]]
        return places, stamps_of(storage, places)
    if isinstance(index, int) and index < 0:
        index += len(storage)
    places = flat_places(storage, index)
    seen = stamps_of(storage, places)
    if not bool((seen > 0).all()):
        raise IndexError(f"no row is stored at {places[seen <= 0].tolist()}")
    return places, seen
