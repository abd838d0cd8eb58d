"""What a policy writes and remembers, from one call on the first observation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from torch import distributions as D

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import IS_INIT, NEXT, Key, as_key, format_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.policies.adapt import Adapted
from gleanrl.policies.exploration import ExplorationType, set_exploration_type
from gleanrl.policies.probe import Probed, call_on, run_once
from gleanrl.policies.states import first_states
from gleanrl.policies.structure import modules_of
from gleanrl.policies.untouched import untouched

FAILURES = (KeyError, RuntimeError, TypeError, AttributeError, ValueError, IndexError)
"""What a policy may raise because the state it is given does not suit it."""
_ONE_HOT = (D.OneHotCategorical, D.OneHotCategoricalStraightThrough)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one call showed."""

    probed: Probed
    outputs: tuple[Field, ...]
    """Actions first, then everything else that is delivered and not the environment's."""
    states: tuple[Key, ...]
    """Root entries that are provided: zero where an episode begins, then what the policy wrote
    under ``"next"``."""
    fed: tuple[Key, ...]
    """All root entries that the policy's ``("next", ...)`` outputs replace."""
    needs_is_init: bool
    rewrites: tuple[Key, ...]
    """Entries of the environment that the policy replaced or changed in place."""
    after: TensorDictBase
    """The root entries that the environment would have been given."""

    @property
    def declares(self) -> bool:
        """Whether all of the policy says what it writes."""
        return all(unit.declares for unit in self.probed.units)

    @property
    def why_no_rows(self) -> str:
        """What rows of known entries would lose."""
        if self.rewrites:
            return f"the policy changes {', '.join(map(format_key, self.rewrites))}"
        if self.probed.objects:
            return f"the policy writes {format_key(self.probed.objects[0])}, which is no tensor"
        if not self.declares:
            return "the policy does not say all that it writes (out_keys)"
        return "the policy makes its own first state"

    @property
    def fits_rows(self) -> bool:
        """Whether nothing that was written needs more than rows of known entries."""
        known = self.declares and not self.rewrites and not self.probed.objects
        return known and set(self.fed) == set(self.states)


class GivesIndex(PolicyError):
    """A policy gave an index where the environment wants a one-hot vector."""


class IndexToOneHot:
    """A policy whose actions are indices, for an environment that wants one-hot vectors."""

    def __init__(self, adapted: Adapted, actions: Sequence[Field]) -> None:
        """Call ``adapted``; its actions become what ``actions`` describe."""
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


def learn_converted(
    policy: Any,
    adapted: Adapted,
    env: EnvLayout,
    root: TensorDictBase,
    exploration: ExplorationType,
    *,
    as_written: bool = False,
    one_hot: Collection[Key] = (),
) -> tuple[Adapted, Learnt]:
    """Call the policy once as `learn` does; convert its actions if it gives indices for one-hot.

    Args:
        policy: See `learn`.
        adapted: See `learn`.
        env: See `learn`.
        root: See `learn`.
        exploration: See `learn`.
        as_written: See `learn`.
        one_hot: Actions that the environment wants as one-hot vectors.

    Returns:
        How the policy is called from now on, and what that call showed.
    """
    try:
        return adapted, learn(
            policy, adapted, env, root, exploration, as_written=as_written, one_hot=one_hot
        )
    except GivesIndex as err:
        warnings.warn(f"{err}; they are converted", UserWarning, stacklevel=2)
        wanted = [field for field in env.actions if field.key in one_hot]
        converted = IndexToOneHot(adapted, wanted)
        again = Adapted(converted, adapted.in_keys, adapted.out_keys)
        return again, learn(policy, again, env, root, exploration, as_written=as_written)


def learn(
    policy: Any,
    adapted: Adapted,
    env: EnvLayout,
    root: TensorDictBase,
    exploration: ExplorationType,
    *,
    as_written: bool = False,
    one_hot: Collection[Key] = (),
) -> Learnt:
    """Call the policy once on ``root`` and leave no trace, neither in it nor in the policy.

    Args:
        policy: What the user gave.
        adapted: How it is called.
        env: The environment's side of the step.
        root: What the first reset returned, on the policy's device.
        exploration: How the policy acts in that call.
        as_written: The environment judges actions itself: they are taken as they are written.
        one_hot: Actions that the environment wants as one-hot vectors.

    Raises:
        GivesIndex: an index was given for one of these.
        PolicyError: it does not fit the environment.
    """
    asks = adapted.in_keys is not None and IS_INIT in adapted.in_keys
    tells_init = asks and root.get(IS_INIT, None) is None
    start = root.clone()
    if tells_init:
        start.set(IS_INIT, torch.ones((*root.batch_size, 1), dtype=torch.bool, device=root.device))
    given = {as_key(key): value for key, value in start.items(True, True)}
    states = declared_states(policy, adapted, given)
    probed, after, provided = _call(policy, adapted, start, states, exploration)
    outputs = probed.outputs
    owned = _owned(env)
    fed = tuple(
        key[1:]
        for key in outputs
        if key[0] == NEXT
        and key not in owned
        and (adapted.in_keys is None or key[1:] in adapted.in_keys)
    )
    actions = _actions(env, outputs, policy, as_written, one_hot)
    rewrites = tuple(key for key in outputs if key in given and key not in provided)
    extras = _extras(env, outputs, {*owned, *(field.key for field in actions)})
    return Learnt(probed, (*actions, *extras), provided, fed, tells_init, rewrites, after)


