"""How fast, how exactly and in how much memory a mapper is fitted, beside veloxquant-mlx. Rows: results/fit.jsonl.

    python benchmarks/fit.py --peer-python /work/vqenv/bin/python --threads 1 --peer-layers 2

Synthetic caches, a planted linear relation plus noise: 8 -> 12 layers, 4 heads x 64, 16,384 tokens, float32. Every
fit runs in a process of its own that makes the caches from the seed (not timed; a checksum shows that all got the
same) and fits with k=4 and k=8. crosskv runs at stride 1, so that both see every row; it holds out a tenth of them
for its scores, which the peer takes in sample, and drops the row of token 0.

  fit_seconds   wall time of fit_mapper, crosskv on NumPy, torch and MLX arrays. The peer as shipped (MLX's own CPU
                BLAS) and with OpenBLAS loaded first. The peer fits one target layer after the other, independently;
                --peer-layers N times only the first N with the slow BLAS and scales up, which the row says.
  fit_error     largest error of predictions on 1,024 fresh tokens, relative to the largest prediction, against ridge
                in float64 on the same rows with the same effective penalty. Keys include how each takes RoPE off
                (the caches follow transformers: float32 frequencies and angles); values are the ridge alone.
  fit_peak      peak memory of a process that fits as many tokens, one batch at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SOURCE, TARGET, HEADS, DIM = 8, 12, 4, 64
THETAS = {"source": 1e4, "target": 1e6}
FRESH = 1024
PEER = "veloxquant-mlx"
INSTALL = f"This compares with {PEER}, which is not installed in {{}}: pip install veloxquant-mlx==0.94.15"
PEER_PENALTY = 0.01  # absolute, its default: about 1e-6 of the features' variance here
PENALTY = 1e-6  # relative
MEMORY_SIZES = (10_000, 100_000, 1_000_000)
BATCH = 2_000


# ---- synthetic caches ----


def turn(x: np.ndarray, positions: np.ndarray, theta: float, sign: int = 1) -> np.ndarray:
    """RoPE, half-split, angles rounded to float32 as models do. x [H, T, D]; sign -1 takes it off."""
    d = x.shape[-1]
    inv_freq = 1 / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype) * sign
    x1, x2 = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def heads(rows: np.ndarray, count: int) -> np.ndarray:
    """[T, H * D] to [H, T, D]."""
    return np.ascontiguousarray(rows.reshape(len(rows), count, -1).swapaxes(0, 1))


def parents(t: int, sources: int, targets: int) -> list[int]:
    """The source layers that target layer t is made of."""
    return [(t * sources // targets + j) % sources for j in range(3)]


def caches(tokens: int, seed: int, targets: int = TARGET) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """(model, layer, keys, values), keys post-RoPE: correlated source layers, target layers made of three each."""
    rng, p, positions = np.random.default_rng(seed), HEADS * DIM, np.arange(tokens)
    draw = partial(rng.standard_normal, dtype=np.float32)
    common, rows = draw((tokens, p)), []
    for i in range(SOURCE):
        pair = [draw((tokens, p)) + common @ draw((p, p)) / p**0.5 + 2 * draw(p) for _ in "kv"]
        rows.append(pair)
        yield "source", i, turn(heads(pair[0], HEADS), positions, THETAS["source"]), heads(pair[1], HEADS)
    for t in range(targets):
        of = parents(t, SOURCE, TARGET)
        pair = [
            sum(rows[s][j] @ draw((p, p)) for s in of) / (3 * p) ** 0.5 + 0.3 * draw((tokens, p)) + draw(p)
            for j in (0, 1)
        ]
        yield "target", t, turn(heads(pair[0], HEADS), positions, THETAS["target"]), heads(pair[1], HEADS)


# ---- workers: one process each, arguments in as JSON, results out as JSON ----


def peak_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def framework(name: str) -> Any:
    """A function from a NumPy array to an array of the framework."""
    if name == "torch":
        import torch

        return torch.from_numpy
    if name == "mlx":
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        return mx.array
    return np.asarray


def made(a: dict[str, Any], array: Any) -> tuple[dict[str, dict], dict[int, tuple], float]:
    """({source, target} caches to fit on, the source's fresh tokens, checksum)."""
    kv: dict[str, dict] = {"source": {}, "target": {}}
    fresh, total, n = {}, 0.0, a["tokens"]
    for model, i, k, v in caches(n + FRESH, a["seed"], a["targets"]):
        kv[model][i] = (array(k[:, :n].copy()), array(v[:, :n].copy()))
        total += float(k.sum(dtype=np.float64) + v.sum(dtype=np.float64))
        if model == "source":
            fresh[i] = (array(k[:, n:].copy()), array(v[:, n:].copy()))
    return kv, fresh, total


def timed(a: dict[str, Any], module: Any, specs: tuple, config: Any, array: Any, positions: Any) -> dict[str, Any]:
    """Fit for each k, `repeats` times; save predictions for the fresh tokens."""
    kv, fresh, checksum = made(a, array)
    out: dict[str, Any] = {"checksum": checksum, "peak_before": peak_mb(), "wall": {}, "cpu": {}, "sources": {}}
    for k in a["ks"]:
        wall, cpu = [], []
        for _ in range(a["repeats"]):
            mapper = None
            start = time.perf_counter(), time.process_time()
            mapper = module.fit_mapper(kv["source"], kv["target"], *specs, positions(0, a["tokens"]), config(k))
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
        out["wall"][k], out["cpu"][k] = wall, cpu
        mapped = module.transfer_cache(fresh, mapper, positions(a["tokens"], a["tokens"] + FRESH))
        arrays = {f"{t}{kind}": np.asarray(x) for t in mapped for kind, x in enumerate(mapped[t])}
        np.savez(f"{a['save']}-{k}.npz", **arrays)
        layers = mapper.layers.values() if isinstance(mapper.layers, dict) else mapper.layers
        out["sources"][k] = [list(m.sources if hasattr(m, "sources") else m.source_layers) for m in layers]
    return out | {"peak": peak_mb()}


def work_ours(a: dict[str, Any]) -> dict[str, Any]:
    from crosskv import transfer

    specs = (
        transfer.ModelKVSpec(SOURCE, HEADS, DIM, THETAS["source"]),
        transfer.ModelKVSpec(a["targets"], HEADS, DIM, THETAS["target"]),
    )

    def config(k: int) -> transfer.MapperConfig:
        return transfer.MapperConfig(k=k, ridge_lambda=PENALTY, stride=1, dtype="float32")

    return timed(a, transfer, specs, config, framework(a["array"]), np.arange)


def work_peer(a: dict[str, Any]) -> dict[str, Any]:
    blas = "as shipped"
    if a["blas"]:
        library = ctypes.CDLL(a["blas"], mode=ctypes.RTLD_GLOBAL)  # before MLX, so that its symbols come first
        library.openblas_get_config.restype = ctypes.c_char_p
        blas = library.openblas_get_config().decode()
    array = framework("mlx")
    from importlib import metadata

    import mlx.core as mx
    from veloxquant_mlx import transfer

    specs = (
        transfer.ModelKVSpec(SOURCE, HEADS, DIM, THETAS["source"]),
        transfer.ModelKVSpec(a["targets"], HEADS, DIM, THETAS["target"]),
    )

    def config(k: int) -> Any:
        return transfer.MapperConfig(k=k, ridge_lambda=PEER_PENALTY, stride=1, dtype="float32")

    versions = {name: metadata.version(name) for name in (PEER, "mlx", "numpy")}
    return timed(a, transfer, specs, config, array, mx.arange) | {"blas": blas, "versions": versions}


def work_reference(a: dict[str, Any]) -> dict[str, Any]:
    """Errors of saved predictions against ridge in float64 on the rows that each fit used."""
    from crosskv import transfer

    n = a["tokens"]
    pieces = transfer._pieces(np.arange(n), 1, transfer.MapperConfig(stride=1))
    train = [cut for i, (_, cut) in enumerate(pieces) if i % transfer.HOLD_OUT != transfer.HOLD_OUT // 2]
    used = {"ours": np.concatenate([np.arange(n)[cut] for cut in train]), "peer": np.arange(n)}
    errors: dict[str, list[float]] = {name: [] for name in a["runs"]}
    for kind in (0, 1):
        rows = {"source": [], "target": []}
        for model, _, *kv in caches(n + FRESH, a["seed"]):
            x = kv[kind].astype(np.float64)
            x = x if kind else turn(x, np.arange(n + FRESH), THETAS[model], -1)
            rows[model].append(x.swapaxes(0, 1).reshape(n + FRESH, -1))
        x, y = (np.concatenate(rows.pop(model), -1) for model in ("source", "target"))
        for who, keep in used.items():
            solve = _Reference(x[keep], y[keep], x[n:])
            for name, run in a["runs"].items():
                if run["who"] == who:
                    errors[name].append(_error(solve, run, kind, n))
    return errors


class _Reference:
    """Ridge in float64 from centred rows; predictions for fresh rows."""

    def __init__(self, x: np.ndarray, y: np.ndarray, fresh: np.ndarray):
        self.means = x.mean(0), y.mean(0)
        x -= self.means[0]
        y -= self.means[1]
        self.xx, self.xy, self.fresh = x.T @ x, x.T @ y, fresh - self.means[0]

    def predict(self, sources: list[int], target: int, who: str) -> np.ndarray:
        p = HEADS * DIM
        cols = np.concatenate([np.arange(s * p, (s + 1) * p) for s in sources])
        out = slice(target * p, (target + 1) * p)
        xx = self.xx[np.ix_(cols, cols)]
        shift = PEER_PENALTY if who == "peer" else PENALTY * np.trace(xx) / len(xx)
        w = np.linalg.solve(xx + shift * np.eye(len(xx)), self.xy[cols, out])
        return self.fresh[:, cols] @ w + self.means[1][out]


def _error(reference: _Reference, run: dict[str, Any], kind: int, n: int) -> float:
    """max over target layers of max|prediction - reference| / max|reference|."""
    got, worst = np.load(run["file"]), 0.0
    for t, sources in enumerate(run["sources"]):
        want = heads(reference.predict(sources, t, run["who"]), HEADS)
        x = got[f"{t}{kind}"].astype(np.float64)
        x = x if kind else turn(x, np.arange(n, n + FRESH), THETAS["target"], -1)
        worst = max(worst, float(np.abs(x - want).max() / np.abs(want).max()))
    return worst


def work_memory(a: dict[str, Any]) -> dict[str, Any]:
    """Caches made batch by batch, a new sequence each: 4 -> 6 layers, 2 heads x 32."""
    from crosskv import transfer

    source, target = transfer.ModelKVSpec(4, 2, 32), transfer.ModelKVSpec(6, 2, 32)
    rng, stats, start = np.random.default_rng(a["seed"]), transfer.Stats(), time.perf_counter()
    mix = rng.standard_normal((6, 4), dtype=np.float32)
    for i in range(a["tokens"] // BATCH):
        kv = rng.standard_normal((2, 4, 1, 2, BATCH, 32), dtype=np.float32)
        out = np.einsum("ts,ks...->kt...", mix, kv)
        given, wanted = ({n: (x[0, n], x[1, n]) for n in range(x.shape[1])} for x in (kv, out))
        rows = transfer.paired_rows(given, wanted, source, target, np.arange(BATCH), transfer.MapperConfig())
        stats.add(rows, held=i % transfer.HOLD_OUT == transfer.HOLD_OUT // 2 - 1)
    config = transfer.MapperConfig(k=4, stride=1, ridge_lambda=PENALTY)
    mapper = transfer.solve(stats.flush(), source, target, config)
    about = mapper.provenance
    rows = about["training_rows"] + about["held_out_rows"]
    return {"peak": peak_mb(), "rows": rows, "r2": about["mean_held_out_r2"], "wall": time.perf_counter() - start}


WORKERS = {"ours": work_ours, "peer": work_peer, "reference": work_reference, "memory": work_memory}


def spawn(python: str, worker: str, threads: int, **arguments: Any) -> dict[str, Any]:
    """Run a worker in a fresh process."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    command = [python, __file__, "--worker", worker, json.dumps(arguments)]
    done = subprocess.run(
        command, env={**os.environ, **dict.fromkeys(names, str(threads))}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"The {worker} process failed (exit code {done.returncode}); its message is above.")
    return json.loads(done.stdout.splitlines()[-1])


# ---- the benchmark ----


def runs(o: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    """Every fit, ours and the peer's in turn, so that a busy machine slows both."""
    base = {"tokens": o.tokens, "seed": o.seed, "ks": [4, 8], "targets": TARGET}
    plan: list[tuple[str, str, dict[str, Any]]] = [
        ("crosskv, numpy", "ours", {"array": "numpy"}),
        (f"{PEER}, OpenBLAS", "peer", {"blas": o.blas}),
        ("crosskv, torch", "ours", {"array": "torch"}),
        (f"{PEER}, as shipped", "peer", {"blas": None, "targets": o.peer_layers}),
        ("crosskv, mlx", "ours", {"array": "mlx"}),
    ]
    out = {}
    for name, who, changes in plan:
        if name.endswith("OpenBLAS") and not o.blas:
            continue
        python = o.peer_python if who == "peer" else sys.executable
        repeats = 1 if who == "peer" else o.repeats
        save = str(Path(folder) / name.replace(" ", "_"))
        got = spawn(python, who, o.threads, **base | changes | {"repeats": repeats, "save": save})
        out[name] = got | {"who": who, "save": save, "targets": changes.get("targets", TARGET)}
        say(name, {k: [round(x, 1) for x in v] for k, v in got["wall"].items()}, f"peak {got['peak']:.0f} MB")
    sums = {r["checksum"] for r in out.values() if r["targets"] == TARGET}
    if len(sums) != 1:
        raise SystemExit(f"The processes did not make the same caches: checksums {sums}.")
    return out


def say(*parts: Any) -> None:
    print(*parts, file=sys.stderr, flush=True)


def baselines(got: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: r for name, r in got.items() if r["who"] == "peer"}


def fit_rows(o: argparse.Namespace, got: dict[str, dict[str, Any]], errors: dict[str, list[float]]) -> list[dict]:
    from crosskv.evals.rows import row

    out = []
    for k in ("4", "8"):
        for name, r in got.items():
            if r["who"] != "ours":
                continue
            for peer, p in baselines(got).items():
                setting = {
                    "arrays": name.split(", ")[1], "k": int(k), "layers": [SOURCE, TARGET], "heads": HEADS,
                    "head_dim": DIM, "tokens": o.tokens, "dtype": "float32", "threads": o.threads,
                    "peer": p["versions"], "peer_blas": p["blas"],
                }  # fmt: skip
                scale = TARGET / p["targets"]
                extra = {"layers_timed": p["targets"], "scaled_by": scale} if scale != 1 else {}
                base = {"name": peer, **extra}
                walls, cpus = r["wall"][k], r["cpu"][k]
                low, high = (float(np.percentile(walls, q)) for q in (20, 80))
                make = partial(row, "fit", setting, seed=o.seed)
                out += [
                    make("fit_seconds", statistics.median(walls), "s", low=low, high=high, n=len(walls),
                         baseline=base | {"value": p["wall"][k][0] * scale}),
                    make("fit_cpu_seconds", statistics.median(cpus), "s", n=len(cpus),
                         baseline=base | {"value": p["cpu"][k][0] * scale}),
                ]  # fmt: skip
                for j, kind in enumerate(("keys", "values")):
                    e = {"name": peer, "value": errors[f"{peer}|{k}"][j], "layers": p["targets"]}
                    value = errors[f"{name}|{k}"][j]
                    out.append(make(f"fit_error_{kind}", value, "of max", n=FRESH, baseline=e))
    for name, r in got.items():
        setting = {"what": name, "k": [4, 8], "tokens": o.tokens, "layers": [SOURCE, r["targets"]]}
        floor = {"name": "peak before the fit: imports, and the caches being made", "value": r["peak_before"]}
        out.append(row("fit", setting, "fit_peak", r["peak"], "MB", seed=o.seed, baseline=floor))
    return out


def error_runs(o: argparse.Namespace, got: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    saved = {
        f"{name}|{k}": {"who": r["who"], "file": f"{r['save']}-{k}.npz", "sources": r["sources"][k]}
        for name, r in got.items()
        for k in ("4", "8")
    }
    errors = spawn(sys.executable, "reference", o.threads, tokens=o.tokens, seed=o.seed, runs=saved)
    for name, e in errors.items():
        say(name, "error of keys {:.1e}, values {:.1e}".format(*e))
    return errors


def memory_rows(o: argparse.Namespace) -> list[dict]:
    from crosskv.evals.rows import row

    out: list[dict] = []
    for tokens in MEMORY_SIZES:
        got = spawn(sys.executable, "memory", o.threads, tokens=tokens, seed=o.seed)
        say(f"{tokens:,} tokens", got)
        setting = {
            "what": "streaming fit, transfer.Stats", "tokens": tokens, "rows": got["rows"], "batch": BATCH,
            "layers": [4, 6], "heads": 2, "head_dim": 32, "seconds": got["wall"], "held_out_r2": got["r2"],
        }  # fmt: skip
        whole = {"name": "bytes of the caches themselves", "value": tokens * 2 * (4 + 6) * 64 * 4 / 1e6}
        out.append(row("fit", setting, "fit_peak", got["peak"], "MB", seed=o.seed, baseline=whole))
    return out


def options() -> argparse.Namespace:
    needs = f"Needs crosskv[torch,mlx], and {PEER}==0.94.15 here or in another interpreter (--peer-python)."
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=needs, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer-python", default=sys.executable, help=f"interpreter that has {PEER} (default: this one)")
    add("--blas", default="libopenblas.so.0", help="fast BLAS to load before the peer's MLX; '' for none "
        "(Debian: apt-get install libopenblas0-pthread)")  # fmt: skip
    add("--threads", type=int, default=os.cpu_count(), help="BLAS threads of every process (default: all cores)")
    add("--tokens", type=int, default=16_384)
    add("--repeats", type=int, default=3, help="fits of ours per k; the peer fits once")
    add("--peer-layers", type=int, default=TARGET, help=f"of {TARGET} target layers, how many the peer fits as shipped")
    add("--seed", type=int, default=0)
    add("-o", "--out", type=Path, default=Path(__file__).parents[1] / "results" / "fit.jsonl")
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def checked(o: argparse.Namespace) -> None:
    found = subprocess.run([o.peer_python, "-c", "import veloxquant_mlx.transfer"], capture_output=True)
    if found.returncode:
        raise SystemExit(INSTALL.format(o.peer_python))
    try:
        if o.blas:
            ctypes.CDLL(o.blas)
    except OSError:
        raise SystemExit(f"{o.blas} cannot be loaded; install it (see --help) or pass --blas ''.") from None


def main() -> None:
    o = options()
    if o.worker:
        print(json.dumps(WORKERS[o.worker[0]](json.loads(o.worker[1]))))
        return
    checked(o)
    from crosskv.evals.rows import write

    rows = memory_rows(o)
    with tempfile.TemporaryDirectory() as folder:
        got = runs(o, folder)
        rows += fit_rows(o, got, error_runs(o, got))
    write(o.out, rows)


if __name__ == "__main__":
    main()
