"""Runs TorchRL's own scripts with only the collector's import changed, beside TorchRL's collector.

``python -m tools.torchrl_scripts PATH [-k EXPR] [--only gleanrl|torchrl] [--alone] [--json FILE]``

PATH is a checkout of TorchRL. Each script runs in a temporary copy of its directory that imports
collectors from GleanRL (``tools.rebind``), with a budget small enough to run in seconds. A budget
changes how much a script does, never what: frames, updates, environments, and versions of tasks
that can be installed. It is the same for both libraries.

The copy imports this module first: `Meter` counts what the script's collectors deliver, and ends
the script when it has collected for long enough.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import origin
from benchmarks.processes import session

from tools.rebind import environment, rebind

LIBRARIES = ("gleanrl", "torchrl")
REPORT, LIMIT, OWNER = "GLEANRL_REPORT", "GLEANRL_REPORT_SECONDS", "GLEANRL_REPORT_OWNER"
"""Environment variables: file of the report, seconds to collect, id of the process that reports."""
ALONE = "GLEANRL_REPORT_ALONE"
"""Environment variable: the script gets no batch, its collector collects one after the other."""
_STARTUP_S = 120.0
_BUDGETS = ("total_frames", "n_iters")
_ERROR = re.compile(r"\s*[\w.]*(Error|Exception|Died|Exit|Timeout)\b")
Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Script:
    """A script of TorchRL's and its budget.

    Attributes:
        path: where it lies in a checkout.
        arguments: its command line, separated by spaces.
        constants: ``name = value`` statements of the script that are given another value.
        edits: regular expressions and what replaces them, in every file beside the script.
        needs: modules without which neither library can run it.
    """

    path: str
    arguments: str = ""
    constants: dict[str, str] = field(default_factory=dict)
    edits: Edits = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The end of one run of a script.

    Attributes:
        ended: ``finished``, ``limit`` (it was still collecting), ``failed`` or ``timeout``.
        frames: steps collected after the first batch.
        collecting: frames per second of waiting for the collector.
        error: the last line of a failure.
        kept: names of TorchRL's collectors that GleanRL does not have.
    """

    ended: str
    frames: int = 0
    collecting: float | None = None
    error: str = ""
    kept: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        """Whether the script finished or collected for long enough."""
        return self.ended in ("finished", "limit")


# -- scripts ---------------------------------------------------------------------------------------

_CHEETAH = "HalfCheetah-v5"


def _sota(path: str, arguments: str, edits: Edits = (), needs: str = "") -> Script:
    path, arguments = f"sota-implementations/{path}.py", f"logger.backend=null {arguments}"
    return Script(path, arguments, edits=edits, needs=("hydra", *needs.split()))


def _off_policy(path: str, arguments: str) -> Script:
    budget = (
        "collector.total_frames=3000 collector.frames_per_batch=200 optim.utd_ratio=0.05 "
        "collector.init_random_frames=1000 replay_buffer.size=5000 optim.batch_size=64 "
    )
    return _sota(path, budget + arguments)


def _multi_agent(name: str) -> Script:
    budget = (
        "env.max_steps=20 collector.frames_per_batch=600 collector.n_iters=6 train.num_epochs=2 "
        "train.minibatch_size=200 eval.evaluation_episodes=2"
    )
    return _sota(f"multiagent/{name}", budget, needs="vmas")


def _tutorial(name: str, constants: str = "", edits: Edits = (), needs: str = "") -> Script:
    path = f"tutorials/sphinx-tutorials/{name}.py"
    values = dict(each.split("=") for each in constants.split())
    return Script(path, constants=values, edits=edits, needs=tuple(needs.split()))


def _example(path: str, arguments: str = "", needs: str = "", **more: Any) -> Script:
    return Script(f"examples/{path}.py", arguments, needs=tuple(needs.split()), **more)


