"""Ratios as a picture: SVG text, so that the same figures give the same bytes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.harness import OURS

WIDTH, LEFT, RIGHT = 480, 16, 464
"""Narrow, so that a telephone shows letters that can be read."""
_ROW, _HEAD, _TOP, _LINE = 31, 26, 64, 16
_LETTERS = 52
"""Letters of a heading that fit into one line, also in a wide font such as DejaVu Sans Bold."""
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_STYLE = """
svg { color-scheme: light dark; }
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328;
  paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
.title { font-weight: 600; font-size: 16px; } .head { font-weight: 600; }
.small { font-size: 11px; fill: #59636e; }
.card { fill: #ffffff; stroke: #d1d9e0; } .grid { stroke: #d1d9e0; } .one { stroke: #59636e; }
.ahead { fill: #2a9d5c; } .behind { fill: #d1495b; } .spread { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; stroke: #0d1117; } .small { fill: #9198a1; }
  .card { fill: #0d1117; stroke: #3d444d; } .grid { stroke: #3d444d; } .one { stroke: #9198a1; }
  .spread { stroke: #f0f6fc; }
}
"""


class Bar(NamedTuple):
    """GleanRL's rate over that of another system: the median and the ends of its spread."""

    label: str
    median: float
    low: float
    high: float


class Group(NamedTuple):
    """Bars under one heading."""

    title: str
    bars: Sequence[Bar]


def group(entry: Mapping[str, Any]) -> Group:
    """Return the bars of one case: ours against each reference that ran."""
    return Group(entry["title"], [bar(entry, name, name) for name in entry["ratios"]])


def bar(entry: Mapping[str, Any], name: str, label: str) -> Bar:
    """Return the bar of one reference; its label says both rates."""
    rates, ratio = entry["frames_per_second"], entry["ratios"][name]
    label = f"{label}: {short(rates[OURS])} vs {short(rates[name])} /s"
    return Bar(label, ratio["median"], *spread(ratio))


def times(value: float) -> str:
    """Return a ratio with two digits: ``0.83``, ``1.8``, ``17``."""
    return f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"


def spread(ratio: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest of several runs, the quartiles of a single one."""
    low, high = ratio.get("between", (ratio["q1"], ratio["q3"]))
    return low, high


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], rule: str = "---") -> list[str]:
    """Return the lines of a table; ``rule`` stands below the name of each column."""
    first, *lines = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return [first, f"|{f'{rule}|' * len(head)}", *lines]


def short(rate: float) -> str:
    """Return a rate with three digits: ``36.2k``."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:#.3g}".rstrip(".") + letter
    return f"{rate:.0f}"


def draw(title: str, groups: Sequence[Group], caption: Sequence[str]) -> str:
    """Return bars from "as fast" to the ratio, on a logarithmic axis, with spreads, as SVG."""
    found = [1, *(value for one in groups for bar in one.bars for value in (bar.low, bar.high))]
    low = max(tick for tick in _TICKS if tick <= min(found) or tick == _TICKS[0])
    high = min(tick for tick in _TICKS if tick >= max(found) or tick == _TICKS[-1])
    heads = [textwrap.wrap(one.title, _LETTERS) for one in groups]

    def x(value: float) -> float:
        inside = min(max(value, low), high)
        return LEFT + (RIGHT - LEFT) * math.log(inside / low) / math.log(high / low)

    bottom = _TOP + sum(_HEAD + _LINE * (len(head) - 1) for head in heads)
    bottom += _ROW * sum(len(one.bars) for one in groups)
    lines = []
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        kind, at = "one" if tick == 1 else "grid", x(tick)
        lines.append(_text(at, _TOP - 12, f"{tick:g}x", "small", "middle"))
        lines.append(f'<path class="{kind}" d="M{at:.1f} {_TOP - 6}V{bottom}"/>')
    y = _TOP
    for one, head in zip(groups, heads, strict=True):
        for number, line in enumerate(head):
            lines.append(_text(LEFT, y + 17 + _LINE * number, line, "head"))
        y += _HEAD + _LINE * (len(head) - 1)
        for each in one.bars:
            lines += _row(each, y, x)
            y += _ROW
    return _card(title, lines, bottom, caption)


def _card(title: str, lines: Sequence[str], bottom: int, caption: Sequence[str]) -> str:
    height = bottom + 20 + 16 * len(caption)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(LEFT, 28, title, "title"),
    ]
    notes = [_text(LEFT, bottom + 22 + 16 * n, line, "small") for n, line in enumerate(caption)]
    return "\n".join([*head, *lines, *notes, "</svg>", ""])


def _row(each: Bar, y: int, x: Any) -> Iterator[str]:
    start, end = sorted((x(1), x(each.median)))
    where = f'x="{start:.1f}" y="{y + 17}" width="{end - start:.1f}" height="9"'
    yield _text(LEFT, y + 12, each.label)
    yield _text(RIGHT, y + 12, f"{times(each.median)}x", "head", "end")
    yield f'<rect class="{"ahead" if each.median >= 1 else "behind"}" {where}/>'
    yield f'<path class="spread" d="M{x(each.low):.1f} {y + 21.5}H{x(each.high):.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    more = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    return f'<text x="{x:.1f}" y="{y}"{more}>{escape(text)}</text>'
