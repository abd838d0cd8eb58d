"""A module's tensors, found once and looked at again only if the module was rebuilt."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch
from torch import nn

from gleanrl.weights.snapshot import module_weights

_values = operator.methodcaller("values")


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
        self._tables: list[dict[str, Any]] = [
            table
            for part in self.module.modules()
            for table in (part._parameters, part._buffers, part._modules)
        ]
        self._sizes = list(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._keys = list(chain.from_iterable(self._filled))
        self._values = [value for table in self._filled for value in table.values()]
        self._data = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._data))

    def tensors(self) -> list[torch.Tensor]:
        """Return the detached tensors as they are now; they are the module's own memory.

        The same list as before means that nothing but values can have changed.
        """
        if not self._unchanged():
            self._find()
        return self._tensors

    def _unchanged(self) -> bool:
        # ``p.data = ...`` keeps the parameter but not its memory, hence the addresses.
        filled = self._filled
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(filled), self._keys))
            and all(map(operator.is_, chain.from_iterable(map(_values, filled)), self._values))
            and list(map(torch.Tensor.data_ptr, self._data)) == self._addresses
        )
