"""Compressed caches on disk: written by one process, taken up by another, in either framework.

    crosskv.park(cache, "chat.kv")                          a cache made by make_cache, whole and packed as it is
    cache = crosskv.resume(model, "chat.kv", basis=basis)   the host's own cache again (packed=True: packed as it was)

Two uses of one codec. *Resident* caches are read by every decode step and have few layers in a group. *Parked* ones are
only kept or sent: take a basis over all layers, and tail=0, block=1, so that every token is packed:

    cache = crosskv.make_cache(model, crosskv.XKVConfig(all_layers, ratio=16, tail=0, block=1), prefilled)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from crosskv import backends
from crosskv.backends import Held
from crosskv.calibrated import Calibrated
from crosskv.compress import XKVConfig, make_cache
from crosskv.errors import BadArtifact, BadInput, IncompatibleModels
from crosskv.files import Tensors, write_tensors
from crosskv.latent import Coder, Group, Member, Raw, Segment, Side
from crosskv.layout import ModelKVSpec, differs
from crosskv.live import measured
from crosskv.quant import Planes, Quantised
from crosskv.store import IntConfig, Store
from crosskv.subspace import Basis

VERSION = 1


def park(cache: Any, file: str | Path | None = None) -> Path | bytes:
    """Write a compressed cache (made by make_cache) to a safetensors file, or return it as bytes.

    The cache goes on as it was. Raises BadInput for any other cache, and for one with sliding-window layers.
    """
    held, (spec, config) = _held(cache)
    tensors: dict[str, Any] = {}
    layers: list[Any] = []
    for i, h in enumerate(held):
        if isinstance(h, Store):
            layers.append(_flat(h.state(), f"{i}", tensors))
    groups = [_group(g, f"g{n}", tensors) for n, g in enumerate(_groups(held))]
    about = {
        "version": VERSION,
        "spec": spec.to_json(),
        "config": _config_json(config),
        "layers": layers,
        "groups": groups,
    }
    host = {name: _bits(x) for name, x in tensors.items()}
    where = Path(file).expanduser().absolute() if file is not None else None
    folder = None if where is None else where.parent
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".park.")
    os.close(handle)
    try:
        write_tensors(Path(temporary), host, {"crosskv": json.dumps(about)})
        if where is None:
            return Path(temporary).read_bytes()
        os.replace(temporary, where)
        return where
    finally:
        Path(temporary).unlink(missing_ok=True)


def resume(model: Any, parked: str | Path | bytes, basis: Calibrated | None = None, packed: bool = False) -> Any:
    """The cache that `park` wrote, for a live model of either host.

    parked: the file, or its bytes. basis: the calibrated basis that it was compressed with, when there was one. packed:
    True returns a compressed cache as it was parked; False (decoding is fastest) the host's own, with what the
    compressed one would read. Raises IncompatibleModels for another model or basis, BadArtifact for a damaged file.
    """
    path, temporary = (Path(parked), None) if not isinstance(parked, bytes) else _as_file(parked)
    try:
        tensors = Tensors(path)
        try:
            about = json.loads(tensors.metadata["crosskv"])
            if about["version"] != VERSION:
                raise BadArtifact(f"{path} has format version {about['version']}, this crosskv reads {VERSION}.")
            spec = ModelKVSpec.from_json(about["spec"])
            how = differs(spec, measured(model))
            if how is not None:
                raise IncompatibleModels(f"This cache was parked by another model: {how}.")
            cache = make_cache(model, _config(about["config"], basis))
            _fill(cache, about, tensors, model)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadArtifact(f"{path} is not a parked cache that can be read ({e}). Park it again.") from e
    finally:
        if temporary is not None:
            temporary.unlink()
    if packed:
        return cache
    b = backends.of(model)
    return b.install(model, b.read(model, cache))


def _as_file(data: bytes) -> tuple[Path, Path]:
    handle, name = tempfile.mkstemp(prefix=".park.")
    with os.fdopen(handle, "wb") as f:
        f.write(data)
    return Path(name), Path(name)


def _held(cache: Any) -> tuple[list[Held], tuple[ModelKVSpec, Any]]:
    first = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
    try:
        held, about = backends.of(first).held(cache)
    except BadInput:
        held, about = [], None
    if about is None or any(h is None for h in held):
        raise BadInput(
            f"Only caches made by crosskv.make_cache can be parked, all of whose layers are compressed; got "
            f"{type(cache).__name__}. Compress it first: crosskv.make_cache(model, config, cache)."
        )
    return [h for h in held if h is not None], about


def _groups(held: list[Held]) -> list[Group]:
    found: list[Group] = []
    for h in held:
        if isinstance(h, Member) and all(h.group is not g for g in found):
            found.append(h.group)
    return found


def _bits(x: Any) -> np.ndarray:
    """On the host; bfloat16 as its bits."""
    b = backends.of(x)
    a = b.to_numpy(x)
    return backends.load("numpy").cast(a, "bfloat16") if b.dtype_of(x) == "bfloat16" else np.ascontiguousarray(a)


# ---- what a cache is made of ----


def _flat(state: list[Any], name: str, tensors: dict[str, Any]) -> list[Any]:
    """A store's state with its arrays moved to `tensors`."""
    out: list[Any] = []
    for n, x in enumerate(state):
        if hasattr(x, "shape"):
            tensors[f"{name}.{n}"] = x
            out.append({"tensor": f"{name}.{n}"})
        else:
            out.append(x)
    return out


