"""A Ray of several raylets on this machine, of which one is killed."""

import pytest
import rig
import warm
from node_rig import collect_for_ever

from gleanrl import RayCollector, WorkerDied

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
STORE = {"object_store_memory": 80 * 2**20}


class Placed(rig.Count):
    """Knows the raylet that it runs under."""

    def raylet(self):
        return ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def cluster(python):
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they would import Ray in vain
        head = {"num_cpus": 0, "include_dashboard": False, **STORE}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(
                address=made.address,
                runtime_env={"py_executable": str(warm.START)},
                log_to_driver=False,
                logging_level="ERROR",
            )
            made.raylets = [made.add_node(num_cpus=2, **STORE) for _ in range(2)]
            made.wait_for_nodes()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def make(cluster):
    """Return a function that makes a collector whose actors are on different raylets."""
    made = []

    def build(how):
        made.append(
            RayCollector(
                [lambda: Placed(0), lambda: Placed(1)],
                frames_per_batch=16,
                total_frames=-1,
                sync=True,
                on_failure=how,
                remote_configs={"num_cpus": 1, "scheduling_strategy": "SPREAD"},
                start_timeout=280.0,
            )
        )
        places = made[-1].map_fn("env.raylet")
        assert len(set(places)) == 2
        return made[-1], places

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)


def kill(cluster, place):
    (raylet,) = [one for one in cluster.raylets if one.node_id == place]
    cluster.remove_node(raylet, allow_graceful=False)
    cluster.raylets.remove(raylet)


@pytest.mark.filterwarnings("ignore:collection waits|.*takes part again")
def test_a_raylet_that_dies_is_made_good_by_another_or_named(cluster, make):
    collector, places = make("relaunch")
    steps = {0: [], 1: []}

    def collect(enough):
        while not enough():
            for number, part in enumerate(collector.next()):
                assert part["next", "observation"][:, 0].eq(number).all()
                steps[number] += part["next", "observation"][:, 1].tolist()

    collect(lambda: len(steps[1]) >= 24)
    kill(cluster, places[1])
    collect(lambda: collector.stats()["relaunches"] == 1 and steps[1][-1] == 24)
    assert steps[0] == list(range(1, len(steps[0]) + 1))
    assert steps[1] == [*range(1, len(steps[1]) - 24 + 1), *range(1, 25)]
    assert collector.map_fn("env.raylet") == [places[0]] * 2
    collector.shutdown()

    cluster.raylets.append(cluster.add_node(num_cpus=2, **STORE))
    cluster.wait_for_nodes()
    collector, places = make("raise")
    collector.next()
    kill(cluster, places[1])
    with pytest.raises(WorkerDied, match="worker 1 .*Ray actor"):
        collect_for_ever(collector)
