"""A list of calls without arguments that does one step of arithmetic in place.

Code runs under an `OpRecorder` as it would without. Each operation on tensors that change from step
to step is kept as a call that computes into the same result again. Replaying a call costs the
kernel and nothing else: no allocation, no lookup, no Python frame.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gleanrl.core.errors import PolicyError
from gleanrl.core.window import Array


class Unknown(Exception):
    """What a unit does is not known here: it is called as it is."""


def require(known: bool) -> None:
    """Raise `Unknown` unless something is ``known`` to be so."""
    if not known:
        raise Unknown


def array_of(tensor: torch.Tensor) -> Array | None:
    """Return a numpy array over the memory of ``tensor``, ``None`` where there can be none."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype is torch.bfloat16:
        return None
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        return None


def as_rows(value: torch.Tensor, batch_dims: int) -> Any:
    """Return ``value``, with ``batch_dims`` batch dimensions, as rows of environments ``[P, ...]``.

    They are an array over the same memory, or a tensor where there can be none.
    """
    tensor = value.unsqueeze(0) if batch_dims == 0 else value
    if batch_dims > 1:
        tensor = value.view(-1, *value.shape[batch_dims:])
    array = array_of(tensor)
    return tensor if array is None else array


@dataclass(slots=True)
class Check:
    """Folds one tensor over all steps, to be looked at once per rollout."""

    total: torch.Tensor
    start: float
    valid: Callable[[torch.Tensor], torch.Tensor]
    message: str

    def begin(self) -> None:
        """Forget the steps seen."""
        self.total.fill_(self.start)

    def finish(self) -> None:
        """Raise `PolicyError` if any step since `begin` was invalid."""
        if not bool(self.valid(self.total).all()):
            raise PolicyError(self.message)


# The same arithmetic, bit for bit, called in half the time; tells on rows as small as these.
_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "bitwise_and": np.bitwise_and,
    "bitwise_not": np.invert,
    "bitwise_or": np.bitwise_or,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "logical_and": np.logical_and,
    "logical_not": np.logical_not,
    "logical_or": np.logical_or,
    "lt": np.less,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "square": np.square,
    "sub": np.subtract,
}
# With half a number's precision numpy rounds Python's numbers first, torch does not.
_EXACT = (torch.float32, torch.float64, torch.int64, torch.bool)
_UNKNOWN = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
_ATEN = torch.ops.aten
_WITH_GENERATOR = {
    _ATEN.rand.default: _ATEN.rand.generator,
    _ATEN.randint.default: _ATEN.randint.generator,
    _ATEN.randint.low: _ATEN.randint.low_generator,
}
"""Operations that make tensors of draws, with a generator."""
_FILLED_WITH = {"zeros_like": 0, "ones_like": 1}
"""Operations whose results hold one number, whatever they are given."""
_EACH = "_foreach_"
# These change shapes only.
_RESHAPING = {"squeeze_", "t_", "transpose_", "unsqueeze_"}
# These leave nothing of what was there before.
_FILLING = {"copy_", "exponential_", "fill_", "normal_", "uniform_", "zero_"}


class OwnStream(TorchDispatchMode):
    """Has what runs draw from a generator of its own: other threads may use torch's meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.stream = torch.Generator()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``; raise `Unknown` if it draws and takes no generator."""
        return self._drawn(func, args, kwargs or {})

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return func(*args, **kwargs)
        if func is _ATEN.randn_like.default:  # takes a generator in newer versions only
            return torch.empty_like(*args, **kwargs).normal_(generator=self.stream)
        func = _WITH_GENERATOR.get(func, func)
        require(any(argument.name == "generator" for argument in func._schema.arguments))
        return func(*args, **kwargs, generator=self.stream)


@dataclass(frozen=True, slots=True)
class _Step:
    """One recorded call, and the places that it reads and writes."""

    call: Callable[[], Any]
    reads: Collection[int]
    writes: Collection[int] | None
    """``None``: it is needed even if nothing reads what it writes."""


