"""Where the numbers of `stats()` go after every batch: files, TensorBoard, W&B, or a callable.

A collector calls its loggers with `stats()` after each batch, in the thread that collects it.
"""

from __future__ import annotations

import csv
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import warn
from gleanrl.core.platforms import imported

Stats: TypeAlias = Mapping[str, int | float | bool]
LogFunction: TypeAlias = Callable[[Any], object]


class Logger:
    """Writes stats down, at most every few seconds. Its collector closes it at shutdown.

    Subclasses define `write`, and if need be `close` and `resume`.
    """

    def __init__(self, every_s: float = 0.0) -> None:
        """Write stats that come at least ``every_s`` seconds after the last written ones."""
        self._every_s, self._due = every_s, 0.0
        self._skipped: Stats | None = None

    def __call__(self, stats: Stats) -> None:
        """Write ``stats`` if it is time; the newest skipped ones are written at the end."""
        now = monotonic()
        self._skipped = stats
        if now >= self._due:
            self._due = now + self._every_s
            self.finish()

    def finish(self) -> None:
        """Write the newest skipped stats."""
        stats, self._skipped = self._skipped, None
        if stats is not None:
            self.write(stats)

    def write(self, stats: Stats) -> None:
        """Write ``stats`` down."""
        raise NotImplementedError

    def resume(self, frames: int) -> None:
        """Continue from a state of ``frames`` frames, which the collector has loaded."""
        self._skipped = None

    def close(self) -> None:
        """Close the target of `write`."""


