"""From the modules of a policy to a list of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule

from gleanrl.core.keys import Key, as_key, as_keys, format_key
from gleanrl.policies.adapt import TensorCall
from gleanrl.policies.calls import tensor_call
from gleanrl.policies.distributions import Draw, are_settings, recipe_of, watches_distribution
from gleanrl.policies.exploration import ExplorationType, set_exploration_type
from gleanrl.policies.probe import Probed, Unit
from gleanrl.policies.structure import is_plain, qualified, units_of, uses
from gleanrl.policies.tape import Cell, Check, Tape
from gleanrl.policies.tensors import is_known, keeps_nothing, lower_tensors, writes_input
from gleanrl.policies.values import lower_q_values, picks_actions
from gleanrl.policies.watch import Watch, functions_are_genuine

_SAFE_MODULE = "torchrl.modules.tensordict_module.probabilistic.SafeProbabilisticModule"
_TRIALS = 4
Found: TypeAlias = dict[Key, torch.Tensor]
"""What a unit writes: tensors that every replay refills."""
_SKIPPED = ("_",)
"""TensorDict's name for an output that is thrown away."""

Agreed: TypeAlias = dict[tuple[Any, ...], Watch]
"""Modules that were found to act as their calls do, by identity, exploration type, shapes and types
of what they read: what they were then (which holds them, so that identities stay their own)."""


@dataclass(slots=True)
class Program:
    """Units of a policy for one exploration type, ready to be replayed."""

    inputs: dict[Key, Cell]
    """Entries that are read: fill them before a replay."""
    reads: dict[Key, torch.Tensor]
    """The same in the shape that modules see."""
    values: dict[Key, Cell]
    """Every entry after a replay."""
    written: dict[Key, torch.Tensor]
    """Those that a replay writes, as the units would have."""
    calls: list[Callable[[], Any]]
    checks: list[Check]
    units: list[Unit]
    """What the calls stand for."""


@dataclass(slots=True)
class Kept:
    """A unit that is called as it is."""

    unit: Unit


