"""Writes the sources of the API reference: a page per class or small group, from ``__all__``.

Sphinx asks for them when it builds the site (docs/conf.py). Each method is described once, on the
page of the first class that has it; the pages of the other classes link to it there.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import tomllib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gleanrl.cli.main import parser

MODULES = [
    "gleanrl",
    "gleanrl.collectors",
    "gleanrl.collectors.distributed",
    "gleanrl.data",
    "gleanrl.data.postprocs",
    "gleanrl.envs",
    "gleanrl.envs.utils",
    "gleanrl.modules",
    "gleanrl.testing",
    "gleanrl.weight_update",
]
"""Whose ``__all__`` is public; of several paths of one object the first is the one to use."""


class Group(NamedTuple):
    """A part of the reference, and the modules whose public names it holds, in this order."""

    title: str
    about: str
    modules: tuple[str, ...]
    paged: bool = False
    """Whether each name has a page of its own."""


GROUPS = {
    "collectors": Group(
        "Collectors",
        "Iterate over batches that this process, worker processes, nodes or Ray actors collect.",
        (
            "collectors.base_collector",
            "collectors.in_process_collector",
            "collectors.multi",
            "collectors.async_batched",
            "collectors.distributed.generic",
            "collectors.distributed.rpc",
            "collectors.distributed.ray",
        ),
        paged=True,
    ),
    "evaluation": Group(
        "Evaluation",
        "Evaluate beside training, with frozen weights and exact numbers of episodes.",
        ("collectors.evaluator",),
    ),
    "specs": Group(
        "Specs",
        "Shapes, dtypes and domains of an environment's entries.",
        ("envs.specs",),
    ),
    "environments": Group(
        "Environments",
        "Environments on TensorDicts: alone, in batches, in processes.",
        ("envs.base", "envs.gym", "envs.serial", "parallel.parallel_env", "envs"),
        paged=True,
    ),
    "replay": Group(
        "Replay buffers",
        "A buffer is a storage, a sampler and a writer.",
        (
            "memory.replay.buffer",
            "memory.replay.storages",
            "memory.replay.row_writers",
            "memory.replay.samplers",
            "memory.replay.slices",
            "memory.replay",
        ),
        paged=True,
    ),
    "recording": Group(
        "Recording and logging",
        "Datasets on disk, and where the numbers of a collection go.",
        ("recording", "watch"),
    ),
    "weights": Group(
        "Weights",
        "How the learner's weights reach the policies of workers.",
        ("weights.module_weights", "weights.sync_schemes", "collectors.weight_update"),
    ),
    "tools": Group(
        "Trajectories, exploration, profiling",
        "Functions on batches, policies and collectors.",
        ("engine.trajectories", "policies", "tensordict.nn", "engine"),
    ),
    "testing": Group(
        "Testing",
        "Faults on purpose, and checks, for environments, policies and storages of your own.",
        ("testing",),
    ),
    "errors": Group(
        "Errors", "Exceptions of GleanRL.", ("core.errors", "collectors.save_on_sigterm")
    ),
    "launchers": Group(
        "Slurm jobs",
        "Start a learner and its nodes as one Slurm job each.",
        ("transport.launchers", "collectors.distributed"),
    ),
}


EXTRAS = {
    "bench": "For ``python -m benchmarks``, in a checkout.",
    "docs": "For ``python -m tools.site``, in a checkout.",
    "envpool": "Environments of EnvPool.",
    "lint": "For contributors.",
    "minari": "Minari datasets.",
    "pandas": "Parquet files read as data frames.",
    "parquet": "Parquet datasets.",
    "pettingzoo": "Multi-agent environments of PettingZoo.",
    "plot": "Plots of ``gleanrl inspect``.",
    "ray": "``RayCollector``.",
    "submitit": "Slurm jobs.",
    "tensorboard": "``TensorBoardLogger``.",
    "test": "For ``python -m pytest``, in a checkout.",
    "video": "Videos of pixels, as in `Start`.",
    "wandb": "``WandbLogger``.",
}
"""The purpose of each extra of pyproject.toml."""


class Public(NamedTuple):
    """A public name."""

    path: str
    value: Any
    aliases: list[str]
    """Other names in the same module, which are TorchRL's."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def about(self) -> str:
        """The first sentence of the docstring."""
        text = " ".join((inspect.getdoc(self.value) or "").partition("\n\n")[0].split())
        return re.split(r"(?<=\.)\s", text)[0]


def public() -> dict[int, Public]:
    """Return the public objects, by identity."""
    found: dict[int, Public] = {}
    for module in map(importlib.import_module, MODULES):
        for name in sorted(module.__all__, key=lambda name: _is_alias(module, name)):
            value = getattr(module, name)
            if name == "__version__":
                continue
            known = found.setdefault(id(value), Public(f"{module.__name__}.{name}", value, []))
            path = f"{module.__name__}.{name}"
            alone = name not in {known.name, *(alias.rpartition(".")[2] for alias in known.aliases)}
            if path != known.path and alone:
                known.aliases.append(path)
    return found


