"""The API documents' examples, run as plain scripts with only their import lines changed."""

import subprocess
import sys
import textwrap

import pytest
from benchmarks import publish

SYNC_DATA_COLLECTOR = """
    from gleanrl.collectors import SyncDataCollector
    from gleanrl.envs.libs.gym import GymEnv
    from tensordict.nn import TensorDictModule
    from torch import nn
    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(
        create_env_fn=env_maker,
        policy=policy,
        total_frames=2000,
        max_frames_per_traj=50,
        frames_per_batch=200,
        init_random_frames=-1,
        reset_at_each_iter=False,
        device="cpu",
        storing_device="cpu",
    )
    for i, data in enumerate(collector):
        if i == 2:
            print(data)
            break
    assert data.names[-1] == "time"
    del collector
"""

PRINTED = """
TensorDict(
    fields={
        action: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.float32, is_shared=False),
        collector: TensorDict(
            fields={
                traj_ids: Tensor(shape=torch.Size([200]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([200]),
            device=cpu,
            is_shared=False),
        done: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False),
        next: TensorDict(
            fields={
                done: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False),
                observation: Tensor(shape=torch.Size([200, 3]), device=cpu, dtype=torch.float32, is_shared=False),
                reward: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.float32, is_shared=False),
                step_count: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.int64, is_shared=False),
                terminated: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False),
                truncated: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False)},
            batch_size=torch.Size([200]),
            device=cpu,
            is_shared=False),
        observation: Tensor(shape=torch.Size([200, 3]), device=cpu, dtype=torch.float32, is_shared=False),
        step_count: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.int64, is_shared=False),
        terminated: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False),
        truncated: Tensor(shape=torch.Size([200, 1]), device=cpu, dtype=torch.bool, is_shared=False)},
    batch_size=torch.Size([200]),
    device=cpu,
    is_shared=False)
"""
"""The documented print, with ``terminated`` (which the document predates)."""

SEEDS = """
    from gleanrl.collectors import SyncDataCollector
    from gleanrl.envs import ParallelEnv
    from gleanrl.envs.libs.gym import GymEnv
    from tensordict.nn import TensorDictModule
    from torch import nn
    env_fn = lambda: GymEnv("Pendulum-v1")
    env_fn_parallel = ParallelEnv(6, env_fn)
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(
        env_fn_parallel, policy, total_frames=300, frames_per_batch=100
    )
    out_seed = collector.set_seed(1)
    print(out_seed)
"""


def run(script: str, python: str) -> str:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_sync_data_collector_example_prints_the_documented_structure():
    assert run(SYNC_DATA_COLLECTOR, sys.executable).strip() == PRINTED.strip()


@pytest.mark.slow
def test_six_environments_and_seed_one_return_six(python):
    assert run(SEEDS, python).strip() == "6"


def test_published_figures_are_what_the_pages_show():
    assert publish.main(["--check"]) == 0
