"""The suite tests what users can import."""

from tools.figures import read, share

SHARE = 0.17
"""Part of all test functions that are in files which reach inside. It only ever goes down."""


def test_few_tests_reach_inside():
    found = share(read())
    assert found <= SHARE, f"{found:.1%}; `python -m tools.figures` lists the files"
