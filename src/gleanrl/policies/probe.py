"""The one call of a policy at construction, which shows its inputs, outputs and states."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase, set_interaction_type
from torch import distributions as D
from torch import nn
from torch.nn.parameter import is_lazy

from gleanrl.core.errors import PolicyError, PolicyTypeError, note
from gleanrl.core.keys import (
    IS_INIT,
    NEXT,
    STEP_COUNT,
    Key,
    as_key,
    as_keys,
    format_key,
    is_private,
    next_key,
)
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import SourceOptions, warn
from gleanrl.core.streams import preserved
from gleanrl.operations.change_watch import equal, same_memory, writes_so_far
from gleanrl.policies.adapt import Adapted, adapt
from gleanrl.policies.diagnosis import diagnose, unbatched, unfit_state, unknown_state, unprimed
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.submodules import children_of, modules_of, selects, units_of, watch_layers

_ONE_HOT = (D.OneHotCategorical, D.OneHotCategoricalStraightThrough)
_MISFITS = (KeyError, RuntimeError, TypeError, AttributeError, ValueError, IndexError)
"""Errors that a policy may raise because of its inputs."""
_T = TypeVar("_T")


# -- one call --------------------------------------------------------------------------------------


@contextmanager
def _restored(policy: Any) -> Iterator[None]:
    """Restore random streams, parameters and buffers of ``policy`` after the body.

    What else the policy keeps, such as a counter in Python, advances.
    """
    tables: list[Any] = [
        table for module in modules_of(policy) for table in (module._parameters, module._buffers)
    ]
    held = [(table, *item) for table in tables for item in table.items() if item[1] is not None]
    for _, name, tensor in held:
        if tensor.layout != torch.strided:
            raise PolicyError(
                f"the policy's {name!r} is a parameter or buffer of layout {tensor.layout}, which "
                "can be neither restored nor sent: register its indices and values, or keep it as "
                "a plain attribute, which each copy of the policy has"
            )
    entries = [
        (table, name, tensor, tensor.detach(), tensor.detach().clone())
        for table, name, tensor in held
        if not is_lazy(tensor) and not _shared(tensor)
    ]
    try:
        with preserved():
            yield
    finally:
        with torch.no_grad():
            for table, name, tensor, memory, value in entries:
                table[name] = tensor
                if not tensor.is_set_to(memory):
                    tensor.data = memory
                if not torch.equal(memory, value):
                    memory.copy_(value)


def _shared(tensor: torch.Tensor) -> bool:
    """Tell whether another process may write to ``tensor`` meanwhile."""
    on_cpu = tensor.device.type == "cpu"  # torch calls all other memory shared
    return on_cpu and tensor.is_shared()  # type: ignore[no-untyped-call]  # torch's


@dataclass(slots=True)
class Unit:
    """One module of a policy, as it was seen to act."""

    module: Callable[[Any], Any]
    """Takes and returns a TensorDict."""
    visible: tuple[Key, ...]
    """The entries that were there when it was called."""
    writes: dict[Key, torch.Tensor]
    """The entries it made, replaced or changed in place, with the values it gave."""

    def reads_before_written(self) -> set[Key]:
        """Return the inputs that it declares and that were not there when it was called."""
        return {*as_keys(getattr(self.module, "in_keys", None) or ())} - {*self.visible}


@dataclass(slots=True)
class PolicyTrace:
    """What each part of a policy did in one call."""

    units: list[Unit]
    """The modules the policy is made of; the policy itself if it cannot be taken apart."""
    whole: Unit
    """The policy as one unit."""
    inputs: dict[Key, torch.Tensor]
    """The root entries that it was called on, as they were, ``[*batch_shape, ...]``."""
    keeps: bool = False
    """Whether something refers to the TensorDict after the call that did not before."""

    @property
    def outputs(self) -> dict[Key, torch.Tensor]:
        """The tensors that the policy wrote, without private entries."""
        return {
            key: value
            for key, value in self.whole.writes.items()
            if isinstance(value, torch.Tensor) and not is_private(key)
        }

    @property
    def objects(self) -> list[Key]:
        """The policy's outputs other than tensors, without private entries."""
        writes = self.whole.writes.items()
        return [k for k, v in writes if not isinstance(v, torch.Tensor) and not is_private(k)]


