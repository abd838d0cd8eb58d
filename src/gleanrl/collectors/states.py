"""The state of a running collection, as a collector saves and restores it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from gleanrl.collectors import state_files
from gleanrl.collectors.running_collection import Collection
from gleanrl.collectors.state_types import NO_STATE, check_types, explained
from gleanrl.core import messages as m
from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    MissingEntryError,
    WeightsError,
    WorkerDied,
)
from gleanrl.core.options import warn
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import Undelivered
from gleanrl.engine.pipeline import frames_held
from gleanrl.engine.replacing_workers import reseeded
from gleanrl.envs.factory import is_built
from gleanrl.envs.saved_state import load_batch, load_state, save_state
from gleanrl.envs.simulator_state import NeedsPickle, as_bytes, as_tensor
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.transport.verifying import CHECK_TIMEOUT_S, Verifiable

_OF_ANY_NUMBER = ("frames", "whole_frames", "iter", "ready", "ledger")
"""Entries of `OF_ALL` that have a meaning for any number of workers and environments."""
VERIFIED_STEPS = 16
"""Steps by which `unverified` compares a copy."""
_ALL_BEGIN_ANEW = (
    "environments=False: all environments begin new episodes, with new random streams; partial "
    "trajectories and undelivered rollouts of the state are left out"
)


def state_of(collection: Collection, allow_pickle: bool = False) -> dict[str, Any]:
    """Return counters, statistics, and policy and environment of ``worker0``, ``worker1``, …."""
    engine, in_process = collection.engine, collection.plan.in_process
    with engine.turn(None):
        collection.settle()  # the state counts every row that is in the buffer
        try:
            states, undelivered = engine.states(m.GetState(allow_pickle))
        except ClosedError:  # only environments of this process still have theirs
            raise ClosedError(
                "the collector was shut down, as an error or Ctrl-C in its loop does, so it has no "
                "state: keep the state_dict() from after each batch"
            ) from None
        policies = (
            [collection.weights.models.policy_state()] * engine.workers
            if in_process
            else engine.request_all(m.Call("policy_state"))
        )
        return {
            **_entries(engine, states, policies),
            "frames": collection.counts.delivered,
            "whole_frames": collection.counts.whole,
            "iter": collection.batches,
            "envs": engine.num_envs,
            "statistics": collection.watching.measures.state_dict(),
            "schedule": collection.weights.schedule_state(),
            "trajectories": collection.pipeline.state(),
            "undelivered": list(map(_rollout_state, undelivered)),
            "ready": list(map(save_state, collection.ready)),
            "ledger": collection.ledger_state(),
        }


def unverified(collection: Collection, allow_pickle: bool) -> str | None:
    """Return how environments made anew, which load the present state, differ later, if they do."""
    plan, engine = collection.plan, collection.engine
    given = [env for fn in plan.functions for env in (fn if isinstance(fn, Sequence) else [fn])]
    if any(is_built(env) and not isinstance(env, Verifiable) for env in given):
        raise ConfigError(
            "verify=True compares environments made anew; not with an environment that was built "
            "before: give an id or a function"
        )
    with engine.turn(None):
        collection.settle()
        alive = engine.alive
        commands = {w: m.Verify(engine.place(w), VERIFIED_STEPS, allow_pickle) for w in alive}
        # With asynchronous central inference, workers of environments are checked in turns.
        limit = (3 + 2 * len(given)) * CHECK_TIMEOUT_S
        for worker, found in engine.request_each(commands, limit).items():
            if found is not None:
                return str(found) if plan.in_process else f"in {engine.name_of(worker)}, {found}"
    return None


def save_to(
    collection: Collection,
    path: Path,
    name: str,
    state: Callable[[], Mapping[str, Any]],
    keep: int,
    buffer: ReplayBuffer | None,
) -> None:
    """Write a state of ``collection`` to a file, or with its replay buffer to a directory.

    Nothing is collected meanwhile, so that buffer and state are of one moment.
    """
    with collection.engine.turn(None):
        saved = state()
        for why in _new_episodes(saved):
            if why.get("pickle"):
                raise NeedsPickle(f"nothing was saved: {why['why']}")
            if not collection.warned_of_episodes:
                collection.warned_of_episodes = True
                warn(f"environments will begin new episodes when the state is loaded: {why['why']}")
        facts = {"collector": name, "workers": collection.engine.workers}
        state_files.write(path, facts, saved, keep, buffer)


def read_from(
    collection: Collection, path: Path, name: str, allow_pickle: bool, environments: bool
) -> tuple[dict[str, Any], Path | None]:
    """Return a state for ``collection``, and the path of the replay buffer saved with it."""
    facts, state, buffer = state_files.read(path)
    if facts["pickled"] and environments and not allow_pickle:
        raise ConfigError(
            f"{path} has pickled parts ({', '.join(map(str, facts['pickled'][:4]))}), which can "
            "run any code: pass allow_pickle=True if you trust the file"
        )
    workers = collection.engine.workers
    alike = (facts["workers"], facts["collector"] == "Collector") == (workers, name == "Collector")
    if environments and not alike:
        raise ConfigError(
            f"{path} holds the state of a {facts['collector']} with {facts['workers']} workers; "
            f"this is a {name} with {workers}: pass environments=False to load all but the "
            "environments, which begin new episodes"
        )
    return state, buffer


def _new_episodes(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield why environments of workers, also of those in workers, have no state."""
    for name, part in state.items() if isinstance(state, Mapping) else ():
        if name == "episodes" and isinstance(part, Mapping) and "why" in part:
            yield part
        else:
            yield from _new_episodes(part)


