"""From the modules of a policy to a list of calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule

from gleanrl.core.keys import Key, as_key, as_keys, show
from gleanrl.policies.adapt import TensorCall
from gleanrl.policies.calls import tensor_call, tensordict_call
from gleanrl.policies.distributions import Draw, are_settings, recipe_of, watches_distribution
from gleanrl.policies.exploration import ExplorationType, set_exploration_type
from gleanrl.policies.probe import Probed, Unit
from gleanrl.policies.structure import qualified, units_of, uses
from gleanrl.policies.tape import Cell, Check, Tape
from gleanrl.policies.tensors import is_known, keeps_nothing, lower_tensors, writes_input
from gleanrl.policies.values import lower_q_values, picks_actions
from gleanrl.policies.watch import Watch, functions_are_genuine

_SAFE_MODULE = "torchrl.modules.tensordict_module.probabilistic.SafeProbabilisticModule"
_TRIALS = 4
_SKIPPED = ("_",)
"""TensorDict's name for an output that is thrown away."""

Agreed: TypeAlias = dict[tuple[Any, ...], Watch]
"""Modules that were found to act as their calls do, by identity, exploration type, shapes and types
of what they read: what they were then (which holds them, so that identities stay their own)."""


@dataclass(slots=True)
class Program:
    """A policy for one exploration type, ready to be replayed."""

    kind: ExplorationType | None
    inputs: dict[Key, Cell]
    """Root entries that are read: fill them before a replay."""
    values: dict[Key, Cell]
    """Every entry after a replay."""
    calls: list[Callable[[], Any]]
    checks: list[Check]
    lowered: int
    """Units that became plain tensor calls."""
    watch: Watch = field(default_factory=Watch)


