"""Every fault in every kind of collector: the promise, its time, and nothing left behind.

``pytest tests/faults`` runs a sample; with ``GLEANRL_FAULTS=all`` in the environment all cells run,
and ``python -m tools.faults`` prints them as a table. Ray's columns run if ``GLEANRL_FAULTS``
contains ``ray``.
"""

import collections
import functools
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import rig
import second_host
import warm

from gleanrl import (
    Collector,
    CollectorTimeout,
    ConfigError,
    DistributedCollector,
    EnvError,
    GleanError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    Recorder,
    ReplayBuffer,
    WorkerDied,
    load_dataset,
)
from gleanrl.testing import FaultyEnv, InjectedError

ASKED = os.environ.get("GLEANRL_FAULTS", "")
AT = 20
"""The step of the fault: in the third rollout of its worker."""
PER_WORKER = 8
TIMEOUT_S = 1.0
ENOUGH = 12
"""Batches after which collection goes on, in spite of the fault."""

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:.*collection (continues|waits)|.*takes part again"),
    pytest.mark.filterwarnings("ignore:.*was built anew"),
]


# -- the table -------------------------------------------------------------------------------------


def _ray(envs, **options):
    from gleanrl import RayCollector

    return RayCollector(envs, remote_configs={"num_cpus": 0}, start_timeout=280.0, **options)


@dataclass(frozen=True)
class Column:
    """A kind of collector.

    Attributes:
        make: Makes one of environments.
        parts: Workers whose frames one batch has.
        modes: What it supports beside raising.
        named: How an error names the part that fails.
    """

    make: object
    parts: int = 2
    modes: frozenset = frozenset({"relaunch", "continue", "restart"})
    named: str = "(worker|node|actor) 1|(workers|nodes) \\[1\\]|environment 1"
    workers: bool = True
    background: bool = False


def _over_parallel_env(envs, on_failure="raise", timeout=None, **options):
    env = ParallelEnv(2, envs, on_failure=on_failure, timeout=timeout)
    return Collector(env, **options)


nodes = functools.partial(DistributedCollector, launcher="mp", tcp_port=0)
only_restart = frozenset({"restart"})
COLUMNS = {
    "one process": Column(Collector, 2, only_restart, "environment 1", workers=False),
    "ParallelEnv": Column(_over_parallel_env, 2, frozenset({"relaunch"})),
    "sync": Column(MultiSyncCollector),
    "async": Column(MultiAsyncCollector, 1),
    "central": Column(functools.partial(MultiSyncCollector, inference="central")),
    "central async": Column(functools.partial(MultiAsyncCollector, inference="central"), 1),
    "background": Column(MultiAsyncCollector, 1, background=True),
    "nodes": Column(functools.partial(nodes, sync=True)),
    "nodes async": Column(functools.partial(nodes, sync=False), 1),
    "Ray": Column(functools.partial(_ray, sync=True)),
    "Ray async": Column(functools.partial(_ray, sync=False), 1),
}
WITHOUT_RAY = [name for name in COLUMNS if not name.startswith(("Ray", "ParallelEnv"))]


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        act: A fault of `gleanrl.testing`.
        error: The class of the error that is raised.
        says: What the error says.
        modes: The settings that may save the run: ``"relaunch"``, ``"continue"``, ``"restart"``.
        options: Of the collector.
        here: Whether it can happen in the learner's own process.
        columns: The kinds of collectors in which it can happen at all.
    """

    act: object
    error: type = WorkerDied
    says: str = ""
    modes: tuple = ("relaunch",)
    when: str = "step"
    options: dict = field(default_factory=dict)
    here: bool = True
    columns: tuple = tuple(COLUMNS)


def exhaust():
    """Have no more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with rig.limited(resource.RLIMIT_AS, used + (64 << 20)):
        np.ones(1 << 28)


