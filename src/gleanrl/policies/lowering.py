"""From the modules of a policy to a list of calls.

A unit becomes recorded tensor calls only where these are proven to do what calling it does; any
exception on the way means: call it as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import distributions as D
from torch import nn

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import Key, as_key, as_keys, format_key
from gleanrl.operations.change_watch import Watch, equal
from gleanrl.operations.op_recorder import Check, OpRecorder, OwnStream, as_rows, require
from gleanrl.operations.proofs import (
    functions_are_genuine,
    is_genuine,
    is_made_of_layers,
    is_plain,
    qualified,
    uses,
)
from gleanrl.policies.adapt import TensorCall, converted
from gleanrl.policies.diagnosis import unlike_first_call, wrote_otherwise
from gleanrl.policies.probe import PolicyTrace, Unit
from gleanrl.policies.random import missing_batch
from gleanrl.policies.submodules import modules_of, units_of

Tensor: TypeAlias = torch.Tensor
Written: TypeAlias = dict[Key, Tensor]
"""The outputs of a unit: tensors that every replay refills."""

_TRIALS = 4
_DROPPED: Key = ("_",)
"""TensorDict's name for an output that is thrown away."""
# Their package is not imported here.
_SAFE_MODULE = "torchrl.modules.tensordict_module.probabilistic.SafeProbabilisticModule"
_Q_VALUES = "torchrl.modules.tensordict_module.actors.QValueModule"
_GREEDY = "torchrl.modules.tensordict_module.exploration.EGreedyModule"
_TANH = "torchrl.modules.tensordict_module.actors.TanhModule"
_GAUSSIAN = "torchrl.modules.tensordict_module.exploration.AdditiveGaussianModule"
_ORNSTEIN = "torchrl.modules.tensordict_module.exploration.OrnsteinUhlenbeckProcessModule"
_PROCESS = "torchrl.modules.tensordict_module.exploration._OrnsteinUhlenbeckProcess"
_WITH_NOISE = (_TANH, _GAUSSIAN, _ORNSTEIN)
_RECURRENT = (
    "torchrl.modules.tensordict_module.rnn.LSTMModule",
    "torchrl.modules.tensordict_module.rnn.GRUModule",
)
_RANDOM = {
    "torchrl.modules.tensordict_module.exploration.RandomPolicy",
    "gleanrl.policies.random.RandomPolicy",
}
_COMPOSITE = "torchrl.data.tensor_specs.Composite"
_CHOICES = {f"torchrl.data.tensor_specs.{name}" for name in ("Categorical", "OneHot")}
_BOUNDED = {f"torchrl.data.tensor_specs.{name}" for name in ("Bounded", "BoundedContinuous")}


@dataclass(slots=True)
class Program:
    """Units of a policy for one exploration type, ready to be replayed."""

    inputs: dict[Key, Any]
    """Entries that are read: fill them before a replay."""
    reads: Written
    """The same in the shape that modules see."""
    values: dict[Key, Any]
    """Every entry after a replay."""
    written: Written
    """Those that a replay writes, as the units would have."""
    calls: list[Callable[[], Any]]
    checks: list[Check]
    units: list[Unit]
    """What the calls stand for."""


@dataclass(slots=True)
class Lowered:
    """A policy as it is now, for one exploration type."""

    units: Sequence[Unit]
    watch: Watch
    """Tells when the policy is no longer this one."""
    program: Program | None = None
    """The first units as tensor calls, as far as these are proven equal to them."""
    rest: Sequence[Unit] = ()
    """The units that are called as they are, after the program."""


def check_unchanged(before: object, now: object) -> None:
    """Check that a policy is at the end of a rollout as it was at the beginning."""
    if now is not before:
        raise PolicyError(
            "a setting of the policy changed while a rollout was collected: an attribute or hook "
            "of a module, a module or weight that was replaced (.data = ..., "
            "vector_to_parameters), or the exploration type. The fast path saw the old setting; "
            "build the collector with fast=False, which calls the policy as it is at every step"
        )


