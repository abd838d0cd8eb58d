"""States of collectors in files: complete or refused, never unpickled unless that is allowed."""

import contextlib
import copy
import os
import random
import warnings

import gymnasium as gym
import pytest
import torch
from resume_rig import AFTER, BEFORE, Hidden, Odd, make, same, take

from gleanrl import ConfigError, GleanError
from gleanrl.collectors import Collector, MultiSyncCollector


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


# -- verify=True -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where"),
    [("wrappers", "one"), ("mujoco", "one"), ("next_step", "one"), ("walk", "sync")],
)
def test_a_state_is_verified_and_nothing_is_disturbed(tmp_path, kind, where):
    with make(kind, where) as collector:
        collector.set_seed(7)
        take(collector, BEFORE)
        collector.save(tmp_path / "before")
        collector.save(tmp_path / "state", verify=True)
        expected = take(collector, 2)
    with make(kind, where) as other:
        other.load(tmp_path / "before")
        assert all(map(same, take(other, 2), expected))


@pytest.mark.parametrize(
    "collector", [Collector, lambda *a, **k: MultiSyncCollector(*a, num_workers=2, **k)]
)
def test_a_state_that_lacks_something_replaces_no_file(tmp_path, collector):
    (tmp_path / "state").write_bytes(b"from before")
    with collector(Hidden, frames_per_batch=20) as running:
        running.next()
        running.save(tmp_path / "other")
        with pytest.raises(GleanError, match=r"worker 0 differs 16 .*next.reward.* / .*get_state"):
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
        with pytest.raises(GleanError, match="cannot be checked: a copy of its process died"):
            collector.save(tmp_path / "state", verify=True)
        collector.next()
    assert os.listdir(tmp_path) == []


def test_environments_that_cannot_be_verified_are_refused_by_name(tmp_path):
    central = {"inference": "central", "num_workers": 1}
    with (
        MultiSyncCollector("CartPole-v1", frames_per_batch=8, **central) as collector,
        pytest.raises(ConfigError, match="not with inference='central'.*check_resume"),
    ):
        collector.save(tmp_path / "state", verify=True)
    with (
        Collector(gym.make("CartPole-v1"), frames_per_batch=8) as collector,
        pytest.raises(ConfigError, match="built before: give an id or a function"),
    ):
        collector.save(tmp_path / "state", verify=True)
    assert os.listdir(tmp_path) == []
