"""Where the finished steps of a TensorDict environment go.

As long as steps are exactly what the layout announces, they are copied into the rows of a window.
The first step that is not turns the whole rollout into a list of TensorDicts, in which nothing is
dropped, cast or reshaped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.protocols import Window
from gleanrl.memory.trees import copied, tensordict_over
from gleanrl.memory.window import batch_rows


class _Entry(Protocol):
    """What is known of one entry of a step."""

    needed: bool
    """Whether every step has it."""

    def write(self, value: object, t: int) -> bool:
        """Store ``value`` as row ``t``; tell whether it is what was announced."""
        ...

    def clear(self, t: int) -> None:
        """Store that step ``t`` does not have it."""
        ...


@dataclass(slots=True)
class _Leaf:
    """A tensor."""

    rows: Sequence[torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    needed: bool = True

    def write(self, value: object, t: int) -> bool:
        """Copy ``value`` to row ``t``."""
        if not isinstance(value, torch.Tensor):
            return False
        if value.shape != self.shape or value.dtype is not self.dtype:
            return False
        self.rows[t].copy_(value)
        return True

    def clear(self, t: int) -> None:
        """Store zeros."""
        self.rows[t].zero_()


@dataclass(slots=True)
class _Elsewhere:
    """An entry that is not stored, or was stored before."""

    needed: bool = False

    def write(self, value: object, t: int) -> bool:
        """Do nothing."""
        return True

    def clear(self, t: int) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Node:
    """A nested part, or the step itself."""

    size: torch.Size
    entries: dict[str, _Entry]
    needed: bool = True

    def write(self, value: object, t: int) -> bool:
        """Store every entry of ``value`` as row ``t``; private ones are not delivered."""
        if not isinstance(value, TensorDictBase) or value.batch_size != self.size:
            return False
        if isinstance(value, LazyStackedTensorDict) and not _even(value):
            return False
        entries, found = self.entries, 0
        for name, item in value.items():
            entry = entries.get(name)
            if entry is None:
                if name[0] != "_":
                    return False
            elif entry.write(item, t):
                found += 1
            else:
                return False
        return found == len(entries) or self._fill(value, t)

    def _fill(self, value: TensorDictBase, t: int) -> bool:
        """Clear what ``value`` lacks; tell whether it may lack all of it."""
        present = set(value.keys())
        missing = [entry for name, entry in self.entries.items() if name not in present]
        for entry in missing:
            entry.clear(t)
        return not any(entry.needed for entry in missing)

    def clear(self, t: int) -> None:
        """Clear every entry."""
        for entry in self.entries.values():
            entry.clear(t)


@dataclass(frozen=True, slots=True)
class StepFields:
    """What finished steps consist of, as far as it is known beforehand."""

    layout: Layout
    """What is delivered."""
    stored: tuple[Field, ...]
    """The part of it that steps hold; the rest is written in bulk."""
    shown: tuple[Key, ...]
    """Root entries that the environment shows: stored before it steps, because it may use their
    memory again."""
    optional: frozenset[Key] = frozenset()
    """Entries that some steps lack; they are stored as zeros then."""
    ignored: tuple[Key, ...] = ()
    """Entries that steps hold and that are not delivered."""


class Recorder:
    """Keeps the finished steps of one rollout after the other."""

    def __init__(self, shown: Iterable[Key], fields: StepFields | None = None) -> None:
        """Keep steps.

        Args:
            shown: Root entries that the environment shows.
            fields: What steps consist of; ``None`` if that changes from step to step.
        """
        self._shown = tuple(shown)
        self._fields = fields
        self._trees: weakref.WeakKeyDictionary[Window, tuple[_Node, _Node]] = (
            weakref.WeakKeyDictionary()
        )
        self._window: Window | None = None
        self._before: _Node
        self._after: _Node
        self._t = -1
        self._view: TensorDictBase | None = None
        self.steps: list[TensorDictBase] | None = None
        """The steps as TensorDicts; ``None`` as long as all of them lie in the window."""

    def begin(self, window: Window | None) -> None:
        """Start a rollout; without a window, or without fields, steps are kept as they are."""
        self._t, self._window = -1, window
        rows = self._fields is not None and window is not None and window.keys()
        self.steps = None if rows else []
        if rows:
            assert window is not None
            if window not in self._trees:
                self._trees[window] = self._bind(window)
            self._before, self._after = self._trees[window]

    def before(self, root: TensorDictBase) -> None:
        """Store what the environment showed, before it steps."""
        self._t += 1
        if self.steps is None and not _write_some(self._before, root, self._t):
            self.steps = self._read(self._t, root.device)
        if self.steps is not None:
            self._view = _view_of(root, self._shown)

    def after(self, finished: TensorDictBase) -> None:
        """Store a finished step, before anything is reset."""
        if self.steps is None:
            if self._after.write(finished, self._t):
                return
            self.steps = self._read(self._t, finished.device)
            self._view = _view_of(self._row(self._t, finished.device), self._shown)
        step = copied(finished)
        if self._view is not None:
            step.update(self._view)
        self.steps.append(step)

    # -- rows ------------------------------------------------------------------------------------

    def _bind(self, window: Window) -> tuple[_Node, _Node]:
        fields = self._fields
        assert fields is not None
        batch = fields.layout.batch_shape
        sizes = {group.key: (*batch, *group.shape) for group in fields.layout.groups}
        leaves: dict[Key, _Entry] = {
            field.key: _Leaf(
                batch_rows(window, field.key, batch),
                torch.Size((*batch, *field.shape)),
                field.dtype,
                field.key not in fields.optional,
            )
            for field in fields.stored
        }
        shown = {key: leaves[key] for key in fields.shown if key in leaves}
        elsewhere = {key: _Elsewhere(needed=True) for key in shown}
        elsewhere |= {key: _Elsewhere() for key in fields.ignored}
        return _tree(shown, batch, sizes), _tree({**leaves, **elsewhere}, batch, sizes)

    def _read(self, steps: int, device: torch.device | None) -> list[TensorDictBase]:
        """Return the first ``steps`` steps out of the rows, on the ``device`` of the others."""
        return [self._row(t, device) for t in range(steps)]

    def _row(self, t: int, device: torch.device | None) -> TensorDictBase:
        fields, window = self._fields, self._window
        assert fields is not None
        assert window is not None
        batch = fields.layout.batch_shape
        views = {f.key: batch_rows(window, f.key, batch)[t].clone() for f in fields.stored}
        row = tensordict_over(views, batch, [None] * len(batch), fields.layout.groups)
        return row if device is None else row.to(device)


def _tree(
    leaves: Mapping[Key, _Entry], batch: Sequence[int], sizes: Mapping[Key, Sequence[int]]
) -> _Node:
    root = _Node(torch.Size(batch), {})
    for key, leaf in leaves.items():
        node = root
        for depth in range(1, len(key)):
            size = torch.Size(sizes.get(key[:depth], batch))
            inner = node.entries.setdefault(key[depth - 1], _Node(size, {}))
            assert isinstance(inner, _Node)
            node = inner
        node.entries[key[-1]] = leaf
    return root


def _write_some(node: _Node, data: TensorDictBase, t: int) -> bool:
    """Write the entries of ``node`` only; there may be others in ``data``."""
    for name, entry in node.entries.items():
        value = data.get(name, None)
        if isinstance(entry, _Node):
            if not isinstance(value, TensorDictBase) or not _write_some(entry, value, t):
                return False
        elif not entry.write(value, t):
            return False
    return True


def _view_of(root: TensorDictBase, shown: Sequence[Key]) -> TensorDictBase | None:
    kept = root.select(*shown, strict=False)
    return None if kept.is_empty() else copied(kept)


def _even(stack: LazyStackedTensorDict) -> bool:
    """Tell whether all of ``stack`` have the same entries: it shows only those."""
    names = set(stack.keys())
    return all(set(part.keys()) == names for part in stack.tensordicts)
