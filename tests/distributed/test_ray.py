"""Collectors over a real local Ray: the inline data, exact weights, deaths that are named."""

import runpy
import subprocess
import textwrap
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rig
import torch
import warm
from node_rig import collect_for_ever
from resume_rig import (
    ENVS,
    Forgets,
    Numbers,
    check_each_frame_once,
    check_named,
    check_verified,
    policy_of,
)
from tensordict.nn import TensorDictModule

from gleanrl import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    LazyTensorStorage,
    MultiSyncCollector,
    RayCollector,
    ReplayBuffer,
    WorkerDied,
    WorkerError,
)

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
PATIENT = {"start_timeout": 280.0}
"""Beside four busy processes Ray takes minutes to start some actors."""
WARM = {"py_executable": str(warm.START)}
"""Actors do not import torch, each again."""

SCRIPT = """
    import ray
    import sys
    from gleanrl import RayCollector

    config = dict(address="local", num_cpus=2, object_store_memory=10**8, include_dashboard=False,
                  log_to_driver=False, logging_level="ERROR",
                  runtime_env={"py_executable": sys.executable})
    collector = RayCollector(["CartPole-v1"], frames_per_batch=8, ray_init_config=config,
                             start_timeout=280.0)
    assert ray.is_initialized()
    assert collector.next().shape == (8,)
    print("done")
"""


@pytest.fixture(scope="module", autouse=True)
def cluster(python):
    """A Ray of one raylet, to which others may be added, without what nobody looks at."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 otherwise: others go first, for minutes
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they would import Ray in vain
        head = {"num_cpus": 4, "object_store_memory": 200 * 2**20, "include_dashboard": False}
        made = Cluster(
            initialize_head=True,
            head_node_args={**head, "include_log_monitor": False, "no_monitor": True},
        )
        try:
            ray.init(
                address=made.address, runtime_env=WARM, log_to_driver=False, logging_level="ERROR"
            )
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module", autouse=True)
def script(cluster):
    """A process that begins with the first test, to be looked at by the last.

    It begins once Ray is up here: two that start at once may choose the same ports. It would find
    that one without ``address="local"``.
    """
    command = [warm.START, "-W", "error::UserWarning", "-c", textwrap.dedent(SCRIPT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as started:
        yield started
        started.kill()


def faulty(fault, **options):
    return RayCollector(
        [rig.counting(0, fault=fault, at=20)],
        frames_per_batch=8,
        sync=True,
        remote_configs={"num_cpus": 0},
        **PATIENT,
        **options,
    )


ALONE = {
    "fails at reset": lambda: RayCollector(
        [rig.counting(0, fault=rig.fail, where="reset")],
        frames_per_batch=8,
        remote_configs={"num_cpus": 0},
        **PATIENT,
    ),
    "fails": lambda: faulty(rig.fail),
    "leaves": lambda: faulty(rig.leave),
    "hangs": lambda: faulty(rig.hang_quietly, timeout=1.0),
    "fills a buffer": lambda: RayCollector(
        [rig.counting(0)],
        frames_per_batch=50,
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100_000)),
        remote_configs={"num_cpus": 0},
        **PATIENT,
    ),
    "is replaced": lambda: RayCollector(
        [rig.counting(0)],
        encoded(),
        frames_per_batch=8,
        on_failure="relaunch",
        max_relaunches=1,
        remote_configs={"num_cpus": 0},
        **PATIENT,
    ),
    "large": lambda: RayCollector(
        [rig.Wide], frames_per_batch=100, sync=True, remote_configs={"num_cpus": 0}, **PATIENT
    ),
}
"""Collectors of one actor each. Starting one leaves a core idle: they are started together."""


@pytest.fixture(scope="module")
def alone():
    with ThreadPoolExecutor(len(ALONE)) as pool:
        made = {name: pool.submit(build) for name, build in ALONE.items()}
    yield made
    for future in made.values():
        if future.exception() is None:
            future.result().shutdown(raise_on_error=False)
            assert future.result().remote_collectors == []


@pytest.fixture
def make():
    made = []

    def build(envs, policy=None, **options):
        made.append(RayCollector(envs, policy, **PATIENT, **options))
        return made[-1]

    yield build
    while made:
        collector = made.pop()
        collector.shutdown(raise_on_error=False)
        assert collector.remote_collectors == []


def test_asynchronous_actors_deliver_each_frame_once_after_a_load():
    policy, options = policy_of("numbers"), {"remote_configs": {"num_cpus": 0}, **PATIENT}
    check_each_frame_once(
        lambda: RayCollector([Numbers, Numbers], policy, frames_per_batch=10, **options)
    )


def test_states_are_verified_in_actors(tmp_path):
    options = {"frames_per_batch": 40, "sync": True, "remote_configs": {"num_cpus": 0}, **PATIENT}
    for kind in ("wrappers", "mujoco"):
        check_verified(lambda kind=kind: RayCollector([ENVS[kind]], **options), tmp_path)
    (tmp_path / "before").unlink()
    check_named(lambda: RayCollector([Numbers, Forgets], **options), tmp_path, "worker")


def collect(collector, batches):
    for _ in range(batches):
        collector.next()


def encoded():
    return TensorDictModule(rig.Encoded(2000), ["observation"], ["action", "seen"])


class Law(torch.nn.Module):
    """Draws actions, and keeps what its weight is."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, observation):
        logits = observation[..., :2] + self.weight[:2]
        action = torch.distributions.Categorical(logits=logits).sample()
        return action, self.weight.detach()[2].expand(*observation.shape[:-1], 1)


