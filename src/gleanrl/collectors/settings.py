"""What collectors show of the arguments they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.core.options import limit, read_device


class Setting:
    """An argument of the constructor, to be read."""

    def __init__(self, doc: str) -> None:
        """Say what it is."""
        self.__doc__ = doc
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, collector: Any, owner: type | None = None) -> Any:
        return self if collector is None else collector._settings[self._name]

    def __set__(self, collector: Any, value: Any) -> None:
        raise AttributeError(
            f"{self._name} of a {type(collector).__name__} is read-only: give {self._name}= to the "
            "constructor"
        )


class Settings:
    """The arguments that every collector shows."""

    _settings: Mapping[str, Any] = {}

    compact_obs = Setting("Whether observations under ``next`` are left out.")
    compiled_policy = Setting("Whether the policy is compiled.")
    cudagraphed_policy = Setting("Whether the policy runs as a CUDA graph.")
    device = Setting("The default of the other devices, as given.")
    extend_buffer = Setting("Whether a replay buffer gets whole batches.")
    max_frames_per_traj = Setting("Steps after which an episode is truncated; 0 for no limit.")
    no_cuda_sync = Setting("As given.")
    postproc = Setting("What is applied to every batch.")
    reset_at_each_iter = Setting("Whether all environments are reset before each batch.")
    reset_when_done = Setting("``True``.")
    set_truncated = Setting("Whether the last step of every batch is marked as truncated.")
    split_trajs = Setting("Whether batches hold one row per trajectory.")
    track_traj_ids = Setting("Whether trajectory ids are delivered.")
    traj_format = Setting("How whole trajectories are delivered.")
    trajs_per_batch = Setting("Whole trajectories per batch, if those are delivered.")
    trajs_per_write = Setting("Whole trajectories per write.")
    trust_policy = Setting("Whether the policy is called as it is.")
    verbose = False

    _version: Any
    _models: Any

    def _show(self, given: Mapping[str, Any], extend: bool) -> None:
        """Keep what is shown of the arguments ``given``."""
        kept = {name: given[name] for name in _AS_GIVEN if name in given}
        truths = {name: bool(given.get(name)) for name in _TRUTHS}
        self._settings = {
            **kept,
            **truths,
            "compiled_policy": bool(given.get("compile_policy")),
            "cudagraphed_policy": bool(given.get("cudagraph_policy")),
            "device": _device(given["device"]),
            "extend_buffer": extend,
            "max_frames_per_traj": limit(given["max_frames_per_traj"]) or 0,
            "preemptive_threshold": _one(given.get("preemptive_threshold")),
        }

    @property
    def policy_version_tracker(self) -> Any:
        """The counter of policy versions, ``None`` if they are not tracked."""
        return self._version

    @property
    def policy_weights(self) -> TensorDictBase:
        """The weights of the learner's policy; empty if it has none."""
        policy = self._models.given
        if not isinstance(policy, nn.Module):
            return TensorDict()
        weights: TensorDictBase = TensorDict.from_module(policy).data
        return weights


class WorkerSettings(Settings):
    """The arguments that collectors with workers show besides."""

    cat_results = Setting("How the rollouts of workers are put together.")
    collector_class = Setting("What runs in workers.")
    create_env_fn = Setting("What each worker collects from.")
    create_env_kwargs = Setting("Arguments of environments.")
    num_sub_threads = Setting("torch threads of each worker.")
    preemptive_threshold = Setting("Share of the workers that finish; 1 for all.")
    update_at_each_batch = Setting("Whether weights are sent with every batch.")


_AS_GIVEN = (
    "cat_results",
    "collector_class",
    "create_env_fn",
    "create_env_kwargs",
    "num_sub_threads",
    "postproc",
    "reset_when_done",
    "return_same_td",
    "track_traj_ids",
    "traj_format",
    "trajs_per_batch",
    "trajs_per_write",
)
_TRUTHS = (
    "compact_obs",
    "no_cuda_sync",
    "reset_at_each_iter",
    "set_truncated",
    "split_trajs",
    "trust_policy",
    "update_at_each_batch",
)


def _device(given: Any) -> Any:
    """Return the default device; those of the workers as a list, if they were given as one."""
    if isinstance(given, list | tuple):
        return [_device(one) for one in given]
    return read_device("device", given)


def _one(threshold: float | None) -> float:
    return 1.0 if threshold is None else float(threshold)
