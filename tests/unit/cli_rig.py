"""Runs the command line in this process, and reads what it wrote."""

import json

from gleanrl.cli.main import main


def run(capsys, *arguments):
    """Run the command line; return exit code, standard output and standard error."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines_of(out):
    return dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line.strip())


def card_of(path):
    return json.loads((path / "card.json").read_text())