# -- one seed, one set of data ---------------------------------------------------------------------


def two_of_which_one_was_added(make, policy, options):
    own = {"num_cpus": 0.5}
    collector = make(
        "CartPole-v1", policy, sync=True, num_collectors=1, remote_configs=own, **options
    )
    collector.set_pre_collect_hook(torch.get_num_threads)
    collector.add_collectors(["CartPole-v1"], remote_configs={"num_cpus": 0})
    assert collector.get_distant_attr("pre_collect_hook") == [torch.get_num_threads] * 2
    assert collector.num_collectors == len(collector.remote_collectors) == 2
    return collector


def test_actors_give_what_inline_workers_give_through_updates_and_restores(make):
    options = {
        "frames_per_batch": 96,
        "num_envs": 3,
        "max_frames_per_traj": 30,
        "track_policy_version": True,
    }
    policies = [TensorDictModule(Law(), ["observation"], ["action", "seen"]) for _ in range(2)]
    remote = two_of_which_one_was_added(make, policies[0], options)
    local = MultiSyncCollector(
        ["CartPole-v1"] * 2, policies[1], backend="inline", num_threads=1, **options
    )
    assert remote.set_seed(11) == local.set_seed(11) == 11 + 5
    with pytest.raises(RuntimeError, match="before the first batch"):
        remote.add_collectors(["CartPole-v1"])
    ended = False
    for number in range(20):
        one, other = remote.next(), local.next()
        assert one.shape == other.shape == (2, 3, 16)
        assert one.names == other.names
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert (one == other).all()
        assert one["policy_version"].eq(number).all()
        assert one["seen"].eq(number).all()
        ended |= bool(one["next", "done"].any())
        for collector, policy in zip((remote, local), policies, strict=True):
            with torch.no_grad():
                policy.module.weight[2] = number + 1
            collector.update_policy_weights_()
    assert ended  # and a state continues with its weights, bit for bit
    state = remote.state_dict()
    assert state["worker1"]["policy_state_dict"]["module.weight"][2] == 20
    expected = remote.next().clone()
    for collector in (local, remote):
        collector.load_state_dict(state)
        assert (collector.next() == expected).all()
    local.shutdown()

    stats = remote.stats("both")
    assert stats["workers_alive"] == 2
    assert stats["worker_1/frames"] == 22 * 48
    assert remote.get_distant_attr("policy_version") == [20, 20]
    assert len(remote.cascade_execute("policy.module.weight.tolist")) == 2
    kept = remote.next()
    copy = kept.clone()
    collect(remote, 4)
    assert (kept == copy).all()
    remote.shutdown()
    assert (kept == copy).all()
    with pytest.raises(ClosedError, match="shut down"):
        remote.next()


def test_rollouts_without_a_layout_and_weights_through_a_cascade(make):
    """An actor with a collector over two processes: three levels."""
    policy = encoded()
    collector = make(
        [rig.counting(3)],
        policy,
        sync=True,
        collector_class="sync",
        num_workers_per_collector=2,
        frames_per_batch=16,
    )
    for number in range(4):
        batch = collector.next()
        assert batch.shape == (1, 2, 8)
        assert batch["observation"][..., 0].eq(3).all()
        assert batch["seen"].eq(number).all()
        policy.module.set(number + 1)
        collector.update_policy_weights_()


