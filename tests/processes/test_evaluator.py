"""Evaluation beside training: frozen weights, exact and unbiased counts, failures, ends."""

import functools
import gc
import os
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl import (
    AsyncCollector,
    ClosedError,
    CollectorTimeout,
    ConfigError,
    Evaluation,
    Evaluator,
    ExplorationType,
    LazyTensorStorage,
    ReplayBuffer,
    WeightsError,
    WorkerDied,
    WorkerError,
)
from gleanrl.testing import FaultyEnv

pytestmark = pytest.mark.usefixtures("tidy_workers")


class Paid(rig.Count):
    """Rewards each step with the action."""

    action_space = gym.spaces.Box(-100, 100, (1,), np.float32)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(action[0]), *rest


class Wage(nn.Module):
    """Acts with the sum of a weight and a buffer; a hundred more in training mode."""

    def __init__(self, wage=0.0):
        super().__init__()
        self.wage = nn.Parameter(torch.tensor(wage))
        self.register_buffer("bonus", torch.zeros(()))

    def forward(self, observation):
        pay = self.wage + self.bonus + 100 * self.training
        return pay.expand(*observation.shape[:-1], 1)

    def set(self, wage, bonus=0.0):
        with torch.no_grad():
            self.wage.fill_(wage)
            self.bonus.fill_(bonus)


paid = functools.partial(Paid, length=4)
both = pytest.mark.parametrize("backend", ["process", "inline"])


def noisy(observation):
    return torch.randn(*observation.shape[:-1], 1)


# -- what is evaluated -----------------------------------------------------------------------------


@both
def test_weights_and_buffers_are_those_of_the_moment_of_the_request(backend):
    policy = Wage()
    with Evaluator(
        paid, policy, num_trajectories=2, busy_policy="queue", backend=backend
    ) as evaluator:
        for wage in (1.0, 2.0, 3.0):
            policy.set(wage, bonus=10.0)
            assert evaluator.trigger_eval(policy, step=int(wage))
            policy.set(-50.0)
        results = [evaluator.wait() for _ in range(3)]
        assert evaluator.poll() is None
    assert [result.mean for result in results] == [44.0, 48.0, 52.0]
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.version for result in results] == [1, 2, 3]
    assert policy.training


def test_weights_come_as_module_tensordict_or_state_dict_or_from_the_policy_itself():
    policy, other = Wage(1.0), Wage(2.0)
    with Evaluator(paid, policy, num_trajectories=1) as evaluator:
        assert evaluator.evaluate().mean == 4.0
        assert evaluator.evaluate(other).mean == 8.0
        assert evaluator.evaluate(Evaluator.extract_weights(other)).mean == 8.0
        assert evaluator.evaluate(other.state_dict(), version=7).version == 7
        assert evaluator.evaluate(other).version == 8
        assert evaluator.evaluate(weights_dict={"policy": other}).mean == 8.0
        with pytest.raises(WeightsError, match="weights do not fit Wage"):
            evaluator.trigger_eval(nn.Linear(1, 1))
        assert evaluator.evaluate().mean == 4.0


class Shifted(rig.Count):
    """Observes a weight of its own, and rewards each step with the action."""

    action_space = gym.spaces.Box(-100, 100, (1,), np.float32)

    def __init__(self, **options):
        super().__init__(**options)
        self.transform = Wage()

    def _observe(self, where):
        return np.full(2, self.transform.wage.item())

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(action[0]), *rest


def echo(observation):
    return observation[..., :1].float()


@both
@pytest.mark.parametrize("seed", [None, 1])
def test_weights_of_the_environment_hold_from_the_first_observation_on(backend, seed):
    make = functools.partial(Shifted, length=4)
    with Evaluator(make, echo, num_trajectories=3, seed=seed, backend=backend) as evaluator:
        for wage in (1.0, 2.0):
            result = evaluator.evaluate(weights_dict={"env.transform": Wage(wage)})
            assert result.returns.tolist() == [4 * wage] * 3


def test_a_factory_makes_the_policy_in_the_worker_with_the_environment_if_it_asks_for_it():
    def make(env):
        return Wage(float(env.length))

    with Evaluator(paid, policy_factory=make, num_trajectories=1) as evaluator:
        assert evaluator.evaluate().mean == 16.0
        assert evaluator.evaluate(Wage(1.0)).mean == 4.0
        assert evaluator.evaluate().mean == 4.0
    with Evaluator(paid, policy_factory=Wage, num_trajectories=1) as evaluator:
        assert evaluator.evaluate().mean == 0.0


