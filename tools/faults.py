"""Runs every fault in every kind of collector, and prints the outcomes as a table.

``python -m tools.faults [--publish] [--peers GROUP] [--ray] [-k WORDS]``. The cells are the tests
of ``tests/faults/test_matrix.py``. ``--peers`` has other libraries meet the same faults, each in a
process of its own that is ended after a while. ``--publish`` keeps the cells that ran, writes a
table of these and of all that ran before into ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from benchmarks.processes import descendants

import gleanrl

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
START_S = 120.0
"""Seconds in which a peer starts, before the fault."""
PEERS = {
    "TorchRL sync": ("torchrl", "sync", 20.0),
    "TorchRL async": ("torchrl", "async", 20.0),
    "Gymnasium AsyncVectorEnv": ("gymnasium", "", 20.0),
    "SB3 SubprocVecEnv": ("sb3", "", 20.0),
    "RLlib PPO": ("rllib", "", 120.0),
}
"""By column: the function of `SCRIPT`, its kind, and the seconds it has after the fault."""
GROUPS = {"torchrl": [*PEERS][:2], "others": [*PEERS][2:]}
"""The columns of each table of peers."""
MODES = {
    "raise": "",
    "relaunch": "replaced ",
    "continue": "without it ",
    "restart": "built anew ",
}
RESULTS = ROOT / "benchmarks" / "published" / "faults.json"
"""By table: the newest outcome of every cell."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    fault: str
    column: str
    mode: str
    said: str
    took: str
    of: str
    """The versions of the libraries."""
    date: str
    cores: int
    load: float
    """Processes that wanted to run at the end."""


def noted(of: str, fault: str, column: str, mode: str, said: str, took: str = "") -> Outcome:
    """Return the outcome of a cell that has just ended."""
    date, cores = str(datetime.date.today()), os.cpu_count() or 1
    return Outcome(fault, column, mode, said, took, of, date, cores, round(os.getloadavg()[0], 1))


class Collecting:
    """A plugin of pytest that notes the outcome of each cell."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.cells: list[Outcome] = []
        self.wrong = 0
        self._of = f"GleanRL {gleanrl.__version__}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test that has run."""
        if report.outcome == "failed":
            self.wrong += 1
            cell = re.search(r"\[(.*), (.*), (\w+)\]", report.nodeid)
            if cell is not None:
                self.cells.append(noted(self._of, cell[1], cell[2], cell[3], "fails"))
        elif report.when == "call" and report.passed:
            properties: dict[str, Any] = dict(report.user_properties)
            for fault, column, mode, said, seconds in properties.values():
                took = f"{seconds:.2f} s"
                self.cells.append(noted(self._of, fault, column, mode, said, took))


def ours(words: str, ray: bool) -> Collecting:
    """Run the cells of this library."""
    os.environ["GLEANRL_FAULTS"] = "all ray" if ray else "all"
    found = Collecting()
    options = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "--tb=short"]
    pytest.main([*options, "-k", words, str(ROOT / "tests" / "faults")], plugins=[found])
    return found


# -- peers -----------------------------------------------------------------------------------------

