"""What an environment declares of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gleanrl.core.keys import Key
from gleanrl.envs.specs import Binary, Composite
from gleanrl.envs.tensordict_layout import EndFlags, is_spec_group

_FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True, slots=True)
class EnvSpecs:
    """What an environment shows, is told and returns; all with the batch dimensions in front."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite
    state: Composite = field(default_factory=Composite)
    """What it is told besides actions."""

    def to(self, device: torch.device) -> EnvSpecs:
        """Return the same specs on another device."""
        trees = (self.observation, self.action, self.reward, self.done, self.state)
        return EnvSpecs(*(tree.to(device) for tree in trees))


class Declared:
    """What an environment declares of its data, on the device where they are wanted."""

    def __init__(
        self,
        specs: EnvSpecs,
        batch: tuple[int, ...],
        device: torch.device | str | None,
        locked: bool = True,
    ) -> None:
        """Describe a batch of shape ``batch``; data may be of another size unless ``locked``."""
        self.batch_size = torch.Size(batch)
        self.device = None if device is None else torch.device(device)
        self.specs = specs if self.device is None else specs.to(self.device)
        self._locked = locked
        self.ends = EndFlags(specs.done, batch, locked)
        self.silent: tuple[Key, ...] = ()
        """Flags that were declared by `add_truncated` and are never set."""

    def to(self, device: torch.device | str) -> None:
        """Move the specs."""
        self.device = torch.device(device)
        self.specs = self.specs.to(self.device)

    def add_truncated(self) -> None:
        """Declare ``"truncated"`` beside every ``"done"`` that lacks it."""
        done = self.specs.done.clone()
        added = [(*group.prefix, "truncated") for group in self.ends.groups if not group.truncated]
        for key in added:
            shape = done[(*key[:-1], "done")].shape
            done.set(key, Binary(shape=shape, dtype=torch.bool, device=self.device))
        self.specs = replace(self.specs, done=done)
        self.ends = EndFlags(self.specs.done, tuple(self.batch_size), self._locked)
        self.silent += tuple(added)


def widened(tree: Any, extra: Sequence[int] = ()) -> Composite:
    """Return nested specs, TorchRL's or ours, with dimensions ``extra`` in front."""
    specs = {
        name: widened(item, extra)
        if is_spec_group(item)
        else (item.expand(*extra, *item.shape) if extra else item)
        for name, item in tree.items()
        if item is not None
    }
    return Composite(specs, shape=(*extra, *tree.shape))


def with_all_flags(done: Composite) -> Composite:
    """Return specs of end flags with ``"done"`` and ``"terminated"`` wherever there is any flag."""
    whole = done.clone()
    prefixes = {key[:-1]: key for key in done.leaves() if key[-1] in _FLAGS}
    for prefix, key in prefixes.items():
        for name in ("done", "terminated"):
            if (*prefix, name) not in whole:
                whole.set((*prefix, name), done[key].clone())
    return whole
