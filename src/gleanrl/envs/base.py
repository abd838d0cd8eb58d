"""The base of GleanRL's environments with TensorDict methods."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import nn

from gleanrl.core.env_users import note_reset
from gleanrl.core.errors import ConfigError, EnvError, for_users
from gleanrl.core.keys import NEXT, TIME, Key, NestedKey, format_key
from gleanrl.core.options import check_int, read_device
from gleanrl.core.protocols import Spec
from gleanrl.envs.specs import Binary, Composite, Unbounded
from gleanrl.envs.tensordict_envs import (
    SPEC_GROUPS,
    EndFlags,
    EnvSpecs,
    is_spec_group,
    widened,
    with_all_flags,
)
from gleanrl.operations.proofs import unmodified

Self = TypeVar("Self", bound="EnvBase")
TensorDictPolicy = Callable[[TensorDictBase], Any]


def _spec(group: str, doc: str, single: bool = False) -> Any:
    """Return a property: the specs of one group, or the only one in it if ``single``."""

    def read(env: EnvBase) -> Any:
        tree: Composite = getattr(env._env_specs, group)
        leaves = list(tree.leaves().values()) if single else ()
        return leaves[0] if len(leaves) == 1 else tree

    def assign(env: EnvBase, spec: Any) -> None:
        env._assign(group, spec)

    return property(read, assign, doc=doc)


def _keys(group: str, doc: str) -> Any:
    """Return a property: the keys of one group."""

    def read(env: EnvBase) -> list[NestedKey]:
        return _spelled(getattr(env._env_specs, group).leaves())

    return property(read, doc=doc)


def _key(group: str) -> Any:
    """Return a property: the only key of one group."""

    def read(env: EnvBase) -> NestedKey:
        keys = _spelled(getattr(env._env_specs, group).leaves())
        if len(keys) != 1:
            raise ConfigError(f"this environment has the {group} keys {keys}, not one")
        return keys[0]

    return property(read, doc=f"The key of the only {group}, `ConfigError` if there is not one.")


def _spelled(keys: Iterable[Key]) -> list[NestedKey]:
    return [key[0] if len(key) == 1 else key for key in keys]


def close_all(envs: Iterable[Any]) -> None:
    """Close every environment, then raise the exception of one of them, if any."""
    with contextlib.ExitStack() as stack:
        for env in envs:
            stack.callback(env.close)


class EnvBase(nn.Module, abc.ABC):
    """An environment, or a batch of them, that is reset and stepped with TensorDicts.

    The interface is that of TorchRL's class of this name. A subclass adds `_reset`, `_step` and
    `_set_seed`, and assigns its specs: ``self.observation_spec = ...``, and likewise
    ``action_spec``, ``reward_spec``, ``done_spec`` and ``state_spec`` (or ``full_..._spec``).
    Data have a root part (observations, end flags, actions) and the results of the step under
    ``"next"`` (observations, rewards, end flags).

    Example:
        >>> from gleanrl.data import Categorical, Composite, Unbounded
        >>> class Counter(EnvBase):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.observation_spec = Composite(count=Unbounded((1,)))
        ...         self.action_spec = Categorical(2)
        ...     def _reset(self, tensordict=None):
        ...         return TensorDict({"count": torch.zeros(1)})
        ...     def _step(self, tensordict):
        ...         count = tensordict["count"] + 1
        ...         return TensorDict({"count": count, "reward": count, "done": count >= 5})
        ...     def _set_seed(self, seed):
        ...         pass
        >>> Counter().rollout(9)["next", "reward"].flatten().tolist()
        [1.0, 2.0, 3.0, 4.0, 5.0]
    """

    batch_locked = True
    """Whether data always have the environment's batch size."""
    _returns_all = False
    """Whether `_reset` and `_step` return every entry, of every element, that is declared."""
    _batch: torch.Size = torch.Size(())
    _device: torch.device | None = None
    _may_begin_done = False
    _own_specs: Mapping[str, Composite] = {}
    """The declared specs."""
    _known: EnvSpecs | None = None
    """The same specs, completed at the first use."""
    info_entries: Sequence[Key] = ()
    """Observations that are requested info entries. Internal to the package."""
    specs_assigned = False
    """Whether specs were assigned one by one. Internal to the package."""

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        batch_size: Sequence[int] | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        spec_locked: bool = True,
        auto_reset: bool = False,
    ) -> None:
        """Prepare an environment; specs may be assigned before or after.

        Args:
            device: Where data are; ``None`` for host memory, unmarked.
            batch_size: ``()`` for a single environment.
            run_type_checks: Compare the dtypes of steps with the specs.
            allow_done_after_reset: Allow episodes that are over when they begin.
            spec_locked: Accepted for compatibility: specs can be assigned at any time.
            auto_reset: Not supported.

        Raises:
            ConfigError: ``auto_reset=True``.
        """
        super().__init__()
        if auto_reset:
            raise ConfigError(
                "auto_reset=True (an environment that resets itself within a step) is not "
                "supported; return the final observation from _step and start over in _reset"
            )
        self.is_closed = False
        self.run_type_checks = run_type_checks
        self._may_begin_done = allow_done_after_reset
        if batch_size is not None:
            self._batch = torch.Size(batch_size)
        if device is not None:
            self._device = read_device("device", device)

    def _declare(self, *specs: Composite) -> None:
        """Declare all data at once: observation, action, reward, done and maybe state specs."""
        self._own_specs = dict(zip(SPEC_GROUPS, specs, strict=False))
        self._known = None

    def _assign(self, group: str, spec: Any) -> None:
        """Declare the data of one group: specs by name, or one spec, which is called as it."""
        if not is_spec_group(spec):
            spec = Composite({group: spec}, shape=self._batch)
        elif tuple(spec.shape[: len(self._batch)]) != tuple(self._batch):
            raise ConfigError(
                f"{group}_spec has shape {tuple(spec.shape)}, which does not begin with the "
                f"environment's batch size {tuple(self._batch)}"
            )
        spec = widened(spec)
        self._own_specs = {
            **self._own_specs,
            group: with_all_flags(spec) if group == "done" else spec,
        }
        self.specs_assigned, self._known = True, None

    @property
    def _env_specs(self) -> EnvSpecs:
        """The declared specs; a subclass that must find them out first overrides this."""
        if self._known is None:
            batch = self._batch
            specs = {name: Composite(shape=batch) for name in SPEC_GROUPS}
            specs["reward"] = Composite(reward=Unbounded((*batch, 1)), shape=batch)
            flag = Binary(shape=(*batch, 1), dtype=torch.bool)
            specs["done"] = Composite(done=flag, terminated=flag.clone(), shape=batch)
            specs.update(self._own_specs)
            if self._device is not None:
                specs = {name: spec.to(self._device) for name, spec in specs.items()}
            ends = EndFlags(specs["done"], tuple(batch), self.batch_locked)
            self._known = EnvSpecs(**specs, ends=ends, batch_size=batch, device=self._device)
        return self._known

    def is_face(self) -> bool:
        """Tell whether this only shows rows as TensorDicts, by methods that nobody replaced.

        A collector steps such rows directly. Internal to the package.
        """
        on_host = self._device is None or self._device.type == "cpu"
        return on_host and not self.specs_assigned and unmodified(self)

    # -- for subclasses --------------------------------------------------------------------------

    @abc.abstractmethod
    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        """Start episodes and return the root part.

        Args:
            tensordict: With ``"_reset"`` masks if only some environments are to be reset; what is
                returned for the others is not used then.
            options: The user's options for `reset`.
        """

    @abc.abstractmethod
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Carry out the actions in ``tensordict`` and return the entries under ``"next"``."""

    @abc.abstractmethod
    def _set_seed(self, seed: int | None) -> None:
        """Seed the environment's random numbers, from its next reset on.

        Where it `_returns_all`: environment ``i`` with ``seed + i``, or all with ``seed`` if told
        ``static=True``, a second argument that others do not have.
        """

    def _close(self) -> None:  # nothing to release is usual
        """Release the environment's resources. Called once."""

    # -- data ------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """``()`` for a single environment."""
        return self._env_specs.batch_size

    @property
    def device(self) -> torch.device | None:
        """The device of returned data; ``None`` if it is not set."""
        return self._env_specs.device

    full_observation_spec = _spec("observation", "Specs of everything shown, at both places.")
    observation_spec = _spec("observation", "Specs of everything shown, at both places.")
    full_action_spec = _spec("action", "Specs of all actions.")
    action_spec = _spec("action", "The spec of the only action, else that of all.", single=True)
    full_reward_spec = _spec("reward", "Specs of all rewards.")
    reward_spec = _spec("reward", "The spec of the only reward, else that of all.", single=True)
    full_done_spec = _spec("done", "Specs of all end flags.")
    done_spec = _spec("done", "The spec of the only end flag, else that of all.", single=True)
    full_state_spec = _spec("state", "Specs of all inputs besides actions.")
    state_spec = _spec("state", "Specs of all inputs besides actions.")
    observation_keys = _keys("observation", 'Keys of everything shown, without ``"next"``.')
    state_keys = _keys("state", "Keys of all inputs besides actions.")
    action_keys = _keys("action", "Keys of all actions.")
    reward_keys = _keys("reward", 'Keys of all rewards, without ``"next"``.')
    done_keys = _keys("done", 'Keys of all end flags, without ``"next"``.')
    action_key = _key("action")
    reward_key = _key("reward")

    @property
    def input_spec(self) -> Composite:
        """Specs of all inputs: ``"full_action_spec"`` and ``"full_state_spec"``."""
        return self._grouped("action", "state")

    @property
    def output_spec(self) -> Composite:
        """Specs of all outputs, as ``"full_..._spec"``."""
        return self._grouped("observation", "reward", "done")

    def _grouped(self, *groups: str) -> Composite:
        specs = {f"full_{group}_spec": getattr(self._env_specs, group) for group in groups}
        return Composite(specs, shape=self.batch_size)

    @property
    def reset_keys(self) -> list[NestedKey]:
        """Keys of the masks of environments to reset."""
        return _spelled(self._env_specs.ends.reset_keys)

    def fake_tensordict(self) -> TensorDictBase:
        """Return one step of zeros with the right keys, shapes and dtypes, without stepping."""
        specs = self._env_specs
        fake = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for tree in (specs.observation, specs.state, specs.action, specs.done):
            fake.update(tree.zero())
        after = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for tree in (specs.observation, specs.reward, specs.done):
            after.update(tree.zero())
        return fake.set(NEXT, after)

    def to(self: Self, device: torch.device | str) -> Self:  # type: ignore[override]
        """Return data on ``device`` from now on. Changes and returns this environment."""
        self._device, self._known = read_device("device", device), None
        return self

    def add_truncated_keys(self: Self) -> Self:
        """Declare ``"truncated"`` next to every ``"done"`` that lacks it; no step sets it.

        Changes and returns this environment.
        """
        known = self._env_specs
        lacking = [group for group in known.ends.groups if not group.truncated]
        if lacking:
            done = known.done.clone()
            for group in lacking:
                flag = Binary(shape=done[group.keys()[0]].shape, dtype=torch.bool)
                done.set((*group.prefix, "truncated"), flag)
            self._own_specs, self._known = {**self._own_specs, "done": done}, None
            self._returns_all = False
        return self

    # -- stepping --------------------------------------------------------------------------------

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        set_state: bool | None = None,
        **options: Any,
    ) -> TensorDictBase:
        """Start episodes.

        Args:
            tensordict: Root data, updated in place. If it has ``"_reset"`` masks, only environments
                that they name are reset, and the others keep their data.
            set_state: Accepted for compatibility, without effect.
            options: Arguments of `_reset`; Gymnasium's environments take ``options={...}``.

        Returns:
            ``tensordict``, or the new root data.

        Raises:
            EnvError: `_reset` returned no TensorDict, or episodes that are over.
        """
        note_reset(self)
        known = self._env_specs
        root = self._complete(self._checked(self._reset(tensordict, **options), "_reset"))
        data: Any = {} if tensordict is None else tensordict
        wanted = known.ends.reset_keys
        masks = {key: mask for key in wanted if (mask := data.get(key, None)) is not None}
        if not self._returns_all:
            self._begin(root, tensordict, masks)
        if tensordict is None:
            return root
        for key in masks:
            del tensordict[key]
        return tensordict.update(root)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Carry out the actions in ``tensordict`` and set ``"next"`` in it.

        Entries that ``"next"`` has already stay unless the environment makes them itself.

        Raises:
            EnvError: `_step` returned no TensorDict, or no reward.
        """
        after = self._checked(self._step(tensordict), "_step")
        if after is tensordict:
            raise EnvError(
                f"{type(self).__name__}._step returned the TensorDict that it was given, or that "
                "_reset returned before; return a new one"
            )
        self._complete(after)
        if not self._returns_all:
            self._complete_step(after)
        return self._finish(tensordict, after)

    def _checked(self, data: Any, what: str) -> TensorDictBase:
        if not isinstance(data, TensorDictBase):
            raise EnvError(f"{type(self).__name__}.{what} returned {data!r:.100}, not a TensorDict")
        return data

    def _begin(
        self, root: TensorDictBase, before: TensorDictBase | None, masks: Mapping[Key, torch.Tensor]
    ) -> None:
        """Add the entries of environments that were not reset, and check that the others begin."""
        for prefix in {key[:-1] for key in masks}:
            mask = masks[(*prefix, "_reset")]
            old = None if before is None else before.get(prefix, None) if prefix else before
            new = root.get(prefix) if prefix else root
            if old is not None and not mask.all():
                inner = {key[len(prefix)] for key in masks if len(key) > len(prefix) + 1}
                chosen = mask.reshape(*new.batch_size, -1).any(-1)
                keep_unset(new, old, chosen, inner if not prefix else ())
        if not self._may_begin_done and self._env_specs.ends.any(root):
            for group in self._env_specs.ends.groups:
                part = masks.get((*group.prefix, "_reset"))
                done = root.get((*group.prefix, "done"))
                if bool((done if part is None else done[part]).any()):
                    raise EnvError(
                        f"{type(self).__name__}._reset returned episodes that are over ("
                        f"{format_key((*group.prefix, 'done'))} is set); pass "
                        "allow_done_after_reset=True to EnvBase.__init__ if that is meant"
                    )

    def _complete_step(self, after: TensorDictBase) -> None:
        """Give rewards their declared shape and dtype; check that none is missing."""
        lead = after.batch_size[: after.ndim - len(self.batch_size)]
        for key, spec in self._env_specs.reward.leaves().items():
            if self._as_declared(after, key, spec, lead) is None:
                raise EnvError(
                    f"{type(self).__name__}._step returned no {format_key(key)}; it returned "
                    f"{sorted(map(str, after.keys(True, True)))}"
                )
        if self.run_type_checks:
            for key, spec in self._env_specs.observation.leaves().items():
                if (dtype := after.get(key).dtype) != spec.dtype:
                    raise TypeError(f"{format_key(key)} is {dtype}; its spec has {spec.dtype}")

    def _as_declared(
        self, data: TensorDictBase, key: Key, spec: Spec, lead: Sequence[int]
    ) -> torch.Tensor | None:
        """Give an entry of ``data``, if it exists, the shape and dtype of ``spec``; return it."""
        given: Any = data.get(key, None)
        if given is None:
            return None
        if not isinstance(given, torch.Tensor):
            raise self._wrong(key, f"= {given.data!r:.100}; it must be a number or a tensor")
        value, shape = given, (*lead, *spec.shape)
        if given.shape != shape and _without_ones(given.shape) == _without_ones(shape):
            value = value.reshape(shape)
        elif given.shape != shape and -1 not in shape:
            raise self._wrong(key, f"of shape {tuple(given.shape)}; its spec declares {shape}")
        if given.dtype != spec.dtype:
            value, wide = value.to(spec.dtype), value
            rounded = spec.dtype.is_floating_point
            if (value.isinf() & ~wide.isinf() if rounded else value != wide).any():
                raise self._wrong(key, f"= {given!r:.100}, which {spec.dtype} does not hold")
        if value is not given:
            data.set(key, value)
        return value

    def _wrong(self, key: Key, what: str) -> EnvError:
        return EnvError(f"{type(self).__name__} returned {format_key(key)} {what}")

    def _finish(self, tensordict: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
        given = tensordict.get(NEXT, None)
        return tensordict.set(NEXT, after if given is None else given.copy().update(after))

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root data that follow a finished step.

        Entries that the policy wrote under ``"next"`` replace the root entries of the same names.
        """
        after, specs = tensordict.get(NEXT), self._env_specs
        known = {*specs.observation.keys(), *specs.state.keys(), *specs.done.keys()}
        unknown = {*_names(after)} - known - {*tensordict.keys()}
        gone = {*specs.reward.leaves(), *((name,) for name in unknown)}
        root = _following(tensordict, after, gone)
        if root is not None:
            return root
        # `copy`, because `exclude` alone would share the branches of nested data with the step.
        return tensordict.exclude(NEXT).copy().update(after.exclude(*gone))

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset where the root end flags are set; return the root data."""
        if not self._env_specs.ends.any(tensordict):
            return tensordict
        for group in self._env_specs.ends.groups:
            flags = [tensordict.get(key) for key in group.keys()]
            tensordict.set((*group.prefix, "_reset"), torch.stack(flags).any(0))
        return self.reset(tensordict)

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; return the finished step and the next root data, reset where an episode ended."""
        finished = self.step(tensordict)
        return finished, self.maybe_reset(self.step_mdp(finished))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions; set them in ``tensordict`` if one is given."""
        ahead: Sequence[int] = ()
        if tensordict is not None and not self.batch_locked:
            ahead = tensordict.batch_size[: tensordict.ndim - len(self.batch_size)]
        drawn = self._env_specs.action.rand(ahead)
        return drawn if tensordict is None else tensordict.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with random actions."""
        return self.step(self.rand_action(tensordict))

    @for_users
    def rollout(
        self,
        max_steps: int,
        policy: TensorDictPolicy | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool | None = None,
        break_when_all_done: bool | None = None,
        return_contiguous: bool | None = False,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        trust_policy: bool = False,
        storing_device: torch.device | str | None = None,
        set_state: bool | None = None,
    ) -> TensorDictBase:
        """Take up to ``max_steps`` steps.

        Args:
            max_steps: Steps at most, 1 or more.
            policy: Sets actions in the TensorDict it is given, or returns one with them; ``None``
                acts at random.
            callback: Called with this environment and each finished step.
            auto_reset: Start with `reset`; otherwise with ``tensordict``.
            break_when_any_done: Stop when an episode ends (the default). Otherwise environments are
                reset and continue.
            break_when_all_done: Stop once every environment has ended; one that has repeats its
                last step until then. It is reset meanwhile, and its next episode is dropped.
            return_contiguous: Accepted for compatibility: steps are stacked densely if they can be.
            tensordict: Root data to start with if ``auto_reset`` is false.
            set_truncated: Mark the last step as truncated if the episode did not end by itself.
            trust_policy: Accepted for compatibility, without effect.
            storing_device: Where data are returned.
            set_state: Accepted for compatibility, without effect.

        Returns:
            ``[*batch_size, T]`` data, last dimension named ``"time"``.

        Raises:
            ConfigError: ``max_steps`` below 1, ``auto_reset=False`` without ``tensordict``, or
                arguments that exclude each other.
        """
        max_steps = check_int("max_steps", max_steps, least=1)
        if not auto_reset and tensordict is None:
            raise ConfigError("auto_reset=False needs tensordict=, the root data to start with")
        if break_when_any_done and break_when_all_done:
            raise ConfigError("break_when_any_done and break_when_all_done exclude each other")
        any_done = not break_when_all_done if break_when_any_done is None else break_when_any_done
        root = self.reset() if auto_reset or tensordict is None else tensordict
        enough = 1 if any_done else self.batch_size.numel() if break_when_all_done else math.inf
        steps = self._steps(max_steps, policy, callback, root, enough, bool(break_when_all_done))
        if set_truncated:
            self._truncate(steps[-1])
        if storing_device is not None:
            steps = [step.to(storing_device) for step in steps]
        stacked = LazyStackedTensorDict.maybe_dense_stack(steps, steps[0].ndim)
        stacked.names = [*steps[0].names, TIME]
        return stacked

    def _steps(
        self,
        max_steps: int,
        policy: TensorDictPolicy | None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None,
        root: TensorDictBase,
        enough: float,
        stay: bool,
    ) -> list[TensorDictBase]:
        """Step until ``enough`` environments have ended; ended ones ``stay`` so, as shown."""
        steps: list[TensorDictBase] = []
        over: set[int] = set()
        for _ in range(max_steps):
            root = self._act(policy, root)
            if callback is None and enough == math.inf:
                finished, root = self.step_and_maybe_reset(root)
                steps.append(finished)
                continue
            finished = shown = self.step(root)
            if over:
                mask = torch.zeros(finished.batch_size.numel(), dtype=torch.bool)
                mask[list(over)] = True
                shown = torch.where(mask.reshape(finished.batch_size), steps[-1], finished)
            if callback is not None:
                callback(self, shown)
            steps.append(shown)
            root = self.step_mdp(finished)
            ended = over.union(self._env_specs.ends.ended(root))
            if len(ended) >= enough:
                break
            over, root = ended if stay else over, self.maybe_reset(root)
        return steps

    def _act(self, policy: TensorDictPolicy | None, root: TensorDictBase) -> TensorDictBase:
        if policy is None:
            return self.rand_action(root)
        out = policy(root)
        return root if out is None or out is root else root.update(out)

    def _truncate(self, finished: TensorDictBase) -> None:
        after = finished.get(NEXT)
        for group in self._env_specs.ends.groups:
            done, late = (*group.prefix, "done"), (*group.prefix, "truncated")
            if group.truncated:
                after.set(late, after.get(late) | ~after.get(done))
                after.set(done, torch.ones_like(after.get(done)))

    def _complete(self, data: TensorDictBase) -> TensorDictBase:
        """Give end flags their declared form. Missing flags follow from others, or are False."""
        known = self._env_specs
        lead = data.batch_size[: data.ndim - len(self.batch_size)]
        for group in () if self._returns_all else known.ends.groups:
            keys = [(*group.prefix, name) for name in ("done", "terminated", "truncated")]
            declared = known.done[keys[0]]
            done, dead, late = (self._as_declared(data, key, declared, lead) for key in keys)
            if done is None:
                there = [flag for flag in (dead, late) if flag is not None]
                done = torch.stack(there).any(0) if there else declared.zero(lead)
                data.set(keys[0], done)
            if dead is None:
                data.set(keys[1], done.clone() if late is None else done & ~late)
            if late is None and group.truncated:
                data.set(keys[2], torch.zeros_like(done))
        return data

    # -- life ------------------------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> Any:
        """Seed every environment, from its next reset on.

        Args:
            seed: Given to the first environment; each further one gets the next number.
            static_seed: Give all of them ``seed``.

        Returns:
            The seed of the last environment.

        Raises:
            ConfigError: ``seed`` is not a whole number of 0 or more.
        """
        if seed is not None or self._returns_all:
            seed = check_int("seed", seed, least=0)
        static = {"static": True} if static_seed and self._returns_all else {}
        self._set_seed(seed, **static)
        if seed is None:
            return None
        return seed if static_seed else seed + self.batch_size.numel() - 1

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # of environments
        """Return the state that must survive a restart; empty unless a subclass has one."""
        return {}

    def load_state_dict(  # type: ignore[override]  # of environments
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Restore a state from `state_dict`.

        Raises:
            ConfigError: there is something to restore, and ``strict`` is true.
        """
        if state_dict and strict:
            raise ConfigError(f"{type(self).__name__} keeps no state, got {sorted(state_dict)}")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release the environment. Idempotent, whatever ``raise_if_closed`` says."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def keep_unset(
    new: TensorDictBase, old: TensorDictBase, chosen: torch.Tensor, apart: Container[str] = ()
) -> None:
    """Copy entries of ``old`` to ``new`` where ``chosen`` is not set, except ``apart``."""
    for name, value in new.items():
        was = old.get(name, None)
        if was is None or name in apart:
            continue
        if isinstance(value, TensorDictBase) and not isinstance(value, LazyStackedTensorDict):
            keep_unset(value, was, chosen)  # the old part may have more, its actions say
        elif isinstance(value, torch.Tensor | TensorDictBase):
            where = chosen.reshape(*chosen.shape, *[1] * (value.ndim - chosen.ndim))
            new.set(name, torch.where(where, value, was))


def _following(
    before: Any, after: Any, gone: Container[Key], at: Key = ()
) -> TensorDictBase | None:
    """Return ``before`` with the entries of ``after``, the part under ``"next"``, except ``gone``.

    It takes a third of the time of `TensorDict.update`. ``None``: they are no plain TensorDicts.
    """
    if not (type(before) is type(after) is TensorDict) or before.device != after.device:
        return None
    new, found = dict(after.items()), dict[str, Any]()
    for name, was in before.items():
        if not at and name == NEXT:
            continue
        value = new.pop(name, was)
        if isinstance(was, TensorDictBase):
            found[name] = _following(was, value, gone, (*at, name))
        else:
            found[name] = _tensor(was if (*at, name) in gone else value)
    found.update({name: _tensor(new[name]) for name in new if (*at, name) not in gone})
    if any(value is None for value in found.values()):
        return None
    names = before.names if before.batch_size else None
    return TensorDict._new_unsafe(found, before.batch_size, before.device, names)


def _names(data: TensorDictBase) -> Collection[str]:
    """Return the names of all entries of ``data``; a stack shows only those of all its parts."""
    if isinstance(data, LazyStackedTensorDict):
        return {name for part in data.tensordicts for name in _names(part)}
    return data.keys()  # type: ignore[no-any-return]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _tensor(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None