def _rollout_state(rollout: Undelivered) -> dict[str, Any]:
    worker, report, batch = rollout
    numbers = {"steps": report.steps, "frames": report.frames, "version": report.policy_version}
    ended = as_tensor(report.ended)
    return {"worker": worker, **numbers, "ended": ended, "batch": save_state(batch)}


def _rollout(state: Mapping[str, Any]) -> Undelivered:
    ended = as_bytes(state["ended"])
    report = m.Report(state["steps"], state["frames"], state["version"], ended=ended)
    return state["worker"], report, load_batch(state["batch"])


def _entries(engine: Engine, states: list[Any], policies: list[Any]) -> dict[str, Any]:
    """Return the entry of each worker; that of a lost one has the newest policy of the others."""
    entries: dict[int, dict[str, Any]] = {}
    for worker, (state, policy) in enumerate(zip(states, policies, strict=True)):
        if state is not None and policy is not None:
            entries[worker] = {
                "policy_state_dict": policy,
                "env_state_dict": state.pop("env"),
                "policy_version": state["policy_version"],
                "worker": state,
                "life": engine.lives[worker],
            }
    if not entries:
        raise engine.first_loss
    newest = _newest(entries.values())
    for worker, life in enumerate(engine.lives):
        entries.setdefault(worker, _new_life(newest, life + 1))
    return {f"worker{worker}": entries[worker] for worker in range(engine.workers)}


def _new_life(newest: Mapping[str, Any], life: int) -> dict[str, Any]:
    """Return the entry of a worker that begins a life, with the policy of the entry ``newest``."""
    version = int(newest.get("policy_version", 0))
    return {
        "policy_state_dict": _policy_of(newest),
        "env_state_dict": {},
        "policy_version": version,
        "worker": {"policy_version": version},
        "life": life,
        "lost": True,
    }


