"""The law of the zoo: plain, fast and reference loop agree, bit for bit.

`check` runs a pair in one process, `check_workers` in a `MultiSyncCollector`.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, is_non_tensor
from tests.zoo.cases import Environment, Policy
from tests.zoo.policies import WEIGHTS
from tests.zoo.reference import Call, Loop, Twin, seed_all, without_private
from torch import nn

from gleanrl import Collector, EnvError, MultiSyncCollector, PolicyError

STEPS, BATCHES = 5, 5
_ON_MEMORY = ("clamps-observation", "keeps-observation", "inplace-layer-on-observation")
"""Policies that work on the memory of what they are shown."""


@dataclass
class Outcome:
    """What a run gave: batches, then an error if there was one."""

    batches: list[TensorDictBase] = field(default_factory=list)
    error: Exception | None = None


def fits(policy: Policy, env: Environment) -> bool:
    """Whether ``policy`` can act in ``env``."""
    if env.tags & {"agents"} and not policy.name.startswith(("agents", "MultiAgent")):
        return False
    if "mask" in env.tags and "asked" not in policy.name:
        return False
    if "primed" in env.tags and policy.is_init:
        return False
    if "reuses" in env.tags and policy.name.endswith(_ON_MEMORY):
        return False  # they change the environment's own state, or see it change: nobody can say
    return policy.fits(env)


def compared(policy: Policy, env: Environment) -> bool:
    """Whether there is a reference: not where rows of one call belong to different steps.

    Nor where the collector cuts episodes.
    """
    return "cut" not in env.tags and (
        "unaligned" not in env.tags or not (policy.draws or policy.mixes)
    )


def pairs(policies: Mapping[str, Policy], envs: Mapping[str, Environment]) -> list[tuple[str, str]]:
    """Return the names of all policies and environments that fit each other."""
    both = itertools.product(policies.values(), envs.values())
    return [(policy.name, env.name) for policy, env in both if fits(policy, env)]


# -- runs -----------------------------------------------------------------------------------------


def reference(policy: Policy, env: Environment, batches: int = BATCHES) -> Outcome:
    """Run the reference loop."""
    with quiet():
        module = policy.make(env)
        seed_all(0)
        twin = env.twin()
        loop = loop_of(policy, env, twin, module)
        try:
            return run(lambda: loop.rollout(STEPS), batches, changing(policy, env, module))
        finally:
            twin.close()


def loop_of(policy: Policy, env: Environment, twin: Twin, module: Any) -> Loop:
    """Return a loop; an environment that gives state or ``"is_init"`` itself needs no help."""
    states = {key: torch.zeros(shape) for key, shape in policy.states.items()}
    if "primed" in env.tags:
        states = {key: zero for key, zero in states.items() if key != "hidden"}
    ins = (env.obs,) if policy.outs else ()
    gives = env.name in {"t-init-tracker", "rl-pendulum", "t-primer"} or "init" in env.tags
    return Loop(twin, Call(module, ins, policy.outs), states, policy.is_init and not gives)


def collected(
    policy: Policy, env: Environment, fast: bool | None, batches: int = BATCHES
) -> Outcome:
    """Run a `Collector`."""
    with quiet():
        module = policy.make(env)
        seed_all(0)
        try:
            collector = Collector(
                env.given, module, frames_per_batch=STEPS * env.rows, **path(fast), **env.kwargs
            )
        except Exception as error:
            return Outcome(error=error)
        try:
            batch = iter(collector)
            return run(lambda: next(batch), batches, changing(policy, env, module))
        finally:
            collector.shutdown()


def path(fast: bool | None) -> dict[str, Any]:
    """Return the argument that chooses the path, if collectors have it."""
    known = "fast" in inspect.signature(Collector.__init__).parameters
    return {"fast": fast} if known and fast is not None else {}


def changing(policy: Policy, env: Environment, module: Any) -> Iterator[None]:
    """Apply the policy's changes to ``module``, two at every step of the iteration.

    None for environments of which steps were already made, with the policy as it was then.
    """
    for changes in steps_of(policy, env, module):
        for change in changes:
            module.apply(change)
        yield


def steps_of(policy: Policy, env: Environment, module: Any) -> list[tuple[Callable, ...]]:
    """Return the changes to make before each batch but the first."""
    if "unaligned" in env.tags or not isinstance(module, nn.Module):
        return []
    return [policy.changes[i : i + 2] for i in range(0, len(policy.changes), 2)]


def run(rollout: Callable[[], TensorDictBase], batches: int, changes: Iterator[None]) -> Outcome:
    """Seed, collect and change the policy, in turns; stop at the first error."""
    out = Outcome()
    for index in range(batches):
        seed_all(100 + index)
        try:
            out.batches.append(rollout())
        except Exception as error:
            out.error = error
            break
        next(changes, None)
    return out


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: TorchRL's, and ours that recommend something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- agreement ------------------------------------------------------------------------------------


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return what tells two outcomes apart, in words; nothing if they agree bit for bit."""
    found = []
    for index, (left, right) in enumerate(zip(one.batches, other.batches, strict=False)):
        found += [f"batch {index}: {text}" for text in unlike(comparable(left), comparable(right))]
    if refused(other):
        return found
    if len(one.batches) != len(other.batches) or kind(one.error) != kind(other.error):
        found.append(f"{ending(one)} / {ending(other)}")
    return found


def refused(outcome: Outcome) -> bool:
    """Tell whether a run ended because a step of a fixed layout differed from the first."""
    layout = isinstance(outcome.error, (PolicyError, EnvError))
    return layout and "num_envs=" in str(outcome.error)


