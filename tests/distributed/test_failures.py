"""Nodes that are lost: what goes on without them, and with those that take their place."""

import functools
import gc
import os
import pickle
import signal
import socket
import struct
import warnings

import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
from node_rig import (
    ids_in,
    kill,
    nodes,
    number_in,
    relaunching,
    run_learner,
    until_back,
)

from gleanrl import (
    ConfigError,
    DistributedCollector,
    LazyTensorStorage,
    MultiAsyncCollector,
    ReplayBuffer,
    WorkerDied,
)

pytestmark = pytest.mark.usefixtures("tidy_nodes")


# -- without them ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:collection continues without it")
def test_the_mask_says_which_node_with_workers_of_its_own_is_lost():
    with DistributedCollector(
        [rig.counting(0), rig.counting(1)],
        frames_per_batch=16,
        sync=True,
        launcher="mp",
        on_failure="continue",
        collector_class="sync",
        num_workers_per_collector=2,
    ) as collector:
        assert collector.next()["collector", "mask"].all()
        kill(collector, 0)
        mask = collector.next()["collector", "mask"]
        assert not mask[0].any()
        assert mask[1].all()


@pytest.mark.filterwarnings("ignore:collection continues without it")
def test_everything_can_be_asked_of_the_nodes_that_are_left():
    policy = rig.encoded(10)
    with nodes(rig.counting(0), rig.counting(1), policy=policy, on_failure="continue") as collector:
        collector.next()
        policy.module.set(1.0)
        collector.update_policy_weights_()
        kill(collector, 0)
        assert collector.getattr_env("number") == 1
        assert collector.get_distant_attr("env.number") == [None, 1]
        assert collector.map_fn("env.get_wrapper_attr", [("number",)] * 2) == [None, 1]
        assert collector.set_seed(5) == 6
        assert collector.set_seed(5, static_seed=True) == 5
        collector.reset()
        collector.update_policy_weights_(worker_ids=[0, 1])
        assert collector.stats("per_worker")["worker_0/alive"] is False
        state = collector.state_dict()
        collector.load_state_dict(state)
        seen = {number_in(collector.next()) for _ in range(6)}
        assert seen == {1}


@pytest.mark.filterwarnings("ignore:collection continues without it")
def test_batches_of_a_lost_node_may_be_kept():
    held = []
    with nodes(rig.counting(0), rig.counting(1), on_failure="continue") as collector:
        while len(held) < 3:
            batch = collector.next()
            if number_in(batch) == 1:
                held.append(batch)
        kill(collector, 1)
        copies = [batch.clone() for batch in held]
        for _ in range(12):
            collector.next()
        assert all((one == other).all() for one, other in zip(held, copies, strict=True))


def random_steps(batch):
    return batch["action"].flatten().tolist()


@pytest.mark.filterwarnings("ignore:collection continues without it")
def test_a_state_after_a_loss_loads_into_whole_collectors():
    def make():
        torch.manual_seed(0)
        return nodes(rig.counting(0), rig.counting(1), per_node=40, on_failure="continue")

    used, drawn = set(), []
    with make() as collector:
        for _ in range(8):
            batch = collector.next()
            used |= ids_in(batch)
            if number_in(batch) == 1:
                drawn.append(random_steps(batch))
        kill(collector, 1)
        for _ in range(4):
            used |= ids_in(collector.next())
        state = collector.state_dict()
    assert state["worker1"]["lost"] is True
    again = []
    for _ in range(2):
        with make() as collector:
            collector.load_state_dict(state)
            assert collector.stats()["frames"] == state["frames"]
            begun = [collector.next()]
            while number_in(begun[-1]) != 1:
                begun.append(collector.next())
            first = begun[-1]
            assert not used & ids_in(first)
            again.append(random_steps(first))
    assert again[0] == again[1]
    assert again[0] not in drawn


# -- with those that take their place --------------------------------------------------------------


LOST = "continues without it until replacement 1 of 3 has joined: worker 1 .*killed by signal 9"


