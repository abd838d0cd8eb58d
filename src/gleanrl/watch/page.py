"""A page of figures: one HTML file with inline SVG, which loads nothing and runs nothing.

Plots stretch with the window: curves are drawn into a box of 1000 x 1000 that is scaled to fit,
with strokes that are not; ticks and labels are text of the page, so they are legible on a phone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gleanrl.core.version import __version__
from gleanrl.memory import tensor_files
from gleanrl.watch.progress import number, plain

Array: TypeAlias = np.ndarray[Any, Any]
Lines: TypeAlias = Sequence[tuple[str, str]]
_BOX = 1000
_DOTS = 2000
_LINE = 600
"""Points of a line and of a cloud of dots; of more points, every k-th one is drawn."""
_BINS = 30
_WINDOW = 100
_HUGE = 1e300
"""The limit of shown numbers, because differences of larger ones may be infinite."""
SHARES = {
    "time_env": "environment",
    "time_policy": "policy",
    "time_transfer": "transfer",
    "time_wait": "waiting",
}
"""Where a worker's time goes: the names of the shares in ``stats()`` and on a page."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values ``y`` over ``x``, both ``[N]``, without values that are not finite, or huge."""

    name: str
    x: Array
    y: Array
    kind: str = "line"
    """``"line"``, ``"dots"``, or ``"bars"`` from ``x`` on, as wide as the step between two."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Series in one pair of axes."""

    title: str
    x: str
    """The label of the horizontal axis, with its unit."""
    y: str
    series: Sequence[Series]
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""


