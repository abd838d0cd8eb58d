"""The loops of the training benchmark collect what they say, and learn from it."""

import dataclasses
import warnings

import pytest
from benchmarks import policies
from benchmarks.cases.training_rates import all_cases
from benchmarks.harness import run_case
from benchmarks.systems import training
from benchmarks.systems.ours import inline
from torch.distributions import Categorical


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peers"), [("train-cartpole-ppo", True), ("train-pong-dqn", False)]
)
def test_loops_of_the_benchmark_train(name, peers, monkeypatch):
    for size, count in {"ENVS": 2, "STEPS": 16, "DQN_ENVS": 2, "DQN_STEPS": 4}.items():
        monkeypatch.setattr(f"benchmarks.cases.training_rates.{size}", count)
    (case,) = (case for case in all_cases() if case.name == name)
    if not peers:
        case = dataclasses.replace(case, references=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of much
        result = run_case(case, rounds=1, seconds=1e-3)
    assert all("stable_baselines3" in why for why in result["skipped"].values()), result["skipped"]
    assert "gleanrl" in result["rates"]
    assert not peers or {"CleanRL loop", "TorchRL Collector"} <= set(result["rates"])


def test_updates_change_the_weights_that_collect():
    net = policies.mlp(4, 2)
    before = net[0].weight.detach().clone()
    update = training.PPO(net, 4, lambda logits: Categorical(logits=logits), 1, 2)
    source = inline("CartPole-v1", policies.categorical_policy(net), 32, num_envs=2)
    system = training.trained(source, update)
    try:
        assert system.collect_batch() == 32
        assert not net[0].weight.equal(before)
        assert source.collector.policy.get_parameter("module.0.module.0.weight") is net[0].weight
    finally:
        system.close()