def use_up_descriptors():
    """Have no more descriptors in this process, from now on."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    open(os.devnull)  # noqa: SIM115


LATE = {"timeout": TIMEOUT_S}
FINITE = {"check_finite": True}
INJECTED = "this fault was injected"
ANEW = ("restart",)
BOTH = ("relaunch", "continue")
FAULTS = {
    "exception in step": Fault("raise", InjectedError, INJECTED, ANEW),
    "exception in reset": Fault("raise", InjectedError, INJECTED, ANEW, "reset"),
    "exception in build": Fault("raise", InjectedError, INJECTED, ANEW, "build"),
    "exception that cannot be sent": Fault("raise-unpicklable", RuntimeError, INJECTED, ANEW),
    "no memory": Fault(exhaust, MemoryError, "", ANEW),
    "no descriptors in a worker": Fault(
        use_up_descriptors, OSError, "Too many open", here=False, modes=()
    ),
    "SIGKILL": Fault("kill", says="signal 9", modes=BOTH, here=False),
    "SIGKILL in build": Fault("kill", says="signal 9", when="build", modes=(), here=False),
    "SIGSEGV": Fault("segfault", says="signal 11", here=False),
    "sys.exit": Fault("sys.exit", says="code 4", here=False),
    "os._exit": Fault("os._exit", says="code 3", here=False),
    "hang": Fault("hang", CollectorTimeout, options=LATE, here=False),
    "hang in build": Fault(
        "hang",
        CollectorTimeout,
        when="build",
        modes=(),
        options={"start_timeout": TIMEOUT_S},
        here=False,
        # Ray takes longer to start an actor, and a ParallelEnv has no such limit.
        columns=tuple(name for name in COLUMNS if not name.startswith(("Ray", "ParallelEnv"))),
    ),
    "hang that holds the GIL": Fault("hang-gil", CollectorTimeout, options=LATE, here=False),
    "SIGSTOP": Fault("stop", CollectorTimeout, modes=BOTH, options=LATE, here=False),
    "NaN": Fault("nan", EnvError, "check_finite", (), options=FINITE),
    "wrong shape": Fault("shape", EnvError, r"\(2, 1\)", ()),
    "wrong dtype": Fault("dtype", EnvError, "float32", ()),
    "slow by 50 times": Fault("sleep", type(None), modes=()),
    "network cut": Fault(
        functools.partial(second_host.cut, second_host.NAME),
        says="no sign of life|connection",
        modes=BOTH,
        options={"launcher": second_host.OnBothHosts(), "heartbeat": 2.0},
        here=False,
        columns=("nodes", "nodes async"),
    ),
}


@dataclass(frozen=True)
class Cell:
    fault: str
    column: str
    mode: str = "raise"

    def __str__(self):
        return f"{self.fault}, {self.column}, {self.mode}"


def cells():
    """Yield the cells that can be: a fault, a collector and a setting."""
    for (name, fault), (kind, column) in itertools.product(FAULTS.items(), COLUMNS.items()):
        if kind in fault.columns and (column.workers or fault.here):
            modes = [mode for mode in fault.modes if mode in column.modes]
            yield from (Cell(name, kind, mode) for mode in ("raise", *modes))


SAMPLE = {
    Cell("exception in step", "background", "restart"),
    Cell("exception in build", "one process"),
    Cell("exception that cannot be sent", "async"),
    Cell("no memory", "sync"),
    Cell("no descriptors in a worker", "central async"),
    Cell("SIGKILL", "background", "relaunch"),
    Cell("SIGKILL", "central async"),
    Cell("SIGKILL", "nodes", "relaunch"),
    Cell("SIGKILL", "central async", "relaunch"),
    Cell("SIGSTOP", "central", "relaunch"),
    Cell("SIGKILL", "ParallelEnv", "relaunch"),
    Cell("SIGKILL", "central", "continue"),
    Cell("SIGSTOP", "central async", "continue"),
    Cell("exception in build", "central", "restart"),
    Cell("exception in step", "central async", "restart"),
    Cell("SIGSTOP", "async", "relaunch"),
    Cell("hang in build", "central async"),
    Cell("NaN", "central async"),
    Cell("wrong dtype", "nodes"),
    Cell("slow by 50 times", "async"),
    Cell("network cut", "nodes", "relaunch"),
}


def chosen(every, sample):
    """Return the cells to run, as parameters."""
    run = list(every) if ASKED else [cell for cell in every if cell in sample]
    return [
        pytest.param(cell, id=str(cell))
        for cell in run
        if not cell.column.startswith("Ray") or "ray" in ASKED
    ]


class Counting(rig.Count):
    """Observes its number and its steps as float32."""

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float32)

    def _observe(self, where):
        return super()._observe(where).astype(np.float32)


# -- running a cell --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both_hosts():
    """The launcher of nodes, one of which is behind a cable."""
    with second_host.second_host():
        yield FAULTS["network cut"].options["launcher"]


@pytest.fixture
def tidy(request):
    """Nothing that a cell used is left behind."""
    cell = request.getfixturevalue("cell")
    column, away = cell.column, cell.fault == "network cut"
    launcher = request.getfixturevalue("both_hosts") if away else None
    if column.startswith("Ray"):
        yield
        return
    request.getfixturevalue("_warm_nodes" if column.startswith("nodes") else "_warm_workers")
    with rig.nothing_left_behind():
        yield
        if launcher is not None:
            launcher.await_ends(rig.LIMIT * rig.load())


@pytest.fixture
def mark(tmp_path):
    """The file that a fault makes when it happens."""
    return tmp_path / "happened"


class Run:
    """A collector in which a fault happens."""

    def __init__(self, cell, mark):
        self.fault, self.column = FAULTS[cell.fault], COLUMNS[cell.column]
        fault = self.fault
        at = AT if fault.when == "step" else 4
        faulty = functools.partial(
            FaultyEnv,
            functools.partial(Counting, 1, pause=0.001),
            fault.act,
            when=fault.when,
            at=at,
            seconds=0.05,
            once=None if fault.act == "sleep" else mark,
        )
        self.buffer = None
        options = dict(fault.options)
        if cell.mode in ("relaunch", "continue"):
            options["on_failure"] = cell.mode
        if cell.mode == "restart":
            options["on_env_error"] = "restart"
        if self.column.background:
            self.buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8)
            options["replay_buffer"] = self.buffer
        self.frames = []
        self.collector = self.column.make(
            [functools.partial(Counting, 0, pause=0.001), faulty],
            frames_per_batch=PER_WORKER * self.column.parts,
            total_frames=-1,
            **options,
        )

    def batches(self):
        """Yield after each batch, or now and then in the background."""
        if self.buffer is None:
            for batch in self.collector:
                self.take(batch)
                yield
        self.collector.start()
        while True:
            self.collector.update_policy_weights_()  # raises errors of the background
            time.sleep(0.01)  # the time of a learner's step
            yield

    def take(self, batch):
        rows = batch.reshape(-1)
        mask = rows.get(("collector", "mask"), None)
        rows = rows if mask is None else rows[mask]
        ids = rows["collector", "traj_ids"].tolist()
        self.frames += [(*row, key) for row, key in zip(rig.rows(rows), ids, strict=True)]

    def lives(self, number):
        """Return how often environment ``number`` was built."""
        return sum(frame[:2] == (number, 1) for frame in self.frames)

    def check_frames(self, lives):
        """Check that the steps of each trajectory follow each other, in so many lives."""
        if self.buffer is not None:
            self.take(self.buffer[:])
        for number, most in ((0, 1), (1, lives)):
            own = [frame[1:] for frame in self.frames if frame[0] == number]
            assert self.lives(number) <= most, f"environment {number}: {own}"
            for (step, key), (later, other) in itertools.pairwise(own):
                assert later == step + 1 or key != other, f"environment {number}: {own}"


def until_error(cell, mark):
    """Collect until an error; return it and the frames' check."""
    began = time.time()
    run = None
    try:
        run = Run(cell, mark)
        for _ in itertools.islice(run.batches(), 2000):
            pass
    except BaseException as error:
        happened = mark.stat().st_mtime if mark.exists() else began
        took = time.time() - happened
        if run is not None:
            run.check_frames(1)
            if not run.collector.closed:
                run.collector.shutdown(raise_on_error=False)
        return error, took
    raise AssertionError("nothing was raised in 2000 batches")


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("cell", chosen(cells(), SAMPLE))
def test_a_fault(cell, tidy, mark, record_property):
    said, took = PROMISES[cell.mode if cell.fault != "slow by 50 times" else "slow"](cell, mark)
    record_property("cell", [cell.fault, cell.column, cell.mode, said, took])


