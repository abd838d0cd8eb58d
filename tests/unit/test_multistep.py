"""n-step returns against torchrl's and against a plain loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import ConfigError
from gleanrl.collectors.utils import split_trajectories
from gleanrl.data.postprocs import MultiStep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing torchrl warns about its own classes
    from torchrl.data.postprocs import MultiStep as TorchRLMultiStep


def make_batch(ended, ids=None, reward_dtype=torch.float32):
    """A batch whose frames are numbered; trajectories end where ``ended`` ``[..., T]`` says."""
    number = torch.arange(ended.numel(), dtype=torch.float32).reshape(ended.shape)
    flag = ended.unsqueeze(-1)
    batch = TensorDict(
        {
            "observation": number.unsqueeze(-1),
            "next": {
                "observation": number.unsqueeze(-1) + 1,
                "agents": TensorDict(
                    {"seen": (number + 1).unsqueeze(-1).expand(*ended.shape, 2).clone()},
                    batch_size=(*ended.shape, 2),
                ),
                "reward": torch.linspace(-1, 2, ended.numel()).reshape(flag.shape).to(reward_dtype),
                "done": flag,
                "terminated": flag.clone(),
                "truncated": torch.zeros_like(flag),
            },
        },
        batch_size=ended.shape,
        names=[None] * (ended.ndim - 1) + ["time"],
    )
    if ids is not None:
        batch["collector", "traj_ids"] = ids
    return batch


def flags(*rows):
    """``"..x."`` ends at the third step."""
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


ended_rows = st.integers(1, 12).flatmap(
    lambda steps: st.lists(
        st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=1, max_size=3
    ).map(torch.tensor)
)


@examples(40)
@given(ended_rows, st.integers(2, 5), st.sampled_from([1.0, 0.9, 0.5]))
def test_it_equals_torchrl_but_for_the_end_flags(ended, n_steps, gamma):
    batch = make_batch(ended)
    ours = MultiStep(gamma, n_steps)(batch)
    theirs = TorchRLMultiStep(gamma, n_steps)(batch.clone())
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    ends = {("next", name) for name in ("done", "terminated", "truncated")}
    for key in set(theirs.keys(True, True)) - ends:
        assert ours[key].dtype == theirs[key].dtype
        torch.testing.assert_close(ours[key], theirs[key])


@examples(40)
@given(ended_rows, st.integers(1, 5))
def test_everything_after_the_step_comes_from_the_frame_looked_ahead_to(ended, n_steps):
    batch = make_batch(ended)
    out = MultiStep(0.9, n_steps)(batch)
    steps = ended.shape[-1]
    for row in range(ended.shape[0]):
        for t in range(steps):
            end = next((k for k in range(t, steps) if ended[row, k]), steps - 1)
            to = min(t + n_steps - 1, end)
            rewards = batch["next", "reward"][row, t : to + 1, 0]
            discounts = torch.tensor([0.9**k for k in range(len(rewards))])
            torch.testing.assert_close(
                out["next", "reward"][row, t, 0], (rewards * discounts).sum()
            )
            assert out["steps_to_next_obs"][row, t] == to - t + 1
            assert out["nonterminal"][row, t] == (t != end)
            for key in ("observation", "done", "terminated"):
                assert out["next", key][row, t] == batch["next", key][row, to]


def test_the_end_flags_say_whether_the_next_observation_may_be_bootstrapped_from():
    out = MultiStep(1.0, 3)(make_batch(flags("....x...")))
    assert out["next", "observation"].flatten().tolist() == [3, 4, 5, 5, 5, 8, 8, 8]
    assert out["next", "terminated"].flatten().tolist() == [False, False, *[True] * 3, *[False] * 3]


def test_trajectories_without_an_end_between_them_are_not_joined():
    ids = torch.tensor([[0, 0, 0, 7, 7, 7]])
    out = MultiStep(1.0, 4)(make_batch(flags("......"), ids))
    assert out["next", "observation"].flatten().tolist() == [3, 3, 3, 6, 6, 6]
    assert out["steps_to_next_obs"].tolist() == [[3, 2, 1, 3, 2, 1]]


def test_rows_of_unequal_length_do_not_reach_into_their_padding():
    ids = torch.tensor([0, 0, 0, 1, 1])
    rows = split_trajectories(make_batch(flags(".....")[0], ids))
    out = MultiStep(1.0, 3)(rows)
    assert out["next", "observation"].squeeze(-1).tolist() == [[3, 3, 3], [5, 5, 0]]
    assert out["nonterminal"].tolist() == [[True, True, False], [True, False, False]]
    assert out["next", "reward"][1, 2] == 0


def test_a_single_environment_needs_no_batch_dimension():
    ended = flags("..x...x.")
    flat, row = MultiStep(0.9, 3)(make_batch(ended[0])), MultiStep(0.9, 3)(make_batch(ended))
    assert flat.batch_size == (8,)
    assert flat.names == ["time"]
    for key in flat.keys(True, True):
        torch.testing.assert_close(flat[key], row[key][0])


def test_one_step_keeps_the_transitions():
    batch = make_batch(flags("..x.."))
    out = MultiStep(0.9, 1)(batch)
    for key in batch.keys(True, True):
        torch.testing.assert_close(out[key], batch[key])
    assert out["nonterminal"].tolist() == [[True, True, False, True, False]]
    assert (out["steps_to_next_obs"] == 1).all()


def test_the_input_stays_as_it_was():
    batch = make_batch(flags("..x.."))
    before = batch.clone()
    out = MultiStep(0.9, 3)(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()
    assert out.names == batch.names


def test_a_nan_stays_in_its_trajectory():
    batch = make_batch(flags("..x..."))
    batch["next", "reward"][0, 3] = torch.nan
    out = MultiStep(0.9, 4)(batch)
    assert out["next", "reward"][0, :3].isfinite().all()


def test_looking_further_than_the_batch_is_looking_to_its_end():
    batch = make_batch(flags(".."))
    out = MultiStep(0.5, 100)(batch)
    assert out["steps_to_next_obs"].tolist() == [[2, 1]]
    assert out["gamma"].tolist() == [[0.25, 0.5]]


def test_rewards_of_several_agents_are_summed_each_on_its_own():
    ended = flags("...x..")
    batch = make_batch(ended)
    reward = torch.randn(1, 6, 2, 1)
    del batch["next", "reward"]
    batch["next", "agents", "reward"] = reward
    out = MultiStep(0.9, 3)(batch)
    for agent in range(2):
        one = make_batch(ended)
        one["next", "reward"] = reward[:, :, agent]
        expected = MultiStep(0.9, 3)(one)["next", "reward"]
        torch.testing.assert_close(out["next", "agents", "reward"][:, :, agent], expected)
    torch.testing.assert_close(out["next", "agents", "original_reward"], reward)


def test_named_rewards_are_the_ones_summed():
    batch = make_batch(flags("..."))
    batch["next", "bonus"] = torch.ones(1, 3)
    out = MultiStep(1.0, 2, reward_keys=["bonus"])(batch)
    assert out["next", "bonus"].tolist() == [[2, 2, 1]]
    assert out["next", "original_bonus"].tolist() == [[1, 1, 1]]


def test_double_precision_rewards_stay_double():
    out = MultiStep(0.99, 3)(make_batch(flags("..x."), reward_dtype=torch.float64))
    assert out["next", "reward"].dtype == torch.float64


def test_wrong_use_is_named():
    with pytest.raises(ConfigError, match=r"n_steps \(2.5\) must be a whole number"):
        MultiStep(0.9, 2.5)
    with pytest.raises(ConfigError, match=r"n_steps \(0\) must be at least 1"):
        MultiStep(0.9, 0)
    with pytest.raises(ConfigError, match=r"gamma \(1.5\)"):
        MultiStep(1.5, 3)
    batch = make_batch(flags(".."))
    with pytest.raises(ConfigError, match=r"no \('next', 'gain'\), named in reward_keys"):
        MultiStep(0.9, 3, reward_keys=["gain"])(batch)
    del batch["next", "reward"]
    with pytest.raises(ConfigError, match="no entry under 'next' is called 'reward'"):
        MultiStep(0.9, 3)(batch)
    assert repr(MultiStep(0.9, 3)) == "MultiStep(gamma=0.9, n_steps=3)"
