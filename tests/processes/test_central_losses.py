"""Central inference that continues when a process of environments is lost."""

import collections
import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import warnings

import cloudpickle
import gymnasium as gym
import pytest
import rig
import torch
from central_rig import Counting, recurrent, sampling, transformed
from tools import soak

from gleanrl import (
    ConfigError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
    WorkerDied,
)
from gleanrl.testing import FaultyEnv

# Workers that need not import this file start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.usefixtures("tidy_workers"),
    pytest.mark.filterwarnings("ignore:.*(collection (waits|continues)|takes part again)"),
]
KINDS = {
    "sync": MultiSyncCollector,
    "async": functools.partial(MultiAsyncCollector, policy_process=False),
    "policy process": MultiAsyncCollector,
}
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
LENGTH, STEPS = 5, 8


class Once(gym.Wrapper):
    """Does something bad at one of its steps, unless that has happened before."""

    def __init__(self, env, fault, at, mark):
        super().__init__(env)
        self._fault, self._left, self._mark = fault, at, mark

    def step(self, action):
        self._left -= 1
        if self._left == 0 and not self._mark.exists():
            self._mark.touch()
            self._fault()
        return self.env.step(action)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def once(make, fault, at, mark):
    return lambda: Once(make(), fault, at, mark)


def cart(number=0):
    return gym.make("CartPole-v1")


def collecting(kind, makers, policy=None, each=1, **options):
    frames = STEPS * each * (len(makers) if kind == "sync" else 1)
    options = {"total_frames": -1, "on_failure": "relaunch", **options}
    if each > 1:
        options["num_envs"] = each
    make = KINDS[kind]
    return make(makers, policy, inference="central", frames_per_batch=frames, **options)


def pid_of(collector, worker):
    name = f"worker_{worker}" if isinstance(worker, int) else worker
    return int(collector.stats("per_worker")[f"{name}/pid"])


def kill(collector, worker, how=signal.SIGKILL):
    os.kill(pid_of(collector, worker), how)
    if how == signal.SIGKILL:
        rig.await_end([pid_of(collector, worker)])


@pytest.mark.covering
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "fault", [rig.kill, rig.segfault, rig.quit_python, stop, rig.hold_the_lock]
)
def test_the_others_are_not_disturbed_and_the_replacement_begins_anew(fault, groups, tmp_path):
    at = 13

    def collect(fault):
        makers = [once(rig.counting(0), fault, at, tmp_path / "mark"), rig.counting(1)]
        options = {"timeout": 1.0, "env_groups": groups}
        with collecting("sync", makers, each=groups, **options) as collector:
            collector.set_seed(3)
            batches = [collector.next() for _ in range(4)]
            return torch.cat(batches, -1), collector.stats()

    undisturbed, _ = collect(bool)
    (tmp_path / "mark").unlink()
    found, stats = collect(fault)
    own = found["next", "observation"][..., 0].amax(1) == 0
    assert int(own.sum()) == groups
    assert bool((found[~own] == undisturbed[~own]).all())
    assert (stats["workers_lost"], stats["relaunches"], stats["workers_alive"]) == (1, 1, 2)
    assert stats["frames"] == stats["frames_stepped"] == found.numel() - groups
    before, void, after = slice(0, at - 1), at - 1, slice(at, None)
    for rows in (found[own][:, before], found[own][:, after]):
        steps = rows["next", "observation"][..., 1]
        assert bool((steps == torch.arange(1, rows.shape[1] + 1)).all())
        assert rows[MASK].all()
        assert (rows["next", "reward"] == 1).all()
    lost = found[own][:, void]
    assert not lost[MASK].any()
    assert (lost[IDS] == -1).all()
    assert not lost["next", "done"].any()
    assert found[own]["next", "truncated"][:, at - 2].all()
    assert not set(found[own][IDS][:, before].unique().tolist()).intersection(
        found[own][IDS][:, after].unique().tolist()
    )


