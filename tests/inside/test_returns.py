"""Episodes added up: the same numbers however many rollouts are taken in at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.covering import examples

from gleanrl.core.episode_returns import EpisodeSums, head_of


def as_sent(rewards, done, begun):
    columns, rows = done.T.nonzero()
    ends = np.array((rows, columns + 1), np.int64)
    begun = np.array((begun, np.zeros_like(begun)), np.int64)
    return head_of(rewards) + rewards.tobytes() + np.concatenate((begun, ends), 1).tobytes()


def step_by_step(rollouts):
    running, found = {}, []
    for rewards, done, begun in rollouts:
        running.update(dict.fromkeys(begun.tolist(), (0.0, 0)))
        found.append([])
        for reward, over in zip(rewards.T.tolist(), done.T, strict=True):
            for env, own in enumerate(reward):
                total, length = running[env]
                running[env] = total + own, length + 1
                if over[env]:
                    found[-1].append(running[env])
                    running[env] = 0.0, 0
    return found


@examples(100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1))
def test_episodes_are_those_of_a_loop_over_the_steps(seed, envs, lengths):
    draw = np.random.default_rng(seed)
    rollouts = []
    for number, steps in enumerate(lengths):
        rewards = draw.normal(size=(envs, steps)).astype(np.float32)
        begun = np.arange(envs) if not number else (draw.random(envs) < 0.2).nonzero()[0]
        rollouts.append((rewards, draw.random((envs, steps)) < 0.3, begun))
    sent = [as_sent(*rollout) for rollout in rollouts]
    cut = int(draw.integers(len(sent) + 1))
    parts, singly = EpisodeSums(), EpisodeSums()
    expected = step_by_step(rollouts)
    in_two = [parts.add(sent[:cut]), parts.add(sent[cut:])]
    for found in (in_two, [singly.add([own]) for own in sent]):
        episodes = [tuple(own) for these, _ in found for own in these.tolist()]
        assert episodes == [own for these in expected for own in these]
        assert [count for _, own in found for count in own] == [len(own) for own in expected]