@pytest.mark.parametrize("count", [7, 2])
def test_every_environment_gives_its_share_however_long_its_episodes_are(count):
    envs = [functools.partial(rig.Count, length=length) for length in (1, 5, 200)]
    with Evaluator(envs, lambda observation: torch.zeros(3).long(), num_trajectories=count) as ev:
        for _ in range(2):
            lengths = ev.evaluate().lengths.tolist()
            assert lengths == ([1, 1, 1, 5, 5, 200, 200] if count == 7 else [1, 5])


def test_every_evaluation_begins_with_fresh_episodes():
    # 6 steps would remain of an episode that the first evaluation had begun.
    env = functools.partial(rig.Count, length=70)
    with Evaluator(
        env, lambda observation: torch.zeros(()).long(), num_trajectories=1
    ) as evaluator:
        assert [evaluator.evaluate().lengths.tolist() for _ in range(3)] == [[70]] * 3


@pytest.mark.parametrize("dump_video", [True, False])
def test_transforms_write_their_videos_after_each_evaluation(tmp_path, dump_video):
    envs = pytest.importorskip("torchrl.envs")

    class Camera(envs.Transform):
        def dump(self, step):
            (tmp_path / f"{step}.mp4").touch()

    def make():
        return envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), Camera())

    kwargs = {"num_trajectories": 1, "max_steps": 3, "dump_video": dump_video}
    with Evaluator(make, lambda observation: torch.zeros(1), **kwargs) as evaluator:
        evaluator.evaluate(step=4)
        evaluator.evaluate()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == (["0.mp4", "4.mp4"] if dump_video else [])


@pytest.mark.parametrize(("own", "asked"), [(7, 20), (20, 7)])
def test_of_two_limits_of_an_episode_the_smaller_one_counts(own, asked):
    envs = pytest.importorskip("torchrl.envs")

    def make():
        return envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), envs.StepCounter(own))

    def metrics(episodes):
        return {"counted": episodes["next", "step_count"].max()}

    kwargs = {"num_trajectories": 2, "max_steps": asked, "backend": "inline"}
    with Evaluator(
        make, lambda observation: torch.zeros(1), metrics_fn=metrics, **kwargs
    ) as evaluator:
        result = evaluator.evaluate()
    assert result.lengths.tolist() == [7, 7]
    assert result["eval/counted"] == 7


def test_seeds_are_fixed_or_fresh_and_exploration_can_be_chosen():
    kwargs = {"num_trajectories": 2, "max_steps": 20, "collector_kwargs": {"num_envs": 2}}
    with Evaluator("Pendulum-v1", noisy, seed=3, **kwargs) as evaluator:
        first, again = evaluator.evaluate(), evaluator.evaluate()
        other, fresh = evaluator.evaluate(seed=4), evaluator.evaluate()
    assert first.returns.equal(again.returns)
    assert first.returns.equal(fresh.returns)
    assert not first.returns.equal(other.returns)
    assert first.lengths.tolist() == [20, 20]
    with Evaluator("Pendulum-v1", noisy, **kwargs) as evaluator:
        assert not evaluator.evaluate().returns.equal(evaluator.evaluate().returns)


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_an_evaluator_with_a_seed_draws_nothing_from_the_learners_generator(backend):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    kwargs = {"policy_factory": lambda: noisy, "num_trajectories": 1, "max_steps": 3}
    with Evaluator("Pendulum-v1", seed=3, backend=backend, **kwargs) as evaluator:
        evaluator.evaluate()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("kind", "deterministic"), [(None, True), (ExplorationType.RANDOM, False)])