def test_large_rollouts_of_one_actor_are_the_users(alone):
    collector = alone["large"].result()
    kept = []
    for number in range(8):
        kept.append(collector.next())
        kept[-1]["observation"].fill_(number)  # batches are the user's
    steps = torch.cat([batch["next", "observation"][0, :, 1] for batch in kept])
    assert steps.eq(torch.arange(1.0, 801.0)[:, None]).all()
    assert all(batch["observation"].eq(n).all() for n, batch in enumerate(kept))
    collector.shutdown()
    for number, batch in enumerate(kept):
        assert batch["observation"].eq(number).all()


# -- asynchronous ----------------------------------------------------------------------------------


def test_asynchronous_rollouts_have_the_weights_of_their_version_and_none_is_lost(make):
    policy, last, versions = encoded(), defaultdict(int), defaultdict(int)
    collector = make(
        [rig.counting(number) for number in range(2)],
        policy,
        frames_per_batch=40,
        track_policy_version=True,
        on_failure="continue",
    )
    pids = collector.cascade_execute("env.pid")
    for number in range(80):
        batch = collector.next()
        worker = int(batch["observation"][0, 0])
        steps = batch["next", "observation"][:, 1].long().tolist()
        assert steps == list(range(last[worker] + 1, last[worker] + 41))
        last[worker] = steps[-1]
        (version,) = batch["policy_version"].unique().tolist()
        assert batch["seen"].eq(version).all()
        assert version >= versions[worker]
        versions[worker] = version
        policy.module.set(number + 1)
        collector.update_policy_weights_()
        policy.module.set(-1)  # the learner goes on; actors never see this
    assert min(last.values()) >= 400
    # Every rollout that begins after an update is made with it; of each actor two were under way.
    found = defaultdict(list)
    while min(len(found[worker]) for worker in range(2)) < 5:
        batch = collector.next()
        found[int(batch["observation"][0, 0])].append(int(batch["policy_version"][0]))
    assert all(version == 80 for versions in found.values() for version in versions[2:])
    ray.kill(collector.remote_collectors[1])
    with pytest.warns(UserWarning, match=r"continues without it: worker 1 .*ray\.kill"):
        collect(collector, 20)
    assert collector.stats()["workers_alive"] == 1
    policy.module.set(81)
    collector.update_policy_weights_()
    collect(collector, 3)
    assert collector.next()["seen"].eq(81).all()
    ray.kill(collector.remote_collectors[0])
    with (
        rig.in_time(10.0),
        pytest.raises(WorkerDied, match=r"worker \d .*ray\.kill"),
    ):
        collect(collector, 1000)
    with rig.in_time(10.0):
        collector.shutdown()
        rig.await_end(pids)


def test_a_replay_buffer_is_filled_in_the_background(alone):
    collector = alone["fills a buffer"].result()
    rb = collector.replay_buffer
    collector.start()
    for _ in range(3):
        before = len(rb)
        rig.until(lambda before=before: len(rb) >= before + 1000, 30.0)
        with collector.pause():
            steps = rb[:]["next", "observation"][:, 1].tolist()
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) == collector.stats()["frames"]
    collector.async_shutdown()
    assert ray.is_initialized()


# -- faults ----------------------------------------------------------------------------------------


def test_what_raises_at_construction_names_the_worker(alone):
    with pytest.raises(ArithmeticError, match="worker 0 raised") as error:
        alone["fails at reset"].result()
    assert isinstance(error.value, WorkerError)
    assert "in fail" in str(error.value)


def test_what_raises_in_a_step_names_the_worker(alone):
    collector = alone["fails"].result()
    collect(collector, 2)
    with pytest.raises(ArithmeticError, match="worker 0 raised ArithmeticError") as error:
        collector.next()
    assert isinstance(error.value, WorkerError)
    assert "in fail" in str(error.value)


def test_an_actor_whose_process_ends_is_named(alone):
    collector = alone["leaves"].result()
    collect(collector, 2)
    with rig.in_time(10.0), pytest.raises(WorkerDied, match="worker 0 .*a Ray actor.") as death:
        collector.next()
    assert death.value.worker == 0


