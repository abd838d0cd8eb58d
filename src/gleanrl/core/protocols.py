"""The nouns of the library on one page: the interface of each part."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.messages import Command, Reply, Report, Snapshot, WeightsRef
from gleanrl.core.window import Window


class Stop(Protocol):
    """One byte; nonzero asks the running rollout to end after the current step."""

    def __getitem__(self, index: int, /) -> int:
        """Return the byte (``index`` is 0)."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set or clear the flag."""


class Spec(Protocol):
    """The set of values one tensor may take."""

    @property
    def shape(self) -> torch.Size:
        """Shape of one value."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of one value."""

    @property
    def stepwise(self) -> bool:
        """Whether ``rand([T, P])`` equals ``T`` calls of ``rand([P])`` draw for draw."""

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw ``[*shape, *self.shape]`` values from torch's global generator."""


class Policy(Protocol):
    """Maps root fields to actions and extras, without gradients."""

    inner: Any
    """The user's policy, for remote access."""
    outputs: tuple[Field, ...]
    """Everything it writes per step, actions included; ``("next", state)`` for recurrent state."""
    states: tuple[Key, ...]
    """Root keys it reads that its own ``("next", ...)`` outputs feed; zero at every reset."""
    provided: Collection[Key]
    """What it may read that the collector provides: ``"is_init"``, bool ``[P, 1]``, true where an
    episode begins, and ``"step_count"``, int64 ``[P, 1]``, 0 there."""
    memory: Any
    """A copy of its outputs of earlier steps that it may read; set to continue from it."""

    @property
    def requested(self) -> JointAct | None:
        """The act that `act` has left to a call for several rollouts; ``None`` if it has acted."""

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; reads the interaction type; ``carry`` gets row ``T``."""

    def act(self, t: int) -> None:
        """Read root row ``t``, write actions and extras there, states at row ``t + 1``."""

    def finish(self, steps: int) -> None:
        """Write data that are cheaper in bulk, once ``steps`` steps were taken since `begin`."""

    def explain(self) -> list[str]:
        """Return how each part runs, in one line per part."""

    def forget(self) -> None:
        """Drop the state of earlier steps, because all environments begin again."""


class Source(Protocol):
    """The object that a worker serves."""

    def layout(self) -> Layout | None:
        """Describe one step, or ``None`` if rollouts travel as payloads."""

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Fill ``window`` with ``steps`` steps, fewer if ``stop`` is raised."""

    def place(self, base: int, stride: int) -> None:
        """Number the environments ``base, base + 1, ...`` of ``stride``; before any rollout."""

    def load(self, snapshot: Snapshot) -> None:
        """Load weights; the next rollout is made with them."""

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed environments, action spaces and streams; reset all; return the last seed used."""

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments; they start new trajectories."""

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        """Return everything needed to continue elsewhere."""

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> str | None:
        """Restore a state from `state`; return why environments begin new episodes, if they do."""

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a dotted path on the source and call it, or return it if not callable."""

    def get(self, path: str) -> Any:
        """Return the object at a dotted path on the source."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class JointAct(Protocol):
    """A rollout's part in a call of a policy that acts for several rollouts."""

    @property
    def envs(self) -> int:
        """The number of environments that wait for an action."""

    @property
    def seconds(self) -> float:
        """The duration of the policy's calls in the rollout so far."""

    def act_with(self, others: Sequence[Any]) -> None:
        """Have the policy act once for this rollout and for ``others``."""


class InlineSource(Source, Protocol):
    """A source in the learner's process, whose environments may be in other processes."""

    @property
    def memory(self) -> SharedMemory | None:
        """Where windows should lie so that these processes can write them."""

    @property
    def under_way(self) -> bool:
        """Whether its environments take a step in another process."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait a moment for news of the processes that environments are in."""

    def settle(self) -> None:
        """Wait for the end of a reset in another process."""

    def acting(self) -> AbstractContextManager[None]:
        """Return the context in which its policy acts."""

    def collecting(
        self, window: Window, steps: int, stop: Stop, random: bool
    ) -> Generator[JointAct | None, None, Report]:
        """Collect like `collect`, but yield twice per step.

        First once the policy has acted, or with the `JointAct` that is to be carried out; then
        while environments in other processes step.
        """


SourceFactory: TypeAlias = Callable[[int], Source]
"""Builds the source of the worker with that number, in the worker."""


class SharedMemory(Protocol):
    """Memory that the learner and its workers map."""

    def reserve(self, nbytes: int) -> int:
        """Grow by ``nbytes``; return the offset of the added part."""

    def map(self) -> mmap.mmap:
        """Return a mapping of all reserved memory."""


class WeightPublisher(Protocol):
    """Where the weights of one model are published for all workers at once."""

    ref: WeightsRef
    """The reference from which a worker reads it (`core.messages.Bind`)."""

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref`` and of its shapes, and make them the newest."""


class Backend(Protocol):
    """Starts workers and carries `Command`s to them and `Reply`s back."""

    @property
    def worker_name(self) -> str:
        """The name of a worker in messages; ``{}`` in it stands for its number."""

    @property
    def memory(self) -> SharedMemory | None:
        """The memory of rollouts, ``None`` for private memory."""

    @property
    def inline(self) -> bool:
        """Whether workers live in the calling process: a forked child has copies of them."""

    @property
    def stop_byte(self) -> Stop:
        """The byte that running rollouts look at."""

    def weight_publisher(self, weights: Mapping[str, torch.Tensor]) -> WeightPublisher | None:
        """Prepare to publish tensors like ``weights``; ``None`` if weights travel as messages."""

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Start one worker per factory; each answers with `Ready`."""

    def send(self, worker: int, ticket: int, command: Command) -> None:
        """Post a command; its reply carries ``ticket``. Never blocks."""

    def receive(self, timeout: float | None) -> Reply:
        """Return the next reply of any worker, or raise `CollectorTimeout` / `WorkerDied`."""

    def no_end_noticed(self) -> bool:
        """Whether no worker has ended, as far as that is known; ``False`` if `receive` must look.

        Reads nothing, and costs less than `receive` would.
        """

    def end(self, worker: int) -> bool:
        """End ``worker``, which was lost; tell if it certainly writes no more. Never raises."""

    def wait(self, timeout: float) -> None:
        """Wait until `receive` may have something, at most ``timeout`` seconds.

        Another thread may use the backend meanwhile.
        """

    def stop(self, timeout: float) -> None:
        """End all workers within ``timeout`` seconds. Idempotent, never raises."""