def is_raised(cell, mark):
    fault, column = FAULTS[cell.fault], COLUMNS[cell.column]
    error, took = until_error(cell, mark)
    assert isinstance(error, fault.error), repr(error)
    text = text_of(error)
    ray = cell.column.startswith("Ray")  # which tells no signal
    assert re.search("died" if ray and fault.error is WorkerDied else fault.says, text), text
    assert re.search(column.named, text), f"it does not name {column.named}: {text}"
    late = TIMEOUT_S if fault.error is CollectorTimeout else fault.options.get("heartbeat", 0.0)
    assert took < late + rig.LIMIT * rig.load(), f"it took {took:.1f} s"
    return next(kind.__name__ for kind in type(error).__mro__ if kind is fault.error), took


def is_survived(cell, mark):
    run = Run(cell, mark)
    alone = cell.mode == "continue"
    lives = 1 if alone or run.fault.when == "build" else 2
    began = longest = 0.0
    after = 0
    with rig.in_time(4 * rig.LIMIT):
        for number, _ in enumerate(run.batches()):
            now = time.monotonic()
            longest = max(longest, now - began) if number else 0.0
            began = now
            stats = run.collector.stats()
            there = run.lives(1) if run.buffer is None else lives
            filled = run.buffer is None or len(run.buffer) > 500
            alive = alone or stats.get("workers_alive") == stats.get("workers")
            # A collector does not count replacements of a ParallelEnv.
            counted = stats.get(COUNTERS[cell.mode], there - 1) == 1
            after += counted and alive and there == lives and filled
            if after == 3:
                break
    run.collector.shutdown()
    run.check_frames(lives)
    return "goes on", longest


