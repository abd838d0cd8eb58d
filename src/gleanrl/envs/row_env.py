"""Environments whose data lie in one preallocated row, with TensorDict methods."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import Key, format_key
from gleanrl.core.layout import Group
from gleanrl.envs.base import EnvBase, keep_unset
from gleanrl.memory.tensordicts import tensordict_over


class RowEnv(EnvBase):
    """An `EnvBase` over a row: inputs are written there, results are copied out of it."""

    _returns_all = True
    _root: Mapping[Key, torch.Tensor]
    """The row's present: observations and end flags."""
    _after: Mapping[Key, torch.Tensor]
    """The row's results of a step."""
    _groups: Sequence[Group] = ()
    """Nested parts with a batch size of their own."""

    @abc.abstractmethod
    def _advance(self, data: TensorDictBase) -> None:
        """Step with the actions in ``data``; the results come into the row."""

    @abc.abstractmethod
    def _restart(
        self, data: TensorDictBase | None, chosen: torch.Tensor | None, options: Mapping[str, Any]
    ) -> None:
        """Reset all environments, or the ``chosen`` ones of ``data``, within the row."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._advance(tensordict)
        return self._copy(self._after)

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        data: Any = {} if tensordict is None else tensordict
        masks = [data.get(key, None) for key in self._env_specs.ends.reset_keys]
        flat = [mask.reshape(*self._batch, -1).any(-1) for mask in masks if mask is not None]
        chosen = torch.stack(flat).any(0).cpu() if flat else None
        self._restart(tensordict, chosen, options)
        root = self._copy(self._root)
        if tensordict is not None and chosen is not None and not chosen.all():
            keep_unset(root, tensordict, chosen.to(root.device))
        return root

    def _copy(self, row: Mapping[Key, torch.Tensor]) -> TensorDictBase:
        """Copy out of the row, because the next step writes there again."""
        copies = {key: value.clone() for key, value in row.items()}
        copy = tensordict_over(copies, self._batch, [None] * len(self._batch), self._groups)
        return copy if self.device is None else copy.to(self.device)


def write_inputs(
    data: TensorDictBase, row: Mapping[Key, torch.Tensor], *, casts: bool = True
) -> None:
    """Write the entries of ``data`` that ``row`` names into it.

    Args:
        data: Has all of them.
        row: Tensors to write to.
        casts: Whether another dtype of the same kind is taken: of floats, and of whole numbers
            without loss.

    Raises:
        PolicyError: an entry is missing or does not fit.
    """
    for key, target in row.items():
        value = data.get(key, None)
        if isinstance(value, torch.Tensor) and value.shape == target.shape:
            value, same = value.detach(), value.dtype == target.dtype
            real = target.is_floating_point()
            if same or (casts and value.is_floating_point() == real):
                target.copy_(value)
                if same or real or bool((target == value.cpu()).all()):
                    continue
        came = f"{value!r:.100}"
        if isinstance(value, torch.Tensor):
            came += f", of shape {tuple(value.shape)} and {value.dtype}"
        raise PolicyError(
            f"{format_key(key)} is {came}; the environment takes {target.dtype} of shape "
            f"{tuple(target.shape)}"
        )