def _of_workers(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entry of each worker; a collector of one process is its own."""
    named = [part for name, part in state_dict.items() if re.fullmatch(r"worker\d+", str(name))]
    return named or [state_dict]


def _newest(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(entries, key=lambda entry: int(entry.get("policy_version", 0)))


def _policy_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the policy state of a worker; a collector in the worker has it in its own state."""
    inner = entry.get("worker", {}).get("collector")
    if inner is not None:
        return _policy_of(_newest(_of_workers(inner)))
    return entry.get("policy_state_dict") or {}


def restore(
    collection: Collection,
    state_dict: Mapping[str, Any],
    strict: bool,
    allow_pickle: bool = False,
    environments: bool = True,
    load_buffer: Callable[[], object] = bool,
) -> str | None:
    """Restore a state of `state_of`.

    Args and errors as of `BaseCollector.load_state_dict`; ``load_buffer`` is called at the end.

    Returns:
        Which environments begin new episodes, and why; ``None`` if all continue theirs.
    """
    with collection.engine.turn(None):
        with _explained():
            parts = _read(collection, state_dict, strict, allow_pickle, environments)
        before = state_of(collection)
        try:
            restarted = _apply(collection, parts)
            load_buffer()
        except (ClosedError, WorkerDied, CollectorTimeout):  # the collector has no state any more
            raise
        except Exception:
            _apply(collection, _read(collection, before, False, False))
            with _explained():
                raise
        collection.restarted = restarted if environments else _ALL_BEGIN_ANEW
        return collection.restarted


_explained = partial(explained, NO_STATE, (WeightsError,))
_Policies: TypeAlias = dict[int, tuple[Mapping[str, Any], int]]
"""Weights and version of each worker."""
_Parts: TypeAlias = tuple[Mapping[str, Any], list[Any], _Policies, dict[int, m.Command]]
"""A state that fits a collector, the entry of each worker, and its weights and command."""


def _read(
    collection: Collection,
    state_dict: Mapping[str, Any],
    strict: bool,
    allow_pickle: bool,
    environments: bool = True,
) -> _Parts:
    """Read and check a state; nothing changes."""
    engine, weights = collection.engine, collection.weights
    check_types(state_dict)
    if not environments:
        state_dict = _without_environments(state_dict, engine)
    entries = _entries_of(state_dict, engine.workers, strict)
    policies: _Policies = {}
    commands: dict[int, m.Command] = {}
    for worker, entry in enumerate(entries):
        version = weights.number
        if "worker" in entry:
            commands[worker] = _restoring(collection, worker, entry, strict, allow_pickle)
            version = int(entry["worker"]["policy_version"])
        policies[worker] = entry.get("policy_state_dict") or {}, version
    weights.models.check_restore(state for state, _ in policies.values())
    return state_dict, entries, policies, commands


def _apply(collection: Collection, parts: _Parts) -> str | None:
    (state, entries, policies, commands), engine = parts, collection.engine
    frames = int(state.get("frames", collection.counts.delivered))
    _number_lives(engine, entries)
    answers = collection.restart(commands)
    collection.weights.restore(policies)
    collection.weights.load_schedule(state.get("schedule"))
    collection.counts.delivered = frames
    collection.counts.whole = int(state.get("whole_frames", collection.counts.whole))
    collection.batches = int(state.get("iter", collection.batches))
    engine.gather.take_back(list(map(_rollout, state.get("undelivered", ()))), collection.counts)
    if "trajectories" in state:
        collection.pipeline.load_state(state["trajectories"])
    if "ledger" in state:
        collection.load_ledger(state["ledger"])
    collection.ready.extend(load_state(None, one) for one in state.get("ready", ()))
    collection.watching.load_state_dict(state.get("statistics") or (), frames)
    collection.seeds = {}  # streams are those of the state now
    return _restarted(engine, answers)


def _without_environments(state_dict: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return a state of any workers as one of ``engine``'s, which all begin a life.

    Their ids begin after all that were given out.
    """
    entries = _of_workers(state_dict)
    ids = (1 + max(int(entry.get("life", 0)) for entry in entries)) * int(
        state_dict.get("envs", engine.num_envs)
    )
    entry = _new_life(_newest(entries), -(-ids // engine.num_envs))
    kept = {name: state_dict[name] for name in _OF_ANY_NUMBER if name in state_dict}
    if state_dict.get("statistics"):
        kept["statistics"] = [state_dict["statistics"][0][:2]]  # episodes of all workers
    if "ledger" in kept and "trajectories" in state_dict:
        unfinished = kept["ledger"]["unfinished"] + frames_held(state_dict["trajectories"])
        kept["ledger"] = {**kept["ledger"], "unfinished": unfinished}
    return {**kept, **{f"worker{worker}": entry for worker in range(engine.workers)}}


def _restarted(engine: Engine, answers: Mapping[int, Any]) -> str | None:
    why = {worker: text for worker, text in answers.items() if isinstance(text, str)}
    if not why:
        return None
    which = "all environments"
    if len(why) < engine.workers:
        which = f"environments of the workers {sorted(why)}"
    return f"{which} begin new episodes: {next(iter(why.values()))}"


def _entries_of(state_dict: Mapping[str, Any], workers: int, strict: bool) -> list[Any]:
    names = [f"worker{worker}" for worker in range(workers)]
    saved = sum(str(name).startswith("worker") for name in state_dict)
    if saved != workers:
        raise ConfigError(f"the state is that of {saved} workers, here are {workers}")
    missing = [name for name in (*names, "frames", "iter") if name not in state_dict]
    known = [name for name in names if name in state_dict]
    missing += [f"{name}.worker" for name in known if "worker" not in state_dict[name]]
    if strict and missing:
        raise MissingEntryError(f"state_dict lacks {missing}; load with strict=False to do without")
    return [state_dict[name] for name in names]


def _restoring(
    collection: Collection, worker: int, entry: Mapping[str, Any], strict: bool, allow_pickle: bool
) -> m.Command:
    """Return the command that restores ``worker`` from ``entry``, or seeds a lost worker."""
    if entry.get("lost"):
        seed = collection.seeds.get(worker) or m.Seed(collection.plan.stream + worker)
        return reseeded(seed, max(int(entry["life"]), collection.engine.lives[worker]))
    state = {**entry["worker"], "env": entry.get("env_state_dict", {})}
    return m.SetState(state, strict, allow_pickle)


def _number_lives(engine: Engine, entries: list[Any]) -> None:
    """Continue the counts of lives, and so the trajectory ids, from a state."""
    alive = engine.alive
    for worker, entry in enumerate(entries):
        life = int(entry.get("life", 0))
        if entry.get("lost"):  # it begins a life, which must not be one that is over
            life = max(life - (worker not in alive), engine.lives[worker])
        engine.lives[worker] = life
    engine.request_each({worker: engine.place(worker) for worker in alive})