def test_a_replacement_takes_part_with_the_newest_weights_and_ids_of_its_own():
    policy = rig.encoded(10)
    seen = []
    with relaunching(
        rig.counting(0),
        rig.counting(1),
        policy=policy,
        per_node=42,
        track_policy_version=True,
        total_frames=-1,
    ) as collector:
        assert collector.set_seed(7) == 8
        collector.enable_profile(workers=[], num_rollouts=9)
        for number in range(1, 9):
            seen.append(collector.next())
            policy.module.set(float(number))
            collector.update_policy_weights_()
        kill(collector, 1)
        with pytest.warns(UserWarning, match=LOST):
            collector._engine.check()
        with pytest.warns(UserWarning, match="worker 1 was replaced and takes part again"):
            first = until_back(collector, 1, seen)
        assert set(first["seen"].flatten().tolist()) == {8.0}
        assert set(first["policy_version"].flatten().tolist()) == {8}
        assert collector.stats("per_worker")["worker_1/length_max"] == 5
        assert first["is_init"][0].item() if "is_init" in first.keys() else True
        policy.module.set(9.0)
        collector.update_policy_weights_(worker_ids=[1])
        for _ in range(500):
            seen.append(collector.next())
            if number_in(seen[-1]) == 1 and set(seen[-1]["seen"].flatten().tolist()) == {9.0}:
                break
        else:
            raise AssertionError("weights for the replacement alone never showed")
        assert collector.stats()["workers_alive"] == 2
        assert collector.stats()["frames"] == 42 * len(seen)
        assert collector.get_distant_attr("profile_config.num_rollouts") == [9, 9]
    # Nothing twice: steps of an environment go on, or begin anew where it is another's.
    steps = [int(row) for b in seen if number_in(b) == 1 for row in b["next", "observation"][:, 1]]
    begins = [i for i, step in enumerate(steps) if step == 1]
    assert len(begins) == 2
    for start, end in zip(begins, [*begins[1:], len(steps)], strict=True):
        assert steps[start:end] == list(range(1, end - start + 1))
    # An id is that of one trajectory: of 5 steps, and of one life.
    ids = torch.cat([b["collector", "traj_ids"].flatten() for b in seen])
    assert torch.unique(ids, return_counts=True)[1].max() <= 5
    assert {int(i) % 2 for i in ids} == {0, 1}


@pytest.mark.parametrize("how", ["continue", "relaunch"])
def test_shutting_down_tolerates_the_loss_of_the_last_node(how):
    with nodes(rig.counting(0), on_failure=how) as collector:
        collector.next()
        kill(collector, 0)


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
@pytest.mark.parametrize("seeded", [True, False])
def test_streams_of_a_replacement_follow_from_the_seed_and_repeat_nothing(seeded):
    def actions():
        torch.manual_seed(1)
        with relaunching(rig.counting(0), rig.counting(1), per_node=60) as collector:
            if seeded:
                collector.set_seed(3)
            found = []
            while len(found) < 2:
                batch = collector.next()
                if number_in(batch) == 1:
                    found.append(random_steps(batch))
            kill(collector, 1)
            return [*found, random_steps(until_back(collector, 1))]

    one, other = actions(), actions()
    assert one == other
    assert one[2] not in one[:2]


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_weights_sent_by_message_and_models_with_extra_state_reach_a_replacement():
    policy = rig.encoded(10)
    with relaunching(rig.counting(0), rig.counting(1), policy=policy) as collector:
        policy.module.set(2.0)
        collector.update_policy_weights_()
        policy.module.set(5.0)
        collector.update_policy_weights_(worker_ids=[1])
        collector.increment_version()
        kill(collector, 1)
        assert set(until_back(collector, 1)["seen"].flatten().tolist()) == {5.0}
        kill(collector, 0)
        collector._engine.check()
        policy.module.set(6.0)
        collector.update_policy_weights_()  # while it is away
        assert set(until_back(collector, 0)["seen"].flatten().tolist()) == {6.0}
        assert collector.stats("per_worker")["worker_0/policy_version"] == 4
        collector.set_seed(1)
        collector.load_state_dict(collector.state_dict())
        both = set()
        while both != {0, 1}:
            both.add(number_in(collector.next()))


