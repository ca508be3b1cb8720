"""Arrays in, arrays out: the seed page's usage blocks on both frameworks, planted truths, and bad input by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import FLOAT64, array_backends

from crosskv import backends, rope
from crosskv.backends import Rope
from crosskv.errors import BadInput
from crosskv.layout import plain_rope
from crosskv.moments import BLOCK_ROWS
from crosskv.transfer import MapperConfig, MatchedKVError, ModelKVSpec, Stats, fit_mapper, load_mapper, transfer_cache

H, D = 2, 8
YARN = Rope(plain_rope(D, 1e4).inv_freq, 1.46)
PARTIAL = Rope(plain_rope(4, 1e4).inv_freq, interleaved=True)
SOURCE = ModelKVSpec(3, H, D, ropes=(YARN, PARTIAL, Rope()))
TARGET = ModelKVSpec(4, H, D, ropes=(plain_rope(D, 1e6), YARN, PARTIAL, Rope()))
EXACT = MapperConfig(k=2, ridge_lambda=0, stride=1, dtype="float64")


def _rows(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


class Planted:
    """Two caches with an exact affine relation: target layer t is made of source layers t % S and (t + 1) % S."""

    def __init__(self, n: int = 1500, seed: int = 0, scale: float = 1.0, offset: float = 0.0, noise: float = 0.0):
        rng = np.random.default_rng(seed)
        self.s, self.t = SOURCE, TARGET
        self.maps = [
            [(rng.standard_normal((2 * H * D, H * D)) / 4, rng.standard_normal(H * D)) for _ in range(2)]
            for _ in range(self.t.n_layers)
        ]
        self.scale, self.offset, self.noise = scale, offset, noise
        self.positions = np.arange(n)
        self.source, self.target = self.draw(self.positions, rng)

    def draw(self, positions: np.ndarray, rng: np.random.Generator) -> tuple[dict, dict]:
        n = len(positions)
        pre = [tuple(self.scale * (rng.standard_normal((H, n, D)) + self.offset) for _ in range(2)) for _ in range(3)]
        source = {i: (self._rotate(k, SOURCE.ropes[i], positions), v) for i, (k, v) in enumerate(pre)}
        target = {}
        for t, maps in enumerate(self.maps):
            ids = sorted((t % 3, (t + 1) % 3))
            out = []
            for side, (w, b) in enumerate(maps):
                x = np.concatenate([_rows(pre[i][side]) for i in ids], 1) / self.scale
                y = x @ w + b + self.noise * rng.standard_normal((n, H * D))
                out.append(y.reshape(n, H, D).swapaxes(0, 1))
            target[t] = (self._rotate(out[0], TARGET.ropes[t], positions), out[1])
        return source, target

    @staticmethod
    def _rotate(k: np.ndarray, r: Rope, positions: np.ndarray) -> np.ndarray:
        return rope.rotate(k, rope.tables(r, positions), r.interleaved)


def to(kv: dict, name: str, dtype: str, batch: bool = False) -> dict:
    b = backends.load(name)
    return {i: tuple(b.from_numpy(x[None] if batch else x, dtype=dtype) for x in pair) for i, pair in kv.items()}


def error(got: dict, want: dict) -> float:
    """Largest error over all layers, relative to the largest value of the layer."""
    assert sorted(got) == sorted(want)
    return max(
        float(np.abs(backends.of(a).to_numpy(a).reshape(b.shape) - b).max() / np.abs(b).max())
        for i in want
        for a, b in zip(got[i], want[i], strict=True)
    )


# ---- the seed page ----


def test_seed_usage_on_mlx_arrays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx
    from conftest import small

    from crosskv.transfer import fit_mapper, load_mapper, transfer_cache
    from crosskv.transfer.mapper import MapperConfig, ModelKVSpec

    monkeypatch.chdir(tmp_path)
    source_model, target_model = small("mlx", layers=9), small("mlx", layers=4, seed=5)
    n_tokens = 1600
    tokens = mx.array(np.random.default_rng(0).integers(0, 128, (1, n_tokens)))
    b = backends.of(tokens)
    source_kv, target_kv = (
        {i: (k[0], v[0]) for i, (k, v) in b.capture(m, tokens).items()} for m in (source_model, target_model)
    )

    src_spec = ModelKVSpec.from_model(source_model)
    tgt_spec = ModelKVSpec.from_model(target_model)
    mapper = fit_mapper(
        source_kv,
        target_kv,
        src_spec,
        tgt_spec,
        positions=mx.arange(n_tokens),
        config=MapperConfig(k=8, ridge_lambda=0.01),
    )
    mapper.save("mappers/qwen3-0.6b-to-1.7b")

    mapper = load_mapper("mappers/qwen3-0.6b-to-1.7b")
    target_kv = transfer_cache(source_kv, mapper, positions=mx.arange(n_tokens))
    assert sorted(target_kv) == [0, 1, 2, 3]
    assert all(isinstance(x, mx.array) and x.shape == (2, n_tokens, 16) for kv in target_kv.values() for x in kv)


def test_seed_usage_on_torch_tensors(tmp_path: Any) -> None:
    import torch
    from conftest import small

    source_model, target_model = small("torch", layers=9), small("torch", layers=4, seed=5)
    n_tokens = 1600
    tokens = torch.randint(0, 128, (1, n_tokens), generator=torch.Generator().manual_seed(0))
    b = backends.of(tokens)
    source_kv, target_kv = (
        {i: (k[0], v[0]) for i, (k, v) in b.capture(m, tokens).items()} for m in (source_model, target_model)
    )
    specs = ModelKVSpec.from_model(source_model), ModelKVSpec.from_model(target_model)
    config = MapperConfig(k=8, ridge_lambda=0.01)
    mapper = fit_mapper(source_kv, target_kv, *specs, positions=torch.arange(n_tokens), config=config)
    mapper.save(tmp_path / "m")
    out = transfer_cache(source_kv, load_mapper(tmp_path / "m"), positions=torch.arange(n_tokens))
    assert sorted(out) == [0, 1, 2, 3]
    assert all(isinstance(x, torch.Tensor) and x.shape == (2, n_tokens, 16) for kv in out.values() for x in kv)


def test_defaults_are_the_seed_table() -> None:
    c = MapperConfig()
    assert (c.k, c.ridge_lambda, c.n_calib_sequences, c.calib_seq_len) == (8, 0.01, 500, 1024)
    assert (c.stride, c.content_space, c.dtype) == (4, True, "float16")


# ---- planted truth ----


@pytest.mark.parametrize(("name", "dtype"), [(n, "float32") for n in array_backends()] + FLOAT64)
@pytest.mark.parametrize("selection", ["topk", "greedy"])
def test_a_planted_relation_is_recovered_to_rounding(name: str, dtype: str, selection: str) -> None:
    p = Planted()
    config = MapperConfig(k=2, ridge_lambda=0, stride=1, dtype=dtype, selection=selection)
    mapper = fit_mapper(to(p.source, name, dtype), to(p.target, name, dtype), p.s, p.t, config=config)
    assert [m.sources for m in mapper.layers.values()] == [(0, 1), (1, 2), (0, 2), (0, 1)]
    assert all(
        min(m.r2_keys, m.r2_values) > 1 - (1e-12 if dtype == "float64" else 1e-6) for m in mapper.layers.values()
    )
    fresh, want = p.draw(
        np.arange(700, 800), np.random.default_rng(9)
    )  # positions that the fit never saw in this order
    got = transfer_cache(to(fresh, name, dtype), mapper, positions=np.arange(700, 800))
    assert error(got, want) <= (64 * 2**-53 if dtype == "float64" else 64 * 2**-24)
    for batch in (False, True):
        out = transfer_cache(to(fresh, name, dtype, batch), mapper, positions=np.arange(700, 800))
        b = backends.of(out[0][0])
        assert {(b.dtype_of(x), len(x.shape)) for kv in out.values() for x in kv} == {(dtype, 4 if batch else 3)}
    wrong = transfer_cache(to(fresh, name, dtype), mapper)  # positions 0 ... 99
    assert error(wrong, want) > 0.1


RANK = 6


def _mixed(n: int, seed: int) -> tuple[dict, dict]:
    """Target layers 1 to 3 are made of RANK combinations of all source keys and values and of target layer 0's."""
    fixed, rng = np.random.default_rng(0), np.random.default_rng(seed)
    down = fixed.standard_normal((2 * 4 * H * D, RANK)) / 8
    up = [[fixed.standard_normal((RANK, H * D)) for _ in range(2)] for _ in range(3)]
    pre = [tuple(rng.standard_normal((H, n, D)) + 1 for _ in range(2)) for _ in range(4)]
    z = np.concatenate([_rows(pair[side]) for side in (0, 1) for pair in pre], 1) @ down
    made = [tuple((z @ u + i).reshape(n, H, D).swapaxes(0, 1) for i, u in enumerate(pair)) for pair in up]
    at = np.arange(n)
    source = {i: (Planted._rotate(k, SOURCE.ropes[i], at), v) for i, (k, v) in enumerate(pre[:3])}
    target = {i: (Planted._rotate(k, TARGET.ropes[i], at), v) for i, (k, v) in enumerate([pre[3], *made])}
    return source, target


