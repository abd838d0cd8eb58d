"""What TensorDict environments declare: which objects they are, their fields and end flags.

Everything here works on the methods and specs alone, so it serves TorchRL's environments, ours and
anything else that has them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import Key, NestedKey, as_key, format_key, is_private, next_key, outermost
from gleanrl.core.layout import DoneGroup, EnvLayout, Field


class TensorDictEnvironment(Protocol):
    """An environment that is reset and stepped with TensorDicts, as TorchRL's ``EnvBase`` is."""

    batch_size: torch.Size

    @property
    def full_observation_spec(self) -> Any:
        """Nested specs of what it shows, keys without ``"next"``."""
        ...

    @property
    def full_action_spec(self) -> Any:
        """Nested specs of what it is told."""
        ...

    @property
    def full_reward_spec(self) -> Any:
        """Nested specs of its rewards."""
        ...

    @property
    def full_done_spec(self) -> Any:
        """Nested specs of its end flags."""
        ...

    def reset(self, tensordict: Any = None, **options: Any) -> TensorDictBase:
        """Start episodes everywhere, or where the ``"_reset"`` masks of the argument say."""
        ...

    def step_and_maybe_reset(self, tensordict: Any) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; return the finished step and the root of the next one."""
        ...

    def maybe_reset(self, tensordict: Any) -> TensorDictBase:
        """Start episodes where the root end flags are set."""
        ...

    def rand_action(self, tensordict: Any = None) -> TensorDictBase:
        """Draw actions."""
        ...

    def set_seed(self, seed: Any, static_seed: bool = False) -> Any:
        """Seed what the environment draws."""
        ...

    def state_dict(self) -> Any:
        """Return what must survive a restart."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore what `state_dict` returned."""
        ...

    def close(self) -> None:
        """Release the environment."""
        ...


@runtime_checkable
class _SpecTree(Protocol):
    """A spec that groups others by name; leaf specs have no ``items``."""

    shape: torch.Size

    def items(self) -> Iterable[tuple[NestedKey, Any]]: ...

    def keys(self) -> Iterable[NestedKey]: ...


_MEMBERS = ("batch_size", *(name for name in vars(TensorDictEnvironment) if name[0] != "_"))


def is_tensordict_env(obj: Any) -> bool:
    """Tell whether ``obj`` is a built environment with the TensorDict methods.

    Nothing of it is called: asking a `ParallelEnv` for its batch size would start its processes.
    """
    return not isinstance(obj, type) and all(
        inspect.getattr_static(obj, name, None) is not None for name in _MEMBERS
    )


def is_spec_group(spec: Any) -> bool:
    """Tell whether ``spec`` groups others by name, as a ``Composite`` does."""
    return isinstance(spec, _SpecTree)


