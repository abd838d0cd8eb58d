"""Which of TorchRL's transforms are recorded, and which are called as they are, on rows.

By class, `treatment` says in which phases a transform can be recorded, which no test could tell.
`record` records these phases as calls over the rows of all members, and finds out where it cannot:
there, and in all other phases, a transform is called as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import Key, as_key, format_key
from gleanrl.operations.op_recorder import OpRecorder, Unknown

Entries = dict[Key, torch.Tensor]
Phase = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]
"""Takes the data before and the data to transform; returns the latter."""


class Unproven(Exception):
    """The reason why an environment is stepped by its own methods."""


@contextlib.contextmanager
def unproven_on_error() -> Iterator[None]:
    """Turn errors of the body into `Unproven`: it runs code of users and of unknown versions."""
    try:
        yield
    except Unproven:
        raise
    except Exception as err:
        raise Unproven(f"looking at its parts raised {err!r:.200}") from err


# -- by class --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Treatment:
    """How a transform is stepped. By default it is recorded.

    Then its results depend on nothing but its settings and the data of the step.
    """

    called: Collection[str] = ()
    """Phases that read or change something besides tensors: in these it is called."""
    stateful: bool = False
    """Whether results depend on its tensors as well, which it changes."""
    alone: bool = False
    """Whether it cannot be one of several: it draws random numbers, or changes a spec."""
    counts_others: bool = False
    """Whether it uses the rows of members that a partial reset leaves alone."""
    lives: bool = False
    """Whether it also reads the lives of Atari environments."""
    leads: bool = False
    """Whether it steps and resets the environment under it: it is a wrapper of that one."""

    @property
    def acts_for_one(self) -> bool:
        """Whether each of several members needs its own."""
        return self.stateful or (bool(self.called) and not self.lives)


def _each(treated: Treatment, *modules: str) -> dict[tuple[str, str], Treatment]:
    """Return transforms by module and name; ``"_clip ClipTransform ExpandAs"``: two of one."""
    split = (f"torchrl.envs.transforms.{module}".split() for module in modules)
    return {(home, name): treated for home, *names in split for name in names}


_TREATMENTS = {
    **_each(
        Treatment(),
        "_action ActionDiscretizer ActionScaling",
        "_clip ClipTransform ExpandAs",
        "_device DTypeCastTransform DoubleToFloat",
        "_env InitTracker StepCounter TensorDictPrimer",
        "_keys ExcludeTransform RemoveEmptySpecs RenameTransform SelectTransform",
        "_misc FiniteTensorDictCheck",
        "_normalization ObservationNorm RewardScaling",
        "_observation CenterCrop Crop FlattenObservation GrayScale PermuteTransform Resize",
        "_observation SqueezeTransform ToTensorImage UnsqueezeTransform",
        "_reward BinarizeReward LineariseRewards RewardClipping RewardSum SignTransform",
        "_reward TargetReturn",
        "_tensor CatTensors",
    ),
    **_each(Treatment(alone=True), "_action DiscreteActionProjection"),
    **_each(Treatment(stateful=True), "_misc TimeMaxPool", "_observation CatFrames"),
    **_each(
        Treatment(stateful=True, counts_others=True), "_normalization VecNorm", "vecnorm VecNormV2"
    ),
    **_each(Treatment(("_reset",)), "_env TrajCounter"),
    **_each(Treatment(("_step", "_reset"), alone=True), "_action ActionMask"),
    **_each(Treatment(("_step", "_reset"), lives=True), "gym_transforms EndOfLifeTransform"),
    **_each(Treatment(leads=True), "_env FrameSkipTransform NoopResetEnv"),
}


def treatment(transform: Any) -> Treatment:
    """Return how a transform of TorchRL's is stepped, or raise `Unproven`."""
    kind = type(transform)
    found = _TREATMENTS.get((kind.__module__, kind.__qualname__))
    if found is None:
        raise Unproven(f"{kind.__name__} is not known to depend on the data of one step alone")
    return found


# -- recording -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """What a transform does in one phase of a step."""

    name: str
    call: Phase
    trial: Phase | None = None
    """The same of a copy, if a call changes the transform; ``None``: it depends on settings and
    data alone."""
    state: Sequence[torch.Tensor] = ()
    """Tensors of the transform that a call changes, and nobody else meanwhile."""
    only: frozenset[Key] | None = None
    """The entries that a call reads; ``None``: all."""
    outside: Sequence[tuple[torch.Tensor, Callable[[], Any]]] = ()
    """Tensors that a call reads as well, and what fills each before the call."""