def _trace(policy: Callable[[Any], Any], td: TensorDictBase) -> PolicyTrace:
    """Call ``policy`` on ``td``, which is lost, module by module where it is a sequence."""
    start, batch = _Snapshot(td), td.batch_size
    units, apart, modules = [], True, units_of(policy)
    watch = watch_layers(modules)
    for module in modules:
        before = _Snapshot(td)
        td = call_on(module, td)
        units.append(Unit(module, tuple(before.entries), before.written(td, _out_keys(module))))
        tensors = all(isinstance(value, torch.Tensor) for value in entries_of(td).values())
        apart = apart and td.batch_size == batch and tensors
        apart = apart and not watch.changed()  # one unit may set what another one reads
    written = start.written(td, _out_keys(policy))
    if isinstance(policy, nn.Module) and selects(policy) and children_of(policy) is not None:
        kept = _out_keys(policy)  # what its modules write beside these is dropped
        written = {key: value for key, value in written.items() if key in kept}
    whole = Unit(policy, tuple(start.entries), written)
    if units[0].module is policy:
        units = [whole]
    return PolicyTrace(units if apart else [whole], whole, start.values)


def call_on(policy: Callable[[Any], Any], td: TensorDictBase) -> TensorDictBase:
    """Call ``policy`` and return the TensorDict it left or returned."""
    try:
        result = policy(td)
    except RuntimeError as err:
        error = unbatched(err)
        if error is None:
            raise
        raise error from err
    if result is None:
        return td
    if not isinstance(result, TensorDictBase):
        raise PolicyTypeError(
            f"the policy was called with a TensorDict and returned {type(result).__name__}; it "
            "must return a TensorDict (or None after writing into the one it got)"
        )
    return result


def leaves(data: TensorDictBase) -> set[Key]:
    """Return the keys of all tensors and objects in ``data``."""
    keys = data.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {as_key(key) for key in keys}


def entries_of(td: TensorDictBase) -> dict[Key, Any]:
    """Return all tensors and objects in ``td``."""
    items = td.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {as_key(key): value for key, value in items}


def _out_keys(module: Any) -> set[Key]:
    """Return the outputs that a TensorDict module declares."""
    named = getattr(module, "out_keys", None) if isinstance(module, TensorDictModuleBase) else None
    return set(as_keys(named or ()))


class _Snapshot:
    """A TensorDict's entries at one moment: which tensors they were, and their values."""

    def __init__(self, td: TensorDictBase) -> None:
        self.entries = entries_of(td)
        tensors = {k: v for k, v in self.entries.items() if isinstance(v, torch.Tensor)}
        self.values = {key: value.clone() for key, value in tensors.items()}
        self._versions = {key: writes_so_far(value) for key, value in tensors.items()}

    def written(self, td: TensorDictBase, declared: Collection[Key]) -> dict[Key, Any]:
        """Return the entries of ``td`` that were made, replaced or changed in place since.

        What is ``declared`` as written counts even if its values happen to be the same.
        """
        return {
            key: value
            for key, value in entries_of(td).items()
            if key in declared or not self._unchanged(key, value)
        }

    def _unchanged(self, key: Key, value: Any) -> bool:
        """Tell whether an entry has its old memory, perhaps in another view, without a write."""
        before = self.entries.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            return before is value
        # What is written in place counts even if it left the values as they were, this time.
        unwritten = writes_so_far(before) == self._versions[key]
        return unwritten and same_memory(before, value) and torch.equal(value, self.values[key])


