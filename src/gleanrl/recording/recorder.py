"""What keeps the frames of a collector on disk, whatever ends the collection."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core.errors import ClosedError, ConfigError
from gleanrl.core.keys import MASK
from gleanrl.core.options import check_int
from gleanrl.core.protocols import Source
from gleanrl.engine.sink import Sink
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFileError
from gleanrl.recording import formats
from gleanrl.recording.dataset import (
    CARD,
    ENDS,
    FORMAT,
    FORMATS,
    LOCK,
    NESTED,
    SHARDS,
    VERSION,
    Dataset,
)
from gleanrl.recording.origin import OF_ENV, describe_env
from gleanrl.recording.shard import Shard

_ROOM, _ROOM_NBYTES = ".room", 1 << 16
"""Room for the last card, if the disk is full by then: a file that is removed before."""
_OF_FILES = (
    *("format", "format_version", "data", "frames", "recording", "keys", "columns"),
    *(NESTED, "rows", "status"),
)
"""What a card says of the files, not of where the frames came from."""
_FROM_SHARDS = (*OF_ENV, NESTED)
"""What the card takes over from those of the writers."""
_CONVERTED_BYTES = 1 << 26
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
            env: Environment, spec or Gymnasium id, for the card and for Minari. A collector whose
                ``replay_buffer`` this is says that itself, and the next two.
            num_envs: Environments of all workers.
            seed: What ``set_seed`` was called with before the first frame.
            total_frames: Frames to expect: if the disk has no room for them, the first write fails.
            where: What writes: ``"workers"``, to a disk that all share, or ``"learner"``.
            overwrite: Remove the dataset that is at ``path``, with all that its directory holds. No
                other directory is removed, and none that is being recorded to.
            facts: More for the card, as JSON.

        Raises:
            ConfigError: something is at ``path`` already, or an argument is wrong.
        """
        if format not in FORMATS:
            raise ConfigError(f"format ({format!r}) must be one of {', '.join(map(repr, FORMATS))}")
        if where not in ("workers", "learner"):
            raise ConfigError(f"where ({where!r}) must be 'workers' or 'learner'")
        if num_envs is not None:
            num_envs = check_int("num_envs", num_envs, least=1)
        if total_frames is not None:
            total_frames = check_int("total_frames", total_frames, least=0)
        # Whatever runs while data are collected may change the working directory.
        self.path = Path(path).resolve()
        """Where the dataset is."""
        self.format = format
        self.where = where
        formats.check(format, self.path)
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
        """What the card says beside the layout, as JSON; may be changed until `close`."""
        self._token = uuid.uuid4().hex
        try:
            self._card()
        except (TypeError, ValueError) as err:
            raise ConfigError(f"facts and seed go into the card as JSON: {err}") from err
        self._expected = total_frames
        self._collectors: list[weakref.ref[Any]] = []
        self._shard = Shard(self.path / SHARDS / "main", {}, total_frames)
        made = [up for up in (self.path, *self.path.parents) if not up.exists()]
        lock = _begin(self.path, self._card)
        self._finisher = weakref.finalize(
            self, _finish, self.path, format, self.facts, self._token, (lock, os.getpid()), made
        )

    # -- writing ---------------------------------------------------------------------------------

    def write(self, batch: TensorDictBase) -> None:
        """Append the frames of ``batch`` ``[T]`` or ``[..., T]`` as collectors deliver it.

        Frames that its mask leaves out are not written. What was written is on the disk (or in the
        kernel's hands, which a killed process does not affect).

        Raises:
            TensorFileError: the disk is full, or these frames differ from those before in an
                entry, its shape or its dtype.
            ClosedError: after `close`.
        """
        if self._finisher is not None and not self._finisher.alive:
            raise ClosedError(f"the recorder of {self.path} was closed")
        mask = batch.get(MASK, None)
        frames = (batch if mask is None else batch.exclude(MASK)).reshape(batch.shape.numel())
        if mask is not None and not mask.all():
            frames = frames[mask.reshape(-1)]
        if not self._shard.frames:
            formats.check_frames(self.format, frames)
        self._shard.write(frames)

    def store(self, batch: TensorDictBase) -> int:
        """Write a batch of a collector; return the frames that could not be stored: none."""
        self.write(batch)
        return 0

    @property
    def frames(self) -> int:
        """Frames written, those of workers included."""
        return Dataset(self.path).metadata.frames if (self.path / CARD).exists() else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the frames written, before they are put into another format."""
        return Dataset(self.path).nbytes if (self.path / CARD).exists() else 0

    # -- what collectors say ---------------------------------------------------------------------

    def attach(self, collector: Any, env: Callable[[], Any], num_envs: int) -> None:
        """Belong to ``collector``: `close` shuts it down.

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
        self._publish()

    def seeded(self, seed: int, static: bool) -> None:
        """Note that the environments were seeded; a second time, no seed gives these data."""
        again = bool(self.frames)
        self.facts |= {"seed": None if again else seed, "static_seed": static, "reseeded": again}
        self._publish()

    def _publish(self) -> None:
        with contextlib.suppress(OSError):  # the last card has its room
            tensor_files.replace(self.path / CARD, self._card())

    def _card(self) -> str:
        return _card({**self.facts, "status": "collecting"}, self._token, SHARDS, 0, [])

    # -- in a worker -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = ("path", "format", "where", "_token", "_expected")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.facts, self._collectors = {}, []
        self._finisher = None  # type: ignore[assignment]  # whoever made it finishes the dataset
        self._shard = Shard(self.path / SHARDS / f"copy-{uuid.uuid4().hex[:8]}", {}, None)

    def by_workers(self, remote: bool) -> bool:
        """Tell whether workers write files of their own, as `where` says."""
        return self.where == "workers"

    def serve(self, worker: int, source: Source) -> None:
        """Write what ``worker`` collects from ``source``, in this process.

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
                readable with `load_dataset`, and `convert_dataset` can try again elsewhere.
            ConfigError: there is no such status.
        """
        if status not in ENDS:
            raise ConfigError(f"status ({status!r}) must be one of {', '.join(map(repr, ENDS))}")
        if self._finisher is None or not self._finisher.alive:
            return
        for collector in [found for ref in self._collectors if (found := ref()) is not None]:
            collector.shutdown(raise_on_error=False)
        self._shard.close()
        self.facts["status"] = status
        self._finisher()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Close as complete, interrupted (Ctrl-C) or failed (any other exception)."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("complete" if kind is None else "interrupted" if interrupted else "failed")


