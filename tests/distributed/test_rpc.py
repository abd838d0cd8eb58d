"""RPCCollector over real processes: the inline data, exact weights, failures that are named."""

import os
import signal
from collections import defaultdict

import pytest
import rig
import torch
from node_rig import addresses_listened_on, run_learner, way_out
from tensordict.nn import TensorDictModule
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc

from gleanrl import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    LazyTensorStorage,
    MultiSyncCollector,
    ReplayBuffer,
    RPCCollector,
    RPCDataCollector,
    WorkerDied,
    WorkerError,
)
from gleanrl.weight_update import RPCWeightSyncScheme, WeightSyncScheme


@pytest.fixture(scope="module", autouse=True)
def _warm(python):
    """Have the zygote and all that torch opens once per process up."""
    RPCCollector([rig.counting()], frames_per_batch=4, launcher="mp", tcp_port=0).shutdown()


@pytest.fixture(autouse=True)
def _tidy(_warm):
    with rig.nothing_left_behind():
        yield
    assert not rpc._is_current_rpc_agent_set()


@pytest.fixture
def make():
    made = []

    def build(*envs, policy=None, per_node=8, sync=True, **options):
        frames = per_node * len(envs) if sync else per_node
        options = {"launcher": "mp", "tcp_port": 0, **options}
        made.append(RPCCollector(list(envs), policy, frames_per_batch=frames, sync=sync, **options))
        return made[-1]

    yield build
    while made:
        made.pop().shutdown(raise_on_error=False)


def two(**options):
    return rig.counting(0, **options), rig.counting(1, **options)


def check_seen(rollout, expected=None):
    """Check that a rollout was made with the weights of its version, all of them."""
    seen = rollout["seen"]
    assert (seen == seen.reshape(-1)[0]).all()
    version = int(rollout["policy_version"].reshape(-1)[0])
    assert float(seen.reshape(-1)[0]) == version
    assert expected is None or version == expected
    return version


# -- data ------------------------------------------------------------------------------------------


def normal(width):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("cat", [None, -1, 0])
def test_the_data_are_those_of_the_inline_reference_bit_for_bit(make, cat):
    found = []
    options = {"num_envs": 3, "max_frames_per_traj": 7, "cat_results": cat}
    for collector in (
        make(*["Pendulum-v1"] * 2, policy=normal(3), per_node=24, total_frames=192, **options),
        MultiSyncCollector(
            ["Pendulum-v1"] * 2,
            normal(3),
            frames_per_batch=48,
            total_frames=192,
            backend="inline",
            num_threads=torch.get_num_threads(),
            **options,
        ),
    ):
        assert collector.set_seed(5) == 10
        found.append([batch.clone() for batch in collector])
        collector.shutdown()
    assert len(found[0]) == len(found[1]) == 4
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape == {None: (2, 3, 8), -1: (3, 16), 0: (6, 8)}[cat]
        assert one.names == other.names
        assert bool((one == other).all())


def test_without_sync_every_batch_is_a_node_that_goes_on_where_it_was(make):
    collector = make(*two(pause=0.001), sync=False, total_frames=160)
    last = defaultdict(int)
    for batch in collector:
        assert batch.shape == (8,)
        number = int(batch["observation"][0, 0])
        steps = batch["next", "observation"][:, 1].long().tolist()
        assert steps == list(range(last[number] + 1, last[number] + 9))
        last[number] = steps[-1]
    assert sum(last.values()) == 160
    assert collector.stats()["frames"] == 160


def test_batches_are_the_users_until_let_go_and_large_ones_arrive_whole(make):
    class Wide(rig.Count):
        observation_space = rig.gym.spaces.Box(0, 1e6, (40_000,), rig.np.float32)

        def _observe(self, where):
            return rig.np.full(40_000, self.steps, rig.np.float32)

    collector = make(Wide, sync=False, total_frames=-1)
    kept = [batch for batch, _ in zip(collector, range(6), strict=False)]
    for index, batch in enumerate(kept):
        expected = torch.arange(8 * index + 1.0, 8 * index + 9)[:, None].expand(8, 40_000)
        assert torch.equal(batch["next", "observation"], expected)


def test_endless_means_endless(make):
    collector = make(*two(), total_frames=-1)
    with pytest.raises(TypeError, match="endless"):
        len(collector)
    batches = iter(collector)
    assert [next(batches).numel() for _ in range(5)] == [16] * 5


