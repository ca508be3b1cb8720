"""Is this mapper worth a longer look? Minutes instead of hours: what its cache does to the target's attention, layer by
layer and head by head, and to what the target says next, beside controls.

The target reads whole passages, a prefix and a continuation. Then, for the same queries (those of the continuation),
the prefix's keys and values are replaced by an arm's, and the host's own attention is asked again:

    cosine         between the attention outputs with the arm's keys and values and with the target's own, mean over
                   positions, layers and heads. Paper sec. 4.5
    error          |mapped - own|^2 / |own|^2 of the prefix's keys, before rotation, and of its values; and 1 - R2: the
                   same against the own ones' deviation from their mean
    concentration  whether the errors fall where attention looks: 1 is evenly, above 1 is bad. Paper sec. 4.5
                   keys    sum_j s_j^2 e_j / sum_j s_j^2 / mean_j e_j; e_j: mean square of the error along the queries'
                           j-th right singular vector, s_j its singular value
                   values  sum_t a_t e_t / sum_t a_t / mean_t e_t; e_t: squared error at position t, a_t: sum over the
                           queries of the squared attention that it gets
    KL, top-1      of the target's next-token distributions against those on its own cache

"none" is the target without the prefix, its first tokens aside: it has a KL only. The verdict asks for a mean cosine of
at least MIN_COSINE, a mean KL of at most MAX_KL, and a KL under that of every control. Where the two come from: cosine
and KL of the shipped family (ridge, k="all", penalty "auto", 64 x 384 tokens; 16 passages of 256 + 64 held-out tokens)

              mapped       wrong document   raw copy     random       none
    S -> L    .906 .180    .833 .444        .802 .495    .096 6.34    -    .349
    M -> L    .923 .140    .822 .475        .778 .518    .162 6.64    -    .349

They part a fitted mapper from one that ignores the text. They do not promise quality: that is what evals are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosskv import backends, live, metrics, rope
from crosskv.backends import Attend, Layers
from crosskv.errors import BadInput
from crosskv.evals import report, rows
from crosskv.evals.arms import Contexts, continued, transfer_arms
from crosskv.layout import ModelKVSpec
from crosskv.mapper import Mapper

MIN_COSINE = 0.85
MAX_KL = 0.3
ARMS = ("own", "mapped", "random", "raw copy", "wrong document", "none")
KINDS = ("keys", "values")
WORST = 0.05
"""The share of tokens that is called the worst."""

Sums = dict[str, np.ndarray]
"""What adds up over passages, by name."""


@dataclass(frozen=True)
class Errors:
    """Of the mapped keys or values, per target layer [L]: relative squared error, 1 - R2, concentration (mean over
    heads)."""

    relative: np.ndarray
    unexplained: np.ndarray
    concentration: np.ndarray


@dataclass(frozen=True)
class Screening:
    """What `screen` found. Per arm: cosine [n, L, Hq] (not of "none"), kl [n, C] in nats, agree [n, C]; errors of
    "keys" and of "values".

    setting: what rows say of it; min_cosine, max_kl: the verdict's thresholds.
    """

    cosine: dict[str, np.ndarray]
    kl: dict[str, np.ndarray]
    agree: dict[str, np.ndarray]
    errors: dict[str, Errors]
    setting: dict[str, Any]
    min_cosine: float
    max_kl: float

    @property
    def passed(self) -> bool:
        """Whether the mapped cache is close enough to the target's own, and closer than every control."""
        return not self._faults()

    @property
    def why(self) -> str:
        """The verdict's reasons in one sentence, with the worst layers and heads."""
        cosine, kl = float(self.cosine["mapped"].mean()), float(self.kl["mapped"].mean())
        good = f"cosine {cosine:.3f} >= {self.min_cosine:g}, KL {kl:.3f} <= {self.max_kl:g} and under every control's"
        worst = ", ".join(f"layer {i} head {h} ({c:.3f})" for i, h, c in self.worst(3))
        return f"{'; '.join(self._faults()) or good}; the lowest cosines are at {worst}"

    def _faults(self) -> list[str]:
        cosine, kl = float(self.cosine["mapped"].mean()), {arm: float(x.mean()) for arm, x in self.kl.items()}
        out = []
        if not cosine >= self.min_cosine:
            out.append(f"the mean attention-output cosine {cosine:.3f} is under {self.min_cosine:g}")
        if not kl["mapped"] <= self.max_kl:
            out.append(f"the mean KL {kl['mapped']:.3f} is over {self.max_kl:g}")
        controls = [a for a in kl if a not in ("own", "mapped") and not kl["mapped"] < kl[a]]
        return out + [f"the mean KL {kl['mapped']:.3f} is not under that of the control {a!r}, {kl[a]:.3f}"
                      for a in controls]  # fmt: skip

    def heads(self, arm: str = "mapped") -> np.ndarray:
        """Cosine [L, Hq], mean over passages."""
        return self.cosine[arm].mean(0)

    def worst(self, count: int) -> list[tuple[int, int, float]]:
        """(layer, query head, cosine) of the lowest ones of the mapped arm."""
        found = self.heads()
        places = np.argsort(found, axis=None, kind="stable")[:count]
        return [(int(i), int(h), float(found[i, h])) for i, h in (divmod(int(p), found.shape[1]) for p in places)]

    def layer_table(self) -> list[dict[str, Any]]:
        """One dict a layer: cosine of every arm, the worst head of the mapped one, errors and concentrations."""
        mapped, means = self.heads(), {arm: self.heads(arm).mean(1) for arm in self.cosine}
        return [
            {
                "layer": i,
                "cosine": {arm: float(x[i]) for arm, x in means.items()},
                "worst_head": int(mapped[i].argmin()),
                "worst_cosine": float(mapped[i].min()),
                **{f"{name}_{kind}": float(getattr(self.errors[kind], name)[i])
                   for kind in KINDS for name in ("relative", "unexplained", "concentration")},
            }
            for i in range(len(mapped))
        ]  # fmt: skip

    def arm_table(self) -> list[dict[str, Any]]:
        """One dict an arm: mean cosine (None for "none"), KL and top-1 agreement, each {value, low, high} with a 95 %
        interval over passages; the share of the KL that falls on the worst tokens."""
        return [
            {
                "arm": arm,
                "cosine": _interval(self.cosine[arm].mean((1, 2))) if arm in self.cosine else None,
                "kl": _interval(self.kl[arm].mean(1)),
                "top1": _interval(self.agree[arm].mean(1)),
                "worst_tokens": _share_of_worst(self.kl[arm]),
            }
            for arm in self.kl
        ]

    def arm_lines(self) -> tuple[list[str], list[list[str]]]:
        """`arm_table` as text: columns, lines."""
        columns = ["arm", "cosine", "KL, nats", "top-1", f"worst {WORST:.0%}"]

        def shown(x: dict[str, float]) -> str:
            return f"{x['value']:.3f} ({x['low']:.3f}-{x['high']:.3f})"

        lines = [[a["arm"], f"{a['cosine']['value']:.3f}" if a["cosine"] else "", shown(a["kl"]), shown(a["top1"]),
                  f"{a['worst_tokens']:.0%}"] for a in self.arm_table()]  # fmt: skip
        return columns, lines

    def layer_lines(self, arms: Sequence[str] = ARMS) -> tuple[list[str], list[list[str]]]:
        """`layer_table` as text: columns, lines. arms: those whose cosine is shown, if it was measured."""
        arms = [a for a in self.cosine if a != "own" and a in arms]
        names = {"relative": "err", "unexplained": "1-R2", "concentration": "conc"}
        measures = [(f"{name}_{kind}", f"{kind[0].upper()} {word}") for kind in KINDS for name, word in names.items()]
        columns = ["layer", *arms, "worst head", *(title for _, title in measures)]
        lines = [[str(x["layer"]), *(f"{x['cosine'][a]:.3f}" for a in arms),
                  f"{x['worst_head']}: {x['worst_cosine']:.3f}", *(f"{x[m]:.3f}" for m, _ in measures)]
                 for x in self.layer_table()]  # fmt: skip
        return columns, lines

    def rows(self) -> list[dict[str, Any]]:
        """Result rows (evals/rows.py), claim "screen"."""

        def one(metric: str, value: float, unit: str, low: float | None = None, high: float | None = None,
                **more: Any) -> dict[str, Any]:  # fmt: skip
            return rows.row("screen", self.setting | more, metric, value, unit, low=low, high=high, n=n)

        n, out = len(self.kl["mapped"]), []
        for a in self.arm_table():
            for metric, unit in (("cosine", "cosine"), ("kl", "nats"), ("top1", "share")):
                if (x := a[metric]) is not None:
                    out.append(one(metric, x["value"], unit, x["low"], x["high"], arm=a["arm"]))
            out.append(one("KL on the worst tokens", a["worst_tokens"], "share", arm=a["arm"], tokens=WORST))
        for arm in self.cosine:
            for i, heads in enumerate(self.heads(arm)):
                values = [round(float(x), 5) for x in heads]
                out.append(one("cosine", float(heads.mean()), "cosine", arm=arm, layer=i, heads=values))
        for kind, e in self.errors.items():
            for name, unit in (("relative", "share"), ("unexplained", "1 - R2"), ("concentration", "times the mean")):
                values = getattr(e, name)
                out += [one(f"{name} error", float(x), unit, arm="mapped", layer=i, of=kind)
                        for i, x in enumerate(values)]  # fmt: skip
        verdict: dict[str, Any] = {"why": self.why, "min_cosine": self.min_cosine, "max_kl": self.max_kl}
        return [*out, one("passed", float(self.passed), "verdict", **verdict)]


