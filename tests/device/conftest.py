"""The stand-in device, for the tests in this folder."""

import pytest

collect_ignore = ["standin.py"]
"""Importing it registers the device, or fails."""


@pytest.fixture(scope="session", autouse=True)
def standin():
    """The module of the device; tests are skipped where it cannot be built."""
    from importlib import import_module

    try:
        return import_module("standin")
    except Exception as error:
        if type(error).__name__ != "NoCompiler":
            raise
        pytest.skip("there is no C++ compiler")