class Builder:
    """Builds programs of one policy."""

    def __init__(
        self,
        probed: Probed,
        inputs: Mapping[Key, torch.Tensor],
        constants: Collection[Key],
        batch_shape: tuple[int, ...],
    ) -> None:
        """Take what one call of the policy showed.

        Args:
            probed: The units, with what each of them wrote.
            inputs: Root entries as they were for that call, ``[*batch_shape, ...]``.
            constants: Those of them that stay as they are at every step.
            batch_shape: Batch size of the TensorDicts that modules see.
        """
        self._probed = probed
        self._inputs = dict(inputs)
        self._constants = frozenset(constants)
        self._batch_shape = batch_shape
        self._device = next((v.device for v in inputs.values()), torch.device("cpu"))
        self._agreed: Agreed = {}

    def build(self, kind: ExplorationType | None, lower: bool = True) -> Program:
        """Make the program for ``kind``; with ``lower=False`` every unit is called as it is."""
        lower = lower and kind is not None and functions_are_genuine()
        with _quiet(kind, self._device):
            work = _Work(self._inputs, self._constants, self._batch_shape, kind, self._agreed)
            for unit in self._units(work.program.watch):
                if not (lower and work.lower(unit)):
                    work.keep(unit)
        return work.finish()

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
    """One build: cells by key, and the calls so far."""

    def __init__(
        self,
        inputs: Mapping[Key, torch.Tensor],
        constants: Collection[Key],
        batch_shape: tuple[int, ...],
        kind: ExplorationType | None,
        agreed: Agreed,
    ) -> None:
        self._roots = {key: value.clone() for key, value in inputs.items()}
        self._cells: dict[Key, torch.Tensor] = dict(self._roots)
        self._used: dict[Key, torch.Tensor] = {}
        self._constants = constants
        self._batch_shape = batch_shape
        self._tape = Tape()
        self._agreed = agreed
        self.program = Program(kind, {}, {}, self._tape.calls, self._tape.checks, 0)

    def finish(self) -> Program:
        dims, program = len(self._batch_shape), self.program
        program.inputs.update((key, Cell.of(value, dims)) for key, value in self._used.items())
        program.values.update((key, Cell.of(value, dims)) for key, value in self._cells.items())
        return program

    def lower(self, unit: Unit) -> bool:
        """Record ``unit`` as tensor calls if all of it is understood."""
        module = unit.module
        if isinstance(module, TensorCall):
            done = self._tensors(unit, module.fn, module.in_keys, module.out_keys, module.names)
        elif uses_module(module):
            done = self._tensordict_module(unit, module)
        elif isinstance(module, ProbabilisticTensorDictModule):
            done = self._probabilistic(unit, module)
        elif picks_actions(module):
            done = self._q_values(unit, module)
        else:
            done = False
        self.program.lowered += done
        return done

    # -- modules on tensors ------------------------------------------------------------------------

    def _tensordict_module(self, unit: Unit, module: Any) -> bool:
        extras = vars(module).get("_get_kwargs") or module.method_kwargs
        if extras or module.method is not None:
            return False
        self.program.watch.add(module)
        names = vars(module).get("_kwargs")
        return self._tensors(unit, module.module, module.in_keys, module.out_keys, names)

    def _tensors(
        self,
        unit: Unit,
        fn: Callable[..., Any],
        in_keys: Sequence[Any],
        out_keys: Sequence[Any],
        names: Sequence[str] | None,
    ) -> bool:
        reads, writes = as_keys(in_keys), as_keys(out_keys)
        expected = [key for key in writes if key != _SKIPPED]
        if not set(reads) <= set(unit.visible) or not set(expected) <= set(unit.writes):
            return False
        args = [self._read(key) for key in reads]
        if writes_input(fn) and any(map(self._is_given, args)):
            return False
        if is_known(fn) and len(args) == 1 and names is None:
            values = lower_tensors(self._tape, self.program.watch, fn, args[0])  # type: ignore[arg-type]  # is_known
            self._cells.update(
                (key, v) for key, v in zip(writes, values, strict=True) if key != _SKIPPED
            )
            return True
        lent = keeps_nothing(fn)
        if not lent and set(unit.writes) != set(expected):
            return False  # It changes what it reads in place.
        cells = [self._cell(unit, key) if key != _SKIPPED else None for key in writes]
        if lent:
            for part in fn.modules():  # type: ignore[attr-defined]  # a module, or it could keep
                self.program.watch.add(part)
        self._tape.calls.append(tensor_call(fn, args, names, cells, writes, lent))
        return True

    # -- action values ----------------------------------------------------------------------------

    def _q_values(self, unit: Unit, module: Any) -> bool:
        reads, keys = as_keys(module.in_keys), as_keys(module.out_keys)
        if not set(reads) <= set(unit.visible):
            return False
        mark = self._tape.mark()
        found = lower_q_values(self._tape, module.action_space, self._read(reads[0]))
        if found is not None and len(found) == len(keys):
            values = dict(zip(keys, found, strict=True))
            if self._agrees(module, reads, values, self._tape.calls[mark[0] :]):
                self._cells.update(values)
                return True
        self._tape.cut(mark)
        return False

    # -- distributions ---------------------------------------------------------------------------

    def _probabilistic(self, unit: Unit, module: Any) -> bool:
        kind = self.program.kind
        recipe = recipe_of(module.distribution_class)
        safe = qualified(type(module)) == _SAFE_MODULE
        if kind is None or recipe is None or not _is_understood(module, safe):
            return False
        reads = as_keys(module.in_keys)
        if not set(reads) <= set(unit.visible):
            return False
        draw = Draw(
            tape=self._tape,
            params=dict(zip(map(_last, module.dist_keys), map(self._read, reads), strict=True)),
            options=dict(module.distribution_kwargs),
            kind=kind,
            log_prob=bool(module.return_log_prob),
            joint=safe
            and callable(getattr(module.distribution_class, "rsample_and_log_prob", None)),
            name=", ".join(map(show, reads)),
        )
        mark = self._tape.mark()
        drawn = recipe(draw)
        if drawn is not None:
            keys = [as_key(module.dist_sample_keys[0])]
            keys += [as_key(module.log_prob_key)] if draw.log_prob else []
            found = {
                key: value for key, value in zip(keys, drawn, strict=False) if value is not None
            }
            if self._agrees(module, reads, found, self._tape.calls[mark[0] :]):
                self._cells.update(found)
                return True
        self._tape.cut(mark)
        return False

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
        name = id(module), self.program.kind, given
        watch = self._agreed.get(name)
        if watch is None or watch.changed():
            watch = Watch()
            watch.add(module)
            if not self._same(module, reads, found, calls, watch):
                return False
            self._agreed[name] = watch
        self.program.watch.include(watch)
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

    # -- anything else -----------------------------------------------------------------------------

    def keep(self, unit: Unit) -> None:
        """Call ``unit`` as it is, on a TensorDict of its own."""
        entries = {key: self._read(key) for key in unit.visible}
        cells = {key: self._cell(unit, key) for key in unit.writes}
        shape, flags = self._batch_shape, self._constants
        self._tape.calls.append(tensordict_call(unit.module, entries, shape, flags, cells))

    def _read(self, key: Key) -> torch.Tensor:
        cell = self._cells[key]
        if cell is self._roots.get(key):
            self._used[key] = cell
        return cell

    def _is_given(self, value: torch.Tensor) -> bool:
        """Tell whether ``value`` lies in the memory of a root entry."""
        place = value.untyped_storage().data_ptr()
        return any(place == root.untyped_storage().data_ptr() for root in self._roots.values())

    def _cell(self, unit: Unit, key: Key) -> torch.Tensor:
        seen = unit.writes[key].detach()
        cell = self._cells[key] = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
        cell.copy_(seen)
        return cell


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
def _quiet(kind: ExplorationType | None, device: torch.device) -> Iterator[None]:
    """Run the body without a trace in random streams, gradients or inference tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(set_exploration_type(kind))
        yield
