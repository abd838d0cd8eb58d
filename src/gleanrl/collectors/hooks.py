"""The hooks around each rollout of a collector, and the profile that is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError
from gleanrl.engine.engine import Engine
from gleanrl.engine.profiling import ProfileConfig, RolloutProfiler

PreHook: TypeAlias = Callable[[], None]
PostHook: TypeAlias = Callable[[Any], None]


class Hooks:
    """The hooks of a collector that makes rollouts itself."""

    iterated = False
    """Whether iteration has begun."""
    profile: ProfileConfig | None = None
    """The settings of the running profile, ``None`` without one."""
    _profiler: RolloutProfiler | None = None

    def __init__(self, pre: PreHook | None, post: PostHook | None) -> None:
        """Begin with the hooks that the constructor of the collector got."""
        self.pre, self.post = pre, post

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        """Set `pre_collect_hook` (a method, for handles without properties)."""
        self.pre = hook
        self._tell("set_pre_collect_hook", hook)

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set `post_collect_hook` (a method, for handles without properties)."""
        self.post = hook
        self._tell("set_post_collect_hook", hook)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every worker's collector, and of the replacements of lost workers."""

    def begin_profile(self, config: Mapping[str, Any], worker: int | None) -> None:
        """Do as `enable_profile`; ``worker`` is the index among a parent's workers, if any."""
        if self.iterated:
            raise RuntimeError("enable_profile must be called before the collector is iterated")
        self.disable_profile()
        profile = ProfileConfig(**config)
        self._profile(profile, config, worker)
        self.profile = profile

    def _profile(
        self, profile: ProfileConfig, config: Mapping[str, Any], worker: int | None
    ) -> None:
        if profile.should_profile_worker(worker or 0):
            self._profiler = RolloutProfiler(profile, worker or 0, self.post)
            self.set_post_collect_hook(self._profiler)

    def disable_profile(self) -> None:
        """Stop profiling and restore the user's hook."""
        if self._profiler is not None:
            self.set_post_collect_hook(self._profiler.close())
        self._profiler = self.profile = None


class HooksInWorkers(Hooks):
    """The hooks of a collector whose workers make the rollouts."""

    def __init__(self, pre: PreHook | None, post: PostHook | None, engine: Engine) -> None:
        """Begin with the hooks that the workers of ``engine`` got."""
        super().__init__(pre, post)
        self._engine = engine

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        if not self._engine.closed:
            self._engine.standing[method] = m.Call(method, args, kwargs)
            self._engine.request_all(self._engine.standing[method])

    def _profile(
        self, profile: ProfileConfig, config: Mapping[str, Any], worker: int | None
    ) -> None:
        count = self._engine.workers
        unknown = sorted(set(profile.workers) - set(range(count)))
        if unknown and worker is None:  # a parent means its own workers
            raise ConfigError(f"workers to profile {unknown} must be indices below {count}")
        self._tell("enable_profile", **config)

    def disable_profile(self) -> None:
        if self.profile is not None:
            self._engine.standing.pop("enable_profile", None)
            if not self._engine.closed:
                self._engine.request_all(m.Call("disable_profile"))
        self.profile = None