class Lowering:
    """Takes one policy apart."""

    def __init__(self, trace: PolicyTrace, batch_shape: tuple[int, ...], *, for_rows: bool) -> None:
        """Take the results of one call of the policy on TensorDicts of ``batch_shape``.

        ``for_rows``: Outputs are copied to rows. Only then a unit's outputs may share memory, and
        functions of the user's may be called with tensors: nobody else sees these.
        """
        self.batch_shape = batch_shape
        self.for_rows = for_rows
        self.trace = trace
        self.kept: Written = {}
        """What the policy writes at the root and programs read at the next step."""
        self._known: dict[tuple[InteractionType | None, bool], Lowered] = {}

    def current(self, lower: bool) -> Lowered:
        """Return the policy for the exploration type in force; as a program only if ``lower``."""
        kind = interaction_type()
        known = self._known.get((kind, lower))
        if known is None or known.watch.changed():
            known = self._known[kind, lower] = self._built(kind, lower)
        return known

    def explain(self, lower: bool) -> list[str]:
        """Say how each unit of the policy is run."""
        now, lines = self.current(lower), []
        if now.program is not None:
            lines = [f"{_named(unit)}: tensor calls" for unit in now.program.units]
        for index, unit in enumerate(now.rest):
            why = _why_kept(unit) if index == 0 else f"because {_named(now.rest[0])} is"
            lines.append(f"{_named(unit)}: called as it is, {why if lower else _NOTHING_LOWERED}")
        return lines

    def _built(self, kind: InteractionType | None, lower: bool) -> Lowered:
        """Return the policy as it is now.

        Its first call may change a setting: ``nn.LSTM`` then takes up weights that were replaced.
        """
        for _ in range(2):
            now = self._build(kind, lower)
            if not now.watch.changed():
                return now
        return Lowered([self.trace.whole], Watch(), None, [self.trace.whole])

    def _build(self, kind: InteractionType | None, lower: bool) -> Lowered:
        try:
            now = Lowered(*self._units())
            if lower and kind is not None and functions_are_genuine():
                with torch.inference_mode(False), torch.no_grad(), set_interaction_type(kind):
                    now.program = _Recording(self, now.watch).run(now.units)
            now.rest = now.units[len(now.program.units) if now.program else 0 :]
        except Exception:  # what cannot be understood is called as it is
            return Lowered([self.trace.whole], Watch(), None, [self.trace.whole])
        return now

    def _units(self) -> tuple[Sequence[Unit], Watch]:
        """Return the units as they are now; the policy as a whole if it is not what it was."""
        trace, watch = self.trace, Watch()
        if trace.units[0] is trace.whole:
            return trace.units, watch
        now = units_of(trace.whole.module)
        for module in _containers(trace.whole.module, {id(unit) for unit in now}):
            watch.add(module)
        same = len(now) == len(trace.units) and all(
            one is unit.module for one, unit in zip(now, trace.units, strict=True)
        )
        return (trace.units if same else [trace.whole]), watch


