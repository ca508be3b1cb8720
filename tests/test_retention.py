"""Statistics over case rows: planted numbers, the library's own slow bootstrap, SciPy, and intervals that cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from crosskv import metrics
from crosskv.errors import BadInput
from crosskv.evals import retention


def case(number: int, arms: dict[str, float], task: str = "needle", metric: str = "accuracy", **more: Any) -> dict:
    setting = more.pop("setting", {"pair": "S->L", "host": "torch"})
    return {"claim": "case", "task": task, "case": number, "inputs": f"{number:x}", "metric": metric, "floor": 0.0,
            "arms": arms, "setting": setting, "seed": number} | more  # fmt: skip


def cases(columns: dict[str, Any], **more: Any) -> list[dict]:
    n = len(next(iter(columns.values())))
    return [case(i, {arm: float(x[i]) for arm, x in columns.items()}, **more) for i in range(n)]


def arm(found: list[dict], name: str) -> dict:
    return next(r for r in found if r["arm"] == name)


def test_planted_accuracies() -> None:
    """own right in 8 of 10, mapped in 5, none in 2, chance 0.2: all figures by hand."""
    right = {"own": [1] * 8 + [0] * 2, "mapped": [1] * 5 + [0] * 5, "none": [1] * 2 + [0] * 8}
    seconds = {"mapped": {"cold": 0.3, "warm": 0.1}}
    rows = cases(right, floor=0.2, seconds=seconds)
    rows[0]["seconds"] = {"mapped": {"cold": 9.0, "warm": 8.0}}
    found = retention.summary(rows)
    assert [r["arm"] for r in found] == ["own", "mapped", "none"]
    mapped = arm(found, "mapped")
    assert mapped["n"] == 10 and mapped["task"] == "needle" and mapped["turn"] is None
    assert mapped["score"] == pytest.approx(0.5)
    assert mapped["retention"] == pytest.approx(5 / 8)
    assert mapped["floor_normalised"] == pytest.approx(0.3 / 0.6)
    assert mapped["gap"] == pytest.approx(0.3 / 0.6)
    assert mapped["cold"] == 0.3 and mapped["warm"] == 0.1  # medians, not moved by one slow case
    assert (arm(found, "own")["gap_low"], arm(found, "own")["gap_high"]) == (1.0, 1.0)
    assert arm(found, "none")["gap"] == 0


def test_planted_likelihoods() -> None:
    found = retention.summary(cases({"own": [3, 3.2], "mapped": [3.1, 3.5], "none": [3.6, 3.8]}, metric="nll"))
    mapped = arm(found, "mapped")
    assert mapped["retention"] == pytest.approx(math.exp(3.1) / math.exp(3.3))
    assert mapped["gap"] == pytest.approx(metrics.gap_recovered(3.1, 3.3, 3.7))
    assert mapped["better_than"]["none"][0] == pytest.approx(0.4)  # positive: better, though its NLL is lower
    assert "floor_normalised" not in mapped


def test_intervals_are_those_of_the_plain_bootstrap() -> None:
    rng = np.random.default_rng(1)
    own = 3 + rng.normal(0, 0.3, 30)
    columns = {"own": own, "mapped": own + rng.normal(0.2, 0.1, 30), "none": own + rng.normal(0.5, 0.1, 30)}
    mapped = arm(retention.summary(cases(columns, metric="nll")), "mapped")
    data = columns["own"], columns["mapped"], columns["none"]
    for name, statistic in {
        "score": lambda o, a, e: a.mean(),
        "retention": lambda o, a, e: np.exp(o.mean() - a.mean()),
        "gap": lambda o, a, e: (e.mean() - a.mean()) / (e.mean() - o.mean()),
    }.items():
        want = metrics.paired_bootstrap(statistic, *data)
        np.testing.assert_allclose((mapped[f"{name}_low"], mapped[f"{name}_high"]), want, rtol=1e-9)
    want = metrics.paired_bootstrap(lambda d: d.mean(), columns["none"] - columns["mapped"])
    np.testing.assert_allclose(mapped["better_than"]["none"][1:], want, rtol=1e-9)


def test_intervals_cover_a_planted_truth() -> None:
    """Of 100 samples of 60 cases about 95 hold the true retention and gap; Binomial(100, .95) is below 88 once in 400,
    and the percentile bootstrap of a ratio is a little narrow."""
    rng, hits = np.random.default_rng(0), {"retention": 0, "gap": 0}
    truth = {"retention": 0.6 / 0.8, "gap": 0.4 / 0.6}
    for _ in range(100):
        u = rng.random(60)  # one draw per case for all arms: paired
        found = retention.summary(cases({"own": u < 0.8, "mapped": u < 0.6, "none": u < 0.2}))
        for name in hits:
            r = arm(found, "mapped")
            hits[name] += r[f"{name}_low"] <= truth[name] <= r[f"{name}_high"]
    assert min(hits.values()) >= 88 and max(hits.values()) <= 100


def test_no_gap_is_said() -> None:
    found = retention.summary(cases({"own": [1, 0], "mapped": [1, 0], "none": [1, 0]}))
    assert arm(found, "mapped")["gap"] is None and "own is no better than none" in arm(found, "mapped")["note"]
    found = retention.summary(cases({"own": [0, 0], "mapped": [1, 0], "none": [0, 0]}))
    mapped = arm(found, "mapped")
    assert mapped["retention"] is None and "own scores 0" in mapped["note"]
    assert mapped["floor_normalised"] is None and "own is at the floor" in mapped["note"]
    assert mapped["score"] == 0.5


def test_draws_without_a_denominator_are_left_out_and_counted() -> None:
    """own beats none in 1 of 8 cases: a draw misses it with probability (7/8)**8 = 34 %."""
    found = retention.summary(cases({"own": [1] + [0] * 7, "mapped": [1] + [0] * 7, "none": [0] * 8}))
    mapped = arm(found, "mapped")
    assert (mapped["gap"], mapped["gap_low"], mapped["gap_high"]) == (1, 1, 1)
    lost = float(mapped["note"].split("gap: ")[1].split("%")[0])
    assert abs(lost - 100 * (7 / 8) ** 8) < 4  # 2000 draws: 3.8 standard deviations


def test_hold_back_is_compared_with_its_like() -> None:
    """What the target reads again helps every arm: the gap of an arm that holds back starts at 'none' that does too."""
    right = {"own": [1] * 10, "none": [0] * 10, "none, hold_back=32": [1] * 5 + [0] * 5, "source": [0] * 10,
             "mapped, hold_back=32": [1] * 6 + [0] * 4, "mapped, hold_back=64": [1] * 6 + [0] * 4}  # fmt: skip
    found = retention.summary(cases(right))
    assert arm(found, "mapped, hold_back=32")["gap"] == pytest.approx(0.2)
    assert arm(found, "mapped, hold_back=32")["better_than"]["none"][0] == pytest.approx(0.1)
    assert arm(found, "mapped, hold_back=32")["better_than"]["source"][0] == pytest.approx(0.6)
    other = arm(found, "mapped, hold_back=64")
    assert other["gap"] is None and "same hold_back" in other["note"] and "none" not in other["better_than"]
    assert retention.split("mapped, hold_back=32") == ("mapped", ", hold_back=32")
    assert retention.split("calibrated G=4, 4 bits each 8x") == ("calibrated G=4, 4 bits each 8x", "")


def test_turns_are_drawn_by_case() -> None:
    """Turns of a case that go together are worth one case: the interval is that of the case means, not of all turns."""
    rng = np.random.default_rng(2)
    good = (rng.random(12) < 0.5).astype(float)
    rows = [case(i, {"own": 1.0, "mapped": good[i]}, turn=t) for i in range(12) for t in range(6)]
    mapped = arm(retention.summary(rows), "mapped")
    want = metrics.paired_bootstrap(lambda x: x.mean(), good)
    assert mapped["n"] == 12 and mapped["score"] == pytest.approx(good.mean())
    np.testing.assert_allclose((mapped["score_low"], mapped["score_high"]), want)
    by_turn = [r for r in retention.summary(rows, by_turn=True) if r["arm"] == "mapped"]
    assert [r["turn"] for r in by_turn] == list(range(6)) and {r["n"] for r in by_turn} == {12}


def test_what_is_wrong_with_cases_is_said() -> None:
    rows = cases({"own": [1, 0], "mapped": [1, 0]})
    with pytest.raises(BadInput, match="Case 1 of needle is there twice"):
        retention.summary([*rows, rows[1]])
    with pytest.raises(BadInput, match="Case 1 of needle, turn 3 is there twice"):
        retention.summary([{**r, "turn": 3} for r in (*rows, rows[1])])
    other = [{**r, "setting": {"pair": "M->L"}, "inputs": "other"} for r in rows]
    assert len(retention.summary([*rows, *other])) == 4
    for wrong, says in (
        ({"metric": "f1"}, "must be accuracy or nll, got 'f1'"),
        ({"arms": {"mapped": 1.0}}, "lack 'own'"),
        ({"arms": {"own": float("nan")}}, "finite number, got nan"),
    ):
        with pytest.raises(BadInput, match=says):
            retention.summary([rows[0] | wrong])
    with pytest.raises(BadInput, match="lacks arms"):
        retention.summary([{k: v for k, v in rows[0].items() if k != "arms"}])
    with pytest.raises(BadInput, match="different metrics"):
        retention.summary([rows[0], rows[1] | {"metric": "nll"}])


def test_arms_of_some_cases_and_single_cases() -> None:
    rows = cases({"own": [1, 1, 0], "mapped": [1, 0, 1]})
    del rows[2]["arms"]["mapped"]
    mapped = arm(retention.summary(rows), "mapped")
    assert mapped["n"] == 2 and mapped["retention"] == 0.5 and "in 2 of 3 cases" in mapped["note"]
    alone = arm(retention.summary(rows[:1]), "mapped")
    assert alone["score"] == 1 and alone["score_low"] is None and "one case" in alone["note"]
    assert retention.summary([]) == []


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"none": 0.1, "source": 0.2, "wrong document": 0.1}, ": worth it; it beats none"),
        ({"none": 0.1, "source": 0.95, "wrong document": 0.1}, ": not worth it, the source alone does better"),
        ({"none": 0.6, "source": 0.2, "wrong document": 0.1}, ": not shown to be worth it, not shown to beat no"),
        ({"none": 0.1, "source": 0.2, "wrong document": 0.6}, ": not shown to be worth it, a wrong document does"),
        ({"none": 0.1, "source": 0.6, "wrong document": 0.1}, ": better than no context, but not shown to beat the"),
        ({"none": 0.1, "source": 0.2}, ": worth it, as far as measured without a wrong document"),
        ({"none": 0.1}, ": better than no context, but not shown to beat the source"),
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_verdicts(scores: dict[str, float], says: str, metric: str) -> None:
    """mapped is right in 60 % of 100 cases; rivals are right in as many other cases as given."""

    def column(share: float, shift: int) -> Any:
        x = np.roll(np.arange(100) < 100 * share, shift).astype(float)
        return 3 - x if metric == "nll" else x

    columns = {"own": column(1, 0), "mapped": column(0.6, 0)} | {k: column(v, 20) for k, v in scores.items()}
    rows = cases(columns, metric=metric)
    assert says in retention.verdict(rows), retention.verdict(rows)
    assert retention.verdict(rows) == retention.verdict(retention.summary(rows))


def test_a_verdict_needs_a_mapped_arm() -> None:
    for setting, name in (({"model": "L"}, "int4"), ({"pair": "S->L"}, "source"), ({"model": "L"}, "mapped")):
        rows = cases({"own": [1, 1], name: [1, 1]}, setting=setting)
        assert retention.verdict(rows) == "There are no cases of a pair with a mapped arm."


def test_correlation_is_scipys_and_covers() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        points = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 25)
        r, low, high = retention.correlation([tuple(p) for p in points])
        assert r == pytest.approx(stats.pearsonr(*points.T).statistic)
        hits += low <= 0.6 <= high
    assert 181 <= hits <= 199  # 190 expected, standard deviation 3.1
    z, wide = math.atanh(r), 1.959964 / math.sqrt(22)
    assert (low, high) == pytest.approx((math.tanh(z - wide), math.tanh(z + wide)), rel=1e-5)
    for few in ([(0, 1), (1, 2), (2, 1)], [(1, 1)] * 5, [(0, 1), (1, 1), (2, 1), (3, 1)]):
        with pytest.raises(BadInput, match="at least 4 finite points"):
            retention.correlation(few)
