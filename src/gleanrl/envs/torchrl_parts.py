"""The parts of TorchRL environments, where all their code is TorchRL's own.

TorchRL is not imported here: its classes are known by module and name. An environment that is taken
apart has exactly these classes, no method of which was replaced on the class or on the instance.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, starmap
from multiprocessing.synchronize import SemLock
from operator import attrgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.keys import Key, as_key
from gleanrl.envs.recorded_or_called_transforms import Treatment, Unproven, treatment
from gleanrl.envs.rehearsal_stand_ins import Tape
from gleanrl.envs.serial import SerialEnv
from gleanrl.envs.state_kinds import LINKS
from gleanrl.envs.vector import is_vector_env
from gleanrl.operations.change_watch import Watch
from gleanrl.operations.proofs import is_genuine, is_plain, qualified, unmodified

_GYM = {"torchrl.envs.libs.gym.GymEnv", "torchrl.envs.libs.gym.GymWrapper"}
_SERIAL = "torchrl.envs.batched_envs.SerialEnv"
_PARALLEL = "torchrl.envs.batched_envs.ParallelEnv"
_TRANSFORMED = "torchrl.envs.transforms._base.TransformedEnv"
_COMPOSE = "torchrl.envs.transforms._base.Compose"
_COUNTER = "torchrl.envs.transforms._env.TrajCounter"


@dataclass(frozen=True, slots=True)
class Parts:
    """What an environment consists of."""

    base: Any
    """The environment under the transforms that are around all members."""
    shells: tuple[tuple[Any, ...], ...]
    """The transformed environments around each member, the inmost first."""
    members: tuple[Any, ...]
    """The environments around one Gymnasium environment each; none if they are in workers."""
    gym_envs: tuple[gym.Env[Any, Any], ...]
    wholes: tuple[Any, ...]
    """The transformed environments around all members, the inmost first."""
    own: tuple[tuple[nn.Module, ...], ...]
    """The transforms of `shells`, for each member."""
    wide: Any
    """An environment that never runs, around which transforms in `shells` are those of all."""
    transforms: tuple[nn.Module, ...]
    """Transforms of all members at once, in the order in which they see an observation."""
    stands_for: tuple[tuple[nn.Module, ...], ...]
    """For each of these, the transforms of the members that act in its place, or none."""
    leading: tuple[tuple[nn.Module, ...], ...]
    """The transforms before these that step and reset each member themselves."""

    @property
    def envs(self) -> list[Any]:
        """All environments with TensorDict methods."""
        return [*self.members, *chain.from_iterable(self.shells), self.base, *self.wholes]

    def first(self, count: int) -> Parts:
        """Return the parts of a batch of the first ``count`` members."""
        each: Any = {name: getattr(self, name)[:count] for name in _OF_EACH}
        return replace(self, **each)

    def watch(self, watch: Watch) -> None:
        """Have ``watch`` notice changes of classes and of transforms."""
        for env in self.envs:
            watch.add_class(type(env))
        for whole in [*chain.from_iterable(self.shells), *self.wholes]:
            for part in whole.transform.modules():
                watch.add(part)
        for part in self.transforms:
            watch.add(part)
        for tensor in self._buffers():
            if tensor.dtype is torch.bool:  # Python decides upon it
                watch.hold(tensor)

    @property
    def numbers(self) -> list[torch.Tensor]:
        """Buffers of transforms that only arithmetic reads."""
        return [one for one in self._buffers() if one.dtype is not torch.bool]

    @property
    def primed(self) -> dict[Key, bool]:
        """Entries that pass on outputs of the policy, and whether episodes begin with zeros."""
        found = {}
        primers: list[Any] = list(filter(_is_primer, self.transforms))
        for part in primers:
            first = part.default_value
            for key in part.primers.keys(True, True):
                zero = isinstance(first, dict) and not part.random and first[key] == 0
                found[as_key(key)] = zero
        return found

    @property
    def stateful(self) -> list[nn.Module]:
        """The transforms that have a state."""
        return [one for one in self._holders if treatment(one).stateful]

    @property
    def places(self) -> list[int]:
        """Where the tensors of `stateful` transforms lie."""
        return [tensor.data_ptr() for part in self.stateful for tensor in tensors_of(part)]

    @property
    def _holders(self) -> list[nn.Module]:
        pairs = zip(self.transforms, self.stands_for, strict=True)
        return list(chain.from_iterable(theirs or (part,) for part, theirs in pairs))

    def _buffers(self) -> list[torch.Tensor]:
        return [one for part in self._holders for one in part.buffers()]

    def intact(self) -> bool:
        """Tell whether the environments still have these parts and their classes' methods."""
        ends = [_peeled(env) for env in _members(self.base)]
        base, wholes = _peeled([*self.wholes[-1:], self.base][0])
        return (
            not any(map(_replaced, self.envs))
            and _same([member for member, _ in ends], self.members)
            and all(starmap(_same, zip((own for _, own in ends), self.shells, strict=True)))
            and _same([member._env for member in self.members], self.gym_envs)
            and _same([base, *wholes], [self.base, *self.wholes])
        )

    def alike(self) -> bool:
        """Tell whether transforms that act for all members have the same numbers."""
        for_all = [not theirs for theirs in self.stands_for]
        each = [
            [one for part in compress(own, for_all) for one in part.buffers()] for own in self.own
        ]
        return all(all(map(torch.equal, each[0], other)) for other in each[1:])