@dataclass(frozen=True, slots=True)
class TransformProgram:
    """Recorded calls that fill `results` from the memory that they were recorded on."""

    results: Entries
    calls: Sequence[Callable[[], Any]]
    as_they_are: frozenset[str]
    """The transforms that are called, not recorded."""
    ops: OpRecorder


def record(
    methods: Iterable[Method],
    before: Entries,
    data: Entries,
    batch: tuple[int, ...],
    *,
    settings: Sequence[torch.Tensor],
    constants: Iterable[torch.Tensor],
) -> TransformProgram:
    """Run ``methods`` one after the other on ``data``, and record the calls that do it again.

    Nothing is written to ``data``, nor to those ``before`` the step. All begin with the dimensions
    ``batch``. ``settings``: Tensors of transforms that are read at every replay. ``constants``:
    those a change of which is noticed elsewhere.

    Raises:
        Unproven: a method raised an error, or changes other tensors than those of its state.
    """
    ops = OpRecorder()
    ops.changing([*before.values(), *data.values(), *settings])
    ops.constants(constants)
    current, as_they_are = dict(data), set()
    for method in methods:
        seen, given = (_only(method.only, part) for part in (before, current))
        for filled, fill in method.outside:
            ops.changing([filled])
            ops.add_whole(fill, (), [filled], always=False)
        try:
            called = _call(method.trial or method.call, seen, given, batch)  # fills caches
            found = None
            if method.trial is None or method.state:
                found = _recorded(ops, method, before, current, batch)
        except Unproven:
            raise
        except Exception as err:
            raise Unproven(f"{method.name} raised {err!r:.200} on rows") from err
        if found is None:
            ops.changing(called.values())
            reads = [*seen.values(), *given.values(), *(filled for filled, _ in method.outside)]
            call = partial(_call_again, method, seen, given, batch, called)
            ops.add_whole(call, reads, called.values(), always=method.trial is not None)
            as_they_are.add(method.name)
            found = called if method.only is None else {**current, **called}
        current = found
    passed = {value.data_ptr() for value in before.values()}
    current = {key: ops.original(value) for key, value in current.items()}
    with ops:  # rows of the step before are replaced before all results are copied out of them
        current = {k: v.clone() if v.data_ptr() in passed else v for k, v in current.items()}
    ops.prune((0, 0), current.values())
    return TransformProgram(current, ops.calls(), frozenset(as_they_are), ops)


def _recorded(
    ops: OpRecorder, method: Method, before: Entries, data: Entries, batch: tuple[int, ...]
) -> Entries | None:
    """Record the calls of ``method``; return its results, ``None`` if they are not known."""
    mark = ops.mark()
    ops.states(method.state)
    kept = [one.clone() for one in method.state]
    try:
        with ops:
            out = method.call(_tensordict(before, batch), _tensordict(data, batch))
            found = {key: _dense(value) for key, value in _leaves(out).items()}
        if ops.complete and not ops.numbers:
            return found
    except Unknown:
        pass
    finally:
        for tensor, value in zip(method.state, kept, strict=True):
            tensor.copy_(value)
    ops.cut(mark)
    return None


def _only(keys: Collection[Key] | None, entries: Entries) -> Entries:
    return {key: value for key, value in entries.items() if keys is None or key in keys}


def _tensordict(entries: Entries, batch: tuple[int, ...]) -> TensorDictBase:
    td = TensorDict({}, batch_size=batch)
    for key, value in entries.items():
        td.set(key, value)
    return td


def _leaves(td: TensorDictBase) -> Entries:
    return {as_key(key): value for key, value in td.items(True, True)}


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, copied if several of its elements lie in one place."""
    if 0 in value.stride() and value.numel() > 1:
        return value.clone(memory_format=torch.contiguous_format)
    return value


def _call(call: Phase, before: Entries, data: Entries, batch: tuple[int, ...]) -> Entries:
    """Call ``call`` on copies; return its results, in memory of their own."""
    copies = [{key: value.clone() for key, value in part.items()} for part in (before, data)]
    out = call(*(_tensordict(part, batch) for part in copies))
    return {
        key: value.clone(memory_format=torch.contiguous_format)
        for key, value in _leaves(out).items()
    }


def _call_again(
    method: Method,
    before: Entries,
    data: Entries,
    batch: tuple[int, ...],
    results: Mapping[Key, torch.Tensor],
) -> None:
    """Call ``method``, and write its results into ``results``."""
    found = _call(method.call, before, data, batch)
    if found.keys() != results.keys():
        differing = ", ".join(sorted(map(format_key, found.keys() ^ results.keys())))
        raise EnvError(f"{method.name} returned other entries than in its first step: {differing}")
    for key, value in found.items():
        results[key].copy_(value)
