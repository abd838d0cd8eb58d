"""Environments whose data lie in preallocated rows, and the TensorDict methods around them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, PolicyError
from gleanrl.core.keys import Key, format_key, next_key
from gleanrl.core.layout import EnvLayout
from gleanrl.core.options import GymOptions
from gleanrl.core.protocols import SharedMemory, Spec
from gleanrl.core.window import Window
from gleanrl.envs.base import EnvBase, keep_unset
from gleanrl.envs.saved_state import load_state, save_state
from gleanrl.envs.simulator_state import StateError
from gleanrl.envs.specs import Binary, Composite, Unbounded, masked_specs
from gleanrl.envs.state_kinds import Node, Resumable
from gleanrl.envs.tensordict_envs import spec_fields, spec_groups, spec_trees
from gleanrl.memory.tensordicts import tensordict_over
from gleanrl.operations.proofs import remembered


def refuse_seed(given: Mapping[str, Any]) -> None:
    """Check that the user's arguments of Gymnasium's ``reset`` hold no seed."""
    if "seed" in given:
        raise ConfigError(
            "reset() takes no seed=, which would be that of all environments; call set_seed()"
        )


class EnvRows(Resumable):
    """``P`` environments that step at once, into rows: the base class of all of these.

    A step makes exactly one real transition of each, and ends with the resets of those that ended,
    whose final observations it has written under ``"next"``; a `NextStepPool` differs in that. A
    subclass sets `layout` and both specs, and adds `reset`, `step` and `seed`. `RowEnv` around it
    has TensorDict methods, and collectors step it without TensorDicts.
    """

    layout: EnvLayout
    observation_specs: Mapping[Key, Spec]
    """Per observation key, the set of one environment's values."""
    action_specs: Mapping[Key, Spec]
    """Per action key, the set one environment's action may be drawn from."""
    can_cut = True
    """Whether environments can be truncated and reset one by one."""
    checks_actions = False
    """Whether environments get actions as the policy writes them, whatever their dtype."""
    reset_s = 0.0
    """Seconds in resets that are calls of their own within a step."""
    memory: SharedMemory | None = None
    """Where windows should lie, for environments in other processes; ``None`` for anywhere."""
    options: Any = None
    """How data are stored; rows that are joined have the same."""
    face: EnvBase | None = None
    """The user's environment, if these rows were taken out of it."""
    stateful: Any = None
    """The objects that have the whole state; ``None`` if it cannot be saved."""
    only_rows = ""
    """The setting that needs rows, in which environments may begin anew during a rollout."""
    failures: list[str]
    """With `only_rows`, the errors of environments that were built anew since the last rollout."""
    on_rebuilt: Callable[[int, int], None]
    """With `only_rows`, is told of a step that is no transition, and of the environment that began
    anew in place of it."""
    gone: Collection[int] = ()
    """With `only_rows`, the environments that are lost for good: `on_rebuilt` has told of each."""
    _window: Window
    _ended: Sequence[int]

    @property
    def inner(self) -> Any:
        """The user's environment, which answers ``getattr_env``."""
        return self if self.face is None else self.face

    def joined(
        self, others: Sequence[Any], face: EnvBase, options: GymOptions | None, fresh: bool
    ) -> EnvRows | None:
        """Return rows that step the members of these and of ``others``, in place of ``face``.

        The ``others`` have the same class and `options`. All get the batch size of ``face``, out of
        which they were taken, and the user's ``options``, if any. ``fresh``: Nobody else uses the
        members, so they may be changed. ``None``: they cannot be stepped as one batch.
        """
        return None

    def explain(self) -> str:
        """Return how they are stepped."""
        inner = self.inner
        kind = type(inner[0] if isinstance(inner, list) else inner).__name__
        return f"{self.layout.num_envs} x {kind}, stepped by its own methods without TensorDicts"

    @abc.abstractmethod
    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        """Reset ``envs`` (all of them by default) and write their root fields into ``carry``."""

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; ``carry`` (one step long) receives root row ``T``."""
        if self.face is not None and not self.face.is_face():
            raise ConfigError(
                f"a method of {self.inner!r:.100} was replaced after the collector was built, "
                "which had found none replaced and steps what is inside directly; replace methods "
                "before, or pass fast=False"
            )
        self._window = window

    @abc.abstractmethod
    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        """Take one step with the actions in row ``t``.

        Writes ``"next"`` fields at ``t`` and root fields at ``t + 1``. The environments in ``cut``
        are truncated at this step if they do not end by themselves. Returns the indices of all that
        ended and were reset (unless ``resets`` is false); an empty sequence almost always.
        """

    def post(self, t: int, cut: Sequence[int]) -> None:
        """Begin step ``t``, which environments in other processes take meanwhile."""
        self._ended = self.step(t, cut)

    @property
    def under_way(self) -> bool:
        """Whether `complete` would wait for a step in another process."""
        return False

    def wait(self, seconds: float | None = None) -> None:
        """Wait for news of other processes, at most ``seconds``; here no other process steps."""

    def complete(self, t: int) -> Sequence[int]:
        """Wait for the end of step ``t``, after `post`; return what `step` returns."""
        return self._ended

    def settle(self) -> None:
        """Wait for the end of a reset in another process; here no other process resets."""

    def keep(self, t: int) -> None:
        """Write data of step ``t`` that `finish` would write, if it is not called; here nothing."""

    def finish(self, steps: int) -> None:
        """Write data that are cheaper in bulk, of ``steps`` steps since `begin`; here nothing."""

    @abc.abstractmethod
    def seed(self, seed: int, static: bool = False) -> None:
        """Seed environment ``i`` with ``seed + i``, or with ``seed``, from its next reset on."""

    def state(self) -> dict[str, Any]:
        """Return the state that must survive a restart (of transforms, say); here nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a `state`: raise `ConfigError` if there is one, and ``strict`` is true."""
        if state and strict:
            raise ConfigError(f"{type(self).__name__} keeps no state, got {sorted(state)}")

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return save_state(self._with_state("saved"), allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        load_state(self._with_state("loaded"), snapshot, allow_pickle)

    def _with_state(self, what: str) -> Any:
        if self.stateful is None:
            raise StateError(f"{type(self.inner).__name__} has no state that can be {what}")
        return self.stateful

    def close(self) -> None:
        """Release the environments. Idempotent."""


class Row:
    """The memory of one step of an environment: root entries, actions and results."""

    def __init__(self, env: Any) -> None:
        self.batch, trees = tuple(env.batch_size), spec_trees(env)
        shown, actions, rewards, flags = (spec_fields(tree, self.batch) for tree in trees)
        found = (group for tree in trees for group in spec_groups(tree, len(self.batch)))
        self.groups = tuple({group.key: group for group in found}.values())
        root = {field.key: field for field in (*shown, *flags)}
        after = {next_key(field.key): field for field in (*root.values(), *rewards)}
        nexts = [replace(field, key=key) for key, field in after.items()]
        self.fields = (*root.values(), *actions, *nexts)
        self.actions = tuple(field.key for field in actions)
        self.flags = [field.key for field in flags]
        self._roots, self._afters = tuple(root), tuple(after)

    def bind(self, window: Window) -> None:
        """Make views of ``window``, which is one step long."""
        self.window = window
        self.views = {
            field.key: window.tensor(field.key).view((*self.batch, *field.shape))
            for field in self.fields
        }
        self.root = {key: self.views[key] for key in self._roots}
        """The present: observations and end flags."""
        self.after = {key[1:]: self.views[key] for key in self._afters}
        """The results of a step."""

    def copy(
        self, entries: Mapping[Key, torch.Tensor], device: torch.device | None
    ) -> TensorDictBase:
        """Copy ``entries`` to ``device``, because the next step writes there again."""
        copies = {key: value.clone() for key, value in entries.items()}
        copy = tensordict_over(copies, self.batch, [None] * len(self.batch), self.groups)
        return copy if device is None else copy.to(device)


@remembered
class RowEnv(EnvBase, Resumable):
    """TensorDict methods over rows: inputs are written to a row, results are copied out of it."""

    _returns_all = True
    rows: EnvRows
    """The environments that step. Internal to the package."""
    _row: Row

    def __init__(self, rows: EnvRows, *, device: torch.device | str | None = None) -> None:
        """Show ``rows`` as TensorDicts, on ``device``."""
        layout = rows.layout
        super().__init__(device=device, batch_size=layout.batch_shape)
        self.rows, self.info_entries = rows, tuple(layout.infos)
        self._declare(*self._specs())
        row = Row(self)
        self._row = row
        self.bind(Window.allocate(row.fields, layout.num_envs, 1))

    def _specs(self) -> list[Composite]:
        layout = self.rows.layout
        rewards = {f.key: Unbounded(f.shape, dtype=f.dtype) for f in layout.rewards}
        flags = {
            key: Binary(shape=group.shape, dtype=torch.bool)
            for group in layout.dones
            for key in group.keys()
        }
        trees = []
        for specs in (self.rows.observation_specs, self.rows.action_specs, rewards, flags):
            tree = Composite()
            for group in layout.groups:
                if any(key[: len(group.key)] == group.key for key in specs):
                    tree.set(group.key, Composite(shape=group.shape))
            for key, spec in specs.items():
                tree.set(key, spec)
            trees.append(tree.expand(layout.batch_shape))
            for masked in masked_specs(trees[-1]).values():  # in memory that the rows write
                mask: Any = masked.mask
                masked.update_mask(mask.view(*layout.batch_shape, *mask.shape[1:]))
        return trees

    # -- the row, which workers of `ParallelEnv` share with their learner -------------------------

    def bind(self, window: Window) -> None:
        """Step in ``window`` from now on, which is one step long. Internal to the package."""
        self._row.bind(window)
        self._given = {key: self._row.views[key] for key in self._row.actions}
        self._cleared = [window.array(next_key(key)) for key in self._row.flags]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.bind(self._row.window)

    def step_row(self, and_reset: bool = False) -> None:
        """Step with the actions in the row; reset ended environments if told so."""
        for flags in self._cleared:
            flags.fill(False)
        window = self._row.window
        self.rows.begin(window, window)
        ended = self.rows.step(0, (), False)
        self.rows.finish(1)
        if and_reset and ended:
            self.rows.reset(window, ended)

    def reset_row(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Reset within the row: all environments, or those in the mask of whole environments."""
        mask = masks.get(("_reset",))
        chosen = None if mask is None else torch.nonzero(mask.flatten()).flatten().tolist()
        self.rows.reset(self._row.window, chosen, **options)

    # -- as an `EnvBase` --------------------------------------------------------------------------

    def _advance(self, data: TensorDictBase) -> None:
        """Step with the actions in ``data``; the results come into the row."""
        write_inputs(data, self._given)
        self.step_row()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._advance(tensordict)
        return self._row.copy(self._row.after, self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        data: Any = {} if tensordict is None else tensordict
        found = ((key, data.get(key, None)) for key in self._env_specs.ends.reset_keys)
        masks = {key: mask.cpu() for key, mask in found if mask is not None}
        self.reset_row(masks, options)
        root = self._row.copy(self._row.root, self.device)
        if tensordict is not None and masks:
            flat = [mask.reshape(*self._batch, -1).any(-1) for mask in masks.values()]
            chosen = torch.stack(flat).any(0)
            if not chosen.all():
                keep_unset(root, tensordict, chosen.to(root.device))
        return root

    def _set_seed(self, seed: Any, static: bool = False) -> None:
        self.rows.seed(seed, static)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return self.rows.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        self.rows.resume(snapshot, allow_pickle)

    def _close(self) -> None:
        self.rows.close()


def write_inputs(
    data: TensorDictBase, row: Mapping[Key, torch.Tensor], *, casts: bool = True
) -> None:
    """Write the entries of ``data`` that ``row`` names into it.

    If it ``casts``, another dtype of the same kind is taken: floats, and whole numbers that fit.
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
