"""The states of workers, as a collector saves and restores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError
from gleanrl.engine.engine import Engine
from gleanrl.engine.replacing import reseeded


def states_of(engine: Engine) -> dict[str, Any]:
    """Return ``worker0``, ``worker1``, …, each with its policy and environment.

    The entry of a lost worker holds the policy of the worker that has the newest.
    """
    with engine.turn(None):
        states = engine.request_all(m.GetState())
        policies = engine.request_all(m.Call("policy_state"))
        lives = list(engine.lives)
    entries: dict[int, dict[str, Any]] = {}
    for worker, (state, policy) in enumerate(zip(states, policies, strict=True)):
        if state is not None and policy is not None:
            entries[worker] = {
                "policy_state_dict": policy,
                "env_state_dict": state.pop("env"),
                "policy_version": state["policy_version"],
                "worker": state,
                "life": lives[worker],
            }
    if not entries:
        raise engine.first_loss
    newest = max(entries.values(), key=lambda entry: entry["policy_version"])
    for worker, life in enumerate(lives):
        fresh = {"env_state_dict": {}, "worker": {"policy_version": newest["policy_version"]}}
        entries.setdefault(worker, {**newest, **fresh, "life": life + 1, "lost": True})
    return {f"worker{worker}": entries[worker] for worker in range(engine.workers)}


def entries_of(state_dict: Mapping[str, Any], workers: int, strict: bool) -> list[Any]:
    """Return the entry of each worker in a collector's state."""
    names = [f"worker{worker}" for worker in range(workers)]
    saved = sum(str(name).startswith("worker") for name in state_dict)
    if saved != workers:
        raise ConfigError(f"the state is that of {saved} workers, here are {workers}")
    missing = [name for name in (*names, "frames", "iter") if name not in state_dict]
    known = [name for name in names if name in state_dict]
    missing += [f"{name}.worker" for name in known if "worker" not in state_dict[name]]
    if strict and missing:
        raise KeyError(f"state_dict lacks {missing}; load with strict=False to do without")
    return [state_dict[name] for name in names]


def restoring(
    engine: Engine, worker: int, entry: Mapping[str, Any], stream: int, strict: bool
) -> m.Command:
    """Return the command that restores ``worker`` from ``entry``, or seeds a lost worker."""
    if entry.get("lost"):
        life = max(int(entry["life"]), engine.lives[worker])
        return reseeded(m.Seed(stream + worker), life)
    return m.SetState({**entry["worker"], "env": entry.get("env_state_dict", {})}, strict)


def number_lives(engine: Engine, entries: list[Any]) -> None:
    """Continue the counts of lives, and so the trajectory ids, from a state."""
    alive = engine.alive
    for worker, entry in enumerate(entries):
        life = int(entry.get("life", 0))
        if entry.get("lost"):  # it begins a life, which must not be one that is over
            life = max(life - (worker not in alive), engine.lives[worker])
        engine.lives[worker] = life
    engine.request_each({worker: engine.place(worker) for worker in alive})
