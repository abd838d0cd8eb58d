"""``gleanrl node``: be a node of a waiting collector."""

from __future__ import annotations

import os
import signal
import socket

from gleanrl.cli.command_options import NodeOptions
from gleanrl.core.errors import ConfigError
from gleanrl.transport.handshake import SECRET, Invitation, secret_from
from gleanrl.transport.node_endpoint import run_node

_NUMBERS = (
    "GLEANRL_NODE",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Environment variables that number processes started together, from 0."""


def run(options: NodeOptions) -> int:
    """Serve the learner until it ends, and return the exit code."""
    # What environments start has no use for it.
    text = os.environ.pop(SECRET, None)
    if text is None:
        raise ConfigError(
            f"{SECRET} is not in the environment: a node must show its learner that it knows the "
            "secret; the learner says where that is"
        )
    node = _number() if options.node is None else options.node
    invitation = Invitation(*options.address, node, secret_from(text), options.wait_s)
    label = f"process {os.getpid()} on {socket.gethostname()}"
    run_node(invitation, (signal.SIGTERM, signal.SIGINT), label)
    return 0


def _number() -> int:
    """Return the number of this node from the environment variables."""
    for name in _NUMBERS:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError as err:
                raise ConfigError(f"{name} ({os.environ[name]!r}) must be a number") from err
    raise ConfigError(
        f"which node is this? Pass --node N, or set one of {', '.join(_NUMBERS)} to its number "
        "from 0"
    )
