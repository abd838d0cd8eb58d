"""ParallelEnv: the data of a SerialEnv from other processes, named errors, nothing left behind."""

import functools
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tests.covering import ALL
from torchrl.data import NonTensor
from torchrl.data import Unbounded as TorchRLUnbounded
from torchrl.envs import Compose, RewardSum, StepCounter, TensorDictPrimer, TransformedEnv
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.testing.mocking_classes import CountingEnv, NestedCountingEnv

from gleanrl import (
    ClosedError,
    Collector,
    CollectorTimeout,
    ConfigError,
    EnvCreator,
    EnvError,
    GymEnv,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    PolicyError,
    SerialEnv,
    WorkerDied,
    WorkerError,
)
from gleanrl.collectors import Interruptor
from gleanrl.data import Composite, Unbounded
from gleanrl.envs import EnvBase

# Workers that need not import this file (and TorchRL with it) start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Walk(gym.Env):
    """A random walk with nested observations, that ends at random; does as ``do`` says."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "count": spaces.Discrete(99),
            "depth": spaces.Box(0, 99, (2,), np.uint16),  # torch does not load what it pickled
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, do=None, at=2, start=0.0):
        self.do, self.at, self.start, self.kept = do, at, start, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2) + (options or {}).get("start", self.start)
        self.count = 0
        return self._see(), {}

    def step(self, action):
        # Keeping the action finds out whether somebody overwrites it later.
        assert self.kept is None or self.kept[0] is None or (self.kept[0] == self.kept[1]).all()
        self.kept = (action, np.array(action))
        self.count += 1
        if self.do is not None and self.count == self.at:
            self.do()
        self.place = self.place + action
        over = bool(self.np_random.random() < 0.2)
        return self._see(), float(self.place.sum()), over, self.count >= 9, {}

    def _see(self):
        depth = np.full(2, self.count, np.uint16)
        return {"place": self.place, "count": np.int64(self.count), "depth": depth}

    def pid(self):
        return os.getpid()

    def twice(self, seconds):
        return 2 * seconds


def transformed():
    return TransformedEnv(TorchRLGymEnv("CartPole-v1"), Compose(StepCounter(7), RewardSum()))


def primed():
    primer = TensorDictPrimer({"hidden": TorchRLUnbounded((3,))}, default_value=0.5)
    return TransformedEnv(CountingEnv(max_steps=3), primer)


KINDS = {
    "id": "CartPole-v1",
    "gymnasium environment": Walk,
    "TensorDict environment": lambda: GymEnv("Pendulum-v1"),
    "batches": lambda: GymEnv(Walk, num_envs=2),
    "one-hot and casts": lambda: GymEnv(
        "CartPole-v1", categorical_action_encoding=False, observation_dtype=torch.float64
    ),
    "TorchRL's, transformed": transformed,
    "agents": lambda: NestedCountingEnv(max_steps=3),
    "state from the policy": primed,
}
PID = "members[0].unwrapped.pid"
OPERATIONS = st.lists(
    st.sampled_from(["step", "step_and_maybe_reset", "reset", "some", "options", "seed", "shake"]),
    min_size=8,
    max_size=16,
)


# Environments are dealt out to workers alike, whatever their kind: two kinds are split in all ways,
# one that workers step without TensorDicts and one that they step with them.
WAYS = {
    "gymnasium environment": [(1, 4), (3, 4)],
    "TensorDict environment": [(2, 4), (3, 4)],
}
SPLITS = [(kind, *split) for kind in KINDS for split in WAYS.get(kind, [(2, 3)])]


def reseed(seed):
    """Seed the generator of this process; `torch.manual_seed` also notes where it was called."""
    torch.default_generator.manual_seed(seed)


def play(env, operations, seed):
    """Run ``operations`` on ``env``; return all that came out."""
    out = [env.set_seed(seed), env.reset()]
    reseed(seed)  # which seeding TorchRL's environments in this process does, too
    root = out[1].clone()
    for operation in operations:
        if operation == "seed":
            out.append(env.set_seed(seed + 5))
            reseed(seed + 5)
        elif operation == "reset":
            root = env.reset()
        elif operation == "options":
            root = env.reset(options={"start": 100.0})
        elif operation == "some":
            for key in env.done_keys:
                prefix = (key,) if isinstance(key, str) else key
                mask = torch.zeros(env.full_done_spec[key].shape, dtype=torch.bool)
                mask[torch.rand(env.batch_size[0]) < 0.5] = True
                root.set((*prefix[:-1], "_reset"), mask)
            root = env.reset(root)
        elif operation == "shake":  # what the user changes is what the environment is told
            for key in env.action_keys:
                root = env.rand_action(root)
                root.set(key, root.get(key).clone())
        elif operation == "step":
            root = env.step_mdp(env.step(env.rand_action(root)))
        else:
            finished, root = env.step_and_maybe_reset(env.rand_action(root))
            out.append(finished.clone())
        out.append(root.clone())
    return out


def same(one, two):
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if not isinstance(one, TensorDictBase):
        return one == two
    keys = set(one.keys())
    return (
        one.batch_size == two.batch_size
        and keys == set(two.keys())
        and all(same(one.get(k), two.get(k)) for k in keys)
    )


@pytest.mark.parametrize(("kind", "workers", "envs"), SPLITS)
def test_the_data_are_those_of_a_serial_env_bit_for_bit(kind, workers, envs):
    serial = SerialEnv(envs, KINDS[kind])
    parallel = ParallelEnv(workers, KINDS[kind], num_envs=envs)

    @settings(
        max_examples=6 if ALL else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(operations=OPERATIONS, seed=st.integers(0, 10_000))
    def check(operations, seed):
        usable = [op for op in operations if op != "options" or kind == "gymnasium environment"]
        one, two = play(serial, usable, seed), play(parallel, usable, seed)
        assert len(one) == len(two)
        for index, (expected, found) in enumerate(zip(one, two, strict=True)):
            assert same(expected, found), f"{index}: {expected} {found}"

    try:
        check()
        for ends in (True, False):
            rolled = []
            for env in (serial, parallel):
                env.set_seed(3)
                torch.manual_seed(1)
                rolled.append(env.rollout(12, break_when_any_done=ends))
            assert same(*rolled)
            assert rolled[1].names == rolled[0].names
    finally:
        serial.close()
        parallel.close()


def test_specs_and_batch_size_are_those_of_a_serial_env():
    with ParallelEnv(2, "Pendulum-v1", num_envs=3) as parallel:
        serial = SerialEnv(3, "Pendulum-v1")
        assert parallel.batch_size == (3,)
        assert parallel.action_spec == serial.action_spec
        assert parallel.full_observation_spec.shape == serial.full_observation_spec.shape
        assert same(parallel.fake_tensordict(), serial.fake_tensordict())
        assert parallel.device is None


class Tenfold(GymEnv):
    """Pays ten times as much."""

    def _step(self, tensordict):
        after = super()._step(tensordict)
        return after.set("reward", after["reward"] * 10)


@pytest.mark.parametrize("break_when_any_done", [True, False])
def test_replaced_methods_are_called_in_workers_and_here(break_when_any_done):
    class Batch(ParallelEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("reward", after["reward"] + 1)

    makes = [lambda: Tenfold("CartPole-v1"), lambda: GymEnv("CartPole-v1")]
    with Batch(2, makes) as env:
        rolled = env.rollout(4, break_when_any_done=break_when_any_done)
        assert (rolled["next", "reward"][..., 0] == torch.tensor([[11.0], [2.0]])).all()
        env.step = lambda tensordict: super(Batch, env).step(tensordict).set("seen", env_seen)
        env_seen = torch.ones(2)
        assert "seen" in env.rollout(2, break_when_any_done=break_when_any_done).keys()


def test_each_environment_can_be_made_in_its_own_way():
    makes = [Walk, lambda start: Walk(start=start), Walk]
    kwargs = [{"start": 100.0}, {"start": 200.0}, {}]
    with ParallelEnv(2, makes, create_env_kwargs=kwargs, num_envs=3) as env:
        assert (env.reset()["place"] / 100).round()[:, 0].tolist() == [1, 2, 0]


def test_what_was_returned_never_changes():
    learner = rig.KeepingLearner()
    with ParallelEnv(2, "CartPole-v1", num_envs=4) as env:
        root = env.reset()
        for _ in range(20):
            learner.take(root)
            finished, root = env.step_and_maybe_reset(env.rand_action(root.clone()))
            learner.take(finished)
        env.reset()
        learner.check_unchanged()


def test_actions_that_need_gradients_and_other_dtypes_reach_the_environment():
    with ParallelEnv(2, Walk) as env, SerialEnv(2, Walk) as serial:
        found = []
        for each in (env, serial):
            each.set_seed(0)
            root = each.reset()
            root["action"] = torch.full((2, 2), 0.25, requires_grad=True) * 2
            root = each.step_mdp(each.step(root))
            root["action"] = torch.full((2, 2), 0.5, dtype=torch.float64)
            found.append(each.step(root)["next", "place"])
        assert torch.equal(*found)


def test_what_a_policy_writes_under_next_reaches_the_environment():
    found = []
    for kind in (ParallelEnv, SerialEnv):
        with kind(2, Remembering) as env:
            root = env.reset()
            for value in (3.0, 5.0):
                root["action"] = torch.ones(2, 1)
                root["next"] = TensorDict({"memory": torch.full((2, 1), value)}, [2])
                finished, root = env.step_and_maybe_reset(root)
                found.append(finished["next", "memory"].flatten().tolist())
            root["action"] = torch.ones(2, 1)
            found.append(env.step(root)["next", "memory"].flatten().tolist())
    assert found == [[6, 6], [10, 10], [0, 0]] * 2


class Remembering(EnvBase):
    """Doubles the ``("next", "memory")`` that it is given."""

    def __init__(self, show=lambda env: {}, **specs):
        super().__init__()
        self.observation_spec = Composite(memory=Unbounded((1,)), **specs)
        self.action_spec = Unbounded((1,))
        self.show = show
        self.count = 0

    def _reset(self, tensordict=None):
        self.count = 0
        return TensorDict({"memory": torch.zeros(1), **self.show(self)})

    def _step(self, tensordict):
        self.count += 1
        memory = 2 * tensordict.get(("next", "memory"), torch.zeros(1))
        return TensorDict({"memory": memory, "reward": 0.0, "done": False, **self.show(self)})

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize(
    "spec", [NonTensor(()), TorchRLUnbounded((-1,))], ids=["no tensor", "open dimension"]
)
def test_data_without_a_fixed_layout_are_refused_at_the_start(spec):
    env = ParallelEnv(1, lambda: Remembering(text=spec))
    with pytest.raises(ConfigError, match="'text' of Remembering .* inference='workers'"):
        env.start()


@pytest.mark.parametrize(
    ("show", "message"),
    [
        (
            lambda env: {"extra": torch.ones(1 + env.count)},
            r"environment 0 returned 'extra' as torch.float32 of shape \(1,\), its specs declare "
            "nothing.*SerialEnv",
        ),
        (
            lambda env: {"memory": torch.zeros(1 + env.count)},
            r"environment 0 returned 'memory' as torch.float32 of shape \(2,\), its specs declare "
            r"torch.float32 of shape \(1,\)",
        ),
        (
            lambda env: {"memory": torch.zeros(1, dtype=torch.float64)},
            "'memory' as torch.float64 .* declare torch.float32",
        ),
        (
            lambda env: {"memory": f"{env.count}"},
            "'memory' as NonTensorData.*, its specs declare torch.float32",
        ),
    ],
)
def test_a_step_that_does_not_fit_names_environment_and_entry(show, message):
    makes = [Remembering, Remembering, lambda: Remembering(show)]
    wrong = pytest.raises(EnvError, match=f"(?s)worker 1 raised .*{message}")
    with ParallelEnv(2, makes, num_envs=3) as env, wrong:
        env.step(env.rand_action(env.reset()))


@pytest.mark.parametrize(
    ("make", "action"),
    [(Walk, torch.zeros(2, 3)), (Walk, None), (Remembering, torch.zeros(2, 1).double())],
)
def test_inputs_that_do_not_fit_are_named(make, action):
    with ParallelEnv(2, make) as env:
        root = env.reset()
        if action is not None:
            root["action"] = action
        with pytest.raises(PolicyError, match="(?s)'action' is .*; the environment takes"):
            env.step(root)


def test_options_reach_only_the_reset_that_they_were_given_to():
    with ParallelEnv(2, Walk) as env:
        root = env.reset()
        root["_reset"] = torch.tensor([[False], [True]])
        begun = env.reset(root, options={"start": 100.0})
        assert (begun["place"] > 50).all(1).tolist() == [False, True]
        assert (env.reset()["place"] < 50).all()


def test_several_parallel_envs_draw_different_numbers_and_leave_the_learner_alone():
    class Global(Walk):
        def reset(self, *, seed=None, options=None):
            self.place, self.count = np.random.rand(2), 0
            return self._see(), {}

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with ParallelEnv(2, Global) as one, ParallelEnv(2, Global) as two:
        places = torch.cat([one.reset()["place"], two.reset()["place"]])
        assert torch.equal(torch.get_rng_state(), before)
        assert len(places.unique()) == 8
        one.set_seed(3)
        first = one.reset()["place"]
        one.set_seed(3)
        assert torch.equal(one.reset()["place"], first)


# -- life ------------------------------------------------------------------------------------------


def test_nothing_is_started_before_it_is_used_and_an_unstarted_one_can_be_pickled():
    start = 100.0
    env = pickle.loads(pickle.dumps(ParallelEnv(2, lambda: Walk(start=start))))
    copy = pickle.loads(pickle.dumps(env))
    with env, copy:
        assert (env.reset()["place"] > 50).all()
        assert (copy.reset()["place"] > 50).all()
        with pytest.raises(ConfigError, match="has been started cannot be sent"):
            pickle.dumps(env)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, Walk), {}, r"num_workers \(0\) must be at least 1"),
        ((3, Walk), {"num_envs": 2}, r"num_envs \(2\) must be at least num_workers \(3\)"),
        ((2, [Walk] * 3), {}, "create_env_fn has 3 entries for num_workers=2"),
        ((2, [Walk] * 3), {"num_envs": 4}, "create_env_fn has 3 entries for num_envs=4"),
        ((2, Walk), {"create_env_kwargs": [{}]}, "create_env_kwargs has 1 entries"),
        ((1, 5), {}, "must be one entry or one per environment"),
        ((1, [Walk()]), {}, "environment 0 is a Walk; give an id or a callable"),
        ((1, Walk), {"timeout": 0}, r"timeout \(0\) must be a positive number"),
        ((1, Walk), {"on_failure": "continue"}, "cannot have fewer environments"),
        ((1, Walk), {"on_failure": "relaunch", "max_relaunches": -1}, "max_relaunches"),
    ],
)
def test_wrong_arguments_are_named_at_construction(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        ParallelEnv(*arguments, **options)


def test_environments_that_do_not_fit_together_are_named():
    makes = ["CartPole-v1", "Pendulum-v1"]
    with pytest.raises(ConfigError, match="environments 1 and 0 do not declare the same data"):
        ParallelEnv(2, makes).start()
    with pytest.raises(ConfigError, match="environments 1 and 0 do not declare the same data"):
        ParallelEnv(1, makes, num_envs=2).start()
    makes = [
        functools.partial(gym.wrappers.RescaleAction, gym.make("Pendulum-v1"), 0.0, b)
        for b in (1.0, 2.0)
    ]
    for workers in (1, 2):
        with pytest.raises(ConfigError, match=r"(?s)environments 1 and 0 .*'action' is .*2\.0"):
            ParallelEnv(workers, makes, num_envs=2).start()
    with pytest.raises(ConfigError, match="it made a TensorDict"):
        ParallelEnv(1, TensorDict).start()


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"create_env_fn\[0\] captures lock .*TypeError"):
        ParallelEnv(1, lambda: lock and Walk()).start()


def test_closing_is_final_and_idempotent():
    env = ParallelEnv(1, "CartPole-v1")
    root = env.reset()
    env.close()
    env.close()
    assert env.is_closed
    assert env.batch_size == (1,)
    for use in (env.reset, lambda: env.step(env.rand_action(root)), env.state_dict):
        with pytest.raises(ClosedError, match="was closed"):
            use()
    never = ParallelEnv(1, "CartPole-v1")
    never.close()
    with pytest.raises(ClosedError, match="was closed"):
        never.reset()


def test_what_closing_an_environment_raises_is_raised():
    class Sticky(Walk):
        def close(self):
            raise OSError("the simulator does not let go")

    env = ParallelEnv(1, Sticky)
    env.reset()
    with pytest.raises(OSError, match="worker 0 raised OSError: the simulator does not let go"):
        env.close()


def test_nothing_is_left_behind():
    def use(end):
        env = ParallelEnv(2, Walk)
        env.rollout(3)
        watched = [os.pidfd_open(pid) for pid in env.call(PID)]
        end(env)
        del env
        gc.collect()
        for fd in watched:
            assert select.select([fd], [], [], rig.LIMIT * rig.load())[0], (
                "a worker was left behind"
            )
            os.close(fd)

    use(lambda env: env.close())
    before, shared = len(os.listdir("/proc/self/fd")), rig.shared_files()
    for _ in range(3):
        use(lambda env: env.close())
        use(lambda env: None)  # collected as garbage
    assert len(os.listdir("/proc/self/fd")) <= before
    rig.await_shared_files(shared)


# -- access ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_attributes_and_methods_of_environments_can_be_reached(make):
    with make(2, Walk, create_env_kwargs=[{"at": 1}, {"at": 2}]) as env:
        assert env.get_attr("members[0].unwrapped.at") == [1, 2]
        assert env.call("members[0].unwrapped.twice", seconds=3) == [6, 6]
        pids = env.call(PID)
        assert (os.getpid() in pids) is (make is SerialEnv)
        with pytest.raises(AttributeError, match="nothing"):
            env.get_attr("nothing")
        assert env.reset().shape == (2,)


class Stateful(CountingEnv):
    """Keeps a number across restarts."""

    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.number = state_dict["number"]


def test_states_are_those_of_all_environments_in_order():
    with ParallelEnv(2, Stateful, num_envs=3) as env:
        assert env.state_dict() == {f"worker{i}": {"number": 0} for i in range(3)}
        env.load_state_dict({f"worker{i}": {"number": i} for i in range(3)})
        assert env.get_attr("number") == [0, 1, 2]
        with pytest.raises(ConfigError, match="that of 1 environments, there are 3"):
            env.load_state_dict({"worker0": {}})
        env.load_state_dict({"worker2": {"number": 9}}, strict=False)
        assert env.get_attr("number") == [0, 1, 9]


# -- faults ----------------------------------------------------------------------------------------


def acting(do):
    """Return a maker of two environments of which the second does something in its second step."""
    return [Walk, lambda: Walk(do)]


def two_steps(env):
    root = env.step_mdp(env.step(env.rand_action(env.reset())))
    return env.step(env.rand_action(root))


def test_an_error_is_its_own_class_with_worker_and_traceback_and_the_env_can_be_reset():
    class Own(KeyError):
        pass

    def fail():
        raise Own("in the simulator")

    with ParallelEnv(2, acting(fail)) as env:
        with pytest.raises(Own, match=r"(?s)worker 1 raised .*in the simulator.*in step") as caught:
            two_steps(env)
        assert isinstance(caught.value, WorkerError)
        assert env.reset().shape == (2,)


@pytest.mark.parametrize(
    ("do", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9"),
        (lambda: os._exit(3), "exited with code 3"),
    ],
)
def test_a_worker_that_ends_is_named_with_how(do, how):
    env = ParallelEnv(2, acting(do))
    env.reset()
    other = os.pidfd_open(env.call(PID)[0])
    with pytest.raises(WorkerDied, match=f"worker 1 .* {how}"):
        two_steps(env)
    with pytest.raises(ClosedError, match="was closed"):
        env.reset()
    assert select.select([other], [], [], 5.0)[0]
    os.close(other)


def test_a_worker_that_hangs_is_named_and_killed_at_the_deadline():
    def hang():
        while True:
            pass

    env = ParallelEnv(2, acting(hang), timeout=0.5)
    env.reset()
    watched = os.pidfd_open(env.call(PID)[1])
    with pytest.raises(CollectorTimeout, match=r"workers \[1\] did not finish .* 0\.5 s"):
        two_steps(env)
    assert select.select([watched], [], [], 5.0)[0]
    os.close(watched)


def test_an_interrupt_leaves_an_environment_that_can_be_reset():
    learner = os.getpid()

    def interrupt():
        os.kill(learner, signal.SIGINT)
        time.sleep(0.1)  # still at work when the learner goes on

    with ParallelEnv(2, acting(interrupt)) as env:
        with pytest.raises(KeyboardInterrupt):
            two_steps(env)
        env.set_seed(3)
        found = env.reset()
        with SerialEnv(2, Walk) as serial:
            serial.set_seed(3)
            assert same(serial.reset(), found)


# -- replacements ----------------------------------------------------------------------------------

MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")
survives = pytest.mark.filterwarnings("ignore:collection waits|.*takes part again")


def dying(mark, fault=rig.kill, at=7):
    """Return three environments in two workers, the first of which is lost once."""

    def make():
        env = rig.Count(0, at=at)
        env.fault = None if mark.exists() else lambda: (mark.touch(), fault())
        return env

    return [make, rig.counting(1), rig.counting(2)]


def stand_still():
    os.kill(os.getpid(), signal.SIGSTOP)


def steps_of(env, count, at_once):
    """Return ``count`` finished steps."""
    env.set_seed(3)
    root, found = env.reset(), []
    for _ in range(count):
        root = env.rand_action(root)
        if at_once:
            finished, root = env.step_and_maybe_reset(root)
        else:
            finished = env.step(root)
            root = env.maybe_reset(env.step_mdp(finished))
        found.append(finished.clone())
    return torch.stack(found, 1)


@survives
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("fault", [rig.kill, stand_still])
def test_environments_of_a_lost_worker_are_truncated_and_the_others_not_disturbed(
    fault, at_once, tmp_path
):
    def collect():
        torch.manual_seed(0)
        makers = dying(tmp_path / "mark", fault)
        options = {"num_envs": 3, "timeout": 1.0, "on_failure": "relaunch"}
        with ParallelEnv(2, makers, **options) as env:
            return steps_of(env, 12, at_once)

    (tmp_path / "mark").touch()
    undisturbed = collect()
    (tmp_path / "mark").unlink()
    found = collect()
    assert bool((found[2:] == undisturbed[2:]).all())
    before, lost, after = found[:2, :6], found[:2, 6], found[:2, 7:]
    assert bool((before == undisturbed[:2, :6]).all())
    assert torch.equal(lost["next", "observation"], lost["observation"])
    assert lost["next", "truncated"].all()
    assert lost["next", "done"].all()
    assert not lost["next", "terminated"].any()
    assert not lost["next", "reward"].any()
    steps = torch.arange(1.0, 6.0, dtype=torch.float64).expand(2, -1)
    assert torch.equal(after["next", "observation"][..., 1], steps)
    assert after["next", "terminated"].sum() == 2


class Known(EnvBase):
    """Has TensorDict methods only, and knows its process."""

    def __init__(self, truncates=True):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        if truncates:
            self.add_truncated_keys()
        self.process, self.count = os.getpid(), 0

    def _reset(self, tensordict=None):
        self.count = 0
        return TensorDict({"observation": torch.zeros(2)})

    def _step(self, tensordict):
        self.count += 1
        shown = torch.full((2,), float(self.count))
        return TensorDict({"observation": shown, "reward": torch.ones(1)})

    def _set_seed(self, seed, static=False):
        pass


@survives
def test_a_worker_that_is_lost_between_steps_begins_anew():
    with ParallelEnv(2, Known, on_failure="relaunch") as env:
        root = env.reset()
        for again in (False, True):
            for _ in range(3):
                root = env.step_mdp(env.step(env.rand_action(root)))
            os.kill(env.get_attr("process")[1], signal.SIGKILL)
            if again:
                root = env.reset()
            finished, root = env.step_and_maybe_reset(env.rand_action(root))
            last = finished["next", "observation"][:, 0].tolist()
            assert last == ([1.0, 1.0] if again else [4.0, 3.0])
            assert finished["next", "truncated"][:, 0].tolist() == [False, not again]
            assert root["observation"][:, 0].tolist() == ([1.0, 1.0] if again else [4.0, 0.0])
            root = env.reset()


@survives
@pytest.mark.parametrize("inside", [False, True])
def test_a_collector_masks_the_step_of_a_lost_worker(inside, tmp_path):
    def collect():
        make = functools.partial(
            ParallelEnv, 2, dying(tmp_path / "mark", at=13), num_envs=3, on_failure="relaunch"
        )
        kind = functools.partial(MultiSyncCollector, [make], cat_results=0)
        if not inside:
            kind = functools.partial(Collector, make())
        with kind(frames_per_batch=24, total_frames=-1) as collector:
            collector.set_seed(1)
            found = torch.cat([collector.next().clone() for _ in range(4)], -1)
            assert collector.stats()["frames"] == int(found[MASK].sum())
            return found

    (tmp_path / "mark").touch()
    undisturbed = collect()
    (tmp_path / "mark").unlink()
    found = collect()
    assert bool((found[2:] == undisturbed[2:]).all())
    for row in found[:2]:
        assert row[MASK].tolist() == [True] * 12 + [False] + [True] * 19
        seen = row["next", "observation"][:, 1].tolist()
        assert seen == [*range(1, 13), 0, *range(1, 20)]
        assert row[IDS][12] == -1
        assert row["next", "truncated"][:, 0].nonzero().tolist() == [[11]]
        assert row["next", "reward"][:, 0].tolist() == [1.0] * 12 + [0.0] + [1.0] * 19


@survives
def test_a_worker_that_is_lost_again_and_again_ends_the_environment():
    makers = [rig.counting(0), rig.counting(1, fault=rig.kill, at=1)]
    env = ParallelEnv(2, makers, on_failure="relaunch", max_relaunches=1)
    with env, pytest.raises(WorkerDied, match=r"signal 9.*max_relaunches=1"):
        env.rollout(9, break_when_any_done=False)


def test_replacements_need_an_end_that_is_a_truncation():
    never = functools.partial(Known, truncates=False)
    with pytest.raises(ConfigError, match="add_truncated_keys"):
        ParallelEnv(2, never, on_failure="relaunch").start()
    options = {"policy_process": False, "on_failure": "relaunch"}  # which masks frames instead
    with MultiAsyncCollector(
        [never], inference="central", frames_per_batch=4, total_frames=4, **options
    ) as collector:
        assert [batch.numel() for batch in collector] == [4]


# -- with collectors and creators ------------------------------------------------------------------


def batches(create_env_fn, **options):
    collector = Collector(
        create_env_fn, frames_per_batch=32, total_frames=96, max_frames_per_traj=6, **options
    )
    collector.set_seed(7)
    torch.manual_seed(7)
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    return found


def test_a_collector_gets_the_same_batches_from_it():
    one = batches(lambda: ParallelEnv(2, Walk, num_envs=4))
    two = batches(ParallelEnv(3, Walk, num_envs=4))
    expected = batches(SerialEnv(4, TransformedWalk))
    for found in (one, two):
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


class Plain(Walk):
    """A Walk that shows its place only."""

    observation_space = Walk.observation_space["place"]

    def _see(self):
        return self.place


@pytest.mark.covering
@pytest.mark.parametrize("policy", [None, lambda place: place.float().clamp(-1, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact_obs": True},
        {"reset_at_each_iter": True},
        {"interruptor": Interruptor()},
        {"split_trajs": True},
        {"trajs_per_batch": 3},
        {"fast": False},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_workers_write_rows_of_a_collector_as_this_process_would(options, policy):
    found, expected = (
        batches(kind, policy=policy, **options)
        for kind in (ParallelEnv(3, Plain, num_envs=4), SerialEnv(4, Plain))
    )
    assert len(found) == len(expected)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_a_rollout_that_is_stopped_early_ends_in_workers_too():
    found = []
    for env in (ParallelEnv(2, Walk), SerialEnv(2, Walk)):
        interruptor, calls = Interruptor(), itertools.count()

        def act(place, interruptor=interruptor, calls=calls):
            if next(calls) % 20 == 11:
                interruptor.start_collection()
                interruptor.stop_collection()
            return place.float()

        with Collector(env, act, frames_per_batch=32, interruptor=interruptor) as collector:
            collector.set_seed(1)
            batches = itertools.islice(collector, 4)
            found.append([batch[batch["collector", "mask"]].clone() for batch in batches])
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_explain_says_that_workers_step_rows():
    with Collector(ParallelEnv(2, Walk, num_envs=3), frames_per_batch=3) as collector:
        assert "3 x GymEnv in 2 workers" in collector.explain()


def test_an_error_in_a_collectors_rollout_names_the_worker():
    def fail():
        raise LookupError("in the simulator")

    env = ParallelEnv(2, acting(fail))
    with Collector(env, frames_per_batch=2, total_frames=-1) as collector:
        with pytest.raises(LookupError, match=r"(?s)worker 1 raised .*in the simulator"):
            list(itertools.islice(collector, 100))  # until an episode has two steps
        assert env.is_closed


def test_a_worker_that_is_killed_in_a_collectors_rollout_is_named_soon():
    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    env = ParallelEnv(2, acting(end))
    env.start()
    others = [os.pidfd_open(pid) for pid in env.call(PID)]
    collector = Collector(env, frames_per_batch=200, total_frames=-1)
    with rig.in_time(), pytest.raises(WorkerDied, match="worker 1 .* killed by signal 9"):
        collector.rollout()
    collector.shutdown()
    for fd in others:
        assert select.select([fd], [], [], rig.LIMIT * rig.load())[0], "a worker was left behind"
        os.close(fd)


def test_two_collectors_after_each_other_have_windows_of_their_own():
    with ParallelEnv(2, Plain) as env:
        found = []
        for _ in range(2):
            collector = Collector(env, frames_per_batch=16, total_frames=-1)
            collector.set_seed(3)
            found.append(collector.rollout())
            collector.shutdown(close_env=False)
        assert same(found[0].clone(), batches_of(SerialEnv(2, Plain)))
        assert torch.equal(found[0]["observation"], found[1]["observation"])


def batches_of(env):
    with Collector(env, frames_per_batch=16, total_frames=-1) as collector:
        collector.set_seed(3)
        return collector.rollout().clone()


def test_the_end_of_all_workers_at_once_is_named():
    with ParallelEnv(2, Walk) as env:
        root = env.rand_action(env.reset())
        env.step(root)
        for pid in env.call(PID):
            os.kill(pid, signal.SIGKILL)
        with rig.in_time(), pytest.raises(WorkerDied, match="killed by signal 9"):
            env.step(root)


def test_closing_does_not_wait_for_a_forked_child():
    env = ParallelEnv(2, Walk)
    env.step(env.rand_action(env.reset()))
    child = os.fork()
    if not child:
        signal.pause()
    try:
        began = time.monotonic()
        env.close()
        assert time.monotonic() - began < 5 * rig.load()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_leaves_the_workers_of_its_parent_alone():
    with ParallelEnv(1, Walk) as env:
        env.set_seed(3)
        env.step(env.rand_action(env.reset()))
        child = os.fork()
        if not child:
            try:
                env.step(env.rand_action(env.fake_tensordict()))
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert env.reset().shape == (1,)


def TransformedWalk():
    """Make a Walk that the collector cannot look into, so that it is stepped with TensorDicts."""
    return Opaque(Walk())


class Opaque(GymEnv):
    """A GymEnv that does not say what is inside."""

    def unwrap(self):
        return None


class Lives(gym.Env):
    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {"lives": 3}

    def step(self, action):
        return np.ones(1, np.float32), float(action), False, False, {"lives": 3}


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_functions_of_one_tensor_get_the_observation_and_no_info(kind):
    env = kind(1, lambda: GymEnv(Lives, info_keys=["lives"]))
    with Collector(env, lambda x: x[..., 0].long(), frames_per_batch=2) as collector:
        batch = next(iter(collector))
    assert batch["next", "reward"].eq(1).all()
    assert batch["lives"].eq(3).all()


@pytest.mark.parametrize(
    "create_env_fn",
    [lambda: ParallelEnv(2, lambda: Walk()), ParallelEnv(2, EnvCreator(lambda: Walk()))],
    ids=["callable", "unstarted"],
)
def test_workers_of_a_collector_have_parallel_envs(create_env_fn):
    collector = MultiSyncCollector([create_env_fn] * 2, frames_per_batch=32, total_frames=64)
    try:
        assert [batch.shape for batch in collector] == [(2, 2, 8)] * 2
        found = collector.cascade_execute("env.call", PID)
        assert len({*found[0], *found[1], os.getpid()}) == 5
        watched = [os.pidfd_open(pid) for pids in found for pid in pids]
    finally:
        collector.shutdown()
    for fd in watched:
        assert select.select([fd], [], [], rig.LIMIT * rig.load())[0], (
            "a worker's worker was left behind"
        )
        os.close(fd)


def test_workers_of_a_worker_end_with_it():
    class Policy:
        def __call__(self, place):
            return torch.zeros(*place.shape[:-1], 2)

        def end(self):
            os.kill(os.getpid(), signal.SIGKILL)

    make = lambda: ParallelEnv(2, Walk)  # noqa: E731
    collector = MultiSyncCollector([make], Policy(), frames_per_batch=8, total_frames=-1)
    next(iter(collector))
    (pids,) = collector.cascade_execute("env.call", PID)
    watched = [os.pidfd_open(pid) for pid in pids]
    with pytest.raises(WorkerDied, match="worker 0 .* killed by signal 9"):
        collector.cascade_execute("policy.end")
    for fd in watched:
        assert select.select([fd], [], [], rig.LIMIT * rig.load())[0], (
            "a worker's worker outlived it"
        )
        os.close(fd)
    collector.shutdown()


def test_meta_data_are_learnt_once_in_another_process():
    learner = os.getpid()

    def make():
        assert os.getpid() != learner
        return Walk()

    creator = EnvCreator(make)
    meta = creator.meta_data
    assert creator.meta_data is meta
    assert meta.batch_size == ()
    assert meta.action_spec.is_in(TensorDict(action=torch.zeros(2)))
    assert set(meta.tensordict["next"].keys()) == {
        *("place", "count", "depth", "reward", "done", "terminated", "truncated")
    }
    with pytest.raises(ConfigError, match="made a TensorDict"):
        EnvCreator(TensorDict).meta_data  # noqa: B018


def test_memory_of_collectors_that_are_gone_is_mapped_no_longer():
    env = ParallelEnv(1, rig.counting())
    both = os.getpid(), env.call("members[0].unwrapped.pid")[0]
    mapped = []
    for _ in range(5):
        collector = Collector(env, frames_per_batch=4, total_frames=16)
        list(collector)
        collector.shutdown(close_env=False)
        del collector
        gc.collect()
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in both]
        mapped.append([text.count("memfd:gleanrl") for text in maps])
    env.close()
    assert mapped[2:] == mapped[1:-1]
