"""TensorDict environments: detection, declared data and stepping.

Everything here works on the methods and specs alone, so it serves TorchRL's environments, ours and
anything else that has them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError, EnvError
from gleanrl.core.keys import NEXT, Key, NestedKey, as_key, format_key, is_private, outermost
from gleanrl.core.layout import DoneGroup, EnvLayout, Field, Group, first_difference
from gleanrl.envs.saved_state import load_state, save_state
from gleanrl.envs.specs import Categorical, Composite, TensorSpec
from gleanrl.envs.state_kinds import Node


@runtime_checkable
class _SpecTree(Protocol):
    """A spec that groups others by name; leaf specs have no ``items``."""

    shape: torch.Size

    def items(self) -> Iterable[tuple[NestedKey, Any]]: ...

    def keys(self) -> Iterable[NestedKey]: ...


SPEC_GROUPS = ("observation", "action", "reward", "done", "state")
"""The groups of specs: observations, actions, rewards, end flags, and other inputs."""
_FLAG_NAMES = ("done", "terminated", "truncated")
_MEMBERS = (
    *("batch_size", "full_observation_spec", "full_action_spec", "full_reward_spec"),
    *("full_done_spec", "reset", "step_and_maybe_reset", "maybe_reset", "rand_action"),
    *("set_seed", "state_dict", "load_state_dict", "close"),
)
"""The attributes needed for steps with TensorDicts, as TorchRL's ``EnvBase`` has them."""


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


def spec_groups(spec: Any, ndim: int, prefix: Key = ()) -> Iterator[Group]:
    """Yield every group of nested specs with further dimensions after the first ``ndim``."""
    for name, item in spec.items():
        if isinstance(item, _SpecTree):
            key, more = (*prefix, *as_key(name)), tuple(item.shape[ndim:])
            if more:
                yield Group(key, more, (None,) * len(more))
            yield from spec_groups(item, ndim, key)


def spec_fields(spec: Any, batch: tuple[int, ...]) -> tuple[Field, ...]:
    """Return the field of every leaf of nested specs; all must begin with ``batch``."""
    return tuple(_field(key, leaf, None, batch) for key, leaf in spec_leaves(spec))


def spec_trees(env: Any) -> tuple[Any, Any, Any, Any]:
    """Return the specs of observations, actions, rewards and end flags of ``env``."""
    return (
        env.full_observation_spec,
        env.full_action_spec,
        env.full_reward_spec,
        env.full_done_spec,
    )


def check_alike(declared: Mapping[int, tuple[Sequence[int], Sequence[Any]]]) -> None:
    """Find environments that cannot be one batch; each index has a batch size and `spec_trees`."""
    (start, (size, trees)), *others = declared.items()
    first = _entries(trees)
    for index, (own, its) in others:
        difference = first_difference(_entries(its), first) or _other_range(its[1], trees[1])
        if tuple(own) != tuple(size):
            difference = f"the batch size is {tuple(own)} instead of {tuple(size)}"
        if difference is not None:
            raise ConfigError(
                f"environments {index} and {start} do not declare the same data: {difference}; "
                "environments of one batch must agree"
            )


def _other_range(mine: Any, first: Any) -> str | None:
    """Say which action has other values than in specs ``first``, masks aside.

    Specs of TorchRL are not compared, as in its own batches.
    """
    expected = dict(spec_leaves(first))
    for key, spec in spec_leaves(mine):
        if isinstance(spec, TensorSpec) and _unmasked(spec) != _unmasked(expected[key]):
            return f"{format_key(key)} is {spec} instead of {expected[key]}"
    return None


def _unmasked(spec: Any) -> Any:
    if isinstance(spec, Categorical):
        spec = spec.clone()
        spec.update_mask(None)
    return spec


def _entries(trees: Iterable[Any]) -> list[Field]:
    return [Field(k, tuple(s.shape), s.dtype) for tree in trees for k, s in spec_leaves(tree)]


def needs_carrier(env: Any, first: TensorDictBase) -> bool:
    """Tell whether the data of ``env`` have no fixed layout; its reset returned ``first``."""
    return bool(open_entries(env)) or not _is_plain(first)


def open_entries(env: Any) -> list[Key]:
    """Return the keys of specs without dtype (non-tensor data) or with an open dimension."""
    return [
        key
        for tree in spec_trees(env)
        for key, spec in spec_leaves(tree)
        if not isinstance(spec.dtype, torch.dtype) or min(spec.shape, default=0) < 0
    ]


def _is_plain(data: TensorDictBase) -> bool:
    """Tell whether there are only tensors in ``data``, and no stacks of different shapes."""
    if isinstance(data, LazyStackedTensorDict):
        return False
    return all(
        _is_plain(value) if isinstance(value, TensorDictBase) else isinstance(value, torch.Tensor)
        for value in data.values()
    )


