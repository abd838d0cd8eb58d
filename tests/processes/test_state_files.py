"""States of collectors in files: complete or refused, never unpickled unless that is allowed."""

import contextlib
import copy
import os
import random
import warnings

import gymnasium as gym
import pytest
import rig
import torch
from resume_rig import (
    AFTER,
    BEFORE,
    Forgets,
    Hidden,
    Numbers,
    Odd,
    Walk,
    check_named,
    check_verified,
    make,
    same,
    take,
)

from gleanrl import ConfigError, GleanError, LazyTensorStorage, ReplayBuffer
from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.envs import ParallelEnv, SerialEnv


@pytest.mark.parametrize(
    ("kind", "where", "kwargs"),
    [
        ("wrappers", "one", {"trajs_per_batch": 5}),
        ("wrappers", "sync", {"init_random_frames": 600}),
        ("next_step", "one", {"max_frames_per_traj": 11}),
        ("mujoco", "central", {}),
        ("walk", "one", {"fast": False}),
    ],
)
def test_a_file_continues_bit_for_bit(tmp_path, kind, where, kwargs):
    with make(kind, where, **kwargs) as collector:
        collector.set_seed(7)
        take(collector, BEFORE)
        collector.save(tmp_path / "state")
        expected = take(collector, AFTER)
    with make(kind, where, **kwargs) as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(tmp_path / "state")
        assert all(map(same, take(other, AFTER), expected))
    assert b'"pickled":[]' in (tmp_path / "state").read_bytes()


def small(**kwargs):
    return Collector("CartPole-v1", num_envs=2, frames_per_batch=8, **kwargs)


def test_the_last_files_are_kept(tmp_path):
    path = tmp_path / "state"
    with small() as collector, small() as other:
        for _ in range(5):
            collector.next()
            collector.save(path, keep=3)
        assert sorted(os.listdir(tmp_path)) == ["state", "state.1", "state.2"]
        for name, frames in (("state", 40), ("state.1", 32), ("state.2", 24)):
            other.load(tmp_path / name)
            assert other.stats()["frames"] == frames


def test_a_write_that_fails_leaves_the_files_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "state"
    with small() as collector:
        collector.next()
        collector.save(path)
        before, written = path.read_bytes(), os.write

        def full(fd, data):
            if len(data) > 2000:
                raise OSError(28, "No space left on device")
            return written(fd, data)

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            collector.save(path, keep=2)
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["state"]
        assert path.read_bytes() == before


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path):
    with small() as collector, pytest.raises(ConfigError, match="is a directory.*replay_buffer"):
        collector.save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named_as_the_user_did(tmp_path):
    (tmp_path / "file").touch()
    with small() as collector:
        for folder in ("missing", "file"):
            path = tmp_path / folder / "state"
            with pytest.raises(OSError, match=f"'{path}'"):
                collector.save(path)


class OneElement(Numbers):
    """Its state is a view of one element of a large tensor."""

    table = torch.zeros(3, 10, dtype=torch.int64)

    def get_state(self):
        self.table[1, 4] = self.steps
        return {"steps": self.table[1:2, 4]}

    def set_state(self, state):
        self.steps = int(state["steps"])


