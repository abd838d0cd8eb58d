"""``gleanrl node``: be a node of a collector that somebody waits with."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from gleanrl.core.errors import ConfigError, GleanError
from gleanrl.transport.handshake import SECRET, Invitation, secret_from
from gleanrl.transport.node import run_node

NUMBERS = (
    "GLEANRL_NODE",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Environment variables that number processes started together, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the command line asked for."""

    host: str
    port: int
    node: int | None = None
    """``None`` for what the environment says."""
    wait_s: float = 120.0
    """Seconds to look for the learner."""


def run(options: NodeOptions) -> int:
    """Serve the learner until it ends, and return the exit code.

    Raises:
        ConfigError: the secret is missing, or the number of the node.
        GleanError: no learner answers, or it does not let this node in.
        SystemExit: the process was told to end by a signal.
    """
    # What environments start has no use for it.
    text = os.environ.pop(SECRET, None)
    if text is None:
        raise ConfigError(
            f"{SECRET} is not in the environment: a node has to show its learner that it knows the "
            "secret; the learner says where that is"
        )
    node = _numbered(os.environ) if options.node is None else options.node
    where = f"{options.host}:{options.port}"
    invitation = Invitation(options.host, options.port, node, secret_from(text), options.wait_s)
    try:
        run_node(
            invitation,
            (signal.SIGTERM, signal.SIGINT),
            f"process {os.getpid()} on {socket.gethostname()}",
        )
    except OSError as err:
        raise GleanError(f"no learner answers at {where} within {options.wait_s} s: {err}") from err
    return 0


def _numbered(environment: Mapping[str, str]) -> int:
    for name in NUMBERS:
        if name in environment:
            try:
                return int(environment[name])
            except ValueError as err:
                raise ConfigError(f"{name} ({environment[name]!r}) must be a number") from err
    raise ConfigError(
        f"which node is this? Pass --node N, or set one of {', '.join(NUMBERS)} to its number "
        "from 0"
    )
