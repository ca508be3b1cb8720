"""What a cache is worth, from case rows: each holds the scores of all arms on one case of one task, so that arms are
compared case by case. Pure statistics: nothing here runs a model.

    retention          accuracy: arm / own;  NLL: exp(own - arm), the perplexity of own over that of the arm
    floor-normalised   (arm - floor) / (own - floor), accuracy only; floor: the chance level
    gap recovered      NLL: (none - arm) / (none - own);  accuracy: (arm - none) / (own - none)

All are of means over cases, with 95 % intervals from drawing whole cases with replacement (as metrics.paired_bootstrap
does, from the same random numbers, for all arms at once). Draws without a denominator are left out, and said so.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats

from crosskv.errors import BadInput

CLAIM = "case"
METRICS = ("accuracy", "nll")
RIVALS = ("none", "source", "wrong document")
DRAWS = 2000
WHY = {"retention": "own scores 0", "floor_normalised": "own is at the floor", "gap": "own is no better than none"}
OPTION = re.compile(r"\w+=\S+")

Row = dict[str, Any]
Statistic = Callable[[dict[str, Any]], Any]


def summary(cases: Sequence[Row], by_turn: bool = False) -> list[Row]:
    """One row per (setting, task, arm), and per turn if asked, in the order of the cases.

    Each holds n, score, retention, floor_normalised and gap (None where there is no denominator: see note), each with
    its _low and _high; better_than {own, none, source, wrong document: (difference, low, high)}, positive where the arm
    is better; the medians cold and warm in seconds; bytes per token. Turns of one case are averaged first unless they
    are asked for: what is drawn is a whole case, since the turns of a conversation depend on one another.
    """
    return [row for group in _groups(cases, by_turn) for row in _arms(group, by_turn)]


def verdict(rows: Sequence[Row]) -> str:
    """Whether mapped caches are worth their trouble, a sentence per pair, task and mapped arm. rows: cases, or their
    summary.
    """
    found = summary(rows) if any(r.get("claim") == CLAIM for r in rows) else rows
    said = [_sentence(r) for r in found if "pair" in r["setting"] and split(r["arm"])[0] == "mapped"]
    return "\n".join(said) or "There are no cases of a pair with a mapped arm."


def correlation(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Pearson's r of (x, y) pairs, as retention against R2 or cosine, and its 95 % interval (Fisher's)."""
    x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
    if len(x) < 4 or not np.isfinite([x, y]).all() or np.ptp(x) == 0 or np.ptp(y) == 0:
        raise BadInput(f"A correlation needs at least 4 finite points that differ in x and in y, got {len(x)}.")
    found = stats.pearsonr(x, y)
    low, high = found.confidence_interval(0.95)
    return float(found.statistic), float(low), float(high)


def split(arm: str) -> tuple[str, str]:
    """("mapped", ", hold_back=32") of "mapped, hold_back=32": the name, and the options as they are written."""
    name, *options = arm.split(", ")
    plain = not all(OPTION.fullmatch(o) for o in options)
    return (arm, "") if plain else (name, arm[len(name) :])