def wordy():
    from torchrl.testing.mocking_classes import CountingEnvWithString

    class Wordy(CountingEnvWithString):
        def get_random_string(self):
            return f"count {int(self.count)}" * 2000 if hasattr(self, "count") else "nothing"

    return Wordy(max_steps=4)


def test_data_without_a_layout_travel_with_the_reply(make):
    def act(td):
        return td.set("action", torch.ones(1, dtype=torch.int32))

    collector = make(wordy, wordy, policy=act, per_node=6, total_frames=24)
    for batch in collector:
        flat = batch.reshape(-1)["next"]
        counts = flat["observation"].flatten().tolist()
        assert list(flat["string"]) == [f"count {int(count)}" * 2000 for count in counts]


def test_a_replay_buffer_is_filled_on_the_learners_side(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = make(*two(), replay_buffer=buffer, total_frames=48)
    assert list(collector) == [None] * 3
    steps = buffer[:]["next", "observation"]
    for number in (0, 1):
        assert steps[steps[:, 0] == number][:, 1].tolist() == list(range(1, 25))


def test_whole_trajectories(make):
    collector = make(*two(), trajs_per_batch=2, total_frames=48)
    for batch in collector:
        assert batch.shape == (2, 5)
        assert batch["next", "done"][:, -1].all()


# -- weights ---------------------------------------------------------------------------------------


def test_the_next_batch_is_made_with_the_new_weights(make):
    policy = rig.encoded()
    collector = make(*two(), policy=policy, track_policy_version=True)
    for value in range(1, 30):
        policy.module.set(float(value))
        collector.update_policy_weights_()
        for rollout in collector.next():
            check_seen(rollout, value)
    assert collector.stats()["policy_version"] == 29


def test_rollouts_asked_for_after_an_update_use_it(make):
    policy = rig.encoded()
    collector = make(*two(), policy=policy, sync=False, track_policy_version=True)
    batches, sent = iter(collector), defaultdict(list)
    for value in range(1, 60):
        policy.module.set(float(value))
        collector.update_policy_weights_()
        batch = next(batches)
        version = check_seen(batch)
        history = sent[int(batch["observation"][0, 0])]
        history.append(value)
        # Two rollouts are ahead of a node: the third after this one is not asked for yet.
        assert version >= ([0, 0, 0, *history])[len(history) - 1]
    assert len(sent) == 2


def test_many_updates_at_once_end_with_the_last_one(make):
    policy = rig.encoded(100_000)
    collector = make(*two(), policy=policy, track_policy_version=True)
    for turn in range(1, 4):
        for value in range(20):
            policy.module.set(float(20 * (turn - 1) + value + 1))
            collector.update_policy_weights_()
        state = collector.state_dict()["worker1"]["policy_state_dict"]
        assert {float(x) for x in state["module.weight"].unique()} == {20.0 * turn}
        for rollout in collector.next():
            check_seen(rollout, 20 * turn)


def test_some_nodes_several_forms_and_both_ways_of_travel(make):
    policy = rig.encoded()
    collector = make(*two(), policy=policy, track_policy_version=True)
    collector.update_policy_weights_(
        {"module.weight": torch.ones(1000), "module.shadow": torch.ones(3)}, worker_ids=1
    )
    batch = collector.next()
    assert [check_seen(rollout) for rollout in batch] == [0, 1]
    policy.module.set(2.0)
    collector.update_policy_weights_()
    assert [check_seen(rollout) for rollout in collector.next()] == [2, 2]
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_({"module.weight": torch.ones(3)})
    assert [check_seen(rollout) for rollout in collector.next()] == [2, 2]


@pytest.mark.parametrize(
    "options", [{"update_after_each_batch": True}, {"max_weight_update_interval": 1}]
)
def test_updates_by_themselves(make, options):
    policy = rig.encoded()
    collector = make(*two(), policy=policy, track_policy_version=True, **options)
    for value in range(1, 5):
        batch = collector.next()
        for rollout in batch:
            check_seen(rollout, value - 1)
        policy.module.set(float(value))


def test_a_cascade_applies_every_update_at_every_leaf(make):
    policy = rig.encoded()
    collector = make(
        *two(),
        policy=policy,
        collector_class="sync",
        num_workers_per_collector=2,
        collector_kwargs={"num_threads": 1},
        track_policy_version=True,
    )
    for value in range(1, 4):
        policy.module.set(float(value))
        collector.update_policy_weights_()
        batch = collector.next()
        assert batch.shape == (2, 2, 4)
        check_seen(batch, value)


def test_the_scheme_has_its_names():
    assert isinstance(WeightSyncScheme.from_backend("rpc"), RPCWeightSyncScheme)
    assert RPCDataCollector is RPCCollector


# -- state -----------------------------------------------------------------------------------------


def test_state_and_seeds(make):
    policy = rig.encoded(10)
    collector = make(*two(), policy=policy, total_frames=64)
    policy.module.set(3.0)
    collector.update_policy_weights_()
    collector.next()
    state = collector.state_dict()
    assert state["frames"] == 16
    collector.shutdown()

    other = make(*two(), policy=rig.encoded(10), total_frames=64)
    other.load_state_dict(state)
    batches = [batch.clone() for batch in other]
    assert len(batches) == 3
    assert (batches[0]["seen"] == 3.0).all()
    other.shutdown()

    def noise():
        return make(*["Pendulum-v1"] * 2, total_frames=32)

    found = []
    for _ in range(2):
        with noise() as one:
            assert one.set_seed(7) == 8
            found.append([batch.clone() for batch in one])
    assert all(bool((a == b).all()) for a, b in zip(*found, strict=True))
    assert not bool((found[0][0][0] == found[0][0][1]).all())


def test_questions_while_nodes_collect(make):
    collector = make(*two(pause=0.002), sync=False)
    batches = iter(collector)
    next(batches)
    assert len(set(collector.map_fn("env.pid"))) == 2
    assert collector.getattr_env("number") == 0
    collector.reset()
    assert int(next(batches)["observation"][0, 1]) > 0
    assert collector.stats()["workers_alive"] == 2


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["build", "reset", "step"])
def test_what_an_environment_raises_is_raised_here(make, where):
    with rig.in_time(), pytest.raises(ArithmeticError, match="worker 1 raised") as caught:  # noqa: PT012
        collector = make(rig.counting(0), rig.counting(1, fault=rig.fail, where=where))
        for _ in collector:
            pass
    assert isinstance(caught.value, WorkerError)
    assert "in the simulator" in str(caught.value)
    assert "in fail" in str(caught.value)


