"""Evaluation during training: exact numbers of episodes, with frozen weights."""

from __future__ import annotations

import atexit
import functools
import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from gleanrl.collectors.argument_texts import TEXTS
from gleanrl.collectors.arguments import read_seed
from gleanrl.collectors.distributed.ray import RayCollector
from gleanrl.collectors.evaluation_episodes import EpisodesPlan, Metrics
from gleanrl.collectors.in_process_collector import Collector
from gleanrl.collectors.multi_collector import MultiSyncCollector
from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, ConfigError, for_users
from gleanrl.core.keys import NestedKey, as_key
from gleanrl.core.options import check_callables, check_int, check_word, warn
from gleanrl.engine.session import CLOSE_TIMEOUT_S
from gleanrl.weights.module_weights import check_weights, cloned, warn_of_no_weights, weights_of

_POLL_INTERVAL_S = 0.2
"""Seconds between two checks of a waiting thread for the evaluator's shutdown."""
_T_975 = {1: 12.7062, 2: 4.3027}
"""The 97.5 % point of Student's t for few degrees of freedom, for which the series is not exact."""


@dataclass(frozen=True, eq=False)
class Evaluation(Mapping[str, Any]):
    """The result of an evaluation. As a mapping: scalars for a log, such as ``"eval/reward"``.

    The standard deviation is that of a sample (``n - 1``). The confidence interval is that of the
    mean by Student's t distribution, which assumes independent episodes with about normal returns.

    Attributes:
        returns: ``[N]`` float64, sums of rewards; environment by environment, in order of play.
        lengths: ``[N]`` int64, steps of the same episodes.
        version: Version of the weights that the episodes were played with.
        step: The label of the request.
        seconds: The worker's time of play.
        metrics: The results of ``metrics_fn``.
        prefix: The prefix of names in the mapping.
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    version: int
    step: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    prefix: str = "eval"

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns; zero for one episode."""
        return float(self.returns.std()) if len(self.returns) > 1 else 0.0

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % confidence interval of the mean return; NaN for one episode."""
        count = len(self.returns)
        half = _t_975(count - 1) * self.std / math.sqrt(count) if count > 1 else math.nan
        return self.mean - half, self.mean + half

    @functools.cached_property
    def _scalars(self) -> dict[str, Any]:
        low, high = self.ci95
        found = {
            "reward": self.mean,
            "reward_std": self.std,
            "reward_ci95_low": low,
            "reward_ci95_high": high,
            "reward_min": float(self.returns.min()),
            "reward_max": float(self.returns.max()),
            "num_episodes": len(self.returns),
            "episode_length": float(self.lengths.double().mean()),
            "fps": int(self.lengths.sum()) / self.seconds,
            "seconds": self.seconds,
            "policy_version": self.version,
            "step": self.step,
            **self.metrics,
        }
        return {f"{self.prefix}/{name}": value for name, value in found.items()}

    def __getitem__(self, name: str) -> Any:
        return self._scalars[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scalars)

    def __len__(self) -> int:
        return len(self._scalars)

    def __str__(self) -> str:
        half = self.ci95[1] - self.mean
        return (
            f"{self.prefix} of version {self.version} (step {self.step}): return {self.mean:.1f} "
            f"± {half:.1f} (95 % CI, {len(self.returns)} episodes of "
            f"{self.lengths.double().mean():.1f} steps)"
        )


def _t_975(df: int) -> float:
    """Return the 97.5 % point of Student's t: a series in ``1 / df`` (to 0.2 %, or exact)."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return _T_975.get(df) or z + sum(term / df**n for n, term in enumerate(terms, 1))


@dataclass(eq=False, slots=True)
class _Request:
    """A requested evaluation and its result."""

    weights: Mapping[str, Mapping[str, Any]]
    step: int
    version: int | None
    seed: int | None
    result: Future[Evaluation] = field(default_factory=Future)


