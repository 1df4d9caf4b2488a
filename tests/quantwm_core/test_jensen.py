"""The correction for rounding noise in keys, against float64 versions written from its formulas."""

from dataclasses import replace

import pytest
import torch

from quantwm_core import CacheSettings, LayerCache, backends
from quantwm_core import jensen as jensen_module
from quantwm_core.backends import settings_facts
from quantwm_core.codec.hadamard import hadamard_rotation
from quantwm_core.jensen import attend_corrected, key_bias, log_sinh_ratio
from quantwm_core.methods import LayerState, build_method
from quantwm_core.query_stats import QueryStats, second_moment
from quantwm_core.span import PackedSpan, RawBlock

METHODS = ("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")
FORMS = ("exact", "second-order")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(k: torch.Tensor, queries: bool = True, **settings) -> tuple:
    codec = build_method(CacheSettings(**settings))
    moment = second_moment(normal(k.shape[0], 50, *k.shape[2:], seed=9)) if queries else None
    return codec, codec.encode(k, k, QueryStats(moment, moment), LayerState())


def written_out(q: torch.Tensor, steps: torch.Tensor, exact: bool) -> torch.Tensor:
    """b float64 `[T, S]` from queries `[T, D]` and steps `[S, D]`, as the paper writes it."""
    a = q.double()[:, None] * steps.double() / (2 * q.shape[-1] ** 0.5)
    if not exact:
        return (a.square() / 6).sum(-1)
    safe = torch.where(a == 0, 1.0, a)
    return torch.where(a == 0, 0.0, torch.log(torch.sinh(safe) / safe)).sum(-1)


def true_steps(codec, span: PackedSpan) -> torch.Tensor:
    """Step of every key and channel `[S, D]` of the first head: what one code more changes in the decoded key."""
    ones = sum(1 << shift for shift in range(0, 8, span.key_bits))
    low, high = (
        replace(span, dtype=torch.float32, tensors=span.tensors | {"k_codes": torch.full_like(codes, fill)})
        for codes in (span.tensors["k_codes"],)
        for fill in (0, ones)
    )
    difference = (codec.decode(high)[0] - codec.decode(low)[0])[0, :, 0]
    return difference @ hadamard_rotation(span.head_dim) if span.method == "quarot" else difference


def noisy_part(q: torch.Tensor, span: PackedSpan, key: int) -> torch.Tensor:
    """The part of a query that meets noise in a key: not the directions in which that key was corrected."""
    if span.method == "quarot":
        return q @ hadamard_rotation(span.head_dim)
    basis = span.tensors.get("k_psac_u")
    if basis is None or span.method == "quantwm-paper" and not span.tensors["k_psac_c_scales"][0, 0, key]:
        return q
    basis = basis[0, 0].float()
    return q - q @ basis @ basis.T


def test_log_sinh_ratio_is_exact_from_tiny_to_huge():
    a = torch.logspace(-2, 2.8, 400, dtype=torch.double)
    expected = torch.log(torch.sinh(a) / a)
    assert torch.allclose(log_sinh_ratio(a), expected, rtol=1e-7, atol=0)
    assert torch.allclose(log_sinh_ratio(-a.float()).double(), expected, rtol=3e-6, atol=0)
    tiny = torch.logspace(-15, -4, 50)
    assert torch.allclose(log_sinh_ratio(tiny), tiny.square() / 6, rtol=1e-6, atol=0)
    assert log_sinh_ratio(torch.zeros(1)).item() == 0
    assert log_sinh_ratio(torch.tensor(1e30)).item() == pytest.approx(1e30)


def test_uniform_noise_has_a_mean_exponential_of_one_after_the_correction():
    q, steps = 3 * normal(16), torch.rand(16, generator=torch.Generator().manual_seed(1)) + 0.5
    noise = (torch.rand(400_000, 16, generator=torch.Generator().manual_seed(2)) - 0.5) * steps
    shift = noise @ q / 4
    b = written_out(q[None], steps[None], exact=True).item()
    assert shift.exp().mean() > 1.4
    assert (shift - b).exp().mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("head_dim", "tokens", "bits"), [(48, 33, 2), (80, 70, 4), (128, 40, 2), (256, 24, 8)])
def test_every_method_names_the_steps_its_keys_really_have(method, form, head_dim, tokens, bits):
    codec, span = encode(normal(1, tokens, 2, head_dim), method=method, key_bits=bits)
    q = 4 * normal(5, head_dim, seed=3)
    got = sum(key_bias(q.expand(2, -1, -1), steps, form == "exact") for steps in codec.key_steps(span))[0]
    steps = true_steps(codec, span)
    for key in range(tokens):
        expected = written_out(noisy_part(q, span, key), steps[key : key + 1], form == "exact")[:, 0]
        torch.testing.assert_close(got[:, key].double(), expected, rtol=2e-3, atol=1e-5)
    assert (got > 0).any()


def test_uncorrected_keys_of_a_sparse_layout_keep_their_noise_in_all_directions():
    k = normal(1, 400, 1, 64).bfloat16().float()
    k[:, 10:] = k[:, 9:10]
    codec, span = encode(k, method="quantwm-paper", centroids=64)
    assert "k_psac_c_bitmap" in span.tensors
    corrected, plain = codec.key_steps(span)
    assert ((corrected.index > 0) ^ (plain.index > 0) | (span.tensors["k_scales"][0] == 0)).all()


