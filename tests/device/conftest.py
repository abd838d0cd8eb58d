"""The device that the tests in this folder run on."""

from importlib import import_module

import device_rig
import pytest

collect_ignore = ["standin.py"]
"""Importing it registers the device, or fails."""


@pytest.fixture(scope="session", autouse=True)
def device():
    """A module whose ``make`` builds something in a process that has the device.

    Tests are skipped where the stand-in cannot be built.
    """
    try:
        return import_module("standin") if device_rig.ON == "standin" else device_rig
    except Exception as error:
        if type(error).__name__ != "NoCompiler":
            raise
        pytest.skip("there is no C++ compiler")
