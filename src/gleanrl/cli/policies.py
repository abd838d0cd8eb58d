"""Policies as the command line names them: ``random`` or ``FILE.py:NAME``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gleanrl.core.errors import ConfigError

RANDOM = "random"


def load_policy(text: str) -> Any:
    """Return the policy that ``text`` names; ``None`` acts at random.

    The file is run. A class, or a function without parameters to fill, is called to make the
    policy; anything else that can be called is the policy itself.

    Raises:
        ConfigError: the file or the name does not exist, or is not callable.
        Exception: whatever the file raises.
    """
    if text == RANDOM:
        return None
    file, found, name = text.rpartition(":")
    path = Path(file)
    if not found or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"--policy {text!r} is neither 'random' nor FILE.py:NAME")
    if not path.is_file():
        raise ConfigError(f"--policy {text!r}: there is no file {file!r}")
    module = _run(path)
    if name not in vars(module):
        raise ConfigError(f"--policy {text!r}: {file} does not define {name!r}")
    made = vars(module)[name]
    if _makes_policy(made):
        made = made()
    if not callable(made):
        raise ConfigError(f"--policy {text!r}: a {type(made).__name__} cannot be called")
    return made


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file defines may look itself up in `sys.modules` (dataclasses do), and what stands
    # beside it should be importable, as if the file had been run as a script.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _makes_policy(made: Any) -> bool:
    if isinstance(made, nn.Module) or not callable(made):
        return False
    if inspect.isclass(made):
        return True
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:
        return False
    # ``*args`` is a parameter to fill: a policy may be written that way.
    return all(p.kind is p.VAR_KEYWORD or p.default is not p.empty for p in parameters)
