"""A self-contained HTML page from result rows: tables and plots. It reads rows and never measures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosskv.errors import MissingExtra

Point = tuple[float, float, float | None, float | None]
MARKS = "os^vDP*X<>"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
td, th { padding: .3rem .8rem; border-bottom: 1px solid #d8dee4 }
th { text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f8fa; padding: .8rem; white-space: pre-wrap }
img { max-width: 100% } footer, .note { color: #59636e }
summary { cursor: pointer }
"""


def page(title: str, sections: Sequence[tuple[str, str]], footer: str) -> str:
    """An HTML document of (heading, HTML body) sections; footer: HTML, as of origin()."""
    body = "".join(f"<h2>{html.escape(h)}</h2>\n{b}\n" for h, b in sections)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html>{head}<h1>{html.escape(title)}</h1>\n{body}<footer>{footer}</footer></html>\n"


def origin(rows: Sequence[dict[str, Any]]) -> str:
    """Every distinct machine with its versions in the rows (as of rows.machine()), and the commits measured there."""
    commits: dict[str, list[str]] = {}
    for r in rows:
        versions = ", ".join(f"{k} {v}" for k, v in (r.get("versions") or {}).items())
        where = "; ".join(x for x in (r.get("machine"), r.get("system"), versions) if x) or "unknown machine"
        seen = commits.setdefault(where, [])
        commit = str(r.get("commit") or "unknown")
        seen += [] if commit in seen else [commit]
    said = (f"{where}; commit {', '.join(seen)}" for where, seen in commits.items())
    return "".join(f"<p>{html.escape(s)}</p>" for s in said)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(x: Any) -> str:
        if isinstance(x, float):
            return f'<td class="number">{x:.3f}</td>'
        if x is None:
            return "<td></td>"
        return f"<td>{html.escape(str(x))}</td>"

    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{''.join(map(cell, r))}</tr>" for r in rows) + "</table>"


def text(value: str) -> str:
    return f"<pre>{html.escape(value)}</pre>"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise MissingExtra("Plots need matplotlib: pip install 'crosskv[eval]'") from e
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # names are text, dollar signs and all
    from matplotlib import pyplot

    return pyplot


def _image(figure: Any, title: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    _pyplot().close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(title)}">'


def bars(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    spans: Sequence[tuple[float, float]] | None,
    mark: float | None = None,
) -> str:
    """Horizontal bars with intervals (low, high), as an <img>; mark: where a dashed line stands."""
    figure, axes = _pyplot().subplots(figsize=(6.5, 0.4 * len(labels) + 1))
    error = None if spans is None else [[v - a for v, (a, _) in zip(values, spans, strict=True)],
                                        [b - v for v, (_, b) in zip(values, spans, strict=True)]]  # fmt: skip
    axes.barh(range(len(labels)), values, xerr=error, color="#4c78a8", ecolor="#1b1f24", capsize=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(0, color="#1b1f24", lw=0.8)
    if mark is not None:
        axes.axvline(mark, color="#59636e", lw=0.8, ls="--")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return _image(figure, title)


def heat(title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """A heat map with the value in every cell, as an <img>; scale 0 to 1."""
    figure = heat_figure(title, rows, columns, values)
    return _image(figure, title)


def heat_figure(title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]]) -> Any:
    figure, axes = _pyplot().subplots(figsize=(0.5 * len(columns) + 1.8, 0.45 * len(rows) + 1))
    axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    for i, line in enumerate(values):
        for j, v in enumerate(line):
            shown = f"{v:.2f}".removeprefix("0") if 0 <= v < 1 else f"{v:.1f}"
            axes.text(j, i, shown, ha="center", va="center", fontsize=7, color="white" if v < 0.6 else "black")
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def lines(
    title: str,
    series: Mapping[str, Sequence[Point]],
    labels: tuple[str, str],
    log_x: bool = False,
    linear_below: float | None = None,
    band: bool = True,
) -> str:
    """Lines of points (x, y, low, high), low and high may be None, as an <img>; labels of both axes. linear_below: the
    y axis is logarithmic beyond that size on either side of 0. band: intervals as bands, else as strokes.
    """
    figure, axes = _pyplot().subplots(figsize=(6.5, 3.8))
    for i, (name, points) in enumerate(series.items()):
        x, y = [p[0] for p in points], [p[1] for p in points]
        low, high = ([p[1] if p[j] is None else p[j] for p in points] for j in (2, 3))
        colour = f"C{i}" if len(series) <= 10 else _pyplot().cm.tab20(i % 20)
        axes.plot(x, y, marker=MARKS[i % len(MARKS)], ms=4, lw=1.4, color=colour, label=name)
        if band:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        else:
            axes.vlines(x, low, high, color=colour, alpha=0.5, lw=1)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if linear_below is not None:
        axes.set_yscale("symlog", linthresh=linear_below)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.axhline(0, color="#1b1f24", lw=0.8)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _image(figure, title)


def write(path: Path, document: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(document, encoding="utf-8")
    temporary.replace(path)