class _Recording:
    """Units of a policy that become tensor calls: cells by key, and the calls so far."""

    def __init__(self, policy: Lowering, watch: Watch) -> None:
        self._policy, self._watch = policy, watch
        self._roots = {key: value.clone() for key, value in policy.trace.inputs.items()}
        self._cells: Written = dict(self._roots)
        self._used: Written = {}
        self._written: Written = {}
        self._ops = OpRecorder()
        self._ops.changing(self._roots.values())
        self._units: list[Unit] = []

    def run(self, units: Sequence[Unit]) -> Program | None:
        """Record ``units``, up to the first one that is not understood."""
        dims, ops = len(self._policy.batch_shape), self._ops
        for unit in units:
            used, mark, weights = dict(self._used), ops.mark(), _Weights(unit.module)
            try:
                written = self._lower(unit)
                require(written.keys() == unit.writes.keys())
                # Others may write in place: where memory is shared, all of its entries change.
                apart = [*self._used.values(), *{**self._written, **written}.values()]
                places = {value.untyped_storage().data_ptr() for value in apart}
                require(self._policy.for_rows or len(places) == len(apart))
            except Exception:  # whatever went wrong, the unit is called as it is
                self._used = used
                ops.cut(mark)
                weights.put_back()
                break
            self._units.append(unit)
            self._cells.update(written)
            self._written.update(written)
        if not self._units:
            return None
        inputs = {key: as_rows(value, dims) for key, value in self._used.items()}
        values = {key: as_rows(value, dims) for key, value in self._cells.items()}
        return Program(
            inputs, self._used, values, self._written, ops.calls(), ops.checks, self._units
        )

    def _lower(self, unit: Unit) -> Written:
        module: Any = unit.module
        if isinstance(module, TensorCall):
            return self._tensors(unit, module.fn, module.in_keys, module.out_keys, module.names)
        if qualified(type(module)) in _RANDOM:
            return self._draw(unit, module)
        if _is_tensordict_module(module):
            require(not (vars(module).get("_get_kwargs") or module.method_kwargs))
            require(module.method is None)
            self._watch.add(module)
            names = vars(module).get("_kwargs")
            return self._tensors(unit, module.module, module.in_keys, module.out_keys, names)
        reads = as_keys(module.in_keys)
        require(set(reads) <= set(unit.visible))
        mark, kind = self._ops.mark(), qualified(type(module))
        self._watch.add(module)
        if isinstance(module, ProbabilisticTensorDictModule):
            _require_plain_draw(module, kind == _SAFE_MODULE)
            written = self._record(unit, module, reads)
            params = dict(zip(map(_last, module.dist_keys), map(self._read, reads), strict=True))
            _check_parameters(self._ops, module, params, ", ".join(map(format_key, reads)))
        else:
            require(kind in (_Q_VALUES, _GREEDY, *_RECURRENT, *_WITH_NOISE) and is_plain(module))
            require(vars(module).get("action_mask_key") is None)
            acting = module
            if kind == _GREEDY:
                self._watch_choices(module)
            elif kind in _WITH_NOISE:
                acting, more = self._noise(module, kind, unit)
                reads += more
            record = self._record_recurrent if kind in _RECURRENT else self._record
            written = record(unit, acting, reads)
        self._ops.prune(mark, written.values())
        for key in set(reads) & self._policy.kept.keys():
            self._ops.add(partial(self._policy.kept[key].copy_, written[key]))
        widened = reads if kind in (*_RECURRENT, *_WITH_NOISE) else ()
        self._prove_equal(module, reads, written, self._ops.calls(mark), widened)
        return written

    def _noise(self, module: Any, kind: str, unit: Unit) -> tuple[Any, tuple[Key, ...]]:
        """Return what records like ``module``, and what that reads beside its inputs."""
        for name, setting in module.named_buffers():
            if name in ("sigma", "eps"):
                self._ops.changing([setting])
            else:
                self._watch.hold(setting)
        if kind == _ORNSTEIN:
            return module, self._remembering(module, unit)
        return (self._bounding(module) if kind == _GAUSSIAN else module), ()

    def _bounding(self, module: Any) -> Any:
        """Return a copy of ``module`` whose spec always clamps.

        The spec of ``module`` leaves values within its bounds as they are, and so does clamping,
        except for the sign of a zero that is a bound.
        """
        spec = vars(module)["_spec"]
        require(qualified(type(spec)) == _COMPOSITE)
        bounds = spec[module.action_key]
        require(qualified(type(bounds)) in _BOUNDED)
        self._watch.add_spec(spec)
        low, high = bounds.space.low.clone(), bounds.space.high.clone()
        require(bool((low != 0).all() and (high != 0).all()))
        self._ops.constants([low, high])

        def clamped(value: Tensor) -> Tensor:
            return torch.clamp(value, low.expand_as(value), high.expand_as(value))

        acting = copy.copy(module)
        vars(acting)["_spec"] = {module.action_key: SimpleNamespace(project=clamped)}
        return acting

    def _remembering(self, module: Any, unit: Unit) -> tuple[Key, ...]:
        """Return what ``module`` reads beside its inputs: its noise is that of the step before."""
        process, begins = module.ou, as_key(module.is_init_key)
        require(self._policy.for_rows and begins in unit.visible)
        require(qualified(type(process)) == _PROCESS and is_plain(process))
        self._watch.add(process)
        keys = as_keys(process.out_keys)
        for key in keys:
            first = torch.zeros_like(unit.writes[key], memory_format=torch.contiguous_format)
            self._cells[key] = self._policy.kept.setdefault(key, first)
        self._ops.changing(self._cells[key] for key in keys)
        return begins, *keys

    def _draw(self, unit: Unit, policy: Any) -> Written:
        """Draw from the spec of ``policy`` where a call of it does that and nothing else."""
        self._watch.add_spec(policy)
        ((key, value),) = unit.writes.items()
        spec = policy.action_spec
        if qualified(type(spec)) == _COMPOSITE:
            spec = spec[key]
        require(getattr(spec, "mask", None) is None)  # The environment may set it at every step.
        cell = value.detach().clone(memory_format=torch.contiguous_format)
        self._ops.changing([cell])
        mark = self._ops.mark()
        lead = missing_batch(spec, self._policy.batch_shape)
        self._ops.add(lambda: cell.copy_(spec.rand(lead)))
        self._prove_equal(policy, (), {key: cell}, self._ops.calls(mark))
        return {key: cell}

    def _watch_choices(self, module: Any) -> None:
        """Watch the spec from which ``module`` draws; its epsilon is read at every step."""
        self._ops.changing(module.buffers())
        spec = vars(module)["_spec"]
        require(qualified(type(spec)) == _COMPOSITE)
        choices = spec[module.action_key]
        require(qualified(type(choices)) in _CHOICES and choices.mask is None)
        self._watch.add_spec(spec)

    def _tensors(
        self,
        unit: Unit,
        fn: Callable[..., Any],
        in_keys: Sequence[Any],
        out_keys: Sequence[Any],
        names: Sequence[str] | None,
    ) -> Written:
        """Record the operations of ``fn`` on tensors; or a call of it, if they are not known."""
        reads, keys = as_keys(in_keys), as_keys(out_keys)
        require(set(reads) <= set(unit.visible))
        args = [self._read(key) for key in reads]
        kept = [key for key in keys if key != _DROPPED]
        if is_made_of_layers(fn):
            ops = self._ops
            self._watch_layers(cast("nn.Module", fn))
            mark = ops.mark()
            with ops:
                out = fn(*args) if names is None else fn(**dict(zip(names, args, strict=True)))
            if ops.complete and not ops.numbers:
                pairs = dict(zip(keys, _as_tuple(out, keys), strict=True))
                written = self._checked(unit, {key: pairs[key] for key in kept})
                ops.prune(mark, written.values())
                return written
            ops.cut(mark)
        require(self._policy.for_rows)  # or it may change what others read
        cells = {
            key: unit.writes[key].detach().clone(memory_format=torch.contiguous_format)
            for key in kept
        }
        self._ops.changing(cells.values())
        targets = [*map(cells.get, keys)]
        self._ops.add(partial(_call_again, fn, names, reads, args, keys, targets))
        return cells

    def _watch_layers(self, module: nn.Module) -> None:
        """Watch all layers of ``module``; their weights and buffers are read at every step."""
        ops = self._ops
        ops.changing([*module.parameters(), *module.buffers()])
        for part in module.modules():
            self._watch.add(part)
            ops.changing(one for one in vars(part).values() if isinstance(one, Tensor))
        ops.constants(self._watch.tensors)

    def _record_recurrent(self, unit: Unit, module: Any, reads: Sequence[Key]) -> Written:
        """Record a step of TorchRL's ``LSTMModule`` or ``GRUModule``.

        A ``GRUModule`` replaces states only if an episode begins, as it does here. The recorded
        calls then do so in every step, which makes no difference.
        """
        require(not module.recurrent_mode and all(map(is_made_of_layers, module.children())))
        self._watch_layers(module)
        self._watch.setting(lambda: module.recurrent_mode)
        return self._record(unit, module, reads, bool)

    def _record(
        self, unit: Unit, module: Any, reads: Sequence[Key], branches: type = int
    ) -> Written:
        """Record the operations of ``module`` on a TensorDict.

        It may read Python numbers of the type ``branches``: distributions look at whole numbers to
        check their range.
        """
        td = TensorDict({}, batch_size=self._policy.batch_shape)
        for key in reads:
            td.set(key, self._read(key))
        self._ops.constants(self._watch.tensors)
        with self._ops:
            td = module(td)
        require(self._ops.complete and self._ops.numbers <= {branches})
        return self._checked(unit, {key: td.get(key) for key in unit.writes})

    def _checked(self, unit: Unit, values: Mapping[Key, Tensor]) -> Written:
        """Return memory that replays refill with ``values``."""
        written = {}
        for key, value in values.items():
            like = unit.writes[key]
            require(value.shape == like.shape and value.dtype == like.dtype)
            if 0 in value.stride():  # several elements in one place
                with self._ops:
                    value = value.clone(memory_format=torch.contiguous_format)
            written[key] = value.detach()
        return written

    def _prove_equal(
        self,
        module: Any,
        reads: Sequence[Key],
        written: Written,
        calls: Sequence[Any],
        widened: Sequence[Key] = (),
    ) -> None:
        """Prove that ``calls`` give the results of ``module``, and draw the same random numbers.

        Only the distribution runs here, on parameters that the policy gave; the policy does not.
        Entries that are ``widened`` may have any values, and have also large ones.
        """
        given = {key: self._cells[key].clone() for key in widened}
        try:
            for trial in range(_TRIALS):
                for key, value in given.items():
                    self._cells[key].copy_(_widened(value, trial) if trial else value)
                self._try_equal(module, reads, written, calls, trial)
        finally:
            for key, value in given.items():
                self._cells[key].copy_(value)

    def _try_equal(
        self, module: Any, reads: Sequence[Key], written: Written, calls: Sequence[Any], trial: int
    ) -> None:
        own = OwnStream()
        td = TensorDict({}, batch_size=self._policy.batch_shape)
        for key in reads:
            td.set(key, self._cells[key].clone())
        if trial == 0 and isinstance(module, ProbabilisticTensorDictModule):
            _watch_distribution(self._watch, module.get_dist(td))
        own.stream.manual_seed(trial)
        with own:
            td = module(td)
        state = own.stream.get_state()
        own.stream.manual_seed(trial)
        with own:
            for call in calls:
                call()
        require(torch.equal(state, own.stream.get_state()))
        require(all(equal(td.get(key), value) for key, value in written.items()))

    def _read(self, key: Key) -> Tensor:
        cell = self._cells[key]
        if cell is self._roots.get(key):
            self._used[key] = cell
        return cell