def test_a_view_of_one_element_is_written(tmp_path):
    with Collector(OneElement, frames_per_batch=5) as collector:
        collector.next()
        collector.save(tmp_path / "state")
        expected = collector.next()
    with Collector(OneElement, frames_per_batch=5) as other:
        other.load(tmp_path / "state")
        assert same(other.next(), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state"
    with small() as collector:
        collector.next()
        collector.save(path)
    return path.read_bytes()


def refused(tmp_path, data, match):
    (tmp_path / "bad").write_bytes(data)
    with small() as collector:
        with pytest.raises(ConfigError, match=match):
            collector.load(tmp_path / "bad")
        assert collector.stats()["frames"] == 0


def test_torn_files_are_refused(tmp_path, saved):
    for end in (len(saved) - 1, len(saved) // 2, 50, 30):
        refused(tmp_path, saved[:end], r"bad is damaged \(.* bytes\)")
    refused(tmp_path, saved + b"\0", "is damaged")
    (tmp_path / "bad.1").write_bytes(saved)
    refused(tmp_path, saved[:-1], r"bad\.1 is the one before")


def test_foreign_files_are_refused(tmp_path):
    torch.save({"frames": 3}, tmp_path / "torch")
    for data in (b"", b"GleanRL", (tmp_path / "torch").read_bytes()):
        refused(tmp_path, data, "is no state of a collector")


def with_description(saved, change):
    """Return the file with another description and the right checksum."""
    from gleanrl.collectors import state_files as files

    start = len(files._MAGIC) + files._HEAD.size
    _, _, length = files._HEAD.unpack(saved[len(files._MAGIC) : start])
    text = change(saved[start : start + length])
    body = text + saved[start + length :]
    import zlib

    return files._MAGIC + files._HEAD.pack(len(body), zlib.crc32(body), len(text)) + body


def test_files_of_a_later_version_are_refused(tmp_path, saved):
    later = with_description(saved, lambda text: text.replace(b'"version":1', b'"version":2', 1))
    refused(tmp_path, later, "has version 2 of the format.*load it with GleanRL")


def test_no_change_of_a_file_does_harm(tmp_path, saved):
    draw = random.Random(5)

    def change(text):
        found = bytearray(text)
        for _ in range(draw.randint(1, 4)):
            found[draw.randrange(len(found))] = draw.choice(b'0123456789[]{}",:ntf')
        return bytes(found)

    with small() as collector:
        for _ in range(60):
            (tmp_path / "bad").write_bytes(with_description(saved, change))
            with warnings.catch_warnings(), contextlib.suppress(ValueError, KeyError):
                warnings.simplefilter("ignore")
                collector.load(tmp_path / "bad")
            collector.next()


def test_another_number_of_workers_is_refused(tmp_path, saved):
    (tmp_path / "state").write_bytes(saved)
    with (
        MultiSyncCollector("CartPole-v1", num_workers=2, frames_per_batch=8) as collector,
        pytest.raises(ConfigError, match="of a Collector with 1 workers; this is a MultiSync"),
    ):
        collector.load(tmp_path / "state")


def test_pickled_parts_need_consent_on_both_sides(tmp_path):
    path = tmp_path / "state"
    with Collector(Odd, frames_per_batch=20) as collector:
        collector.next()
        with pytest.raises(Exception, match=r"nothing was saved: env\[0\].when .*allow_pickle"):
            collector.save(path)
        assert not path.exists()
        collector.save(path, allow_pickle=True)
        expected = collector.next()["observation"][0].clone()
    with Collector(Odd, frames_per_batch=20) as other:
        with pytest.raises(ConfigError, match=r"pickled parts \(env\[0\].when .*run any code"):
            other.load(path)
        other.load(path, allow_pickle=True)
        assert torch.equal(other.next()["observation"][0], expected)


def test_environments_that_cannot_continue_are_named_once_when_saved(tmp_path):
    env = gym.vector.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    with Collector(env, frames_per_batch=20) as collector:
        with pytest.warns(UserWarning, match="will begin new episodes when the state is loaded"):
            collector.save(tmp_path / "state")
        collector.save(tmp_path / "state")


JUNK = [
    ("policy_state_dict", 3),
    ("env_state_dict", None),
    ("frames", 1.5),
    ("iter", True),
    ("life", "x"),
    ("schedule", "x"),
    ("statistics", {}),
    ("ledger", [0]),
    ("ledger/discards/reset", None),
    ("trajectories/parts", ["x"]),
    ("undelivered", [3]),
    ("ready", ["x"]),
    ("worker/streams/python", [3]),
    ("worker/streams/actions", 3),
    ("worker/tracker/age", 3),
    ("worker/episodes/envs", 3),
    ("worker/episodes/fresh", None),
    ("worker/episodes/root/observation", 3),
]


def put(state, path, value):
    *path, last = path.split("/")
    for name in path:
        state = state[name]
    state[(last,) if last == "observation" else last] = value
    return last


def test_an_entry_of_another_type_is_named_and_changes_nothing():
    with small() as collector, small() as other:
        for one in (collector, other):
            one.set_seed(3)
            one.next()
        for path, junk in JUNK:
            state = copy.deepcopy(other.state_dict())
            name = put(state, path, junk)
            with pytest.raises(ConfigError, match=rf"\['?\(?'{name}'.* has another type"):
                collector.load_state_dict(state)
        assert same(collector.next(), other.next())
    options = {"num_workers": 2, "frames_per_batch": 8}
    with MultiSyncCollector("CartPole-v1", **options) as collector:
        state = collector.state_dict()
        put(state, "worker1/worker/streams/python", 3)
        with pytest.raises(ConfigError, match="'worker1'.*'python'.* has another type"):
            collector.load_state_dict(state)
        collector.next()


@pytest.mark.parametrize("options", [{}, {"environments": False}], ids=str)
@pytest.mark.parametrize("lacks", ["trajectories/whole/frames", "ledger/unfinished"])
def test_an_entry_that_another_version_does_not_save_is_named_and_changes_nothing(lacks, options):
    *path, last = lacks.split("/")
    with small(trajs_per_batch=1) as collector, small(trajs_per_batch=1) as other:
        for one in (collector, other):
            one.set_seed(3)
            one.next()
        state = part = copy.deepcopy(other.state_dict())
        for name in path:
            part = part[name]
        del part[last]
        with pytest.raises(ConfigError, match=f"another version of GleanRL.*'{last}'"):
            collector.load_state_dict(state, **options)
        assert same(collector.next(), other.next())


# -- verify=True -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where", "kwargs"),
    [
        ("wrappers", "one", {}),
        ("mujoco", "one", {}),
        ("next_step", "one", {}),
        ("walk", "sync", {}),
        ("wrappers", "central", {}),
        ("mujoco", "central", {"env_groups": 2}),
        ("walk", "central", {}),
        ("wrappers", "central", {"policy_process": True}),
    ],
)
def test_a_state_is_verified_and_nothing_is_disturbed(tmp_path, kind, where, kwargs):
    check_verified(lambda: make(kind, where, **kwargs), tmp_path)


def test_an_environment_that_a_central_policy_steps_is_named(tmp_path):
    options = {"num_envs": 2, "env_groups": 2, "frames_per_batch": 40}
    check_named(
        lambda: MultiSyncCollector([Numbers, Forgets], inference="central", **options),
        tmp_path,
        "environment worker",
    )


def test_asynchronous_environments_of_a_central_policy_are_verified(tmp_path):
    options = {"num_envs": 2, "env_groups": 2, "frames_per_batch": 40, "policy_process": False}
    with MultiAsyncCollector([Walk, Walk], inference="central", **options) as collector:
        collector.next()
        collector.save(tmp_path / "state", verify=True)
        collector.next()


@pytest.mark.parametrize("workers", [0, 2])
def test_environments_of_a_parallel_env_are_verified_in_its_workers(tmp_path, workers):
    def build(kind):
        kwargs = {"frames_per_batch": 40}
        if not workers:
            return Collector(lambda: ParallelEnv(2, [Numbers, kind]), **kwargs)
        made = [lambda: ParallelEnv(2, [Numbers, Numbers]), lambda: ParallelEnv(2, [kind, kind])]
        return MultiSyncCollector(made, **kwargs)

    check_verified(lambda: build(Numbers), tmp_path)
    (tmp_path / "before").unlink()
    where = "worker 1, in environment worker 0" if workers else "environment worker 1"
    with build(Forgets) as collector:
        collector.next()
        with pytest.raises(GleanError, match=f"nothing was saved: in {where}, a copy differs"):
            collector.save(tmp_path / "state", verify=True)
        collector.next()


def test_a_parallel_env_that_is_not_the_environment_itself_is_named(tmp_path):
    make_env = lambda: SerialEnv(1, lambda: ParallelEnv(1, "CartPole-v1"))  # noqa: E731
    with (
        Collector(make_env, frames_per_batch=8) as collector,
        pytest.raises(GleanError, match="cannot be checked: other processes have .*ParallelEnv"),
    ):
        collector.save(tmp_path / "state", verify=True)
    assert os.listdir(tmp_path) == []


def test_workers_that_fill_a_buffer_are_verified_without_it(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    options = {"frames_per_batch": 40, "replay_buffer": buffer}
    with MultiSyncCollector([Numbers, Forgets], **options) as collector:
        collector.next()
        rows = buffer[:].clone()
        with pytest.raises(GleanError, match="nothing was saved: in worker 1, a copy differs 16"):
            collector.save(tmp_path / "state", verify=True)
        assert same(rows, buffer[:])
        collector.next()
        assert buffer[:]["next", "reward"].sum() == sum(range(41))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "collector", [Collector, lambda *a, **k: MultiSyncCollector(*a, num_workers=2, **k)]
)
def test_a_state_that_lacks_something_replaces_no_file(tmp_path, collector):
    (tmp_path / "state").write_bytes(b"from before")
    with collector(Hidden, frames_per_batch=20) as running:
        running.next()
        running.save(tmp_path / "other")
        with pytest.raises(GleanError, match=r"a copy differs 16 .*next.reward.* / .*get_state"):
            running.save(tmp_path / "state", verify=True)
        assert running.next()["next", "reward"].max() == (19 if collector is not Collector else 39)
    assert (tmp_path / "state").read_bytes() == b"from before"


class Dies(gym.Wrapper):
    """Ends its process if that is a copy of the one it was built in."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.process = os.getpid()

    def step(self, action):
        if os.getpid() != self.process:
            os._exit(3)
        return self.env.step(action)


def test_a_copy_that_dies_is_named(tmp_path):
    with Collector(Dies, frames_per_batch=20) as collector:
        collector.next()
        with pytest.raises(GleanError, match="a copy cannot be checked: it died"):
            collector.save(tmp_path / "state", verify=True)
        collector.next()
    assert os.listdir(tmp_path) == []


class Breaks(Dies):
    """Raises, or does not return from, the third step in a copy of its process."""

    left = 3

    def __init__(self, fault=rig.fail):
        super().__init__()
        self.fault = fault

    def step(self, action):
        self.left -= os.getpid() != self.process
        return self.env.step(action) if self.left else self.fault()


def test_what_an_environment_raises_in_a_copy_names_it_and_the_step(tmp_path):
    with MultiSyncCollector(
        ["CartPole-v1", Breaks], inference="central", frames_per_batch=20
    ) as collector:
        collector.next()
        said = r"in environment worker 1, .*ArithmeticError.*; environment 0 raised .*step 2 of 16"
        with pytest.raises(GleanError, match=f"nothing was saved: {said}"):
            collector.save(tmp_path / "state", verify=True)
        collector.next()
    assert os.listdir(tmp_path) == []


def test_a_copy_that_hangs_is_interrupted_and_names_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr("gleanrl.transport.verifying.CHECK_TIMEOUT_S", 0.5 * rig.load())
    makers = ["CartPole-v1", lambda: Breaks(rig.hang)]
    with Collector(makers, frames_per_batch=20) as collector:
        collector.next()
        with pytest.raises(GleanError, match="TimeoutError.*; environment 1 raised .* at step 2"):
            collector.save(tmp_path / "state", verify=True)
        collector.next()
    assert os.listdir(tmp_path) == []


def test_environments_that_cannot_be_verified_are_refused_by_name(tmp_path):
    with (
        Collector(gym.make("CartPole-v1"), frames_per_batch=8) as collector,
        pytest.raises(ConfigError, match="built before: give an id or a function"),
    ):
        collector.save(tmp_path / "state", verify=True)
    assert os.listdir(tmp_path) == []