class _Player:
    """Plays requested evaluations in order: in a thread of its own, or inline in the caller's."""

    closing: Any
    """The finalizer of the evaluator, which closes the player when that is collected."""

    def __init__(
        self,
        collector: Any,
        prefix: str,
        on_result: Callable[[TensorDictBase], Any] | None,
        inline: bool,
        dump_video: bool,
    ) -> None:
        self.collector, self._ask = collector, collector.collection.engine.ask
        collector.collection.repeats_seeds = True
        self._dumps = dump_video and self._has_transforms()
        self._prefix, self._on_result = prefix, on_result
        self._owner = os.getpid()
        self._playing: int | None = None
        """The thread that plays a request."""
        self._inline = threading.RLock() if inline else None
        self._lock = threading.RLock()  # the finalizer may need it where this thread holds it
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._newest: _Request | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def _has_transforms(self) -> bool:
        try:
            self._ask(m.Get("env.transform.dump.__name__"))
        except AttributeError:
            return False
        return True

    @property
    def pending(self) -> bool:
        """Whether a request is under way or queued."""
        return self._newest is not None and not self._newest.result.done()

    def check(self) -> None:
        """Raise the error that ended the evaluator."""
        if self._failure is not None:
            raise self._failure
        if self._owner != os.getpid() and self._inline is None:
            raise ClosedError(
                f"the evaluator belongs to process {self._owner}, and this is process "
                f"{os.getpid()}, forked from it; make an evaluator of its own here"
            )

    def check_may_wait(self) -> None:
        """Refuse to wait in ``on_result``, because no request begins before its end."""
        if self._playing == threading.get_ident():
            raise RuntimeError(
                "on_result cannot wait for an evaluation, because the next one begins after it: "
                "call trigger_eval() there, with busy_policy='queue'"
            )

    def submit(self, request: _Request, results: list[Future[Evaluation]] | None = None) -> None:
        """Play ``request`` inline, or queue it for the thread; append its result to ``results``."""
        self.check()  # before the lock, which a forked child finds as it was
        with self._inline or self._lock:
            self.check()
            self._newest = request
            if results is not None:
                results.append(request.result)
            if self._inline is not None:
                self._play(request)
                return
            self._requests.put(request)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gleanrl-evaluate", daemon=True
                )
                self._thread.start()
                atexit.register(self.closing)  # before finalizers are looked through

    def _run(self) -> None:
        for request in iter(self._requests.get, None):
            self._play(request)

    def _play(self, request: _Request) -> None:
        """Set the result of ``request``; a failure ends the evaluator."""
        before, self._playing = self._playing, threading.get_ident()
        try:
            self.check()
            request.result.set_result(self._evaluate(request))
        except BaseException as err:
            failure = self._end(err)
            self.collector.shutdown(CLOSE_TIMEOUT_S, raise_on_error=False)
            self.closing.detach()  # nothing is left to close, and the error refers to its callers
            request.result.set_exception(failure)
            if not isinstance(err, Exception):  # Ctrl-C, where this is the caller's thread
                raise
        finally:
            self._playing = before

    def _evaluate(self, request: _Request) -> Evaluation:
        """Return the result; other threads may shut down meanwhile."""
        collector = self.collector
        if request.weights or request.version is not None:
            collector.receive_models(request.weights, request.version)
        collector.collection.seeds = {}
        if request.seed is not None:  # after the weights: it resets, and transforms may have some
            collector.set_seed(request.seed)
        summary, version = self._episodes()
        if self._dumps:
            self._ask(m.Call("env.transform.dump", (), {"step": request.step}))
        metrics = {str(name): value.item() for name, value in summary["metrics"].items()}
        returns, lengths, seconds = (summary[name] for name in ("returns", "lengths", "seconds"))
        about = version, request.step, float(seconds), metrics, self._prefix
        result = Evaluation(returns, lengths, *about)
        if self._on_result is not None:
            self._on_result(TensorDict({k: torch.as_tensor(v) for k, v in result.items()}))
        return result

    def _episodes(self) -> tuple[TensorDictBase, int]:
        """Return the summary of the episodes and the version that played."""
        collection = self.collector.collection
        while True:
            with collection.engine.turn(None):
                if collection.engine.ready(collection.counts, True, collection.timeout):
                    return collection.collect()[0], collection.oldest_version
            collection.engine.backend.wait(_POLL_INTERVAL_S)

    def _end(self, error: BaseException) -> BaseException:
        """Accept no more requests; return the first error that ended the evaluator."""
        with self._lock:
            self._failure = error if self._failure is None else self._failure
            self._requests.put(None)
            return self._failure

    def close(self, timeout: float, raise_on_error: bool = False) -> None:
        """End everything; an evaluation under way ends after a step, or is killed."""
        if self._owner == os.getpid():  # a forked child finds the lock as it was
            self._end(ClosedError("the evaluator was shut down; make a new one"))
        atexit.unregister(self.closing)
        self.collector.shutdown(timeout, raise_on_error=raise_on_error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)


