"""DistributedCollector over local nodes: the inline data, exact weights, named failures."""

import contextlib
import functools
import os
import select
import signal
import socket
import sys
import warnings
from collections import defaultdict

import pytest
import rig
import torch
from node_rig import addresses_listened_on, nodes, run_learner
from resume_rig import (
    ENVS,
    Forgets,
    Numbers,
    check_each_frame_once,
    check_law,
    check_named,
    check_verified,
    policy_of,
)
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule

from gleanrl import (
    ClosedError,
    Collector,
    CollectorTimeout,
    ConfigError,
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    GymEnv,
    LazyTensorStorage,
    MultiSyncCollector,
    ReplayBuffer,
    WorkerDied,
    WorkerError,
)
from gleanrl.weight_update import DistributedWeightSyncScheme, WeightSyncScheme

pytestmark = pytest.mark.usefixtures("tidy_nodes")


def until_error(collector):
    """Iterate for good; return what was delivered and the error."""
    delivered = []
    try:
        with rig.in_time():
            for batch in collector:
                delivered += rig.rows(batch)
    except Exception as err:
        return delivered, err
    raise AssertionError("nothing was raised")


# -- data ------------------------------------------------------------------------------------------


def logits_policy(width=0):
    """Return a policy that also writes ``width`` numbers per step."""
    torch.manual_seed(0)
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

    net = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    wide = TensorDictModule(torch.nn.Linear(4, width or 1), ["observation"], ["wide"])
    return ProbabilisticTensorDictSequential(*([wide] if width else []), net, draw)


SHAPES = {
    "stacked": {},
    "in time": {"cat_results": -1},
    "large rows apart": {"cat_results": 0, "per_node": 128, "width": 1024},  # received in place
    "one after another": {"frames_per_batch": [24, 40], "cat_results": -1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_give_what_inline_workers_give(shape):
    options = {"num_envs": 4, "total_frames": -1, **SHAPES[shape]}
    per_node, width = options.pop("per_node", 32), options.pop("width", 0)
    options.setdefault("frames_per_batch", 2 * per_node)
    envs = ["CartPole-v1"] * 2

    def collect(make, **more):
        torch.manual_seed(1)
        policy = logits_policy(width)
        with make(envs, policy, track_policy_version=True, **options, **more) as collector:
            assert collector.set_seed(3) == 10
            for batch, _ in zip(collector, range(4), strict=False):
                yield batch
                with torch.no_grad():
                    for weight in policy.parameters():
                        weight.add_(0.1)
                collector.update_policy_weights_()

    here = collect(MultiSyncCollector, backend="inline")
    there = collect(DistributedCollector, sync=True, launcher="mp", tcp_port=0)
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert one.names == other.names
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key]), key
        assert set(other["policy_version"].flatten().tolist()) == {number}


def test_asynchronous_nodes_lose_and_repeat_nothing():
    last = defaultdict(int)
    with nodes(rig.counting(0), rig.counting(1), rig.counting(2), total_frames=8 * 30) as collector:
        for batch in collector:
            for number, step in rig.rows(batch):
                assert step == last[number] + 1
                last[number] = step
        assert sum(last.values()) == 8 * 30
        assert list(collector) == []
        assert collector.stats()["completed"] is True


def test_ragged_data_beside_data_with_a_layout():
    with nodes(rig.growing, lambda: GymEnv("CartPole-v1"), total_frames=160) as collector:
        ragged = [isinstance(batch, LazyStackedTensorDict) for batch in collector]
    assert 0 < sum(ragged) < len(ragged) == 20


def test_a_replay_buffer_of_the_learner_is_filled_in_the_background():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=16)
    with nodes(
        rig.counting(0), rig.counting(1), replay_buffer=buffer, total_frames=400
    ) as collector:
        collector.start()
        with rig.in_time():
            collector.collection.filling.thread.join(5.0)
        assert len(buffer) == 400
        assert buffer.sample()["next", "observation"].shape == (16, 2)


def test_endless_seeds_and_states():
    with nodes(rig.counting(0), rig.counting(1), policy=rig.encoded(), sync=True) as collector:
        assert collector.total_frames == float("inf")
        assert collector.set_seed(5) == 6
        collector.next()
        state = collector.state_dict()
        assert state["frames"] == 16
    policy = rig.encoded()
    policy.module.set(7.0)
    with nodes(rig.counting(0), rig.counting(1), policy=policy, sync=True) as other:
        other.load_state_dict(state)
        assert other.stats()["frames"] == 16
        assert set(other.next()["seen"].flatten().tolist()) == {0.0}
        with pytest.raises(ConfigError, match="1 workers, here are 2"):
            other.load_state_dict({k: v for k, v in state.items() if k != "worker1"})


