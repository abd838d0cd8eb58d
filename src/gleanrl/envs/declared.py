"""What an environment declares of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gleanrl.core.keys import Key, NestedKey
from gleanrl.envs.specs import Binary, Composite, TensorSpec
from gleanrl.envs.tensordict_layout import EndFlags


@dataclass(frozen=True, slots=True)
class EnvSpecs:
    """What an environment shows, is told and returns; all with the batch dimensions in front."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite

    def to(self, device: torch.device) -> EnvSpecs:
        """Return the same specs on another device."""
        return EnvSpecs(*(_moved(tree, device) for tree in self.trees()))

    def trees(self) -> tuple[Composite, Composite, Composite, Composite]:
        """Return the four groups in the order of the fields."""
        return self.observation, self.action, self.reward, self.done


class Declared:
    """What an environment declares of its data, on the device where they are wanted."""

    def __init__(
        self, specs: EnvSpecs, batch: tuple[int, ...], device: torch.device | str | None
    ) -> None:
        """Describe a batch of shape ``batch``."""
        self.batch_size = torch.Size(batch)
        self.device = None if device is None else torch.device(device)
        self.specs = specs if self.device is None else specs.to(self.device)
        self.ends = EndFlags(specs.done, batch)
        self.silent: tuple[Key, ...] = ()
        """Flags that were declared by `add_truncated` and are never set."""

    def to(self, device: torch.device | str) -> None:
        """Move the specs."""
        self.device = torch.device(device)
        self.specs = self.specs.to(self.device)

    def add_truncated(self) -> None:
        """Declare ``"truncated"`` beside every ``"done"`` that lacks it."""
        done: dict[NestedKey, TensorSpec] = {k: spec for k, spec in self.specs.done.items()}
        added = [(*group.prefix, "truncated") for group in self.ends.groups if not group.truncated]
        for key in added:
            shape = done[(*key[:-1], "done")].shape
            done[key] = Binary(shape, torch.bool, self.device)
        self.specs = replace(self.specs, done=Composite(done, self.batch_size, self.device))
        self.ends = EndFlags(self.specs.done, tuple(self.batch_size))
        self.silent += tuple(added)


def batched(specs: Mapping[Key, Any], extra: Sequence[int], own: Sequence[int] = ()) -> Composite:
    """Return ``specs``, which begin with the batch ``own``, with dimensions ``extra`` in front."""
    wide: dict[NestedKey, TensorSpec] = {
        key: spec.expand(*extra, *spec.shape) if extra else spec for key, spec in specs.items()
    }
    return Composite(wide, (*extra, *own))


def _moved(tree: Composite, device: torch.device) -> Composite:
    specs: dict[NestedKey, TensorSpec] = {key: spec.to(device) for key, spec in tree.items()}
    return Composite(specs, tree.shape, device)