_OF_EACH = ("shells", "members", "gym_envs", "own", "leading")
"""The `Parts` of which each member has its own."""


def kept_rows(parts: Parts) -> dict[Key, torch.Tensor]:
    """Return the memory in which a batch of members keeps their results.

    A ``SerialEnv`` keeps the last resets; transforms around it are shown all of these when some
    members are reset. A ``ParallelEnv`` keeps actions, the last steps and the present.
    """
    base, kind = parts.base, qualified(type(parts.base))
    if kind != _PARALLEL and (kind != _SERIAL or parts.own[0] or not base._use_buffers):
        return {}
    held = vars(base)["shared_tensordict_parent"]
    return {as_key(key): value for key, value in held.items(True, True)}


def keep_nothing(parts: Parts) -> bool:
    """Tell whether an environment of ``parts`` is like new after a reset, if its members are."""
    each = chain(parts.transforms, *parts.leading)
    return bool(parts.members) and all(treatment(one) == Treatment() for one in each)


def is_counter(transform: Any) -> bool:
    """Tell whether ``transform`` counts in memory that copies do not have."""
    return qualified(type(transform)) == _COUNTER


def tensors_of(transform: nn.Module) -> list[torch.Tensor]:
    """Return all tensors that ``transform`` holds."""
    held = [*transform.buffers(), *vars(transform).values()]
    found = [one for one in held if isinstance(one, torch.Tensor)]
    for one in held:
        if isinstance(one, TensorDictBase):
            found += [leaf for leaf in one.values(True, True) if isinstance(leaf, torch.Tensor)]
    return found


def _same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return list(map(id, objects)) == list(map(id, others))


def parts_of(env: Any) -> Parts:
    """Take ``env`` apart, unchanged; `Unproven` if it is or does more than known classes do."""
    base, wholes = _peeled(env)
    around = _chain_of(wholes)
    if qualified(type(base)) == _PARALLEL:
        return _around_workers(base, wholes, around)
    single = qualified(type(base)) in _GYM
    ends = [(base, ())] if single else list(map(_peeled, _members(base)))
    members, shells = (tuple(part) for part in zip(*ends, strict=True))
    chains = [around] if single else list(map(_chain_of, shells))
    alone = sorted({type(part).__name__ for part in chains[0] if treatment(part).alone})
    if alone and not single:
        raise Unproven(
            f"each member draws numbers, or has a spec, of its own in {', '.join(alone)}"
        )
    _require_alike(chains)
    leads, own = (tuple(part) for part in zip(*map(_led, chains), strict=True))
    if single:
        (around,), own = own, ((),)
    _require_none_leads((*own[0], *around))
    for member in members:
        _require_plain_gym(member)
    gym_envs = tuple(member._env for member in members)
    wide, inside = _around_all(members, shells[0]) if own[0] else (None, ())
    transforms = (*inside, *around)
    theirs = [each if treatment(each[0]).acts_for_one else () for each in zip(*own, strict=True)]
    stands_for = (*theirs, *((),) * len(around))
    parts = Parts(base, shells, members, gym_envs, wholes, own, wide, transforms, stands_for, leads)
    for one in parts.envs:
        _require_own_methods(one)
    if not parts.alike():
        raise Unproven(_UNLIKE)
    # One transform of several members may have one state: members use it in the same order.
    places = [{one.data_ptr() for part in each for one in tensors_of(part)} for each in theirs]
    if len(set().union(*places)) < sum(map(len, places)):
        raise Unproven("several transforms of its members have one state")
    if len(members) > 1 and not kept_rows(parts):
        _require_masked_resets(around)
    return parts