def test_nodes_continue_bit_for_bit():
    def build():
        policy = policy_of("cartpole")
        return nodes("CartPole-v1", "CartPole-v1", policy=policy, per_node=30, sync=True)

    check_law(build)


def test_states_are_verified_in_nodes(tmp_path):
    options = {"frames_per_batch": 40, "sync": True, "launcher": "mp", "tcp_port": 0}

    def build(*kinds):
        return DistributedCollector([ENVS.get(kind, kind) for kind in kinds], **options)

    check_verified(lambda: build("wrappers", "wrappers"), tmp_path)
    check_verified(lambda: build("mujoco", "mujoco"), tmp_path)
    (tmp_path / "before").unlink()
    check_named(lambda: build(Numbers, Forgets), tmp_path, "worker")


def test_asynchronous_nodes_deliver_each_frame_once_after_a_load():
    policy = policy_of("numbers")
    check_each_frame_once(lambda: nodes(Numbers, Numbers, policy=policy, per_node=10))


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_every_frame_has_the_weights_its_version_says(sync):
    policy = rig.encoded(100_000)
    versions = defaultdict(list)
    with nodes(
        rig.counting(0), rig.counting(1), policy=policy, sync=sync, track_policy_version=True
    ) as collector:
        for number in range(1, 40):
            batch = collector.next()
            seen = batch["seen"].flatten(0, -2)
            expected = batch["policy_version"].reshape(-1, 1).float()
            assert torch.equal(seen, expected.expand_as(seen))
            versions[int(batch["next", "observation"].flatten(0, -2)[0, 0])] += expected.tolist()
            if sync:
                assert set(expected.flatten().tolist()) == {collector.policy_version}
            for _ in range(1 + (number % 5 == 0)):  # what nobody has taken yet is overtaken
                policy.module.set(collector.policy_version + 1.0)
                collector.update_policy_weights_()
    for of_one in versions.values():
        assert of_one == sorted(of_one)
        assert of_one[-1] != [0.0]


def test_interrupts_of_an_update_leave_connections_whole():
    interrupted, left = 0, 0

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith("transport/authenticated_channel.py"):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            signal.raise_signal(signal.SIGINT)
        return trace

    with nodes(rig.counting(0), policy=rig.encoded(), sync=True) as collector:
        for line in range(1, 16):
            left = line
            sys.settrace(trace)
            try:
                collector.update_policy_weights_()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            collector.next()
    assert interrupted > 5


