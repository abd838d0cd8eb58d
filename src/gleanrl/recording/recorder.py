"""The recorder: keeps the frames of a collector on disk, whatever ends the collection."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core import keys
from gleanrl.core.errors import ClosedError, ConfigError, for_users
from gleanrl.core.options import check_int, check_word
from gleanrl.core.protocols import Source
from gleanrl.engine.buffer_or_recorder import Sink
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFileError
from gleanrl.recording.dataset import (
    CARD,
    DATA,
    ENDS,
    LOCK,
    NESTED,
    NO_OBSERVATION,
    OF_ENV,
    SHARDS,
    Dataset,
    card,
)
from gleanrl.recording.episode_stats import summary, total
from gleanrl.recording.formats import check_target, module_of
from gleanrl.recording.in_tensordict import Shard
from gleanrl.recording.origin import describe_env

_TERMINATED = (keys.NEXT, *keys.TERMINATED)
_ROOM, _ROOM_NBYTES = ".room", 1 << 16
"""Room for the last card, if the disk is full by then: a file that is removed before."""
_ROWS = (
    "writer after writer (workers in order), each batch after batch; in a batch environment after "
    "environment, each with its steps in order; ('collector', 'traj_ids') tells episodes apart; "
    "modulo num_envs it is the environment"
)


class Recorder(Sink):
    """Keeps frames on disk as a dataset.

    ``Collector(..., replay_buffer=Recorder(path))`` records instead of delivering: iteration yields
    ``None``, or `start` collects in the background. Worker processes and nodes write files of their
    own, so no frame passes through the learner. To learn from batches as well, iterate as usual and
    call `write`.

    Use it in a ``with`` statement. Its end shuts the collector down and finishes the dataset, also
    after an exception. Every frame that was written stays readable (`load_dataset`), even if the
    disk is full or processes are killed. The card (``card.json``) says how the recording ended.

    Example:
        >>> import tempfile, gleanrl
        >>> path = tempfile.mkdtemp()
        >>> collector = gleanrl.Collector("Pendulum-v1", frames_per_batch=50, total_frames=100)
        >>> with gleanrl.Recorder(path, env="Pendulum-v1") as recorder:
        ...     for batch in collector:
        ...         recorder.write(batch)
        >>> collector.shutdown()
        >>> gleanrl.load_dataset(path)["action"].shape
        torch.Size([100, 1])
    """

    @for_users
    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "tensordict",
        *,
        env: Any = None,
        num_envs: int | None = None,
        seed: int | None = None,
        total_frames: int | None = None,
        where: str = "workers",
        overwrite: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the directory.

        Args:
            path: Directory of the dataset: new or empty. Its last part names a Minari dataset.
            format: ``"tensordict"`` (memory-mapped), ``"minari"`` or ``"parquet"``.
            env: Environment, spec or Gymnasium id, for the card and for Minari. A collector with
                this ``replay_buffer`` fills in this and the next two arguments.
            num_envs: Number of environments of all workers.
            seed: The seed of ``set_seed`` before the first frame.
            total_frames: Expected frames; if the disk has no room for them, the first write fails.
            where: The writing processes: ``"workers"``, to a disk that all share, or ``"learner"``.
            overwrite: Remove the dataset at ``path`` with its whole directory. No other directory
                is removed, and no dataset during its recording.
            facts: Further entries of the card, as JSON.

        Raises:
            ConfigError: something is at ``path`` already, or an argument is wrong.
        """
        check_word("where", where, ("workers", "learner"))
        if num_envs is not None:
            num_envs = check_int("num_envs", num_envs, least=1)
        if total_frames is not None:
            total_frames = check_int("total_frames", total_frames, least=0)
        # User code that runs during collection may change the working directory.
        self.path = Path(path).resolve()
        """Where the dataset is."""
        self.format = format
        self.where = where
        check_target(format, self.path)
        make_way(Path(path), overwrite)
        self.facts: dict[str, Any] = {
            "status": "interrupted",
            "env": None,
            "num_envs": num_envs,
            "seed": seed,
            "rows": _ROWS,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            **({} if env is None else describe_env(env, format)),
            **dict(facts or {}),
        }
        """Further entries of the card, as JSON; may be changed until `close`."""
        self._expected = total_frames
        self._collectors: list[weakref.ref[Any]] = []
        self._terminated: set[int] = set()
        self._shard = Shard(self.path / SHARDS / "main", {}, total_frames)
        self._files = _Files(self.path, format, self.facts)
        self._token = self._files.token
        self._files.begin()
        self._finisher = weakref.finalize(self, self._files.finish)

    # -- writing ---------------------------------------------------------------------------------

    def write(self, batch: TensorDictBase) -> None:
        """Append the frames of a collector's ``batch`` ``[T]`` or ``[..., T]``.

        Frames where the mask is False are not written. Written frames are on the disk or in the
        kernel's memory, so a kill of the process does not lose them.

        Raises:
            ConfigError: an episode goes on that has terminated, so these frames are of another
                collector or dataset, whose trajectory ids are used again.
            TensorFileError: the disk is full, or these frames differ from those before in an
                entry, its shape or its dtype.
            ClosedError: after `close`.
        """
        if self._finisher is not None and not self._finisher.alive:
            raise ClosedError(f"the recorder of {self.path} was closed")
        mask = batch.get(keys.MASK, None)
        frames = (batch if mask is None else batch.exclude(keys.MASK)).reshape(batch.shape.numel())
        if mask is not None and not mask.all():
            frames = frames[mask.reshape(-1)]
        if self.format == "minari" and not self._shard.frames:
            _check_episodes(frames)
        if self._finisher is not None:  # a worker's copy has the frames of one collector
            self._check_ids(frames)
        self._shard.write(frames)

    def _check_ids(self, frames: TensorDictBase) -> None:
        """Check that no terminated episode goes on in ``frames``, and note those that terminate.

        Truncation proves nothing, because ``set_truncated`` marks episodes that go on. After
        `MultiStep`, an episode has several terminated frames.
        """
        ids, over = (frames.get(key, None) for key in (keys.TRAJ_IDS, _TERMINATED))
        if ids is None or over is None or ids.numel() != over.numel():
            return
        ids, over = ids.reshape(-1), over.reshape(-1)
        if again := self._terminated.intersection(ids[~over].tolist()):
            raise ConfigError(
                f"the episode with the trajectory id {min(again)} has terminated, and these frames "
                "continue it: two collectors or datasets number their episodes from 0. Record each "
                "to a directory of its own, or add a number to the ids of the second"
            )
        self._terminated.update(ids[over].tolist())

    def store(self, batch: TensorDictBase) -> int:
        self.write(batch)
        return 0

    @property
    def frames(self) -> int:
        """Frames written, including frames of workers."""
        return Dataset(self.path).metadata.frames if (self.path / CARD).exists() else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the frames written, before they are put into another format."""
        return Dataset(self.path).nbytes if (self.path / CARD).exists() else 0

    # -- calls of collectors ---------------------------------------------------------------------

    def attach(self, collector: Any, env: Callable[[], Any], num_envs: int) -> None:
        """Attach to ``collector``, which `close` shuts down.

        Raises:
            ConfigError: there is one already, whose trajectory ids would be used again.
        """
        if self._collectors:
            raise ConfigError(
                f"the recorder of {self.path} records another collector already; both number their "
                "episodes from 0, so record each to a directory of its own"
            )
        self._collectors.append(weakref.ref(collector))
        made = env()
        known = {} if made is None else describe_env(made, self.format)
        for name, value in {**known, "num_envs": num_envs}.items():
            if self.facts.get(name) is None:
                self.facts[name] = value
        self._files.publish()

    def seeded(self, seed: int, static: bool) -> None:
        """Note that the environments were seeded; a second time, no seed gives these data."""
        again = bool(self.frames)
        self.facts |= {"seed": None if again else seed, "static_seed": static, "reseeded": again}
        self._files.publish()

    # -- in a worker -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = ("path", "format", "where", "_token", "_expected")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.facts, self._collectors = {}, []
        self._finisher = None  # type: ignore[assignment]  # its maker finishes the dataset
        self._shard = Shard(self.path / SHARDS / f"copy-{uuid.uuid4().hex[:8]}", {}, None)

    def by_workers(self, remote: bool) -> bool:
        return self.where == "workers"

    def serve(self, worker: int, source: Source) -> None:
        """Write the frames that ``worker`` collects from ``source``, in this process.

        Raises:
            ConfigError: this machine has another disk than the learner's.
        """
        try:
            there = tensor_files.read_description(self.path / CARD).get("recording")
        except TensorFileError:
            there = None
        if there != self._token:
            raise ConfigError(
                f"worker {worker} on {socket.gethostname()} does not see the recording in "
                f"{self.path}: its disk is not the learner's; record with "
                "Recorder(..., where='learner')"
            )
        facts = {"worker": worker, **describe_env(source.get("env"), self.format)}
        name = f"worker-{worker:05d}-{uuid.uuid4().hex[:8]}"
        self._shard = Shard(self.path / SHARDS / name, facts, self._expected)

    # -- the end ---------------------------------------------------------------------------------

    def close(self, status: str = "complete") -> None:
        """Shut the collector down and finish the dataset. Idempotent.

        A recorder that is not closed is closed as ``"interrupted"`` when the interpreter ends.
        Nothing stays on the disk if no frame was written.

        Args:
            status: ``"complete"``, ``"interrupted"`` or ``"failed"``, for the card.

        Raises:
            TensorFileError: the disk is full, or the data do not suit the format. All frames stay
                readable with `load_dataset`, so another recorder can write them elsewhere.
            ConfigError: there is no such status.
        """
        check_word("status", status, ENDS)
        if self._finisher is None or not self._finisher.alive:
            return
        for collector in [found for ref in self._collectors if (found := ref()) is not None]:
            collector.shutdown(raise_on_error=False)
        self._shard.close()
        self.facts["status"] = status
        self._finisher()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close as complete, interrupted (Ctrl-C) or failed (any other exception)."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("complete" if kind is None else "interrupted" if interrupted else "failed")


def make_way(path: Path, overwrite: bool = False) -> None:
    """Check that a dataset can be written to ``path``; remove the one to overwrite."""
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not overwrite:
            raise ConfigError(
                f"{path} is not empty; choose a new directory or remove this one "
                "(Recorder(..., overwrite=True) replaces a dataset)"
            )
        try:
            status = Dataset(path).metadata.status
        except ValueError as err:
            raise ConfigError(f"{path} is not overwritten: {err}") from err
        if status == "collecting":
            raise ConfigError(f"{path} is being recorded to; choose a new directory")
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is not a directory")


def _check_episodes(frames: TensorDictBase) -> None:
    """Check that ``frames`` have the entries that Minari's episodes need."""
    found = {keys.as_key(key) for key in frames.keys(True, True)}
    after = {key[1:] for key in found if key[0] == keys.NEXT}
    seen = {key for key in found & after if key[-1] not in NO_OBSERVATION}
    has = {
        keys.format_key(keys.TRAJ_IDS): keys.TRAJ_IDS in found,
        keys.format_key(keys.ACTION): frames.get(keys.ACTION, None) is not None,
        "a reward under 'next'": any(key[-1] == "reward" for key in after),
        "end flags under 'next'": any(key[-1] in keys.END_FLAGS for key in after),
        "an observation at the root and under 'next' (compact_obs=False)": bool(seen),
    }
    if missing := [name for name, there in has.items() if not there]:
        raise TensorFileError(f"Minari's episodes need {', '.join(missing)}; the frames have none")
    if odd := [keys.format_key(key) for key in found if "/" in "".join(key)]:
        raise TensorFileError(f"rename {', '.join(sorted(odd))}: a slash makes a group in HDF5")


