"""The path under which TorchRL users import specs. Re-exports only."""

from gleanrl.envs.specs import *
