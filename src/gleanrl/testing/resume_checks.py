"""A check that a collection continues from a saved state as if it had never ended."""

from __future__ import annotations

import copy
import warnings
from itertools import islice
from typing import Any

from gleanrl.collectors import BaseCollector, Collector
from gleanrl.core.errors import CheckFailed, for_users
from gleanrl.testing.comparing import failing, require_same
from gleanrl.testing.env_checks import maker

_PLACES = 4
"""Moments at which a run is saved."""


@for_users
def check_resume(
    env: Any, policy: Any = None, *, steps: int = 24, seed: int = 0, allow_pickle: bool = False
) -> None:
    """Check that an environment and a policy continue exactly from the state of a collector.

    A run is saved after some of its batches, in the middle of episodes. Another collector, whose
    environment has made steps of its own, loads each state and must collect the same batches as the
    run did after it.

    Args:
        env: As for `check_policy`.
        policy: Anything that a collector takes; random actions by default.
        steps: The frames of a batch.
        seed: The seed of the run.
        allow_pickle: Pickle parts other than plain data, as in `Collector.save`.

    Raises:
        CheckFailed: it says what is wrong, where, and what to do.

    Example:
        >>> from gleanrl.testing import check_resume
        >>> check_resume("CartPole-v1")
    """

    def collector() -> Collector:
        return Collector(maker(env), copy.deepcopy(policy), frames_per_batch=steps, total_frames=-1)

    with failing("a Collector does not accept it"), collector() as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.set_seed(seed)
        states, batches = [], []
        for batch in islice(run, 2 * _PLACES):
            batches.append(batch.clone())
            states.append(_state_of(run, allow_pickle))
    for place in range(_PLACES):
        with collector() as other, warnings.catch_warnings():
            warnings.simplefilter("error")
            other.set_seed(seed + 1)
            other.next()
            try:
                other.load_state_dict(states[place], allow_pickle=allow_pickle)
            except UserWarning as warning:
                raise CheckFailed(f"it does not continue: {warning}") from warning
            found = [batch.clone() for batch in islice(other, _PLACES)]
        require_same(
            batches[place + 1 : place + 1 + _PLACES],
            found,
            "batches",
            f"a run that continues from the state after batch {place} differs: {{}}. Keep all that "
            "steps change in attributes of plain data (numbers, arrays, lists, self.np_random), or "
            "give the environment get_state() and set_state(state)",
        )


def _state_of(run: BaseCollector, allow_pickle: bool) -> Any:
    try:
        return copy.deepcopy(run.state_dict(allow_pickle=allow_pickle))
    except UserWarning as warning:
        raise CheckFailed(f"its state cannot be saved: {warning}") from warning