_ON_POLICY = "collector.frames_per_batch=320 collector.total_frames=3200"
_NODES = (
    "--total_frames 4000 --frames_per_batch 200 --num_workers 2 --num_nodes 2 --env CartPole-v1"
)
_PONG = "logger.num_test_episodes=1 logger.test_interval=100000000"
_IMPALA = f"collector.num_workers=2 collector.total_frames=16000 loss.batch_size=4 {_PONG}"
_TWO = f"logger.eval_iter=1000000 env.name={_CHEETAH} collector.env_per_collector=2"
_RARELY = "logger.log_interval=1000000"
_PENDULUM = (("InvertedDoublePendulum-v4", "InvertedDoublePendulum-v5"),)

SCRIPTS: tuple[Script, ...] = (
    _sota("a2c/a2c_mujoco", f"{_ON_POLICY} env.env_name={_CHEETAH}"),
    _sota("a2c/a2c_atari", f"{_ON_POLICY} env.num_envs=2 {_PONG}"),
    _sota("ppo/ppo_mujoco", f"{_ON_POLICY} env.env_name={_CHEETAH}"),
    _sota("ppo/ppo_atari", f"{_ON_POLICY} env.num_envs=2 loss.mini_batch_size=64 {_PONG}"),
    _sota(
        "dqn/dqn_cartpole",
        "collector.total_frames=5000 collector.frames_per_batch=200 "
        "collector.init_random_frames=1000 loss.num_updates=5",
    ),
    _sota(
        "dqn/dqn_atari",
        "collector.total_frames=6400 collector.frames_per_batch=320 loss.num_updates=2 "
        f"collector.init_random_frames=640 buffer.buffer_size=2000 {_PONG}",
    ),
    _off_policy("sac/sac", _TWO),
    _sota(
        "sac/sac-async",
        f"env.name={_CHEETAH} collector.device=cpu network.device=cpu replay_buffer.size=5000 "
        "collector.env_per_collector=2 collector.frames_per_batch=200 optim.batch_size=64 "
        "collector.init_random_frames=1000 collector.update_freq=50 logger.log_freq=100000000",
        edits=(("cuda:1", "cpu"),),
    ),
    _off_policy("td3/td3", _TWO),
    _off_policy("ddpg/ddpg", f"logger.eval_iter=1000000 env.name={_CHEETAH}"),
    _off_policy("tqc/tqc", _TWO),
    _off_policy(
        "crossq/crossq",
        f"logger.eval_iter=1000000 env.name={_CHEETAH} env.library=gymnasium "
        "network.critic_hidden_sizes=[64,64]",
    ),
    _off_policy("discrete_sac/discrete_sac", "logger.eval_iter=1000000 env.library=gymnasium"),
    _sota(
        "redq/redq",
        f"env.name={_CHEETAH} env.init_env_steps=100 collector.frames_per_batch=256 "
        "collector.total_frames=3072 collector.init_random_frames=512 optim.steps_per_batch=2 "
        "optim.init_random_frames=512 buffer.prb=0 buffer.size=4000 buffer.batch_size=32 "
        "loss.num_q_values=3 logger.record_interval=1000000 logger.record_frames=10",
    ),
    _off_policy("cql/cql_online", f"env.n_samples_stats=100 {_RARELY}"),
    _off_policy("cql/discrete_cql_online", _RARELY),
    _off_policy("iql/iql_online", _RARELY),
    _off_policy("iql/discrete_iql", _RARELY),
    _sota("impala/impala_single_node", _IMPALA),
    _sota("impala/impala_multi_node_ray", f"{_IMPALA} remote_worker_resources.num_gpus=0"),
    _sota("rnd/rnd_mujoco", f"{_ON_POLICY} env.env_name={_CHEETAH} logger.test_interval=1000000"),
    _sota("gail/gail", "", needs="d4rl"),
    *map(_multi_agent, ("mappo_ippo", "maddpg_iddpg", "iql", "qmix_vdn", "sac")),
    Script("sota-implementations/dreamer_v3/dreamer_v3.py", "collector.total_frames=2000"),
    Script(
        "sota-implementations/offline_to_online/train.py",
        f"--env {_CHEETAH} --total-frames 3000",
        needs=("d4rl",),
    ),
    _tutorial(
        "coding_ddpg",
        "init_env_steps=200 total_frames=2000 init_random_frames=400 traj_len=50 "
        "env_per_collector=1 num_collectors=1",
    ),
    _tutorial("coding_dqn", "total_frames=640 n_optim=1"),
    _tutorial("coding_ppo", "total_frames=4000 frames_per_batch=400 num_epochs=1", _PENDULUM),
    *map(_tutorial, ("collector_trajectory_assembly", "dqn_with_rnn", "evaluator")),
    _tutorial("export", "init_rand_steps=500 optim_steps=1"),
    _tutorial("getting-started-3"),
    _tutorial("getting-started-5", "optim_steps=2"),
    _tutorial("memory_efficient_rl"),
    _tutorial(
        "multiagent_competitive_ddpg",
        "frames_per_batch=400 n_iters=4 n_optimiser_steps=2",
        needs="vmas",
    ),
    _tutorial("multiagent_ppo", "frames_per_batch=600 n_iters=4 num_epochs=1", needs="vmas"),
    *map(_tutorial, ("rb_tutorial", "recurrent_sequence_training", "torchrl_demo")),
    _example("collectors/async_batched_collector"),
    _example("collectors/multi_weight_updates"),
    _example("collectors/weight_sync_collectors"),
    _example("collectors/mp_collector_mps"),
    _example("distributed/collectors/single_machine/generic", f"{_NODES} --backend gloo"),
    _example("distributed/collectors/single_machine/sync", f"{_NODES} --backend gloo"),
    _example("distributed/collectors/single_machine/rpc", _NODES),
    _example("distributed/collectors/multi_nodes/ray_buffer_infra"),
    _example("distributed/collectors/multi_nodes/ray_collect"),
    _example(
        "distributed/collectors/multi_nodes/ray_train",
        edits=_PENDULUM,
        constants={"num_epochs": "1"},
    ),
    _example("distributed/ray_dqn_trainer"),
    _example(
        "multiagent/mappo_vmas",
        "--frames 2400 --frames_per_batch 600 --minibatch_size 200 --epochs 1",
        needs="vmas",
    ),
    _example("replay-buffers/checkpoint", needs="h5py"),
    _example("replay-buffers/recurrent_slice_sampler_pipeline"),
    _example("services/ray_collector_services"),
)


