"""The page of `crosskv report`: every claim of a directory of rows as tables and plots. It never measures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from crosskv.errors import BadInput
from crosskv.evals import report, retention

Row = dict[str, Any]
DRIFTING = ("own", "mapped", "none", "source")
COLUMNS = ("pair or model", "task", "arm", "n", "score", "retention", "above the floor", "gap recovered", "cold / warm",
           "note")  # fmt: skip
MEANING = (
    "Score: accuracy, or NLL in nats per token. Retention: the arm's accuracy over that of the target's own cache, or "
    "perplexity with its own cache over that of the arm. Above the floor: the same with the chance level taken off. "
    "Gap recovered: the way from no context (0) to its own cache (1). In brackets: 95 % intervals over cases, not "
    "corrected for the number of comparisons. Cold: with the source's prefill; warm: without."
)


def build(rows: Sequence[Row], title: str = "crosskv report") -> str:
    """One HTML document of all rows; tables of all claims, and plots where a claim has one."""
    cases = [r for r in rows if r["claim"] == retention.CLAIM]
    found = retention.summary(cases)
    sections = [
        *worth(found),
        *drift([c for c in cases if c.get("turn") is not None]),
        *screens([r for r in rows if _is_screen(r)]),
        *ratios(rows, found),
        *latency(rows),
        *claims([r for r in rows if r["claim"] != retention.CLAIM and not _is_screen(r)]),
    ]
    return report.page(title, sections, report.origin(rows))


def markdown(found: Sequence[Row]) -> str:
    """The retention table as README has it; found: retention.summary()."""
    if not found:
        raise BadInput(f"There are no rows of claim {retention.CLAIM!r}, so there is no retention table.")
    lines = [[str(x).replace("|", "\\|").replace("\n", " ") for x in line] for line in _lines(found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(COLUMNS), ["---"] * len(COLUMNS), *lines])


def worth(found: Sequence[Row]) -> list[tuple[str, str]]:
    """Verdict, retention tables and bars, a section per setting."""
    if not found:
        return []
    said = "".join(f"<p>{escape(line)}</p>" for line in retention.verdict(found).splitlines())
    out = [("case: is it worth it?", f'{said}<p class="note">{escape(MEANING)}</p>')]
    for label, group in _by(found, lambda r: words(r["setting"])):
        body = report.table(COLUMNS[1:], [line[1:] for line in _lines(group)])
        for task, arms in _by(group, lambda r: r["task"]):
            shown = [r for r in arms if r["arm"] != "own" and r["retention"] is not None]
            spans = [(_or(r["retention_low"], r["retention"]), _or(r["retention_high"], r["retention"])) for r in shown]
            if shown:
                body += report.bars(f"{task}: retention (1: own cache)", [r["arm"] for r in shown],
                                    [r["retention"] for r in shown], spans, mark=1)  # fmt: skip
        out.append((f"Retention, {label}", body))
    return out


def drift(cases: Sequence[Row]) -> list[tuple[str, str]]:
    """Score per turn with its interval, of own, mapped, none and source."""
    found = [r for r in retention.summary(cases, by_turn=True) if retention.split(r["arm"])[0] in DRIFTING]
    out = []
    for label, group in _by(found, lambda r: f"{words(r['setting'])}, {r['task']}"):
        series = {
            arm: _sorted([(r["turn"], r["score"], r["score_low"], r["score_high"]) for r in turns])
            for arm, turns in _by(group, lambda r: r["arm"])
        }
        axes = ("turn", f"{group[0]['metric']} (band: 95 %)")
        out.append((f"Drift, {label}", report.lines(f"{group[0]['metric']} per turn", series, axes)))
    return out


def _is_screen(row: Row) -> bool:
    return row["claim"] == "screen" and {"layer", "head"} <= set(row["setting"])


def screens(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Heat maps of layer x head, one per metric, pair and arm; a cell that was measured more than once is its mean."""
    out = []
    for label, group in _by(rows, lambda r: f"{r['metric']}, {words(_without(r['setting'], 'layer', 'head', 'arm'))}"):
        body = ""
        for arm, cells in _by(group, lambda r: str(r["setting"].get("arm", ""))):
            layers, heads = (sorted({r["setting"][k] for r in cells}) for k in ("layer", "head"))
            values: dict[tuple[Any, Any], list[float]] = {}
            for r in cells:
                values.setdefault((r["setting"]["layer"], r["setting"]["head"]), []).append(r["value"])
            grid = [[_mean(values.get((y, x), [])) for x in heads] for y in layers]
            body += report.heat(f"{arm} (layer x head)", [str(y) for y in layers], [str(x) for x in heads], grid)
        out.append((f"screen: {label}", body))
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def ratios(rows: Sequence[Row], found: Sequence[Row]) -> list[tuple[str, str]]:
    """How likelihood falls as caches shrink: a plot per claim and setting that has both, one line per method."""
    out = []
    points = _measured_ratios(rows) + _ratios_of_cases(found)
    for (label, what), each in _by(points, lambda x: x[0]):
        series = {name: _sorted([p for _, _, p in same]) for name, same in _by(each, lambda x: method(x[1]))}
        plot = report.lines("what fewer bytes cost", series, (what, "NLL increase, nats/token"), True, 0.01, band=False)
        out.append((f"Ratio against NLL, {label}", plot))
    return out