class _Weights:
    """Where the weights of a unit are: a call of it that is broken off may leave others there."""

    def __init__(self, policy: Any) -> None:
        tables: Any = [(vars(one), one._parameters, one._buffers) for one in modules_of(policy)]
        self._then = [(table, _tensors_in(table)) for table in chain(*tables)]

    def put_back(self) -> None:
        for table, then in self._then:
            for name in _tensors_in(table).keys() - then.keys():
                del table[name]
            table.update(then)


def _tensors_in(table: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in table.items() if isinstance(value, Tensor)}


def _widened(value: Tensor, trial: int) -> Tensor:
    """Return flags of which some or none are true, or numbers that differ more with ``trial``."""
    if value.dtype is torch.bool:
        return (torch.arange(value.numel()) % 2 + trial == 1).view(value.shape)
    return value + torch.linspace(-2.0, 2.0, value.numel()).view(value.shape) * 100.0**trial


def _is_tensordict_module(module: Any) -> bool:
    """Tell whether ``module`` is a plain ``TensorDictModule``, or a subclass that acts like one."""
    methods = ("forward", "_call_module", "_write_to_tensordict")
    return isinstance(module, TensorDictModule) and uses(module, TensorDictModule, *methods)


def reads_only_inputs(module: Any) -> bool:
    """Tell whether ``module`` is known to read nothing of a TensorDict but its ``in_keys``."""
    draws = isinstance(module, nn.Module) and uses(
        module, ProbabilisticTensorDictModule, "forward", "get_dist", "_dist_sample"
    )
    return draws or isinstance(module, TensorCall) or _is_tensordict_module(module)


