"""Codec functions against plain float64 versions written from the formulas."""

import pytest
import torch

from quantwm_core.codec import affine, feedback, kmeans, midrise, psac, qsac
from quantwm_core.codec.bits import pack_bits, packed_width, unpack_bits
from quantwm_core.codec.codebook import Codebook


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 63, 128])
def test_packing_loses_nothing(bits, count):
    values = torch.randint(0, 1 << bits, (2, 5, count), generator=torch.Generator().manual_seed(count)).byte()
    packed = pack_bits(values, bits)
    assert packed.shape[-1] == packed_width(count, bits)
    assert torch.equal(unpack_bits(packed, bits, count), values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_affine_codes_follow_the_papers_formula(bits):
    x = normal(2, 7, 64)
    scale, zero = affine.affine_grid(x, bits, 32)
    codes = affine.affine_quantize(x, scale, zero, bits, 32)
    groups = x.double().view(2, 7, 2, 32)
    top = 2**bits - 1
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    s = (high - low) / top
    z = (-low / s).round()
    expected = ((groups / s[..., None]).round() + z[..., None]).clamp(0, top)
    assert (expected.view(2, 7, 64) != codes).float().mean() < 0.002  # ties of float32 against float64
    decoded = affine.affine_dequantize(codes, scale, zero, 32)
    # The zero-point is rounded, so the grid may be shifted by half a step against the range.
    assert ((decoded - x).abs() <= 1.01 * scale.repeat_interleave(32, -1)).all()


def test_affine_scales_keep_small_groups_alive_beside_an_outlier():
    scale = torch.full((1, 50, 2), 0.01)
    scale[0, 0] = 1.0  # one token a hundred times larger
    codes, factor = affine.encode_scales(scale)
    decoded = affine.decode_scales(codes, factor)
    assert (decoded > 0).all()
    assert torch.allclose(decoded, scale, rtol=0.25)


def test_log_scales_are_within_half_a_step_and_survive_an_outlier():
    scale = torch.rand(3, 40, 2, generator=torch.Generator().manual_seed(1)) + 0.01
    scale[:, 0] = 1.2
    for bits, per_octave in (midrise.scale_format(2), midrise.scale_format(4)):
        codes, top = midrise.encode_log_scales(scale, bits, per_octave)
        decoded = midrise.decode_log_scales(codes, top, bits, per_octave)
        step = 2 ** (0.5 / per_octave) * 1.01
        assert ((decoded / scale) < step).all() and ((decoded / scale) > 1 / step).all()


def test_midrise_reaches_every_level_and_clips_at_the_ends():
    step = torch.ones(1, 1, 1)
    x = torch.tensor([[[-9.0, -1.2, -0.2, 0.2, 1.2, 9.0]]])
    codes = midrise.midrise_quantize(x, step, 2)
    assert codes.tolist() == [[[0, 0, 1, 2, 3, 3]]]
    assert midrise.midrise_dequantize(codes, step, 2).tolist() == [[[-1.5, -1.5, -0.5, 0.5, 1.5, 1.5]]]


def test_kmeans_is_deterministic_lowers_the_error_and_keeps_empty_clusters():
    x = normal(2, 300, 16)
    first = kmeans.kmeans(x, 8)
    assert torch.equal(first, kmeans.kmeans(x, 8))

    def error(centroids):
        return torch.cdist(x, centroids).amin(-1).square().mean()

    assert error(first) < error(kmeans.kmeans(x, 8, iterations=0))
    identical = torch.ones(1, 20, 4)
    assert torch.equal(kmeans.kmeans(identical, 8), torch.ones(1, 8, 4))


def test_kmeans_in_chunks_equals_one_piece(monkeypatch):
    x = normal(2, 100, 8)
    whole = kmeans.nearest_centroid(x, x[:, :5])
    monkeypatch.setattr(kmeans, "CHUNK_ELEMENTS", 70)
    assert torch.equal(whole, kmeans.nearest_centroid(x, x[:, :5]))


def test_codebook_keeps_agreeing_channels_exactly():
    centroids = normal(2, 9, 48)
    centroids[..., 3] = 29952.0
    decoded = Codebook.encode(centroids).decode()
    assert (decoded[..., 3] == 29952.0).all()
    spread = centroids.amax(1) - centroids.amin(1)
    assert ((decoded - centroids).abs() <= (spread / 15 + 0.02).unsqueeze(1)).all()


def test_query_sensitive_assignment_follows_the_papers_formula():
    keys, centroids = normal(1, 60, 32).double(), normal(1, 10, 32, seed=1).double()
    weights = torch.rand(1, 32, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    got = qsac.assign_query_sensitive(keys, centroids, weights, 16, 4)[0]
    for s in range(60):
        residual = keys[0, s] - centroids[0]
        distance = (weights[0] * residual.square()).sum(-1)
        candidates = distance.argsort()[:4]
        ranges = residual.view(10, 2, 16).amax(-1) - residual.view(10, 2, 16).amin(-1)
        cost = (weights[0].view(2, 16).sum(-1) * ranges.square()).sum(-1)
        assert got[s] == candidates[cost[candidates].argmin()]


def test_candidates_under_the_whole_metric_follow_their_formula():
    keys, centroids = normal(1, 60, 32).double(), normal(1, 10, 32, seed=1).double()
    queries = normal(1, 40, 32, seed=3).double() @ normal(1, 32, 32, seed=4).double()
    moment = queries.transpose(1, 2) @ queries / 40
    weights = qsac.channel_weights(moment, keys)
    got = qsac.assign_query_sensitive(keys, centroids, weights, 16, 3, metric=moment)[0]
    diagonal = qsac.assign_query_sensitive(keys, centroids, weights, 16, 3)[0]
    for s in range(60):
        residual = keys[0, s] - centroids[0]
        candidates = torch.einsum("kc,cd,kd->k", residual, moment[0], residual).argsort()[:3]
        ranges = residual.view(10, 2, 16).amax(-1) - residual.view(10, 2, 16).amin(-1)
        cost = (weights[0].view(2, 16).sum(-1) * ranges.square()).sum(-1)
        assert got[s] == candidates[cost[candidates].argmin()]
    assert not torch.equal(got, diagonal)


def test_a_symmetric_grid_is_ternary_at_two_bits():
    residual = normal(2, 30, 48)
    residual[0, 3] = 0
    scale, zero = affine.affine_grid(residual, 2, 16, symmetric=True)
    codes = affine.affine_quantize(residual, scale, zero, 2, 16)
    peaks = residual.double().view(2, 30, 3, 16).abs().amax(-1).repeat_interleave(16, -1)
    steps = (residual.double() / peaks).nan_to_num().round()
    assert set(codes.unique().tolist()) == {0, 1, 2}
    assert torch.allclose(affine.affine_dequantize(codes, scale, zero, 16).double(), steps * peaks, rtol=1e-6)
    assert (affine.affine_grid(residual, 4, 16, symmetric=True)[1] == 7).all()


def test_eigenvectors_span_the_leading_subspace():
    q = normal(3, 500, 24) * torch.linspace(0.1, 3, 24)
    moment = q.transpose(1, 2) @ q / 500
    basis = psac.leading_eigenvectors(moment, 5)
    captured = (basis * (moment @ basis)).sum((1, 2))
    assert torch.allclose(captured, torch.linalg.eigvalsh(moment)[:, -5:].sum(-1), rtol=1e-4)
    assert torch.allclose(basis.transpose(1, 2) @ basis, torch.eye(5).expand(3, 5, 5), atol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e-20])
def test_int4_coefficients_are_within_a_step(factor):
    c = normal(2, 30, 6) * factor
    c[0, 4] = 0
    packed, scales, top = psac.encode_coefficients_int4(c)
    decoded = psac.decode_coefficients_int4(packed, scales, top, 6)
    assert decoded.isfinite().all() and (decoded[0, 4] == 0).all()
    assert ((decoded - c).abs() <= 0.6 * c.abs().amax(-1, keepdim=True) / 7 + 1e-30).all()


@pytest.mark.parametrize("channels", [40, 48, 128])
def test_feedback_lowers_the_metrics_error(channels):
    spread = torch.logspace(0, -2, channels)
    mixing = torch.linalg.qr(normal(channels, channels))[0]
    metric = ((mixing * spread) @ mixing.T).expand(2, channels, channels)
    weights = feedback.feedback_matrix(metric)
    block = torch.arange(channels) // feedback.BLOCK
    assert (weights[:, block[:, None] <= block[None, :]] == 0).all()
    x = normal(2, 200, channels, seed=3)

    def rounding(target, part):
        codes = midrise.midrise_quantize(target, torch.tensor(0.5), 4)
        return codes, midrise.midrise_dequantize(codes, torch.tensor(0.5), 4)

    def cost(decoded):
        error = decoded - x
        return (error * (error @ metric)).sum()

    plain = feedback.quantize_with_feedback(x, None, rounding)[1]
    steered = feedback.quantize_with_feedback(x, weights, rounding)[1]
    assert cost(steered) < 0.8 * cost(plain)


@pytest.mark.parametrize("channels", [8, 16, 17, 48, 80, 100, 128])
def test_feedback_weights_are_kept_without_their_zeros(channels):
    metric = torch.randn(3, channels, channels + 5, generator=torch.Generator().manual_seed(0))
    weights = feedback.feedback_matrix(metric @ metric.transpose(1, 2))
    packed, count = feedback.packed_weights(weights), feedback.packed_count(channels)
    assert packed.shape == (3, count) and count <= channels**2 / 2
    assert torch.equal(feedback.unpacked_weights(packed, channels), weights)


def test_feedback_of_a_zero_metric_is_plain_rounding():
    assert (feedback.feedback_matrix(torch.zeros(1, 32, 32)) == 0).all()