class CSVLogger(Logger):
    """Writes one row per batch. Columns follow the first row, also of a continued file.

    When the collector loads a state, rows of the interrupted run beyond its frames are removed from
    the end of the file.

    Example:
        >>> import csv, tempfile
        >>> from gleanrl import Collector, CSVLogger
        >>> path = tempfile.mkdtemp() + "/stats.csv"
        >>> with Collector(
        ...     "CartPole-v1", frames_per_batch=50, total_frames=100, logger=CSVLogger(path)
        ... ) as collector:
        ...     for batch in collector:
        ...         pass
        >>> with open(path) as file:
        ...     [row["frames"] for row in csv.DictReader(file)]
        ['50', '100']
    """

    def __init__(self, path: str | os.PathLike[str], every_s: float = 0.0) -> None:
        """Append to ``path``; its folder is made if need be."""
        super().__init__(every_s)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", newline="")
        lines = self._lines()
        self._columns = next(csv.reader(lines), [])
        self._continues = bool(self._columns)
        if lines[1:] and not lines[-1].endswith("\n"):  # a process was killed while it wrote this
            self._keep(lines[:-1])
        elif lines and not lines[-1].endswith("\n"):
            self._file.write("\n")

    def write(self, stats: Stats) -> None:
        """Append a row.

        Raises:
            ConfigError: the file that is continued has none of its columns.
        """
        if self._continues and (missing := [name for name in stats if name not in self._columns]):
            lacks = f"{self._file.name} lacks the columns {', '.join(missing)}: log into another "
            lacks += "file, or move this one away"
            if len(missing) == len(stats):
                raise ConfigError(lacks)
            warn(f"{lacks}, to have them")
        self._continues = False
        writer = csv.DictWriter(self._file, self._columns or list(stats), extrasaction="ignore")
        if not self._columns:
            self._columns = list(stats)
            writer.writeheader()
        writer.writerow(dict(stats))
        self._file.flush()

    def resume(self, frames: int) -> None:
        """Remove the last rows of the file that have more ``frames``, back to an earlier run."""
        super().resume(frames)
        if "frames" not in self._columns:
            return
        lines = self._lines()
        at = self._columns.index("frames")
        counts = [0.0, *(float(row[at]) for row in csv.reader(lines[1:]))]
        while counts[-1] > frames:
            lines.pop()
            if counts[-2] > counts.pop():  # it is of an earlier run
                break
        self._keep(lines)

    def _lines(self) -> list[str]:
        self._file.seek(0)
        return self._file.read().splitlines(keepends=True)

    def _keep(self, lines: Sequence[str]) -> None:
        self._file.truncate(len("".join(lines).encode(self._file.encoding)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger(Logger):
    """Scalars over frames for TensorBoard (extra ``tensorboard``).

    When the collector loads a state, TensorBoard hides the earlier points beyond its frames.
    """

    def __init__(
        self, path: str | os.PathLike[str], every_s: float = 0.0, prefix: str = "collector/"
    ) -> None:
        """Write event files into the folder ``path``; names begin with ``prefix``."""
        super().__init__(every_s)
        self._prefix = prefix
        module = imported(
            "torch.utils.tensorboard", "tensorboard", "TensorBoardLogger", ImportError
        )
        self._open = partial(module.SummaryWriter, os.fspath(path))
        self._writer = self._open()

    def write(self, stats: Stats) -> None:
        """Add one point to every curve."""
        for name, value in _numbers(stats).items():
            self._writer.add_scalar(self._prefix + name, value, int(stats["frames"]))

    def resume(self, frames: int) -> None:
        """Hide the points of this folder that have more ``frames``."""
        super().resume(frames)
        self._writer.close()
        self._writer = self._open(purge_step=frames + 1)

    def close(self) -> None:
        """Write buffered data and close the files."""
        self._writer.close()


class WandbLogger(Logger):
    """Scalars for Weights & Biases (extra ``wandb``).

    When the collector loads a state, frames that the run has logged before are not logged again.
    """

    def __init__(
        self, run: Any = None, every_s: float = 0.0, prefix: str = "collector/", **init: Any
    ) -> None:
        """Log to ``run``, which stays open at the end, or to one made by ``wandb.init(**init)``."""
        super().__init__(every_s)
        self._own, self._prefix = run is None, prefix
        self._run, self._logged = run, 0
        if run is None:
            self._run = imported("wandb", "wandb", "WandbLogger", ImportError).init(**init)

    def write(self, stats: Stats) -> None:
        """Log one point of every curve."""
        if stats["frames"] > self._logged:
            self._run.log({self._prefix + name: value for name, value in _numbers(stats).items()})

    def resume(self, frames: int) -> None:
        """Leave out points up to the last one that the run has."""
        super().resume(frames)
        self._logged = self._run.summary.get(self._prefix + "frames", 0)

    def close(self) -> None:
        """Finish the run if this logger made it."""
        if self._own:
            self._run.finish()


def _numbers(stats: Stats) -> dict[str, int | float]:
    """Leave out figures that are not known yet."""
    return {name: value for name, value in stats.items() if not math.isnan(value)}


class Loggers:
    """The loggers of a collector. One that raises is left out from then on, with a warning."""

    def __init__(self, loggers: LogFunction | Sequence[LogFunction] | None) -> None:
        several = loggers if isinstance(loggers, list | tuple) else (loggers,)
        self.active = [logger for logger in several if logger is not None]
        """Those that have not raised."""
        for logger in self.active:
            if not callable(logger):
                raise ConfigError(
                    f"logger ({logger!r:.80}) must be a callable that takes a dictionary, or a "
                    "list of such; gleanrl.CSVLogger(path) is one"
                )

    def log(self, stats: Stats) -> None:
        """Call all of them."""
        for logger in tuple(self.active):
            self._attempt(logger, partial(logger, stats))

    def resume(self, frames: int) -> None:
        """Tell each `Logger` among them that a state of ``frames`` frames was loaded."""
        for logger in tuple(self.active):
            if isinstance(logger, Logger):
                self._attempt(logger, partial(logger.resume, frames))

    def close(self) -> None:
        """Close each `Logger` among them. Idempotent."""
        loggers, self.active = self.active, []
        for logger in loggers:
            if isinstance(logger, Logger):
                self._attempt(logger, logger.finish)
                self._attempt(logger, logger.close)

    def _attempt(self, logger: LogFunction, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as err:
            if logger in self.active:
                self.active.remove(logger)
            frames = "".join(traceback.format_exception(err))
            warn(
                f"{logger!r:.80} is not called any more, it raised {type(err).__name__}; "
                f"collection continues\n{frames}"
            )