@pytest.mark.parametrize(
    ("policy", "make"), [(sampling, cart), (recurrent, cart), (sampling, transformed)]
)
def test_policies_act_in_the_others_as_without_the_loss(policy, make):
    kills = [1] if make is transformed else [1, 3]  # its workers import TorchRL for a second

    def collect(kills):
        torch.manual_seed(0)
        options = {} if make is transformed else {"max_frames_per_traj": 6}
        with collecting("sync", [make] * 2, policy(4, 2), each=2, **options) as collector:
            collector.set_seed(5)
            batches = []
            for number in range(6):
                batches.append(collector.next())
                if number in kills:
                    kill(collector, 1)
            return torch.cat(batches, -1)

    undisturbed, found = collect(()), collect(kills)
    assert bool((found[:2] == undisturbed[:2]).all())
    whole, cut = 6 * STEPS, 6 * STEPS - len(kills)
    assert found[MASK].sum(-1).tolist() == [whole, whole, cut, cut]
    own = found[2:]
    assert (own["next", "reward"][own[MASK]] == 1).all()
    for row in own:
        for one, other in itertools.pairwise(row):
            if one[MASK] and other[MASK] and one[IDS] == other[IDS]:
                assert bool((one["next", "observation"] == other["observation"]).all())
                assert not one["next", "done"].any()
            else:
                assert one[IDS] != other[IDS]
    if policy is recurrent:
        first = torch.cat([torch.ones(2, 1, dtype=torch.bool), own[IDS].diff(dim=-1) != 0], 1)
        assert bool((own["is_init"][..., 0] >= (first & own[MASK])).all())
        assert not own["hidden"][own["is_init"][..., 0]].any()


@pytest.mark.parametrize("fault", [rig.kill, stop])
def test_frames_of_a_worker_that_is_not_replaced_are_masked(fault, tmp_path):
    at = 13

    def collect(fault):
        makers = [once(rig.counting(0), fault, at, tmp_path / "mark"), rig.counting(1)]
        options = {"timeout": 1.0, "env_groups": 2, "on_failure": "continue"}
        with collecting("sync", makers, each=2, **options) as collector:
            collector.set_seed(3)
            batches = [collector.next() for _ in range(4)]
            return torch.cat(batches, -1), collector.stats()

    undisturbed, _ = collect(bool)
    (tmp_path / "mark").unlink()
    with pytest.warns(UserWarning, match="continues without it") as told:
        found, stats = collect(fault)
    assert len(told) == 1
    own = found["next", "observation"][..., 0].amax(1) == 0
    assert int(own.sum()) == 2
    assert bool((found[~own] == undisturbed[~own]).all())
    there, gone = found[own][:, : at - 1], found[own][:, at - 1 :]
    first = undisturbed[own][:, : at - 1]
    first["next", "done"][:, -1] = first["next", "truncated"][:, -1] = True
    assert bool((there == first).all())
    assert (gone[IDS] == -1).all()
    values = gone.exclude(IDS).values(True, True)
    assert not any(bool(value.any()) for value in values)  # the mask among them
    assert (stats["workers_lost"], stats["relaunches"], stats["workers_alive"]) == (1, 0, 1)
    assert stats["frames"] == stats["frames_stepped"] == int(found[MASK].sum())