def may_refuse(policy: Policy, env: Environment, fast: bool) -> bool:
    """Whether ``policy`` has no one layout, or changes what a vector environment shows."""
    vector, name = "vector" in env.tags, policy.name
    if name.endswith(("sometimes", "grows", "changes-dtype")):
        return fast or vector
    return vector and name.endswith(("-observation", "non-tensor"))


def ending(outcome: Outcome) -> str:
    return f"{len(outcome.batches)} batches, then {outcome.error!r:.300}"


def kind(error: Exception | None) -> Any:
    return None if error is None else (type(error), str(error))


def comparable(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch`` without what only collectors add."""
    return without_private(batch.exclude("collector"))


def unlike(one: TensorDictBase, other: TensorDictBase) -> list[str]:
    """Return the differences between two TensorDicts."""
    if one.batch_size != other.batch_size:
        return [f"batch sizes {tuple(one.batch_size)} / {tuple(other.batch_size)}"]
    left, right = leaves(one), leaves(other)
    found = (
        [f"only in the first: {sorted(left.keys() - right.keys())}"]
        if left.keys() - right.keys()
        else []
    )
    if right.keys() - left.keys():
        found.append(f"only in the second: {sorted(right.keys() - left.keys())}")
    for key in sorted(left.keys() & right.keys()):
        text = differing(left[key], right[key])
        if text:
            found.append(f"{'.'.join(key)}: {text}")
    return found


def leaves(td: TensorDictBase, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return leaves by key, and the batch size of nested TensorDicts; steps apart if ragged."""
    out: dict[tuple[str, ...], Any] = {}
    for name in td.keys():
        try:
            value = td.get(name)
        except RuntimeError:  # ragged: element by element
            value = [leaves(part) for part in td.unbind(-1)]
            out[(*prefix, str(name))] = [
                part[(name,)] for part in value if (name,) in part
            ] or value
            continue
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            out[(*prefix, name, "batch_size")] = tuple(value.batch_size)
            out |= leaves(value, (*prefix, name))
        else:
            out[(*prefix, name)] = value.tolist() if is_non_tensor(value) else value
    return out


def differing(one: Any, other: Any) -> str:
    """Return how two leaves differ, or nothing."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if same(one, other) else f"{one!r:.60} / {other!r:.60}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} / {other.dtype} {tuple(other.shape)}"
    if bits(one) == bits(other):
        return ""
    apart = (one.detach() != other.detach()).reshape(-1).nonzero().flatten()
    return f"{len(apart)} of {one.numel()} values differ"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_neg().contiguous().cpu().view(-1).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not differing(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


def check(policy: Policy, env: Environment) -> list[str]:
    """Return what breaks the law for one pair, in one process."""
    expected = reference(policy, env) if compared(policy, env) else None
    plain, fast = collected(policy, env, False), collected(policy, env, None)
    found = [f"plain/fast: {text}" for text in differences(plain, fast)]
    for outcome in (plain, fast):
        if refused(outcome) and not may_refuse(policy, env, outcome is fast):
            found.append(f"refused: {ending(outcome)}")
    if expected is not None:
        found += [f"reference/plain: {text}" for text in differences(expected, plain)]
        found += [f"reference/fast: {text}" for text in differences(expected, fast)]
    return found


# -- workers --------------------------------------------------------------------------------------


def in_workers(
    policy: Policy, env: Environment, backend: str, fast: bool | None, batches: int = 3
) -> Outcome:
    """Run a `MultiSyncCollector` with two workers."""
    with quiet():
        module = policy.make(env)
        seed_all(0)
        try:
            collector = MultiSyncCollector(
                [env.make, env.make],
                module,
                frames_per_batch=2 * STEPS * env.rows,
                backend=backend,
                **path(fast),
                **env.kwargs,
            )
        except Exception as error:
            return Outcome(error=error)
        try:
            batch = iter(collector)
            return run(
                lambda: next(batch), batches, changing_workers(policy, env, module, collector)
            )
        finally:
            collector.shutdown()


def changing_workers(
    policy: Policy, env: Environment, module: Any, collector: Any
) -> Iterator[None]:
    """Apply the policy's changes in all workers: weights as an update of the learner's."""
    for changes in steps_of(policy, env, module):
        for change in changes:
            module.apply(change)
            if change not in WEIGHTS:
                collector.cascade_execute("policy.apply", change)
        if set(changes) & set(WEIGHTS):
            collector.update_policy_weights_()
        yield


def rows(outcome: Outcome, worker: int) -> Outcome:
    """Return what one worker made."""
    return Outcome([batch[worker] for batch in outcome.batches], outcome.error)


def check_workers(policy: Policy, env: Environment) -> list[str]:
    """Return what breaks the law for one pair, in worker processes and in inline workers."""
    fast, plain = (in_workers(policy, env, "process", fast) for fast in (None, False))
    inline = in_workers(policy, env, "inline", None)
    found = [f"process: plain/fast: {text}" for text in differences(plain, fast)]
    found += [f"inline/process: {text}" for text in differences(inline, fast)]
    refused = any(text in str(fast.error) for text in ("cannot be sent", "has no shape yet"))
    # One misses ``p.data = ...`` in one process; a worker gets values by a copy. The other one's
    # statistics are those of the learner's module after an update.
    alone = policy.name in ("keeps-derived-weight", "BatchRenorm")
    if compared(policy, env) and not (policy.draws or "draws" in env.tags or refused or alone):
        expected = reference(policy, env, 3)
        if expected.error is None:  # otherwise the batch was lost with its error
            for worker in range(2):
                made = rows(inline, worker)
                found += [f"reference/worker {worker}: {t}" for t in differences(expected, made)]
    return found
