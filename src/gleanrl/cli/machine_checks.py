"""Requirements of collecting on a machine: a function per check judges one reading."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rich.filesize import decimal as size

from gleanrl.cli.display import plural

Status: TypeAlias = Literal["ok", "note", "wrong"]
_FILES, _FILES_EACH = 128, 8
"""Descriptors of a learner, and for each worker; a node takes most of them: six."""
_TASKS, _TASKS_EACH = 8, 2
"""Processes and threads of a learner and its zygote, and for each worker."""
_LEAST_MEMORY = 1 << 30
"""Learner and zygote take a third of it each; workers share most of theirs with the zygote."""
_DOCKER_SHM = 64 << 20
_SLOW_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    name: str
    status: Status
    """``"note"``: something to know, or a part of GleanRL cannot be used; collecting can."""
    found: str
    fix: str = ""
    """A command or a setting to copy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int | None
    """Its exit code; ``None`` if it did not end in time."""
    out: str = ""
    err: str = ""

    @property
    def problem(self) -> str:
        """The last line on standard error, which names the error."""
        return (self.err.strip().splitlines() or [f"exit code {self.code}"])[-1]


@dataclass(frozen=True, slots=True)
class Package:
    """A required package: the versions that suit (``">=2.40"``), and the installed version."""

    name: str
    needed: str
    installed: str | None
    suits: bool


# -- limits ----------------------------------------------------------------------------------------


def processors(count: int, affinity: int, usable: int) -> Finding:
    """Judge how many of ``count`` processors this process may use."""
    if usable == count:
        return Finding("processors", "ok", f"{count}, all usable")
    why = "the quota of its container or job" if usable < affinity else "its affinity"
    found = f"{usable} of {count} usable, by {why}: choose num_workers by this number"
    fix = "docker run --cpus=N, srun --cpus-per-task=N or taskset -c LIST give others"
    return Finding("processors", "note", found, fix)


def memory(available: int, limits: Collection[int]) -> Finding:
    """Judge the bytes that are available, within ``limits`` of containers and jobs."""
    found = f"{size(available)} available"
    found += f", in a container or job limited to {size(min(limits))}" if limits else ""
    if available >= _LEAST_MEMORY:
        return Finding("memory", "ok", found)
    fix = "docker run --memory=8g, sbatch --mem=8G" if limits else "ps aux --sort=-rss | head"
    return Finding("memory", "wrong", f"{found}: a learner and its workers take more", fix)


def shared_memory(total: int, free: int) -> Finding:
    """Judge ``/dev/shm``, where Ray and torch's data loaders have memory, and GleanRL none."""
    found = f"/dev/shm has {size(free)} free of {size(total)}"
    if free > _DOCKER_SHM:
        return Finding("shared memory", "ok", f"{found}; GleanRL's own is not there")
    docker = ", Docker's default of 64 MiB" if total == _DOCKER_SHM else ""
    found += f"{docker}: enough for GleanRL, too little for Ray's object store and DataLoader"
    fix = "docker run --shm-size=8g" if total <= _DOCKER_SHM else "ls -lS /dev/shm"
    return Finding("shared memory", "note", found, fix)


def _bound(limit: float) -> str:
    return "unlimited" if math.isinf(limit) else f"{limit:,}"


def open_files(soft: float, hard: float, cores: int) -> Finding:
    """Judge the soft and the hard limit of open files, for a worker per core."""
    needed = _FILES + _FILES_EACH * cores
    found = f"{_bound(soft)} (ulimit -n), may be raised to {_bound(hard)}"
    if soft >= needed:
        return Finding("open files", "ok", found)
    fix = f"ulimit -n {min(hard, max(needed, 4096)):.0f}"
    if hard < needed:
        fix = "docker run --ulimit nofile=65536, or in /etc/security/limits.conf: * - nofile 65536"
    found += f": {plural(cores, 'worker')} and a learner take up to {needed:,}"
    return Finding("open files", "wrong", found, fix)