@dataclass(frozen=True, slots=True)
class Shares:
    """One bar per row, split in the proportions of `SHARES`."""

    title: str
    rows: Sequence[tuple[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Page:
    """The contents of a page, as plain data; its text need not be trusted."""

    title: str
    subtitle: str
    figures: Lines
    """The most important numbers, each with its name."""
    facts: Lines
    parts: Sequence[Plot | Shares | Table]


def episode_plots(frames: Array, returns: Array, lengths: Array, every: int = 1) -> list[Plot]:
    """Return plots of the frames when episodes ended, of their returns and their lengths, ``[N]``.

    Each is one of ``every`` episodes.
    """
    good = np.isfinite(returns)
    frames, returns, lengths = frames[good], returns[good], lengths[good]
    if not len(frames):
        return []
    dots = "an episode" if every == 1 else f"one of {every:,} episodes"
    window = max(1, _WINDOW // every)
    first = np.maximum(np.arange(len(frames)) + 1 - window, 0)

    def over_frames(title: str, label: str, values: Array, from_zero: bool) -> Plot:
        total = np.cumsum(np.insert(values.astype(np.float64), 0, 0.0))
        means = (total[1:] - total[first]) / (np.arange(len(values)) + 1 - first)
        return Plot(
            title,
            "frames",
            label,
            [
                Series(dots, frames, values, "dots"),
                Series(f"mean of {window * every:,}", frames, means),
            ],
            from_zero,
        )

    edges, counts = histogram(returns)
    return [
        over_frames("Returns", "return of an episode", returns, False),
        Plot(
            "Distribution of returns",
            "return of an episode",
            "episodes",
            [Series("episodes", edges, counts, "bars")],
            True,
        ),
        over_frames("Lengths of episodes", "steps", lengths, True),
    ]


def histogram(values: Array, most: int = _BINS) -> tuple[Array, Array]:
    """Return left edges of about ``most`` bins, at round numbers, and how many values are in each.

    >>> edges, counts = histogram(np.array([1.0, 2.0, 2.0, 4.0]))
    >>> edges.tolist(), counts.tolist()
    ([1.0, 2.0, 3.0, 4.0], [1, 2, 0, 1])
    """
    values = values[abs(values) < _HUGE]
    if not len(values):
        return np.empty(0), np.empty(0, int)
    low, high = float(values.min()), float(values.max())
    step = _step(values, high - low if high - low > 1e-200 else 1.0, most)
    first = float(np.floor(low / step))
    bins = (np.floor(values / step) - first).astype(np.int64)
    counts = np.bincount(bins)
    return (first + np.arange(len(counts))) * step, counts


def in_unit(seconds: Array) -> tuple[str, Array]:
    """Return times in the unit that suits them, and its name.

    >>> in_unit(np.array([0.0, 7200.0]))
    ('hours', array([0., 2.]))
    """
    last = float(seconds[-1]) if len(seconds) else 0.0
    unit, size = next(
        pair
        for pair in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if last >= 2 * pair[1] or pair[1] == 1.0
    )
    return unit, seconds / size


# -- axes ------------------------------------------------------------------------------------------


def _step(values: Array, span: float, most: int) -> float:
    """Return the smallest round number that divides ``span`` into at most ``most`` parts.

    It is at least 1 if all ``values`` are integers.
    """
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if span / (power * m) <= most)
    return max(step, 1.0) if np.all(values == np.round(values)) else step


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def around(cls, values: Array, most: int, *, zero: bool = False, tight: bool = False) -> _Axis:
        """Return an axis that shows all ``values`` and has at most about ``most`` ticks."""
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        low = min(low, 0.0) if zero else low
        if high - low <= max(1e-9 * max(abs(high), abs(low)), 1e-200):
            pad = max(0.5, 0.05 * abs(high))
            low, high = (0.0, high or 1.0) if zero and high >= 0 else (low - pad, high + pad)
        step = _step(values, high - low, most)
        if not tight:
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, [i * step for i in range(first, last + 1)])

    def place(self, values: Any) -> Any:
        """Return the positions of values along the axis, from 0 to 1."""
        return (values - self.low) / (self.high - self.low)


# -- HTML ------------------------------------------------------------------------------------------


def save(path: str | Path, page: Page) -> None:
    """Write ``page`` to ``path``; replace an existing file at once."""
    tensor_files.replace(Path(path), render(page))


def render(page: Page) -> str:
    """Return the page as HTML."""
    figures, facts = _named(page.figures), _named(page.facts)
    parts = "\n".join(_part(part) for part in page.parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_text(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{_text(page.title)}</h1><p>{_text(page.subtitle)}</p></header>
<dl class="figures">{figures}</dl>
<main>
{parts}
</main>
<dl class="facts">{facts}</dl>
<footer>GleanRL {__version__}, {datetime.now(UTC):%d %B %Y, %H:%M} UTC</footer>
</body>
</html>
"""


def _named(lines: Lines) -> str:
    return "".join(f"<div><dt>{_text(a)}</dt><dd>{_text(b)}</dd></div>" for a, b in lines)


def _text(text: str) -> str:
    """Return ``text`` escaped for HTML, because it may come from anyone."""
    return html.escape(plain(text))


def _part(part: Plot | Shares | Table) -> str:
    if isinstance(part, Plot):
        return _plot(part)
    return _shares(part) if isinstance(part, Shares) else _table(part)


def _plot(plot: Plot) -> str:
    series = [_finite(one) for one in plot.series]
    bars = any(one.kind == "bars" for one in series)
    width = 0.0
    if bars:
        edges = series[0].x
        width = float(edges[1] - edges[0]) if len(edges) > 1 else 1.0
    x = np.concatenate(
        [*(one.x for one in series), *(one.x[-1:] + width for one in series if bars)]
    )
    across = _Axis.around(x, 6, zero=not bars, tight=True)
    up = _Axis.around(np.concatenate([one.y for one in series]), 5, zero=plot.from_zero)
    grid = "".join(f"M0 {_BOX - round(_BOX * up.place(tick))}h{_BOX}" for tick in up.ticks)
    drawn = "".join(_draw(one, across, up, width) for one in series if len(one.x))
    named = series if len(series) > 1 else []
    keys = "".join(f'<span class="{one.kind}">{_text(one.name)}</span>' for one in named)
    return f"""<figure>
<figcaption>{_text(plot.title)}<span class="keys">{keys}</span></figcaption>
<div class="label">{_text(plot.y)}</div>
<div class="plot">
<div class="up">{_ticks(up, "bottom")}</div>
<svg viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none" role="img" \
aria-label="{_text(f"{plot.y} over {plot.x}")}"><path class="grid" d="{grid}"/>{drawn}</svg>
<div class="across">{_ticks(across, "left")}</div>
</div>
<div class="label end">{_text(plot.x)}</div>
</figure>"""


def _finite(series: Series) -> Series:
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    good = np.isfinite(x) & (abs(y) < _HUGE)
    return Series(series.name, x[good], y[good], series.kind)


def _ticks(axis: _Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{100 * axis.place(tick):.2f}%">{number(tick)}</span>'
        for tick in axis.ticks
    )


def _draw(series: Series, across: _Axis, up: _Axis, width: float) -> str:
    most = _DOTS if series.kind == "dots" else _LINE
    step = -(-len(series.x) // most)
    x = np.round(_BOX * across.place(series.x[::step])).astype(int)
    y = _BOX - np.round(_BOX * up.place(series.y[::step])).astype(int)
    if series.kind == "dots":
        steps = sorted({f"M{a} {b}h0" for a, b in zip(x, y, strict=True)})
    elif series.kind == "line":
        steps = [f"{'L' if i else 'M'}{a} {b}" for i, (a, b) in enumerate(zip(x, y, strict=True))]
    else:
        right = np.round(_BOX * across.place(series.x + width)).astype(int)
        bars = zip(x, right, y, strict=True)
        steps = [f"M{a} {_BOX}V{top}H{b}V{_BOX}z" for a, b, top in bars if top < _BOX]
    return f'<path class="{series.kind}" d="{"".join(steps)}"/>'


def _shares(shares: Shares) -> str:
    rows = []
    for name, parts in shares.rows:
        total = sum(parts) or 1.0
        bar = "".join(
            f'<i class="s{i}" style="width:{100 * part / total:.2f}%" '
            f'title="{kind} {100 * part / total:.1f} %">'
            f"{f'{100 * part / total:.0f} %' if part / total >= 0.08 else ''}</i>"
            for i, (kind, part) in enumerate(zip(SHARES.values(), parts, strict=True))
        )
        rows.append(f"<span>{_text(name)}</span><div>{bar}</div>")
    keys = "".join(f'<span class="s{i}">{kind}</span>' for i, kind in enumerate(SHARES.values()))
    return f"""<figure>
<figcaption>{_text(shares.title)}<span class="keys">{keys}</span></figcaption>
<div class="shares">{"".join(rows)}</div>
</figure>"""


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.headers)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return f"""<figure class="table">
<figcaption>{_text(table.title)}</figcaption>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</figure>"""


_STYLE = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1b1f27;--dim:#616a79;
--line:#e3e6eb;--dot:#3b78c9;--mean:#c8501e;--bar:#5b8fd6;--s0:#2f6fc4;--s1:#b35a10;--s2:#7a52b8;--s3:#6b7280}
@media(prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1c1f25;--ink:#e8eaee;--dim:#9aa3b2;
--line:#30353e;--dot:#6aa5f2;--mean:#ff9a62;--bar:#5288cf}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2.2rem 1.5rem;max-width:78rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
h1{margin:0;font-size:1.6rem;line-height:1.2;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:.3rem 0 0;color:var(--dim);overflow-wrap:anywhere}
dl,dd{margin:0}
dt{color:var(--dim);font-size:.8rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.6rem,1fr));gap:.9rem;
margin:1.6rem 0 .9rem}
.figures div,figure,.facts{background:var(--card);border:1px solid var(--line);border-radius:10px}
.figures div{padding:.7rem 1rem}
.figures dd{font-size:1.35rem;font-weight:600;line-height:1.3;letter-spacing:-.01em}
main{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.9rem}
figure{margin:0;padding:.9rem 1.1rem .8rem;min-width:0}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:.1rem 1rem;font-weight:600;
margin-bottom:.5rem}
.keys{display:flex;flex-wrap:wrap;gap:0 .9rem;font-weight:400;font-size:.8rem;color:var(--dim)}
.keys span::before{content:"";display:inline-block;width:.6em;height:.6em;border-radius:2px;
margin-right:.4em;background:var(--c)}
.keys .dots{--c:var(--dot)}.keys .dots::before{border-radius:50%}
.keys .line{--c:var(--mean)}.keys .line::before{height:.2em;width:1em;vertical-align:.25em}
.label{color:var(--dim);font-size:.78rem}.end{text-align:right}
.plot{position:relative;height:13.5rem;margin:.5rem .4rem 1.5rem 3.1rem}
svg{display:block;width:100%;height:100%;overflow:visible}
path{vector-effect:non-scaling-stroke;fill:none}
.grid{stroke:var(--line);stroke-width:1}
.plot .dots{stroke:var(--dot);stroke-width:4.5;stroke-linecap:round;stroke-opacity:.38}
.plot .line{stroke:var(--mean);stroke-width:2;stroke-linejoin:round}
.plot .bars{fill:var(--bar);stroke:var(--card);stroke-width:1}
.up span,.across span{position:absolute;font-size:.78rem;line-height:1;color:var(--dim);
white-space:nowrap}
.up span{right:calc(100% + .5rem);transform:translateY(50%)}
.across span{top:calc(100% + .45rem);transform:translateX(-50%)}
.shares{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.45rem .8rem;align-items:center;
font-size:.85rem;max-height:20rem;overflow:auto}
.shares div{display:flex;height:1.5rem;border-radius:4px;overflow:hidden}
.shares i{font-style:normal;font-size:.75rem;line-height:1.5rem;color:#fff;text-align:center;
overflow:hidden;white-space:nowrap}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}
.shares i{background:var(--c)}
.scroll{overflow-x:auto;max-height:20rem}
table{border-collapse:collapse;width:100%;font-size:.85rem}
th,td{padding:.3rem .8rem .3rem 0;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:400;font-size:.78rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(16rem,1fr));gap:.6rem 1.5rem;
padding:1rem 1.1rem;margin-top:.9rem}
.facts dd{overflow-wrap:anywhere}
footer{margin-top:1rem;color:var(--dim);font-size:.8rem}
@media(max-width:48rem){body{padding:1.2rem .8rem}main{grid-template-columns:minmax(0,1fr)}
.figures{grid-template-columns:repeat(2,minmax(0,1fr))}.plot{height:11.5rem}}
@media print{body{background:none}figure{break-inside:avoid}}
"""