SCRIPT = """
import functools, os, sys, time, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {path!r}
from test_matrix import AT, FAULTS, Counting
from gleanrl.testing import FaultyEnv

def make(number, fault=None, mark=None, wrap=lambda env: env):
    env = functools.partial(Counting, number, pause=0.001)
    if fault is None:
        return wrap(env())
    row = FAULTS[fault]
    at = AT if row.when == "step" else 4
    once = None if row.act == "sleep" else mark
    return wrap(FaultyEnv(env, row.act, when=row.when, at=at, seconds=0.05, once=once))

def torchrl(kind, fault, mark):
    from torchrl import collectors
    from torchrl.envs import GymWrapper
    ours = functools.partial(make, wrap=GymWrapper)
    each = 16 if kind == "sync" else 8
    kinds = {{"sync": collectors.MultiSyncCollector, "async": collectors.MultiAsyncCollector}}
    collector = kinds[kind](
        [functools.partial(ours, 0), functools.partial(ours, 1, fault, mark)],
        None, frames_per_batch=each, total_frames=each * 25)
    for batch in collector:
        yield batch["next", "observation"].reshape(-1, 2)
    collector.shutdown()

def gymnasium(kind, fault, mark):
    import gymnasium
    envs = gymnasium.vector.AsyncVectorEnv(
        [functools.partial(make, 0), functools.partial(make, 1, fault, mark)])
    envs.reset(seed=0)
    for _ in range(200):
        yield envs.step(envs.action_space.sample())[0]
    envs.close()

def sb3(kind, fault, mark):
    from stable_baselines3.common.vec_env import SubprocVecEnv
    envs = SubprocVecEnv([functools.partial(make, 0), functools.partial(make, 1, fault, mark)])
    envs.reset()
    for _ in range(200):
        yield envs.step([envs.action_space.sample() for _ in range(2)])[0]
    envs.close()

def rllib(kind, fault, mark):
    import numpy, ray
    from ray.rllib.algorithms.ppo import PPOConfig
    os.environ["PYTHONPATH"] = ":".join(sys.path)  # of actors
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    def env(config):
        return make(1, fault, mark) if config.worker_index == 2 else make(0)
    ray.tune.register_env("counting", env)
    config = PPOConfig().environment("counting", disable_env_checking=True)
    config.env_runners(num_env_runners=2, create_env_on_local_worker=False)
    config.training(train_batch_size_per_learner=16, minibatch_size=16, num_epochs=1)
    algorithm = config.build_algo()
    for _ in range(25):
        for episode in algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=8), local_env_runner=False
        ):
            for one in episode:
                yield numpy.asarray(one.get_observations())[1:]
        algorithm.train()
    algorithm.stop()

def learn(peer, kind, fault, mark):
    frames = total = 0
    for rows in globals()[peer](kind, fault, mark):
        total += len(rows)
        frames += int((rows[:, 0] == 1).sum())
    share = f"{{frames}} of {{total}} frames are of the environment with the fault"
    print(f"SAID no error; {{share}}", flush=True)

if __name__ == "__main__":
    began, mark = time.time(), sys.argv[-1]
    try:
        learn(*sys.argv[1:])
    except BaseException as error:
        happened = os.path.getmtime(mark) if os.path.exists(mark) else began
        text = (str(error).splitlines() or [""])[0][:90]
        took = f"{{time.time() - happened:.1f}} s"
        print(f"SAID {{type(error).__name__}} \u201c{{text}}\u201d, {{took}}", flush=True)
        raise
"""


def peer(name: str, fault: str) -> str:
    """Have a peer meet a fault; return the outcome."""
    path = [str(ROOT / "tests" / name) for name in ("faults", "processes", "distributed")]
    function, kind, limit = PEERS[name]
    with tempfile.TemporaryDirectory() as folder:
        program, mark = Path(folder, "program.py"), Path(folder, "happened")
        program.write_text(SCRIPT.format(path=[*path, *sys.path]))
        command = [sys.executable, str(program), function, kind, fault, str(mark)]
        with open(Path(folder, "said"), "w+") as said:
            learner = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            ended = os.pidfd_open(learner.pid)
            began = time.monotonic()
            while not mark.exists() and time.monotonic() < began + START_S:
                if select.select([ended], [], [], 0.05)[0]:
                    break
            below = descendants(learner.pid)
            in_time = bool(select.select([ended], [], [], limit)[0])
            learner.kill()
            learner.wait()
            os.close(ended)
            left = _left(below)
            said.seek(0)
            text = said.read()
    stays = f"; {len(left)} of its processes stay" if left else ""
    return outcome(text, learner.returncode, limit if not in_time else None) + stays


def _left(below: Iterable[int]) -> list[int]:
    """Return the processes that have not ended five seconds later, and kill them."""
    end = time.monotonic() + 5.0
    left = list(below)
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def outcome(text: str, code: int, waited: float | None) -> str:
    """Say what became of a learner, by what it printed and how it ended, or was ``waited`` for."""
    said = [line.removeprefix("SAID ") for line in text.splitlines() if line.startswith("SAID ")]
    if said:
        return said[0] + ("" if waited is None else f"; does not exit within {waited:.0f} s")
    if waited is not None:
        return f"hangs (more than {waited:.0f} s)"
    return f"the learner is killed by signal {-code}" if code < 0 else f"exits with code {code}"


