"""Bases fitted once per model, against NumPy in float64 on rows captured and un-rotated here."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from conftest import greedy, model_hosts, small, storage_bytes
from test_compress import close, ids, new, run, trim
from test_latent import groups, held, middle, same

from crosskv import XKVConfig, backends, compress, family, make_cache, metrics, rope
from crosskv.calibrated import Calibrated, SideBasis, alike, calibrate, contiguous
from crosskv.errors import BadArtifact, BadInput, IncompatibleModels, MatchedKVError
from crosskv.layout import ModelKVSpec
from crosskv.live import measured
from crosskv.moments import moments
from crosskv.quant import PLANES
from crosskv.subspace import BITS

HOSTS = pytest.mark.parametrize("host", model_hosts())
SKIP, LENGTH = 4, 128


def tokens_of(tokenizer, count, name="calibration"):
    out = tokenizer.encode(family.text(name)[: count * LENGTH * 8])
    return np.reshape(out[: count * LENGTH], (count, LENGTH)).tolist()


@pytest.fixture(scope="module")
def fitted(family_model):
    """(sequences, basis) of the shipped model S: 40 sequences of 128 tokens, two layers together."""
    model, tokenizer = family_model("S", "torch")
    stream = tokens_of(tokenizer, 40)
    return stream, calibrate(model, stream, group=2, count=40, length=LENGTH, skip=SKIP, progress=False)


def rows_of(model, stream):
    """{layer: (keys, values)} [N, H * D] float64, keys un-rotated, without the first tokens: written out here."""
    b, spec = backends.of(model), measured(model)
    out = {}
    for i, kv in b.capture(model, np.asarray(stream)).items():
        k, v = (b.to_numpy(x).astype(np.float64)[:, :, SKIP:] for x in kv)
        at = rope.tables(spec.ropes[i], np.arange(SKIP, len(stream[0])))
        k = rope.unrotate(k, at, spec.ropes[i].interleaved)
        out[i] = tuple(x.swapaxes(1, 2).reshape(-1, x.shape[1] * x.shape[3]) for x in (k, v))
    return out


def parts(stream):
    """One sequence in eight is held out."""
    return [s for i, s in enumerate(stream) if i % 8 != 4], [s for i, s in enumerate(stream) if i % 8 == 4]


def every_side(basis):
    return [(g, side, s) for g, pair in zip(basis.groups, basis.sides, strict=True) for side, s in enumerate(pair)]


# ---- fitting ----


def test_vectors_are_those_of_the_rows_written_out(fitted, family_model):
    """numpy.linalg.eigh of the covariance of all rows, in float64. Vectors are kept in float16: 2^-11 an entry, and
    those of nearly equal eigenvalues may turn into each other, so variances and leading subspaces are compared."""
    stream, basis = fitted
    rows = rows_of(family_model("S", "torch")[0], parts(stream)[0])
    assert basis.groups == ((0, 1), (2, 3))
    for g, side, s in every_side(basis):
        x = np.concatenate([rows[i][side] for i in g], 1)
        np.testing.assert_allclose(s.mean, x.mean(0), atol=2e-5 * abs(x).max())
        z = (x - x.mean(0)) / s.scale
        cov = z.T @ z / len(z)
        values, vectors = np.linalg.eigh(cov)
        values, vectors = values[::-1], vectors[:, ::-1]
        v = s.vectors.astype(np.float64)
        r = v.shape[1]
        assert r == (values > 2.0**-9 * values.mean()).sum() and s.vectors.dtype == np.float16
        np.testing.assert_allclose(v.T @ v, np.eye(r), atol=2e-3)
        np.testing.assert_allclose(((z @ v) ** 2).mean(0), values[:r], rtol=5e-3, atol=1e-3 * values.mean())
        k = 1 + int(np.argmax(values[:40] / values[1:41]))  # the clearest gap
        want = vectors[:, :k] @ vectors[:, :k].T
        gap = 1 - values[k] / values[k - 1]
        assert np.linalg.norm(v[:, :k] @ v[:, :k].T - want, 2) <= 4 * np.sqrt(k) * 2.0**-11 + 1e-4 / gap


def test_heads_are_brought_to_the_size_of_their_weight_first(fitted, family_model):
    """scale^2 = variance of a head's features / its sensitivity, so that what an error costs is its square."""
    stream, basis = fitted
    rows = rows_of(family_model("S", "torch")[0], parts(stream)[0])
    d = basis.spec.head_dim
    for g, side, s in every_side(basis):
        scale = s.scale.reshape(-1, d)
        assert (scale == scale[:, :1]).all() and (scale > 0).all()
        variance = np.concatenate([rows[i][side].var(0).reshape(-1, d).mean(1) for i in g])
        weight = np.asarray(basis.about["sensitivity"])[side, list(g)].ravel()
        np.testing.assert_allclose(scale[:, 0] ** 2, variance / weight, rtol=1e-3)


