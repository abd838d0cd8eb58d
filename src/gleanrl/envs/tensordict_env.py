"""Any environment with TensorDict methods, stepped into windows."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import NEXT, TERMINATED, TRUNCATED, Key, next_key, show
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Spec, Window
from gleanrl.envs.tensordict_handle import TensorDictHandle
from gleanrl.envs.tensordict_layout import OneEnvSpec, learn_layout, spec_leaves

_NOTHING: tuple[int, ...] = ()


Rows: TypeAlias = Sequence[torch.Tensor]
"""One view per step, each in the environment's own shape."""


class _Leaf(NamedTuple):
    """One entry and the rows it is copied to."""

    name: str
    rows: Rows
    shape: torch.Size
    dtype: torch.dtype
    key: Key


class _Node(NamedTuple):
    """The entries that stand under one prefix."""

    prefix: Key
    leaves: tuple[_Leaf, ...]


@dataclass(frozen=True, slots=True)
class _Bound:
    """Everything about one window, made once and kept as long as the window lives."""

    carry: Window
    inputs: tuple[tuple[Key, Rows], ...]
    """What the environment is handed at every step; actions first."""
    rewards: tuple[_Node, ...]
    roots: tuple[_Node, ...]
    finals: tuple[_Node, ...]
    """Observations under ``"next"``; written where they differ from the root row that follows."""
    flags: tuple[_Node, ...]
    root_flags: tuple[_Node, ...]
    late: tuple[tuple[Rows, Rows], ...]
    """``"truncated"`` and ``"terminated"`` rows of groups whose environment has only the latter."""
    staged: Mapping[Key, torch.Tensor]
    """Rewards ``[T, *batch, ...]`` of an environment on another device, moved once by `finish`."""