def _require_masked_resets(around: Sequence[nn.Module]) -> None:
    """Raise `Unproven` if a transform uses the rows of members that a partial reset leaves alone.

    These rows hold whatever the batch shows for them, and the rows of recorded steps hold that
    only if they are the memory of the batch.
    """
    for part in around:
        if treatment(part).counts_others:
            kind = type(part).__name__
            raise Unproven(f"{kind} counts members that a partial reset leaves alone")


def _around_workers(base: Any, wholes: tuple[Any, ...], around: tuple[nn.Module, ...]) -> Parts:
    """Return the parts of transformed environments around a ``ParallelEnv`` that was started.

    Its workers step any environments, with the commands that it sends them, in memory that it
    shares with them.
    """
    _require_none_leads(around)
    shares = base._use_buffers and base._share_memory and not base.share_individual_td
    alone = len(base.batch_size) == 1 and base._worker_indices == list(range(base.num_workers))
    if not (shares and alone) or base._non_tensor_keys or base._supports_set_state:
        raise Unproven("its ParallelEnv passes other data to workers than usual, or in other ways")
    parts = Parts(base, (), (), (), wholes, (), None, around, ((),) * len(around), ())
    for one in parts.envs:
        _require_own_methods(one)
    return parts


def ordinary_parallel_env(env: Any) -> Any:
    """Return the ``ParallelEnv`` in ``env`` if it is as TorchRL made it, else ``None``."""
    base: Any = _peeled(env)[0]
    with contextlib.suppress(Unproven):
        if qualified(type(base)) == _PARALLEL:
            _require_own_methods(base)
            return base if base._use_buffers and base._owns_workers else None
    return None


def _require_none_leads(transforms: Sequence[nn.Module]) -> None:
    for part in transforms:
        if treatment(part).leads:
            raise Unproven(f"{type(part).__name__} is not the first transform of one environment")


_UNLIKE = "the transforms of its members have other settings from member to member"


def _led(chain: tuple[nn.Module, ...]) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the first transforms of a chain, which step the environment, and the others."""
    others = (i for i, part in enumerate(chain) if not treatment(part).leads)
    count = next(others, len(chain))
    return chain[:count], chain[count:]


def _peeled(env: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the environment in all transformed environments, and these, the inmost first."""
    wholes: list[Any] = []
    while qualified(type(env)) == _TRANSFORMED:
        wholes.insert(0, env)
        env = env.base_env
    return env, tuple(wholes)


def _members(env: Any) -> list[Any]:
    if qualified(type(env)) == _SERIAL:
        return list(env._envs)
    if isinstance(env, SerialEnv) and unmodified(env):
        return list(env.members)
    return [] if qualified(type(env)) == _PARALLEL else [env]


def _require_alike(own: Sequence[Sequence[nn.Module]]) -> None:
    """Raise `Unproven` unless transforms that act for all members have the same settings."""
    first, *others = ([_settings(part) for part in each] for each in own)
    if any(other != first for other in others):
        raise Unproven(_UNLIKE)


def _settings(part: nn.Module) -> tuple[type, dict[str, Any]]:
    held = {} if treatment(part).acts_for_one else vars(part)
    return type(part), {name: value for name, value in held.items() if name not in _NO_SETTINGS}


