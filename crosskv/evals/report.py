"""A self-contained HTML page from result rows: tables and plots. It reads rows and never measures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosskv.errors import MissingExtra

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .3rem .8rem; border-bottom: 1px solid #d8dee4 }
th { text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f8fa; padding: .8rem; white-space: pre-wrap } img { max-width: 100% } footer { color: #59636e }
"""


def page(title: str, sections: Sequence[tuple[str, str]], machine: dict[str, Any]) -> str:
    """An HTML document of (heading, HTML body) sections; `machine` as in rows.machine() goes into the footer."""
    body = "".join(f"<h2>{html.escape(h)}</h2>\n{b}\n" for h, b in sections)
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    footer = html.escape(f"{machine['machine']}; {machine['system']}; {versions}; commit {machine['commit']}")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html>{head}<h1>{html.escape(title)}</h1>\n{body}<footer>{footer}</footer></html>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(x: Any) -> str:
        if isinstance(x, float):
            return f'<td class="number">{x:.3f}</td>'
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
    from matplotlib import pyplot

    return pyplot


def _image(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    _pyplot().close(figure)
    return f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def bars(
    title: str, labels: Sequence[str], values: Sequence[float], spans: Sequence[tuple[float, float]] | None
) -> str:
    """Horizontal bars with intervals (low, high), as an <img>."""
    figure, axes = _pyplot().subplots(figsize=(6.5, 0.4 * len(labels) + 1))
    error = None if spans is None else [[v - a for v, (a, _) in zip(values, spans, strict=True)],
                                        [b - v for v, (_, b) in zip(values, spans, strict=True)]]  # fmt: skip
    axes.barh(range(len(labels)), values, xerr=error, color="#4c78a8", ecolor="#1b1f24", capsize=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(0, color="#1b1f24", lw=0.8)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return _image(figure)


def heat(title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """A heat map with the value in every cell, as an <img>; scale 0 to 1."""
    figure = heat_figure(title, rows, columns, values)
    return _image(figure)


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


def write(path: Path, document: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(document, encoding="utf-8")
    temporary.replace(path)