# -- inputs ----------------------------------------------------------------------------------------


def declared_states(policy: Any, adapted: Adapted, given: Container[Key]) -> list[Key]:
    """Return the states a policy says it has, before it is called on what is ``given``."""
    shapes = getattr(policy, "state_shapes", None) or {}
    states = [as_key(key) for key in shapes]
    if adapted.in_keys is not None and adapted.out_keys is not None:
        states += [
            key
            for key in adapted.in_keys
            if next_key(key) in adapted.out_keys and key not in given and key not in states
        ]
    return states


def _call(
    policy: Any,
    adapted: Adapted,
    start: TensorDictBase,
    states: Sequence[Key],
    exploration: ExplorationType,
) -> tuple[Probed, TensorDictBase, tuple[Key, ...]]:
    """Return what a call showed, the root after it, and the states that have to be provided.

    A policy that makes its first state itself is provided with zeros only if they are the same to
    it: that begins every episode anew.
    """
    batch, device = tuple(start.batch_size), start.device or torch.device("cpu")

    def run(guess: Mapping[Key, torch.Tensor]) -> tuple[Probed, TensorDictBase]:
        td = start.clone()
        for key, value in guess.items():
            td.set(key, value)
        with untouched(policy), torch.no_grad(), set_exploration_type(exploration):
            return run_once(adapted.call, td), td

    failure: Exception | None = None
    for guess in first_states(policy, states, batch, device):
        try:
            probed, td = run(guess)
        except PolicyError:
            raise
        except FAILURES as err:
            failure = failure or err
            continue
        if guess and all(_feeds(probed, key, value) for key, value in guess.items()):
            return probed, td, tuple(guess)
        if not guess:
            zeros = {k: torch.zeros_like(v) for k in states if (v := _fed(probed, k)) is not None}
            return (*_same_with(zeros, run, (probed, td)),) if zeros else (probed, td, ())
    given = {as_key(key): value.dtype for key, value in start.items(True, True)}
    missing = [key for key in adapted.in_keys or () if key not in given and key not in states]
    raise explain(failure, policy, given, missing, states) from failure


def _same_with(
    zeros: Mapping[Key, torch.Tensor],
    run: Callable[[Mapping[Key, torch.Tensor]], tuple[Probed, TensorDictBase]],
    without: tuple[Probed, TensorDictBase],
) -> tuple[Probed, TensorDictBase, tuple[Key, ...]]:
    """Provide ``zeros`` if the policy does with them what it does ``without`` them."""
    try:
        probed, td = run(zeros)
    except FAILURES:
        return (*without, ())
    mine, theirs = probed.outputs, without[0].outputs
    same = mine.keys() == theirs.keys() and all(equal(mine[key], theirs[key]) for key in mine)
    return (probed, td, tuple(zeros)) if same else (*without, ())


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same, bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _fed(probed: Probed, key: Key) -> torch.Tensor | None:
    return probed.outputs.get(next_key(key))


def _feeds(probed: Probed, key: Key, value: torch.Tensor) -> bool:
    return same_shape(_fed(probed, key), value)