def _checked(case: Row) -> Row:
    """The case, or what is wrong with it."""
    missing = {"task", "case", "metric", "arms", "setting"} - set(case)
    if missing:
        raise BadInput(f"A case row lacks {', '.join(sorted(missing))}: {json.dumps(case)[:160]}")
    where = f"case {case['case']} of {case['task']}"
    if case["metric"] not in METRICS:
        raise BadInput(f"The metric of {where} must be accuracy or nll, got {case['metric']!r}.")
    if "own" not in case["arms"]:
        raise BadInput(f"The arms of {where} lack 'own', which all others are compared with.")
    wrong = [arm for arm, score in case["arms"].items() if not _is_number(score)]
    if wrong:
        raise BadInput(f"The score of {wrong[0]!r} in {where} must be a finite number, got {case['arms'][wrong[0]]!r}.")
    return case


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def _groups(cases: Sequence[Row], by_turn: bool) -> list[list[Row]]:
    """Cases of one setting, task and (if asked) turn; the same case twice is an error."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    seen = set()
    for case in map(_checked, cases):
        setting = json.dumps(case["setting"], sort_keys=True)
        key = (setting, case["task"], case["case"], case.get("turn"))
        if key in seen:
            turn = "" if case.get("turn") is None else f", turn {case['turn']}"
            raise BadInput(f"Case {case['case']} of {case['task']}{turn} is there twice in the setting {setting}.")
        seen.add(key)
        groups.setdefault((setting, case["task"], case.get("turn") if by_turn else None), []).append(case)
    for (setting, task, _), group in groups.items():
        if len({c["metric"] for c in group}) > 1:
            raise BadInput(f"The cases of {task} have different metrics in the setting {setting}.")
    return list(groups.values())


def _arms(group: list[Row], by_turn: bool) -> list[Row]:
    """The summary of every arm of a group."""
    by_case: dict[Any, list[Row]] = {}
    for c in group:
        by_case.setdefault(c["case"], []).append(c)
    names = list(dict.fromkeys(arm for c in group for arm in c["arms"]))
    columns: dict[str, dict[Any, float]] = {
        arm: {k: _mean(c["arms"][arm] for c in turns) for k, turns in by_case.items()
              if all(arm in c["arms"] for c in turns)}
        for arm in names
    }  # fmt: skip
    floors = {k: _mean(c.get("floor") or 0.0 for c in turns) for k, turns in by_case.items()}
    return [_arm(arm, group, columns, floors, by_turn) for arm in names if columns[arm]]


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _arm(arm: str, group: list[Row], columns: dict[str, dict[Any, float]], floors: dict, by_turn: bool) -> Row:
    first, notes = group[0], []
    who = {"arm": arm, "own": "own", "none": _partner(arm, "none", columns)}
    cases = list(columns[arm])
    if len(cases) < len(floors):
        notes.append(f"in {len(cases)} of {len(floors)} cases")
    usable = {role: columns[name] for role, name in who.items() if name and set(cases) <= set(columns[name])}
    data = {role: np.array([column[k] for k in cases]) for role, column in usable.items()}
    data["floor"] = np.array([floors[k] for k in cases])
    row: Row = {
        "setting": first["setting"],
        "task": first["task"],
        "turn": first.get("turn") if by_turn else None,
        "metric": first["metric"],
        "arm": arm,
        "n": len(cases),
    }
    for name, statistic in _statistics(first["metric"]).items():
        found: tuple[Any, ...] = (None, None, None, "")
        if name == "gap" and "none" not in data:
            other = any(split(a)[0] == "none" for a in columns)  # a compressed cache has no such arm, and needs no note
            found = (*found[:3], "no arm 'none' with the same hold_back in these cases") if other else found
        else:
            found = _interval(statistic, data)
            found = found if found[0] is not None else (*found[:3], WHY[name])
        row |= {name: found[0], f"{name}_low": found[1], f"{name}_high": found[2]}
        notes += [f"{name.replace('_', '-')}: {found[3]}"] if found[3] else []
    row["better_than"] = _differences(arm, first["metric"], cases, columns)
    for kind in ("cold", "warm"):
        row[kind] = _median((c.get("seconds") or {}).get(arm, {}).get(kind) for c in group)
    row["bytes"] = _median((c.get("bytes") or {}).get(arm) for c in group)
    return row | {"note": "; ".join([*notes, "one case: no intervals"] if len(cases) < 2 else notes)}


def _partner(arm: str, name: str, columns: Any) -> str | None:
    """The arm of that name to compare with: with the same options, or with the same hold_back, else None: what the
    target reads again helps it with any cache. The source alone reads everything whatever is held back.
    """
    options = split(arm)[1]
    held = "".join(f", {o}" for o in options.split(", ") if o.startswith("hold_back="))
    tried = (name + options, name + held, *([name] if name in ("own", "source") else []))
    return next((x for x in tried if x in columns), None)


def _median(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return float(statistics.median(known)) if known else None


def _over(numerator: Any, denominator: Any) -> Any:
    """numerator / denominator, NaN unless the denominator is positive (beyond what rounding leaves of a zero)."""
    denominator = np.where(np.asarray(denominator) > 1e-12, denominator, np.nan)
    return numerator / denominator


def _statistics(metric: str) -> dict[str, Statistic]:
    """Of the means m: {"arm", "own", "none", "floor"}."""
    if metric == "nll":
        return {
            "score": lambda m: m["arm"],
            "retention": lambda m: np.exp(m["own"] - m["arm"]),
            "gap": lambda m: _over(m["none"] - m["arm"], m["none"] - m["own"]),
        }
    return {
        "score": lambda m: m["arm"],
        "retention": lambda m: _over(m["arm"], m["own"]),
        "floor_normalised": lambda m: _over(m["arm"] - m["floor"], m["own"] - m["floor"]),
        "gap": lambda m: _over(m["arm"] - m["none"], m["own"] - m["none"]),
    }


@lru_cache(maxsize=8)
def _counts(cases: int) -> Any:
    """[DRAWS, cases]: how often each case is in each draw; the draws are those of metrics.paired_bootstrap."""
    drawn = np.random.default_rng(0).integers(0, cases, (DRAWS, cases))
    places = drawn + cases * np.arange(DRAWS)[:, None]
    return np.bincount(places.ravel(), minlength=DRAWS * cases).reshape(DRAWS, cases).astype(np.float64)


def _interval(statistic: Statistic, data: dict[str, Any]) -> tuple[float | None, float | None, float | None, str]:
    """(value, low, high, note) of a statistic of means over cases; value None: it has no denominator."""
    value = float(statistic({k: x.mean() for k, x in data.items()}))
    cases = len(data["arm"])
    if math.isnan(value):
        return None, None, None, "no denominator"
    if cases < 2:
        return value, None, None, ""
    drawn = np.asarray(statistic({k: _counts(cases) @ x / cases for k, x in data.items()}))
    kept = drawn[np.isfinite(drawn)]
    lost = 1 - len(kept) / DRAWS
    low, high = np.quantile(kept, [0.025, 0.975])
    return value, float(low), float(high), f"{lost:.0%} of the draws have no denominator" if lost > 0.05 else ""


def _differences(arm: str, metric: str, cases: list[Any], columns: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Against each rival with the same options: mean paired difference and interval; positive: the arm is better."""
    sign, out = -1.0 if metric == "nll" else 1.0, {}
    for name in ("own", *RIVALS):
        rival = _partner(arm, name, columns)
        if rival and rival != arm:
            both = [k for k in cases if k in columns[rival]]
            if both:
                d = np.array([sign * (columns[arm][k] - columns[rival][k]) for k in both])
                out[name] = _interval(lambda m: m["arm"], {"arm": d})[:3]
    return out


