"""The suite tests what users can import."""

from tools.inside import read, share

SHARE = 0.17
"""Part of all test functions that are in files which reach inside. It only ever goes down."""


def test_few_tests_reach_inside():
    found = share(read())
    assert found <= SHARE, f"{found:.1%}; `python -m tools.inside` lists the files"
