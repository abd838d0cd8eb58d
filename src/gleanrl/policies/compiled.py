"""Policies compiled by torch, or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict.nn import CudaGraphModule

from gleanrl.core.errors import ConfigError

Options: TypeAlias = bool | Mapping[str, Any] | None
"""``True`` for the defaults, a mapping for keyword arguments, ``False`` or ``None`` for no."""


def accelerate(
    policy: Callable[[Any], Any], compiled: Options, captured: Options, device: torch.device
) -> Callable[[Any], Any]:
    """Compile ``policy``, capture it, or both.

    What the result returns may be overwritten by its next call: copy it.

    Args:
        policy: Takes and returns a TensorDict.
        compiled: Arguments of ``torch.compile``.
        captured: Arguments of ``tensordict.nn.CudaGraphModule``.
        device: Where the policy runs.

    Raises:
        ConfigError: a CUDA graph was asked for on another device, or an option is of the wrong
            kind.
    """
    compile_kwargs = _arguments("compile_policy", compiled)
    capture_kwargs = _arguments("cudagraph_policy", captured)
    if capture_kwargs is not None and device.type != "cuda":
        raise ConfigError(
            f"cudagraph_policy needs a policy on a CUDA device, this one is on {device}; drop it, "
            "or pass policy_device='cuda'"
        )
    if compile_kwargs is not None:
        policy = torch.compile(policy, **compile_kwargs)
        if capture_kwargs is None and device.type == "cuda":
            policy = _marking(policy)
    if capture_kwargs is not None:
        options = {"in_keys": [], "out_keys": [], "device": device, **capture_kwargs}
        policy = CudaGraphModule(policy, **options)
    return policy


def _arguments(name: str, value: Options) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} ({value!r}) must be True, False or a dict of keyword arguments")
    return dict(value)


def _marking(policy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Tell torch where a step begins: graphs it captured reuse their memory from there."""

    def call(tensordict: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's
        return policy(tensordict)

    return call