@pytest.mark.parametrize("sync", [True, False])
def test_a_node_that_is_killed_is_named_in_seconds(make, sync):
    collector = make(*two(pause=0.001), sync=sync)
    batches = iter(collector)
    next(batches)
    victim = collector.map_fn("env.pid")[1]
    os.kill(victim, signal.SIGKILL)
    with rig.in_time(), pytest.raises(WorkerDied, match=r"worker 1 .*killed by signal 9") as caught:  # noqa: PT012
        while True:
            next(batches)
    assert caught.value.worker == 1
    assert collector.closed
    with pytest.raises(ClosedError):
        collector.next()


def test_a_node_killed_while_it_builds_is_named(make):
    with rig.in_time(), pytest.raises(WorkerDied, match=r"worker 1 .*killed by signal 9"):
        make(rig.counting(0), rig.counting(1, fault=rig.kill, where="build"))


def test_a_node_that_stands_still_is_named_after_the_heartbeat(make):
    collector = make(*two(), heartbeat=2.0)
    collector.next()
    victim = collector.map_fn("env.pid")[0]
    os.kill(victim, signal.SIGSTOP)
    with rig.in_time(8.0), pytest.raises(WorkerDied, match="worker 0") as caught:
        collector.next()
    assert caught.value.worker == 0


def test_a_rollout_that_takes_too_long(make):
    collector = make(rig.counting(0), rig.counting(1, fault=rig.hang, at=12), timeout=0.7)
    with rig.in_time(), pytest.raises(CollectorTimeout, match="1"):
        for _ in collector:
            pass


