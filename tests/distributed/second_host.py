"""A second host with a cable to this one, made of network namespaces."""

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import warm

# Of this process's own: hosts that a killed run left behind would answer in place of ours.
NAME = f"gl{os.getpid() % 100_000}"
NUMBER = os.getpid() % (1 << 14)
HERE, THERE = (f"10.213.{NUMBER >> 6}.{4 * (NUMBER & 63) + end}" for end in (1, 2))
CLONE_NEWNET = 0x40000000
NODE = """
import second_host
second_host.enter({host!r})
from gleanrl.cli.main import main
raise SystemExit(main(["node", "{address}", "--node", "{node}"]))
"""


def ip(*words):
    """Run the program ``ip``."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=10)


@contextmanager
def second_host():
    """Make the host `NAME`. Its end of the cable is called ``{NAME}-b``, the other ``{NAME}-a``."""
    if shutil.which("ip") is None or ip("netns", "add", NAME).returncode:
        pytest.skip("network namespaces need iproute2 and the right to make them")
    try:
        ip("link", "add", f"{NAME}-a", "type", "veth", "peer", "name", f"{NAME}-b")
        ip("link", "set", f"{NAME}-b", "netns", NAME)
        ip("addr", "add", f"{HERE}/30", "dev", f"{NAME}-a")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", f"{NAME}-b")
        ip("link", "set", f"{NAME}-a", "up")
        ip("-n", NAME, "link", "set", f"{NAME}-b", "up")
        if ip("-n", NAME, "link", "set", "lo", "up").returncode:
            pytest.skip("a cable between network namespaces cannot be made here")
        yield NAME
    finally:
        ip("link", "del", f"{NAME}-a")
        ip("netns", "del", NAME)


def enter(host):
    """Have this thread, and all that it starts, be on ``host``; on this one if that is empty."""
    if host:
        with open(f"/run/netns/{host}") as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0


def cut(host):
    """Cut the cable of ``host``, from there."""
    assert not ip("link", "set", f"{host}-b", "down").returncode


class OnBothHosts:
    """A launcher that starts node 0 here, and node 1 on the second host."""

    def __init__(self):
        """Start no node yet."""
        self.nodes = []

    def address(self):
        """Return the address of this host."""
        return HERE

    def launch(self, invitations):
        """Start nodes, with a whole cable."""
        ip("-n", NAME, "link", "set", f"{NAME}-b", "up")
        for one in invitations:
            program = NODE.format(
                host=NAME if one.node else "", address=f"{one.host}:{one.port}", node=one.node
            )
            env = {**os.environ, "GLEANRL_SECRET": one.secret.decode()}
            env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
            self.nodes.append(subprocess.Popen([warm.START, "-c", program], env=env))

    def exit_reason(self, node, timeout):
        """Return ``None``: nobody here hears of processes of another host."""

    def stop(self, timeout):
        """Have the nodes end; one behind a cut cable may take as long as a heartbeat."""
        for node in self.nodes:
            node.terminate()

    def await_ends(self, seconds):
        """Wait until all nodes have ended."""
        for node in self.nodes:
            node.wait(seconds)
        self.nodes.clear()