class OpRecorder(OwnStream):  # type: ignore[no-untyped-call]  # torch's
    """Records operations while they are made."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self.checks: list[Check] = []
        self.complete = True
        """Whether a replay does all that ran under this recorder, if `numbers` are the same."""
        self.numbers: set[type] = set()
        """The types of the Python numbers that what ran has read, and may have depended on."""
        self._changing: set[int] = set()
        """Where tensors lie whose values differ from step to step."""
        self._read: set[int] = set()
        """Where tensors lie that recorded calls read."""
        self._made: dict[int, torch.Tensor] = {}
        """What was made under this recorder, by place."""
        self._states: set[int] = set()
        """Where tensors lie that replays change, and read at the next replay."""
        self._constants: set[int] = set()
        """Where tensors lie that somebody watches."""
        self._copies: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """The steps that copy, their results and what they copy, by place of the results."""
        self.first: dict[str, torch.Tensor] = {}
        """What each operation gave when it was recorded first, by its name."""

    def calls(self, mark: tuple[int, int] = (0, 0)) -> list[Callable[[], Any]]:
        """Return the calls of a replay, since ``mark``."""
        return [step.call for step in self._steps[mark[0] :]]

    def mark(self) -> tuple[int, int]:
        """Return a place to `cut` at; what follows is `complete` so far."""
        self.complete, self.numbers, self.first = True, set(), {}
        return len(self._steps), len(self.checks)

    def cut(self, mark: tuple[int, int]) -> None:
        """Forget what was recorded since ``mark``; nothing else was changed by recording it."""
        del self._steps[mark[0] :], self.checks[mark[1] :]

    def prune(self, mark: tuple[int, int], wanted: Iterable[torch.Tensor]) -> None:
        """Forget what was recorded since ``mark`` for nothing that is ``wanted``, checked or drawn.

        Distributions validate their arguments, for example.
        """
        needed, kept = set(map(_place, wanted)), []
        for step in reversed(self._steps[mark[0] :]):
            if step.writes is None or not needed.isdisjoint(step.writes):
                needed.update(step.reads)
                kept.append(step)
        self._steps[mark[0] :] = reversed(kept)

    def original(self, value: torch.Tensor) -> torch.Tensor:
        """Return the state that ``value`` is a copy of, if both are alike after a replay.

        Else return ``value``.
        """
        if _place(value) not in self._copies:
            return value
        index, copy, state = self._copies[_place(value)]
        later, place = self._steps[index + 1 :], _place(state)
        written = any(_place(copy) in (step.writes or ()) for step in later)
        changed = any(step.writes is None and place in step.reads for step in later)
        same = _form(value) == _form(copy) and state.dtype is value.dtype
        return state if same and place in self._states and not written | changed else value

    def add(
        self,
        call: Callable[[], Any],
        reads: Collection[int] = (),
        writes: Collection[int] | None = None,
    ) -> None:
        """Record ``call``, which reads and writes tensors at these places."""
        self._steps.append(_Step(call, reads, writes))

    def add_whole(
        self,
        call: Callable[[], Any],
        reads: Iterable[torch.Tensor],
        makes: Iterable[torch.Tensor],
        always: bool,
    ) -> None:
        """Record ``call``, which reads ``reads`` and fills the tensors in ``makes``.

        It is needed ``always``, or if anything reads its results.
        """
        made = {_place(one): one for one in makes}
        self._made.update(made)
        self.add(call, set(map(_place, reads)), None if always else set(made))

    def reads(self, tensor: torch.Tensor) -> bool:
        """Tell whether a call that was kept reads the memory of ``tensor``."""
        return any(_place(tensor) in step.reads for step in self._steps)

    def changing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that the values of ``tensors`` may differ from step to step."""
        self._changing.update(map(_place, tensors))

    def states(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that what runs may write to ``tensors``, which pass from replay to replay.

        Recording also writes to them.
        """
        self._states.update(map(_place, tensors))
        self._changing |= self._states

    def constants(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that a change of ``tensors`` is noticed elsewhere, and recorded calls may read them.

        Any other tensor from outside may be a cache, which a replay would use for ever.
        """
        self._constants.update(map(_place, tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and record it if its result may differ at the next step.

        `Unknown` if it reads a tensor that is neither known to change nor a constant nor made under
        this recorder, or writes to one that was not made here, or to a constant that a recorded
        call reads.
        """
        kwargs = kwargs or {}
        if _name(func).startswith(_EACH):
            return self._each(func, args, kwargs)
        given = {_place(one) for one in _tensors((args, kwargs))}
        if _name(func) == "lift_fresh":  # how ``torch.tensor(...)`` ends
            self._made.update((_place(one), one) for one in _tensors(args))
        require(given <= self._changing | self._made.keys() | self._constants)
        # In training it also writes the running statistics, which its schema does not say.
        require(
            func is not _ATEN.native_batch_norm.default or not (args[5] and _tensors(args[3:5]))
        )
        draws = torch.Tag.nondeterministic_seeded in func.tags
        varies = draws or not given.isdisjoint(self._changing)
        writes = func._schema.is_mutable
        if writes:
            self._write(func, args, kwargs, given if varies else None)
        if varies:
            self._read |= given
        result = self._drawn(func, args, kwargs)
        if writes:
            return result
        results = _tensors(result)
        fresh = {_place(one): one for one in results if _place(one) not in given}
        if results and not fresh:
            return result  # a view
        self._made.update(fresh)
        # Whether all is valid is looked at once per rollout, where it has to be.
        if varies and _name(func) != "_is_all_true":
            call = self._replayable_call(func, args, kwargs, result, given)
            self.complete = self.complete and call is not None and 0 not in fresh
            self._changing.update(fresh)
            if call is not None:
                self.add(call, given, None if draws else fresh)
        return result

    def _each(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation on several tensors as one on each of them, in turn."""
        name = _name(func).removeprefix(_EACH)
        lists = [isinstance(arg, (list, tuple)) for arg in args]
        results = []
        with self:
            for index in range(len(args[0])):
                own = [a[index] if many else a for a, many in zip(args, lists, strict=True)]
                results.append(getattr(own[0], name)(*own[1:], **kwargs))
        return None if name.endswith("_") else results

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, given: Collection[int] | None
    ) -> None:
        """Record a call that writes to its first argument; ``given``: what it reads, if it varies.

        A call that draws is never pruned: the numbers that follow depend on it.
        """
        name, target = _name(func), args[0]
        if name in _RESHAPING:
            return
        place = _place(target)
        if place in self._states:
            require(name.endswith("_") and given is not None)
            call = partial(getattr(target.detach(), name), *_detached(args[1:]), **kwargs)
            self.add(call, given or (), None)
            return
        require(name.endswith("_") and place in self._made)
        require(place in self._changing or place not in self._read)
        whole = self._made[place]
        if given is None:
            return
        filled = name in _FILLING and target.numel() == whole.numel()
        if place not in self._changing and not filled:
            self.add(partial(whole.copy_, whole.clone()), (), {place})
        self._changing.add(place)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        call = partial(getattr(target, name), *_detached(args[1:]), **kwargs)
        self.add(call, given, None if draws else {place})

    def _replayable_call(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, given: set[int]
    ) -> Callable[[], Any] | None:
        """Return the function that computes ``result`` again, ``None`` if it is not known.

        Its inputs other than ``args`` are added to ``given``.
        """
        # Views: what runs here may change the shape of its tensors afterwards.
        name, args, result = _name(func), _detached(args), _detached(result)
        if name == "_local_scalar_dense":
            self.numbers.add(type(result))
            return _nothing
        if not _UNKNOWN.isdisjoint(func.tags):
            return self._replayable_draw(name, args, kwargs, result)
        self.first.setdefault(name, result)
        if name == "logsumexp" and args[1:] == ([-1], True):
            # The same without what torch allocates on the way.
            with self:
                top = torch.amax(args[0], -1, True)
                total = (args[0] - top).exp().sum(-1, True).log()
            name, args = "add", (total, top)
            given.update(map(_place, args))
        if name in ("clone", "_to_copy"):
            self._copies[_place(result)] = (len(self._steps), result, args[0])
            return partial(result.copy_, args[0])
        if name == "masked_fill" and not _tensors(args[2:]):  # has no ``out``
            self.add(partial(result.copy_, args[0]), {_place(args[0])}, {_place(result)})
            return partial(result.masked_fill_, *args[1:])
        if name == "roll":  # has no ``out``
            return _rolling(func, args, result)
        if name in _FILLED_WITH:
            return partial(result.fill_, _FILLED_WITH[name])
        if name == "empty_like":  # others fill it
            return _nothing
        call = _elementwise(name, args, kwargs, result) or _into(name, args, kwargs, result)
        if call is not None and _repeats(call, _tensors(result)):
            return call
        call = partial(_call_again, partial(func, *args, **kwargs), _tensors(result))
        return call if _repeats(call, _tensors(result)) else None

    def _replayable_draw(
        self, name: str, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> Callable[[], Any] | None:
        """Return the function that draws ``result`` again, without torch's checks and copies."""
        if name == "multinomial" and args[1] == 1 and not kwargs.get("generator"):
            noise = torch.empty_like(args[0])
            self.add(noise.exponential_)
            self.add(partial(torch.div, args[0], noise, out=noise), {_place(args[0])})
            return partial(torch.argmax, noise, -1, True, out=result)
        if name == "normal" and len(_tensors(args)) == 2:
            mean, scale = args
            scaled = _elementwise("mul", (result, scale), {}, result)
            if scaled is None:
                return None
            self.add(result.normal_)
            self.add(scaled, {_place(scale)})
            return _elementwise("add", (result, mean), {}, result)
        if name == "randn_like":
            return partial(result.normal_)
        if name == "rand":
            return partial(result.uniform_)
        if name == "randint":
            return partial(result.random_, *([0] if len(args) == 2 else []), *args[:-1])
        return None

    # -- checks ----------------------------------------------------------------------------------

    def check_finite(self, tensor: torch.Tensor, message: str) -> None:
        """Have the rollout end with `PolicyError` if ``tensor`` was NaN or infinite at any step."""
        self._fold(tensor, np.add, 0.0, torch.isfinite, message)

    def check_above(self, tensor: torch.Tensor, least: float, message: str) -> None:
        """Have the rollout end with `PolicyError` if ``tensor`` was ever not above ``least``."""
        self._fold(tensor, np.minimum, float("inf"), lambda total: total > least, message)

    def _fold(
        self,
        tensor: torch.Tensor,
        fold: np.ufunc,
        start: float,
        valid: Callable[[torch.Tensor], torch.Tensor],
        message: str,
    ) -> None:
        total = torch.full(tensor.shape, start, dtype=tensor.dtype)
        values, totals = array_of(tensor), array_of(total)
        if values is None or totals is None:  # torch's function has the same name
            call = partial(getattr(torch, fold.__name__), total, tensor, out=total)
        else:
            call = partial(fold, totals, values, out=totals)
        self.add(call, {_place(tensor)})
        self.checks.append(Check(total, start, valid, message))


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _call_again(call: Callable[[], Any], results: Sequence[torch.Tensor]) -> None:
    for result, value in zip(results, _tensors(call()), strict=True):
        result.copy_(value)


def _rolling(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Callable[[], Any]:
    """Return the function that rolls into ``result``: two copies if it rolls one dimension."""
    rolled, shifts, dims = (*args, [])[:3]
    if len(shifts) != 1 or len(dims) != 1 or not rolled.numel():
        return partial(_call_again, partial(func, *args), [result])
    dim, size = dims[0], rolled.shape[dims[0]]
    first = shifts[0] % size
    to = result.narrow(dim, 0, first), result.narrow(dim, first, size - first)
    parts = rolled.narrow(dim, size - first, first), rolled.narrow(dim, 0, size - first)
    return partial(torch._foreach_copy_, to, parts)


def _nothing() -> None:
    """Do nothing."""


def _elementwise(
    name: str, args: tuple[Any, ...], kwargs: Any, result: Any
) -> Callable[[], Any] | None:
    """Return an operation as a numpy call over the same memory, ``None`` where there is none."""
    if name == "pow" and args[1] == 2:
        name, args = "square", args[:1]
    if name == "rsub":
        name, args = "sub", (args[1], args[0])
    if kwargs or name not in _UFUNCS:
        return None
    read = {arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args}
    dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    # Another number would widen the tensor's dtype, and not in both libraries alike.
    numbers = {int, float} if dtype.is_floating_point else {int}
    if dtype not in _EXACT or result.dtype not in (dtype, torch.bool) or read - {dtype, *numbers}:
        return None
    arrays = [array_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in (*args, result)]
    if any(array is None for array in arrays):
        return None
    return partial(_UFUNCS[name], *arrays)


def _into(name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> Callable[[], Any] | None:
    """Return an operation as torch's function that takes ``out``, ``None`` where there is none."""
    if name == "relu":  # has no ``out``
        name, args = "clamp_min", (*args, 0)
    fn = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    return None if fn is None else partial(fn, *args, **kwargs, out=result)


def _repeats(call: Callable[[], Any], results: Sequence[torch.Tensor]) -> bool:
    """Tell whether ``call`` gives the tensors in ``results``, bit for bit."""
    before = [one.clone() for one in results]
    try:
        call()
    except (TypeError, RuntimeError):
        return False
    return all(torch.equal(one, other) for one, other in zip(before, results, strict=True))