def peers(group: str, words: str) -> list[Outcome]:
    """Run peers."""
    columns = GROUPS[group]
    others = ("gymnasium", "stable-baselines3", "ray")
    of = ", ".join(f"{n} {version(n)}" for n in (("torchrl",) if group == "torchrl" else others))
    faults, every = matrix().FAULTS, len(matrix().COLUMNS)
    names = [name for name in faults if words in name and len(faults[name].columns) == every]
    calls = [(name, kind) for kind in columns for name in names]
    found = []
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(lambda call: peer(call[1], call[0]), calls)
        for (fault, kind), text in zip(calls, said, strict=True):
            print(f"{fault}, {kind}: {text}", flush=True)
            found.append(noted(of, fault, kind, "raise", text))
    return found


# -- tables ----------------------------------------------------------------------------------------


def matrix() -> Any:
    """Return the module of the cells."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("faults", "processes", "distributed")]
    return importlib.import_module("test_matrix")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each fault, in the order of the tests."""
    module = matrix()
    cells: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for one in outcomes:
        cells[one.fault][one.column].append(one)
    rows = [name for name in (*module.FAULTS, *module.SCARCE, *module.SIGNALS) if name in cells]
    there = {name for row in cells.values() for name in row}
    columns = [name for name in (*module.COLUMNS, *PEERS) if name in there]
    lines = [f"| fault | outcome | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for fault in rows:
        raised = [one.said for cell in cells[fault].values() for one in cell if not MODES[one.mode]]
        usual = max(dict.fromkeys(raised), key=raised.count)
        texts = [_text(cells[fault].get(name, []), usual) for name in columns]
        lines.append(f"| {fault} | {usual} | {' | '.join(texts)} |")
    if there & set(PEERS):  # each outcome is another
        lines = [re.sub(r"^(\|[^|]*\|)[^|]*\|", r"\1", line) for line in lines]
    return "\n".join(lines) + "\n"


def _text(cell: Sequence[Outcome], usual: str) -> str:
    parts = []
    for one in sorted(cell, key=lambda one: list(MODES).index(one.mode)):
        different = one.said != (usual if one.mode == "raise" else "goes on") or not one.took
        parts.append(f"{MODES[one.mode]}{f'{one.said} ' if different else ''}{one.took}".strip())
    return "<br>".join(parts).replace("|", "/") or "-"


def footer(outcomes: Sequence[Outcome]) -> str:
    """Return of what, when and where the outcomes are."""
    loads = [one.load for one in outcomes]
    each = (sorted({str(getattr(one, name)) for one in outcomes}) for name in ("date", "cores"))
    dates, cores = map(" and ".join, each)
    of = "; ".join(sorted({one.of for one in outcomes}))
    return (
        f"{of}, {dates}, {cores} cores, load {min(loads)} to {max(loads)}, median {median(loads)}."
    )


def kept(name: str, new: Sequence[Outcome]) -> list[Outcome]:
    """Keep ``new`` outcomes of a table in place of older ones of the same cells; return all."""
    tables = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    old = [Outcome(**one) for one in tables.get(name, ())]
    cells = {(one.fault, one.column, one.mode): one for one in [*old, *new]}
    tables[name] = [asdict(one) for one in cells.values()]
    lines = (f'"{key}": [\n' + ",\n".join(map(json.dumps, tables[key])) + "\n]" for key in tables)
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return list(cells.values())


def publish(name: str, text: str) -> None:
    """Write a table between the marks of its name on the page."""
    page = PAGE.read_text()
    start, end = f"<!-- faults: {name} -->\n", "<!-- end of faults -->"
    before, mark, rest = page.partition(start)
    if not mark:
        raise SystemExit(f"{PAGE} has no mark {start!r}")
    _, end, after = rest.partition(end)
    PAGE.write_text(before + mark + text + end + after)


def main() -> int:
    """Run the cells; return 1 if one is not as promised."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--publish", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--peers", choices=GROUPS, help="other libraries instead of ours")
    parser.add_argument("--ray", action="store_true", help="with the columns of Ray")
    parser.add_argument("-k", default="", metavar="WORDS", help="only cells with these words")
    given = parser.parse_args()
    if given.peers:
        name, cells, wrong = given.peers, peers(given.peers, given.k), 0
    else:
        found = ours(given.k, given.ray)
        name, cells, wrong = "ours", found.cells, found.wrong
    if given.publish:
        cells = kept(name, cells)
    text = f"{table(cells)}\n{footer(cells)}\n"
    print(text)
    if given.publish:
        publish(name, text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