def test_shutdown_does_not_wait_for_rollouts_under_way(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = make(*two(pause=0.05), per_node=10_000, sync=False, replay_buffer=buffer)
    collector.start()
    with rig.in_time():
        collector.shutdown()


def test_collection_goes_on_without_a_lost_node(make):
    collector = make(
        rig.counting(0, pause=0.001),
        rig.counting(1, fault=rig.kill),
        policy=rig.encoded(4),
        sync=False,
        total_frames=160,
        on_failure="continue",
    )
    last = defaultdict(int)
    with pytest.warns(UserWarning, match="continues without it.*killed by signal 9"):  # noqa: PT031
        for batch in collector:
            number, steps = int(batch["observation"][0, 0]), batch["next", "observation"][:, 1]
            assert steps.tolist() == list(range(last[number] + 1, last[number] + 9))
            last[number] += 8
            collector.update_policy_weights_()
    assert sum(last.values()) == 160
    assert collector.stats()["workers_alive"] == 1


@pytest.mark.parametrize("command", ["update_policy_weights_", "state_dict", "shutdown"])
def test_commands_after_a_death(make, command):
    collector = make(*two(), policy=rig.encoded(4))
    collector.next()
    dead = collector.map_fn("env.pid")[1]
    os.kill(dead, signal.SIGKILL)
    rig.await_end([dead])
    with rig.in_time():
        if command == "shutdown":
            collector.shutdown(raise_on_error=False)
            return
        with pytest.raises(WorkerDied, match=r"worker 1 .*killed by signal 9"):
            getattr(collector, command)()
        collector.shutdown(raise_on_error=False)


def test_a_learner_that_was_away_for_long_finds_its_nodes_alive(make):
    collector = make(*two(), heartbeat=1.0)
    collector.next()
    rig.await_end([os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "2.5")])  # learning
    for _ in range(6):
        collector.next()


SCRIPT = """
    import sys
    sys.path.insert(0, {rig!r})
    import rig
    from gleanrl import RPCCollector

    collector = RPCCollector(
        [rig.counting(0), rig.counting(1)], frames_per_batch=8, launcher="mp", tcp_port=0
    )
    collector.next()
    print(*collector.map_fn("env.pid"), flush=True)
"""


def test_a_script_that_forgets_to_shut_down_ends_quietly():
    done = run_learner(SCRIPT)
    assert done.returncode == 0
    assert done.stderr == ""


# -- one world at a time ---------------------------------------------------------------------------


def test_one_after_the_other_and_a_named_error_for_two_at_once(make):
    for _ in range(3):
        collector = make(*two())
        with pytest.raises(ConfigError, match="one RPC world only"):
            make(*two())
        assert collector.next().numel() == 16
        collector.shutdown()


def test_a_default_process_group_of_the_users_is_left_alone(make, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        collector = make(*two())
        assert collector.next().numel() == 16
        collector.shutdown()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert dist.is_initialized()
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensorpipe_options": {"init_method": "tcp://x"}}, "init_method"),
        ({"tensorpipe_options": {"threads": 3}}, r"\['threads'\]"),
        ({"tensorpipe_options": {"rpc_timeout": 0}}, "rpc_timeout"),
        ({"visible_devices": ["cuda:0"]}, "visible_devices has 1 entries for 2"),
    ],
)
def test_wrong_arguments_are_named(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(*two(), **options)


def test_tensorpipe_options_are_used(make):
    collector = make(*two(), tensorpipe_options={"num_worker_threads": 2, "rpc_timeout": 30.0})
    assert collector.next().numel() == 16


# -- strangers -------------------------------------------------------------------------------------


def test_nothing_listens_beyond_the_interface_of_the_nodes(make):
    collector = make(*two())
    for pid in (os.getpid(), *collector.map_fn("env.pid")):
        assert addresses_listened_on(pid) == {"127.0.0.1"}


BEYOND = """
    import sys, warnings
    sys.path.insert(0, {rig!r})
    import rig
    from gleanrl import RPCCollector

    for _ in range(2):
        with RPCCollector(
            [rig.counting(0), rig.counting(1)],
            frames_per_batch=8,
            launcher="mp",
            tcp_port=0,
            host={host!r},
        ) as collector:
            collector.next()
            pids = collector.map_fn("env.pid")
    print(*pids, flush=True)
"""


def test_the_user_is_told_once_that_rpc_unpickles_what_others_on_the_network_send():
    host = way_out()
    if host is None:
        pytest.skip("this machine has no network")
    done = run_learner(BEYOND, host=host)
    assert done.stderr.count("UserWarning: RPCCollector: torch.distributed.rpc unpickles") == 1