# -- what the call shows ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicySignature:
    """What a policy reads, writes and remembers."""

    trace: PolicyTrace
    outputs: tuple[Field, ...]
    """Actions first, then everything else that is delivered and not the environment's."""
    states: tuple[Key, ...]
    """Root entries that are provided: zero where an episode begins, then what the policy wrote
    under ``"next"``."""
    policy_written_state: tuple[Key, ...]
    """All root entries that the policy's ``("next", ...)`` outputs replace."""
    provided: Mapping[Key, torch.dtype]
    """Root entries that the collector provides: ``"is_init"`` and ``"step_count"``, if read."""
    rewrites: tuple[Key, ...]
    """Entries of the environment that the policy replaced, changed in place or removed."""
    after: TensorDictBase
    """The root entries that the environment would have been given."""

    @property
    def why_unfit(self) -> str | None:
        """Why no step fits rows of known entries; ``None`` if all do that are like the first."""
        given, wrote = self.trace.inputs, self.trace.outputs
        changed = [
            key for key in self.rewrites if key not in wrote or not equal(wrote[key], given[key])
        ]
        if changed:  # and not only copied
            return f"the policy changes {', '.join(map(format_key, changed))}"
        if self.trace.objects:
            return f"the policy writes {format_key(self.trace.objects[0])}, which is no tensor"
        return None

    @property
    def why_no_rows(self) -> str | None:
        """What rows of known entries would lose; ``None`` if they hold all that was written."""
        if self.why_unfit is not None:
            return self.why_unfit
        if self.rewrites:
            return f"the policy replaces {', '.join(map(format_key, self.rewrites))}"
        if set(self.policy_written_state) != set(self.states):
            return "the policy makes its own first state"
        if self.trace.keeps:
            return "the policy keeps the TensorDict that it is called on"
        return None

    def check_needs_nothing_back(self) -> None:
        """Check that the policy writes nothing that only its next call can read.

        An asynchronous pool gives nothing back.
        """
        modules = modules_of(self.trace.whole.module)
        declare = (m for m in modules if isinstance(m, TensorDictModuleBase))
        read = {key for module in declare for key in as_keys(module.in_keys or ())}
        early = {key for unit in self.trace.units for key in unit.reads_before_written()}
        wrote = (key for key in self.trace.whole.writes if key[0] != NEXT)
        kept = [key for key in wrote if key in early or (is_private(key) and key not in read)]
        if kept:
            raise PolicyError(
                f"the policy writes {', '.join(map(format_key, kept))} for its own next call: no "
                "module declares that in in_keys, or one does that is called before it is written. "
                "An asynchronous pool gives it nothing back: leave out batch_size where the pool "
                "is made. What this call itself reads again is declared in in_keys, or kept in a "
                "variable"
            )


def learn(
    policy: Any,
    contract: EnvContract,
    root: TensorDictBase,
    options: SourceOptions,
    adapted: Adapted | None = None,
) -> tuple[Adapted, PolicySignature]:
    """Call the policy once on ``root`` and leave no trace, neither in it nor in the policy.

    ``root`` is the result of the first reset, as the policy is shown it, and ``contract`` has a
    layout. A policy that gives indices where the environment wants one-hot vectors is called once
    more, with its actions converted. Returns how the policy is called from now on (``adapted``, if
    that is decided already), and the results of that call.
    """
    adapted = adapt(policy, contract, options) if adapted is None else adapted
    env = contract.layout
    assert env is not None
    start, provided = _start(adapted, root, root.get(IS_INIT, None) is not None)
    given = {as_key(key): value for key, value in start.items(True, True)}

    def run(first: Mapping[Key, torch.Tensor]) -> tuple[PolicyTrace, TensorDictBase]:
        td = _with(start, first)
        with _restored(policy), torch.no_grad(), set_interaction_type(options.exploration_type):
            before = sys.getrefcount(td)
            trace = _trace(adapted.call, td)
            if sys.getrefcount(td) > before:
                gc.collect()  # a compiler leaves circles that hold it
            trace.keeps = sys.getrefcount(td) > before
            return trace, td

    (trace, after), states = _first_call(
        policy, adapted, start, given, run, lambda called, key: called[0].outputs.get(key)
    )
    outputs = trace.outputs
    wanted = [field for field in env.actions if field.key in contract.one_hot]
    indices = [format_key(f.key) for f in wanted if _is_index(env, f, outputs.get(f.key))]
    if indices:
        warn(
            f"the policy gives indices as {', '.join(indices)}; the environment was made with "
            "categorical_action_encoding=False and wants one-hot vectors; they are converted"
        )
        converted = replace(adapted, call=IndexToOneHot(adapted, wanted))
        return learn(policy, replace(contract, one_hot=()), root, options, converted)
    owned = _owned(env, IS_INIT in provided)
    actions = _actions(env, outputs, policy, contract.env_checks_actions)
    taken = {*owned, *(field.key for field in actions)}
    extras = (_field(env, key, value) for key, value in outputs.items() if key not in taken)
    removed = (f.key for f in env.observations if f.key in given and after.get(f.key, None) is None)
    return adapted, PolicySignature(
        trace=trace,
        outputs=(*actions, *extras),
        states=states,
        policy_written_state=tuple(
            key[1:]
            for key in outputs
            if key[0] == NEXT and key not in owned and _reads(adapted, key[1:])
            if key[1:] not in env.passed
        ),
        provided=provided,
        rewrites=(*(key for key in outputs if key in given and key not in states), *removed),
        after=after,
    )