def _measured_ratios(rows: Sequence[Row]) -> list[tuple[tuple[str, str], str, report.Point]]:
    """((plot, what the ratio is of), arm, (ratio, NLL increase, low, high)) of rows of one setting that have both."""
    out = []
    arms = [r for r in rows if {"arm", "model"} <= set(r["setting"]) and r["claim"] != retention.CLAIM]
    for _, same in _by(arms, lambda r: (r["claim"], json.dumps(r["setting"], sort_keys=True))):
        measured = {r["metric"]: r for r in same}
        ratio, what = _ratio(measured)
        if ratio and (loss := measured.get("nll increase")):
            label = f"{loss['claim']}: {words(_without(loss['setting'], 'arm'))}"
            out.append(((label, what), loss["setting"]["arm"], (ratio, *_span(loss))))
    return out


def _ratios_of_cases(found: Sequence[Row]) -> list[tuple[tuple[str, str], str, report.Point]]:
    """The same from a summary of cases whose arms hold fewer bytes than the own cache."""
    out = []
    for label, same in _by([r for r in found if r["metric"] == "nll" and r["bytes"]], _place):
        own = next((r["bytes"] for r in same if r["arm"] == "own"), None)
        for r in same if own else []:
            if r["arm"] != "own":
                better, low, high = r["better_than"]["own"]
                loss = (-better, None, None) if low is None else (-better, -high, -low)
                plot = f"case: {label}", "times fewer bytes than the own cache"
                out.append((plot, r["arm"], (own / r["bytes"], *loss)))
    return out


def _sorted(points: list[report.Point]) -> list[report.Point]:
    return sorted(points, key=lambda p: p[0])


def _place(row: Row) -> str:
    return f"{words(row['setting'])}, {row['task']}"


def _ratio(measured: dict[str, Row]) -> tuple[float | None, str]:
    """How many times smaller, and of what; a whole cache goes before its packed tokens."""
    if "ratio" in measured:
        return measured["ratio"]["value"], "times fewer bytes, whole cache, 2 bytes per entry = 1"
    if measured.get("packed", {}).get("ratio"):
        return measured["packed"]["ratio"], f"times fewer bytes, a packed token, {_baseline(measured['packed'])} = 1"
    return None, ""


def _baseline(row: Row) -> str:
    return str((row.get("baseline") or {}).get("name", "baseline"))


def method(arm: str) -> str:
    """The line of a plot that an arm belongs to: "tokens G=4 8x" to "tokens G=4", "int3" and "3" to "int"."""
    if found := re.fullmatch(r"(.+?),? [\d.]+x", arm):
        return found[1]
    found = re.fullmatch(r"(?:int)?\d+(\D.*)?", arm)
    return "int" + (found[1] or "") if found else arm


