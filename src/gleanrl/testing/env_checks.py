"""Checks of an environment that Gymnasium's own checker does not make."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym

from gleanrl.collectors import Collector, MultiSyncCollector
from gleanrl.core.errors import CheckFailed, for_users
from gleanrl.envs.factory import build, closed_on_error, is_built
from gleanrl.testing.comparing import failing, require_same

Env: TypeAlias = gym.Env[Any, Any]


@for_users
def check_env(env: Any, *, steps: int = 200, seed: int = 0) -> None:
    """Check a Gymnasium environment for faults that spoil collected data.

    `gymnasium.utils.env_checker.check_env` checks the interface. This one checks that

    - observations lie in their space and have its dtype and shape, and rewards are finite;
    - an observation does not change after it was returned, nor an action;
    - two environments make the same steps under one seed, and so does each after another reset;
    - a worker process can build the environment, and makes the same steps.

    Args:
        env: An id or a callable that makes a single Gymnasium environment. Of a built one, copies
            are checked.
        steps: The length of each run, over several episodes. Actions are random.
        seed: The seed of all runs.

    Raises:
        CheckFailed: it says what is wrong, where, and what to do.

    Example:
        >>> from gleanrl.testing import check_env
        >>> check_env("CartPole-v1")
    """
    make = maker(env)
    with ExitStack() as stack:
        pair = [stack.enter_context(closing(_single(make))) for _ in range(2)]
        here = _collected(Collector, make, steps, seed)
        first, second = (_run(pair, steps, seed) for _ in range(2))
    require_same(
        first,
        second,
        "results",
        f"after reset(seed={seed}) it makes other steps the second time: {{}}. reset() must put "
        "back all that steps change, and seed self.np_random by super().reset(seed=seed)",
    )
    require_same(
        here,
        _collected(MultiSyncCollector, make, steps, seed),
        "batch",
        "its steps in this process and in a worker process differ: {}. Keep all state in the "
        "environment, and pass settings of this process as arguments",
    )


def _single(make: Any) -> Env:
    with failing("it cannot be made"):
        made = build(make, {})
    if isinstance(made, gym.Env):
        return made
    with closed_on_error([made]):
        raise CheckFailed(
            f"check_env takes a single Gymnasium environment; this is a {type(made).__name__}. "
            "Check a member alone, or use check_resume, which takes whatever a Collector takes"
        )


def maker(env: Any) -> Any:
    """Return ``env``, or a function that copies it if it is a built environment."""
    return partial(_copied, env) if is_built(env) else env


def _copied(env: Any) -> Any:
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise CheckFailed(f"{env} cannot be copied ({error}); give what makes it") from error


def _run(envs: Sequence[Env], steps: int, seed: int) -> list[Any]:
    """Give environments the same actions in turns; return copies of their common results."""
    space = copy.deepcopy(envs[0].action_space)
    space.seed(seed)
    found: list[Any] = []
    kept: list[Any] = []
    ended = True
    for step in range(steps):
        where = f"reset() before step {step}" if ended else f"step {step}"
        action = None if ended else space.sample()
        results: list[Any] = []
        for env in envs:
            given = copy.deepcopy(action)
            result: Any = env.reset(seed=None if found else seed) if ended else env.step(given)
            result = result[: 1 if ended else 4]
            require_same(action, given, "action", f"{where} changed its action: {{}}. Copy it")
            if not env.observation_space.contains(result[0]):
                raise CheckFailed(
                    f"the observation of {where}, {result[0]!r:.200}, is not in the space "
                    f"{env.observation_space}. Widen the space, or clip the observation"
                )
            for earlier, observation, copied in kept:
                message = f"the observation of {earlier} changed at {where}: {{}}. Return a copy"
                require_same(copied, observation, "observation", message)
            results.append(copy.deepcopy(result))
            kept = [*kept[-1:], (where, result[0], results[-1][0])]
        message = (
            f"two environments with one seed and the same actions differ at {where}: {{}}. Draw "
            "random numbers from self.np_random only, which super().reset(seed=seed) seeds, and "
            "keep no state outside of the environment"
        )
        require_same(results[0], results[1], "result", message)
        found.append(results[0])
        ended = not ended and bool(results[0][2] or results[0][3])
    return found


def _collected(kind: Any, make: Any, steps: int, seed: int) -> Any:
    with (
        failing(f"a {kind.__name__} cannot collect from it"),
        kind([make], frames_per_batch=steps, total_frames=steps, check_finite=True) as collector,
    ):
        collector.set_seed(seed)
        return collector.next()