def test_the_tables_are_errors_that_can_be_measured(fitted, family_model):
    """For every number of bits: encode and decode the held-out rows by the arrays in the file, in NumPy."""
    stream, basis = fitted
    rows = rows_of(family_model("S", "torch")[0], parts(stream)[1])
    for g, side, s in every_side(basis)[::2]:
        x = np.concatenate([rows[i][side] for i in g], 1)
        a = (x - s.mean) / s.scale @ s.vectors.astype(np.float64)
        np.testing.assert_allclose(s.errors[0], (a**2).mean(0), rtol=0.02, atol=1e-3 * s.errors[0].mean())
        for i, bits in enumerate(BITS[1:], 1):
            step = 2 * s.limits[i] / (2**bits - 1)
            codes = np.clip(np.rint((a + s.limits[i]) / step), 0, 2**bits - 1)
            error = ((codes * step - s.limits[i] - a) ** 2).mean(0)
            got = np.minimum(error, s.errors[i - 1])  # what does not help is counted as not given
            np.testing.assert_allclose(got, s.errors[i], rtol=0.05, atol=2e-3 * s.errors[0].mean() * 4.0**-bits)


def test_the_error_that_is_said_is_the_error_that_is_measured(fitted, family_model):
    """error() of two budgets, against the rows that come back: in the units of the scale, every feature alike."""
    stream, basis = fitted
    rows = rows_of(family_model("S", "torch")[0], parts(stream)[1])
    said, measured_ = [], []
    for ratio in (4, 16):
        bits = basis.bits(2 * 16 * basis.spec.n_layers * basis.spec.width / ratio)
        lost = 0.0
        for (g, side, s), b in zip(every_side(basis), [b for pair in bits for b in pair], strict=True):
            x = np.concatenate([rows[i][side] for i in g], 1)
            shape = (1, len(x), basis.spec.n_kv_heads, basis.spec.head_dim)
            wide = [p.reshape(shape).swapaxes(1, 2) for p in np.split(x.astype(np.float32), len(g), 1)]
            kept = s.side(b, np.zeros(1, np.float32))
            latents = kept.latents(kept.encode(wide))
            back = [kept.layer(latents, j, len(g), basis.spec.n_kv_heads) for j in range(len(g))]
            back = np.concatenate([y[0].transpose(1, 0, 2).reshape(len(x), -1) for y in back], 1)
            lost += (((x - back) / s.scale) ** 2).sum(1).mean()
        said.append(basis.error(bits))
        measured_.append(lost)
    assert said[1] / said[0] == pytest.approx(measured_[1] / measured_[0], rel=0.03)
    assert said[0] < said[1]


@HOSTS
def test_both_hosts_fit_the_same(host, fitted, family_model):
    if host == "torch":
        return
    stream, basis = fitted
    other = calibrate(family_model("S", host)[0], stream, group=2, count=40, length=LENGTH, skip=SKIP, progress=False)
    assert other.groups == basis.groups and other.about["tokens"] == basis.about["tokens"] == 35 * (LENGTH - SKIP)
    for (_, _, a), (_, _, b) in zip(every_side(basis), every_side(other), strict=True):
        np.testing.assert_allclose(a.mean, b.mean, atol=1e-4 * abs(a.mean).max())
        np.testing.assert_allclose(a.scale, b.scale, rtol=0.02)
        assert a.vectors.shape[0] == b.vectors.shape[0] and abs(a.vectors.shape[1] - b.vectors.shape[1]) <= 2
        np.testing.assert_allclose(a.errors[0, :8], b.errors[0, :8], rtol=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": 0}, "group must be"),
        ({"group": "none"}, "group must be"),
        ({"grouping": "random"}, "grouping must be 'contiguous' or 'cka', got 'random'"),
        ({"count": 2}, "Too little calibration text"),
        ({"skip": 40}, "Too little calibration text: 0 tokens"),
    ],
)
def test_what_cannot_be_fitted_is_refused(options, says):
    stream = ids(40, batch=20).tolist()
    with pytest.raises(BadInput, match=says):
        calibrate(small("torch"), stream, **{"length": 40, "progress": False, **options})