def same_shape(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Tell whether ``one`` is there and has the shape of ``other``."""
    return one is not None and one.shape == other.shape


def explain(
    err: Exception | None,
    policy: Any,
    shown: Mapping[Key, torch.dtype | None],
    missing: Sequence[Key],
    states: Sequence[Key],
) -> Exception:
    """Return what to raise when a first call failed with ``err``, or fitted no state.

    Args:
        err: What the policy raised.
        policy: What the user gave.
        shown: What the environment gives, with dtypes.
        missing: What the policy reads and is not given.
        states: The states it has.
    """
    reason = _reason(err, policy, shown, missing, states)
    if reason is None and err is not None:
        return err
    return PolicyError(f"{reason} ({err})")


def _reason(
    err: Exception | None,
    policy: Any,
    shown: Mapping[Key, torch.dtype | None],
    missing: Sequence[Key],
    states: Sequence[Key],
) -> str | None:
    """Say why the policy failed, ``None`` if its own error says it best."""
    if missing:
        given = ", ".join(map(format_key, shown))
        return (
            f"the policy reads {', '.join(map(format_key, missing))}, which the environment does "
            f"not give; it gives {given}"
        )
    if states:
        return (
            "the policy could not be called with its first state "
            f"{', '.join(map(format_key, states))} left out or zero; say what shape it has, "
            "without batch dimensions: policy.state_shapes = "
            f"{{{format_key(states[0])}: (hidden_size,)}}"
        )
    wide = [format_key(key) for key, dtype in shown.items() if dtype == torch.float64]
    narrow = any(p.dtype == torch.float32 for m in modules_of(policy) for p in m.parameters(False))
    if isinstance(err, RuntimeError) and wide and narrow:
        return (
            f"the policy has float32 weights and failed on float64 observations {', '.join(wide)}: "
            "pass observation_dtype=torch.float32 to the environment, or call policy.double()"
        )
    return None


# -- outputs ---------------------------------------------------------------------------------------


def _actions(
    env: EnvLayout,
    outputs: Mapping[Key, torch.Tensor],
    policy: Any,
    as_written: bool,
    wants_one_hot: Collection[Key],
) -> tuple[Field, ...]:
    """Return the fields of the actions: the environment's, or as they were written."""
    one_hot, found = _draws_one_hot(policy), []
    for field in env.actions:
        value = outputs.get(field.key)
        if value is None:
            wrote = ", ".join(map(format_key, outputs)) or "nothing"
            raise PolicyError(f"the policy did not write {format_key(field.key)}; it wrote {wrote}")
        if field.key in wants_one_hot and _is_index(env, field, value):
            raise GivesIndex(
                f"the policy gives indices as {format_key(field.key)}; the environment was made "
                "with categorical_action_encoding=False and wants one-hot vectors"
            )
        if as_written:
            found.append(_field(env, field.key, value))
        else:
            _check_action(env, field, value, field.key in one_hot)
            found.append(field)
    return tuple(found)


def _is_index(env: EnvLayout, field: Field, value: torch.Tensor) -> bool:
    whole = not value.is_floating_point() and not value.is_complex()
    return whole and tuple(value.shape) == (*env.batch_shape, *field.shape[:-1])


def _extras(
    env: EnvLayout, outputs: Mapping[Key, torch.Tensor], taken: Container[Key]
) -> tuple[Field, ...]:
    return tuple(_field(env, key, value) for key, value in outputs.items() if key not in taken)


def _field(env: EnvLayout, key: Key, value: torch.Tensor) -> Field:
    size = len(env.batch_shape)
    if tuple(value.shape[:size]) != env.batch_shape:
        raise PolicyError(
            f"the policy wrote {format_key(key)} with shape {tuple(value.shape)}; it must begin "
            f"with the batch shape {env.batch_shape} of the environment"
        )
    return Field(key, tuple(value.shape[size:]), value.dtype)


def _owned(env: EnvLayout) -> set[Key]:
    roots = [field.key for field in env.observations] + [IS_INIT]
    for group in env.dones:
        roots += group.keys()
    after = [next_key(key) for key in (*roots, *(field.key for field in env.rewards))]
    return {*roots, *after}


def _check_action(env: EnvLayout, field: Field, value: torch.Tensor, one_hot: bool) -> None:
    name = format_key(field.key)
    wanted = (*env.batch_shape, *field.shape)
    if tuple(value.shape) != wanted:
        hint = ""
        if not field.dtype.is_floating_point and tuple(value.shape[:-1]) == wanted:
            hint = "; take the index (argmax) or build it with categorical_action_encoding=False"
        raise PolicyError(
            f"the policy wrote {name} with shape {tuple(value.shape)}; the environment wants "
            f"{wanted}{hint}"
        )
    if not keeps_values(value.dtype, field.dtype) and not one_hot:
        raise PolicyError(
            f"the policy wrote {name} as {value.dtype}; the environment wants {field.dtype}, which "
            f"does not hold every such value: cast it in the policy (action.to({field.dtype}))"
        )


def keeps_values(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether every value of ``given`` is one of ``wanted``, which is of the same kind.

    >>> keeps_values(torch.int32, torch.int64), keeps_values(torch.float64, torch.float32)
    (True, False)
    """
    same_kind = given.is_floating_point == wanted.is_floating_point
    same_kind = same_kind and given.is_complex == wanted.is_complex
    return same_kind and torch.promote_types(given, wanted) == wanted


def _draws_one_hot(policy: Any) -> list[Key]:
    """Return the keys that hold zeros and ones though torch's distributions make them floats."""
    return [
        as_key(module.dist_sample_keys[0])
        for module in modules_of(policy)
        if isinstance(module, ProbabilisticTensorDictModule)
        and module.distribution_class in _ONE_HOT
    ]
