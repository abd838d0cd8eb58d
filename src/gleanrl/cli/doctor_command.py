"""``gleanrl doctor``: examine this machine, and report its faults for collecting."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from gleanrl.cli import machine_checks as checks
from gleanrl.cli.command_options import DoctorOptions
from gleanrl.cli.display import plural, print_table
from gleanrl.cli.machine_checks import Answer, Finding, Package
from gleanrl.core.cgroups import limits, usable_cores
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ConfigError
from gleanrl.core.platforms import require_linux
from gleanrl.memory.shared import available_memory, memory_limits
from gleanrl.transport.addresses import outward, ports_to_try
from gleanrl.transport.ray_address import connection_problem, known_cluster
from gleanrl.watch.progress import Display

_Check: TypeAlias = Callable[[], Iterator[Finding]]
_PIDS = {version: ("pids.max", "pids.current") for version in (1, 2)}
_TOOLS = {"docs", "lint", "bench"}
"""Extras of packages that collecting has nothing to do with."""
_HEADERS = "#include <Python.h>\n#include <omp.h>\n"
_COLLECT = ("gleanrl", "collect", "CartPole-v1", "--workers", "1", "--frames", "2")
_SHORT_S, _TORCH_S = 10.0, 120.0
_running: set[subprocess.Popen[str]] = set()
"""Processes that checks wait for."""
_REPORT = "report this line to the authors of GleanRL"


def run(options: DoctorOptions) -> int:
    """Check, print the results and return the exit code: 1 if something is wrong.

    All checks run at the same time, in threads that are left behind at their deadlines.
    """
    require_linux("the checks of gleanrl doctor")
    started = {name: _started(name, *check) for name, check in CHECKS.items()}
    findings: list[Finding] = []
    try:
        with Display("doctor", len(started)) as display:
            for done, (name, take) in enumerate(started.items()):
                display.show(done, name)
                findings += take()
    finally:  # also after Ctrl-C
        for process in list(_running):
            _end(process)
    wrong = [each for each in findings if each.status == "wrong"]
    if options.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=2) + "\n")
    else:
        rows = [((each.status, each.name, each.found), each.fix) for each in findings]
        fixed = ((row, ("", "", f"fix: {fix}"))[: 1 + bool(fix)] for row, fix in rows)
        print_table([row for pair in fixed for row in pair])
        print_table([(f"{plural(len(findings), 'result')}, {len(wrong)} wrong",)])
    return int(bool(wrong))


def _started(name: str, seconds: float, check: _Check) -> Callable[[], list[Finding]]:
    """Start ``check``; return a function that waits for its findings until the deadline."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check())
        except Exception as err:  # one check never stops the others
            problem = f"the check failed: {type(err).__name__}: {err}"
            found.append(Finding(name, "wrong", problem, _REPORT))

    def take() -> list[Finding]:
        thread.join(deadline.left)
        problem = f"the check has not ended in {seconds:g} s: what it reads or calls hangs"
        late = [Finding(name, "wrong", problem, "strace -f gleanrl doctor")]
        return [*found, *(late if thread.is_alive() else ())]

    thread, deadline = threading.Thread(target=look, daemon=True), Deadline(seconds)
    thread.start()
    return take


def _asked(command: Sequence[str], seconds: float, given: str = "") -> Answer:
    """Run ``command``, for at most ``seconds``, with the import path of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
    ) as process:
        _running.add(process)
        try:
            out, err = process.communicate(given, seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return Answer(None, err=f"no answer in {seconds:g} s")
        finally:
            _running.discard(process)
    return Answer(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tool(name: str, *arguments: str, given: str = "") -> Answer | None:
    """Run a tool; ``None`` if it is not installed."""
    return _asked([name, *arguments], _SHORT_S, given) if shutil.which(name) else None


# -- reading ---------------------------------------------------------------------------------------


def _processors() -> Iterator[Finding]:
    affinity = len(os.sched_getaffinity(0))
    yield checks.processors(os.cpu_count() or affinity, affinity, usable_cores())


def _memory() -> Iterator[Finding]:
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bounds = [limit for limit, _ in memory_limits() if limit < everything]
    yield checks.memory(available_memory() or 0, bounds)
    shared = os.statvfs("/dev/shm")
    yield checks.shared_memory(shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize)


def _limits() -> Iterator[Finding]:
    yield checks.open_files(*_bounds(resource.RLIMIT_NOFILE), usable_cores())
    rooms = [limit - used for limit, used, _ in limits("pids", _PIDS)]
    own = _own_threads()
    yield checks.processes(*_bounds(resource.RLIMIT_NPROC), own, rooms, usable_cores())


def _bounds(kind: int) -> tuple[float, float]:
    soft, hard = (float("inf") if bound < 0 else bound for bound in resource.getrlimit(kind))
    return soft, hard


def _own_threads() -> int:
    """Return how many threads the user has in all processes."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            count += len(os.listdir(process / "task")) * (process.stat().st_uid == os.getuid())
    return count