class _Files:
    """The directory of a recording: begun and finished, even without the `Recorder`."""

    def __init__(self, directory: Path, format: str, facts: dict[str, Any]) -> None:
        self.token = uuid.uuid4().hex
        self._directory, self._format, self._facts = directory, format, facts
        self._made = [up for up in (directory, *directory.parents) if not up.exists()]
        self._pid = os.getpid()
        self._lock = -1

    def _card(self, data: str, frames: int = 0, entries: Sequence[Any] = (), **facts: Any) -> str:
        own = {"data": data, "frames": frames, "recording": self.token, "keys": entries}
        return card({**self._facts, **facts, **own})

    def begin(self) -> None:
        """Make the directory and lock it."""
        directory = self._directory
        try:
            text = self._card(SHARDS, status="collecting")
        except (TypeError, ValueError) as err:
            raise ConfigError(f"facts and seed go into the card as JSON: {err}") from err
        try:
            (directory / SHARDS).mkdir(parents=True)
            self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # not every network file system has locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tensor_files.write_new(directory / _ROOM, bytes(_ROOM_NBYTES))
            tensor_files.write_new(directory / CARD, text.encode())
        except OSError as err:
            raise ConfigError(f"{directory} cannot be made: {err.strerror or err}") from err

    def publish(self) -> None:
        """Write the current facts to the card."""
        with contextlib.suppress(OSError):  # the last card has its room
            text = self._card(SHARDS, status="collecting")
            tensor_files.replace(self._directory / CARD, text)

    def finish(self) -> None:
        """Convert the writers' files to the format, and write the final card."""
        if os.getpid() != self._pid:  # a forked child ends
            return
        try:
            (self._directory / _ROOM).unlink(missing_ok=True)
            dataset = Dataset(self._directory)
            if dataset.metadata.frames:
                self._put_into_format(dataset)
            else:
                self._discard()
        except OSError as err:
            raise TensorFileError(
                f"{self._directory} could not be finished: {err.strerror or err}; its frames stay "
                "readable with load_dataset"
            ) from err
        finally:
            os.close(self._lock)

    def _put_into_format(self, dataset: Dataset) -> None:
        directory, facts, found = self._directory, self._facts, dataset.metadata
        facts |= {name: found.facts[name] for name in (*OF_ENV, NESTED) if name in found.facts}
        facts["writers"] = len(dataset.parts)
        text, fresh = self._card(SHARDS, status="failed"), not (directory / DATA).exists()
        try:
            if (stats := total(dataset)) is not None:
                returns, lengths = summary(stats.returns), summary(stats.lengths)
                facts |= {"episodes": stats.episodes, "returns": returns, "lengths": lengths}
            facts |= module_of(self._format).write(dataset, facts)
            tensor_files.sync_tree(directory)  # before the shards, which hold the same, are removed
            entries = [file.to_json() for file in found.files]
            text = self._card(self._format, found.frames, entries)
        except BaseException:
            if fresh:
                shutil.rmtree(directory / DATA, ignore_errors=True)
            raise
        finally:
            tensor_files.replace(directory / CARD, text)
        shutil.rmtree(directory / SHARDS)
        (directory / LOCK).unlink(missing_ok=True)

    def _discard(self) -> None:
        """Remove the files of this recording, and no other files."""
        shutil.rmtree(self._directory / SHARDS)
        for name in (LOCK, CARD, _ROOM):
            (self._directory / name).unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def versions() -> dict[str, str]:
    """Return the versions of the libraries in use."""
    found = {"python": platform.python_version()}
    for name in ("gleanrl", "torch", "tensordict", "gymnasium", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
