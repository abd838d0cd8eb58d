"""Imports of TorchRL's collectors become GleanRL's; everything else of a program stays as it is."""

import pytest
from tools.rebind import rebind


def test_a_name_that_gleanrl_has_comes_from_gleanrl():
    assert rebind("from torchrl.collectors import Collector\n").source == (
        "from gleanrl.collectors import Collector\n"
    )


def test_a_name_that_gleanrl_does_not_have_stays_and_is_reported():
    rebound = rebind("from torchrl.collectors import Collector as C, Absent\n")
    assert rebound.source == (
        "from gleanrl.collectors import Collector as C; from torchrl.collectors import Absent\n"
    )
    assert rebound.moved == ("C",)
    assert rebound.kept == ("torchrl.collectors.Absent",)


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("from torchrl.collectors._multi_base import MultiCollector", "MultiCollector"),
        ("from torchrl.collectors._constants import _Interruptor", "Interruptor as _Interruptor"),
    ],
)
def test_a_private_place_becomes_the_public_one(statement, place):
    assert rebind(statement).source == f"from gleanrl.collectors import {place}"


def test_other_lines_keep_their_numbers():
    source = "from torchrl.collectors import (\n    Collector,\n    MultiCollector,\n)\nx = 1\n"
    assert rebind(source).source.splitlines()[4] == "x = 1"


@pytest.mark.parametrize(
    "source",
    [
        "from torchrl.envs import GymEnv\n",
        "from torchrl.data import ReplayBuffer\n",
        "import torchrl.collectors\n",
        "from .collectors import Collector\n",
    ],
)
def test_anything_else_stays(source):
    assert rebind(source).source == source


def test_imports_in_functions_keep_their_indentation():
    source = "def make():\n    from torchrl.collectors import Collector\n    return Collector\n"
    assert rebind(source).source == source.replace("torchrl", "gleanrl")


def test_scripts_held_as_strings_are_rewritten():
    source = 'script = f"""\nfrom torchrl.collectors import {name}\n"""\n'
    assert rebind(source).source == source.replace("torchrl", "gleanrl")