def latency(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Seconds against length, where one and the same thing was timed at several lengths."""
    timed = [r for r in rows if r["claim"] in ("transfer time", "retention time") and "length" in r["setting"]]
    out = []
    for label, group in _by(timed, lambda r: f"{r['claim']}: {words(_without(r['setting'], 'length', 'what', 'arm'))}"):
        series = {
            what: _sorted([(r["setting"]["length"], *_span(r)) for r in same])
            for what, same in _by(group, lambda r: str(r["setting"].get("what", r["setting"].get("arm", r["metric"]))))
        }
        if any(len(s) > 1 for s in series.values()):
            unit = f"{group[0]['metric']}, {group[0].get('unit', '')}"
            out.append((f"Latency, {label}", report.lines("time against length", series, ("tokens", unit), True)))
    return out


def claims(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Every other row: a section per claim, a table per kind of setting, a column per metric."""
    out = []
    for claim, group in _by(rows, lambda r: str(r["claim"])):
        body = ""
        for _, same in _by(group, lambda r: tuple(sorted(r["setting"]))):
            body += _generic(same)
        out.append((f"{claim}: all rows", body))
    return out


def _generic(rows: Sequence[Row]) -> str:
    """Rows whose settings have the same fields: what all share above, what differs in columns, then the metrics."""
    fields = list(rows[0]["setting"])
    shared = {k for k in fields if len({json.dumps(r["setting"][k]) for r in rows}) == 1}
    metrics = list(dict.fromkeys(str(r["metric"]) for r in rows))
    units = {str(r["metric"]): r.get("unit") or "" for r in rows}
    lines: dict[tuple[str, int], list[Any]] = {}
    for r in rows:
        setting, at, turn = json.dumps(r["setting"], sort_keys=True), len(fields) - len(shared), 0
        new = [_word(r["setting"][k]) for k in fields if k not in shared] + [""] * len(metrics)
        column = at + metrics.index(str(r["metric"]))
        while lines.setdefault((setting, turn), new)[column]:  # the same thing measured again: a line of its own
            turn, new = turn + 1, [*new]
        lines[setting, turn][column] = _value(r)
    head = [k for k in fields if k not in shared] + [f"{m}{', ' * bool(units[m])}{units[m]}" for m in metrics]
    common = words({k: rows[0]["setting"][k] for k in fields if k in shared})
    many = f"{len(rows)} row{'s' * (len(rows) > 1)}"
    table = report.table(head, list(lines.values()))
    return f"<details open><summary>{escape(common or 'settings')} ({many})</summary>{table}</details>"


def _value(row: Row) -> str:
    """3.409 (3.3 to 3.5) [1.2x against own prefill]"""
    said = _number(row["value"])
    if row.get("low") is not None and row.get("high") is not None:
        said += f" ({_number(row['low'])} to {_number(row['high'])})"
    if row.get("ratio") and row.get("baseline"):
        said += f" [{row['ratio']:.3g}x against {_baseline(row)}]"
    return said


def _number(x: Any) -> str:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return str(x)
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"


def _lines(found: Sequence[Row]) -> list[list[Any]]:
    """The cells of COLUMNS for every row of a summary."""
    return [
        [words(r["setting"]), r["task"], r["arm"], str(r["n"]), _spanned(r, "score"), _spanned(r, "retention"),
         _spanned(r, "floor_normalised"), _spanned(r, "gap"), _times(r), _noted(r)]
        for r in found
    ]  # fmt: skip


def cells(row: Row) -> list[str]:
    """Score, retention, gap recovered and times of one row of a summary, in a few characters each."""
    return [*(_spanned(row, name) for name in ("score", "retention", "gap")), _times(row)]


def _spanned(row: Row, name: str) -> str:
    """0.47 (0.40 to 0.55); nothing where there is no such figure."""
    if row.get(name) is None:
        return ""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    digits = 3 if name == "score" and row["metric"] == "nll" else 2
    return f"{row[name]:.{digits}f}" + ("" if low in (None, high) else f" ({low:.{digits}f} to {high:.{digits}f})")


def _times(row: Row) -> str:
    both = ["" if row[k] is None else f"{1000 * row[k]:.0f} ms" for k in ("cold", "warm")]
    return " / ".join(both) if any(both) else ""


def _noted(row: Row) -> str:
    size = f"{row['bytes']:,.0f} bytes/token" if row["bytes"] else ""
    return "; ".join(x for x in (size, row["note"]) if x)


def _span(row: Row) -> tuple[float, float | None, float | None]:
    return row["value"], row.get("low"), row.get("high")


def _or(x: float | None, other: float) -> float:
    return other if x is None else x


def words(setting: Row) -> str:
    """A setting in one line: "S->L, host torch, k all"; the pair or the model without its name."""
    return ", ".join(_word(v) if k in ("pair", "model") else f"{k} {_word(v)}" for k, v in setting.items())


def _word(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.6g}"
    return x if isinstance(x, str) else json.dumps(x).replace('"', "")


def _without(setting: Row, *names: str) -> Row:
    return {k: v for k, v in setting.items() if k not in names}


def _by(rows: Sequence[Any], key: Any) -> list[tuple[Any, list[Any]]]:
    """(key, rows) in the order in which the keys come."""
    groups: dict[Any, list[Any]] = {}
    for r in rows:
        groups.setdefault(key(r), []).append(r)
    return list(groups.items())