def _worker() -> Iterator[Finding]:
    start = time.perf_counter()
    answer = _asked([sys.executable, "-m", *_COLLECT], _TORCH_S)
    yield checks.worker(answer, time.perf_counter() - start, _COLLECT)


def _torch() -> Iterator[Finding]:
    answer = _asked([sys.executable, "-m", "gleanrl.cli.torch_facts"], _TORCH_S)
    if answer.code != 0:
        yield checks.torch_fails(answer)
        return
    facts = json.loads(answer.out)
    yield checks.threads(facts["threads"], usable_cores(), os.environ)
    driver = Path("/proc/driver/nvidia/version").exists()
    yield checks.cuda(facts, os.environ.get("CUDA_VISIBLE_DEVICES"), driver)
    interfaces = [name for _, name in socket.if_nameindex()]
    yield checks.gloo(facts["gloo_problem"], interfaces, os.environ.get("GLOO_SOCKET_IFNAME"))


def _compiler() -> Iterator[Finding]:
    name, include = os.environ.get("CXX", "g++"), sysconfig.get_paths()["include"]
    flags = ("-std=c++17", "-fopenmp", "-fsyntax-only", f"-I{include}", "-x", "c++", "-")
    compiled = _tool(name, *flags, given=_HEADERS)
    yield checks.compiler(name, _tool(name, "--version"), compiled)


def _packages() -> Iterator[Finding]:
    extras = set(metadata.metadata("gleanrl").get_all("Provides-Extra") or ())
    needed = _required("gleanrl", {""})
    yield checks.packages("packages", list(needed.values()), "wrong", "wrong")
    optional = _required("gleanrl", extras - _TOOLS - {"test"})
    yield checks.packages("extras", _without(optional, needed), "note", "wrong")
    others = _without(_required("gleanrl", {"test"}), needed | optional)
    yield checks.packages("tested with", others, "ok", "note")


def _without(found: Mapping[str, Package], known: Mapping[str, Package]) -> list[Package]:
    return [package for name, package in sorted(found.items()) if name not in known]


def _required(package: str, extras: set[str]) -> dict[str, Package]:
    """Return the requirements of ``extras`` of an installed package by name; ``""``: always."""
    from packaging.requirements import Requirement  # which tensordict installs

    found: dict[str, Package] = {}
    for need in map(Requirement, metadata.requires(package) or ()):
        if not any(need.marker is None or need.marker.evaluate({"extra": e}) for e in extras):
            continue
        if "" not in extras and (need.marker is None or need.marker.evaluate({"extra": ""})):
            continue  # always needed, whatever the extras
        version = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(need.name)
            found |= _required(need.name, need.extras) if need.extras else {}
        suits = version is not None and need.specifier.contains(version, prereleases=True)
        found[need.name] = Package(need.name, str(need.specifier), version, suits)
    return found


def _address() -> Iterator[Finding]:
    found = None
    with contextlib.suppress(ConfigError):
        found = outward()
    yield checks.address(found, socket.gethostname())


def _port() -> Iterator[Finding]:
    try:
        wanted = ports_to_try(None)
    except ConfigError as err:
        yield Finding("port", "wrong", f"TCP_PORT: {err}", "unset TCP_PORT")
        return
    yield checks.port(wanted, next(filter(_is_free, wanted), None))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _ray() -> Iterator[Finding]:
    address, source = known_cluster()
    yield checks.ray(address, source, None if address is None else connection_problem(address))


def _slurm() -> Iterator[Finding]:
    partitions, test = _tool("sinfo", "--noheader", "--format=%P"), None
    if partitions is not None and partitions.code == 0:
        test = _tool("sbatch", "--test-only", "--time=1", "--wrap=true")
    yield checks.slurm(partitions, test)


CHECKS: Mapping[str, tuple[float, _Check]] = {
    "processors": (_SHORT_S, _processors),
    "memory": (_SHORT_S, _memory),
    "limits": (_SHORT_S, _limits),
    "worker": (_TORCH_S + _SHORT_S, _worker),
    "torch": (_TORCH_S + _SHORT_S, _torch),
    "compiler": (3 * _SHORT_S, _compiler),
    "packages": (_SHORT_S, _packages),
    "address": (_SHORT_S, _address),
    "port": (_SHORT_S, _port),
    "Ray": (_SHORT_S, _ray),
    "Slurm": (3 * _SHORT_S, _slurm),
}
"""The checks in the order of their results, each with its deadline in seconds."""
