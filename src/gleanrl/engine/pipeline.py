"""The stages between a collected batch and the user, or the replay buffer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import as_key, is_private
from gleanrl.core.options import warn
from gleanrl.engine.buffer_or_recorder import Sink
from gleanrl.engine.whole_trajectories import WholeTrajectories, split_trajectories
from gleanrl.envs.saved_state import load_batch, save_state
from gleanrl.memory.tensordicts import time_named

_MOST_FRUITLESS = 100
"""Batches without a whole trajectory after which a warning says that none will come."""
_NOTICE_S = 60.0
"""Seconds without a whole trajectory after which a warning says so."""
PostProc: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
Hook: TypeAlias = Callable[[Any], None]


class Pipeline:
    """Split, post-process, drop private entries, call the hook, deliver. Decided once.

    One collected batch gives one result. Whole trajectories, unless they are stored, give as many
    as were completed.
    """

    def __init__(
        self, arguments: Mapping[str, Any], sink: Sink | None, storing: torch.device | None
    ) -> None:
        """Line up the stages before the user, or ``sink``, on the device ``storing``."""
        self._same, postproc = arguments["return_same_td"], arguments["postproc"]
        self._kept: TensorDictBase | None = None
        self._episodes_end = arguments["reset_at_each_iter"]
        if isinstance(postproc, nn.Module) and storing is not None:
            postproc = postproc.to(storing)
        self._stages: list[PostProc] = []
        if arguments["split_trajs"]:
            self._stages.append(split_trajectories)
        if postproc is not None:
            # Only a stage of the user's can bring private entries in: sources deliver none.
            self._stages += [_checked(postproc), drop_private]
        self._sink = sink
        self._not_stored = 0
        self.least_frames = 0
        """Rollouts or whole trajectories are put one after another to batches of so many frames."""
        self._parts: list[TensorDictBase] = []
        """The parts of the next batch."""
        self._fruitless, self._waits_since = 0, 0.0
        """Batches in a row that completed too few trajectories, and when the first of them came."""
        self._patience_s = _NOTICE_S
        self._equal = arguments["traj_quota"] == "equal"
        self._whole = _whole_trajectories(arguments)

    def share_out(self, num_envs: int) -> None:
        """Set the number of environments, and with equal quotas the share of each."""
        if self._whole is None:
            return
        given = self._whole.num_trajectories
        self._whole.belong_to(num_envs, self._equal)
        if given != self._whole.num_trajectories and os.environ.get("RL_WARNINGS", "1") != "0":
            warn(
                f"trajs_per_batch ({given}) is not a multiple of the {num_envs} environments: "
                f"with equal quotas batches hold {self._whole.num_trajectories} trajectories"
            )

    def __call__(self, batch: TensorDictBase, hook: Hook | None) -> deque[TensorDictBase | None]:
        """Return the deliveries for ``batch``: one entry, or one per full set of trajectories."""
        if self._whole is None:
            whole = self._join(batch)
            return deque() if whole is None else deque((self._finish(whole, hook),))
        ready: deque[TensorDictBase | None] = deque()
        self._whole.push(batch)
        while (complete := self._whole.pop(self._sink is not None)) is not None:
            if (whole := self._join(complete)) is not None:
                ready.append(self._finish(whole, hook))
        if self._episodes_end:
            self._whole.flush()
        self._note_fruitless(bool(ready))
        # A loop over a collector that fills a buffer has one turn per collected batch.
        return ready if self._sink is None or self.least_frames else deque((None,))

    def _note_fruitless(self, ready: bool) -> None:
        """Warn where trajectories do not end, or not within the batch that cuts them."""
        self._fruitless = 0 if ready else self._fruitless + 1
        if self._fruitless <= 1:
            self._waits_since = monotonic()
        if self._episodes_end and self._fruitless == _MOST_FRUITLESS:
            warn(
                f"{_MOST_FRUITLESS} batches in a row held no whole trajectory: with "
                "reset_at_each_iter=True an episode has to fit into one batch; raise "
                "frames_per_batch or set max_frames_per_traj"
            )
        elif monotonic() - self._waits_since >= self._patience_s:
            self._patience_s = float("inf")  # the episodes may just be long: said once
            warn(
                f"still waiting for trajectories to end: for {_NOTICE_S:.0f} s, {self._fruitless} "
                "batches have completed too few for trajs_per_batch; lower it, or set "
                "max_frames_per_traj if episodes do not end by themselves"
            )

    def _join(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return ``batch`` together with those before; ``None`` if more are to come."""
        if not self.least_frames:
            return batch
        self._parts.append(batch)
        if sum(part.numel() for part in self._parts) < self.least_frames:
            return None
        parts, self._parts = self._parts, []
        return put_together(parts)

    @property
    def discarded(self) -> int:
        """Frames of partial trajectories that were dropped, and those that were not stored."""
        dropped = 0 if self._whole is None else self._whole.frames_discarded
        return dropped + self._not_stored

    @property
    def varies(self) -> bool:
        """Whether every result may have another shape."""
        return self._whole is not None

    @property
    def plain(self) -> bool:
        """Whether the caller gets collected batches unchanged."""
        return not self._stages and self._whole is None and self._sink is None

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """Apply the stages alone (no joining, trajectories, hook or sink)."""
        for stage in self._stages:
            batch = stage(batch)
        return batch

    def _finish(self, batch: TensorDictBase, hook: Hook | None) -> TensorDictBase | None:
        batch = self._filled(self.finish(batch)) if self._same else self.finish(batch)
        if hook is not None:
            hook(batch)
        if self._sink is None:
            return batch
        self._not_stored += self._sink.store(batch)
        return None

    def _filled(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the `TensorDict` of the first batch, which holds the tensors of ``batch`` now."""
        kept = self._kept
        if kept is None or type(kept) is not type(batch) or kept.shape != batch.shape:
            kept = self._kept = batch
        elif kept is not batch:
            kept.clear().update(batch)
        return kept

    def state(self) -> dict[str, Any]:
        """Return the batches to be joined and the trajectories that were not delivered."""
        return {
            "parts": [save_state(part) for part in self._parts],
            "whole": None if self._whole is None else self._whole.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state`, after `forget`."""
        self._parts = [load_batch(part) for part in state["parts"]]
        if self._whole is not None and state["whole"] is not None:
            self._whole.load_state(state["whole"])

    def forget(self, passed: TensorDictBase | None = None) -> None:
        """Drop unfinished trajectories and their later frames; count the frames.

        The frames to come continue no trajectory that was stored.

        Args:
            passed: A batch that was delivered in another way. What is still to come of the
                trajectories in it is also dropped.
        """
        self._not_stored += sum(part.numel() for part in self._parts)
        self._parts.clear()
        if self._sink is not None:
            self._sink.cut()
        if self._whole is not None:
            self._whole.reset(passed)


def frames_held(state: Mapping[str, Any]) -> int:
    """Return the frames in a state of `Pipeline.state`, none of which was delivered."""
    whole = state["whole"] or {"frames": ()}
    return sum(load_batch(part).numel() for part in (*state["parts"], *whole["frames"]))


def put_together(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Return ``parts`` one after another in time."""
    whole = torch.cat(list(parts), -1)
    return time_named(whole, whole.ndim - 1)


def drop_private(batch: TensorDictBase) -> TensorDictBase:
    """Remove every entry, at any depth, one part of whose key starts with an underscore."""
    private = [key for key in batch.keys(True) if is_private(as_key(key))]
    return batch.exclude(*private) if private else batch


def _checked(postproc: PostProc) -> PostProc:
    def stage(batch: TensorDictBase) -> TensorDictBase:
        result = postproc(batch)
        if not isinstance(result, TensorDictBase):
            raise ConfigError(
                f"postproc ({postproc!r:.80}) must return a TensorDict, it returned {result!r:.80}"
            )
        return result

    return stage


def _whole_trajectories(arguments: Mapping[str, Any]) -> WholeTrajectories | None:
    """Return the cutter of whole trajectories; by default, a buffer gets each by itself."""
    count = arguments["trajs_per_batch"]
    if count is None:
        return None
    if arguments["replay_buffer"] is None:
        return WholeTrajectories(count, traj_format=arguments["traj_format"])
    return WholeTrajectories(arguments["trajs_per_write"] or 1, traj_format="cat")