def processes(soft: float, hard: float, used: int, rooms: Sequence[int], cores: int) -> Finding:
    """Judge the limits of processes and threads for a worker per core.

    The user has ``used``; each container or job with a limit may have as many more as in ``rooms``.
    """
    needed, room = _TASKS + _TASKS_EACH * cores, min(rooms, default=soft)
    found = f"{used:,} of this user, {_bound(soft)} allowed (ulimit -u)"
    found += f"; {room:,} more in its container or job" if rooms else ""
    if min(room, soft - used) >= needed:
        return Finding("processes", "ok", found)
    fix = f"ulimit -u {hard:.0f}" if hard > soft else "ps -u $USER -L shows which to end"
    if room < needed:
        fix = "docker run --pids-limit=-1, or systemctl set-property UNIT TasksMax=infinity"
    found += f": {plural(cores, 'worker')} and a learner take {needed}"
    return Finding("processes", "wrong", found, fix)


def worker(answer: Answer, seconds: float, command: Sequence[str]) -> Finding:
    """Judge a collection by one worker process, which ``command`` ran for ``seconds``."""
    if answer.code != 0:
        fix = f"{shlex.join(command)} --traceback"
        return Finding("worker", "wrong", f"no worker collects: {answer.problem}", fix)
    found = (
        f"one started and collected in {seconds:.1f} s, two imports of torch included; it was "
        "forked from a clean process, and multiprocessing's start method has no effect"
    )
    if seconds <= _SLOW_START_S:
        return Finding("worker", "ok", found)
    fix = "have torch on a local disk, or pass start_timeout=600 to collectors"
    return Finding("worker", "note", found, fix)


# -- torch and packages ----------------------------------------------------------------------------


def torch_fails(answer: Answer) -> Finding:
    """Judge a process that could not import torch or ask it."""
    fix = "pip install --force-reinstall torch"
    if answer.code is None:
        fix = "python -X importtime -c 'import torch; torch.cuda.init()' shows where it waits"
    return Finding("torch", "wrong", f"it cannot be imported or asked: {answer.problem}", fix)


def threads(count: int, cores: int, environment: Mapping[str, str]) -> Finding:
    """Judge the number of torch's threads, which environment variables set."""
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environment]
    settings = ", ".join(f"{name}={environment[name]}" for name in names) or "no variable sets it"
    found = f"torch uses {count} for {plural(cores, 'usable processor')} ({settings})"
    if count <= cores:
        return Finding("threads", "ok", f"{found}, in a worker 1")
    fix = f"export OMP_NUM_THREADS={cores} MKL_NUM_THREADS={cores}"
    return Finding("threads", "wrong", f"{found}: they wait for each other", fix)


def cuda(facts: Mapping[str, Any], visible: str | None, driver: bool) -> Finding:
    """Judge the CUDA part of `torch_facts`; ``visible`` is ``CUDA_VISIBLE_DEVICES``."""
    build, devices = facts["cuda"], facts["devices"]
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if devices:
        return Finding("CUDA", "ok", f"{build}: {', '.join(devices)}{shown}")
    if not driver:
        found = f"no NVIDIA driver here, and torch is built for {build or 'CPUs'}"
        return Finding("CUDA", "ok", found)
    if build is None:
        fix = "pip install --force-reinstall torch"
        return Finding("CUDA", "note", "torch is built for CPUs, this machine has a GPU", fix)
    if visible in ("", "-1"):
        found = f"{build}, but no GPU is visible{shown}"
        return Finding("CUDA", "note", found, "unset CUDA_VISIBLE_DEVICES")
    fix = (
        "install a newer driver (nvidia-smi shows which is there), or torch for an older CUDA: pip "
        "install torch --index-url https://download.pytorch.org/whl/cu118; in Docker, --gpus all"
    )
    found = f"{build} cannot be used{shown}: {facts['cuda_problem']}"
    return Finding("CUDA", "wrong", found, fix)


def gloo(problem: str | None, interfaces: Collection[str], wanted: str | None) -> Finding:
    """Judge whether gloo connects here, and ``wanted``, which is GLOO_SOCKET_IFNAME."""
    unknown = sorted(set(filter(None, (wanted or "").split(","))) - set(interfaces))
    if unknown:
        fix = f"unset GLOO_SOCKET_IFNAME; there are {', '.join(sorted(interfaces))}"
        found = f"GLOO_SOCKET_IFNAME names {unknown[0]!r}, which this machine does not have"
        return Finding("gloo", "wrong", found, fix)
    if problem:
        found = f"two ends do not connect over the loopback interface: {problem}"
        return Finding("gloo", "wrong", found, "sudo ip link set lo up")
    return Finding("gloo", "ok", "two ends connect over the loopback interface")