def learn_layout(env: Any, first: TensorDictBase) -> EnvLayout:
    """Return the fields of ``env``, from its specs and the results of its first reset.

    Where the two disagree the data are believed. State entries (inputs that are no actions) are
    delivered if the reset returned them.
    """
    batch = tuple(env.batch_size)
    ends = EndFlags(env.full_done_spec, batch)
    actions = spec_fields(env.full_action_spec, batch)
    taken = {*ends.keys, *(item.key for item in actions)}
    seen: dict[Key, Field] = {}
    for key, spec in spec_leaves(env.full_observation_spec):
        if key not in taken and not is_private(key):
            seen[key] = _field(key, spec, first.get(key, None), batch)
    for key, spec in state_leaves(env):
        value = first.get(key, None)
        if value is not None and key not in taken and key not in seen and not is_private(key):
            seen[key] = _field(key, spec, value, batch)
    rewards = [f for f in spec_fields(env.full_reward_spec, batch) if f.key not in seen]
    return EnvLayout(
        batch_shape=batch,
        observations=(*seen.values(), *ends.odd),
        actions=actions,
        rewards=tuple(rewards),
        dones=ends.groups,
    )


def state_leaves(env: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the leaves of the inputs of ``env`` besides actions, if it declares any."""
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
        """Read the groups off the nested specs of all flags, which begin with ``batch``.

        ``locked``: data always have these shapes.
        """
        fields = {field.key: field for field in spec_fields(spec, batch)}
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
        """Flags of other names, such as ``"env_done"``, delivered like observations."""
        self._deciding = outermost(fields)
        self.reset_keys: tuple[Key, ...] = tuple((*prefix, "_reset") for prefix in names)
        self._shapes = {key: (*batch, *field.shape) for key, field in fields.items()}
        self._envs = math.prod(batch)
        # Asking a single flag is five times as fast as asking any of several.
        probe = {
            key: bool if locked and math.prod(shape) == 1 else torch.any
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
                value = data.get(key, None)
                if value is None:
                    value = torch.zeros(self._shapes[key], dtype=torch.bool, device=data.device)
                flat = value.reshape(self._envs, -1).clone()
                flat[list(envs)] = True
                data.set(key, flat.reshape(value.shape))

    def masks(self, envs: Sequence[int]) -> dict[Key, torch.Tensor]:
        """Return the ``"_reset"`` masks for a reset of ``envs``, one per prefix."""
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


@dataclass(frozen=True, slots=True)
class EnvSpecs:
    """The declared data of an environment, with the batch dimensions in front."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite
    state: Composite
    """Inputs besides actions."""
    ends: EndFlags
    batch_size: torch.Size
    device: torch.device | None


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
    prefixes = {key[:-1]: key for key in done.leaves() if key[-1] in _FLAG_NAMES}
    for prefix, key in prefixes.items():
        for name in ("done", "terminated"):
            if (*prefix, name) not in whole:
                whole.set((*prefix, name), done[key].clone())
    return whole


@dataclass(frozen=True, slots=True)
class EnvMetaData:
    """The description of an environment, without the environment itself."""

    tensordict: TensorDictBase
    """One step filled with zeros."""
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any


# -- stepping --------------------------------------------------------------------------------------

_BASES = ("torchrl.envs.common", "gleanrl.envs.base")
_STOCK = ("step_and_maybe_reset", "_step_and_maybe_reset", "step_mdp")
"""Methods by which an ``EnvBase`` steps and resets in one, or that make a difference to it."""
_EXTRAS = ("_torchrl_native_autoreset", "_compiled_step_and_maybe_reset")
"""Attributes by which TorchRL's ``EnvBase`` does more, if they are set."""
_AFTER_MDP = "_post_step_mdp_hooks"
"""The method that TorchRL's ``EnvBase`` calls between `step_mdp` and `maybe_reset`, if set."""


def steps_apart(env: Any) -> bool:
    """Tell whether ``env.step_and_maybe_reset`` is `step`, `step_mdp` and `maybe_reset`, in turn.

    That is so for environments that inherit it from an ``EnvBase`` and change nothing about it.
    """
    kind, state = type(env), getattr(env, "__dict__", {})
    for name in _STOCK:
        method = getattr(kind, name, None)
        if method is not None and getattr(method, "__module__", "") not in _BASES:
            return False
        if name in state:
            return False
    extras = any(state.get(name) or getattr(kind, name, None) for name in _EXTRAS)
    return kind.step_and_maybe_reset.__qualname__ == "EnvBase.step_and_maybe_reset" and not extras


class TensorDictHandle:
    """Steps, truncates, resets, seeds, saves and closes one environment by its public methods."""

    def __init__(self, env: Any, first: TensorDictBase | None = None, *, inner: Any = None) -> None:
        """Take over ``env``, whose reset has returned ``first``, or which is reset here, once.

        ``inner``: The user's environment, if that is not ``env``.
        """
        self.env = env
        self.inner = env if inner is None else inner
        self.kind = type(inner[0] if isinstance(inner, list) else self.inner).__name__
        """The class of the user's environment."""
        self.root: TensorDictBase = env.reset() if first is None else first
        """The input of the next step, in which the caller sets the action."""
        self.ends = EndFlags(env.full_done_spec, tuple(env.batch_size))
        self.num_envs = math.prod(env.batch_size)
        self.after: TensorDictBase | None = None
        """The results of the last step."""
        self.why = "the environment works on TensorDicts"
        """Why it is stepped like this."""
        self.reset_s, self.memory = 0.0, None
        """Seconds in resets that are calls of their own after a step."""
        self._apart = False
        """Whether steps and resets can be separate calls."""
        self._after_mdp: Callable[..., tuple[TensorDictBase, TensorDictBase]] | None = None
        self._closed = False

    def begin(self) -> None:
        """Read the environment's current methods; before a rollout."""
        self._apart = steps_apart(self.env)
        self._after_mdp = getattr(self.env, _AFTER_MDP, None)

    def step(
        self, cut: Sequence[int], record: Callable[[TensorDictBase], None]
    ) -> Sequence[int] | None:
        """Step; environments in ``cut`` are truncated if they do not end by themselves.

        ``record`` is called with the finished step before anything is reset, as far as the
        environment's way to step and reset can be taken apart: a reset may use the memory of the
        step again. Returns which environments ended and were reset: ``None`` if no end flag is set
        anywhere, an empty list if one is that resets nothing.
        """
        if not self._apart:
            return self._step_whole(cut, record)
        env, root = self.env, self.root
        if root.device != env.device:
            root = root.to(env.device)
        finished = env.step(root)
        ended = self._cut(finished, cut)
        root = env.step_mdp(finished)
        if self._after_mdp is not None:
            finished, root = self._after_mdp(finished, root)
        record(finished)
        self.after = finished.get(NEXT)
        began = monotonic()
        self.root = env.maybe_reset(root)
        if ended:
            self.reset_s += monotonic() - began
        return ended

    def _step_whole(
        self, cut: Sequence[int], record: Callable[[TensorDictBase], None]
    ) -> Sequence[int] | None:
        finished, self.root = self.env.step_and_maybe_reset(self.root)
        before = None if not cut else set(self.ends.ended(finished.get(NEXT)))
        ended = self._cut(finished, cut)
        record(finished)
        self.after = finished.get(NEXT)
        late = [env for env in cut if before is not None and env not in before]
        if late:
            self.ends.truncate(self.root, late)
            self.root = self.env.maybe_reset(self.root)
        return ended

    def _cut(self, finished: TensorDictBase, cut: Sequence[int]) -> Sequence[int] | None:
        """Truncate ``cut`` in the finished step; return ended ones, ``None`` without any flag."""
        after = finished.get(NEXT)
        if not cut:
            return self.ends.ended(after) if self.ends.any(after) else None
        ended = self.ends.ended(after)
        late = [env for env in cut if env not in ended]
        if late:
            after = after.copy()
            self.ends.truncate(after, late)
            finished.set(NEXT, after)
        return sorted(ended + late)

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        if envs is None:
            self.root = self.env.reset(**options)
        elif options:
            root = self.root.copy()
            for key, mask in self.ends.masks(envs).items():
                root.set(key, mask)
            self.root = self.env.reset(root, **options)
        else:
            # The environment's own way to reset ended elements: it hides from its reset what the
            # finished episode left behind.
            root = self.root.copy()
            self.ends.truncate(root, envs)
            self.root = self.env.maybe_reset(root)

    def seed(self, seed: int, static: bool = False) -> None:
        """Pass ``seed`` to the environment, which derives its elements' seeds from it."""
        self.env.set_seed(seed, static_seed=static)

    def state(self) -> dict[str, Any]:
        """Return a copy of the environment's ``state_dict``."""
        return copy.deepcopy(dict(self.env.state_dict()))

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a state from `state`; pass ``strict`` on if the environment takes it."""
        load_env_state(self.env, state, strict)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        """Return the state of the environment, and the input of its next step."""
        return save_state([self.env, self.root], allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        _, self.root = load_state([self.env, self.root], snapshot, allow_pickle)

    def close(self) -> None:
        """Close the environment, unless it is closed."""
        # Closing twice is an error in TorchRL, whose environments tell by `is_closed`.
        if not self._closed and not getattr(self.env, "is_closed", False):
            self.env.close()
        self._closed = True


def load_env_state(env: Any, state: Mapping[str, Any], strict: bool) -> None:
    """Restore the state of one environment; pass ``strict`` on if it takes that."""
    takes_strict = "strict" in inspect.signature(env.load_state_dict).parameters
    env.load_state_dict(dict(state), **({"strict": strict} if takes_strict else {}))