def is_waited_for(cell, mark):
    run = Run(cell, mark)
    began = time.monotonic()
    with rig.in_time(4 * rig.LIMIT):
        for _ in itertools.islice(run.batches(), ENOUGH):
            pass
    run.collector.shutdown()
    run.check_frames(1)
    return "goes on", time.monotonic() - began


COUNTERS = {"relaunch": "relaunches", "continue": "workers_lost", "restart": "env_restarts"}
PROMISES = {
    "raise": is_raised,
    "relaunch": is_survived,
    "continue": is_survived,
    "restart": is_survived,
    "slow": is_waited_for,
}


# -- machines that have no more of something -------------------------------------------------------


def collector_of(column, envs, parts=None, **options):
    """Make a collector of the kind ``column``."""
    kind = COLUMNS[column]
    return kind.make(envs, frames_per_batch=(parts or kind.parts) * PER_WORKER, **options)


def the_disk_is_full(column, small_disk):
    """Record on a disk until it is full."""
    disk = small_disk(4 << 20)
    recorder = Recorder(disk / "data")
    envs = [functools.partial(rig.Wide, number, pause=0.001) for number in (0, 1)]
    began = time.monotonic()
    with (
        pytest.raises((OSError, GleanError), match=r"(?i)no space|disk") as caught,
        recorder,
        collector_of(column, envs, replay_buffer=recorder, total_frames=-1) as collector,
    ):
        collections.deque(itertools.islice(collector, 200), 0)
    took = time.monotonic() - began
    rows = load_dataset(disk / "data")["next", "observation"][:, :, 0]
    for number in (0, 1):
        steps = rows[rows[:, 0] == number][:, 1].tolist()
        assert steps[:20] == list(range(1, 21))
        assert steps == sorted(set(steps))  # those of a rollout that found no room are not there
    return type(caught.value).__name__, took


def no_descriptors(column, small_disk):
    """Build a collector where no file can be opened any more."""
    began = time.monotonic()
    with (
        rig.in_time(),
        pytest.raises(ConfigError, match="RLIMIT_NOFILE"),
        rig.limited(resource.RLIMIT_NOFILE, 3),
    ):
        collector_of(column, [rig.counting(0), rig.counting(1)])
    return "ConfigError", time.monotonic() - began