@pytest.mark.parametrize(("name", "dtype"), [(n, "float32") for n in array_backends()] + FLOAT64)
def test_keys_and_values_exact_layers_and_a_latent_recover_what_needs_them(
    name: str, dtype: str, tmp_path: Any
) -> None:
    (s, t), (fresh, want) = _mixed(1500, 1), _mixed(100, 2)
    s, t, given = to(s, name, dtype), to(t, name, dtype), to(fresh, name, dtype)
    mapped = {i: want[i] for i in (1, 2, 3)}

    def fitted(**options: Any) -> tuple[Any, float]:
        config = MapperConfig(**{"k": "all", "ridge_lambda": 1e-14, "stride": 1, "dtype": dtype, **options})
        mapper = fit_mapper(s, t, SOURCE, TARGET, config=config)
        exact = to({0: want[0]}, name, dtype) if config.exact_layers else None
        got = transfer_cache(given, mapper, exact=exact)
        assert sorted(got) == [0, 1, 2, 3]
        return mapper, error({i: got[i] for i in mapped}, mapped)

    limit = 1e-9 if dtype == "float64" else 1e-3
    full, worst = fitted(features="both", exact_layers=1)
    assert worst < limit
    small, worst = fitted(features="both", exact_layers=1, latent=RANK)
    assert worst < limit
    assert small.n_parameters == 128 * RANK + RANK + 6 * (RANK * H * D + H * D)
    assert full.n_parameters == 6 * (128 * H * D + H * D)
    for less in ({"latent": RANK - 1}, {"exact_layers": 0}, {"features": "own"}, {"k": 2}):
        assert fitted(**{"features": "both", "exact_layers": 1, **less})[1] > 0.02
    small.save(tmp_path / "m")
    opened = load_mapper(tmp_path / "m")
    exact = to({0: want[0]}, name, dtype)
    a, b = (transfer_cache(given, m, exact=exact) for m in (small, opened))
    assert error(a, {i: tuple(backends.of(x).to_numpy(x) for x in kv) for i, kv in b.items()}) == 0
    assert opened.nbytes == 0  # every layer is released once it is done, and the encoder
    with pytest.raises(BadInput, match="first 1 layers: pass exact"):
        transfer_cache(given, opened)
    with pytest.raises(BadInput, match="same tokens as the source's cache"):
        transfer_cache(given, opened, exact={0: tuple(x[:, :9] for x in exact[0])})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "keys"}, "features must be"),
        ({"exact_layers": -1}, "exact_layers must be"),
        ({"latent": 4}, "needs features='both'"),
        ({"latent": 0, "features": "both"}, "latent must be"),
        ({"latent": 4, "features": "both", "selection": "greedy"}, "selection='topk'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        MapperConfig(**options)


def test_no_layer_left_to_map_is_refused() -> None:
    s, t = _mixed(1500, 1)
    with pytest.raises(BadInput, match="none is left to map"):
        fit_mapper(s, t, SOURCE, TARGET, config=MapperConfig(k=1, exact_layers=4))


@pytest.mark.parametrize("name", array_backends())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_stored_weights_round_and_no_more(name: str, dtype: str) -> None:
    p = Planted()
    config = MapperConfig(k=2, ridge_lambda=0, stride=1, dtype=dtype)
    mapper = fit_mapper(to(p.source, name, "float32"), to(p.target, name, "float32"), p.s, p.t, config=config)
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "int8": 1 / 254}[dtype]
    assert error(transfer_cache(to(p.source, name, "float32"), mapper), p.target) <= max(8 * eps, 64 * 2**-24)


