"""Nothing that nodes of this machine used is left behind by a test."""

import pytest
import rig
from node_rig import nodes

from gleanrl.transport.process import zygote


@pytest.fixture(scope="module")
def _warm_nodes():
    """Have the zygote and all that torch opens once per process up."""
    zygote()
    nodes(rig.counting()).shutdown()


@pytest.fixture
def tidy_nodes(_warm_nodes):
    with rig.nothing_left_behind():
        yield