def pieces_of(method: str, head_dim: int) -> tuple:
    """A codec and pieces: two packed spans, one without query statistics, between blocks in full precision."""
    blocks = [normal(2, tokens, 2, head_dim, seed=tokens) for tokens in (7, 40, 33, 5)]
    codec, first = encode(blocks[1], queries=False, method=method)
    second = encode(blocks[2], method=method)[1]
    return codec, [RawBlock(blocks[0], blocks[0]), first, second, RawBlock(blocks[3], blocks[3])]


def corrected_by_hand(q: torch.Tensor, codec, pieces: list, exact: bool) -> torch.Tensor:
    outputs = []
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            keys, values, logits = [], [], []
            for piece in pieces:
                k, v = (piece.k, piece.v) if isinstance(piece, RawBlock) else codec.decode(piece)
                keys, values = k[batch, :, head].double(), [*values, v[batch, :, head].double()]
                logit = q[batch, :, head].double() @ keys.T / q.shape[-1] ** 0.5
                if isinstance(piece, PackedSpan):
                    row = batch * q.shape[2] + head
                    some = q[:, :, head].new_zeros(q.shape[0] * q.shape[2], *q[0, :, 0].shape)
                    some[row] = q[batch, :, head]
                    logit = logit - sum(key_bias(some, s, exact)[row].double() for s in codec.key_steps(piece))
                logits.append(logit)
            outputs.append(torch.cat(logits, -1).softmax(-1) @ torch.cat(values))
    return torch.stack(outputs).unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("head_dim", [48, 80, 256])
def test_corrected_attention_is_softmax_of_corrected_logits(method, form, head_dim, monkeypatch):
    codec, pieces = pieces_of(method, head_dim)
    q = 3 * normal(2, 6, 2, head_dim, seed=5)

    def read():
        parts = [(p.k, p.v) if isinstance(p, RawBlock) else codec.decode(p) for p in pieces]
        return tuple(torch.cat(side, dim=1) for side in zip(*parts))

    expected = corrected_by_hand(q, codec, pieces, form == "exact")
    got = attend_corrected(q, pieces, codec.key_steps, form == "exact", read)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    # The same in pieces, and without appended channels.
    monkeypatch.setattr(jensen_module, "CHUNK_ELEMENTS", 700)
    monkeypatch.setattr(jensen_module, "WIDEST_HEAD", 0)
    torch.testing.assert_close(attend_corrected(q, pieces, codec.key_steps, form == "exact", read), got)


def host_attention(q, k, v):
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2).flatten(2)


def attended(q: torch.Tensor, k: torch.Tensor, live: torch.Tensor, **settings) -> torch.Tensor:
    s = CacheSettings(**settings)
    layer = LayerCache(s, build_method(s))
    layer.append(k, k, q)
    layer.commit()
    return layer.attend(q, live, live, host_attention)


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_corrects_rounded_keys_and_leaves_others_to_the_host_bit_for_bit(method):
    q, k, live = 4 * normal(1, 9, 2, 64), normal(1, 200, 2, 64, seed=1), normal(1, 9, 2, 64, seed=2)
    plain = attended(q, k, live, method=method)
    for form in FORMS:
        corrected = attended(q, k, live, method=method, jensen=form)
        assert corrected.isfinite().all() and (corrected - plain).abs().max() > 1e-3
        for kept in ({"key_bits": 16}, {"keep_first_blocks": 1}):
            expected = attended(q, k, live, method=method, **kept)
            assert torch.equal(attended(q, k, live, method=method, jensen=form, **kept), expected)


@pytest.mark.parametrize("form", FORMS)
def test_rounded_keys_no_longer_draw_more_attention_than_they_should(form):
    """Half the keys are rounded, all are drawn alike: their share of the attention comes back to half."""
    q, k, live = 2 * normal(1, 400, 1, 64), normal(1, 600, 1, 64, seed=1), normal(1, 600, 1, 64, seed=2)

    def share(**settings) -> float:
        s = CacheSettings(method="rtn", group_size=16, **settings)
        layer = LayerCache(s, build_method(s))
        layer.append(k, torch.ones_like(k))
        layer.commit()
        return layer.attend(q, live, torch.zeros_like(live), host_attention).mean().item()

    truth = host_attention(q, torch.cat((k, live), 1), torch.cat((torch.ones_like(k), torch.zeros_like(live)), 1))
    drawn, corrected = share() - truth.mean().item(), share(jensen=form) - truth.mean().item()
    assert drawn > 0.05 and abs(corrected) < 0.2 * drawn


def test_kernels_can_refuse_what_they_do_not_correct():
    assert settings_facts(CacheSettings(jensen="exact"))["jensen"] == "exact"
    rule = backends.OneOf(("off",))
    entry = backends.Implementation("attend_packed", "kernel", print, {"jensen": rule})
    assert entry.refusals({"jensen": "exact"}) == ["jensen is exact, not off"]
    assert not entry.refusals({"jensen": "off"})