class IndexToOneHot:
    """A policy whose actions are indices, for an environment that wants one-hot vectors."""

    def __init__(self, adapted: Adapted, actions: Sequence[Field]) -> None:
        self.in_keys, self.out_keys = adapted.in_keys, adapted.out_keys
        self._call = adapted.call
        self._actions = tuple(actions)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the policy and convert its actions."""
        out = call_on(self._call, tensordict)
        for field in self._actions:
            index = out.get(field.key)
            if index.ndim < out.ndim + len(field.shape):
                hot = torch.nn.functional.one_hot(index.long(), field.shape[-1])
                out.set(field.key, hot.to(field.dtype))
        return out


def learn_dynamic(
    policy: Any, contract: EnvContract, root: TensorDictBase, options: SourceOptions
) -> tuple[Adapted, TensorDictBase, tuple[Field, ...], Mapping[Key, torch.dtype]]:
    """Call the policy once on ``root``, whose layout is not fixed; see `learn`.

    Returns:
        How the policy is called; zeros in place of what it wrote beside actions; the root entries
        that its ``("next", ...)`` outputs replace; what is provided, see `PolicySignature`.
    """
    adapted = adapt(policy, contract, options)
    there = leaves(root)
    start, provided = _start(adapted, root, IS_INIT in there)
    given = {key: _stacked(start, key) for key in sorted(leaves(start))}

    def run(first: Mapping[Key, torch.Tensor]) -> TensorDictBase:
        with _restored(policy), torch.no_grad(), set_interaction_type(options.exploration_type):
            return call_on(adapted.call, _with(start, first))

    out, _ = _first_call(
        policy, adapted, start, given, run, lambda called, key: called.get(key, None)
    )
    unchanged = {key for key in provided if equal(out.get(key, start.get(key)), start.get(key))}
    kept = {*there, *contract.observed, *contract.rewarded, IS_INIT, *unchanged}
    written = leaves(out) - kept - set(map(next_key, kept))
    states = [
        Field(key[1:], tuple(value.shape[root.ndim :]), value.dtype)
        for key in sorted(written)
        if key[0] == NEXT and (value := _stacked(out, key)) is not None
        if _reads(adapted, key[1:])
    ]
    zeroed = written - {*contract.acted, *(state.key for state in states)}
    return adapted, out.select(*zeroed).apply(torch.zeros_like), tuple(states), provided


def _stacked(data: TensorDictBase, key: Key) -> torch.Tensor | None:
    """Return an entry, ``None`` if it is no tensor or does not stack."""
    try:
        value = data.get(key)
    except RuntimeError:
        return None  # Part of a lazy stack of different shapes.
    return value if isinstance(value, torch.Tensor) else None


# -- inputs ----------------------------------------------------------------------------------------


def _start(
    adapted: Adapted, root: TensorDictBase, has_init: bool
) -> tuple[TensorDictBase, Mapping[Key, torch.dtype]]:
    """Return a copy of ``root`` to call the policy on, and the entries that were added."""
    start, provided = root.clone(), dict[Key, torch.dtype]()
    if adapted.in_keys is not None and IS_INIT in adapted.in_keys and not has_init:
        provided[IS_INIT] = torch.bool
    if adapted.counts and _reads(adapted, STEP_COUNT):
        provided[STEP_COUNT] = torch.int64
    for key, dtype in provided.items():
        first = int(dtype is torch.bool)
        start.set(key, torch.full((*root.batch_size, 1), first, dtype=dtype, device=_place(root)))
    return start, provided


def _place(data: TensorDictBase) -> torch.device:
    """Return the device of the tensors in ``data``, whether it shows one or not."""
    held = (value.device for key in leaves(data) if (value := _stacked(data, key)) is not None)
    return data.device or next(held, torch.device("cpu"))


def _with(start: TensorDictBase, first: Mapping[Key, torch.Tensor]) -> TensorDictBase:
    td = start.clone()
    for key, value in first.items():
        td.set(key, value)
    return td


def _reads(adapted: Adapted, key: Key) -> bool:
    return adapted.in_keys is None or key in adapted.in_keys


def _declared_states(policy: Any, adapted: Adapted, given: Container[Key]) -> list[Key]:
    """Return the states a policy says it has, before it is called on what is ``given``."""
    states = [as_key(key) for key in getattr(policy, "state_shapes", None) or {}]
    if adapted.in_keys is not None and adapted.out_keys is not None:
        states += [
            key
            for key in adapted.in_keys
            if next_key(key) in adapted.out_keys and key not in given and key not in states
        ]
    return states


def _first_call(
    policy: Any,
    adapted: Adapted,
    start: TensorDictBase,
    given: Mapping[Key, torch.Tensor | None],
    run: Callable[[Mapping[Key, torch.Tensor]], _T],
    written: Callable[[_T, Key], torch.Tensor | None],
) -> tuple[_T, tuple[Key, ...]]:
    """Call a policy with its first state; return what ``run`` returned, and the provided states.

    ``written`` finds an entry in what ``run`` returned.
    """
    batch, device = tuple(start.batch_size), _place(start)
    states = _declared_states(policy, adapted, given)
    first = {
        key: torch.zeros((*batch, *shape), dtype=dtype, device=device)
        for key, (shape, dtype) in _first_state(policy, adapted, states, given).items()
    }
    missing = [key for key in adapted.in_keys or () if key not in given and key not in states]
    try:
        result = run(first)
    except PolicyError:
        raise
    except Exception as err:
        note(err, "the policy raised this in its first call, on what the first reset gave")
        if isinstance(err, IndexError) and not batch:
            note(err, "one environment has no batch dimension; with num_envs=1 it has one")
        unknown = [key for key in states if key not in first]
        if unknown and isinstance(err, KeyError):  # it cannot begin with a state of its own
            raise unknown_state(unknown) from err
        misfit = isinstance(err, _MISFITS)
        declared = adapted.out_keys or ()
        error = diagnose(err, policy, given, missing, states, declared) if misfit else None
        if error is not None:
            raise error from err
        raise
    for key, value in first.items():
        after = written(result, next_key(key))
        if after is None or after.shape != value.shape:
            raise unfit_state(key, value, after)
    return result, tuple(first)


# -- first states ----------------------------------------------------------------------------------


def _first_state(
    policy: Any, adapted: Adapted, states: Sequence[Key], given: Container[Key]
) -> Mapping[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes, without batch dimensions, and dtypes of the states that begin with zeros.

    The policy's ``state_shapes`` declare them; or its modules, as TorchRL's do, by primers; or they
    are those of the cell or LSTM inside. A policy that reads ``"is_init"`` may make its own.
    """
    primed = _primed(policy, adapted, states, given)
    if not states:
        return {}
    shapes = {
        as_key(key): (_shape(value), torch.get_default_dtype())
        for key, value in (getattr(policy, "state_shapes", None) or {}).items()
    }
    shapes = {**primed, **shapes}
    begins = IS_INIT in (adapted.in_keys or ())
    known = _recurrent_shapes(policy, lstm=len(states) == 2 and not begins)
    if not shapes and len(known) == 1:
        shapes = dict.fromkeys(states, (known.pop(), torch.get_default_dtype()))
    unknown = [key for key in states if key not in shapes]
    if unknown and (shapes or not begins):
        raise unknown_state(unknown)
    return shapes