@pytest.mark.parametrize(("dtype", "eps"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
@pytest.mark.parametrize("name", array_backends())
def test_half_precision_caches(name: str, dtype: str, eps: float) -> None:
    p = Planted(4000)
    b = backends.load(name)
    source, target = to(p.source, name, dtype), to(p.target, name, dtype)
    mapper = fit_mapper(source, target, p.s, p.t, config=MapperConfig(k=2, ridge_lambda=1e-4, stride=1))
    got = transfer_cache(source, mapper)
    assert {b.dtype_of(x) for kv in got.values() for x in kv} == {dtype}
    assert error(got, p.target) <= 8 * eps


@pytest.mark.parametrize("scale", [1e-6, 1e3])
def test_any_scale_of_features_in_float16_weights(scale: float) -> None:
    p = Planted(scale=scale)
    config = MapperConfig(k=2, ridge_lambda=1e-6, stride=1)
    mapper = fit_mapper(to(p.source, "numpy", "float32"), to(p.target, "numpy", "float32"), p.s, p.t, config=config)
    assert error(transfer_cache(to(p.source, "numpy", "float32"), mapper), p.target) < 1e-2
    assert mapper.layers[0].r2_keys > 0.9999


def test_mean_offset_of_1000_in_float16() -> None:
    """float16 has steps of .5 at 1000: the oracle is least squares in float64 on the same rounded numbers."""
    rng = np.random.default_rng(0)
    spec = ModelKVSpec(2, H, D, ropes=(Rope(), Rope()))
    n = 3000
    x = [tuple((1000 + 8 * rng.standard_normal((H, n, D))).astype(np.float16) for _ in "kv") for _ in range(2)]
    w = rng.standard_normal((2 * H * D, H * D)) / 6
    all_x = [np.concatenate([_rows(x[i][side]) for i in (0, 1)], 1).astype(np.float64) for side in (0, 1)]
    y = [((a - 1000) @ w + rng.standard_normal((n, H * D))).reshape(n, H, D).swapaxes(0, 1) for a in all_x]
    target = {i: tuple(a.astype(np.float16) for a in y) for i in range(2)}
    mapper = fit_mapper(dict(enumerate(x)), target, spec, spec, config=MapperConfig(k=2, ridge_lambda=0, stride=1))
    got = transfer_cache({i: tuple(a.astype(np.float32) for a in kv) for i, kv in enumerate(x)}, mapper)
    for side in (0, 1):
        want = _rows(target[0][side]).astype(np.float64)
        rows = np.concatenate([all_x[side], np.ones((n, 1))], 1)
        best = want - rows @ np.linalg.lstsq(rows, want, rcond=None)[0]
        ours = want - _rows(got[0][side])
        assert (ours**2).sum() <= 1.01 * (best**2).sum()


def test_a_huge_first_token_does_not_spoil_the_fit() -> None:
    """An attention sink: position 0 is 3,000 times larger and does not follow the relation of the rest."""
    p = Planted(noise=0.1)
    rng = np.random.default_rng(3)
    for kv in (p.source, p.target):
        for i, pair in kv.items():
            kv[i] = tuple(np.concatenate([3000 * rng.standard_normal((H, 1, D)), x[:, 1:]], 1) for x in pair)
    config = MapperConfig(k=2, ridge_lambda=1e-6, stride=1, dtype="float32")
    good = fit_mapper(p.source, p.target, p.s, p.t, config=config)
    best = min(m.r2_values for m in good.layers.values())
    assert best > 0.97
    keep = MapperConfig(k=2, ridge_lambda=1e-6, stride=1, dtype="float32", skip=0)
    assert min(m.r2_values for m in fit_mapper(p.source, p.target, p.s, p.t, config=keep).layers.values()) < best - 0.02


def test_content_space_is_what_carries_over_to_other_positions() -> None:
    p = Planted()
    raw = MapperConfig(k=2, ridge_lambda=1e-6, stride=1, content_space=False)
    mapper = fit_mapper(p.source, p.target, p.s, p.t, config=raw)
    assert min(m.r2_values for m in mapper.layers.values()) > 0.999
    assert mapper.layers[0].r2_keys < 0.5


def test_stride_and_batch_choose_the_rows() -> None:
    p = Planted()
    one = MapperConfig(k=2, stride=1)
    counts = {}
    for stride in (1, 3):
        config = MapperConfig(k=2, stride=stride)
        about = fit_mapper(p.source, p.target, p.s, p.t, config=config).provenance
        counts[stride] = about["training_rows"] + about["held_out_rows"]
    assert counts == {1: 1499, 3: 500}
    two = [
        {i: tuple(x.reshape(H, 2, 750, D).swapaxes(0, 1) for x in pair) for i, pair in kv.items()}
        for kv in (p.source, p.target)
    ]
    flat = fit_mapper(p.source, p.target, p.s, p.t, config=MapperConfig(k=2, stride=1, skip=0))
    places = np.arange(1500).reshape(2, 750)
    both = fit_mapper(two[0], two[1], p.s, p.t, positions=places, config=MapperConfig(k=2, stride=1, skip=0))
    assert both.provenance["training_rows"] == pytest.approx(flat.provenance["training_rows"], abs=100)
    out = transfer_cache(two[0], both, positions=places)
    want = {i: tuple(x.reshape(H, 2, 750, D).swapaxes(0, 1) for x in pair) for i, pair in p.target.items()}
    assert error(out, want) < 0.1
    padded = np.concatenate([np.zeros(50, int), np.arange(1450)])
    about = fit_mapper(p.source, p.target, p.s, p.t, positions=padded, config=one).provenance
    assert about["training_rows"] + about["held_out_rows"] == 1449


def test_auto_k_and_penalty() -> None:
    p = Planted(noise=0.05)
    config = MapperConfig(k="auto", ridge_lambda="auto", stride=1)
    mapper = fit_mapper(p.source, p.target, p.s, p.t, config=config)
    assert mapper.provenance["k"] == 2
    rng = np.random.default_rng(5)
    slightly = {  # every third layer explains one part in a thousand more: not worth half as many weights again
        t: tuple(
            y + 0.03 * y.std() * s / s.std()
            for y, s in zip(kv, (rng.permuted(kv[0]), p.source[(t + 2) % 3][1]), strict=True)
        )
        for t, kv in p.target.items()
    }
    assert fit_mapper(p.source, slightly, p.s, p.t, config=config).provenance["k"] == 2
    few = Planted(n=60, noise=3.0)  # 53 rows for 32 features: only a strong penalty holds
    mapper = fit_mapper(few.source, few.target, few.s, few.t, config=MapperConfig(k=2, ridge_lambda="auto", stride=1))
    assert np.median([m.penalty_values for m in mapper.layers.values()]) >= 0.1
    every = fit_mapper(p.source, p.target, p.s, p.t, config=MapperConfig(k="all", stride=1))
    assert all(m.sources == (0, 1, 2) for m in every.layers.values())


def test_memory_does_not_grow_with_tokens() -> None:
    """Streaming: as much is held after 12 as after 48 blocks of generated rows, and no more than a block waits."""
    rng = np.random.default_rng(0)
    stats, held = Stats(), []
    for i in range(48):
        keys, values = ((rng.standard_normal((1000, 16), dtype=np.float32),) * 2 for _ in range(2))
        stats.add((keys, values), held=i % 10 == 1)
        waiting = sum(x.nbytes for parts in stats.pending.values() for r in parts for pair in r for x in pair)
        assert waiting <= 2 * 4 * BLOCK_ROWS * 16 * 4
        if i in (11, 47):
            held.append(sum(m.nbytes for m in stats.copy().flush().train))
    assert held[0] == held[1]
    assert sum(m.count for m in (stats.flush().train[0], stats.held[0])) == 48_000


def test_each_source_layer_is_unrotated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Planted()
    mapper = fit_mapper(p.source, p.target, p.s, p.t, config=EXACT)
    calls = []
    real = rope.unrotate
    monkeypatch.setattr(rope, "unrotate", lambda *a: calls.append(1) or real(*a))
    transfer_cache(p.source, mapper)
    assert len(calls) == 3


# ---- bad input ----


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted(400)


def test_pairs_that_do_not_match(planted: Planted) -> None:
    p = planted
    with pytest.raises(MatchedKVError, match="n_kv_heads: the source has 4, the target has 2"):
        fit_mapper(p.source, p.target, ModelKVSpec(3, 4, D), p.t)
    with pytest.raises(MatchedKVError, match="head_dim"):
        fit_mapper(p.source, p.target, ModelKVSpec(3, H, 16), p.t)
    with pytest.raises(BadInput, match="k is 8, but the source has only 3 layers"):
        fit_mapper(p.source, p.target, p.s, p.t)


def test_caches_that_do_not_fit_their_specs(planted: Planted) -> None:
    p = planted
    fewer = {i: p.source[i] for i in (0, 2)}
    with pytest.raises(BadInput, match=r"The source cache lacks layers \[1\]; it has \[0, 2\]"):
        fit_mapper(fewer, p.target, p.s, p.t, config=EXACT)
    with pytest.raises(BadInput, match="The target cache lacks layers"):
        fit_mapper(p.source, p.target, p.s, ModelKVSpec(99, H, D), config=EXACT)
    with pytest.raises(BadInput, match=r"The target cache has layers \[3\], but the target model has layers 0 to 2"):
        fit_mapper(p.source, p.target, p.s, ModelKVSpec(3, H, D), config=EXACT)
    short = {i: tuple(x[:, :-1] for x in kv) for i, kv in p.source.items()}
    with pytest.raises(BadInput, match=r"same tokens; they have \(1, 399\) and \(1, 400\)"):
        fit_mapper(short, p.target, p.s, p.t, config=EXACT)
    heads = {**p.source, 1: tuple(np.concatenate([x, x]) for x in p.source[1])}
    with pytest.raises(BadInput, match=r"The source keys of layer 1 are \(1, 4, 400, 8\), expected \(1, 2, 400, 8\)"):
        fit_mapper(heads, p.target, p.s, p.t, config=EXACT)
    mixed = {**p.source, 1: tuple(x[None] for x in p.source[1])}
    with pytest.raises(BadInput, match=r"all be \[H, N, D\] or all \[B, H, T, D\]"):
        fit_mapper(mixed, p.target, p.s, p.t, config=EXACT)
    mapper = fit_mapper(p.source, p.target, p.s, p.t, config=EXACT)
    with pytest.raises(BadInput, match=r"lacks layers \[1\]"):
        transfer_cache(fewer, mapper)


def test_layers_are_addressed_by_id_and_unused_ones_may_be_missing(planted: Planted) -> None:
    p = planted
    mapper = fit_mapper(p.source, p.target, p.s, p.t, config=EXACT)
    shuffled = {i: p.source[i] for i in (2, 0, 1)}
    assert error(transfer_cache(shuffled, mapper), p.target) < 1e-12
    again = fit_mapper(shuffled, {i: p.target[i] for i in (3, 1, 0, 2)}, p.s, p.t, config=EXACT)
    assert [m.sources for m in again.layers.values()] == [m.sources for m in mapper.layers.values()]
    mapper.layers = {t: m for t, m in mapper.layers.items() if 2 not in m.sources}
    got = transfer_cache({i: p.source[i] for i in (0, 1)}, mapper)
    assert error(got, {t: p.target[t] for t in mapper.layers}) < 1e-12


@pytest.mark.parametrize("name", array_backends())
@pytest.mark.parametrize(("value", "who", "kind"), [(np.nan, "source", "keys"), (np.inf, "target", "values")])
def test_nan_and_inf_are_named(planted: Planted, name: str, value: float, who: str, kind: str) -> None:
    p = planted
    bad = {"source": dict(p.source), "target": dict(p.target)}
    pair = [x.copy() for x in bad[who][2]]
    pair[("keys", "values").index(kind)][1, 5:8, 3] = value
    bad[who][2] = tuple(pair)
    with pytest.raises(BadInput, match=rf"The {who} {kind} of layer 2 have 3 NaN or Inf among 6,400 values"):
        fit_mapper(to(bad["source"], name, "float32"), to(bad["target"], name, "float32"), p.s, p.t, config=EXACT)


def test_too_few_rows_say_how_many_are_needed(planted: Planted) -> None:
    p = planted
    few = [{i: tuple(x[:, :30] for x in kv) for i, kv in side.items()} for side in (p.source, p.target)]
    with pytest.raises(
        BadInput, match=r"Too few rows: 27 to fit on and 2 held out, for 32 features .* 33 training rows"
    ):
        fit_mapper(few[0], few[1], p.s, p.t, config=EXACT)
    one = [{i: tuple(x[:, :1] for x in kv) for i, kv in side.items()} for side in (p.source, p.target)]
    with pytest.raises(BadInput, match="Too few rows: 0 to fit on"):
        fit_mapper(one[0], one[1], p.s, p.t, config=EXACT)


@pytest.mark.parametrize(
    ("positions", "match"),
    [
        (np.arange(399), r"one per token, of shape \(400,\)"),
        (np.arange(400) * 1.0, "integers"),
        (np.arange(400) - 1, "not be negative"),
        (np.arange(400)[::-1].copy(), "must not decrease"),
    ],
)
def test_wrong_positions(planted: Planted, positions: np.ndarray, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        fit_mapper(planted.source, planted.target, planted.s, planted.t, positions=positions, config=EXACT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 0), ("k", -2), ("k", "some"), ("k", True), ("ridge_lambda", -1.0), ("ridge_lambda", float("nan")),
        ("ridge_lambda", "best"), ("stride", 0), ("n_calib_sequences", 1), ("calib_seq_len", 1), ("skip", -1),
        ("dtype", "int3"), ("dtype", "fp16"), ("selection", "random"),
    ],
)  # fmt: skip
def test_wrong_options_fail_at_once(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"{field} must be"):
        MapperConfig(**{field: value})