def test_weights_of_one_node_and_of_a_scheme():
    policy = rig.encoded()
    scheme = WeightSyncScheme.from_backend("distributed")
    assert isinstance(scheme, DistributedWeightSyncScheme)
    with nodes(
        rig.counting(0),
        rig.counting(1),
        policy=policy,
        sync=True,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        policy.module.set(3.0)
        collector.update_policy_weights_(worker_ids=[1])
        seen = collector.next()["seen"]
        assert set(seen[0].flatten().tolist()) == {0.0}
        assert set(seen[1].flatten().tolist()) == {3.0}


@pytest.mark.parametrize("sync", [True, False])
def test_weights_are_sent_after_each_batch(sync):
    policy = rig.encoded()
    with nodes(
        rig.counting(0), rig.counting(1), policy=policy, sync=sync, update_after_each_batch=True
    ) as collector:
        for number in range(1, 9 if sync else 60):
            batch = collector.next()
            newest = batch["seen"].max().item()
            assert newest <= number - 1
            if sync:
                assert newest == number - 1
            policy.module.set(float(number))
    assert newest >= 3


def test_no_node_waits_longer_for_weights_than_the_interval():
    policy = rig.encoded()
    with DistributedSyncCollector(
        [rig.counting(0), rig.counting(1)],
        policy,
        frames_per_batch=16,
        update_interval=3,
        launcher="mp",
        tcp_port=0,
    ) as collector:
        found = []
        for number in range(1, 9):
            found.append(collector.next()["seen"].max().item())
            policy.module.set(float(number))
    assert found == [0, 0, 0, 3, 3, 3, 6, 6]


# -- what runs on a node ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["sync", "async"])
def test_nodes_with_workers_of_their_own(inner):
    policy = rig.encoded()
    with nodes(
        rig.counting(0),
        rig.counting(1),
        policy=policy,
        collector_class=inner,
        num_workers_per_collector=2,
        sync=True,
        per_node=16,
    ) as collector:
        first = collector.next()
        assert first.shape == ((2, 2, 8) if inner == "sync" else (2, 16))
        policy.module.set(4.0)
        collector.update_policy_weights_()
        with rig.in_time():  # rollouts that workers had begun come first, from each at its own pace
            while set(collector.next()["seen"].flatten().tolist()) != {4.0}:
                pass


def test_arguments_for_single_nodes():
    with nodes(
        rig.counting(0),
        rig.counting(1),
        collector_kwargs=[{"max_frames_per_traj": 3}, {"max_frames_per_traj": 4}],
        sync=True,
        per_node=12,
    ) as collector:
        batch = collector.next()
        counts = batch["next", "truncated"].sum((1, 2)).tolist()
        assert counts == [4, 3]


def test_arguments_for_a_nodes_collector_hold_also_where_they_are_defaults():
    inner = functools.partial(Collector, set_truncated=True, reset_at_each_iter=True)
    given = {"set_truncated": False, "progress": False}
    with nodes(
        rig.counting(0), collector_class=inner, collector_kwargs=given, per_node=4
    ) as collector:
        assert collector.get_distant_attr("set_truncated") == [False]
        assert collector.get_distant_attr("reset_at_each_iter") == [True]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers_per_collector": 2}, "num_workers_per_collector"),
        ({"collector_class": "several"}, "collector_class"),
        ({"backend": "carrier pigeon"}, "backend"),
        ({"backend": "nccl"}, "GPU"),
        ({"backend": "mpi"}, "mpi"),
        ({"backend": "ucc"}, "ucc"),
        ({"collector_kwargs": {"num_envs": 2}, "num_envs": 3}, "say it once"),
        ({"collector_kwargs": {"total_frames": 2}}, "to the collector itself"),
        ({"collector_kwargs": [{}, {}, {}]}, "3 entries for 2"),
        ({"device": ["cpu"]}, "1 entries for 2"),
        ({"update_after_each_batch": True}, "policy"),
        ({"max_weight_update_interval": 0}, "max_weight_update_interval"),
        ({"tcp_port": "a"}, "tcp_port"),
        ({"heartbeat": 0}, "heartbeat"),
        ({"launcher": "pigeon"}, "launcher"),
    ],
)
def test_contradictions_are_found_before_anything_is_started(options, says):
    before = rig.workers()
    given = {"frames_per_batch": 8, "launcher": "mp", "tcp_port": 0, **options}
    with pytest.raises(ConfigError, match=says):
        DistributedCollector([rig.counting(0), rig.counting(1)], **given)
    assert rig.workers() == before


# -- ports and strangers ---------------------------------------------------------------------------


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*tcp_port"):
            nodes(rig.counting(), tcp_port=port)
        monkeypatch.setenv("TCP_PORT", str(port))
        with pytest.warns(UserWarning, match=f"{port} is taken"):
            nodes(rig.counting(), tcp_port=None).shutdown()


def test_nothing_listens_beyond_the_interface_of_the_nodes():
    with nodes(rig.counting(0), rig.counting(1)) as collector:
        for pid in (os.getpid(), *collector.map_fn("env.pid")):
            assert addresses_listened_on(pid) == {"127.0.0.1"}


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("fault", [rig.kill, rig.leave])
def test_a_node_that_dies_is_named_and_what_it_delivered_stays(fault, sync):
    how = "was killed by signal 9" if fault is rig.kill else "exited with code 3"
    collector = nodes(rig.counting(0), rig.counting(1, fault=fault, at=20), sync=sync)
    delivered, error = until_error(collector)
    assert isinstance(error, WorkerDied)
    assert error.worker == 1
    assert "worker 1 on node 127.0.0.1" in str(error)
    assert how in str(error)
    # A node is asked for two rollouts ahead: the first has come, the second may die with it.
    steps = [step for number, step in delivered if number == 1]
    assert steps in (list(range(1, 9)), list(range(1, 17)))
    with pytest.raises(ClosedError):
        collector.next()


@pytest.mark.parametrize("where", ["build", "reset", "step"])
def test_what_an_environment_raises_is_its_own_class(where):
    with rig.in_time(), pytest.raises(ArithmeticError, match="worker 1 raised") as caught:  # noqa: PT012
        until = nodes(rig.counting(0), rig.counting(1, fault=rig.fail, where=where))
        raise until_error(until)[1]
    assert isinstance(caught.value, WorkerError)
    assert "in the simulator" in str(caught.value)