_NO_SETTINGS = {*LINKS, *vars(nn.Module())}


def _around_all(members: Sequence[Any], shells: Sequence[Any]) -> tuple[Any, tuple[nn.Module, ...]]:
    """Return transforms in ``shells``, of one member, around copies of all ``members`` at once.

    They share the buffers of the originals. Only their specs are used, and the methods of those
    that act for all members.
    """
    serial, compose = map(pkgutil.resolve_name, (_SERIAL, _COMPOSE))
    copies = [_copied(member, Tape(member._env)) for member in members]
    makers = [lambda copy=copy: copy for copy in copies]
    with warnings.catch_warnings(action="ignore"):  # about the originals they were given already
        whole = serial(len(makers), makers)
        for shell in shells:
            parts: Sequence[Any] = _led(_chain_of([shell]))[1]
            whole = type(shell)(whole, compose(*[part.clone() for part in parts]))
    return whole, _chain_of(_peeled(whole)[1])


def _chain_of(wholes: Sequence[Any]) -> tuple[nn.Module, ...]:
    """Return the transforms of ``wholes``, in the order in which they see an observation."""
    return tuple(part for whole in wholes for part in _chain(whole.transform))


def _chain(transform: Any) -> Iterator[nn.Module]:
    name = type(transform).__name__
    if not is_plain(transform) or not all(map(is_genuine, type(transform).__mro__[:-1])):
        raise Unproven(f"{name} is not TorchRL's own, or has hooks or replaced methods")
    if qualified(type(transform)) == _COMPOSE:
        for part in transform.transforms:
            yield from _chain(part)
        return
    treatment(transform)
    if _is_primer(transform):
        first: Any = transform.default_value
        if any(map(callable, [first, *(first.values() if isinstance(first, dict) else ())])):
            raise Unproven(f"{name} calls a function for the values that episodes begin with")
    if name == "StepCounter" and not transform.update_done:
        raise Unproven("StepCounter truncates without ending episodes (update_done=False)")
    yield transform


def _is_primer(part: Any) -> bool:
    return type(part).__name__ == "TensorDictPrimer"


def _require_plain_gym(member: Any) -> None:
    name = type(member).__name__
    if qualified(type(member)) not in _GYM:
        raise Unproven(f"{name} is not TorchRL's GymEnv or GymWrapper around Gymnasium")
    _require_own_methods(member)
    inside = member._env
    if not isinstance(inside, gym.Env) or is_vector_env(inside) or member.batch_size:
        raise Unproven(f"{name} is not around a single gymnasium.Env")
    if member.info_dict_reader or member._run_type_checks:
        raise Unproven(f"{name} reads infos or checks types")


def _require_own_methods(env: Any) -> None:
    """Raise `Unproven` unless ``env``, and its class, have the methods that TorchRL wrote."""
    kind, replaced = type(env), _replaced(env)
    if replaced or not all(map(is_genuine, kind.__mro__[:-1])):
        raise Unproven(f"methods of {kind.__name__} were replaced {replaced or ''}".rstrip())
    if env.device is not None and env.device.type != "cpu":
        raise Unproven(f"{kind.__name__} has its data on {env.device}")


def _replaced(env: Any) -> list[str]:
    """Return the names of methods that the instance has in place of those of its class."""
    kind: Any = type(env)
    own = vars(env)
    return [
        name
        for name in own.keys() & _methods(kind)
        if getattr(own[name], "__func__", None) is not getattr(kind, name)
    ]


@functools.lru_cache(maxsize=64)
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def twin_of(parts: Parts, stand_ins: Sequence[Any]) -> Any:
    """Return a copy of the environment of ``parts`` around other Gymnasium environments.

    Those of workers are around other workers, which serve in this process.
    """
    if not parts.members:
        return _rewrapped(_served_by(stand_ins, parts.base), parts.base, parts.wholes)
    ends = [
        _rewrapped(_copied(member, new), member, shells)
        for member, new, shells in zip(parts.members, stand_ins, parts.shells, strict=True)
    ]
    twin = ends[0]
    if isinstance(parts.base, SerialEnv):
        twin = SerialEnv.of(ends)
    elif qualified(type(parts.base)) == _SERIAL:
        makers = [lambda end=end: end for end in ends]
        twin = type(parts.base)(len(makers), makers, use_buffers=parts.base._use_buffers)
    return _rewrapped(twin, parts.base, parts.wholes)