def test_policies_act_deterministically_unless_told_otherwise(kind, deterministic):
    from tensordict.nn import ProbabilisticTensorDictModule as Sampler
    from tensordict.nn import ProbabilisticTensorDictSequential as Chain
    from tensordict.nn import TensorDictModule

    class Head(nn.Module):
        def forward(self, observation):
            zero = torch.zeros(*observation.shape[:-1], 1)
            return zero + 1.0, zero + 0.5

    policy = Chain(
        TensorDictModule(Head(), in_keys=["observation"], out_keys=["loc", "scale"]),
        Sampler(["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal),
    )
    chosen = {} if kind is None else {"exploration_type": kind}
    with Evaluator(paid, policy, num_trajectories=3, **chosen) as evaluator:
        assert (evaluator.evaluate().std == 0.0) == deterministic


def test_the_users_metrics_see_whole_episodes():
    def metrics(episodes):
        assert episodes["collector", "mask"].all()
        return {"last": episodes["next", "observation"][:, -1, 1].mean(), "pid": os.getpid()}

    with Evaluator(paid, Wage(1.0), num_trajectories=2, metrics_fn=metrics) as evaluator:
        result = evaluator.evaluate()
    assert result["eval/last"] == 6.0  # of steps 4 and 8
    assert result["eval/pid"] != os.getpid()


# -- results ---------------------------------------------------------------------------------------


def test_results_say_mean_interval_and_extremes():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    result = Evaluation(returns, torch.full((5,), 2), 3, 100, 0.5, {"own": 7.0}, "test")
    low, high = result.ci95
    assert low == pytest.approx(3 - 2.7764 * 2.5**0.5 / 5**0.5, abs=5e-3)
    assert high == pytest.approx(6 - low)
    assert dict(result) == {
        "test/reward": 3.0,
        "test/reward_std": pytest.approx(2.5**0.5),
        "test/reward_ci95_low": low,
        "test/reward_ci95_high": high,
        "test/reward_min": 1.0,
        "test/reward_max": 5.0,
        "test/num_episodes": 5,
        "test/episode_length": 2.0,
        "test/fps": 20.0,
        "test/seconds": 0.5,
        "test/policy_version": 3,
        "test/step": 100,
        "test/own": 7.0,
    }
    assert str(result) == (
        "test of version 3 (step 100): return 3.0 ± 2.0 (95 % CI, 5 episodes of 2.0 steps)"
    )


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (30, 2.045)])
def test_the_interval_is_students(count, t):
    returns = torch.arange(count, dtype=torch.float64)
    low, high = Evaluation(returns, returns.long(), 0, 0, 1.0).ci95
    assert (high - low) / 2 == pytest.approx(t * float(returns.std()) / count**0.5, rel=2e-3)


def test_a_callback_gets_scalars_by_name():
    results = []
    with Evaluator(paid, Wage(1.0), num_trajectories=2, on_result=results.append) as evaluator:
        evaluator.trigger_eval(step=5)
        evaluator.wait()
    assert isinstance(results[0], TensorDict)
    assert results[0]["eval/reward"].item() == 4.0
    assert results[0]["eval/step"].item() == 5


@both
def test_a_callback_may_trigger_evaluations_but_not_wait_for_them(backend):
    refused, played = [], []

    def on_result(result):
        with pytest.raises(RuntimeError, match="on_result cannot wait"):
            evaluator.evaluate()
        if not refused:  # no result is there
            with pytest.raises(RuntimeError, match="on_result cannot wait"):
                evaluator.wait()
        refused.append(result["eval/step"].item())
        if len(refused) < 3:
            evaluator.trigger_eval()

    with Evaluator(
        paid,
        Wage(1.0),
        num_trajectories=1,
        on_result=on_result,
        busy_policy="queue",
        backend=backend,
    ) as evaluator:
        assert evaluator.evaluate().step == 0
        while (result := evaluator.wait()) is not None:
            played.append(result.step)
    assert (refused, played) == ([0, 1, 2], [1, 2])


def test_ctrl_c_leaves_an_evaluation_of_this_process_at_once():
    def interrupt(observation):
        if observation.shape and len(calls) > 20:
            raise KeyboardInterrupt
        calls.append(observation)
        return torch.zeros(*observation.shape[:-1], 1)

    calls = []
    evaluator = Evaluator(endless, interrupt, num_trajectories=1, backend="inline")
    with evaluator, pytest.raises(KeyboardInterrupt):
        evaluator.trigger_eval()


def test_an_evaluator_is_refused_in_a_forked_child():
    with Evaluator(paid, Wage(), num_trajectories=1) as evaluator:
        evaluator.evaluate()
        if (child := os.fork()) == 0:
            try:
                evaluator.evaluate()
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# -- requests --------------------------------------------------------------------------------------

endless = functools.partial(Paid, length=10**9, pause=0.001)