def test_a_rollout_that_takes_too_long():
    _, error = until_error(nodes(rig.counting(0), rig.counting(1, fault=rig.hang), timeout=1.0))
    assert isinstance(error, CollectorTimeout)
    assert "workers [1]" in str(error)


@pytest.mark.parametrize("sync", [True, False])
def test_a_node_that_stands_still_is_given_up(sync):
    # SIGSTOP: its kernel goes on answering, its process shows no sign of life.
    collector = nodes(rig.counting(0), rig.counting(1), sync=sync, heartbeat=1.0)
    collector.next()
    os.kill(collector.map_fn("env.pid")[1], signal.SIGSTOP)
    _, error = until_error(collector)
    assert isinstance(error, WorkerDied)
    assert error.worker == 1
    assert "no sign of life" in str(error)


def test_a_learner_that_was_away_for_long_finds_its_nodes_alive():
    collector = nodes(rig.counting(0), rig.counting(1), heartbeat=0.5)
    with collector:
        collector.next()
        rig.await_end([os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1.5")])  # learning
        for _ in range(6):
            collector.next()


def test_collection_goes_on_without_a_lost_node():
    collector = nodes(
        rig.counting(0, pause=0.001),
        rig.counting(1, fault=rig.kill),
        policy=rig.encoded(),
        total_frames=8 * 20,
        on_failure="continue",
    )
    delivered = []
    lost = "continues without it.*killed by signal 9"
    with collector, pytest.warns(UserWarning, match=lost):  # noqa: PT031
        for batch in collector:
            delivered += rig.rows(batch)
            collector.update_policy_weights_()
        assert collector.stats()["workers_alive"] == 1
    assert len(delivered) == 8 * 20
    assert sorted(set(delivered)) == sorted(delivered)


def test_when_the_last_node_is_lost_that_is_raised():
    collector = nodes(rig.counting(1, fault=rig.kill), on_failure="continue")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        delivered, error = until_error(collector)
    assert isinstance(error, WorkerDied)
    assert len(delivered) in (0, 8)  # what has not left a node when it is killed goes with it


@pytest.mark.parametrize("command", ["update_policy_weights_", "state_dict", "shutdown"])
def test_commands_after_a_death(command):
    collector = nodes(rig.counting(0), rig.counting(1), policy=rig.encoded(4), sync=True)
    collector.next()
    dead = collector.map_fn("env.pid")[1]
    os.kill(dead, signal.SIGKILL)
    rig.await_end([dead])
    with rig.in_time():
        if command == "shutdown":
            collector.shutdown(raise_on_error=False)
            return
        with pytest.raises(WorkerDied, match="worker 1 .* was killed by signal 9"):
            getattr(collector, command)()
        collector.shutdown()


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {rig!r})
    import rig
    from gleanrl import DistributedCollector

    collector = DistributedCollector(
        [rig.counting(0), rig.counting(1)], frames_per_batch=8, launcher="mp", tcp_port=0
    )
    collector.next()
    print(*collector.map_fn("env.pid"), flush=True)
    {end}
"""
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "fell through": "pass",
}


@pytest.mark.parametrize("end", ENDS)
def test_nodes_end_with_their_learner(end):
    run_learner(SCRIPT, end=ENDS[end])


def test_the_learner_keeps_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with nodes(rig.counting(0), rig.counting(1)):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_old_name_is_the_same_class():
    assert DistributedDataCollector is DistributedCollector


def test_collector_itself_is_the_front_door():
    with Collector(
        rig.counting(0),
        backend="distributed",
        num_collectors=2,
        sync=True,
        frames_per_batch=16,
        backend_options={"tcp_port": 0, "process_group_backend": "gloo"},
    ) as collector:
        assert isinstance(collector, DistributedCollector)
        assert collector.next().shape == (2, 8)
    with pytest.raises(ConfigError, match="gloo"):
        Collector(
            rig.counting(0),
            backend="distributed",
            frames_per_batch=8,
            backend_options={"process_group_backend": "pigeon"},
        )


def test_a_forked_child_of_the_learner_leaves_the_nodes_alone():
    with nodes(rig.counting(0), rig.counting(1), sync=True) as collector:
        collector.next()
        child = os.fork()
        if child == 0:
            try:
                collector.next()
            except ClosedError:
                collector.shutdown()
                os._exit(7)
            finally:
                os._exit(8)
        watched = os.pidfd_open(child)
        with rig.in_time():
            select.select([watched], [], [], rig.LIMIT)
        os.close(watched)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert collector.next().shape == (2, 8)


@pytest.mark.parametrize(("count", "steps"), [(2, 2), (4, 1), (3, 5)])
def test_tiny_rollouts_do_not_touch_their_neighbours(count, steps):
    envs = [rig.counting(number + 1) for number in range(count)]
    with nodes(*envs, per_node=steps, sync=True) as collector:
        for number in range(6):
            batch = collector.next()
            first = number * steps + 1
            assert rig.rows(batch) == [
                (node + 1, step) for node in range(count) for step in range(first, first + steps)
            ]


def test_updates_that_nobody_takes_cost_no_memory_and_the_last_one_counts():
    policy = rig.encoded(1_000_000)
    with nodes(
        rig.counting(0), rig.counting(1), policy=policy, sync=True, track_policy_version=True
    ) as collector:
        for number in range(1, 101):
            policy.module.set(float(number))
            collector.update_policy_weights_()
        backend = collector._engine.backend
        assert sum(len(node._weights) for node in backend._peers.values()) <= 2
        assert len(backend._publisher._buffers) <= 2
        assert collector.state_dict()["worker1"]["worker"]["policy_version"] == 100
        batch = collector.next()
        assert set(batch["seen"].flatten().tolist()) == {100.0}
        assert set(batch["policy_version"].flatten().tolist()) == {100}


def test_updates_after_each_batch_go_on_without_a_lost_node():
    policy = rig.encoded()
    collector = nodes(
        rig.counting(0),
        rig.counting(1),
        policy=policy,
        on_failure="continue",
        update_after_each_batch=True,
    )
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while (batch := collector.next()) is not None:
            number = rig.rows(batch)[0][0]
            break
        dead = collector.map_fn("env.pid")[number]
        os.kill(dead, signal.SIGKILL)
        rig.await_end([dead])
        for _ in range(30):
            last = collector.next()
        assert rig.rows(last)[0][0] == 1 - number


def test_a_collector_that_sends_weights_by_itself_needs_no_policy_of_the_learner():
    with DistributedSyncCollector(
        [rig.counting()], policy_factory=rig.encoded, frames_per_batch=8, launcher="mp"
    ) as collector:
        for _ in range(3):
            assert collector.next().shape == (1, 8)


def test_an_argument_that_cannot_be_pickled_costs_no_node():
    with nodes(rig.counting(0)) as collector:
        with pytest.raises(TypeError, match="pickle"):
            collector.map_fn("env.__setattr__", [("number", (row for row in ()))])
        assert collector.next().shape == (8,)


class Exits:
    """Ends the thread that unpickles it."""

    def __reduce__(self):
        return sys.exit, (7,)


def test_a_node_whose_connection_cannot_be_read_any_more_ends_and_says_why(tidy_nodes):
    with nodes(rig.counting(0), heartbeat=600.0) as collector:
        pid = collector.map_fn("env.pid")[0]
        with rig.in_time(2 * rig.LIMIT):
            with pytest.raises(WorkerDied, match="failed while it read .*SystemExit: 7"):
                collector.map_fn("env.__setattr__", [("number", Exits())])
            rig.await_end([pid])


def test_large_rollouts_of_nodes_fill_a_buffer_in_the_background_at_full_speed():
    """A reply may come before its data, and nothing tells when these have come."""
    envs = [lambda: GymEnv(rig.Wide())] * 2
    buffer = ReplayBuffer(storage=LazyTensorStorage(400))
    collector = nodes(*envs, per_node=200, sync=True, replay_buffer=buffer)
    collector.start()
    try:
        rig.until(lambda: collector.stats()["frames"] >= 30 * 400)
    finally:
        collector.shutdown()


def patience():
    """Return for how many milliseconds the learner may leave what this node sent unread."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as own:
            if own.family == socket.AF_INET and own.type == socket.SOCK_STREAM:
                found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return max(found)  # torch's own sockets have none


def patient():
    env = rig.growing()
    env.patience = patience
    return env


def test_after_ragged_data_a_learner_that_is_gone_is_noticed_as_before():
    with nodes(patient, sync=True, heartbeat=7.0) as collector:
        for _ in range(3):
            assert collector.map_fn("env.patience", [()]) == [7000]
            collector.next()
