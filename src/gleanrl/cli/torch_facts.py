"""Prints as JSON what torch says of this machine, in a process that ``gleanrl doctor`` may kill."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from gleanrl.transport.addresses import LOOPBACK
from gleanrl.transport.process_group import make_group

_GLOO_S = 10.0


def facts() -> dict[str, Any]:
    """Return what `gleanrl.cli.machine_checks` judges; a problem is ``None`` if there is none."""
    cuda: Any = torch.cuda
    build = torch.version.cuda or torch.version.hip
    problem = build and _problem_of(cuda.init)
    count = 0 if problem else cuda.device_count()
    return {
        "threads": torch.get_num_threads(),
        "cuda": build,
        "cuda_problem": problem,
        "devices": [cuda.get_device_name(number) for number in range(count)],
        "gloo_problem": _problem_of(_connect),
    }


def _problem_of(function: Any) -> str | None:
    try:
        function()
    except Exception as err:
        return str(err).partition("\n")[0]
    return None


def _connect() -> None:
    """Have two ends of gloo exchange a tensor."""
    dist: Any = distributed  # the stubs leave some of it out
    with ThreadPoolExecutor(2) as ends:
        list(ends.map(partial(_be_end, dist.HashStore()), (0, 1)))


def _be_end(store: Any, rank: int) -> None:
    group = make_group("gloo", store, rank, LOOPBACK, timedelta(seconds=_GLOO_S))
    (group.recv if rank else group.send)([torch.zeros(1)], 1 - rank, 0).wait()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()))