def _primed(
    policy: Any, adapted: Adapted, states: Container[Key], given: Container[Key]
) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the states that modules describe by primers, as TorchRL's do.

    `PolicyError` if the policy may read an entry of a primer that the environment does not give,
    and it is no state, or an episode begins with another value of it than zeros.
    """
    shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    for module in modules_of(policy):
        describe = getattr(type(module), "make_tensordict_primer", None)
        if describe is None:
            continue
        primer = describe(module)
        for key in map(as_key, primer.primers.keys(True, True)):
            name = key if len(key) > 1 else key[0]
            values = primer.default_value
            first = primer.random or (values if callable(values) else values.get(name))
            if key in states and not callable(first) and not torch.as_tensor(first).any():
                spec = primer.primers[name]
                shapes.setdefault(key, (tuple(spec.shape), spec.dtype))
            elif key not in given and _reads(adapted, key):
                raise unprimed(key, module)
    return shapes


def _recurrent_shapes(policy: Any, *, lstm: bool) -> set[tuple[int, ...]]:
    """Return the shapes of the states of cells; where there are none, of an ``nn.LSTM`` if asked.

    Its two states are known by their number. A GRU may be an encoder beside a state of any shape.
    Two layers would take ``[2, layers, size]`` of two environments for ``[layers, 2, size]``.
    """
    modules = list(modules_of(policy))
    cells: set[tuple[int, ...]]
    cells = {(m.hidden_size,) for m in modules if isinstance(m, nn.RNNCellBase)}
    layers = [m for m in modules if lstm and isinstance(m, nn.LSTM)]
    plain = all(m.num_layers == 1 and not (m.bidirectional or m.proj_size) for m in layers)
    return cells or {(1, m.hidden_size) for m in layers if plain}


def _shape(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(getattr(value, "shape", value))


# -- outputs ---------------------------------------------------------------------------------------


def _actions(
    env: EnvLayout, outputs: Mapping[Key, torch.Tensor], policy: Any, as_written: bool
) -> tuple[Field, ...]:
    """Return the fields of the actions: the environment's, or as they were written."""
    # Zeros and ones, though torch's distributions make them floats.
    one_hot = [
        as_key(module.dist_sample_keys[0])
        for module in modules_of(policy)
        if isinstance(module, ProbabilisticTensorDictModule)
        and module.distribution_class in _ONE_HOT
    ]
    found = []
    for field in env.actions:
        value = outputs.get(field.key)
        if value is None:
            name, wrote = format_key(field.key), ", ".join(map(format_key, outputs)) or "nothing"
            raise PolicyError(
                f"the policy did not write {name}; it wrote {wrote}: name the action {name} in "
                "out_keys, or add a module that makes it from these"
            )
        if as_written:
            found.append(_field(env, field.key, value))
        else:
            _check_action(env, field, value, field.key in one_hot)
            found.append(field)
    return tuple(found)