def no_descriptors_for_a_replacement(column, small_disk):
    """Lose a worker where no file can be opened any more."""
    envs = [rig.counting(0, pause=0.001), rig.counting(1, pause=0.001)]
    options = {"on_failure": "relaunch", "max_relaunches": 1, "total_frames": -1}
    with collector_of(column, envs, **options) as collector:
        collector.next()
        pid = int(collector.stats("per_worker")["worker_1/pid"])
        os.kill(pid, signal.SIGKILL)
        rig.await_end([pid])
        began = time.monotonic()
        with (
            rig.in_time(),
            warnings.catch_warnings(record=True) as told,
            rig.limited(resource.RLIMIT_NOFILE, 3),
        ):
            warnings.simplefilter("always")
            if COLUMNS[column].parts == 2:
                with pytest.raises((WorkerDied, ConfigError), match=r"Too many open files"):
                    collector.next()
                said = "WorkerDied"
            else:
                while not any("for good" in str(one.message) for one in told):
                    collector.next()
                said = "goes on without it"
    return said, time.monotonic() - began


def ran(prefix, call, python=warm.PYTHON):
    """Call a function of this file in a program that ``prefix`` starts; return how it ended."""
    command = [*prefix, str(python), "-c", script(call)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def fork_fails(column, small_disk, *, later=False):
    """Build a collector, or lose a worker, where no process can be forked any more."""
    if os.geteuid() or not Path("/usr/bin/setpriv").exists():
        pytest.skip("limiting the processes of another user takes root and setpriv")
    rights = "+dac_override,+dac_read_search,+kill,+sys_ptrace"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    user += [f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    done = ran(user, f"without_processes({column!r}, {later})")
    said, _, took = done.stdout.partition(" ")
    assert said, done.stderr
    return said, float(took)


def without_processes(column, later):
    """Print which error is raised, and when, where no process can be forked any more."""
    MultiSyncCollector([rig.counting()], frames_per_batch=4).shutdown()  # its server stays
    (forks,) = rig._children(os.getpid())
    options = {"on_failure": "relaunch", "max_relaunches": 1} if later else {}

    def forbid():
        resource.prlimit(forks, resource.RLIMIT_NPROC, (1, 1))

    if not later:
        forbid()
    began = time.monotonic()
    try:
        collector = collector_of(column, [rig.counting(0), rig.counting(1)], **options)
        forbid()
        os.kill(int(collector.stats("per_worker")["worker_1/pid"]), signal.SIGKILL)
        began = time.monotonic()
        for _ in range(9):
            collector.next()
    except WorkerDied as error:
        assert "no process could be started" in str(error)  # noqa: PT017
        sys.stdout.write(f"WorkerDied {time.monotonic() - began}")


def shared_memory_is_full(column, small_disk):
    """Collect where ``/dev/shm`` has no room."""
    fill = "mount -t tmpfs -o size=4096 none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    enter = ["unshare", "--mount", "sh", "-c", f'{fill} && exec "$0" "$@"']
    if os.geteuid() or not shutil.which("unshare") or subprocess.run([*enter, "true"]).returncode:
        pytest.skip("a /dev/shm of one's own takes root")
    done = ran(enter, f"without_shared_memory({column!r})", warm.START)
    assert not done.returncode, done.stderr
    return "goes on", float(done.stdout)


def without_shared_memory(column):
    """Print how long some batches of several megabytes take where ``/dev/shm`` is full."""
    with pytest.raises(OSError, match="No space"):
        Path("/dev/shm/more").write_bytes(bytes(1))
    began = time.monotonic()
    envs = [functools.partial(rig.Wide, number) for number in (0, 1)]
    with collector_of(column, envs, total_frames=-1) as collector:
        if not COLUMNS[column].background:
            collections.deque(itertools.islice(collector, ENOUGH), 0)
    sys.stdout.write(f"{time.monotonic() - began}")


def the_clock_jumps(column, small_disk):
    """Collect with a time limit while the date of this machine changes."""
    began = time.monotonic()
    envs = [functools.partial(Counting, number, pause=0.001) for number in (0, 1)]
    options = {"timeout": TIMEOUT_S} if COLUMNS[column].workers else {}
    jumps = itertools.cycle([0.0, 86_400.0, -86_400.0])
    frames = 0
    with (
        rig.in_time(),
        pytest.MonkeyPatch.context() as patch,
        collector_of(column, envs, total_frames=-1, **options) as collector,
    ):
        now = time.time
        patch.setattr(time, "time", lambda: now() + next(jumps))
        for _ in range(ENOUGH):
            frames += collector.next().numel()
        stats = collector.stats()
        assert stats["frames"] == frames == ENOUGH * COLUMNS[column].parts * PER_WORKER
    return "goes on", time.monotonic() - began


SCARCE = {
    "full disk of a recording": (the_disk_is_full, WITHOUT_RAY),
    "no descriptors at the start": (no_descriptors, WITHOUT_RAY[1:]),
    "no descriptors for a replacement": (no_descriptors_for_a_replacement, ["sync", "async"]),
    "full /dev/shm": (shared_memory_is_full, WITHOUT_RAY),
    "the date changes": (the_clock_jumps, [name for name in COLUMNS if name != "background"][:-1]),
    "fork fails at the start": (fork_fails, ["sync", "async", "central", "central async"]),
    "fork fails for a replacement": (functools.partial(fork_fails, later=True), ["sync"]),
}
SCARCE_CELLS = [Cell(name, column) for name, (_, columns) in SCARCE.items() for column in columns]


@pytest.mark.parametrize(
    "cell",
    chosen(
        SCARCE_CELLS,
        {
            Cell("full disk of a recording", "sync"),
            Cell("no descriptors at the start", "central async"),
            Cell("full /dev/shm", "async"),
            Cell("the date changes", "sync"),
            Cell("no descriptors for a replacement", "sync"),
        },
    ),
)
def test_a_machine_without(cell, tidy, small_disk, record_property):
    said, took = SCARCE[cell.fault][0](cell.column, small_disk)
    record_property("cell", [cell.fault, cell.column, cell.mode, said, took])


# -- the learner -----------------------------------------------------------------------------------


def script(call):
    """Return a program that imports this file and calls a function in it."""
    return f"import sys; sys.path[:0] = {sys.path!r}; import test_matrix; test_matrix.{call}"


def learn(column, act, mark):
    """Collect for ever; print the processes below this one after a batch."""
    faulty = rig.counting(1, pause=0.001)
    if act is not None:
        faulty = functools.partial(FaultyEnv, faulty, act, at=AT, once=mark)
    options = {"total_frames": -1}
    if COLUMNS[column].background:
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8)
    collector = collector_of(column, [rig.counting(0, pause=0.001), faulty], **options)
    if COLUMNS[column].background:
        collector.start()
    else:
        collector.next()
    found, todo = [], [os.getpid()]
    while todo:
        below = rig._children(todo.pop())
        found += below
        todo += below
    sys.stdout.write(" ".join(map(str, found)) + "\n")
    sys.stdout.flush()
    while True:
        if COLUMNS[column].background:
            collector.update_policy_weights_()
            time.sleep(0.01)
        else:
            collector.next()


SIGNALS = {
    f"learner {kind.name}{', a worker holds the GIL' if act else ''}": (kind, act)
    for kind, act in itertools.product(
        (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (None, "hang-gil")
    )
}
LEARNER_CELLS = [
    Cell(name, column)
    for (name, (_, act)), column in itertools.product(SIGNALS.items(), WITHOUT_RAY)
    if COLUMNS[column].workers or not act
]


@pytest.mark.parametrize(
    "cell",
    chosen(
        LEARNER_CELLS,
        {
            Cell("learner SIGKILL, a worker holds the GIL", "central async"),
            Cell("learner SIGTERM, a worker holds the GIL", "async"),
            Cell("learner SIGINT, a worker holds the GIL", "central"),
        },
    ),
)
def test_a_learner_that_ends(cell, python, mark, record_property):
    how, act = SIGNALS[cell.fault]
    shared = rig.shared_files()
    call = script(f"learn({cell.column!r}, {act!r}, {str(mark)!r})")
    with subprocess.Popen(
        [python, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as learner:
        line = learner.stdout.readline()
        pids = [int(word) for word in line.split()]
        try:
            assert pids or not COLUMNS[cell.column].workers, learner.stderr.read()
            if act:
                rig.until(mark.exists)
            began = time.monotonic()
            learner.send_signal(how)
            rig.await_end([*pids, learner.pid])
            took = time.monotonic() - began
        finally:
            learner.kill()
    rig.await_shared_files(shared)
    record_property("cell", [cell.fault, cell.column, "raise", "all end", took])