def convert_dataset(
    source: str | os.PathLike[str], target: str | os.PathLike[str], format: str
) -> None:
    """Write a dataset in another format, also one whose recording was killed.

    Args:
        source: What a `Recorder` wrote, in any format.
        target: A new directory.
        format: One of the formats of a `Recorder`.

    Raises:
        ConfigError: there is no dataset, or something is at ``target`` already.
        TensorFileError: files are damaged, the disk is full, or the data do not suit the format.
    """
    dataset = Dataset(Path(source))
    facts = dict(dataset.metadata.facts)
    for raw in dataset.raw[:1]:
        facts |= {name: raw.metadata.facts[name] for name in OF_ENV if name in raw.metadata.facts}
    for name in _OF_FILES:
        facts.pop(name, None)
    row = sum(file.nbytes for file in dataset.metadata.files)
    size = max(1, _CONVERTED_BYTES // max(row, 1))
    recorder = Recorder(target, format, facts=facts)
    try:
        for part in dataset.parts:
            entries = {file.key: part.read(file.key) for file in part.files}
            for start in range(0, part.frames, size):
                rows = {key: value[start : start + size] for key, value in entries.items()}
                recorder.write(dataset.frames(rows))
    except BaseException:
        recorder.close("failed")
        raise
    recorder.close(dataset.metadata.status)


def make_way(path: Path, overwrite: bool = False) -> None:
    """Check that a dataset can be written to ``path``; remove the one that is to be overwritten.

    Raises:
        ConfigError: something is there already.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not overwrite:
            raise ConfigError(f"{path} is not empty; choose a new directory")
        try:
            status = Dataset(path).metadata.status
        except ValueError as err:
            raise ConfigError(f"{path} is not overwritten: {err}") from err
        if status == "collecting":
            raise ConfigError(f"{path} is being recorded to; choose a new directory")
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is not a directory")


def _begin(directory: Path, card: Any) -> int:
    """Make ``directory`` and lock it; return the lock."""
    try:
        (directory / SHARDS).mkdir(parents=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # not every network file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tensor_files.write_new(directory / _ROOM, bytes(_ROOM_NBYTES))
        tensor_files.write_new(directory / CARD, card().encode())
    except OSError as err:
        raise ConfigError(f"{directory} cannot be made: {err.strerror or err}") from err
    return lock


def _finish(
    directory: Path,
    format: str,
    facts: dict[str, Any],
    token: str,
    lock: tuple[int, int],
    made: list[Path],
) -> None:
    """Put what writers left into its format, and write the final card."""
    if os.getpid() != lock[1]:  # a forked child ends
        return
    try:
        (directory / _ROOM).unlink(missing_ok=True)
        dataset = Dataset(directory)
        if not dataset.metadata.frames:
            _discard(directory, made)
            return
        own = dataset.raw[0].metadata.facts
        facts |= {name: own[name] for name in _FROM_SHARDS if own.get(name) is not None}
        facts["writers"] = facts.get("writers", len(dataset.raw))
        data, entries, frames = SHARDS, [], 0
        try:
            facts |= formats.summary(dataset)
            facts |= formats.write(format, dataset, facts)
            tensor_files.sync_tree(directory)  # before the shards, which hold the same, are removed
            data, frames = format, dataset.metadata.frames
            entries = [file.to_json() for file in dataset.metadata.files]
        except BaseException:
            facts["status"] = "failed"
            raise
        finally:
            text = _card(facts, token, data, frames, entries)
            tensor_files.replace(directory / CARD, text)
        shutil.rmtree(directory / SHARDS)
        (directory / LOCK).unlink(missing_ok=True)
    except OSError as err:
        raise TensorFileError(
            f"{directory} could not be finished: {err.strerror or err}; its frames stay readable "
            "with load_dataset"
        ) from err
    finally:
        os.close(lock[0])


def _discard(directory: Path, made: list[Path]) -> None:
    """Remove what this recording made, and nothing that somebody else put there."""
    shutil.rmtree(directory / SHARDS)
    for name in (LOCK, CARD, _ROOM):
        (directory / name).unlink(missing_ok=True)
    for folder in made:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _card(
    facts: Mapping[str, Any],
    token: str,
    data: str,
    frames: int,
    keys: list[dict[str, Any]],
) -> str:
    head = {"format": FORMAT, "format_version": VERSION, "data": data, "frames": frames}
    content = {**head, **facts, "recording": token, "keys": keys}
    return json.dumps(content, indent=2) + "\n"


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"python": platform.python_version()}
    for name in ("gleanrl", "torch", "tensordict", "gymnasium", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