class _Acquainted:
    """Passes the new environment to a policy factory that takes one."""

    def __init__(self, make_env: Callable[..., Any], make_policy: Callable[[Any], Any]) -> None:
        self._make_env, self._make_policy = make_env, make_policy
        self._env: Any = None

    def env(self, **kwargs: Any) -> Any:
        self._env = self._make_env(**kwargs)
        return self._env

    def policy(self) -> Any:
        return self._make_policy(self._env)


class Evaluator:
    """Plays episodes with a frozen copy of the policy while the learner continues.

    `trigger_eval` copies the weights and returns at once; a worker process plays exactly
    ``num_trajectories`` episodes, each from a fresh reset. `poll` and `wait` give results in the
    order of requests, `evaluate` waits for its own. Every environment contributes equally many
    episodes, so short ones are not preferred. Modules act in evaluation mode (``eval()``).

    An exception in the worker, its death and a missed deadline end the evaluator, unless
    ``on_env_error`` or ``on_failure`` say otherwise. `wait` and `poll` raise the error after the
    results before it; all other calls raise it at once.

    Example:
        >>> from gleanrl import Evaluator
        >>> def lean(observation):
        ...     return (observation[..., 2] > 0).long()
        >>> with Evaluator("CartPole-v1", lean, num_trajectories=5) as evaluator:
        ...     evaluator.trigger_eval(step=1000)
        ...     result = evaluator.wait()
        True
        >>> len(result.returns), result.step, result["eval/num_episodes"]
        (5, 1000, 5)
    """

    @for_users
    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_cls: Any = None,
        collector_kwargs: Mapping[str, Any] | None = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        reward_keys: NestedKey = ("next", "reward"),
        done_keys: NestedKey = ("next", "done"),
        device: torch.device | str | int | None = None,
        exploration_type: InteractionType | None = InteractionType.DETERMINISTIC,
        metrics_fn: Metrics | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: str = "skip",
        backend: str = "process",
        init_fn: Callable[[], Any] | None = None,
        num_gpus: int | float = 0,
        ray_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        on_failure: str = "raise",
        max_relaunches: int | tuple[int, float] = 3,
        on_env_error: str = "raise",
        max_env_restarts: int | tuple[int, float] = 10,
    ) -> None:
        """Start the worker; it builds its environments and resets them once.

        Args:
            env: The environment, as for `Collector`; it is sent to the worker.
            policy: The policy; the worker gets a copy.
            policy_factory: A callable that makes the policy in the worker, from the environment if
                it takes an argument. A ``policy`` given as well is only the source of weights.
            num_trajectories: Episodes of one evaluation.
            max_steps: Truncate episodes after this many steps, or at the environment's own limit
                if that is smaller.
            frames_per_batch: Frames, over all environments, between two counts of the episodes that
                have ended; by default 64 steps of each environment.
            collector_cls: Only `Collector`.
            collector_kwargs: Further arguments of `MultiSyncCollector` (of `RayCollector`):
                ``num_envs``, ``create_env_kwargs``, ….
            weight_sync_schemes: Per model id; see `MultiSyncCollector`.
            log_prefix: The prefix of names of results.
            reward_keys: The entry that is summed up over an episode; of several agents, the mean.
            done_keys: ``("next", "done")`` only, because the environment's flags end episodes.
            device: The device of the policy.
            exploration_type: How a probabilistic policy acts.
            metrics_fn: Called in the worker with the whole episodes, padded, ``[N, T]`` with
                ``("collector", "mask")``; returns further scalars by name. Without it, observations
                are not kept.
            dump_video: Have the environment's transforms write the videos that they recorded, with
                ``env.transform.dump(step=...)`` after each evaluation; TorchRL's have that.
            on_result: A function that gets each result as a `TensorDict` of scalars (`poll` returns
                an `Evaluation`). It runs in a thread of the evaluator's, inline in the caller's. It
                may trigger evaluations, but not wait for them.
            busy_policy: The reaction of `trigger_eval` while a request is under way: ``"skip"``
                (return ``False``), ``"error"``, or ``"queue"``, which keeps every request with its
                weights.
            backend: ``"process"``; ``"ray"``; or ``"inline"``: in this process, which waits.
            init_fn: Called first in the worker.
            num_gpus: GPUs of the Ray actor.
            ray_kwargs: Further options of the Ray actor.
            seed: The seed of every evaluation, so that all start from the same states. By default
                each evaluation has new start states.
            timeout: Seconds that an evaluation may take; a worker that takes longer is killed.
            on_failure: The reaction to a worker that dies or is late: ``"raise"``, or
                ``"relaunch"``, with a warning: a replacement plays the evaluation again, with the
                same weights and ``seed``.
            max_relaunches: As for `MultiSyncCollector`; after that, the error is raised.
            on_env_error: The reaction to an exception of an environment: ``"raise"``, or
                ``"restart"``, with a warning: it is built anew, and plays another episode in place
                of the one that was cut.
            max_env_restarts: How often each environment may be built anew; as ``max_relaunches``.

        Raises:
            ConfigError: an argument is wrong or contradicts another.
            WorkerError: an exception of the worker at its start.
        """
        if policy is None and policy_factory is None:
            raise ConfigError("an Evaluator needs policy= or policy_factory=")
        check_callables(
            policy_factory=policy_factory,
            metrics_fn=metrics_fn,
            on_result=on_result,
            init_fn=init_fn,
        )
        _check_words(backend, busy_policy, on_failure, collector_cls, done_keys)
        if frames_per_batch is not None:
            frames_per_batch = check_int("frames_per_batch", frames_per_batch, least=1)
        plan = EpisodesPlan(
            count=check_int("num_trajectories", num_trajectories, least=1),
            reward_key=as_key(reward_keys),
            frames=frames_per_batch,
            metrics=metrics_fn,
        )
        self._seed = None if seed is None else read_seed(seed)
        self._policy, self._factory = policy, policy_factory
        self._busy_policy, self._next_step = busy_policy, 0
        self._warned_of_skips = False
        given = {
            "frames_per_batch": 1,  # a rollout is one evaluation
            "max_frames_per_traj": max_steps,
            "exploration_type": exploration_type,
            "weight_sync_schemes": weight_sync_schemes,
            "policy_device": device,
            "init_fn": init_fn,
            "timeout": timeout,
            "on_failure": on_failure,
            "max_relaunches": max_relaunches,
            "on_env_error": on_env_error,
            "max_env_restarts": max_env_restarts,
        }
        kwargs = _completed(given, collector_kwargs or {})
        if policy_factory is not None and _takes_env(policy_factory):
            if not callable(env):
                raise ConfigError(
                    "a policy_factory that takes the environment needs an env that is callable, "
                    f"not {env!r:.80}"
                )
            both = _Acquainted(env, policy_factory)
            env, policy_factory = both.env, both.policy
        kwargs["policy_factory"] = policy_factory
        kwargs |= {"collector_class": plan, "cat_results": 0}
        collector: Any
        # A seed replaces the number that a collector draws for its streams.
        with torch.random.fork_rng(devices=[], enabled=self._seed is not None):
            if backend == "ray":
                options = {"num_gpus": num_gpus, **(ray_kwargs or {})}
                kwargs |= {"remote_configs": options, "sync": True}
                collector = RayCollector([env], policy, **kwargs)
            else:
                collector = MultiSyncCollector([env], policy, backend=backend, **kwargs)
        inline = backend == "inline"
        self._player = player = _Player(collector, log_prefix, on_result, inline, dump_video)
        player.closing = weakref.finalize(self, player.close, CLOSE_TIMEOUT_S)
        self._untaken: list[Future[Evaluation]] = []
        """Of requests by `trigger_eval`, in their order."""

    # -- evaluating ------------------------------------------------------------------------------

    @for_users
    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        version: int | None = None,
        seed: int | None = None,
    ) -> Evaluation:
        """Evaluate and wait for the result, after all requests made before.

        Args:
            weights: A module (parameters and buffers), a `TensorDict` or a state dict. The default
                is the present weights of ``policy``, if it is a module, else the worker's.
            step: Label of the result; by default requests are counted.
            weights_dict: Weights by model id, such as ``"env.transform[0]"``.
            version: Version of the weights; by default the one after the newest.
            seed: Of this evaluation alone.

        Raises:
            WeightsError: weights that do not fit.
            ClosedError: the evaluator was shut down.
            WorkerError: user code raised in the worker.
            WorkerDied: the worker's process ended.
            CollectorTimeout: it took longer than ``timeout`` seconds.
        """
        self._player.check_may_wait()
        request = self._request(weights, step, weights_dict, version, seed)
        self._player.submit(request)
        return request.result.result()

    @for_users
    def trigger_eval(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        version: int | None = None,
        seed: int | None = None,
    ) -> bool:
        """Begin an evaluation with a copy of the current weights.

        Returns:
            Whether it was accepted: ``False`` if another is under way and ``busy_policy`` is
            ``"skip"``.

        Raises:
            RuntimeError: another is under way and ``busy_policy`` is ``"error"``.
            Exception: as `evaluate`, of an earlier evaluation.
        """
        self._player.check()
        if self._player.pending and self._busy_policy != "queue":
            if self._busy_policy == "skip":
                if not self._warned_of_skips:
                    self._warned_of_skips = True
                    warn(
                        f"the evaluation of step {step} was skipped, because an earlier one is "
                        "under way; trigger_eval() returns False then. busy_policy='queue' keeps "
                        "every request"
                    )
                return False
            raise RuntimeError(
                "an evaluation is under way: wait() for it, or use busy_policy='skip' or 'queue'"
            )
        request = self._request(weights, step, weights_dict, version, seed)
        self._player.submit(request, self._untaken)
        return True

    def _request(
        self,
        weights: Any,
        step: int | None,
        weights_dict: Mapping[str, Any] | None,
        version: int | None,
        seed: int | None,
    ) -> _Request:
        sources = dict(weights_dict or {})
        if isinstance(weights, nn.Module) and not weights_of(weights):
            warn_of_no_weights(weights)
        if weights is None and isinstance(self._policy, nn.Module):
            weights = self._policy
        if weights is not None:
            sources.setdefault("policy", weights)
        frozen = {name: cloned(weights_of(source)) for name, source in sources.items()}
        if "policy" in frozen and isinstance(self._policy, nn.Module) and self._factory is None:
            check_weights(self._policy, frozen["policy"])
        if step is None:
            step, self._next_step = self._next_step, self._next_step + 1
        seed = self._seed if seed is None else read_seed(seed)
        return _Request(frozen, step, version, seed)

    @for_users
    def poll(self, timeout: float = 0) -> Evaluation | None:
        """Return the oldest result not yet returned; ``None`` if there is none.

        Args:
            timeout: Seconds to wait for one that is on its way.

        Raises:
            Exception: as `evaluate`, of the evaluation whose turn it is.
        """
        return self._take(timeout)

    @for_users
    def wait(self, timeout: float | None = None) -> Evaluation | None:
        """Like `poll`, but wait for an evaluation under way; ``None`` if there is none.

        Args:
            timeout: Seconds to wait at most, after which ``None`` is returned.
        """
        return self._take(timeout)

    def _take(self, timeout: float | None) -> Evaluation | None:
        if timeout is None and not any(result.done() for result in self._untaken[:1]):
            self._player.check_may_wait()
        for result in self._untaken[:1]:
            if not wait([result], timeout).done:
                return None
            evaluation = result.result()
            self._untaken.remove(result)
            return evaluation
        self._player.check()
        return None

    @property
    def pending(self) -> bool:
        """Whether an evaluation is under way or queued."""
        return self._player.pending

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """Return a copy of the parameters and buffers of ``policy``, on the CPU."""
        weights: TensorDictBase = TensorDict.from_module(policy).data.clone().cpu()
        return weights

    # -- state and end ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of requests.

        Raises:
            RuntimeError: an evaluation is under way, or its result was not taken.
        """
        self._check_settled("saved")
        return {"step_counter": self._next_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the counts of requests from a state.

        Raises:
            RuntimeError: an evaluation is under way, or its result was not taken.
        """
        self._check_settled("restored")
        self._next_step = int(state_dict["step_counter"])

    def _check_settled(self, what: str) -> None:
        if self.pending or self._untaken:
            raise RuntimeError(
                f"the evaluator's state cannot be {what} while an evaluation is under way or its "
                "result was not taken: wait() first"
            )

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the worker. Idempotent; `poll` still returns finished results.

        Args:
            timeout: Seconds that the step under way may take; then the worker is killed.
        """
        self._player.closing.detach()
        self._player.close(timeout)

    def __enter__(self) -> Evaluator:
        """Return the evaluator; it is shut down at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _takes_env(factory: Callable[..., Any]) -> bool:
    """Tell whether a policy factory has an argument that must be given."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # written in C, or hidden
        return False
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _completed(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the collector."""
    taken = [name for name in more if name in given or name in _OWN]
    if taken:
        raise ConfigError(
            f"collector_kwargs: {', '.join(sorted(taken))} cannot be given here; the evaluator "
            "sets it, or has an argument of its own for it"
        )
    return {**given, **more}