def _served_by(workers: Sequence[Any], base: Any) -> Any:
    """Return a ``ParallelEnv`` like ``base`` with other workers."""
    twin, flags = base._make_batched_view(range(len(workers))), bytearray(len(workers))
    shared = base.shared_tensordict_parent.clone()
    parts = shared.unbind(0)
    for index, worker in enumerate(workers):
        worker.serve(parts[index], flags, index)
    held = {
        "shared_tensordict_parent": shared,
        "shared_tensordicts": parts,
        "_shared_tensordict_parent_next": shared.get("next"),
        "_shared_tensordict_parent_root": shared.exclude("next", *twin.reset_keys),
    }
    vars(twin).update(held, parent_channels=workers, _workers=workers, _shm_done_flags=flags)
    return twin


def _copied(member: Any, inside: gym.Env[Any, Any]) -> Any:
    return copy.deepcopy(member, {id(member._env): inside})


def _rewrapped(twin: Any, inner: Any, wholes: Sequence[Any]) -> Any:
    """Return copies of ``wholes``, which are around ``inner``, around ``twin``."""
    for whole in wholes:
        twin = copy.deepcopy(whole, {id(inner): twin, **_locks(whole.transform)})
        twin.transform.reset_parent()  # a weak reference, which copying leaves as it is
        twin.transform.set_container(twin)
        pairs = zip(twin.transform.modules(), whole.transform.modules(), strict=True)
        for part, original in pairs:
            if is_counter(part):
                own_counter(part).load_state_dict(original.state_dict())
            if type(part).__name__ == "NoopResetEnv":
                part.noops = min(part.noops, _MOST_NOOPS)
        inner = whole
    return twin


_MOST_NOOPS = 2
"""Random steps after a reset of a copy, whose made-up episodes are short."""


def copied_transform(part: Any) -> Any:
    """Return a copy of ``part`` with the same environment around it."""
    _ = part.parent  # TorchRL keeps what it finds; a copy could not find it
    # Copying resolves the weak reference to what it is in, and copies that as well.
    around = [part.__getstate__()[name] for name in LINKS]
    memo = {id(one): one for one in around if one is not None} | _locks(part)
    copied = copy.deepcopy(part, memo)
    return own_counter(copied) if is_counter(part) else copied


def with_lives(part: Any, parts: Parts) -> tuple[Any, torch.Tensor, Callable[[], None]]:
    """Return a copy of an ``EndOfLifeTransform`` that takes lives from a tensor.

    Also returns the tensor, and the function that reads the lives of all members into it, without
    TorchRL's slow search for attributes. `Unproven` if that may find other lives.
    """
    first, path = part.eol_attribute[0], attrgetter(".".join(part.eol_attribute))
    if any(first in dir(env) for env in parts.envs):
        raise Unproven(f"an environment has its own `{first}`")

    def values() -> list[Any]:
        found = map(path, parts.gym_envs)
        return [one() if callable(one) else one for one in found]

    lives = torch.tensor(values()).reshape(part.parent.batch_size)
    row = lives.numpy().reshape(-1)
    copied = copied_transform(part)
    vars(copied)["_get_lives"] = lambda: lives
    return copied, lives, lambda: np.copyto(row, values())


def own_counter(counter: Any) -> Any:
    """Return ``counter``, a copy of a ``TrajCounter``, with memory to count in."""
    counter._make_shared_value()
    return counter


def _locks(transform: nn.Module) -> dict[int, Any]:
    """Return the locks in ``transform`` by their ``id``; copies share them."""
    held = [one for part in transform.modules() for one in vars(part).values()]
    return {id(one): one for one in held if isinstance(one, SemLock)}