def _require_plain_draw(module: Any, safe: bool) -> None:
    state = vars(module)
    owner = type(module) if safe else ProbabilisticTensorDictModule
    require(uses(module, owner, "forward", "get_dist", "_dist_sample"))
    require(len(module.dist_sample_keys) == 1 and module.num_samples is None)
    require(set(map(_last, module.dist_keys)) <= _PARAMETERS)
    require(not module.cache_dist)
    require(state.get("_generator") is None and state.get("_generator_key") is None)
    _require_known(module.distribution_class, module.distribution_kwargs)


def _containers(policy: Any, leaves: set[int]) -> Iterator[nn.Module]:
    if not isinstance(policy, nn.Module) or id(policy) in leaves:
        return
    yield policy
    for child in policy.children():
        yield from _containers(child, leaves)


def _last(key: Any) -> str:
    return key if isinstance(key, str) else str(key[-1])


# -- in words --------------------------------------------------------------------------------------

_NOTHING_LOWERED = (
    "nothing is replaced (fast=False, a device other than the CPU, or hooks on all modules, "
    "autocast or a mode of torch are in force)"
)


def _named(unit: Unit) -> str:
    module: Any = unit.module
    shown = module.fn if isinstance(module, TensorCall) else module
    return str(getattr(shown, "__name__", type(shown).__name__))


def _why_kept(unit: Unit) -> str:
    module = unit.module
    if not isinstance(module, nn.Module):
        return "it is a function of the user's"
    if not is_plain(module):
        return "it has hooks, a forward of its own or is compiled"
    if isinstance(module, TensorDictModule) and isinstance(module.module, nn.Module):
        return f"it, or {type(module.module).__name__} in it, is not known to be tensor calls only"
    return "it is not known to be tensor calls only"