@dataclass(slots=True)
class Parts:
    """A policy for one exploration type, taken apart as far as that is proven equal."""

    parts: list[Program | Kept]
    watch: Watch
    """Tells when they are no longer equal to the policy."""

    @property
    def program(self) -> Program | None:
        """The whole policy, if all of it became tensor calls."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only if isinstance(only, Program) else None


def describe(parts: Parts, lower: bool) -> list[str]:
    """Say for each unit of ``parts`` what became of it; ``lower``: whether that was tried."""
    lines = []
    for part in parts.parts:
        if isinstance(part, Program):
            lines += [f"{_named(unit)}: tensor calls" for unit in part.units]
        else:
            why = _why_kept(part.unit) if lower else "nothing is replaced (fast=False, or hooks on "
            why += "" if lower else "all modules, autocast or a mode of torch are in force)"
            lines.append(f"{_named(part.unit)}: called as it is, {why}")
    return lines


def _named(unit: Unit) -> str:
    module: Any = unit.module
    shown = module.fn if isinstance(module, TensorCall) else module
    return str(getattr(shown, "__name__", type(shown).__name__))


def _why_kept(unit: Unit) -> str:
    module = unit.module
    if not isinstance(module, torch.nn.Module):
        return "it is a function of the user's"
    if not is_plain(module):
        return "it has hooks, a forward of its own or is compiled"
    if not unit.declares:
        return "it does not say all that it writes (out_keys)"
    if isinstance(module, TensorDictModule) and isinstance(module.module, torch.nn.Module):
        return f"it, or {type(module.module).__name__} in it, is not known to be tensor calls only"
    return "it is not known to be tensor calls only"


class Builder:
    """Takes one policy apart."""

    def __init__(
        self,
        probed: Probed,
        batch_shape: tuple[int, ...],
        *,
        for_rows: bool,
    ) -> None:
        """Take what one call of the policy showed.

        Args:
            probed: The units, with what each of them wrote.
            batch_shape: Batch size of the TensorDicts that modules see.
            for_rows: All or nothing: what is kept sees no program. Only then functions of the
                user's are called with tensors, because no other unit can have changed these.
        """
        self._probed = probed
        self._batch_shape = batch_shape
        self._for_rows = for_rows
        self._device = next((v.device for v in probed.inputs.values()), torch.device("cpu"))
        self._agreed: Agreed = {}

    def build(self, kind: ExplorationType | None, lower: bool = True) -> Parts:
        """Take the policy apart for ``kind``; with ``lower=False`` every unit is kept."""
        try:
            watch = Watch()
            units = self._units(watch)
            if not lower or kind is None or not functions_are_genuine():
                return Parts([Kept(unit) for unit in units], watch)
            with _quiet(kind, self._device):
                return Parts(self._parts(units, kind, watch), watch)
        except Exception:  # whatever cannot be understood is called as it is
            return Parts([Kept(self._probed.whole)], Watch())

    def _parts(
        self, units: Sequence[Unit], kind: ExplorationType, watch: Watch
    ) -> list[Program | Kept]:
        parts: list[Program | Kept] = []
        values = dict(self._probed.inputs)
        work: _Work | None = None
        for unit in units:
            if work is None:
                work = _Work(values, self._batch_shape, kind, self._agreed, watch, self._for_rows)
            if not work.lower(unit):
                parts += [*work.finish(), Kept(unit)]
                work = None
            values = {**values, **{key: value.detach() for key, value in unit.writes.items()}}
        return parts if work is None else [*parts, *work.finish()]

    def _units(self, watch: Watch) -> Sequence[Unit]:
        """Return the units as they are now; the policy as a whole if it is not what it was."""
        probed = self._probed
        if probed.units[0] is probed.whole:
            return probed.units
        now = units_of(probed.whole.module)
        for module in _containers(probed.whole.module, {id(unit) for unit in now}):
            watch.add(module)
        same = len(now) == len(probed.units) and all(
            one is unit.module for one, unit in zip(now, probed.units, strict=True)
        )
        return probed.units if same else [probed.whole]


class _Work:
    """Units in a row that became tensor calls: cells by key, and the calls so far."""

    def __init__(
        self,
        values: Mapping[Key, torch.Tensor],
        batch_shape: tuple[int, ...],
        kind: ExplorationType,
        agreed: Agreed,
        watch: Watch,
        for_rows: bool,
    ) -> None:
        self._roots = {key: value.clone() for key, value in values.items()}
        self._cells: dict[Key, torch.Tensor] = dict(self._roots)
        self._used: dict[Key, torch.Tensor] = {}
        self._batch_shape = batch_shape
        self._kind = kind
        self._tape = Tape()
        self._agreed = agreed
        self._watch = watch
        self._for_rows = for_rows
        self._units: list[Unit] = []
        self._written: dict[Key, torch.Tensor] = {}

    def finish(self) -> list[Program | Kept]:
        """Return the program of all units that were lowered, if there are any."""
        dims, tape = len(self._batch_shape), self._tape
        if not self._units:
            return []
        shared = [*self._used.values(), *self._written.values()]
        if not self._for_rows and _share_memory(shared):
            # Units that follow may write in place: what shares memory would have to go on doing so.
            return [Kept(unit) for unit in self._units]
        inputs = {key: Cell.of(value, dims) for key, value in self._used.items()}
        values = {key: Cell.of(value, dims) for key, value in self._cells.items()}
        return [
            Program(inputs, self._used, values, self._written, tape.calls, tape.checks, self._units)
        ]

    def lower(self, unit: Unit) -> bool:
        """Record ``unit`` as tensor calls if all of it is understood.

        Whatever goes wrong on the way, the unit is called as it is instead.
        """
        used, mark = dict(self._used), self._tape.mark()
        try:
            found = self._lower(unit)
        except Exception:
            found = None
        if found is not None and found.keys() == unit.writes.keys():
            self._units.append(unit)
            self._cells.update(found)
            self._written.update(found)
            return True
        self._used = used
        self._tape.cut(mark)
        return False

    def _lower(self, unit: Unit) -> Found | None:
        """Return the cells that ``unit`` writes, ``None`` if it is not understood."""
        module = unit.module
        if isinstance(module, TensorCall):
            return self._tensors(unit, module.fn, module.in_keys, module.out_keys, module.names)
        if uses_module(module):
            return self._tensordict_module(unit, module)
        if isinstance(module, ProbabilisticTensorDictModule):
            return self._probabilistic(unit, module)
        return self._q_values(unit, module) if picks_actions(module) else None

    # -- modules on tensors ------------------------------------------------------------------------

    def _tensordict_module(self, unit: Unit, module: Any) -> Found | None:
        extras = vars(module).get("_get_kwargs") or module.method_kwargs
        if extras or module.method is not None:
            return None
        self._watch.add(module)
        names = vars(module).get("_kwargs")
        return self._tensors(unit, module.module, module.in_keys, module.out_keys, names)

    def _tensors(
        self,
        unit: Unit,
        fn: Callable[..., Any],
        in_keys: Sequence[Any],
        out_keys: Sequence[Any],
        names: Sequence[str] | None,
    ) -> Found | None:
        reads, writes = as_keys(in_keys), as_keys(out_keys)
        if not set(reads) <= set(unit.visible):
            return None
        args = [self._read(key) for key in reads]
        if writes_input(fn) and any(map(self._is_given, args)):
            return None
        if is_known(fn) and len(args) == 1 and names is None:
            values = lower_tensors(self._tape, self._watch, fn, args[0])  # type: ignore[arg-type]  # is_known
            pairs = zip(writes, values, strict=True)
            return {key: value for key, value in pairs if key != _SKIPPED}
        lent = keeps_nothing(fn)
        if not lent and not self._for_rows:
            return None  # It may change what others read.
        found = {key: _cell(unit, key) for key in writes if key != _SKIPPED}
        if lent:
            for part in fn.modules():  # type: ignore[attr-defined]  # a module, or it could keep
                self._watch.add(part)
        cells = [found.get(key) for key in writes]
        self._tape.calls.append(tensor_call(fn, args, names, cells, writes, lent))
        return found

    # -- action values ----------------------------------------------------------------------------

    def _q_values(self, unit: Unit, module: Any) -> Found | None:
        reads, keys = as_keys(module.in_keys), as_keys(module.out_keys)
        if not set(reads) <= set(unit.visible):
            return None
        mark = len(self._tape.calls)
        values = lower_q_values(self._tape, module.action_space, self._read(reads[0]))
        if values is None:
            return None
        found = dict(zip(keys, values, strict=True))
        return found if self._agrees(module, reads, found, self._tape.calls[mark:]) else None

    # -- distributions ---------------------------------------------------------------------------

    def _probabilistic(self, unit: Unit, module: Any) -> Found | None:
        kind = self._kind
        recipe = recipe_of(module.distribution_class)
        safe = qualified(type(module)) == _SAFE_MODULE
        reads = as_keys(module.in_keys)
        if (
            recipe is None
            or not _is_understood(module, safe)
            or not set(reads) <= set(unit.visible)
        ):
            return None
        draw = Draw(
            tape=self._tape,
            params=dict(zip(map(_last, module.dist_keys), map(self._read, reads), strict=True)),
            options=dict(module.distribution_kwargs),
            kind=kind,
            log_prob=bool(module.return_log_prob),
            joint=safe
            and callable(getattr(module.distribution_class, "rsample_and_log_prob", None)),
            name=", ".join(map(format_key, reads)),
        )
        mark = len(self._tape.calls)
        drawn = recipe(draw)
        if drawn is None:
            return None
        keys = [as_key(module.dist_sample_keys[0])]
        keys += [as_key(module.log_prob_key)] if draw.log_prob else []
        found = {key: value for key, value in zip(keys, drawn, strict=False) if value is not None}
        return found if self._agrees(module, reads, found, self._tape.calls[mark:]) else None

    def _agrees(
        self,
        module: Any,
        reads: Sequence[Key],
        found: Mapping[Key, torch.Tensor],
        calls: Sequence[Callable[[], Any]],
    ) -> bool:
        """Tell whether ``calls`` give what ``module`` gives, and draw the same random numbers.

        Only the distribution runs here, on parameters that the policy gave; the policy does not.
        """
        given = tuple((key, self._cells[key].shape, self._cells[key].dtype) for key in reads)
        name = id(module), self._kind, given
        watch = self._agreed.get(name)
        if watch is None or watch.changed():
            watch = Watch()
            watch.add(module)
            if not self._same(module, reads, found, calls, watch):
                return False
            self._agreed[name] = watch
        self._watch.include(watch)
        return True

    def _same(
        self,
        module: Any,
        reads: Sequence[Key],
        found: Mapping[Key, torch.Tensor],
        calls: Sequence[Callable[[], Any]],
        watch: Watch,
    ) -> bool:
        device = self._cells[reads[0]].device
        for trial in range(_TRIALS):
            td = TensorDict({}, batch_size=self._batch_shape)
            for key in reads:
                td.set(key, self._cells[key].clone())
            try:
                draws = isinstance(module, ProbabilisticTensorDictModule) and not trial
                if draws and not watches_distribution(watch, module.get_dist(td)):
                    return False
                _seed(device, trial)
                td = module(td)
            except (ValueError, RuntimeError):
                return False  # It will say itself what is wrong when it is called as it is.
            state = _random_state(device)
            _seed(device, trial)
            for call in calls:
                call()
            if not torch.equal(state, _random_state(device)):
                return False
            if not all(_identical(td.get(key), value) for key, value in found.items()):
                return False
        return True

    def _read(self, key: Key) -> torch.Tensor:
        cell = self._cells[key]
        if cell is self._roots.get(key):
            self._used[key] = cell
        return cell

    def _is_given(self, value: torch.Tensor) -> bool:
        """Tell whether ``value`` lies in the memory of a root entry."""
        place = value.untyped_storage().data_ptr()
        return any(place == root.untyped_storage().data_ptr() for root in self._roots.values())


def _cell(unit: Unit, key: Key) -> torch.Tensor:
    """Return memory for what ``unit`` writes, with what it wrote when it was seen."""
    seen = unit.writes[key].detach()
    cell = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
    return cell.copy_(seen)


def uses_module(module: Any) -> bool:
    """Tell whether ``module`` is a plain ``TensorDictModule``, or a subclass that acts like one."""
    methods = ("forward", "_call_module", "_write_to_tensordict")
    return isinstance(module, TensorDictModule) and uses(module, TensorDictModule, *methods)


def _containers(policy: Any, leaves: set[int]) -> Iterator[torch.nn.Module]:
    if not isinstance(policy, torch.nn.Module) or id(policy) in leaves:
        return
    yield policy
    for child in policy.children():
        yield from _containers(child, leaves)


def _is_understood(module: Any, safe: bool) -> bool:
    state = vars(module)
    owner = type(module) if safe else ProbabilisticTensorDictModule
    return (
        uses(module, owner, "forward", "get_dist", "_dist_sample")
        and len(module.dist_sample_keys) == 1
        and module.num_samples is None
        and not module.cache_dist
        and state.get("_generator") is None
        and state.get("_generator_key") is None
        and type(module.distribution_kwargs) is dict
        and are_settings(module.distribution_kwargs)
    )


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether any two of ``tensors`` lie in the same storage."""
    return len({value.untyped_storage().data_ptr() for value in tensors}) < len(tensors)


def _last(key: Any) -> str:
    return key if isinstance(key, str) else str(key[-1])


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _seed(device: torch.device, seed: int) -> None:
    # Not torch.manual_seed: it would also seed devices that are not in use yet, for good.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def _quiet(kind: ExplorationType, device: torch.device) -> Iterator[None]:
    """Run the body without a trace in random streams, gradients or inference tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(set_exploration_type(kind))
        yield