class Shifted(rig.Count):
    """Observes its number and a weight of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.shift = torch.nn.Linear(1, 1)

    def _observe(self, where):
        return np.array([self.number, self.shift.bias.item()])


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_weights_of_an_environment_hold_from_the_first_observation_of_a_replacement_on():
    weights = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(weights.bias, 3.0)
    with relaunching(functools.partial(Shifted, 0)) as collector:
        collector.update_policy_weights_(weights_dict={"env.shift": weights})
        kill(collector, 0)
        assert until_back(collector, 0)["observation"][:, 1].eq(3.0).all()


def deadly(path):
    """Build an environment only once; kill whoever tries again."""
    if path.exists():
        rig.kill()
    path.touch()
    return rig.Count(1)


@pytest.mark.parametrize("where", ["build", "raise"])
def test_replacements_that_fail_are_given_up(tmp_path, where):
    def make():
        if where == "raise" and (tmp_path / "made").exists():
            rig.fail()
        return deadly(tmp_path / "made")

    with relaunching(rig.counting(0), make, max_relaunches=2) as collector:
        collector.next()
        kill(collector, 1)
        with warnings.catch_warnings(record=True) as caught, rig.in_time(4 * rig.LIMIT):
            warnings.simplefilter("always")
            while len(caught) < 3:
                assert number_in(collector.next()) in (0, 1)
        told = [str(each.message) for each in caught]
        assert [text.partition(":")[0] for text in told] == [
            "collection continues without it until replacement 1 of 2 has joined",
            "collection continues without it until replacement 2 of 2 has joined",
            "collection continues without it, for good (max_relaunches=2)",
        ]
        assert "worker 1" in told[-1]
        assert ("in the simulator" if where == "raise" else "signal 9") in told[-1]
        assert {number_in(collector.next()) for _ in range(6)} == {0}
        assert collector.get_distant_attr("env.number") == [0, None]


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_the_only_node_is_waited_for_also_in_the_background(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with relaunching(rig.counting(0), replay_buffer=buffer, total_frames=8 * 60) as collector:
        collector.start()
        kill(collector, 0)
        with rig.in_time(4 * rig.LIMIT):
            collector.collection.filling.thread.join(4 * rig.LIMIT)
        assert len(buffer) == 8 * 60
    with relaunching(rig.counting(0), max_relaunches=1) as collector:
        collector.next()
        kill(collector, 0)
        until_back(collector, 0)
        kill(collector, 0)
        with pytest.raises(WorkerDied, match="signal 9"), rig.in_time():
            list(collector)


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_a_node_that_hangs_is_replaced_and_ended():
    with relaunching(
        rig.counting(0), rig.counting(1, fault=rig.hold_the_lock), timeout=1.5, max_relaunches=1
    ) as collector:
        of_one = []
        while len(of_one) < 2:  # every life hangs in its second rollout
            batch = collector.next()
            if number_in(batch) == 1:
                of_one.append(batch["next", "observation"][:, 1].tolist())
        assert of_one == [list(range(1, 9))] * 2
        while len(collector._engine.alive) == 2:
            collector.next()


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_a_node_with_workers_of_its_own_is_replaced():
    ids = set()
    with relaunching(
        rig.counting(0),
        rig.counting(1),
        collector_class="sync",
        num_workers_per_collector=2,
        per_node=20,
    ) as collector:
        for _ in range(6):
            ids |= ids_in(collector.next())
        pid = int(collector.stats("per_worker")["worker_1/pid"])
        os.kill(pid, signal.SIGKILL)
        lives = collector._engine.lives[1]
        while collector._engine.lives[1] == lives:
            ids |= ids_in(collector.next())
        with rig.in_time(4 * rig.LIMIT):
            while int((batch := collector.next())["next", "observation"][0, 0, 0]) != 1:
                ids |= ids_in(batch)
        assert not ids & ids_in(batch)


def test_strangers_and_nodes_too_many_are_turned_away_while_all_are_there():
    with relaunching(rig.counting(0), rig.counting(1)) as collector:
        place = collector._engine.backend.admitter.listener.getsockname()
        strangers = [socket.create_connection(place) for _ in "123"]
        kill(collector, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert until_back(collector, 1) is not None
        for stranger in strangers:
            assert len(stranger.recv(1000)) == 40
            stranger.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"launcher": "torchrun"}, "torchrun.*cannot start a node again"),
        ({"launcher": "submitit_delayed"}, "cannot start a node again"),
        ({"max_relaunches": -1}, "max_relaunches"),
    ],
)
def test_what_cannot_replace_nodes_says_so(options, says):
    given = {"launcher": "mp", "tcp_port": 0, "on_failure": "relaunch", **options}
    with pytest.raises(ConfigError, match=says):
        DistributedCollector([rig.counting(0)] * 2, frames_per_batch=8, **given)


@pytest.mark.parametrize("how", ["continue", "relaunch"])
def test_equal_shares_of_trajectories_need_every_node(how):
    with pytest.raises(ConfigError, match=f"traj_quota='equal'.*on_failure='{how}'"):
        nodes(rig.counting(0), on_failure=how, trajs_per_batch=2, traj_quota="equal")


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {rig!r})
    import rig
    from gleanrl import DistributedCollector

    def make():
        if os.path.exists({path!r} + "/made"):
            with open({path!r} + "/again", "w") as out:
                out.write(str(os.getpid()))
            os.rename({path!r} + "/again", {path!r} + "/pid")
            rig.hang_quietly()
        open({path!r} + "/made", "w").close()
        return rig.Count(1)

    collector = DistributedCollector(
        [rig.counting(0), make], frames_per_batch=8, launcher="mp", tcp_port=0,
        on_failure="relaunch",
    )
    collector.next()
    pids = collector.map_fn("env.pid")
    os.kill(pids[1], signal.SIGKILL)
    while not os.path.exists({path!r} + "/pid"):
        collector.next()
    print(pids[0], open({path!r} + "/pid").read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_replacement_that_is_joining_ends_with_a_learner_that_is_killed(tmp_path):
    run_learner(SCRIPT, path=str(tmp_path))


def processes(*envs, per_node, **options):
    return MultiAsyncCollector(list(envs), None, frames_per_batch=per_node, **options)


@pytest.mark.filterwarnings("ignore:collection continues|.*takes part again")
@pytest.mark.parametrize("kind", [nodes, processes])
def test_batches_that_the_user_keeps_while_a_worker_is_replaced_are_right(kind):
    held = []

    def of_worker_1():
        return [batch for batch in held if number_in(batch) == 1]

    def waiting():
        collector.getattr_env("number")  # takes in what has come
        return collector.stats()["frames_under_way"]

    envs = [rig.counting(0), rig.counting(1)]
    with kind(*envs, per_node=8, total_frames=-1, on_failure="relaunch") as collector:
        while len(of_worker_1()) < 2:
            held.append(collector.next())
        # Then no rollout is lost with the worker, and its batches keep their memory.
        rig.until(lambda: waiting() == 4 * 8)
        kill(collector, 1)
        rig.until(lambda: collector.get_distant_attr("env.number") == [0, None])
        with rig.in_time(4 * rig.LIMIT):
            while len(of_worker_1()) < 12:
                held.append(collector.next())
        assert collector.stats()["frames"] == 8 * len(held)
    for number in (0, 1):
        batches = [b for b in held if number_in(b) == number]
        steps = [int(n) for b in batches for n in b["next", "observation"][:, 1]]
        lives = steps.count(1)
        second = len(steps) - steps[::-1].index(1) - 1
        assert lives == 1 + number
        assert steps == [*range(1, second + 1), *range(1, len(steps) - second + 1)]


# -- messages that no node sends -------------------------------------------------------------------


class Says(gym.Env):
    """Has its node send a message of its own, with the right authentication, in its fifth step."""

    observation_space = gym.spaces.Box(0, 1e6, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, message):
        self.message, self.steps = message, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 5:
            kinds = [one for one in gc.get_objects() if type(one).__name__ == "NodeConnection"]
            kinds[0].send(self.message)
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}


WORKER_1 = b"P" + struct.pack("=qi", 3, 1) + pickle.dumps(None)


@pytest.mark.parametrize(
    "message", [b"", b"R", b"W", b"Knothing", b"L\xff", b"\xfe" * 99, WORKER_1], ids=repr
)
def test_a_node_that_sends_what_no_node_sends_is_let_go_of(message):
    with nodes(functools.partial(Says, message), total_frames=80) as collector:
        seen = []

        def collect():
            for batch in collector:
                seen.extend(batch["next", "observation"].flatten().tolist())

        with rig.in_time(2 * rig.LIMIT), pytest.raises(WorkerDied, match="what no node sends"):
            collect()
        assert seen == list(range(1, 1 + len(seen)))