def test_strings_need_a_tokenizer_and_foreign_ids_are_refused():
    with pytest.raises(BadInput, match="tokenizer"):
        calibrate(small("torch"), "some text", progress=False)
    with pytest.raises(BadInput, match="vocab|token"):
        calibrate(small("torch"), (ids(40, batch=20) + 1000).tolist(), length=40, progress=False)


# ---- grouping ----


def test_look_alike_layers_come_together():
    """Layers 0, 3, 4 and 1, 2, 5 are each rotations of one signal with noise, interleaved with the other."""
    rng = np.random.default_rng(0)
    signals, x = rng.standard_normal((2, 500, 6)), []
    for family_ in (0, 1, 1, 0, 0, 1):
        q = np.linalg.qr(rng.standard_normal((6, 6)))[0]
        x.append(3 * signals[family_] @ q + 0.5 * rng.standard_normal((500, 6)) + 10)
    m = moments(np.concatenate(x, 1), np.zeros((500, 1)))
    spec = ModelKVSpec(6, 1, 6, 1e4)
    assert alike((m, m), spec, 3) == [(0, 3, 4), (1, 2, 5)]
    assert alike((m, m), spec, 1) == [(i,) for i in range(6)]
    assert alike((m, m), spec, 6) == [tuple(range(6))]
    pairs = alike((m, m), spec, 2)
    assert sorted(i for g in pairs for i in g) == list(range(6)) and max(map(len, pairs)) == 2
    assert sum(set(g) <= {0, 3, 4} or set(g) <= {1, 2, 5} for g in pairs) == 2  # and the two that are left


def test_contiguous_groups():
    assert contiguous(5, 2) == [(0, 1), (2, 3), (4,)] and contiguous(3, 8) == [(0, 1, 2)]


@HOSTS
def test_groups_that_are_not_neighbours(host):
    """With "cka" the layers of two groups may take turns; the cache follows the model's order."""
    model = small(host)
    stream = ids(40, batch=24).tolist()
    basis = calibrate(model, stream, group=2, grouping="cka", length=40, progress=False)
    assert sorted(i for g in basis.groups for i in g) == list(range(4))
    for turn in (((0, 2), (1, 3)), ((0, 3), (1, 2))):
        crossed = replace(basis, groups=turn)  # not the layers that the basis was fitted to: 8 bits show no difference
        mine, own = make_cache(model, XKVConfig(crossed, ratio=1.5, sinks=40, tail=40)), new(model)
        for part in (ids(60), *np.split(ids(5, 1), 5, axis=1)):
            same(run(model, part, mine), run(model, part, own))  # all is exact yet
        assert [g.layers for g in groups(mine)] == list(turn)


# ---- bits ----


@pytest.mark.parametrize("ratio", [2, 4, 8, 16, 64])
def test_bits_stay_within_the_budget(fitted, ratio):
    _, basis = fitted
    budget = 2 * 16 * basis.spec.n_layers * basis.spec.width / ratio
    bits = basis.bits(budget)
    assert [len(k) for k, _ in bits] == [s.vectors.shape[1] for s, _ in basis.sides]
    used = sum(int(b.sum()) for pair in bits for b in pair)
    most = 8 * sum(len(b) for pair in bits for b in pair)
    padding = 8 * sum(len(PLANES[int(n)]) for pair in bits for b in pair for n in set(b[b > 0]))
    assert used <= 8 * basis.packed_bytes(bits) <= budget
    assert used > budget - padding - 8 or used == most or ratio == 2


