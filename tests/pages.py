"""Pages of the documentation as tests: their blocks run in order, as a reader would paste them.

``python -m pytest docs README.md`` runs every page, ``python -m pytest docs/start.md`` one. All
``python`` blocks of a page share one ``__main__``; its ``bash`` blocks run in the same temporary
folder. A ``text`` block after ``<!-- prints -->`` is what the block before it prints (``...``
stands for anything); a block after ``<!-- not run: REASON -->`` is left out, and listed in
CONTRIBUTING.md.
"""

import contextlib
import difflib
import doctest
import gc
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
OTHER_LANGUAGES = {"text", "json", "toml", "yaml"}
"""Of blocks that show something and run nothing; MyST's directives in braces are such, too."""


@dataclass
class Block:
    """A block of code, the line of its first line, and what the remarks around it say."""

    line: int
    language: str
    source: str
    not_run: str | None = None
    prints: str | None = None


def blocks(page):
    """Return the blocks of a page that are code to run, whether or not they are left out."""
    found, remark = [], ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence":
            where, language = f"{page}:{token.map[0] + 1}", token.info.strip()
            if language in ("python", "bash"):
                reason = re.search(r"<!-- not run: (.+?) -->", remark)
                found.append(Block(token.map[0] + 1, language, token.content, reason and reason[1]))
            elif language in OTHER_LANGUAGES:
                if "<!-- prints -->" in remark:
                    found[-1].prints = token.content
            elif not language.startswith("{") or language.startswith("{code"):
                raise ValueError(f"{where}: {language!r} is neither python, bash nor text")
        remark = token.content if token.type == "html_block" else ""
    return found


def pytest_collect_file(file_path, parent):
    """Have pytest take a Markdown file for a page."""
    if file_path.suffix == ".md":
        return PageFile.from_parent(parent, path=file_path)
    return None


class PageFile(pytest.File):
    """One page, which is one test, so that its blocks are run by one process and in order."""

    def collect(self):
        if any(block.not_run is None for block in blocks(self.path)):
            yield Page.from_parent(self, name="blocks")


class Page(pytest.Item):
    """Runs the blocks of a page, and fails if they leave anything behind."""

    def runtest(self):
        with _nothing_left_behind(), self._room() as run_bash, _as_a_program() as main:
            for block in blocks(self.path):
                if block.not_run is None:
                    printed = (
                        self._run_python(block, main)
                        if block.language == "python"
                        else run_bash(block)
                    )
                    self._compare(block, printed)

    def _run_python(self, block, main):
        source = "\n" * block.line + block.source  # tracebacks show the page's lines
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(self.path), "exec", dont_inherit=True), main.__dict__)
        print(printed.getvalue(), end="")  # pytest shows it if the page fails
        return printed.getvalue()

    @contextlib.contextmanager
    def _room(self):
        """Work in an empty folder, with ``python`` and ``gleanrl`` being ours."""
        import warm

        warm.open_door()
        with tempfile.TemporaryDirectory() as folder:
            work, tools = Path(folder, "work"), Path(folder, "bin")
            work.mkdir()
            tools.mkdir()
            for name, arguments in (
                ("python", ""),
                ("python3", ""),
                ("gleanrl", "-m gleanrl"),
                ("torchrun", "-m torch.distributed.run"),
            ):
                (tools / name).write_text(f'#!/bin/sh\nexec "{warm.START}" {arguments} "$@"\n')
                (tools / name).chmod(0o755)
            path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(work)
                patch.setenv("PATH", path)
                patch.setattr(sys, "executable", str(warm.START))  # jobs are started by it
                patch.setenv("MPLBACKEND", "Agg")
                patch.setenv("TCP_PORT", "0")  # the usual one may be another collector's
                yield self._run_bash

    def _run_bash(self, block):
        command = ["bash", "-euo", "pipefail", "-c", block.source]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
            try:
                printed, errors = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise Wrong(self.path, block, "a process of it runs after 60 s") from None
        print(printed, errors)
        if process.returncode:
            raise Wrong(self.path, block, f"exit status {process.returncode}\n{errors}")
        return printed

    def _compare(self, block, printed):
        if block.prints is None:
            return
        want, got = (_stripped(text) for text in (block.prints, printed))
        if not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
            lines = (text.splitlines() for text in (want, got))
            raise Wrong(self.path, block, "\n".join(difflib.ndiff(*lines)))

    def reportinfo(self):
        return self.path, 0, str(self.path.relative_to(ROOT))

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, Wrong):
            return str(excinfo.value)
        excinfo.traceback = excinfo.traceback.cut(path=self.path)  # the page's lines, if any
        return excinfo.getrepr(style="short")


class Wrong(AssertionError):
    """What a block did was not what its page says."""

    def __init__(self, page, block, what):
        super().__init__(f"{page.relative_to(ROOT)}:{block.line}: {what}")


def _stripped(text):
    return "".join(line.rstrip() + "\n" for line in text.strip("\n").splitlines())


@contextlib.contextmanager
def _as_a_program():
    """Have a fresh ``__main__``, what is known after ``import``s, and everything back later."""
    import gymnasium
    import numpy as np
    import torch

    main, usual = types.ModuleType("__main__"), sys.modules["__main__"]
    registry, threads = dict(gymnasium.registry), torch.get_num_threads()
    environment = dict(os.environ)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        main.__dict__.clear()
        gc.collect()  # collectors that the page left open shut down, as when a program ends
        sys.modules["__main__"] = usual
        os.environ.clear()
        os.environ.update(environment)
        gymnasium.registry.clear()
        gymnasium.registry.update(registry)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _nothing_left_behind():
    """Check that the page leaves no process and no shared memory."""
    import rig

    processes, files = rig.workers(), rig.shared_files()
    yield
    rig.await_end(rig.workers() - processes)
    rig.await_shared_files(files)
