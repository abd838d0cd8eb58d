"""TorchRL's scripts that collect, each with a budget small enough to run in seconds.

A budget changes how much a script does, never what: frames, updates, environments, and versions of
tasks that can be installed. It is the same for both libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SOTA = "sota-implementations"
_TUTORIAL = "tutorials/sphinx-tutorials"
_CHEETAH = "HalfCheetah-v5"


@dataclass(frozen=True)
class Script:
    """A script of TorchRL's and its budget.

    Attributes:
        path: where it lies in a checkout.
        arguments: what it is called with.
        constants: ``name = value`` statements of the script that are given another value.
        edits: regular expressions and what replaces them, in every file beside the script.
        needs: modules without which neither library can run it.
    """

    path: str
    arguments: tuple[str, ...] = ()
    constants: dict[str, str] = field(default_factory=dict)
    edits: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()


def _sota(path: str, *overrides: str, edits: tuple[tuple[str, str], ...] = ()) -> Script:
    arguments = ("logger.backend=null", *overrides)
    return Script(f"{_SOTA}/{path}", arguments, edits=edits, needs=("hydra",))


def _off_policy(path: str, *overrides: str) -> Script:
    return _sota(
        path,
        "collector.total_frames=3000",
        "collector.frames_per_batch=200",
        "collector.init_random_frames=1000",
        "replay_buffer.size=5000",
        "optim.utd_ratio=0.05",
        "optim.batch_size=64",
        *overrides,
    )


def _multi_agent(name: str, *overrides: str) -> Script:
    script = _sota(
        f"multiagent/{name}.py",
        "env.max_steps=20",
        "collector.frames_per_batch=600",
        "collector.n_iters=6",
        "train.num_epochs=2",
        "train.minibatch_size=200",
        "eval.evaluation_episodes=2",
        *overrides,
    )
    return Script(script.path, script.arguments, needs=("hydra", "vmas"))


def _tutorial(
    name: str,
    edits: tuple[tuple[str, str], ...] = (),
    needs: tuple[str, ...] = (),
    **constants: str,
) -> Script:
    return Script(f"{_TUTORIAL}/{name}.py", constants=constants, edits=edits, needs=needs)


_ON_POLICY = ("collector.frames_per_batch=320", "collector.total_frames=3200")
_NODES = (
    *("--total_frames", "4000", "--frames_per_batch", "200", "--num_workers", "2"),
    *("--num_nodes", "2", "--env", "CartPole-v1"),
)
_GLOO = (*_NODES, "--backend", "gloo")
_PONG = ("logger.num_test_episodes=1", "logger.test_interval=100000000")
_IMPALA = ("collector.num_workers=2", "collector.total_frames=16000", "loss.batch_size=4", *_PONG)

SCRIPTS: tuple[Script, ...] = (
    _sota("a2c/a2c_mujoco.py", *_ON_POLICY, f"env.env_name={_CHEETAH}"),
    _sota("a2c/a2c_atari.py", *_ON_POLICY, "env.num_envs=2", *_PONG),
    _sota("ppo/ppo_mujoco.py", *_ON_POLICY, f"env.env_name={_CHEETAH}"),
    _sota("ppo/ppo_atari.py", *_ON_POLICY, "env.num_envs=2", "loss.mini_batch_size=64", *_PONG),
    _sota(
        "dqn/dqn_cartpole.py",
        "collector.total_frames=5000",
        "collector.frames_per_batch=200",
        "collector.init_random_frames=1000",
        "loss.num_updates=5",
    ),
    _sota(
        "dqn/dqn_atari.py",
        "collector.total_frames=6400",
        "collector.frames_per_batch=320",
        "collector.init_random_frames=640",
        "buffer.buffer_size=2000",
        "loss.num_updates=2",
        *_PONG,
    ),
    _off_policy(
        "sac/sac.py",
        "logger.eval_iter=1000000",
        f"env.name={_CHEETAH}",
        "collector.env_per_collector=2",
    ),
    _sota(
        "sac/sac-async.py",
        f"env.name={_CHEETAH}",
        "collector.device=cpu",
        "network.device=cpu",
        "collector.env_per_collector=2",
        "collector.frames_per_batch=200",
        "collector.init_random_frames=1000",
        "collector.update_freq=50",
        "replay_buffer.size=5000",
        "optim.batch_size=64",
        "logger.log_freq=100000000",
        edits=(("cuda:1", "cpu"),),
    ),
    _off_policy(
        "td3/td3.py",
        "logger.eval_iter=1000000",
        f"env.name={_CHEETAH}",
        "collector.env_per_collector=2",
    ),
    _off_policy("ddpg/ddpg.py", "logger.eval_iter=1000000", f"env.name={_CHEETAH}"),
    _off_policy(
        "tqc/tqc.py",
        "logger.eval_iter=1000000",
        f"env.name={_CHEETAH}",
        "collector.env_per_collector=2",
    ),
    _off_policy(
        "crossq/crossq.py",
        "logger.eval_iter=1000000",
        f"env.name={_CHEETAH}",
        "env.library=gymnasium",
        "network.critic_hidden_sizes=[64,64]",
    ),
    _off_policy(
        "discrete_sac/discrete_sac.py", "logger.eval_iter=1000000", "env.library=gymnasium"
    ),
    _sota(
        "redq/redq.py",
        f"env.name={_CHEETAH}",
        "env.init_env_steps=100",
        "collector.frames_per_batch=256",
        "collector.total_frames=3072",
        "collector.init_random_frames=512",
        "optim.steps_per_batch=2",
        "optim.init_random_frames=512",
        "buffer.prb=0",
        "buffer.size=4000",
        "buffer.batch_size=32",
        "loss.num_q_values=3",
        "logger.record_interval=1000000",
        "logger.record_frames=10",
    ),
    _off_policy(
        "cql/cql_online.py",
        "env.n_samples_stats=100",
        "logger.log_interval=1000000",
    ),
    _off_policy("cql/discrete_cql_online.py", "logger.log_interval=1000000"),
    _off_policy("iql/iql_online.py", "logger.log_interval=1000000"),
    _off_policy("iql/discrete_iql.py", "logger.log_interval=1000000"),
    _sota("impala/impala_single_node.py", *_IMPALA),
    _sota("impala/impala_multi_node_ray.py", *_IMPALA, "remote_worker_resources.num_gpus=0"),
    _sota(
        "rnd/rnd_mujoco.py", *_ON_POLICY, f"env.env_name={_CHEETAH}", "logger.test_interval=1000000"
    ),
    Script(f"{_SOTA}/gail/gail.py", ("logger.backend=null",), needs=("hydra", "d4rl")),
    _multi_agent("mappo_ippo"),
    _multi_agent("maddpg_iddpg"),
    _multi_agent("iql"),
    _multi_agent("qmix_vdn"),
    _multi_agent("sac"),
    Script(f"{_SOTA}/dreamer_v3/dreamer_v3.py", ("collector.total_frames=2000",)),
    Script(
        f"{_SOTA}/offline_to_online/train.py",
        ("--env", _CHEETAH, "--total-frames", "3000"),
        needs=("d4rl",),
    ),
    _tutorial(
        "coding_ddpg",
        init_env_steps="200",
        total_frames="2000",
        traj_len="50",
        init_random_frames="400",
        env_per_collector="1",
        num_collectors="1",
    ),
    _tutorial("coding_dqn", total_frames="640", n_optim="1"),
    _tutorial(
        "coding_ppo",
        edits=(("InvertedDoublePendulum-v4", "InvertedDoublePendulum-v5"),),
        total_frames="4000",
        frames_per_batch="400",
        num_epochs="1",
    ),
    _tutorial("collector_trajectory_assembly"),
    _tutorial("dqn_with_rnn"),
    _tutorial("evaluator"),
    _tutorial("export", init_rand_steps="500", optim_steps="1"),
    _tutorial("getting-started-3"),
    _tutorial("getting-started-5", optim_steps="2"),
    _tutorial("memory_efficient_rl"),
    _tutorial(
        "multiagent_competitive_ddpg",
        frames_per_batch="400",
        n_iters="4",
        n_optimiser_steps="2",
        needs=("vmas",),
    ),
    _tutorial(
        "multiagent_ppo", frames_per_batch="600", n_iters="4", num_epochs="1", needs=("vmas",)
    ),
    _tutorial("rb_tutorial"),
    _tutorial("recurrent_sequence_training"),
    _tutorial("torchrl_demo"),
    Script("examples/collectors/async_batched_collector.py"),
    Script("examples/collectors/multi_weight_updates.py"),
    Script("examples/collectors/weight_sync_collectors.py"),
    Script("examples/collectors/mp_collector_mps.py"),
    Script(
        "examples/distributed/collectors/single_machine/generic.py",
        _GLOO,
    ),
    Script(
        "examples/distributed/collectors/single_machine/sync.py",
        _GLOO,
    ),
    Script(
        "examples/distributed/collectors/single_machine/rpc.py",
        _NODES,
    ),
    Script("examples/distributed/collectors/multi_nodes/ray_buffer_infra.py"),
    Script("examples/distributed/collectors/multi_nodes/ray_collect.py"),
    Script(
        "examples/distributed/collectors/multi_nodes/ray_train.py",
        edits=(("InvertedDoublePendulum-v4", "InvertedDoublePendulum-v5"),),
        constants={"num_epochs": "1"},
    ),
    Script("examples/distributed/ray_dqn_trainer.py"),
    Script(
        "examples/multiagent/mappo_vmas.py",
        (
            "--frames",
            "2400",
            "--frames_per_batch",
            "600",
            "--minibatch_size",
            "200",
            "--epochs",
            "1",
        ),
        needs=("vmas",),
    ),
    Script("examples/replay-buffers/checkpoint.py", needs=("h5py",)),
    Script("examples/replay-buffers/recurrent_slice_sampler_pipeline.py"),
    Script("examples/services/ray_collector_services.py"),
)
