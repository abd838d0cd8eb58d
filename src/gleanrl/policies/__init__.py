"""Policies of users, fitted to the environment and run as tensor calls."""

from gleanrl.policies.policy import (
    ExplorationType,
    exploration_type,
    make_policy,
    parse_exploration_mode,
    set_exploration_type,
)
from gleanrl.policies.program import ProgramPolicy
from gleanrl.policies.random import RandomActions, RandomPolicy

__all__ = [
    "ExplorationType",
    "ProgramPolicy",
    "RandomActions",
    "RandomPolicy",
    "exploration_type",
    "make_policy",
    "parse_exploration_mode",
    "set_exploration_type",
]