def spec_leaves(spec: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield every leaf of nested specs with its full key."""
    for name, item in spec.items():
        key = (*prefix, *as_key(name))
        if isinstance(item, _SpecTree):
            yield from spec_leaves(item, key)
        elif item is not None:
            yield key, item


def spec_groups(spec: Any, prefix: Key = ()) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """Yield the key and the shape of every group of nested specs that has a shape of its own."""
    for name, item in spec.items():
        if isinstance(item, _SpecTree):
            key = (*prefix, *as_key(name))
            yield key, tuple(item.shape)
            yield from spec_groups(item, key)


def needs_carrier(env: Any, first: TensorDictBase | None = None) -> bool:
    """Tell whether the data of ``env`` have no fixed layout.

    That is: a spec without dtype (non-tensor data) or with an open dimension, and in the reset data
    entries that are no plain tensors or stacks of different shapes.

    Args:
        env: A TensorDict environment.
        first: What its one reset returned, if that was done already. Only looked at.
    """
    specs = (
        env.full_observation_spec,
        env.full_action_spec,
        env.full_reward_spec,
        env.full_done_spec,
    )
    if not all(_is_fixed(spec) for tree in specs for _, spec in spec_leaves(tree)):
        return True
    return first is not None and not _is_plain(first)


def _is_fixed(spec: Any) -> bool:
    return isinstance(spec.dtype, torch.dtype) and all(size >= 0 for size in spec.shape)


def _is_plain(data: TensorDictBase) -> bool:
    if isinstance(data, LazyStackedTensorDict):
        return False
    return all(
        _is_plain(value) if isinstance(value, TensorDictBase) else isinstance(value, torch.Tensor)
        for value in data.values()
    )


def learn_layout(env: Any, first: TensorDictBase) -> EnvLayout:
    """Return the fields of ``env``, from its specs and what its first reset returned.

    Where the two disagree the data are believed. State entries (inputs that are no actions) are
    delivered if the reset returned them.

    Raises:
        EnvError: an entry that does not begin with the environment's batch dimensions.
    """
    batch = tuple(env.batch_size)
    ends = EndFlags(env.full_done_spec, batch)
    actions = tuple(
        _field(key, spec, None, batch) for key, spec in spec_leaves(env.full_action_spec)
    )
    taken = {*ends.keys, *(item.key for item in actions)}
    seen: dict[Key, Field] = {}
    for key, spec in spec_leaves(env.full_observation_spec):
        if key not in taken and not is_private(key):
            seen[key] = _field(key, spec, first.get(key, None), batch)
    for key, spec in state_leaves(env):
        value = first.get(key, None)
        if value is not None and key not in taken and key not in seen and not is_private(key):
            seen[key] = _field(key, spec, value, batch)
    rewards = (
        _field(key, spec, None, batch)
        for key, spec in spec_leaves(env.full_reward_spec)
        if key not in seen
    )
    return EnvLayout(
        batch_shape=batch,
        observations=(*seen.values(), *ends.odd),
        fed=tuple(map(next_key, seen)),
        actions=actions,
        rewards=tuple(rewards),
        dones=ends.groups,
    )


def state_leaves(env: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the leaves of what ``env`` is told besides actions, if it declares any."""
    # Not part of the protocol: only TorchRL's environments tell state from observation.
    spec = getattr(env, "full_state_spec", None)
    if spec is not None:
        yield from spec_leaves(spec)


def _field(key: Key, spec: Any, value: Any, batch: tuple[int, ...]) -> Field:
    source = value if isinstance(value, torch.Tensor) else spec
    shape = tuple(source.shape)
    if shape[: len(batch)] != batch:
        raise EnvError(
            f"{format_key(key)} has shape {shape}, which does not begin with the environment's "
            f"batch size {batch}; correct its spec or what reset returns"
        )
    return Field(key, shape[len(batch) :], source.dtype)


class EndFlags:
    """The end-of-episode flags of an environment.

    Flags stand in groups, one per prefix. A group prevails over those beneath it: where the root
    has a ``"done"``, one agent's ``("agents", "done")`` ends nothing but that agent, and it is the
    root's flag upon which environments are reset.
    """

    def __init__(self, spec: Any, batch: tuple[int, ...], locked: bool = True) -> None:
        """Read the groups off the nested specs of all flags.

        Args:
            spec: The nested specs.
            batch: The dimensions that all of them begin with.
            locked: Whether data always have these shapes.
        """
        fields = {key: _field(key, leaf, None, batch) for key, leaf in spec_leaves(spec)}
        names: dict[Key, set[str]] = {}
        for key in fields:
            names.setdefault(key[:-1], set()).add(key[-1])
        self.keys: tuple[Key, ...] = tuple(fields)
        self.groups = tuple(
            DoneGroup(prefix, _shape(fields, prefix), "truncated" in found)
            for prefix, found in names.items()
            if found & {"done", "terminated"}
        )
        known = {key for group in self.groups for key in group.keys()}
        self.odd = tuple(field for key, field in fields.items() if key not in known)
        """Flags of other names, ``"env_done"`` say: delivered like observations."""
        self._deciding = outermost(fields)
        self.reset_keys: tuple[Key, ...] = tuple((*prefix, "_reset") for prefix in names)
        self._shapes = {key: (*batch, *field.shape) for key, field in fields.items()}
        self._envs = math.prod(batch)
        # Asking a single flag is five times as fast as asking any of several.
        probe = {
            key: bool if locked and math.prod(shape) == 1 else _any_set
            for key, shape in self._shapes.items()
        }
        self._probes = tuple(
            (prefix, tuple((name, probe[(*prefix, name)]) for name in sorted(found)))
            for prefix, found in names.items()
        )

    def ended(self, data: TensorDictBase) -> list[int]:
        """Return the environments whose prevailing flags are set in ``data``, in order."""
        values = [data.get(key, None) for key in self._deciding]
        present = [value for value in values if value is not None]
        if self._envs == 1:
            return [0] if any(bool(value.any()) for value in present) else []
        mask = np.zeros(self._envs, bool)
        for value in present:
            mask |= value.reshape(self._envs, -1).any(1).cpu().numpy()
        return [int(env) for env in np.flatnonzero(mask)]

    def any(self, data: TensorDictBase) -> bool:
        """Tell whether any flag at all is set in ``data``."""
        for prefix, probes in self._probes:
            node = data
            for part in prefix:
                node = node.get(part)
            # A plain dict is faster to ask, but a lazy stack cannot always stack all it holds.
            lazy = isinstance(node, LazyStackedTensorDict)
            values: Any = node if lazy else dict(node.items())
            for name, is_set in probes:
                value = values.get(name, None)
                if value is not None and is_set(value):
                    return True
        return False

    def truncate(self, data: TensorDictBase, envs: Sequence[int]) -> None:
        """Mark ``envs`` truncated and done; the tensors in ``data`` are replaced, not changed."""
        for key in self.keys:
            if key[-1] != "terminated":
                self._raise(data, key, envs)

    def _raise(self, data: TensorDictBase, key: Key, envs: Sequence[int]) -> None:
        value = data.get(key, None)
        if value is None:
            value = torch.zeros(self._shapes[key], dtype=torch.bool, device=data.device)
        flat = value.reshape(self._envs, -1).clone()
        flat[list(envs)] = True
        data.set(key, flat.reshape(value.shape))

    def masks(self, envs: Sequence[int]) -> dict[Key, torch.Tensor]:
        """Return the ``"_reset"`` masks that ask for a reset of ``envs``, one per prefix."""
        masks: dict[Key, torch.Tensor] = {}
        for key, shape in self._shapes.items():
            flat = torch.zeros(
                (self._envs, math.prod(shape) // max(self._envs, 1)), dtype=torch.bool
            )
            flat[list(envs)] = True
            masks.setdefault((*key[:-1], "_reset"), flat.reshape(shape))
        return masks


def _shape(fields: dict[Key, Field], prefix: Key) -> tuple[int, ...]:
    name = "done" if (*prefix, "done") in fields else "terminated"
    return fields[(*prefix, name)].shape


def _any_set(flag: torch.Tensor) -> bool:
    return bool(flag.any())


class OneEnvSpec:
    """The spec of a whole batch of environments, seen as that of one of them."""

    def __init__(self, spec: Any, ndim: int) -> None:
        """See one element of ``spec``, whose first ``ndim`` dimensions are the batch."""
        self._spec = spec
        self._ndim = ndim
        self._envs = math.prod(spec.shape[:ndim])

    @property
    def shape(self) -> torch.Size:
        """Shape of one value."""
        return torch.Size(self._spec.shape[self._ndim :])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of one value."""
        dtype: torch.dtype = self._spec.dtype
        return dtype

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw ``[*shape, *self.shape]`` values: elements of as many batches as that takes."""
        size = math.prod(shape)
        draws: torch.Tensor = self._spec.rand((-(-size // self._envs),))
        flat = draws.reshape(-1, *self.shape)[:size]
        return flat.reshape((*shape, *self.shape))