def write(found: Screening, directory: Path) -> list[Path]:
    """The rows as screen.jsonl; cosines of the mapped arm as a heat map, screen.png; a page of it all, screen.html."""
    paths = [directory / f"screen.{ending}" for ending in ("jsonl", "png", "html")]
    rows.write(paths[0], found.rows())
    layers = [str(i) for i in range(found.heads().shape[0])]
    heads = [f"head {h}" for h in range(found.heads().shape[1])]
    title = "attention-output cosine of the {} cache, by query head and target layer"
    report.heat_figure(title.format("mapped"), heads, layers, found.heads().T.tolist()).savefig(
        paths[1], dpi=110, bbox_inches="tight"
    )
    maps = "".join(report.heat(title.format(a), heads, layers, found.heads(a).T.tolist())
                   for a in found.cosine if a != "own")  # fmt: skip
    verdict = f"{'passed' if found.passed else 'FAILED'}: {found.why}"
    sections = [("Verdict", report.text(verdict)), ("Arms", report.table(*found.arm_lines())),
                ("Layers", report.table(*found.layer_lines())), ("Heads", maps)]  # fmt: skip
    report.write(paths[2], report.page("Screening of a mapper", sections, report.origin(found.rows())))
    return paths


def screen(
    mapper: Mapper,
    source: Any,
    target: Any,
    passages: np.ndarray,
    prefix: int,
    *,
    min_cosine: float | None = None,
    max_kl: float | None = None,
    arms: Sequence[str] = ARMS,
    sinks: int = 1,
    batch: int = 4,
) -> Screening:
    """Screen a mapper on `passages` [n >= 2, prefix + C] of token ids, `batch` at a time.

    min_cosine, max_kl: the verdict's thresholds; None: MIN_COSINE and MAX_KL. arms: names as in evals/arms.py, "own"
    and "mapped" among them, without "source"; "raw copy" is left out for models whose heads differ in number or width.
    sinks: first tokens that are the target's own in every arm.
    """
    passages = live.as_ids(passages)
    _check(passages, prefix, arms, sinks, batch)
    spec = live.measured(target).at(target, passages.shape[1])
    names = ["own", *(a for a in arms if a != "own")]  # the reference first
    if not _alike(live.measured(source), spec):
        names = [a for a in names if a != "raw copy"]
    made = transfer_arms(mapper, source, target, sinks=sinks, names=names)
    parts = []
    for ids in _parts(passages, batch):
        contexts, reference, scores, layers = Contexts(ids[:, :prefix]), None, {}, {}
        for arm in made:
            start = arm.start(contexts)
            logits = continued(arm, start, ids[:, prefix:])
            reference = logits if reference is None else reference
            if arm.name != "none":
                layers[arm.name] = start.layers
            scores[arm.name] = metrics.kl(reference, logits), metrics.top1(reference, logits)
        parts.append((scores, *_attention(target, ids, layers, spec, prefix, sinks)))
    kl, agree = ({a: np.concatenate([p[0][a][i] for p in parts]) for a in names} for i in range(2))
    cosine = {a: np.concatenate([p[1][a] for p in parts]) for a in names if a != "none"}
    sums = [_plus([p[2][i] for p in parts]) for i in range(spec.n_layers)]
    setting = {
        "source": mapper.source.identity.get("name", ""),
        "target": mapper.target.identity.get("name", ""),
        "prefix": prefix,
        "continuation": passages.shape[1] - prefix,
        "sinks": sinks,
    }
    limits = MIN_COSINE if min_cosine is None else min_cosine, MAX_KL if max_kl is None else max_kl
    return Screening(cosine, kl, agree, {k: _errors([s[k] for s in sums]) for k in KINDS}, setting, *limits)


