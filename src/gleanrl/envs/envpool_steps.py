"""The steps of an EnvPool by its C++ methods, without the Python around them.

`EnvPool.step` sorts names and looks up settings at each call, which takes longer than the steps of
many environments. Its results are the arrays of its C++ methods, and which ones is always the same.
So the first step notes where they come from, if the code of EnvPool is the known one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from gleanrl.core.window import Array

_USES: Mapping[str, set[str]] = {
    "step": {"send", "recv"},
    "send": {"_from", "_check_action", "_send"},
    "recv": {"_recv", "_to", "hasattr", "_state_names", "_state_keys", "dict", "zip"}
    | {"np", "array", "_last_players_env_id"},
}
"""The names that the code of EnvPool's methods uses; versions with others are called as usual."""
_INHERITED = (*_USES, "_from", "_check_action")
_DONE, _CUT = np.array([[False, True, False, True], [False, False, True, True]])


class EnvPoolSteps:
    """`step` of one EnvPool, with only ``"env_id"`` in its ``infos``."""

    def __init__(self, env: Any) -> None:
        """Step ``env``."""
        self._env = env
        self._short: Callable[..., Any] | None = None
        """The shorter way, once the first step has shown that there is one."""
        self._looked = False

    @property
    def are_short(self) -> bool:
        """Whether it is known, after a first step, that the shorter way is the same."""
        return self._short is not None and _is_known(self._env)

    def method(self) -> Callable[..., Any]:
        """Return the function that takes the actions and ids of ``env.step`` in one rollout."""
        if (self._looked and self._short is None) or not _is_known(self._env):
            whole: Callable[..., Any] = self._env.step
            return whole
        return self._short or self._first

    def _first(self, actions: Any, ids: Array | None = None) -> Any:
        """Step as EnvPool does, and look where its results come from."""
        env = self._env
        given = env._from(actions, ids)
        env._check_action(given)
        env._send(given)
        state = env._recv()
        result = env._to(state, False, True)
        if not self._looked:
            self._looked = True
            envs = env.all_env_ids if ids is None else ids
            if _are_passed_on(env, given, envs, actions):
                self._short = _short(env, given[2].dtype, state, result)
        return result


def _is_known(env: Any) -> bool:
    """Tell whether the methods around the C++ methods are EnvPool's, as they are known here."""
    kind = type(env)
    own = vars(next(base for base in kind.__mro__ if base.__name__ == "EnvPoolMixin"))
    if not vars(env).keys().isdisjoint((*_INHERITED, "_to")):
        return False
    if any(getattr(kind, name, None) is not own.get(name) for name in _INHERITED):
        return False
    codes = [own[name].__code__ for name in _USES if isinstance(own.get(name), FunctionType)]
    if any(not used.issuperset(c.co_names) for used, c in zip(_USES.values(), codes, strict=False)):
        return False
    return len(codes) == len(_USES) and kind._to.__module__.startswith("envpool.")


def _are_passed_on(env: Any, given: Sequence[Any], ids: Array, actions: Any) -> bool:
    """Tell whether ``given``, for the C++ method, are ``ids``, ``ids`` again and ``actions``."""
    names = list(env._spec._action_keys)
    if len(names) != 3 or names[:2] != ["env_id", "players.env_id"]:
        return False
    pairs = zip(given, (ids, ids, actions), strict=True)
    return all(isinstance(b, np.ndarray) and np.array_equal(a, b) for a, b in pairs) and (
        given[0].dtype == given[1].dtype == ids.dtype
    )


def _short(env: Any, kind: Any, state: Sequence[Array], result: Any) -> Callable[..., Any] | None:
    """Return a shorter way from actions to results; ``None`` if it would differ.

    Args:
        env: The pool.
        kind: The dtype of its actions.
        state: What its C++ method returned.
        result: What EnvPool made of it.
    """
    observation, reward, _, truncated, infos = result
    wanted = (observation, reward, truncated, infos.get("env_id"))
    places = [place for one in wanted for place, array in enumerate(state) if array is one]
    names = list(env._state_keys)
    if len(places) != len(wanted) or "done" not in names:
        return None
    seen, gain, cut, who = places
    over = names.index("done")
    tried = list(state)
    tried[over], tried[cut] = _DONE, _CUT
    if not np.array_equal(env._to(tried, False, True)[2], np.greater(_DONE, _CUT)):
        return None
    send, recv, greater, everyone = env._send, env._recv, np.greater, env.all_env_ids

    def step(actions: Array, ids: Array | None = None) -> Any:
        envs = everyone if ids is None else ids
        send([envs, envs, actions.astype(kind, order="C")])  # a copy: it is read later
        state = recv()
        truncated = state[cut]
        ended = greater(state[over], truncated)
        return state[seen], state[gain], ended, truncated, {"env_id": state[who]}

    return step