class TensorDictEnv:
    """A TensorDict environment of any batch size, nesting and number of end flags, as an `Env`.

    Data go leaf by leaf into the rows of the window; between steps only the environment's own root
    TensorDict is kept. Observations are copied once per step, to the root row that follows; under
    ``"next"`` they are the same but where an episode ended, so they are filled in bulk by `finish`.
    """

    can_cut = True

    def __init__(self, env: Any, first: TensorDictBase | None = None) -> None:
        """Learn the layout.

        Args:
            env: Built. Reset here, once, unless ``first`` is given. Closed by `close`.
            first: What ``env.reset()`` returned, if it was called already. Taken over.

        Raises:
            EnvError: specs or reset data that do not begin with the batch dimensions.
        """
        self._handle = TensorDictHandle(env, first)
        self.layout: EnvLayout = learn_layout(env, self._handle.root)
        self._batch = tuple(env.batch_size)
        self._num_envs = self.layout.num_envs
        self.action_specs: Mapping[Key, Spec] = {
            key: OneEnvSpec(spec, len(self._batch)) if self._batch else spec
            for key, spec in spec_leaves(env.full_action_spec)
        }
        self._away = _other_device(env)
        self._fed: tuple[Key, ...] = ()
        self._known: weakref.WeakKeyDictionary[Window, _Bound] = weakref.WeakKeyDictionary()
        self._finals: list[tuple[int, list[tuple[Rows, torch.Tensor]]]] = []
        self._bound: _Bound
        self._inputs: tuple[tuple[Key, Rows], ...]
        self._window: Window

    @property
    def inner(self) -> Any:
        """The environment the user gave."""
        return self._handle.env

    def feed(self, outputs: Iterable[Key]) -> None:
        """Name what the policy writes, so that the environment gets what it asks for of it.

        Passed on with the actions are outputs that the environment declares as state or, under
        ``"next"``, as observations (recurrent state that a transform keeps for example).
        """
        shown = {field.key for field in self.layout.observations}
        self._fed = tuple(key for key in outputs if (key[1:] if key[0] == NEXT else key) in shown)
        self._known.clear()

    # -- a rollout -------------------------------------------------------------------------------

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        bound = self._known.get(window)
        if bound is None or bound.carry is not carry:
            bound = self._known[window] = self._bind(window, carry)
        self._bound, self._window, self._inputs = bound, window, bound.inputs
        self._finals = []

    def step(self, t: int, cut: Sequence[int]) -> Sequence[int]:
        """Step with the actions in row ``t``."""
        handle, bound = self._handle, self._bound
        for key, rows in self._inputs:
            # What the environment gets is its own: it may keep it, the window is used again.
            handle.root.set(key, rows[t].clone())
        _, after, ended = handle.step(cut)
        for node in bound.rewards:
            _copy(node, after, t)
        if ended is not None:
            self._end(t, after, [env for env in cut if env in ended])
        for node in bound.roots:
            _copy(node, handle.root, t)
        return ended or _NOTHING

    def _end(self, t: int, after: TensorDictBase, cut: Sequence[int]) -> None:
        """Write flags and final observations of step ``t``."""
        bound, root = self._bound, self._handle.root
        self._finals.append((t, _snapshot(bound.finals, after)))
        for node in bound.flags:
            _copy_flags(node, after, t)
        if cut:
            for late, dead in bound.late:
                late[t][cut] = ~dead[t][cut]
        if self._handle.ends.any(root):
            for node in bound.root_flags:
                _copy_flags(node, root, t)

    def random(self, t: int) -> None:
        """Write random actions into row ``t``; no policy acts, so none feeds the environment."""
        handle = self._handle
        handle.root = handle.env.rand_action(handle.root)
        self._inputs = self._bound.inputs[: len(self.layout.actions)]
        for key, rows in self._inputs:
            rows[t].copy_(handle.root.get(key))

    def finish(self, steps: int) -> None:
        """Fill in observations under ``"next"``, and rewards made on another device."""
        window, present = self._window, set(self._window.keys())
        for field in self.layout.observations:
            if next_key(field.key) not in present:
                continue
            after, root = window.tensor(next_key(field.key)), window.tensor(field.key)
            after[:, : steps - 1] = root[:, 1:steps]
            beyond = root[:, steps] if steps < window.steps else self._last(field.key)
            after[:, steps - 1] = beyond
        for t, leaves in self._finals:
            for rows, value in leaves:
                rows[t].copy_(value)
        for key, stage in self._bound.staged.items():
            target = window.tensor(key)
            flat = stage[:steps].reshape(steps, self._num_envs, *target.shape[2:])
            target[:, :steps].copy_(flat.transpose(0, 1))

    def _last(self, key: Key) -> torch.Tensor:
        return self._bound.carry.tensor(key)[:, 0]

    # -- between rollouts ------------------------------------------------------------------------

    def reset(self, carry: Window, envs: Sequence[int] | None = None, **options: Any) -> None:
        """Reset ``envs`` (all by default) and write their observations into ``carry``.

        The first call after construction writes the reset made there.
        """
        self._handle.reset(envs, options)
        for node in self._nodes(self.layout.observations, carry):
            _copy(node, self._handle.root, 0)

    def seed(self, seed: int, static: bool = False) -> int:
        """Give ``seed`` to the environment; return ``seed + P - 1``, or ``seed`` if static."""
        return self._handle.seed(seed, static)

    def state(self) -> dict[str, Any]:
        """Return a copy of the environment's ``state_dict``."""
        return self._handle.state()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state` returned."""
        self._handle.load_state(state, strict)

    def close(self) -> None:
        """Close the environment, unless that was done already."""
        self._handle.close()

    # -- binding ---------------------------------------------------------------------------------

    def _bind(self, window: Window, carry: Window) -> _Bound:
        present, layout = set(window.keys()), self.layout
        flags = [
            Field(key, group.shape, torch.bool) for group in layout.dones for key in group.keys()
        ]
        mute = [(NEXT, *group.prefix) for group in layout.dones if not group.truncated]
        inputs = [field.key for field in layout.actions]
        inputs += [key for key in self._fed if key in present]
        finals = [field for field in layout.observations if next_key(field.key) in present]
        away = layout.rewards if self._away is not None else ()
        staged = {next_key(field.key): self._stage(field, window) for field in away}
        return _Bound(
            carry=carry,
            inputs=tuple((key, self._rows(window, key)) for key in inputs),
            rewards=self._nodes(layout.rewards, window, (NEXT,), staged=staged),
            roots=self._nodes(layout.observations, window, carry=carry),
            finals=self._nodes(finals, window, (NEXT,)),
            flags=self._nodes(flags, window, (NEXT,)),
            root_flags=self._nodes(flags, window, carry=carry),
            late=tuple(
                (
                    window.tensor_rows((*prefix, *TRUNCATED)),
                    window.tensor_rows((*prefix, *TERMINATED)),
                )
                for prefix in mute
                if (*prefix, *TRUNCATED) in present
            ),
            staged=staged,
        )

    def _stage(self, field: Field, window: Window) -> torch.Tensor:
        shape = (window.steps, *self._batch, *field.shape)
        return torch.empty(shape, dtype=field.dtype, device=self._away)

    def _nodes(
        self,
        fields: Iterable[Field],
        window: Window,
        under: Key = (),
        carry: Window | None = None,
        staged: Mapping[Key, torch.Tensor] = MappingProxyType({}),
    ) -> tuple[_Node, ...]:
        """Group ``fields`` by prefix; with ``carry``, row ``t`` is the root row ``t + 1``."""
        groups: dict[Key, list[_Leaf]] = {}
        for field in fields:
            key = (*under, *field.key)
            rows = staged[key].unbind(0) if key in staged else self._rows(window, key)
            if carry is not None:
                rows = (*rows[1:], self._row_beyond(field, carry))
            shape = torch.Size((*self._batch, *field.shape))
            leaf = _Leaf(field.key[-1], rows, shape, field.dtype, key)
            groups.setdefault(field.key[:-1], []).append(leaf)
        return tuple(_Node(prefix, tuple(leaves)) for prefix, leaves in groups.items())

    def _row_beyond(self, field: Field, carry: Window) -> torch.Tensor:
        if field in self.layout.observations:
            return self._rows(carry, field.key)[0]
        # Root flags do not outlive a rollout; what is written beyond it goes nowhere.
        return torch.empty((*self._batch, *field.shape), dtype=field.dtype)

    def _rows(self, window: Window, key: Key) -> Sequence[torch.Tensor]:
        """Return one view per step in the environment's own batch shape."""
        if len(self._batch) == 1:
            return window.tensor_rows(key)
        tensor = window.tensor(key)
        if not self._batch:
            return tensor[0].unbind(0)
        split = tensor.view((*self._batch, *tensor.shape[1:]))
        return split.unbind(len(self._batch))


def _other_device(env: Any) -> torch.device | None:
    """Return the device of an environment that does not work in host memory."""
    device = getattr(env, "device", None)
    return None if device is None or torch.device(device).type == "cpu" else torch.device(device)


def _values(node: _Node, data: TensorDictBase) -> dict[str, Any]:
    for name in node.prefix:
        data = data.get(name)
    return dict(data.items())


def _copy(node: _Node, data: TensorDictBase, t: int) -> None:
    values = _values(node, data)
    for name, rows, shape, dtype, key in node.leaves:
        value = values.get(name)
        if value is None:
            rows[t].zero_()
        elif value.shape == shape and (value.dtype is dtype or _casts(value.dtype, dtype)):
            rows[t].copy_(value)
        else:
            raise EnvError(
                f"the environment returned {show(key)} with shape {tuple(value.shape)} and dtype "
                f"{value.dtype}; its specs and first reset declare {tuple(shape)} and {dtype}"
            )


_casts = torch.can_cast


def _copy_flags(node: _Node, data: TensorDictBase, t: int) -> None:
    """Copy end flags; if ``"done"`` or ``"terminated"`` is missing, it follows from the others."""
    values = _values(node, data)
    if "done" not in values:
        values["done"] = values["terminated"] | values.get("truncated", values["terminated"])
    if "terminated" not in values:
        late = values.get("truncated")
        values["terminated"] = values["done"] if late is None else values["done"] & ~late
    for leaf in node.leaves:
        leaf.rows[t].copy_(values[leaf.name])


def _snapshot(nodes: Iterable[_Node], data: TensorDictBase) -> list[tuple[Rows, torch.Tensor]]:
    """Return copies of the entries of ``data``: an environment may use its buffers again."""
    found = []
    for node in nodes:
        values = _values(node, data)
        found += [
            (leaf.rows, values[leaf.name].clone()) for leaf in node.leaves if leaf.name in values
        ]
    return found