def test_a_request_while_another_is_under_way_is_skipped_refused_or_queued():
    for busy in ("skip", "error"):
        with Evaluator(endless, Wage(), num_trajectories=1, busy_policy=busy) as evaluator:
            assert evaluator.trigger_eval()
            assert evaluator.pending
            assert evaluator.poll() is None
            assert evaluator.wait(timeout=0.01) is None
            if busy == "skip":
                with pytest.warns(UserWarning, match="busy_policy='queue' keeps"):
                    assert not evaluator.trigger_eval()
                assert not evaluator.trigger_eval()  # it warns once
            else:
                with pytest.raises(RuntimeError, match="an evaluation is under way"):
                    evaluator.trigger_eval()


def test_requests_are_counted_where_they_have_no_label_and_counts_are_kept():
    with Evaluator(paid, Wage(), num_trajectories=1) as evaluator:
        assert [evaluator.evaluate().step for _ in range(2)] == [0, 1]
        state = evaluator.state_dict()
        evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match="while an evaluation is under way"):
            evaluator.load_state_dict(state)
        assert evaluator.wait().step == 2
        evaluator.load_state_dict(state)
        assert evaluator.evaluate().step == 2


def test_evaluation_beside_collection_in_the_background():
    policy = Wage()
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    collector = AsyncCollector(paid, policy, frames_per_batch=20, replay_buffer=buffer)
    with collector, Evaluator(paid, policy, num_trajectories=2) as evaluator:
        collector.start()
        for wage in (1.0, 2.0):
            policy.set(wage)
            collector.update_policy_weights_()
            evaluator.trigger_eval(policy)
            before = buffer.write_count
            rig.until(lambda before=before: buffer.write_count > before)
            assert evaluator.wait().mean == 4 * wage


# -- failures and the end --------------------------------------------------------------------------


def await_error(evaluator, kind, match):
    assert evaluator.trigger_eval()
    with pytest.raises(kind, match=match) as caught, rig.in_time():
        evaluator.wait()
    for call in (evaluator.trigger_eval, evaluator.evaluate, evaluator.wait):
        with pytest.raises(kind, match=match):
            call()
    return caught.value


def test_what_an_environment_raises_reaches_the_caller():
    with Evaluator(rig.counting(fault=rig.fail), noisy_choice, num_trajectories=9) as evaluator:
        error = await_error(evaluator, ArithmeticError, "in the simulator")
    assert isinstance(error, WorkerError)


def noisy_choice(observation):
    return torch.zeros(observation.shape[:-1]).long()


def test_results_before_a_failure_can_still_be_taken():
    with Evaluator(
        rig.counting(fault=rig.fail, at=90), noisy_choice, num_trajectories=1, busy_policy="queue"
    ) as evaluator:
        evaluator.trigger_eval(step=1)
        evaluator.trigger_eval(step=2)
        rig.until(lambda: not evaluator.pending)
        assert evaluator.wait().step == 1
        with pytest.raises(ArithmeticError):
            evaluator.wait()


def test_the_death_of_the_worker_reaches_the_caller():
    with Evaluator(rig.counting(fault=rig.kill), noisy_choice, num_trajectories=9) as evaluator:
        await_error(evaluator, WorkerDied, "killed by signal 9")


class LostOnce(gym.Wrapper):
    """Does ``fault`` at its step ``at``, unless there is the file ``mark``."""

    def __init__(self, env, fault, at, mark):
        super().__init__(env)
        self.fault, self.left, self.mark = fault, at, mark

    def step(self, action):
        self.left -= 1
        if self.left == 0 and not self.mark.exists():
            self.mark.touch()
            self.fault()
        return self.env.step(action)


survives = pytest.mark.filterwarnings("ignore:collection waits|.*takes part again")


@survives
@pytest.mark.parametrize("fault", [rig.kill, rig.hang])
def test_an_evaluation_is_played_again_by_a_replacement(fault, tmp_path):
    mark = tmp_path / "mark"

    def play():
        def make():
            return LostOnce(gym.make("CartPole-v1"), fault, 60, mark)

        kwargs = {"collector_kwargs": {"num_envs": 2}, "timeout": 1.0, "on_failure": "relaunch"}
        with Evaluator(make, lean_choice, num_trajectories=6, **kwargs) as evaluator:
            found = [evaluator.evaluate(seed=seed) for seed in (3, 5, 5, None)]
        assert mark.exists()
        return [one.returns.tolist() for one in found]

    disturbed = play()
    assert disturbed == play()  # the file is there
    assert disturbed[1] == disturbed[2] != disturbed[3]


def lean_choice(observation):
    return (observation[..., 2] > 0).long()