def test_an_actor_that_hangs_is_named_when_time_is_up_and_killed(alone):
    collector = alone["hangs"].result()
    pids = collector.cascade_execute("env.pid")
    collect(collector, 2)
    with rig.in_time(10.0):
        with pytest.raises(CollectorTimeout, match=r"\[0\]"):
            collector.next()
        collector.shutdown(1.0, raise_on_error=False)
        rig.await_end(pids)


def test_a_lost_actor_is_replaced_by_one_with_the_newest_weights(alone):
    collector = alone["is replaced"].result()
    collect(collector, 2)
    collector.policy.module.set(5)
    collector.update_policy_weights_()
    ray.kill(*collector.remote_collectors)
    with (
        pytest.warns(UserWarning, match="until replacement 1 of 1 has joined"),
        pytest.warns(UserWarning, match="worker 0 was replaced and takes part again") as said,
    ):
        next(b for b in iter(collector.next, None) if any("again" in str(w.message) for w in said))
    collect(collector, 4)  # what the lost one had made
    assert collector.next()["seen"].eq(5).all()
    assert collector.stats()["workers_alive"] == 1
    ray.kill(*collector.remote_collectors)
    with rig.in_time(10.0), pytest.raises(WorkerDied, match=r"worker 0 .*ray\.kill"):
        collect(collector, 1000)


class Placed(rig.Count):
    """Knows the raylet that it runs under."""

    def raylet(self):
        return ray.get_runtime_context().get_node_id()


@pytest.mark.filterwarnings("ignore:collection waits|.*takes part again")
def test_a_raylet_that_dies_is_made_good_by_another_or_named(cluster, make, script):
    script.wait(timeout=290)  # it would start at the same time if this test were run alone
    other = cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()

    def spread(how):
        """Return a collector, and which of its two actors is on the other raylet."""
        collector = make(
            [lambda: Placed(0), lambda: Placed(1)],
            frames_per_batch=16,
            total_frames=-1,
            sync=True,
            on_failure=how,
            remote_configs={"num_cpus": 1, "scheduling_strategy": "SPREAD"},
        )
        places = collector.map_fn("env.raylet")
        assert len(set(places)) == 2
        return collector, places.index(other.node_id)

    collector, lost = spread("relaunch")
    raises, named = spread("raise")
    raises.next()
    steps = {0: [], 1: []}

    def collect_until(enough):
        while not enough():
            for number, part in enumerate(collector.next()):
                assert part["next", "observation"][:, 0].eq(number).all()
                steps[number] += part["next", "observation"][:, 1].tolist()

    collect_until(lambda: len(steps[lost]) >= 24)
    cluster.remove_node(other, allow_graceful=False)
    with pytest.raises(WorkerDied, match=f"worker {named} .*Ray actor"):
        collect_for_ever(raises)
    raises.shutdown(raise_on_error=False)
    collect_until(lambda: collector.stats()["relaunches"] == 1 and steps[lost][-1] == 24)
    assert steps[1 - lost] == list(range(1, len(steps[1 - lost]) + 1))
    assert steps[lost] == [*range(1, len(steps[lost]) - 24 + 1), *range(1, 25)]
    assert other.node_id not in collector.map_fn("env.raylet")


def test_what_cannot_be_sent_is_named(make):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"create_env_fn captures lock"):
        make([lambda: lock], frames_per_batch=8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_collectors": 3}, "num_collectors"),
        ({"remote_configs": [{}]}, "remote_configs"),
        ({"remote_configs": {"max_restarts": 3}}, "max_restarts"),
        ({"num_workers_per_collector": 2}, "num_workers_per_collector"),
        ({"collector_kwargs": {"total_frames": 3}}, "total_frames"),
        ({"sync": 2}, "sync"),
    ],
)
def test_arguments_that_contradict_each_other(make, options, match):
    with pytest.raises(ConfigError, match=match):
        make(["CartPole-v1"] * 2, frames_per_batch=8, **options)


def test_the_example_learns():
    path = Path(__file__).parents[2] / "examples" / "ppo_ray.py"
    threads = torch.get_num_threads()
    try:
        rows = list(runpy.run_path(str(path))["train"](frames=8192, actors=1))
    finally:
        torch.set_num_threads(threads)
    assert [row["frames"] for row in rows] == list(range(1024, 8193, 1024))
    assert rows[-1]["return"] > rows[0]["return"]


def test_a_collector_starts_ray_and_a_script_that_just_ends_is_quiet(script):
    out, err = script.communicate(timeout=290)
    assert out.strip() == "done", err
    assert "Traceback" not in err
