"""``gleanrl convert``: write a dataset in another format."""

from __future__ import annotations

from rich.filesize import decimal as size

from gleanrl.cli.command_options import ConvertOptions
from gleanrl.cli.display import print_table
from gleanrl.recording.dataset import Dataset
from gleanrl.recording.recorder import convert_dataset


def run(options: ConvertOptions) -> int:
    """Convert, print the result and return the exit code."""
    convert_dataset(options.source, options.target, options.format)
    made = Dataset(options.target)
    print_table(
        [
            ("status", made.metadata.status),
            ("frames", f"{made.metadata.frames:,}"),
            ("data", f"{options.target} ({options.format}, {size(made.nbytes)})"),
        ]
    )
    return 0
