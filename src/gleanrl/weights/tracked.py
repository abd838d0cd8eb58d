"""A module's tensors, found once and looked at again only if the module was rebuilt."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gleanrl.weights.snapshot import module_weights


class TrackedModule:
    """The tensors of a module that goes on being trained, in the order of their names.

    Walking a module costs as much as copying a small one. So what was found is kept, together with
    the dictionaries it was found in; as long as those hold the same objects, it is still true.
    """

    def __init__(self, module: nn.Module) -> None:
        """Look at ``module``; nothing is copied."""
        self.module = module
        self._find()

    def _find(self) -> None:
        weights = module_weights(self.module)
        self.names = [name for name, value in weights.items() if isinstance(value, torch.Tensor)]
        self.has_extra = len(self.names) < len(weights)
        """Whether there is extra state, which is no tensor."""
        self._tensors = [weights[name] for name in self.names]
        self._tables = [
            (table, dict(table))
            for part in self.module.modules()
            for table in (part._parameters, part._buffers, part._modules)
        ]
        self._data = [
            (value, value.data_ptr())
            for table, _ in self._tables
            for value in table.values()
            if isinstance(value, torch.Tensor)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the detached tensors as they are now; they are the module's own memory."""
        if not self._unchanged():
            self._find()
        return self._tensors

    def _unchanged(self) -> bool:
        # ``p.data = ...`` keeps the parameter but not its memory, hence the addresses.
        return all(_same(table, seen) for table, seen in self._tables) and all(
            value.data_ptr() == address for value, address in self._data
        )


def _same(table: dict[str, Any], seen: dict[str, Any]) -> bool:
    return len(table) == len(seen) and all(table.get(name) is value for name, value in seen.items())