@pytest.mark.parametrize(("kind", "groups"), [("sync", 2), ("async", 1)])
def test_a_loss_before_the_first_rollout_is_tolerated(kind, groups):
    def collect(loss):
        makers = [rig.counting(number) for number in range(3)]
        options = {"on_failure": "continue", "env_groups": groups}
        with collecting(kind, makers, each=groups, **options) as collector:
            if loss:
                kill(collector, 1)
            rows = collections.defaultdict(list)
            for _ in range(6):
                for row in collector.next().reshape(-1, STEPS):
                    if row[MASK].any():
                        assert row[MASK].all()
                        rows[int(row["next", "observation"][0, 0])] += rig.rows(row)
            return rows, collector.stats()

    undisturbed, _ = collect(False)
    found, stats = collect(True)
    assert set(found) == {0, 2}
    for number, own in found.items():
        least = min(len(own), len(undisturbed[number]))
        assert own[:least] == undisturbed[number][:least]
    assert stats["workers_lost"] == 1
    assert stats["frames"] == stats["frames_stepped"] - stats["frames_under_way"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_first_observation_of_an_environment_there_is_no_start(kind):
    makers = [rig.counting(0), rig.counting(1, fault=rig.kill, where="reset")]
    with pytest.raises(WorkerDied, match=r"killed by signal 9.*every environment has been reset"):
        collecting(kind, makers, on_failure="continue")


@pytest.mark.parametrize("policy", [sampling, recurrent])
def test_policies_act_in_the_others_as_without_a_worker_that_is_gone(policy):
    def collect(kills):
        torch.manual_seed(0)
        options = {"max_frames_per_traj": 6, "on_failure": "continue", "check_finite": True}
        with collecting("sync", [cart] * 3, policy(4, 2), each=2, **options) as collector:
            collector.set_seed(5)
            batches = []
            for number in range(6):
                batches.append(collector.next())
                if number in kills:
                    kill(collector, kills[number])
            return torch.cat(batches, -1)

    undisturbed, found = collect({}), collect({1: 2, 3: 0})
    assert bool((found[2:4] == undisturbed[2:4]).all())
    valid = [4 * STEPS] * 2 + [6 * STEPS] * 2 + [2 * STEPS] * 2
    assert found[MASK].sum(-1).tolist() == valid
    assert (found[IDS][~found[MASK]] == -1).all()


@pytest.mark.parametrize("kind", ["async", "policy process"])
def test_others_go_on_without_a_worker_at_their_own_pace(kind, tmp_path):
    def streams(fault):
        found = {0: [], 1: [], 2: []}
        makers = [rig.counting(0), once(rig.counting(1), fault, 20, tmp_path / "mark")]
        makers.append(rig.counting(2))
        with collecting(kind, makers, on_failure="continue") as collector:
            collector.set_seed(3)
            lost = fault is rig.kill
            while any(len(found[number]) < 12 for number in (0, 2)) or (
                collector.stats()["workers_lost"] != lost
            ):
                batch = collector.next()
                seen = batch["next", "observation"]
                row = seen[:, 1].tolist(), batch[IDS].tolist(), batch["action"].tolist()
                found[int(seen[0, 0])].append(row)
                assert batch[MASK].all()
            return found, collector.stats()

    undisturbed, _ = streams(bool)
    (tmp_path / "mark").unlink()
    found, stats = streams(rig.kill)
    for number, most in ((0, 12), (1, 2), (2, 12)):
        assert found[number][:most] == undisturbed[number][:most]
    assert len(found[1]) == 2  # the rollout under way is lost with the worker
    assert (stats["workers_lost"], stats["relaunches"]) == (1, 0)
    assert stats["frames"] == stats["frames_stepped"] - stats["frames_under_way"]
    assert stats["frames"] == STEPS * sum(map(len, found.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_all_workers_ends_collection(kind, tmp_path):
    makers = [
        once(rig.counting(number), rig.kill, 20 + number, tmp_path / f"mark{number}")
        for number in (0, 1)
    ]
    collector = collecting(kind, makers, on_failure="continue")
    says = pytest.raises(WorkerDied, match="signal 9")
    with collector, says, rig.in_time(4 * rig.LIMIT):
        collections.deque(collector, 0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_commands_and_states_do_without_a_lost_worker(kind):
    def states():
        with collecting(kind, [rig.counting(0), rig.counting(1)], **options) as collector:
            collector.next()
            kill(collector, 0)
            for act in (lambda: collector.set_seed(3), collector.reset):
                act()
                for batch in (collector.next() for _ in range(3)):
                    assert set(batch[batch[MASK]]["next", "observation"][..., 0].tolist()) == {1.0}
            collector.update_policy_weights_()
            yield collector.state_dict()
            collector.load_state_dict(collector.state_dict())
            assert collector.next()[MASK].sum() == STEPS

    options = {"policy": sampling(2, 2), "on_failure": "continue"}
    options["observation_dtype"] = torch.float32
    with warnings.catch_warnings(action="ignore"):
        for state in states():
            with collecting(kind, [rig.counting(0), rig.counting(1)], **options) as other:
                other.load_state_dict(state)
                found = [other.next() for _ in range(6)]
                assert torch.cat([one.reshape(-1) for one in found])[MASK].all()


def test_seeds_of_a_replacement_follow_from_the_seed_and_repeat_nothing():
    def collect():
        with collecting("sync", [cart] * 2) as collector:
            collector.set_seed(5)
            first = [collector.next()]
            for _ in range(2):
                kill(collector, 1)
                first.append(collector.next())
            return [batch[1, int(number > 0)]["observation"] for number, batch in enumerate(first)]

    one, other = collect(), collect()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({tuple(state.tolist()) for state in one}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_each_life_has_whole_trajectories_with_ids_of_their_own(kind, tmp_path):
    makers = [
        once(rig.counting(number, pause=0.001), rig.kill, 20 + number, tmp_path / f"mark{number}")
        for number in (0, 1)
    ]
    found = {0: [], 1: [], 2: []}
    with collecting(kind, [*makers, rig.counting(2, pause=0.001)]) as collector:
        while any(len(frames) < 60 for frames in found.values()):
            batch = collector.next()
            for frames in batch if kind == "sync" else batch[None]:
                number = int(frames["next", "observation"][0, 0])
                columns = (frames["next", "observation"][:, 1], frames[MASK], frames[IDS])
                found[number] += zip(*(column.tolist() for column in columns), strict=True)
        stats = collector.stats()
    assert stats["relaunches"] == stats["workers_lost"] == 2
    for number, frames in found.items():
        valid = [(step, key) for step, there, key in frames if there]
        assert len(frames) - len(valid) == (number < 2)
        begins = [place for place, (step, _) in enumerate(valid) if step == 1]
        assert len(begins) == 1 + (number < 2)
        for begin, end in itertools.pairwise([*begins, len(valid)]):
            assert [step for step, _ in valid[begin:end]] == list(range(1, end - begin + 1))
            runs = [
                len(list(run)) for _, run in itertools.groupby(valid[begin:end], lambda v: v[1])
            ]
            assert set(runs[:-1]) <= {LENGTH}
        assert len({key for _, key in valid}) == len(list(itertools.groupby(valid, lambda v: v[1])))


def test_the_process_of_the_policy_is_replaced_with_its_workers():
    with collecting("policy process", [rig.counting(0), rig.counting(1)]) as collector:
        collector.set_seed(3)
        before = {tuple(collector.next()[IDS].tolist()) for _ in range(4)}
        kill(collector, "policy_process")
        after = []
        replaced = pytest.warns(UserWarning, match="^policy process was replaced and takes part")
        with rig.in_time(4 * rig.LIMIT), replaced:
            while not after or after[-1]["next", "observation"][0, 1] != 1:
                after.append(collector.next())
        assert not set(itertools.chain(*before)).intersection(after[-1][IDS].tolist())
        assert collector.stats()["relaunches"] == 1


def test_errors_name_the_process_of_the_policy_and_the_worker_of_the_environment():
    makers = [rig.counting(0), rig.counting(1, fault=rig.fail, at=3)]
    said = "^policy process: worker 1 raised ArithmeticError: in the simulator"
    with collecting("policy process", makers, on_failure="raise") as collector:
        with pytest.raises(ArithmeticError, match=said) as caught:
            list(itertools.islice(collector, 20))
        assert caught.value.__notes__[0].startswith("policy process: worker 1: environment 0")
    with pytest.raises(ArithmeticError, match="^policy process raised ArithmeticError") as caught:
        collecting("policy process", [cart], lambda data: rig.fail())
    assert "worker 0" not in str(caught.value) + "".join(caught.value.__notes__)


@pytest.mark.parametrize("groups", [1, 2])
def test_all_groups_of_a_lost_worker_begin_anew(groups, tmp_path):
    makers = [once(rig.counting(0), rig.kill, 13, tmp_path / "mark"), rig.counting(1)]
    options = {"env_groups": groups, "transition_chunk_size": 4, "num_envs": 2}
    with collecting("async", makers, **options) as collector:
        found, frames = [], 0
        while len(found) < 2:
            batch = collector.next().reshape(-1)
            frames += len(batch)
            lost = batch[~batch[MASK]]
            found += lost["next", "observation"][:, 0].tolist()
        assert found == [0, 0]
        stats = collector.stats()
        assert stats["relaunches"] == 1
        assert stats["frames"] == frames - 2


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [2, (2, 60.0)])
def test_a_crash_loop_ends_with_its_cause(kind, most, tmp_path):
    mark = tmp_path / "made"

    def make():
        if mark.exists():
            rig.fail()
        return once(rig.counting(1), rig.kill, 3, mark)()

    with collecting(kind, [rig.counting(0), make], max_relaunches=most) as collector:
        if kind == "sync":
            says = pytest.raises(WorkerDied, match=r"(?s)in the simulator.*max_relaunches=.?2")
            with says, rig.in_time(4 * rig.LIMIT):
                collections.deque(collector, 0)
            return
        with warnings.catch_warnings(record=True) as told, rig.in_time(4 * rig.LIMIT):
            warnings.simplefilter("always")
            while not any("for good" in str(one.message) for one in told):
                collector.next()
        assert re.search("(?s)for good .*max_relaunches=.?2.*in the simulator", str(told[-1]))
        assert collector.next()["next", "observation"][0, 0] == 0


def test_a_replacement_that_dies_again_and_again_ends_with_its_cause():
    dies = rig.counting(1, fault=rig.segfault, at=3)
    with collecting("sync", [rig.counting(0), dies], max_relaunches=2) as collector:
        collector.next()
        with pytest.raises(WorkerDied, match=r"signal 11.*max_relaunches=2"):
            collector.next()


def test_a_replacement_whose_environments_differ_is_none(tmp_path):
    mark = tmp_path / "made"

    def make():
        return rig.Wide(1) if mark.exists() else once(rig.counting(1), rig.kill, 3, mark)()

    collector = collecting("sync", [rig.counting(0), make], max_relaunches=1)
    with collector, pytest.raises(WorkerDied, match="those of the lost one were"):
        collector.next()


def test_an_environment_that_raises_still_raises_its_error(tmp_path):
    makers = [rig.counting(0), rig.counting(1, fault=rig.fail)]
    collector = collecting("sync", makers)
    with collector, pytest.raises(ArithmeticError, match="in the simulator"):
        collections.deque(collector, 0)


def test_commands_reach_replacements():
    def first():
        batch = collector.next()
        assert batch["next", "observation"][1][batch[MASK][1]][0].tolist() == [1, 1]
        return batch

    with collecting("sync", [rig.counting(0), rig.counting(1)]) as collector:
        collector.next()
        for act in (lambda: collector.set_seed(3), collector.reset):
            kill(collector, 1)
            act()  # resets all: the replacement's first frame is a transition
            assert first()[MASK].all()
        kill(collector, 1)
        assert collector.getattr_env("num_envs") == 2
        assert first()[MASK].sum() == 2 * STEPS - 1
        assert collector.stats()["relaunches"] == 3


def test_a_state_without_the_episodes_of_a_lost_worker_begins_new_ones():
    with collecting("sync", [rig.counting(0), rig.counting(1)]) as collector:
        before = collector.next()[IDS].max()
        kill(collector, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collector.load_state_dict(collector.state_dict())
        batch = collector.next()
        assert batch[MASK].all()
        assert batch[IDS].min() > before
        assert batch["next", "observation"][1, :, 1].tolist() == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["continue", "relaunch"])
def test_buffers_and_whole_trajectories_leave_out_frames_that_are_none(kind, how, tmp_path):
    makers = [rig.counting(0), once(rig.counting(1), rig.kill, 20, tmp_path / "mark")]
    buffer = ReplayBuffer(storage=LazyTensorStorage(200_000), batch_size=8)
    counter = "relaunches" if how == "relaunch" else "workers_lost"
    with collecting(kind, makers, replay_buffer=buffer, on_failure=how) as collector:
        with rig.in_time():
            while not collector.stats()[counter]:
                collector.next()
        # The policy's process stores rollouts before the learner counts them.
        ahead = range(2 * 2 * STEPS + 1) if kind == "policy process" else (0,)
        assert len(buffer) - collector.stats()["frames"] in ahead
    assert (buffer[:]["next", "observation"][:, 1] > 0).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_failure": "restart"}, "'raise', 'continue' or 'relaunch'"),
        ({"on_failure": "relaunch", "traj_quota": "equal", "trajs_per_batch": 2}, "traj_quota"),
        ({"on_failure": "relaunch", "max_relaunches": (3, 0)}, "max_relaunches"),
        (
            {"on_failure": "continue", "replay_buffer": ReplayBuffer(), "extend_buffer": False},
            "a frame of every environment",
        ),
    ],
)
def test_a_reaction_that_cannot_be_is_refused_before_a_start(options, says):
    with pytest.raises(ConfigError, match=says):
        MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=8, inference="central", **options)


FAILING = """
import functools, pathlib, warnings
from gleanrl import MultiAsyncCollector
from gleanrl.testing import FaultyEnv

mark = pathlib.Path("mark")
broken = functools.partial(FaultyEnv, "CartPole-v1", "raise", at=5, once=mark)
with (
    warnings.catch_warnings(record=True) as caught,
    MultiAsyncCollector(
        [broken], inference="central", on_env_error="restart", frames_per_batch=8, total_frames=16
    ) as collector,
):
    warnings.simplefilter("always")
    list(collector)
print(sum("built anew" in str(warning.message) for warning in caught))
"""


def test_only_the_learner_warns_of_what_the_process_of_the_policy_survives(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", FAILING], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")


@pytest.mark.parametrize("when", ["step", "reset"])
def test_an_environment_that_raises_is_built_anew_alone(when, tmp_path):
    def collect(act):
        mark = tmp_path / "mark"
        mark.unlink(missing_ok=True)
        at = 13 if when == "step" else 3
        broken = functools.partial(
            FaultyEnv, rig.counting(0), act, when=when, at=at, once=mark, seconds=0.0
        )
        makers = [[broken, rig.counting(1)], [rig.counting(2), rig.counting(3)]]
        frames = 4 * STEPS
        with MultiSyncCollector(
            makers,
            inference="central",
            on_env_error="restart",
            frames_per_batch=frames,
            total_frames=3 * frames,
        ) as collector:
            collector.set_seed(1)
            return torch.cat([batch.clone() for batch in collector], -1), collector.stats()

    undisturbed, _ = collect("sleep")
    with pytest.warns(
        UserWarning, match=r"(?s)in worker 0, environment 0 was built anew.*Injected"
    ):
        found, stats = collect("raise")
    found = found[:, : undisturbed.shape[1]]  # valid frames count: there may be a batch more
    assert bool((found[1:] == undisturbed[1:]).all())
    assert (stats["env_restarts"], stats["relaunches"]) == (1, 0)
    steps = found[0]["next", "observation"][:, 1].tolist()
    if when == "step":
        assert found[0][MASK].tolist() == [True] * 12 + [False] + [True] * 11
        assert steps == [*range(1, 13), 0, *range(1, 12)]
        assert found[0]["next", "truncated"][:, 0].nonzero().tolist() == [[11]]
    else:  # the third reset, after the first episode
        assert found[0][MASK].all()
        assert steps == [*range(1, 6), *range(1, 20)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_is_not_built_anew_for_ever(kind):
    makers = [rig.counting(0), rig.counting(1, fault=rig.fail, at=3)]
    options = {"on_env_error": "restart", "max_env_restarts": 2, "on_failure": "raise"}
    ignored = warnings.catch_warnings(action="ignore")
    collector = collecting(kind, makers, **options)
    with ignored, collector, pytest.raises(ArithmeticError, match="in the simulator") as caught:
        collections.deque(collector, 0)
    assert "max_env_restarts=2" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("setting", [{"on_env_error": "restart"}, {"on_failure": "relaunch"}])
def test_environments_without_rows_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        MultiSyncCollector([Counting] * 2, frames_per_batch=8, inference="central", **setting)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_shutting_down_tolerates_a_loss(kind):
    with collecting(kind, [rig.counting(0), rig.counting(1)]) as collector:
        collector.next()
        kill(collector, 1)


@pytest.mark.parametrize("inference", ["central", "workers"])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_dropped_collector_leaves_no_descriptor_to_the_garbage_collector(kind, inference):
    options = {"frames_per_batch": 16, "total_frames": -1, "inference": inference}
    if inference == "central":
        options["policy_process"] = False

    def collect():
        with kind([rig.counting(0), rig.counting(1)], rig.Encoded(10), **options) as collector:
            collector.next()
            collector.update_policy_weights_()
            collector.next()
            collector.stats()

    assert_leaves_nothing(collect)


@pytest.mark.parametrize("kind", [*KINDS, "workers", "workers async"])
@pytest.mark.parametrize("fault", [rig.kill, rig.fail])
def test_an_error_that_was_raised_keeps_no_descriptor(kind, fault):
    plain = {"workers": MultiSyncCollector, "workers async": MultiAsyncCollector}
    make = plain.get(kind) or functools.partial(KINDS[kind], inference="central")

    def collect():
        makers = [rig.counting(0), rig.counting(1, fault=fault)]
        with (
            make(makers, frames_per_batch=16, total_frames=-1) as collector,
            pytest.raises((WorkerDied, ArithmeticError)),
        ):
            collections.deque(collector, 0)

    assert_leaves_nothing(collect)


def assert_leaves_nothing(collect):
    collect()  # the process that forks workers stays
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        collect()
        assert len(os.listdir("/proc/self/fd")) <= files
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["central", "central async"])
def test_a_soak_finds_no_wrong_frame(kind):
    figures = soak.run(kind, 3.0, seed=1)
    assert figures["relaunches"]
    assert figures["frames"]