def _group(g: Group, name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    for j, (sinks, tail) in enumerate(zip(g.sinks, g.tails, strict=True)):
        for word, pair in (("sinks", sinks), ("tail", tail)):
            if pair is not None:
                tensors[f"{name}.{word}.{j}.0"], tensors[f"{name}.{word}.{j}.1"] = pair
    if g.start is not None:
        tensors[f"{name}.start"] = g.start
    segments = []
    for n, s in enumerate(g.middle):
        sides = []
        for k, (side, parts) in enumerate(zip(s.sides, s.packed, strict=True)):
            for p, part in enumerate(parts):
                for a, x in enumerate(part.arrays):
                    tensors[f"{name}.{n}.{k}.{p}.{a}"] = x
            own = g.codec.own and side.basis is not None
            if own:
                tensors[f"{name}.{n}.{k}.vectors"] = side.basis.vectors  # type: ignore[union-attr]
                if side.basis.mean is not None:  # type: ignore[union-attr]
                    tensors[f"{name}.{n}.{k}.mean"] = side.basis.mean  # type: ignore[union-attr]
            kind = side.basis.kind if own else None  # type: ignore[union-attr]
            sides.append({"runs": side.coder.runs, "dtype": side.coder.dtype, "kind": kind})
        segments.append(sides)
    return {"layers": g.layers, "dtype": g.dtype, "width": g.width, "segments": segments}


def _fill(cache: Any, about: dict[str, Any], tensors: Tensors, model: Any) -> None:
    b = backends.of(model)
    like = b.weight(model)

    def array(name: str) -> Any:
        return b.from_numpy(tensors[name], like)

    names = set(tensors.names())
    held, _ = _held(cache)
    for i, state in enumerate(about["layers"]):
        values = [array(x["tensor"]) if isinstance(x, dict) else x for x in state]
        b.put(cache, i, held[i].restore(values))
    groups = _groups(held)
    if [list(g.layers) for g in groups] != [x["layers"] for x in about["groups"]]:
        raise ValueError("its groups are not this config's")
    for n, (g, x) in enumerate(zip(groups, about["groups"], strict=True)):
        _fill_group(g, f"g{n}", x, names, array)


def _fill_group(g: Group, name: str, x: dict[str, Any], names: set[str], array: Any) -> None:
    def pair(word: str, j: int) -> Any:
        return (
            (array(f"{name}.{word}.{j}.0"), array(f"{name}.{word}.{j}.1")) if f"{name}.{word}.{j}.0" in names else None
        )

    g.dtype, g.width = x["dtype"], x["width"]
    g.sinks = [pair("sinks", j) for j in range(len(g.layers))]
    g.tails = [pair("tail", j) for j in range(len(g.layers))]
    g.start = array(f"{name}.start") if f"{name}.start" in names else None
    middle = []
    for n, sides in enumerate(x["segments"]):
        made = [_side(g, f"{name}.{n}.{k}", k, s, names, array) for k, s in enumerate(sides)]
        packed = [tuple(_packed(side, f"{name}.{n}.{k}", names, array)) for k, side in enumerate(made)]
        middle.append(Segment((made[0], made[1]), (packed[0], packed[1])))
    g.middle = tuple(middle)


def _side(g: Group, name: str, k: int, s: dict[str, Any], names: set[str], array: Any) -> Side:
    if not g.codec.own:
        return g.codec.sides((), ())[k]
    coder = Coder(tuple(tuple(r) for r in s["runs"]), None, g.codec.block, s["dtype"])
    if s["kind"] is None:
        return Side(None, coder)
    mean = array(f"{name}.mean") if f"{name}.mean" in names else None
    return Side(Basis(s["kind"], array(f"{name}.vectors"), mean), coder)


def _packed(side: Side, name: str, names: set[str], array: Any) -> Iterator[Any]:
    if side.basis is None or not side.coder.runs:
        yield Raw(array(f"{name}.0.0"))
        return
    for p, (start, stop, bits) in enumerate(side.coder.runs):
        arrays = [array(f"{name}.{p}.{a}") for a in range(4) if f"{name}.{p}.{a}" in names]
        if side.coder.limits is not None:
            yield Planes(tuple(arrays), bits, stop - start)
        else:
            *planes, step, low = arrays
            yield Quantised(tuple(planes), step, low, bits, side.coder.block, -2, stop - start, "float32")


def _config_json(c: Any) -> dict[str, Any]:
    if isinstance(c, IntConfig):
        return {"int": asdict(c)}
    d = {k: getattr(c, k) for k in c.__dataclass_fields__}
    if isinstance(c.basis, Calibrated):
        d["basis"] = {"calibrated": c.basis.fingerprint}
    return {"xkv": d}


def _config(d: dict[str, Any], basis: Calibrated | None) -> Any:
    if "int" in d:
        return IntConfig(**d["int"])
    d = dict(d["xkv"])
    if isinstance(d["basis"], dict):
        if basis is None or basis.fingerprint != d["basis"]["calibrated"]:
            raise IncompatibleModels(
                "This cache needs the calibrated basis that it was compressed with "
                f"(fingerprint {d['basis']['calibrated'][:16]}); "
                + ("pass it: resume(model, file, basis=...)." if basis is None else f"got {basis.fingerprint[:16]}.")
            )
        d["basis"] = basis
    return XKVConfig(**d)
