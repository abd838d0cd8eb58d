"""The formats of datasets. Imports nothing heavy, because the command line imports it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from gleanrl.core.errors import ConfigError
from gleanrl.core.platforms import imported

FORMATS = {"tensordict": None, "minari": "minari", "parquet": "pyarrow"}
"""The formats, each with the package that it needs."""


def module_of(format: str) -> Any:
    """Return the module ``in_FORMAT``, whose ``write`` makes a dataset and ``parts`` read one."""
    package = FORMATS[format]
    if package is not None:
        imported(package, format, f"a dataset in the format {format!r}")
    return import_module(f"gleanrl.recording.in_{format}")


def check_target(format: str, path: Path) -> None:
    """Check that a dataset of this format can be written to ``path``."""
    if format not in FORMATS:
        raise ConfigError(f"format ({format!r}) must be one of {', '.join(map(repr, FORMATS))}")
    module = module_of(format)
    if format == "minari" and not re.fullmatch(r"[-\w]+-v\d+", path.name):
        raise ConfigError(
            f"Minari names a dataset NAME-vNUMBER, so {path.name!r} must end like "
            f"'{re.sub(r'[^-0-9A-Za-z_]', '-', path.name)}-v0'"
        )
    space = module.dataset_id(path).rpartition("/")[0] if format == "minari" else ""
    if space and not re.fullmatch(r"[-\w][-\w/]*[-\w]", space):
        raise ConfigError(
            f"Minari takes {space!r}, the directories between its own and the dataset, for a "
            "namespace: use two or more letters, digits, '-' and '_'"
        )