def _check(passages: np.ndarray, prefix: int, arms: Sequence[str], sinks: int, batch: int) -> None:
    if len(passages) < 2 or passages.shape[1] <= prefix:
        raise BadInput(f"passages must be [n >= 2, more than {prefix}] token ids, got shape {passages.shape}.")
    if not 1 <= sinks < prefix:
        raise BadInput(f"sinks must be from 1 to under the prefix's {prefix} tokens, got {sinks}.")
    if batch < 2:
        raise BadInput(f"batch must be >= 2, so that there is a wrong document beside each; got {batch}.")
    if not {"own", "mapped"} <= set(arms) or "source" in arms:
        raise BadInput(f"arms must have own and mapped among them, and not source; got {list(arms)}.")


def _alike(a: ModelKVSpec, b: ModelKVSpec) -> bool:
    return (a.n_kv_heads, a.head_dim) == (b.n_kv_heads, b.head_dim)


def _parts(passages: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Batches of passages, none with a single one."""
    ends = list(range(batch, len(passages) - 1, batch))
    yield from np.split(passages, ends)


# ---- attention ----


def _attention(
    target: Any, ids: np.ndarray, arms: dict[str, Layers], spec: ModelKVSpec, prefix: int, sinks: int
) -> tuple[dict[str, np.ndarray], list[dict[str, Sums]]]:
    """Cosines [B, L, Hq] of every arm, and of every layer the sums that its keys' and values' errors are made of."""
    b, positions = backends.of(target), np.arange(ids.shape[1])
    cosines: dict[str, list[np.ndarray]] = {a: [] for a in arms}
    sums: list[dict[str, Sums]] = []

    def visit(layer: int, queries: Any, keys: Any, values: Any, attend: Attend) -> None:
        def outputs(k: Any, v: Any) -> np.ndarray:
            return _wide(attend(k, v)[:, :, prefix:])

        def with_(theirs: Any, own: Any) -> Any:
            return b.xp.concatenate([b.cast(b.move(theirs, own), b.dtype_of(own)), own[:, :, prefix:]], 2)

        want = outputs(keys, values)
        for arm, layers in arms.items():
            k, v = layers[layer]
            cosines[arm].append(_cosine(outputs(with_(k, keys), with_(v, values)), want).mean(-1))
        k, v = (_wide(theirs[:, :, sinks:]) - _wide(own[:, :, sinks:prefix])
                for own, theirs in zip((keys, values), arms["mapped"][layer], strict=True))  # fmt: skip
        turn, how = rope.tables(spec.ropes[layer], positions), spec.ropes[layer].interleaved
        cos, sin = (x[sinks:prefix] for x in turn)
        plain, plain_error = (rope.unrotate(x, (cos, sin), how) for x in (_wide(keys[:, :, sinks:prefix]), k))
        weights = _weights(attend, keys, values, prefix)[..., sinks:]
        sums.append(
            {
                "keys": _error_sums(plain, plain_error) | key_sums(k, _wide(queries[:, :, prefix:])),
                "values": _error_sums(_wide(values[:, :, sinks:prefix]), v) | value_sums(v, weights),
            }
        )

    b.attention(target, ids, visit)
    return {a: np.stack(x, 1) for a, x in cosines.items()}, sums


def _wide(x: Any) -> np.ndarray:
    return np.asarray(backends.of(x).to_numpy(x), np.float64)


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[..., D] and [..., D] to [...]; 0 where one is zero."""
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / np.where(size > 0, size, 1)


def _weights(attend: Attend, keys: Any, values: Any, prefix: int) -> np.ndarray:
    """The attention [B, Hq, C, prefix] that the continuation's queries pay to the prefix: the outputs for values that
    are unit vectors, D positions at a time."""
    b, out, width = backends.of(keys), [], values.shape[-1]
    for first in range(0, prefix, width):
        unit, some = np.zeros(tuple(values.shape), np.float32), np.arange(min(width, prefix - first))
        unit[:, :, first + some, some] = 1
        got = attend(keys, b.from_numpy(unit, values, b.dtype_of(values)))
        out.append(_wide(got[:, :, prefix:, : len(some)]))
    return np.concatenate(out, -1)


# ---- errors ----


def _error_sums(own: np.ndarray, error: np.ndarray) -> Sums:
    """Of keys before their rotation, or values, [B, H, T, D], and their error."""
    return {
        "error": (error**2).sum(),
        "own": (own**2).sum(),
        "sum": own.sum((0, 2)),
        "count": np.array(own.shape[0] * own.shape[2]),
    }


def key_sums(error: np.ndarray, queries: np.ndarray) -> Sums:
    """What the concentration of key errors E [B, H, T, D] under queries Q [B, Hq, C, D] is made of, per KV head:
    Q'Q and E'E [H, D, D]. With Q = U S V', sum_j s_j^2 |E v_j|^2 = tr(Q'Q E'E), so nothing has to be decomposed.
    """
    heads = error.shape[1]
    return {"looked": _gram(queries, heads), "wrong": _gram(error, heads)}


def value_sums(error: np.ndarray, weights: np.ndarray) -> Sums:
    """The same for value errors [B, H, T, D] under attention [B, Hq, C, T]: sums [H] over positions of squared
    attention times squared error, and of each alone.
    """
    b, heads, t, _ = error.shape
    a = (weights.reshape(b, heads, -1, t) ** 2).sum(2)
    e = (error**2).sum(-1)
    return {"both": (a * e).sum((0, 2)), "looked": a.sum((0, 2)), "wrong": e.sum((0, 2)), "n": np.array(b * t)}


def concentration(sums: Sums) -> np.ndarray:
    """Per KV head [H], of what `key_sums` or `value_sums` gave, added up over passages; 0 without any error."""
    looked, wrong = sums["looked"], sums["wrong"]
    both, n = sums.get("both"), sums.get("n")
    if both is None:  # keys
        both, n = (looked * wrong).sum((1, 2)), np.array(looked.shape[-1])
        looked, wrong = (np.trace(x, axis1=1, axis2=2) for x in (looked, wrong))
    size = looked * wrong
    return both * n / np.where(size > 0, size, 1)


def _gram(x: np.ndarray, heads: int) -> np.ndarray:
    """[B, H * g, T, D] to [H, D, D]: sums over batch, heads of a group and tokens."""
    b, n, t, d = x.shape
    x = x.reshape(b, heads, n // heads, t, d).swapaxes(0, 1).reshape(heads, -1, d)
    return x.swapaxes(1, 2) @ x


def _plus(parts: Sequence[dict[str, Sums]]) -> dict[str, Sums]:
    """Sums over batches."""
    return {kind: {name: np.sum([p[kind][name] for p in parts], 0) for name in parts[0][kind]} for kind in KINDS}


def _errors(layers: Sequence[Sums]) -> Errors:
    spread = [s["own"] - (s["sum"] ** 2).sum() / s["count"] for s in layers]
    return Errors(
        np.array([float(s["error"] / s["own"]) for s in layers]),
        np.array([float(s["error"] / d) for s, d in zip(layers, spread, strict=True)]),
        np.array([float(concentration(s).mean()) for s in layers]),
    )


# ---- figures ----


def _interval(per_passage: np.ndarray) -> dict[str, float]:
    low, high = metrics.paired_bootstrap(_mean, per_passage)
    return {"value": _mean(per_passage), "low": low, "high": high}


def _mean(x: Any) -> float:
    return float(np.mean(x))


def _share_of_worst(kl: np.ndarray) -> float:
    """The share of all KL that falls on the WORST share of the tokens."""
    ranked = np.sort(kl, axis=None)[::-1]
    total = ranked.sum()
    return float(ranked[: max(1, round(WORST * len(ranked)))].sum() / total) if total > 0 else 0.0
