"""What caches really take while a model reads and writes: bytes held at the end and the peak, one process per arm.

    python benchmarks/memory.py --basis DIR [--peer-python PYTHON]      # DIR from: crosskv calibrate family:L ...

L of the family reads 2,048 tokens, 256 at a time, and writes 512 (MLX on the CPU: 32, its BLAS is slow). `peak` is how
far memory rose above where it stood once the model had run a step: the process's resident memory in PyTorch, the
allocator's own figure in MLX. `held` is what the cache's arrays take at the end, in MLX what the allocator says is
still in use; `most` is what the cache says it holds, at the worst moment of the last 32 steps (one cycle of folding),
which is what `planned` promises. Arms: the host's own cache; plain 4-bit integers; a calibrated basis planned for 8x
(against 2 bytes an entry; the model is float32, so 16x against what it would hold); transformers'
QuantizedCache("fp8"); veloxquant-mlx 0.94.15's method "xkv" (in the interpreter of --peer-python).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT, CHUNK, RATIO, BLOCK = 2048, 256, 8, 32
ARMS = {
    "torch": ("own", "int4", "calibrated 8x", "QuantizedCache fp8"),
    "mlx": ("own", "int4", "calibrated 8x", "veloxquant-mlx xkv"),
}
NEW = {"torch": 512, "mlx": 32}


def ours(model: Any, arm: str, basis: str, tokens: int) -> tuple[Any, int | None]:
    """(cache, bytes planned for so many tokens) of one of crosskv's arms."""
    import crosskv
    from crosskv.calibrated import Calibrated

    if arm == "int4":
        return crosskv.make_cache(model, crosskv.IntConfig(4, 4)), None
    from dataclasses import replace

    found = crosskv.plan(model, RATIO, tokens, Calibrated.load(basis))
    chosen = next(p for p in found if isinstance(p.config, crosskv.XKVConfig))
    return crosskv.make_cache(model, replace(chosen.config, exact="float16")), chosen.bytes


def work_torch(arm: str, basis: str, new: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import QuantizedCache

    from crosskv import backends, family

    model, tokenizer = family.load("L")
    b, ids = backends.of(model), np.asarray([tokenizer.encode(family.text("heldout"))[:PROMPT]])
    planned = None
    if arm == "own":
        cache: Any = DynamicCache(config=model.config)
    elif arm == "QuantizedCache fp8":
        cache = QuantizedCache("fp8", model.config)
    else:
        cache, planned = ours(model, arm, basis, PROMPT + new)
    b.logits(model, ids[:, :CHUNK])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, or the run would hide in it
    before = b.memory(reset=True)
    for i in range(0, PROMPT, CHUNK):
        logits = b.logits(model, ids[:, i : i + CHUNK], cache)[:, -1:]
    most = 0
    for i in range(new):
        logits = b.logits(model, logits.argmax(-1).numpy(), cache)
        most = max(most, b.cache_bytes(cache)) if planned and i >= new - BLOCK else 0
    peak = b.memory() - before
    seen: dict[int, int] = {}
    for o in gc.get_objects():  # all tensors that live, but for the model's and the last logits
        if torch.is_tensor(o):
            seen[o.untyped_storage().data_ptr()] = o.untyped_storage().nbytes()
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    held = b.cache_bytes(cache) if hasattr(cache, "nbytes") else sum(v for k, v in seen.items() if k not in weights)
    return {"peak": peak, "held": held, "most": most or None, "planned": planned, "tokens": PROMPT + new}


def work_mlx(arm: str, basis: str, new: int) -> dict[str, Any]:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    place = str(Path(__file__).parents[1] / "crosskv" / "family" / "L")
    model, tokenizer = mlx_lm.load(place)[:2]
    model.set_dtype(mx.float32)
    text = (Path(__file__).parents[1] / "crosskv" / "family" / "text" / "heldout.txt").read_text()
    ids, planned = mx.array([tokenizer.encode(text)[:PROMPT]]), None
    if arm == "own":
        cache: Any = make_prompt_cache(model)
    elif arm == "veloxquant-mlx xkv":
        from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

        cache = KVCacheBuilder.for_model(model, KVCacheConfig(method="xkv", head_dim=64))
    else:
        cache, planned = ours(model, arm, basis, PROMPT + new)
    mx.eval(model(ids[:, :CHUNK]))
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    logits = None
    for i in range(0, PROMPT, CHUNK):
        logits = model(ids[:, i : i + CHUNK], cache=cache)[:, -1:]
        mx.eval(logits)
    most = 0
    for i in range(new):
        logits = model(mx.argmax(logits, -1), cache=cache)[:, -1:]
        mx.eval(logits)
        most = max(most, sum(c.nbytes for c in cache)) if planned and i >= new - BLOCK else 0
    peak = mx.get_peak_memory() - before
    del logits
    gc.collect()
    held = mx.get_active_memory() - before
    out = {"peak": peak, "held": held, "most": most or None, "planned": planned, "tokens": PROMPT + new}
    if arm.startswith("veloxquant"):
        names = ("compressed_key_bytes", "shared_basis_bytes", "value_fp16_bytes")
        out["reported"] = sum(int(getattr(c, n, 0)) for c in cache for n in names)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--basis", required=True, help="what `crosskv calibrate family:L` wrote")
    add("--peer-python", help="an interpreter that has veloxquant-mlx 0.94.15 and mlx-lm")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results" / "memory.jsonl")
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        host, arm = a.worker
        work = {"torch": work_torch, "mlx": work_mlx}[host]
        print(json.dumps(work(arm, a.basis, NEW[host])))
        return
    from crosskv.evals import rows

    found, own = [], {}
    for host, arms in ARMS.items():
        for arm in arms:
            peer = arm.startswith("veloxquant")
            if peer and not a.peer_python:
                continue
            command = [a.peer_python if peer else sys.executable, __file__, "--basis", a.basis, "--worker", host, arm]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{host} {arm}: {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            got = json.loads(done.stdout.strip().splitlines()[-1])
            own.setdefault(host, got)
            print(f"{host} {arm}: {got}", flush=True)
            at = {"model": "L", "host": host, "dtype": "float32", "arm": arm, "tokens": got["tokens"]}
            for name in ("peak", "held", "most", "planned", "reported"):
                if got.get(name) is not None:
                    base = {"name": "own", "value": own[host][name]} if name in own[host] and own[host][name] else None
                    found.append(rows.row("memory", at, name, got[name], "bytes", baseline=base))
    rows.write(a.out, found)


if __name__ == "__main__":
    main()