def test_fewer_bits_err_more(fitted):
    _, basis = fitted
    errors = [basis.error(basis.bits(2 * 16 * basis.spec.n_layers * basis.spec.width / r)) for r in (3, 6, 12, 24, 48)]
    assert (np.diff(errors) > 0).all()


@HOSTS
@pytest.mark.parametrize("ratio", [4, 16])
def test_bytes_of_the_middle_are_the_budget(host, ratio, fitted, family_model):
    """budget / 8 bytes a token but for the padding of every plane to whole bytes."""
    _, basis = fitted
    model, tokenizer = family_model("S", host)
    mine = make_cache(model, XKVConfig(basis, ratio=ratio, tail=0, block=1))
    run(model, np.asarray([tokenizer.encode(family.text("heldout"))[:104]]), mine)
    budget = 2 * 16 * basis.spec.n_layers * basis.spec.width / ratio
    assert middle(mine) == [100, 100]
    packed = sum(p.nbytes for g in groups(mine) for s in g.middle for side in s.packed for p in side)
    bits = basis.bits(budget)
    planes = sum(len(PLANES[int(n)]) for pair in bits for b in pair for n in set(b[b > 0]))
    used = sum(int(b.sum()) for pair in bits for b in pair)
    assert 100 * used / 8 <= packed < 100 * (budget / 8 + planes)
    assert compress.nbytes(model, mine) - packed == 4 * 2 * 4 * basis.spec.n_layers * basis.spec.width  # the sinks
    assert [m.shared_basis_bytes for m in held(mine)] == [0] * basis.spec.n_layers


def test_what_the_basis_weighs_in_use(fitted, family_model):
    """static_bytes against every torch storage that the cache holds beside its tokens."""
    _, basis = fitted
    mine = make_cache(family_model("S", "torch")[0], XKVConfig(basis, ratio=8))
    bits = basis.bits(2 * 16 * basis.spec.n_layers * basis.spec.width / 8)
    basis_arrays = [g.codec.sides((), ()) for g in groups(mine)]
    assert mine.nbytes == 0
    assert storage_bytes(basis_arrays) == basis.static_bytes(bits)


# ---- in use ----


@HOSTS
def test_compressed_text_costs_little_in_both_hosts(host, fitted, family_model):
    """Real text through a real model: fewer bytes, more drift, nothing else. Bounds: about twice what is measured."""
    _, basis = fitted
    model, tokenizer = family_model("S", host)
    b = backends.of(model)
    tokens = np.asarray([tokenizer.encode(family.text("heldout")[9000:13000])[:320]])
    prompt, rest = tokens[:, :288], tokens[:, 288:]
    own = new(model)
    want = metrics.continuation_logits(model, prompt, rest, own)
    kl, sizes = {}, {}
    for ratio in (3, 8, 24):
        cache = make_cache(model, XKVConfig(basis, ratio=ratio))
        b.logits(model, prompt[:, :-1], cache)
        sizes[ratio] = compress.nbytes(model, cache)
        kl[ratio] = metrics.kl(want, metrics.continuation_logits(model, prompt[:, -1:], rest, cache)).mean()
    assert kl[3] < kl[8] < kl[24] < 1 and kl[3] < 0.02
    assert sizes[24] < sizes[8] < sizes[3] < 0.35 * compress.nbytes(model, own)


def test_one_file_serves_both_hosts(fitted, family_model, tmp_path):
    _, basis = fitted
    place = basis.save(tmp_path / "b")
    outputs, sizes = [], []
    for host in ("torch", "mlx"):
        model, tokenizer = family_model("S", host)
        tokens = np.asarray([tokenizer.encode(family.text("heldout"))[:203]])
        cache = make_cache(model, XKVConfig(place if host == "mlx" else str(place), ratio=8))
        run(model, tokens[:, :200], cache)
        outputs.append(run(model, tokens[:, 200:], cache))
        sizes.append(compress.nbytes(model, cache))
    close(outputs[1], outputs[0], 0.02)  # a code at a tie may round apart
    assert sizes[0] == sizes[1]


