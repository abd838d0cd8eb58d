"""For tests: scripted workers, self-checking data, a learner that keeps everything."""

from gleanrl.testing.learner import KeepingLearner
from gleanrl.testing.scripted import Act, Die, Fail, ScriptedBackend
from gleanrl.testing.stamped import StampedSource, check_stamps

__all__ = [
    "Act",
    "Die",
    "Fail",
    "KeepingLearner",
    "ScriptedBackend",
    "StampedSource",
    "check_stamps",
]