_OWN = {*TEXTS["Batches"], *TEXTS["Replay buffer"], "backend", "sync", "num_collectors"}
_OWN |= {"num_workers", "collector_class", "policy_factory", "remote_configs"}


def _check_words(
    backend: str, busy_policy: str, on_failure: str, collector_cls: Any, done_keys: Any
) -> None:
    if backend == "thread":
        raise ConfigError(
            "backend='thread' is not available: the exploration type and the random generators "
            "belong to the whole process, so a thread would change how the learner's own policy "
            "acts; use backend='process', or 'inline' to wait for evaluations"
        )
    check_word("backend", backend, ("process", "ray", "inline"))
    check_word("busy_policy", busy_policy, ("skip", "error", "queue"))
    check_word("on_failure", on_failure, ("raise", "relaunch"))
    if on_failure == "relaunch" and backend == "inline":
        raise ConfigError("on_failure='relaunch' needs a worker to lose: use backend='process'")
    if collector_cls not in (None, Collector, "Collector", "SyncDataCollector"):
        raise ConfigError(
            f"collector_cls ({collector_cls!r}) must be Collector: it runs in the evaluator's "
            "worker; give its arguments as collector_kwargs="
        )
    if as_key(done_keys) != ("next", "done"):
        raise ConfigError(
            f"done_keys ({done_keys!r}) must be ('next', 'done'): episodes end where the "
            "environment's end flags say so"
        )