def _is_alias(module: Any, name: str) -> bool:
    return getattr(getattr(module, name), "__name__", name) != name


def grouped() -> dict[str, list[Public]]:
    """Return the public names of each group.

    Raises:
        LookupError: a name belongs to no group.
    """
    found: dict[str, list[tuple[tuple[int, int, str], Public]]] = {key: [] for key in GROUPS}
    for entry in public().values():
        module = getattr(entry.value, "__module__", entry.path).removeprefix("gleanrl.")
        key, place = _group_of(module, entry.path)
        depth = len(entry.value.__mro__) if inspect.isclass(entry.value) else 0
        found[key].append(((place, depth, entry.name), entry))
    return {
        key: [entry for _, entry in sorted(entries, key=lambda item: item[0])]
        for key, entries in found.items()
    }


def _group_of(module: str, path: str) -> tuple[str, int]:
    for key, group in GROUPS.items():
        for place, prefix in enumerate(group.modules):
            if module.startswith(prefix):
                return key, place
    raise LookupError(f"no group of tools/reference.py holds {path} of {module}")


def write(folder: Path) -> None:
    """Write the reference's sources into ``folder``, which holds nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in _pages():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _pages() -> Iterator[tuple[str, str]]:
    homes: dict[Any, str] = {}
    entries = []
    for key, found in grouped().items():
        group = GROUPS[key]
        if group.paged:
            entries.append(f"{key}/index")
            yield f"{key}/index.rst", _overview(group, found)
            for entry in found:
                yield f"{key}/{entry.name}.rst", _title(entry.name) + _described(entry, homes)
        else:
            entries.append(key)
            described = "".join(_described(entry, homes) for entry in found)
            yield f"{key}.rst", _title(group.title) + f"{group.about}\n\n" + described
    yield "command_line.rst", _command_line()
    yield "extras.rst", _extras()
    yield "index.rst", _index([*entries, "command_line", "extras"])


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"


def _toctree(entries: list[str]) -> str:
    lines = "".join(f"   {entry}\n" for entry in entries)
    return f".. toctree::\n   :hidden:\n   :maxdepth: 1\n\n{lines}\n"


def _index(entries: list[str]) -> str:
    text = _title("API reference") + (
        "Every public name of GleanRL. Names without a module are imported from ``gleanrl``; "
        "TorchRL's dotted paths resolve with ``torchrl`` replaced by ``gleanrl``.\n\n"
    )
    for key, found in grouped().items():
        group = GROUPS[key]
        page = f"{key}/index" if group.paged else key
        text += f":doc:`{group.title} <{page}>`\n   {group.about}\n\n"
        text += "   " + " · ".join(f":py:obj:`~{entry.path}`" for entry in found) + "\n\n"
    text += ":doc:`Command line <command_line>`\n   " + " · ".join(
        f"``gleanrl {name}``" for name in parser().commands
    )
    text += "\n\n:doc:`Optional packages <extras>`\n   " + ", ".join(f"``{e}``" for e in EXTRAS)
    return text + "\n\n" + _toctree(entries)


def _overview(group: Group, found: list[Public]) -> str:
    rows = "".join(f":py:obj:`~{entry.path}`\n   {entry.about}\n\n" for entry in found)
    names = [entry.name for entry in found]
    return _title(group.title) + f"{group.about}\n\n{rows}" + _toctree(names)


def _described(entry: Public, homes: dict[Any, str]) -> str:
    """Return the directives for a name, and note which members it is the home of."""
    module, _, name = entry.path.rpartition(".")
    text = f".. py:currentmodule:: {module}\n\n"
    if not str(getattr(entry.value, "__module__", "gleanrl")).startswith("gleanrl"):
        origin = f"{entry.value.__module__}.{entry.value.__qualname__}"
        kind = "class" if inspect.isclass(entry.value) else "function"
        text += f".. py:{kind}:: {name}\n\n   ``{origin}``: {entry.about}\n\n"
    elif inspect.isclass(entry.value):
        text += _class(entry, homes)
    elif callable(entry.value):
        text += f".. autofunction:: {name}\n\n"
    else:
        text += f".. py:data:: {name}\n\n   ``{entry.value!r}``\n\n"
    for alias in entry.aliases:
        module, _, name = alias.rpartition(".")
        text += f".. py:data:: {name}\n   :module: {module}\n\n"
        text += f"   Another name of :py:obj:`~{entry.path}`, as TorchRL has it.\n\n"
    return text


def _class(entry: Public, homes: dict[Any, str]) -> str:
    own, inherited = [], dict[str, list[str]]()
    for name, key in _members(entry.value):
        if homes.setdefault(key, entry.path) == entry.path:
            own.append(name)
        else:
            inherited.setdefault(homes[key], []).append(name)
    error = issubclass(entry.value, Exception)
    text = f".. auto{'exception' if error else 'class'}:: {entry.name}\n"
    text += "   :show-inheritance:\n" if error else ""
    text += f"   :members: {', '.join(own)}\n" if own else ""
    text += "\n"
    for home, names in inherited.items():
        links = ", ".join(f":py:obj:`{name} <{home}.{name}>`" for name in names)
        text += f"   As in :py:class:`~{home}`: {links}.\n\n"
    return text


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the names of members that have a docstring, each with a key of its own."""
    for name in sorted(dir(value)):
        base = next((base for base in value.__mro__ if name in vars(base)), None)
        if name.startswith("_") or base is None or not base.__module__.startswith("gleanrl"):
            continue
        member = vars(base)[name]
        kinds = (property, staticmethod, classmethod)
        if (inspect.isfunction(member) or isinstance(member, kinds)) and inspect.getdoc(
            getattr(value, name)
        ):
            yield name, (base, name)