# -- in the script's process -----------------------------------------------------------------------


class Meter:
    """Counts the frames that the collectors of a process deliver, and the time it waits for them.

    The first batch is not counted: workers start and programs are built on its way. Neither are
    random frames before the policy's, if a script only collects.
    """

    def __init__(self, path: Path, limit: float, alone: bool) -> None:
        self._path, self._limit, self._alone = path, limit, alone
        self._frames, self._waited = 0, 0.0
        self._begun = self._inside = False
        self._background: list[tuple[Any, float, int]] = []

    def iterate(self, method: Callable[[Any], Iterator[Any]], collector: Any) -> Iterator[Any]:
        """Yield batches and time each; those of a collector within another are not counted."""
        batches = iter(method(collector))
        random = getattr(collector, "init_random_frames", 0) or 0 if self._alone else 0
        while True:
            outermost, self._inside = not self._inside, True
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                if outermost and self._alone:
                    self._stop()
                return
            finally:
                self._inside = not outermost
            if outermost and self._begun:
                self._frames += _frames(batch, collector)
                self._waited += time.perf_counter() - start
            elif outermost and (random := random - _frames(batch, collector)) <= 0:
                self._begin()
            if not (outermost and self._alone):
                yield batch

    def start(self, method: Callable[..., Any], collector: Any, *args: Any, **kwargs: Any) -> Any:
        """Note that ``collector`` fills its buffer in the background once it has started."""
        started = method(collector, *args, **kwargs)
        buffer = getattr(collector, "replay_buffer", None)
        if buffer is not None:
            self._background.append((buffer, time.perf_counter(), _written(buffer)))
        self._begin()
        return started

    def end(self, method: Callable[..., Any], collector: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the frames collected in the background while their buffers are still there."""
        self._end_background()
        return method(collector, *args, **kwargs)

    def install(self) -> None:
        """Have every collector class of both libraries report here."""
        import torchrl.collectors.distributed

        import gleanrl.collectors

        ways = {"__iter__": self.iterate, "start": self.start}
        ways |= {"shutdown": self.end, "async_shutdown": self.end}
        for base in (torchrl.collectors.BaseCollector, gleanrl.collectors.BaseCollector):
            for cls in set(_subclasses(base)):
                for name, way in ways.items():
                    method = vars(cls).get(name)
                    if method is not None and not getattr(method, "__isabstractmethod__", False):
                        setattr(cls, name, _around(way, method))

    def _begin(self) -> None:
        self._begun = True
        if self._limit and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, self._limit)

    def _stop(self, *_: object) -> None:
        self.write(stopped=True)
        os._exit(0)  # the script might catch an exception that is raised here

    def _end_background(self) -> None:
        for buffer, began, before in self._background:
            self._frames += _written(buffer) - before
            self._waited += time.perf_counter() - began
        self._background.clear()

    def write(self, stopped: bool = False) -> None:
        """Write the report unless there is one; nothing stops the script from now on."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._end_background()
        if not self._path.exists():
            report = {"frames": self._frames, "waited_s": self._waited, "stopped": stopped}
            self._path.write_text(json.dumps(report))


def _around(way: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: way(method, *args, **kwargs)


def _frames(batch: Any, collector: Any) -> int:
    """Return how many steps ``batch`` has; rows beyond the end of a trajectory are none."""
    if batch is None:  # it went into a replay buffer
        return int(getattr(collector, "requested_frames_per_batch", 0))
    mask = batch.get(("collector", "mask"), None)
    return int(mask.sum()) if mask is not None else int(batch.numel())


def _written(buffer: Any) -> int:
    count = getattr(buffer, "write_count", None)
    return int(count) if count is not None else len(buffer)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


if REPORT in os.environ and os.environ.setdefault(OWNER, str(os.getpid())) == str(os.getpid()):
    _limit, _alone = float(os.environ[LIMIT]), bool(os.environ.get(ALONE))
    _meter = Meter(Path(os.environ[REPORT]), _limit, _alone)
    _meter.install()
    atexit.register(_meter.write)


# -- runs ------------------------------------------------------------------------------------------


def prepare(script: Script, checkout: Path, into: Path, library: str) -> tuple[Path, set[str]]:
    """Copy a script with its directory; return its new path and the names that stay TorchRL's."""
    found = checkout / script.path
    directory = into / found.parent.name
    shutil.copytree(found.parent, directory)
    kept: set[str] = set()
    for file in directory.rglob("*.py"):
        source = file.read_text()
        for pattern, text in script.edits:
            source = re.sub(pattern, text, source)
        if file.name == found.name:
            source = _with_constants(source, script.constants)
        if library == "gleanrl":
            rebound = rebind(source)
            source = rebound.source
            if file.name == found.name or "utils" in file.name:  # the script may import it
                kept |= set(rebound.kept)
        file.write_text(_metered(source) if file.name == found.name else source)
    return directory / found.name, kept


def _with_constants(source: str, constants: dict[str, str]) -> str:
    for name, value in constants.items():
        source, count = re.subn(
            rf"^(\s*{name}) = [^\n(]*(?:\([^\n]*)?$", rf"\1 = {value}", source, flags=re.M
        )
        if not count:
            raise ValueError(f"the script assigns {name} nowhere: correct its budget")
    return source


def _metered(source: str) -> str:
    """Have the script import this module before anything else, on a line that exists already."""
    head, future, rest = source.partition("from __future__ import annotations\n")
    if not future:
        return "import tools.torchrl_scripts  # noqa\n" + source
    return f"{head}{future.rstrip()}; import tools.torchrl_scripts\n{rest}"


def only_collecting(script: Script) -> Script:
    """Return ``script`` with a budget for a collector that is never waited for."""
    arguments = re.sub(rf"\b({'|'.join(_BUDGETS)})=(\d+)", r"\1=\g<2>000", script.arguments)
    many = {name: f"{value}000" for name, value in script.constants.items() if name in _BUDGETS}
    return replace(script, arguments=arguments, constants={**script.constants, **many})


def run(
    script: Script, checkout: Path, library: str, seconds: float, alone: bool = False
) -> Result:
    """Run a script until it ends or has collected for ``seconds``; ``alone``: it only collects."""
    if alone:
        script = only_collecting(script)
    with tempfile.TemporaryDirectory(prefix="torchrl-scripts-") as name:
        path, kept = prepare(script, checkout, Path(name), library)
        report, output = Path(name) / "report.json", Path(name) / "output.txt"
        command = [sys.executable, path.name, *script.arguments.split()]
        quiet = {"SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled"}
        metered = {"HYDRA_FULL_ERROR": "1", REPORT: str(report), LIMIT: str(seconds)}
        metered |= {ALONE: "1"} if alone else {}
        options: dict[str, Any] = {"cwd": path.parent, "env": environment(**quiet, **metered)}
        options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        code: int | None = None
        with (
            output.open("w") as written,
            session(command, stdout=written, **options) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            code = process.wait(_STARTUP_S + 2 * seconds)
        found = json.loads(report.read_text()) if report.exists() else {}
        text = output.read_text(errors="replace")
    left = tuple(sorted(kept))
    if code != 0 or not found:
        errors = [line for line in text.splitlines() if _ERROR.match(line)]
        error = errors[-1].strip() if errors else f"exit status {code}"
        return Result("timeout" if code is None else "failed", error=error, kept=left)
    frames, waited = found["frames"], found["waited_s"]
    collecting = frames / waited if frames and waited else None
    return Result("limit" if found["stopped"] else "finished", frames, collecting, kept=left)


def rate(ended: str, collecting: float | None) -> str:
    """Return frames per second of collecting, or how the script ended."""
    if ended not in ("finished", "limit"):
        return ended
    return f"{collecting:,.0f}" if collecting else "ran"


def compare(
    script: Script, checkout: Path, libraries: list[str], seconds: float, alone: bool
) -> dict[str, Any]:
    """Run a script with each library, print a row of the table, and return its entry."""
    absent = [name for name in script.needs if importlib.util.find_spec(name) is None]
    if absent:
        print(f"{script.path:66.66}  needs {', '.join(absent)}")
        return {"script": script.path, "needs": absent}
    results = {name: run(script, checkout, name, seconds, alone) for name in libraries}
    cells = "  ".join(f"{rate(each.ended, each.collecting):>14}" for each in results.values())
    print(f"{script.path:66.66}  {cells}", flush=True)
    for name, result in results.items():
        if result.error:
            print(f"    {name}: {result.error[:300]}", flush=True)
        if result.kept:
            print(f"    {name}: left with TorchRL: {', '.join(result.kept)}")
    return {"script": script.path, **{name: asdict(result) for name, result in results.items()}}


def main(arguments: list[str] | None = None) -> int:
    """Run the scripts and return 0 if all ran on GleanRL that run on TorchRL."""
    parser = argparse.ArgumentParser(prog="python -m tools.torchrl_scripts", description=__doc__)
    parser.add_argument("path", type=Path, help="a checkout of TorchRL")
    parser.add_argument("-k", default="", metavar="EXPR", help="only scripts whose path matches")
    parser.add_argument("--only", choices=LIBRARIES, help="one library instead of both")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a script collects")
    parser.add_argument("--alone", action="store_true", help="scripts collect, and do not learn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results to FILE")
    given = parser.parse_args(arguments)
    libraries = [given.only] if given.only else list(LIBRARIES)
    try:
        chosen = [script for script in SCRIPTS if re.search(given.k, script.path)]
    except re.error as err:
        parser.error(f"-k {given.k}: {err}")
    print(f"{'frames per second of collecting':66}  {'  '.join(f'{x:>14}' for x in libraries)}")
    options = (given.path, libraries, given.seconds, given.alone)
    rows = [compare(script, *options) for script in chosen]
    if given.json:
        given.json.write_text(json.dumps({**origin(), "scripts": rows}, indent=1) + "\n")
    ran = [[Result(**row[x]).ran if x in row else None for x in LIBRARIES] for row in rows]
    return int(any(ours is False and theirs is not False for ours, theirs in ran))


if __name__ == "__main__":
    sys.exit(main())
