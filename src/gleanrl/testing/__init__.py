"""Faults on purpose, and checks, for environments, policies and storages of your own."""

from gleanrl.core.errors import CheckFailed
from gleanrl.testing.env_checks import check_env
from gleanrl.testing.faults import FAULTS, FaultyEnv, FaultyPolicy, InjectedError
from gleanrl.testing.policy_checks import check_policy
from gleanrl.testing.resume_checks import check_resume
from gleanrl.testing.storage_checks import check_storage

__all__ = [
    "FAULTS",
    "CheckFailed",
    "FaultyEnv",
    "FaultyPolicy",
    "InjectedError",
    "check_env",
    "check_policy",
    "check_resume",
    "check_storage",
]