def test_padded_rows_are_as_they_are_alone(fitted, family_model):
    """The basis is for keys without their rotation; with padding, positions start below 0. Generated tokens fold."""
    _, basis = fitted
    model, tokenizer = family_model("S", "torch")
    text = np.asarray(tokenizer.encode(family.text("heldout"))[: 2 * 150]).reshape(2, 150)
    config = XKVConfig(basis, ratio=6, tail=8, block=8)
    mask = np.ones((2, 150), np.int64)
    text[0, :50], mask[0, :50] = 0, 0
    both, alone = make_cache(model, config), make_cache(model, config)
    run(model, text, both, mask=mask)
    run(model, text[:1, 50:], alone)
    for seed in range(20):
        step = ids(1, seed, batch=2)
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], 1)
        got, want = run(model, step, both, mask=mask)[:1], run(model, step[:1], alone)
    # sinks of the batch are 50 + 4 tokens: of this row exactly its own 4, so middles start at the same token
    assert groups(alone)[0].packed_tokens == groups(both)[0].packed_tokens == 104
    close(got, want, 0.02)
    right, wrong, own = make_cache(model, config), make_cache(model, config), new(model)
    for g in groups(wrong):  # as if positions began at 0 with the padding: it shows
        g._place = lambda keys, positions: None
    got, far, want = (
        [run(model, t, c, mask=mask[:, :n])[:1] for t, n in ((text, 150), (step, 151))][1] for c in (right, wrong, own)
    )
    assert np.square(far - want).mean() > 2 * np.square(got - want).mean()


@HOSTS
def test_every_token_is_encoded_on_its_own(host, fitted, family_model):
    """Whole, in chunks, token by token, and after a trim into the middle: the same bytes hold the same tokens."""
    _, basis = fitted
    model, tokenizer = family_model("S", host)
    b = backends.of(model)
    tokens = np.asarray([tokenizer.encode(family.text("heldout"))[:90]])
    config = XKVConfig(basis, ratio=6, tail=4, block=4)
    caches = []
    for cuts in ([], [2, 50], list(range(60, 90))):
        cache = make_cache(model, config)
        for part in np.split(tokens, cuts, axis=1):
            run(model, part, cache)
        caches.append(cache)
    assert len({compress.nbytes(model, c) for c in caches}) == 1
    first = [[b.to_numpy(x) for x in kv] for i, kv in sorted(b.read(model, caches[0]).items())]
    for got, want in zip(b.read(model, caches[1])[0], first[0], strict=True):
        error = np.linalg.norm(b.to_numpy(got) - want) / np.linalg.norm(want)
        assert error < 0.05  # the layers that share latents with layer 0 saw compressed tokens
    trim(caches[0], 37)  # 4 sinks + 49: any place can be cut, there are no scales to share
    assert {g.packed_tokens for g in groups(caches[0])} == {49} and groups(caches[0])[0].tails[0] is None
    for i, kv in sorted(b.read(model, caches[0]).items()):
        for got, want in zip(kv, first[i], strict=True):
            np.testing.assert_allclose(b.to_numpy(got), want[:, :, :53], atol=1e-5 * abs(want).max())
    assert len(greedy(model, tokens[:, 53:60], caches[0], 12)) == 12


def test_another_model_is_refused(fitted, family_model):
    _, basis = fitted
    with pytest.raises(IncompatibleModels, match="calibrated for .*not for this model: .* layers"):
        make_cache(family_model("M", "torch")[0], XKVConfig(basis, ratio=8))
    stream = ids(40, batch=24).tolist()
    mine = calibrate(small("torch"), stream, group=4, length=40, progress=False)
    with pytest.raises(IncompatibleModels, match="answers the probe tokens differently"):
        make_cache(small("torch", seed=1), XKVConfig(mine, ratio=4))


def test_sliding_windows_in_a_group_with_others_are_refused():
    from conftest import mlx

    model = mlx("gemma3_text", sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16)
    basis = calibrate(model, ids(40, batch=24).tolist(), group=2, length=40, progress=False)
    with pytest.raises(MatchedKVError, match=r"Layers \[0\] have a sliding window"):
        make_cache(model, XKVConfig(basis, ratio=4))