# -- functions on tensors, called as they are ------------------------------------------------------


def _call_again(
    fn: Callable[..., Any],
    names: Sequence[str] | None,
    reads: Sequence[Key],
    args: Sequence[Tensor],
    keys: Sequence[Key],
    cells: Sequence[Tensor | None],
) -> None:
    """Call ``fn`` on copies of ``args``, and write its results into ``cells``."""
    values = [arg.clone() for arg in args]
    out = fn(*values) if names is None else fn(**dict(zip(names, values, strict=True)))
    outs = tuple(map(converted, _as_tuple(out, keys)))
    if len(outs) != len(cells):
        raise unlike_first_call(f"returned {len(outs)} values", f"returned {len(cells)}")
    for key, cell, value in zip(keys, cells, outs, strict=True):
        if cell is not None:
            if not is_like(value, cell):
                raise wrote_otherwise(key, value, cell)
            cell.copy_(value)
    for key, value, arg in zip(reads, values, args, strict=True):
        if _was_written(value, arg):
            raise unlike_first_call(f"changed {format_key(key)}", "left it as it was")


def _was_written(value: Tensor, before: Tensor) -> bool:
    """Tell whether ``value``, a copy of ``before``, was changed in place since."""
    if not value.is_inference() and not value._version:
        return False
    floating = value.is_floating_point() or value.is_complex()
    return not torch.equal(value, before) and not (
        floating and torch.allclose(value, before, rtol=0, atol=0, equal_nan=True)
    )


def is_like(value: Any, like: Tensor) -> bool:
    """Tell whether ``value`` is a tensor with the shape and dtype of ``like``."""
    return isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype


def _as_tuple(out: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
    if isinstance(out, tuple):
        return out
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, TensorDictBase):
        return tuple(out.get(key) for key in keys)
    if isinstance(out, Mapping):
        values = {as_key(key): value for key, value in out.items()}
        return tuple(values.get(key) for key in keys)
    return () if out is None else (out,)


# -- draws ----------------------------------------------------------------------------------------

_PARAMETERS = {"logits", "probs", "loc", "scale"}
"""Parameters that `_check_parameters` checks."""
_BUILT_OF = (D.Distribution, D.transforms.Transform, D.constraints.Constraint)


def _require_known(kind: Any, options: Any) -> None:
    """Require that ``kind`` is a library's, and ``options`` what a `Watch` can compare."""
    require(all(map(is_genuine, kind.__mro__[:-1])))
    settings = (bool, int, float, torch.Tensor, np.ndarray, type(None))
    require(type(options) is dict and all(type(value) in settings for value in options.values()))


def _watch_distribution(watch: Watch, distribution: Any) -> None:
    """Add the classes of all that ``distribution`` is built of; raise if one was patched."""
    seen: set[int] = set()
    todo: list[Any] = [distribution]
    while todo:
        item = todo.pop()
        if isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, _BUILT_OF) and id(item) not in seen:
            require(all(map(is_genuine, type(item).__mro__[:-1])))
            seen.add(id(item))
            watch.add_class(type(item))
            todo.extend(vars(item).values())


def _check_parameters(
    ops: OpRecorder, module: Any, params: Mapping[str, torch.Tensor], name: str
) -> None:
    """Have rollouts end with an error if ``params`` are none for the distribution of ``module``.

    ``params`` are by the name that the distribution has for them; messages call them ``name``.
    """
    asked = module.distribution_kwargs.get("validate_args")
    validated = D.Distribution._validate_args if asked is None else asked
    not_finite = (
        f"the policy gave NaN or infinite values in {name} during this rollout; look at its "
        "weights and at the observations it was fed"
    )
    least = 1e-6 if module.distribution_class.__name__ == "TanhNormal" else 0.0
    for what, value in params.items():
        if what == "logits":
            # NaN, +inf and rows of -inf all show in the normaliser; single -inf are legal masks.
            ops.check_finite(ops.first["logsumexp"], not_finite)
        elif what == "probs":
            ops.check_finite(ops.first["sum"], not_finite)
            tiny = torch.finfo(value.dtype).tiny
            ops.check_above(value, -tiny, f"the policy gave negative probabilities in {name}")
        elif what == "loc" and validated:
            ops.check_finite(value, not_finite)
        elif what == "scale" and validated:
            message = f"the policy gave a scale of at most {least:g}; {not_finite}"
            ops.check_above(value, least, message)
