"""The one call of a policy at construction: what it writes, learnt without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.nn import TensorDictModuleBase
from torch import nn

from gleanrl.core.errors import PolicyTypeError
from gleanrl.core.keys import Key, as_key, as_keys, is_private
from gleanrl.policies.structure import children_of, selects, units_of


@dataclass(slots=True)
class Unit:
    """One module of a policy, as it was seen to act."""

    module: Callable[[Any], Any]
    """Takes and returns a TensorDict."""
    visible: tuple[Key, ...]
    """The entries that were there when it was called."""
    writes: dict[Key, torch.Tensor] = field(default_factory=dict)
    """The entries it made, replaced or changed in place, with the values it gave."""

    @property
    def declares(self) -> bool:
        """Whether it says what it writes, and wrote nothing else that is delivered."""
        named = getattr(self.module, "out_keys", None)
        shown = {key for key in self.writes if not is_private(key)}
        return named is not None and shown <= set(as_keys(named))


@dataclass(slots=True)
class Probed:
    """What one call showed."""

    units: list[Unit]
    """The modules the policy is made of; the policy itself if it cannot be taken apart."""
    whole: Unit
    """The policy as one unit."""
    inputs: dict[Key, torch.Tensor]
    """The root entries that it was called on, as they were, ``[*batch_shape, ...]``."""

    @property
    def outputs(self) -> dict[Key, torch.Tensor]:
        """The tensors that the policy wrote, without private entries."""
        return {
            key: value
            for key, value in self.whole.writes.items()
            if isinstance(value, torch.Tensor) and not is_private(key)
        }

    @property
    def objects(self) -> list[Key]:
        """What the policy wrote that is no tensor, without private entries."""
        writes = self.whole.writes.items()
        return [k for k, v in writes if not isinstance(v, torch.Tensor) and not is_private(k)]


def run_once(policy: Callable[[Any], Any], td: TensorDictBase) -> Probed:
    """Call ``policy`` on ``td``, module by module where it is a sequence.

    Args:
        policy: Takes a TensorDict, returns one (or ``None`` after changing the given one).
        td: Root entries, the caller's to lose.

    Raises:
        PolicyTypeError: the policy returned something else than a TensorDict.
    """
    start, batch = _Snapshot(td), td.batch_size
    units, apart = [], True
    for module in units_of(policy):
        before = _Snapshot(td)
        td = call_on(module, td)
        units.append(Unit(module, tuple(before.entries), before.written(td, _out_keys(module))))
        apart = apart and td.batch_size == batch and _all_tensors(td)
    dropped = _dropped(policy, td)
    written = start.written(td, _out_keys(policy))
    kept = {key: value for key, value in written.items() if key not in dropped}
    whole = Unit(policy, tuple(start.entries), kept)
    if units[0].module is policy:
        units = [whole]
    return Probed(units if apart else [whole], whole, start.values)


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


def _entries(td: TensorDictBase) -> dict[Key, Any]:
    leaves = td.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {as_key(key): value for key, value in leaves}


def _all_tensors(td: TensorDictBase) -> bool:
    return all(isinstance(value, torch.Tensor) for value in _entries(td).values())


def _out_keys(module: Any) -> set[Key]:
    """Return what a TensorDict module says it writes."""
    named = getattr(module, "out_keys", None) if isinstance(module, TensorDictModuleBase) else None
    return set(as_keys(named or ()))


class _Snapshot:
    """A TensorDict's entries at one moment: which tensors they were, and their values."""

    def __init__(self, td: TensorDictBase) -> None:
        self.entries = _entries(td)
        tensors = {k: v for k, v in self.entries.items() if isinstance(v, torch.Tensor)}
        self.values = {key: value.clone() for key, value in tensors.items()}
        self._versions = {key: changes(value) for key, value in tensors.items()}

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
        before = self.entries.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            return before is value
        # What is written in place counts even if it left the values as they were, this time.
        unwritten = changes(before) == self._versions[key]
        return unwritten and same_memory(before, value) and torch.equal(value, self.values[key])


def changes(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was written in place, 0 where nothing counts that."""
    return 0 if tensor.is_inference() else tensor._version


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same numbers in memory."""
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