@pytest.mark.parametrize("wrong", [{}, {"ratio": 4, "rank_keys": 3}, {"ratio": 4, "bits": 4}, {"energy": 0.9},
                                   {"ratio": 4, "values": False}])  # fmt: skip
def test_a_calibrated_basis_takes_a_ratio_alone(fitted, wrong):
    with pytest.raises(BadInput, match="ratio"):
        XKVConfig(fitted[1], **wrong)


# ---- files ----


def test_save_and_load(fitted, tmp_path):
    _, basis = fitted
    for _ in range(2):  # the second time over the first
        place = basis.save(tmp_path / "b")
    assert sorted(p.name for p in place.iterdir()) == ["calibrated.json", "calibrated.safetensors"]
    back = Calibrated.load(place)
    assert (back.spec, back.groups, back.about) == (basis.spec, basis.groups, basis.about)
    for (_, _, a), (_, _, b) in zip(every_side(basis), every_side(back), strict=True):
        for f in fields(SideBasis):
            x, y = getattr(a, f.name), getattr(b, f.name)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_damaged_files_are_refused(fitted, tmp_path):
    place = fitted[1].save(tmp_path / "b")
    text, data = (place / "calibrated.json").read_text(), (place / "calibrated.safetensors").read_bytes()

    def refused(says):
        with pytest.raises(BadArtifact, match=says):
            Calibrated.load(place)

    (place / "calibrated.safetensors").write_bytes(data[: len(data) // 2])
    refused("is not the file that was written")
    changed = bytearray(data)
    changed[-100] ^= 1
    (place / "calibrated.safetensors").write_bytes(bytes(changed))
    refused("is not the file that was written")
    (place / "calibrated.safetensors").write_bytes(data)
    about = json.loads(text)
    (place / "calibrated.json").write_text(json.dumps({**about, "version": about["version"] + 1}))
    refused("has format version .*this crosskv reads")
    (place / "calibrated.json").write_text(text[: len(text) // 2])
    refused("is not a readable calibrated basis")
    (place / "calibrated.json").write_text(json.dumps({k: v for k, v in about.items() if k != "groups"}))
    refused("is not a readable calibrated basis")
    (place / "calibrated.json").write_text(json.dumps({**about, "groups": [[i] for i in range(9)]}))
    refused("no readable tensor '2.keys.mean'")
    (place / "calibrated.json").write_text("[1, 2]")
    refused("is not a readable calibrated basis")
    (place / "calibrated.json").write_text(text)
    Calibrated.load(place)
    (place / "calibrated.safetensors").unlink()
    refused("is not a readable calibrated basis")
    with pytest.raises(BadArtifact, match="nowhere"):
        Calibrated.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="nowhere.*there are tokens, features"):
        XKVConfig(tmp_path / "nowhere", ratio=4)
    with pytest.raises(BadInput, match="did you mean 'tokens'"):
        XKVConfig("token", ratio=4)


def test_a_padded_batch_that_was_read_before_needs_its_mask():
    """Keys are un-rotated from where they stand: without the mask the padded row would be far off its basis."""
    model, tokenizer = family.load("S")
    b = backends.of(model)
    basis = calibrate(model, family.text("calibration"), tokenizer, group=2, count=16, length=256, progress=False)
    tokens, padding = np.asarray(tokenizer.encode(family.text("heldout"))[:240]), 40
    ids = np.stack([tokens, np.concatenate([np.zeros(padding, int), tokens[:-padding]])])
    mask = np.ones_like(ids)
    mask[1, :padding] = 0

    def prefilled():
        return b.install(model, b.capture(model, ids[:, :-1], mask[:, :-1]), mask[:, :-1])

    want = b.logits(model, ids[:, -1:], prefilled(), mask)
    drift = {}
    for name, options in (("with", {"mask": mask[:, :-1]}), ("without", {})):
        cache = make_cache(model, XKVConfig(basis, ratio=8), prefilled(), **options)
        drift[name] = metrics.kl(want, b.logits(model, ids[:, -1:], cache, mask))[:, 0]
    assert drift["with"].max() < 0.01 < drift["without"][1]  # .0004 against .014 when written
    with pytest.raises(BadInput, match="mask belongs to the tokens of cache"):
        make_cache(model, XKVConfig(basis, ratio=8), mask=mask)