@survives
def test_a_worker_that_is_lost_again_and_again_ends_the_evaluator():
    options = {"num_trajectories": 9, "on_failure": "relaunch", "max_relaunches": 1}
    with Evaluator(rig.counting(fault=rig.kill), noisy_choice, **options) as evaluator:
        await_error(evaluator, WorkerDied, r"signal 9.*max_relaunches=1")


@pytest.mark.parametrize(("envs", "at"), [(1, 15), (1, 64), (1, 65), (2, 15), (2, 21)])
def test_an_episode_that_an_error_has_cut_does_not_count(envs, at, tmp_path):
    env = functools.partial(rig.Count, length=10)
    broken = functools.partial(FaultyEnv, env, "raise", at=at, once=tmp_path / "mark")
    options = {"collector_kwargs": {"num_envs": envs}, "on_env_error": "restart"}
    with Evaluator(broken, noisy_choice, num_trajectories=10, **options) as evaluator:
        with pytest.warns(UserWarning, match="built anew") as told:
            result = evaluator.evaluate()
        assert len(told) == 1
        assert result.lengths.tolist() == result.returns.tolist() == [10] * 10


def test_a_deadline_ends_a_worker_that_hangs():
    with Evaluator(
        rig.counting(fault=rig.hang), noisy_choice, num_trajectories=9, timeout=0.3
    ) as evaluator:
        await_error(evaluator, CollectorTimeout, "within 0.3 s")


@pytest.mark.parametrize("fault", [None, rig.hang])
def test_shutting_down_ends_what_is_under_way(fault):
    env = functools.partial(rig.Count, length=10**9, pause=0.001, fault=fault)
    evaluator = Evaluator(env, noisy_choice, num_trajectories=1)
    evaluator.trigger_eval()
    with rig.in_time():
        evaluator.shutdown(timeout=5.0 if fault is None else 0.3)
        evaluator.shutdown()
    for call in (evaluator.trigger_eval, evaluator.evaluate, evaluator.wait):
        with pytest.raises(ClosedError, match="was shut down"):
            call()


def test_shutting_down_ends_the_waits_of_other_threads():
    evaluator = Evaluator(endless, Wage(), num_trajectories=1, busy_policy="queue")
    evaluator.trigger_eval()
    with ThreadPoolExecutor(3) as threads:
        calls = [evaluator.evaluate, evaluator.evaluate, evaluator.wait]
        waits = [threads.submit(call) for call in calls]
        evaluator.shutdown()
        for one in waits:
            with pytest.raises(ClosedError, match="was shut down"), rig.in_time():
                one.result()
    assert not evaluator.pending


def test_an_evaluator_that_is_dropped_ends_its_worker():
    evaluator = Evaluator(endless, Wage(), num_trajectories=1)
    evaluator.trigger_eval()
    del evaluator
    gc.collect()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"policy": None}, "needs policy= or policy_factory="),
        ({"num_trajectories": 0}, "num_trajectories"),
        ({"backend": "thread"}, "backend='thread' is not available"),
        ({"backend": "threads"}, "'process', 'ray' or 'inline'"),
        ({"busy_policy": "wait"}, "'skip', 'error' or 'queue'"),
        ({"collector_cls": "MultiSyncCollector"}, "collector_cls"),
        ({"done_keys": "over"}, "done_keys"),
        ({"collector_kwargs": {"trajs_per_batch": 3}}, "trajs_per_batch cannot be given here"),
        ({"collector_kwargs": {"init_random_frames": 8}}, "init_random_frames cannot be given"),
        ({"reward_keys": "gain"}, r"no 'gain' to add up.*, one of \('next', 'reward'\)"),
        ({"metrics_fn": lambda episodes: episodes.shape}, "metrics_fn returned .*mapping of names"),
        ({"policy_factory": lambda env: None}, "needs an env that is callable"),
        ({"seed": -1}, "seed"),
        ({"on_failure": "continue"}, "'raise' or 'relaunch'"),
        ({"on_failure": "relaunch", "backend": "inline"}, "needs a worker"),
        ({"on_env_error": "relaunch"}, "'raise' or 'restart'"),
    ],
)
def test_wrong_arguments_are_named(arguments, match):
    given = {"env": "CartPole-v1", "policy": noisy_choice, "num_trajectories": 1, **arguments}
    with pytest.raises(ConfigError, match=match):
        Evaluator(**given).evaluate()