def _is_index(env: EnvLayout, field: Field, value: torch.Tensor | None) -> bool:
    return (
        value is not None
        and not value.is_floating_point()
        and not value.is_complex()
        and tuple(value.shape) == (*env.batch_shape, *field.shape[:-1])
    )


def _field(env: EnvLayout, key: Key, value: torch.Tensor) -> Field:
    size = len(env.batch_shape)
    if tuple(value.shape[:size]) != env.batch_shape:
        raise PolicyError(
            f"the policy wrote {format_key(key)} with shape {tuple(value.shape)}; it must begin "
            f"with the batch shape {env.batch_shape} of the environment"
        )
    return Field(key, tuple(value.shape[size:]), value.dtype)


def _owned(env: EnvLayout, shows_init: bool) -> set[Key]:
    """Return the keys that the environment writes, and ``is_init`` if the collector shows that."""
    roots = [field.key for field in env.observations] + ([IS_INIT] if shows_init else [])
    for group in env.dones:
        roots += group.keys()
    after = (key for key in roots if key not in env.passed)
    return {*roots, *map(next_key, (*after, *(field.key for field in env.rewards)))}


def _check_action(env: EnvLayout, field: Field, value: torch.Tensor, one_hot: bool) -> None:
    name = format_key(field.key)
    wanted = (*env.batch_shape, *field.shape)
    if tuple(value.shape) != wanted:
        raise PolicyError(
            f"the policy wrote {name} with shape {tuple(value.shape)}; the environment wants "
            f"{wanted}{_shape_hint(value, wanted, field.dtype)}"
        )
    if not _keeps_values(value.dtype, field.dtype) and not one_hot:
        raise PolicyError(
            f"the policy wrote {name} as {value.dtype}; the environment wants {field.dtype}, which "
            f"does not hold every such value: cast it in the policy (action.to({field.dtype}))"
        )


def _shape_hint(value: torch.Tensor, wanted: tuple[int, ...], dtype: torch.dtype) -> str:
    """Name the likely cause of an action of the wrong shape."""
    shape = tuple(value.shape)
    if not dtype.is_floating_point and shape[:-1] == wanted:
        if value.is_floating_point():
            return (
                "; one number per action is no action: take the index (argmax), or sample one with "
                "a ProbabilisticTensorDictModule and torch.distributions.Categorical"
            )
        return "; take the index (argmax), or pass categorical_action_encoding=False"
    if wanted and shape == (*wanted[:-1], 2 * wanted[-1]):
        return (
            "; if these are mean and scale, split them (tensordict.nn.NormalParamExtractor) and "
            "sample an action"
        )
    return ""


def _keeps_values(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether every value of ``given`` is one of ``wanted``, which is of the same kind."""
    same_kind = given.is_floating_point == wanted.is_floating_point
    same_kind = same_kind and given.is_complex == wanted.is_complex
    return same_kind and torch.promote_types(given, wanted) == wanted