def compiler(name: str, version: Answer | None, compiled: Answer | None) -> Finding:
    """Judge the C++ compiler that torch.compile calls; ``None`` if there is no such command."""
    if version is None or compiled is None:
        problem = f"there is no command {name!r}"
    elif version.code != 0 or compiled.code != 0:
        failed = version if version.code != 0 else compiled
        problem = f"{name} compiles no file with Python.h and OpenMP: {failed.problem}"
    else:
        return Finding("compiler", "ok", version.out.partition("\n")[0])
    fix = "sudo apt-get install g++ python3-dev, or conda install gxx; export CXX=clang++"
    found = f"{problem}; only compile_policy= and torch.compile need it"
    return Finding("compiler", "note", found, fix)


def packages(name: str, found: Sequence[Package], missing: Status, old: Status) -> Finding:
    """Judge versions; ``missing`` and ``old`` say how bad it is if one is not there or too old."""
    absent = [each for each in found if each.installed is None and missing != "ok"]
    unsuited = [each for each in found if each.installed is not None and not each.suits]
    parts = [f"{each.name} {each.installed} is not {each.needed}" for each in unsuited]
    parts += [f"{each.name} is not installed" for each in absent]
    parts += [f"{each.name} {each.installed}" for each in found if each.suits]
    wanted = [each.name + each.needed for each in (*unsuited, *absent)]
    fix = f"pip install {shlex.join(wanted)}" if wanted else ""
    status = old if unsuited else missing if absent else "ok"
    return Finding(name, status, ", ".join(parts) or "none of them is installed", fix)


# -- the network and clusters ----------------------------------------------------------------------


def address(found: str | None, host: str) -> Finding:
    """Judge the address of this machine for others, ``None`` if it has none."""
    if found is not None:
        return Finding("address", "ok", f"{host} is {found} for other machines")
    fix = f"echo ADDRESS {host} | sudo tee -a /etc/hosts, or host='ADDRESS' in the collector"
    return Finding("address", "note", f"{host} has no address that other machines reach", fix)


def port(wanted: Sequence[int], free: int | None) -> Finding:
    """Judge the first port of ``wanted`` that is free for nodes to connect to."""
    if free == wanted[0]:
        return Finding("port", "ok", f"nodes connect to {free or 'any'}")
    if free is not None:
        found = f"{wanted[0]} is taken: nodes connect to {free}"
        return Finding("port", "note", found, f"export TCP_PORT={free}")
    found = f"from {wanted[0]} to {wanted[-1]} none is free for nodes"
    return Finding("port", "wrong", found, "export TCP_PORT=20000")


def ray(address: str | None, source: str, problem: str | None) -> Finding:
    """Judge whether the cluster that ``ray.init`` joins was reached, which ``source`` names."""
    if address is None:
        return Finding("Ray", "ok", "no cluster is named: ray.init starts one here")
    if problem is None:
        return Finding("Ray", "ok", f"a cluster answers at {address} ({source})")
    fix = "unset RAY_ADDRESS" if source == "RAY_ADDRESS" else f"rm {source}"
    found = f"no cluster answers at {address} of {source}: {problem}"
    return Finding("Ray", "wrong", found, f"{fix}; or ray start --head starts another")


def slurm(partitions: Answer | None, test: Answer | None) -> Finding:
    """Judge the answers of ``sinfo`` and of ``sbatch --test-only``; ``None`` if not installed."""
    if partitions is None:
        return Finding("Slurm", "ok", "there is no sinfo: not a machine of a Slurm cluster")
    if partitions.code != 0:
        found = f"sinfo: {partitions.problem}"
        return Finding("Slurm", "wrong", found, "scontrol ping shows whether the controller runs")
    found = f"partitions {', '.join(partitions.out.split())}"
    if test is not None and test.code == 0:
        return Finding("Slurm", "ok", f"{found}; sbatch takes jobs")
    problem = "there is no sbatch" if test is None else test.problem
    fix = "slurm_kwargs={'slurm_partition': ..., 'slurm_account': ...} if one is missing; "
    fix += "submitit_delayed_launcher if jobs cannot be submitted from here"
    return Finding("Slurm", "note", f"{found}; a plain job is not taken: {problem}", fix)
