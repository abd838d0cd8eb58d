"""The steps of an EnvPool by its C++ methods, without the Python around them.

`EnvPool.step` sorts names and looks up settings at each call, which takes longer than the steps of
many environments. It passes on the arrays of its C++ methods, always in the same way. Which way is
asked of EnvPool's own code before each rollout, if that is the code known here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from gleanrl.core.window import Array
from gleanrl.operations.proofs import has_source

_PYTHON = (
    *("step", "send", "recv", "_from", "_check_action", "_infer_players_env_id"),
    *("all_env_ids", "config", "_to"),
)
"""Python functions of EnvPool's classes that a step uses."""
_CPP = ("_send", "_recv")
_HOMES = ("envpool.python.envpool", "envpool.python.gymnasium_envpool")
_PROVEN = "677f17cbeaef66db"
"""The beginning of the SHA-256 of the source of `_PYTHON`, in envpool 1.2.5."""
_DONE, _CUT = np.array([[False, True, False, True], [False, False, True, True]])
_ENDED = np.greater(_DONE, _CUT).tolist()


def direct_step(env: Any) -> Callable[..., Any] | None:
    """Return a function with the results of ``env.step`` in one rollout, but fewer calls.

    It takes actions and ids; its ``infos`` have only ``"env_id"``. ``None`` until ``env`` has
    checked the actions of its first step, and if anything that a step uses is not known to be
    EnvPool's own.
    """
    own = vars(env).keys()
    if "_check_action_finished" not in own or not own.isdisjoint((*_PYTHON, *_CPP)):
        return None
    return _direct(env) if _is_known(type(env)) else None


def _is_known(kind: type) -> bool:
    """Tell whether the methods that a step uses are EnvPool's, as they are known here."""
    values = [getattr(kind, name, None) for name in _PYTHON]
    functions: list[Any] = [one.fget if isinstance(one, property) else one for one in values]
    if not all(
        # Not ``__module__``, which wrappers copy.
        isinstance(one, FunctionType) and one.__globals__.get("__name__") in _HOMES
        for one in functions
    ):
        return False
    if not all(isinstance(getattr(kind, name), BuiltinFunctionType) for name in _CPP):
        return False
    return has_source(_PROVEN, *(one.__code__ for one in functions))


def _direct(env: Any) -> Callable[..., Any] | None:
    """Return the way that EnvPool's methods have arrays take; ``None`` if it is not direct."""
    everyone, names = env.all_env_ids, list(env._state_keys)
    if getattr(everyone, "dtype", None) != np.int32 or len(env._spec._action_keys) != 3:
        return None
    given = env._from(everyone, everyone)
    kind = given[2].dtype
    if any(
        one.dtype != dtype or one.tobytes() != everyone.astype(dtype).tobytes()
        for one, dtype in zip(given, (np.int32, np.int32, kind), strict=True)
    ):
        return None
    tried: list[Any] = [object() for _ in names]
    over, cut = names.index("done"), names.index("trunc")
    tried[over], tried[cut] = _DONE, _CUT
    observation, reward, ended, truncated, infos = env._to(tried, False, True)
    wanted = (observation, reward, infos["env_id"])
    places = [place for one in wanted for place, array in enumerate(tried) if array is one]
    if truncated is not _CUT or ended.tolist() != _ENDED or len(places) != len(wanted):
        return None
    seen, gain, who = places
    send, recv, greater = env._send, env._recv, np.greater

    def step(actions: Array, ids: Array | None = None) -> Any:
        envs = everyone if ids is None else ids
        send([envs, envs, actions.astype(kind, order="C")])  # a copy: it is read later
        state = recv()
        truncated = state[cut]
        ended = greater(state[over], truncated)
        return state[seen], state[gain], ended, truncated, {"env_id": state[who]}

    return step