def _compared(name: str, difference: tuple[Any, Any, Any]) -> tuple[int, str]:
    """(1, 0 or -1: better, not told apart, worse; in words)"""
    value, low, high = difference
    if low is None:
        return 0, f"one case against {name}: {value:+.3f}"
    sign = 1 if low > 0 else -1 if high < 0 else 0
    words = {1: "beats", 0: "is not told apart from", -1: "loses to"}[sign]
    return sign, f"{words} {name} ({value:+.3f}, {low:+.3f} to {high:+.3f})"


def _sentence(row: Row) -> str:
    found = {name: _compared(name, d) for name, d in row["better_than"].items() if name in RIVALS}
    signs = {name: sign for name, (sign, _) in found.items()}
    words = [found[name][1] if name in found else f"has no {name} of the same hold_back beside it" for name in RIVALS]
    turn = "" if row["turn"] is None else f", turn {row['turn']}"
    extra = "".join(f", {k} {v}" for k, v in row["setting"].items() if k != "pair")
    where = f"{row['setting']['pair']}{extra}, {row['task']}{turn}, {row['arm']} ({row['n']} cases)"
    return f"{where}: {_worth(signs)}; it {', '.join(words)}."


def _worth(signs: dict[str, int]) -> str:
    """The judgement; signs {rival: 1, 0 or -1}, of the rivals that were measured."""
    if signs.get("source") == -1:
        return "not worth it, the source alone does better"
    if signs.get("none", 0) < 1:
        return "not shown to be worth it, not shown to beat no context"
    if signs.get("wrong document", 1) < 1:
        return "not shown to be worth it, a wrong document does as well"
    if signs.get("source", 0) < 1:
        return "better than no context, but not shown to beat the source alone"
    if "wrong document" not in signs:
        return "worth it, as far as measured without a wrong document"
    return "worth it"
