"""The one call of a policy at construction: what it writes, learnt without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import TensorDictModuleBase
from torch import nn

from gleanrl.core.errors import PolicyError, PolicyTypeError
from gleanrl.core.keys import Key, as_key, is_private, show
from gleanrl.policies.structure import children_of, selects, units_of


@dataclass(slots=True)
class Unit:
    """One module of a policy, as it was seen to act."""

    module: Callable[[Any], Any]
    """Takes and returns a TensorDict."""
    visible: tuple[Key, ...]
    """The entries that were there when it was called."""
    writes: dict[Key, torch.Tensor] = field(default_factory=dict)
    """The entries it made or replaced, with the values it gave."""


@dataclass(slots=True)
class Probed:
    """What one call showed."""

    units: list[Unit]
    """The modules the policy is made of; the policy itself if it cannot be taken apart."""
    whole: Unit
    """The policy as one unit."""

    @property
    def outputs(self) -> dict[Key, torch.Tensor]:
        """What the policy wrote, without private entries."""
        return {key: value for key, value in self.whole.writes.items() if not is_private(key)}


def run_once(
    policy: Callable[[Any], Any], inputs: Mapping[Key, torch.Tensor], batch_shape: Sequence[int]
) -> Probed:
    """Call ``policy`` on ``inputs``, module by module where it is a sequence.

    Args:
        policy: Takes a TensorDict, returns one (or ``None`` after changing the given one).
        inputs: Root entries, each ``[*batch_shape, ...]``. Copied.
        batch_shape: Batch size of the TensorDict.

    Raises:
        PolicyTypeError: the policy returned something else than a TensorDict.
        PolicyError: an entry is no tensor.
    """
    td = _tensordict(inputs, batch_shape)
    start = _Snapshot(td)
    units, apart = [], True
    for module in units_of(policy):
        before = _Snapshot(td)
        td = call_on(module, td)
        units.append(Unit(module, tuple(before.entries), before.written(td, _out_keys(module))))
        apart = apart and td.batch_size == tuple(batch_shape) and _all_tensors(td)
    dropped = _dropped(policy, td)
    written = start.written(td, _out_keys(policy))
    kept = {key: value for key, value in written.items() if key not in dropped}
    whole = Unit(policy, tuple(start.entries), kept)
    if units[0].module is policy:
        units = [whole]
    for key, value in kept.items():
        if not isinstance(value, torch.Tensor) and not is_private(key):
            raise PolicyError(
                f"the policy wrote {show(key)} as {type(value).__name__}, which is no tensor; only "
                "tensors of one shape can be collected, write it under a key that starts with '_'"
            )
    return Probed(units if apart else [whole], whole)


def call_on(policy: Callable[[Any], Any], td: TensorDictBase) -> TensorDictBase:
    """Call ``policy`` and return the TensorDict it left or returned."""
    result = policy(td)
    if result is None:
        return td
    if not isinstance(result, TensorDictBase):
        raise PolicyTypeError(
            f"the policy was called with a TensorDict and returned {type(result).__name__}; it "
            "must return a TensorDict (or None after writing into the one it got)"
        )
    return result


def _tensordict(inputs: Mapping[Key, torch.Tensor], batch_shape: Sequence[int]) -> TensorDict:
    td = TensorDict({}, batch_size=list(batch_shape))
    for key, value in inputs.items():
        td.set(key, value.clone())
    return td


def _entries(td: TensorDictBase) -> dict[Key, Any]:
    leaves = td.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {as_key(key): value for key, value in leaves}


def _all_tensors(td: TensorDictBase) -> bool:
    return all(isinstance(value, torch.Tensor) for value in _entries(td).values())


def _out_keys(module: Any) -> set[Key]:
    """Return what a TensorDict module says it writes."""
    if not isinstance(module, TensorDictModuleBase):
        return set()
    keys: Any = module.out_keys
    return {as_key(key) for key in keys}


class _Snapshot:
    """A TensorDict's entries at one moment: which tensors they were, and their values."""

    def __init__(self, td: TensorDictBase) -> None:
        self.entries = _entries(td)
        self._values = {
            key: value.clone()
            for key, value in self.entries.items()
            if isinstance(value, torch.Tensor)
        }

    def written(self, td: TensorDictBase, declared: Collection[Key]) -> dict[Key, Any]:
        """Return the entries of ``td`` that were made, replaced or changed in place since.

        What is ``declared`` as written counts even if its values happen to be the same.
        """
        return {
            key: value
            for key, value in _entries(td).items()
            if key in declared or not self._passed(key, value)
        }

    def _passed(self, key: Key, value: Any) -> bool:
        """Tell whether an entry is what it was, seen through another view perhaps."""
        before, values = self.entries.get(key), self._values.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            return before is value
        return _same_memory(before, value) and torch.equal(value, values)  # type: ignore[arg-type]  # a tensor's


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


def _dropped(policy: Any, td: TensorDictBase) -> list[Key]:
    """Return what a sequence with selected outputs writes and does not keep."""
    if not isinstance(policy, nn.Module) or not selects(policy) or children_of(policy) is None:
        return []
    kept = _out_keys(policy)
    return [key for key in _entries(td) if key not in kept]