def _command_line() -> str:
    found = parser()
    text = _title("Command line")
    for name, command in {"": found, **found.commands}.items():
        title = f"gleanrl {name}".strip()
        text += f"{title}\n{'-' * len(title)}\n\n.. code-block:: text\n\n"
        text += _indented(command.format_help()) + "\n"
    return text


def _extras() -> str:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    found = project["project"]["optional-dependencies"]
    text = _title("Optional packages") + (
        "``pip install 'gleanrl[ray,plot]'`` installs GleanRL with two of these. What needs a "
        "package that is missing raises an error that names the extra.\n\n"
    )
    for name in sorted(found):
        packages = ", ".join(f"``{package}``" for package in found[name])
        text += f"``{name}``\n   {EXTRAS[name]} {packages}\n\n"
    return text


def _indented(text: str) -> str:
    return "".join(f"   {line}\n" if line else "\n" for line in text.splitlines())


def undocumented(described: Container[str]) -> list[str]:
    """Return the public names that the site does not describe."""
    names = {path for entry in public().values() for path in (entry.path, *entry.aliases)}
    return sorted(name for name in names if name not in described)


# -- how docstrings are shown ----------------------------------------------------------------------

_MANY = 15
"""A signature with more arguments shows only the required and the positional ones."""


def signature(value: Any) -> str | None:
    """Return the signature to show, or nothing where that is the usual one."""
    if not inspect.isclass(value) or "__init__" not in vars(value):
        return None
    whole = inspect.signature(value.__init__)
    _, *given = whole.parameters.values()
    if len(given) <= _MANY:
        return None
    rest = inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)
    shown = [
        parameter.replace(annotation=parameter.empty)
        for parameter in given
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty
    ]
    return str(inspect.Signature([*shown, rest]))


def complete(kind: str, value: Any, lines: list[str]) -> None:
    """Put types and defaults into a docstring, in place, before it is read as Google's style.

    That style reads any text before a colon as a type, also the beginning of a sentence. So
    return values and properties get their types.

    Args:
        kind: ``"class"``, ``"method"``, ``"property"``, ...
        value: What is described.
        lines: Its docstring.
    """
    function = value.__init__ if inspect.isclass(value) else getattr(value, "fget", value)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    returned = signature.return_annotation
    before = "" if returned is signature.empty else f"``{_type(returned)}``: "
    if kind == "property" and lines:
        lines[0] = before + lines[0]
    lines[:] = [line for line in lines if not line.startswith("    -- ")]  # topics of arguments
    section = ""
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            section = line
        elif section == "Args:" and (entry := re.match(r"(    \*{0,2}(\w+))(?:=\S+)?(?=: )", line)):
            if entry[2] in signature.parameters:
                told = ", ".join(_facts(signature.parameters[entry[2]]))
                lines[number] = f"{entry[1]} ({told}){line[entry.end() :]}" if told else line
        elif section in ("Returns:", "Yields:") and lines[number - 1] == section:
            lines[number] = f"    {before}{line.lstrip()}"


def _facts(parameter: inspect.Parameter) -> Iterator[str]:
    if parameter.annotation is not parameter.empty:
        yield f"``{_type(parameter.annotation)}``"
    if parameter.default is not parameter.empty:
        yield f"default ``{_shown(parameter.default)}``"


def _type(annotation: Any) -> str:
    text = inspect.formatannotation(annotation).strip("'")
    return re.sub(r"(?:[a-z_]+[.])+(?=[A-Za-z])", "", text)


def _shown(default: Any) -> str:
    return repr(default) if not callable(default) else getattr(default, "__name__", "...")
