"""The encoder's kernels, stage by stage and as a whole, against the eager twins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.bare_pack import bare_module
from support.kernels import INTERPRETED

STAGES = ("encode", "encode_codebook", "encode_match", "encode_nearest", "encode_residual", "statistics")
CODEC = ("codebook", "feedback", "groups", "kmeans", "midrise", "psac", "qsac")


@pytest.fixture(scope="module")
def kernels(device):
    return SimpleNamespace(**{name: bare_module(f"kernels.{name}") for name in STAGES})


@pytest.fixture(scope="module")
def core():
    codec = {name: bare_module(f"quantwm_core.codec.{name}") for name in CODEC}
    names = ("backends", "settings", "span", "query_stats", "methods")
    return SimpleNamespace(**codec, **{name: bare_module(f"quantwm_core.{name}") for name in names})


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nothing wrote holds junk: NaN, or large odd numbers."""
    new_empty = torch.Tensor.new_empty

    def poison(self, *args, **kwargs):
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def tokens_of(device, batch=1, tokens=70, heads=2, width=64, dtype=torch.bfloat16, seed=0):
    """Clustered tokens `[B, S, H, D]` with an offset."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(9, heads, width, generator=generator)
    pick = torch.randint(9, (batch, tokens), generator=generator)
    x = centres[pick] + 0.5 * torch.randn(batch, tokens, heads, width, generator=generator)
    return (x + 3 * torch.randn(heads, width, generator=generator)).to(device, dtype)


def prepared(kernels, core, x, count, bits=2, group=64, candidates=4):
    """Codebook, match, feedback and basis for `x`, from the kernels."""
    moment = core.query_stats.second_moment(tokens_of(x.device, x.shape[0], 90, *x.shape[2:], seed=1)).flatten(0, 1)
    centroids = kernels.encode_codebook.learn_centroids(x, count)
    book, operands = kernels.encode_codebook.round_codebook(centroids, moment, x.dtype)
    matched = kernels.encode_match.match(x, book, operands, bits, group, candidates)
    basis = core.psac.leading_eigenvectors(moment, 6).bfloat16()
    return SimpleNamespace(
        moment=moment, book=book, match=matched, basis=basis, feedback=core.feedback.feedback_matrix(moment)
    )


def operands_of(kernels, given, x):
    return kernels.encode_codebook.codebook_operands(given.book, given.moment, x.dtype)


def eager_codes(core, residual, feedback, wanted, bits, group):
    """The eager twin of `encode_residual`, given steps; also where on the grid each value fell before rounding."""
    scale_bits, per_octave = core.midrise.scale_format(bits)
    scales, top = core.midrise.encode_log_scales(wanted, scale_bits, per_octave)
    stored = core.midrise.decode_log_scales(scales, top, scale_bits, per_octave)
    step = core.groups.spread_groups(stored, group, residual.shape[-1])
    places = torch.empty_like(residual)

    def rounding(target, part):
        places[..., part] = target / step[..., part] + ((1 << bits) - 1) / 2
        codes = core.midrise.midrise_quantize(target, step[..., part], bits)
        return codes, core.midrise.midrise_dequantize(codes, step[..., part], bits)

    codes, decoded = core.feedback.quantize_with_feedback(residual, feedback, rounding)
    return SimpleNamespace(scales=scales, top=top, codes=codes, decoded=decoded, places=places)


WIDTHS = [(48, 64, 2), (64, 16, 2), (80, 32, 4), (128, 64, 2), (128, 128, 8), (256, 64, 2), (16, 128, 2)]


@pytest.mark.parametrize(("width", "group", "bits"), WIDTHS)
@pytest.mark.parametrize("steered", [True, False], ids=["feedback", "plain"])
def test_codes_and_scales_are_those_of_the_eager_twin(kernels, core, device, width, group, bits, steered):
    x = tokens_of(device, batch=2, tokens=75, heads=1, width=width)
    given = prepared(kernels, core, x, 5, bits, group)
    feedback = given.feedback if steered else None
    tensors, raw, _ = kernels.encode_residual.encode_residual(
        "k", x, given.book, given.match, bits, group, feedback, given.basis
    )
    residual = core.span.by_heads(x) - core.codebook.gather_centroids(given.book.decode(), given.match.ids)
    expected = eager_codes(core, residual, feedback, given.match.wanted, bits, group)
    unpack = bare_module("quantwm_core.codec.bits").unpack_bits
    assert torch.equal(tensors["k_scales_top"], expected.top)
    scales = unpack(tensors["k_scales"], core.midrise.scale_format(bits)[0], core.groups.group_count(width, group))
    assert torch.equal(scales, expected.scales)
    codes = unpack(tensors["k_codes"], bits, width)
    differ = (codes != expected.codes).any(-1)
    # Products are summed in another order: a value may fall to the other side when it lies on the boundary. What
    # follows it in its token then differs too.
    assert differ.float().mean() < 0.02
    for token_codes, token_expected, places in zip(
        codes[differ], expected.codes[differ], expected.places[differ], strict=True
    ):
        first = (token_codes != token_expected).nonzero()[0]
        assert ((places[first] % 1) - 0.5).abs() < 1e-4
    error = (residual - expected.decoded).bfloat16().float() @ given.basis.float()
    torch.testing.assert_close(raw[~differ], error[~differ], rtol=1e-4, atol=1e-4)


def turning(tokens, width, device):
    """RoPE of the first tokens of a video."""
    rotation = bare_module("quantwm_core.rotation").Rotation
    angles = torch.arange(tokens).unsqueeze(1) * 30.0 ** -(torch.arange(width // 2) * 2 / width)
    return rotation(angles.cos().to(device), angles.sin().to(device))


@pytest.mark.parametrize("width", [16, 48, 64, 80, 128, 256])
def test_coefficients_of_keys_before_rope(kernels, core, device, width):
    """Codes stay the same, and the errors turn before they meet the directions."""
    x = tokens_of(device, batch=2, tokens=75, heads=1, width=width)
    given, rotation = prepared(kernels, core, x, 5), turning(75, width, device)
    arguments = ("k", x, given.book, given.match, 2, 64, None)
    every = torch.eye(width, device=device).bfloat16().expand(2, -1, -1)
    plain, errors, _ = kernels.encode_residual.encode_residual(*arguments, every)
    turned, raw, peaks = kernels.encode_residual.encode_residual(*arguments, given.basis, rotation)
    assert all(torch.equal(turned[name], plain[name]) for name in plain)
    expected = rotation.apply_by_heads(errors.double()) @ given.basis.double()
    # Errors are rounded to bf16 before the turn and after it.
    assert (raw - expected).norm() < 2**-8 * expected.norm()
    torch.testing.assert_close(peaks.amax(1), raw.abs().amax((1, 2)), rtol=0, atol=0)


@pytest.mark.parametrize("rank", [1, 6, 16])
def test_coefficients_are_those_of_the_eager_twin(kernels, core, device, rank):
    raw = torch.randn(3, 70, rank, generator=torch.Generator().manual_seed(0)).to(device)
    raw[0, 5] = 0
    peaks = torch.nn.functional.pad(raw.abs().amax(-1), (0, 2)).unflatten(-1, (2, 36)).amax(-1)
    found = kernels.encode_residual.encode_coefficients(raw, peaks.contiguous())
    packed, scales, factor = core.psac.encode_coefficients_int4(raw)
    assert torch.equal(found["k_psac_c"], packed)
    assert torch.equal(found["k_psac_c_scales"], scales)
    assert torch.equal(found["k_psac_c_factor"], factor)


@pytest.mark.parametrize("shape", [(1, 70, 2, 64), (2, 13, 1, 48), (1, 200, 1, 128)], ids=str)
def test_rounded_centroids_are_those_of_the_eager_twin(kernels, core, device, shape):
    centroids = core.span.by_heads(tokens_of(device, *shape)).contiguous()
    centroids[..., 3] = 0.25
    expected = core.codebook.Codebook.encode(centroids)
    book, _ = kernels.encode_codebook.round_codebook(centroids, None, torch.bfloat16)
    assert torch.equal(book.codes, expected.codes) and torch.equal(book.grid, expected.grid)


@pytest.mark.parametrize("wgmma", [False, True], ids=["registers", "wgmma"])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_centroids_serve_as_well_as_the_eager_twins(kernels, core, device, monkeypatch, count, wgmma):
    if INTERPRETED:
        monkeypatch.setattr(kernels.encode_codebook, "has_wgmma", lambda device: wgmma)
    x = tokens_of(device, tokens=150)
    rows = core.span.by_heads(x)

    def distance(centroids):
        nearest = core.kmeans.nearest_centroid(rows, centroids)
        return (rows - core.codebook.gather_centroids(centroids, nearest)).square().mean().item()

    found = kernels.encode_codebook.learn_centroids(x, count)
    assert torch.equal(found, kernels.encode_codebook.learn_centroids(x, count))
    sample = core.kmeans.scattered_tokens(150, 32 * count, x.device)
    start = rows[:, core.kmeans.evenly_spaced(150, count, x.device)]
    expected = core.kmeans.kmeans(rows[:, sample], count, start=start)
    # From bf16 distances k-means may end in a neighbouring optimum.
    assert distance(found) <= 1.1 * distance(expected) + 1e-6


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_tokens_give_constant_centroids(kernels, device, value):
    x = torch.full((1, 40, 2, 32), value, dtype=torch.bfloat16, device=device)
    assert (kernels.encode_codebook.learn_centroids(x, 4) == value).all()


@pytest.mark.parametrize(("width", "group", "bits"), WIDTHS)
def test_steps_and_nearest_centroids(kernels, core, device, width, group, bits):
    x = tokens_of(device, tokens=75, heads=1, width=width)
    book, operands = kernels.encode_codebook.round_codebook(
        kernels.encode_codebook.learn_centroids(x, 7), None, x.dtype
    )
    found = kernels.encode_match.match(x, book, operands, bits, group)
    rows, centroids = core.span.by_heads(x), book.decode()
    distances = torch.cdist(rows, centroids)
    own = distances.gather(-1, found.ids.long().unsqueeze(-1)).squeeze(-1)
    assert (own <= distances.amin(-1) * 1.01).all()
    residual = rows - core.codebook.gather_centroids(centroids, found.ids)
    wanted = core.midrise.midrise_step(residual, bits, group)
    torch.testing.assert_close(found.wanted, wanted, rtol=1e-5, atol=0)
    assert torch.equal(found.peaks.amax(-1), found.wanted.amax((1, 2)))


@pytest.mark.parametrize(
    ("sample", "programs", "parts"), [(4680, 12, 11), (4680, 72, 3), (8192, 32, 4), (4680, 300, 1), (1, 1, 1)]
)
def test_shares_of_a_sample_end_together(kernels, sample, programs, parts):
    """Twelve heads and six layers of them are both about as many programs as run at a time, or twice as many."""
    book = kernels.encode_codebook
    share = book._share(sample, programs)
    assert share % book.TILE == 0 and -(-sample // share) == parts


@pytest.mark.parametrize(("count", "candidates"), [(20, 4), (3, 4), (130, 2)])
def test_query_sensitive_choice(kernels, core, device, count, candidates):
    x = tokens_of(device, tokens=140, width=64)
    given = prepared(kernels, core, x, count, group=32, candidates=candidates)
    weights = core.qsac.channel_weights(given.moment, given.moment)
    rows, centroids = core.span.by_heads(x), given.book.decode()
    expected = core.qsac.assign_query_sensitive(rows, centroids, weights, 32, candidates)
    # Distances are computed from bf16 operands, so candidates that are all but equally near may be others.
    assert (given.match.ids != expected).float().mean() < 0.05


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("candidates", [1, 4, 8])
def test_programs_of_several_tiles_choose_as_one_tile_does(kernels, core, device, monkeypatch, width, candidates):
    """Shares of more than a tile, the last of them short; tokens choose on their own, so cuts must not matter."""
    x = tokens_of(device, tokens=330, heads=2, width=width)
    given = prepared(kernels, core, x, 100, candidates=candidates)
    monkeypatch.setattr(kernels.encode_nearest, "PROGRAMS", 4)
    monkeypatch.setattr(kernels.encode_match, "STEPS_PROGRAMS", 6)
    found = kernels.encode_match.match(x, given.book, operands_of(kernels, given, x), 2, 64, candidates)
    assert torch.equal(found.ids, given.match.ids) and torch.equal(found.wanted, given.match.wanted)
    assert found.peaks.shape[1] == 3 and torch.equal(found.peaks.amax(1), given.match.peaks.amax(1))


@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 3e38, -3e38])
def test_tokens_beyond_all_numbers_take_a_centroid_that_exists(kernels, core, device, junk, candidates):
    """Distances overflow, and then the places that no centroid has are nearer."""
    x = tokens_of(device, tokens=80)
    given = prepared(kernels, core, x, 5)
    x[:, 7] = junk
    found = kernels.encode_match.match(x, given.book, operands_of(kernels, given, x), 2, 64, candidates)
    assert (found.ids < 5).all()


def test_steps_below_the_smallest_normal_float(kernels, core, device):
    """A reciprocal overflows there, and one infinite step would leave none to all other tokens of the head."""
    smallest = torch.finfo(torch.float32).tiny
    x = torch.full((1, 16, 1, 32), smallest, dtype=torch.bfloat16, device=device)
    book, operands = kernels.encode_codebook.round_codebook(
        kernels.encode_codebook.learn_centroids(x, 3), None, x.dtype
    )
    x[:, 3, :, 16:] = smallest * torch.linspace(1.02, 1.2, 16)
    x[:, 5, :, 3] = smallest * 1.125
    found = kernels.encode_match.match(x, book, operands, 2, 16)
    residual = core.span.by_heads(x) - core.codebook.gather_centroids(book.decode(), found.ids)
    expected = core.midrise.midrise_step(residual, 2, 16)
    assert expected.any()
    # A GPU may round what is below the smallest normal float to zero.
    torch.testing.assert_close(found.wanted, expected, rtol=1e-4, atol=smallest)
    assert torch.equal(found.peaks.amax(1), found.wanted.amax((1, 2)))


def encoded(kernels, core, device, k, v, method=None, stats=None, state=None, **settings):
    method = method or core.methods.QuantWM(core.settings.CacheSettings(**settings))
    heads, width = k.shape[2:]
    metric = torch.eye(width, device=device).expand(heads, width, width)
    state = state or core.methods.LayerState(lambda: metric)
    return kernels.encode.encode_span(method, k, v, stats or core.query_stats.QueryStats(), state), method, state


def errors(method, span, k, v):
    decoded = method.decode(span)
    return [(d.float() - x.float()).square().mean().item() for d, x in zip(decoded, (k, v), strict=True)]


CASES = [
    {}, {"group_size": 16}, {"key_bits": 4, "value_bits": 8}, {"key_bits": 16}, {"value_bits": 16},
    {"centroids": 3}, {"candidates": 4, "rank": 5},
]  # fmt: skip


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_span_decodes_as_well_as_the_eager_twins(kernels, core, device, settings):
    k, v, q = (tokens_of(device, batch=2, tokens=66, heads=1, seed=seed) for seed in range(3))
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(q))
    span, method, state = encoded(kernels, core, device, k, v, stats=stats, **settings)
    expected = method.encode(k, v, stats, core.methods.LayerState(state.value_metric))
    assert {n: (t.shape, t.dtype) for n, t in span.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.tensors.items()
    }
    assert (span.tokens, span.rank, span.batch) == (66, expected.rank, 2)
    for found, wanted in zip(errors(method, span, k, v), errors(method, expected, k, v), strict=True):
        assert found <= 1.1 * wanted + 1e-12


@pytest.mark.parametrize("width", [48, 64])
def test_a_span_of_keys_before_rope(kernels, core, device, width):
    k, v, q = (tokens_of(device, batch=2, tokens=66, heads=1, width=width, seed=seed) for seed in range(3))
    rotation = turning(66, width, device)
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(rotation.apply(q)), rotation=rotation)
    span, method, state = encoded(kernels, core, device, k, v, stats=stats)
    expected = method.encode(k, v, stats, core.methods.LayerState(state.value_metric))
    assert span.rotation is rotation and span.tensors.keys() == expected.tensors.keys()

    def loss(span):
        error = (method.decode(span)[0].float() - rotation.apply(k.float())).transpose(1, 2)
        return (error @ stats.own * error).sum().item()

    assert loss(span) <= 1.1 * loss(expected)


@pytest.mark.parametrize("tokens", [1, 12])
def test_short_spans(kernels, core, device, tokens):
    k, v = tokens_of(device, tokens=tokens), tokens_of(device, tokens=tokens, seed=1)
    span, method, _ = encoded(kernels, core, device, k, v)
    assert all(error < 0.5 for error in errors(method, span, k, v))


def test_constants_survive(kernels, core, device):
    k = torch.full((1, 40, 2, 64), 3.0, dtype=torch.bfloat16, device=device)
    span, method, _ = encoded(kernels, core, device, k, torch.zeros_like(k))
    decoded = method.decode(span)
    assert torch.equal(decoded[0], k) and not decoded[1].any()


def test_a_later_span_reuses_what_was_learned(kernels, core, device):
    k, v = tokens_of(device), tokens_of(device, seed=1)
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(k))
    first, _, state = encoded(kernels, core, device, k, v, stats=stats)
    state.learned_at = dict.fromkeys(state.learned_at, 1000)
    later, _, _ = encoded(kernels, core, device, k, v, stats=stats, state=state)
    for name, tensor in later.tensors.items():
        assert torch.equal(tensor, first.tensors[name])
    assert later.tensors["k_psac_u"].data_ptr() == first.tensors["k_psac_u"].data_ptr()
    assert state.tokens == 140


def test_parts_can_be_switched_off(kernels, core, device):
    k = tokens_of(device)
    method = core.methods.QuantWM(core.settings.CacheSettings(), feedback=False, correction=False)
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(k))
    span, _, state = encoded(kernels, core, device, k, k, method=method, stats=stats)
    assert span.rank == 0 and "k_psac_u" not in span.tensors and "v_feedback" not in state.shared


def test_strided_inputs(kernels, core, device):
    k = tokens_of(device, tokens=90, heads=4)
    view = k[:, 20:, 1::2]
    found, method, _ = encoded(kernels, core, device, view, view)
    dense, _, _ = encoded(kernels, core, device, view.contiguous(), view.contiguous())
    assert all(torch.equal(tensor, dense.tensors[name]) for name, tensor in found.tensors.items())


def test_rows_need_not_be_aligned(kernels, core, device):
    k = tokens_of(device, tokens=50)
    odd = torch.nn.functional.pad(k, (1, 2))[..., 1:-2]
    assert odd.stride(1) % 4 and odd.data_ptr() % 8
    found, _, _ = encoded(kernels, core, device, odd, odd)
    aligned, _, _ = encoded(kernels, core, device, k, k)
    assert all(torch.equal(tensor, aligned.tensors[name]) for name, tensor in found.tensors.items())


def test_the_registry_knows_the_limits(kernels, core):
    facts = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "method": "quantwm", "head_dim": 128}
    assert core.backends.choose("encode_span", "auto", facts).implementation.backend == "triton"
    refused = core.backends.choose("encode_span", "auto", facts | {"head_dim": 100, "candidates": 9})
    assert refused.implementation.backend == "torch"
    assert "head_dim is 100, not a multiple of 16 up to 256" in refused.reasons[0]
    assert "candidates is 9, above 8" in refused.reasons[0]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="real sizes")
@pytest.mark.parametrize("shape", [(1, 4680, 12, 128), (1, 6240, 40, 128)], ids=str)
def test_real_sizes(kernels, core, device, shape):
    k, v, q = (tokens_of(device, *shape, seed=seed) for seed in range(3))
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(q))
    span, method, state = encoded(kernels, core, device, k, v, stats=stats)
    again, _, _ = encoded(kernels, core, device, k, v, stats=stats)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in span.tensors.items())
    expected = method.encode(k, v, stats, core.methods.LayerState(state.value_metric))
    for found, wanted in zip(errors(method, span, k, v), errors(method, expected, k, v), strict=True):
        assert found <= 1.03 * wanted


def test_a_wrong_encoder_is_noticed_and_replaced(kernels, core, device, monkeypatch, caplog):
    """The first span of a kind is encoded both ways; one that loses more is given up, with one warning."""
    k, v = tokens_of(device, tokens=40), tokens_of(device, tokens=40, seed=2)
    method = core.methods.build_method(core.settings.CacheSettings())
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(tokens_of(device, seed=3)))
    right = kernels.encode.FusedQuantWM.encode

    def wrong(self, k, v, stats, state):
        return right(self, k.flip(1), v, stats, state)

    monkeypatch.setattr(kernels.encode, "_checked", set())
    monkeypatch.setattr(core.backends, "_failed", {})
    monkeypatch.setattr(kernels.encode.FusedQuantWM, "encode", wrong)
    state = core.methods.LayerState()
    with pytest.raises(kernels.encode.WrongResult, match="keys and values lose"):
        kernels.encode.encode_span(method, k, v, stats, state)
    assert not state.shared and not state.tokens
    monkeypatch.setattr(kernels.encode.FusedQuantWM, "encode", right)
    span = kernels.encode.encode_span(method, k, v, stats, state)
    assert state.tokens == 40 and span.tokens == 40


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("rotated", [False, True], ids=["after RoPE", "before RoPE"])
def test_after_the_rehearsal_nothing_is_left_to_compile(kernels, core, device, rotated, monkeypatch):
    triton = pytest.importorskip("triton")
    if not bare_module("kernels.launching").can_rehearse():
        pytest.skip("this Triton compiles one kernel at a time")
    k, v, q = (tokens_of(device, 1, 400, 5, 80, torch.float16, seed) for seed in range(3))
    turns = torch.ones(2, 400, 40, device=device)
    rotation = bare_module("quantwm_core.rotation").Rotation(*turns) if rotated else None
    stats = core.query_stats.QueryStats(core.query_stats.second_moment(q), rotation=rotation)
    method = kernels.encode.fused(core.methods.build_method(core.settings.CacheSettings()))
    compiled = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: compiled.append(facts["src"].name))
    kernels.encode._rehearse(method, k, v, stats)
    assert rotated or len(set(compiled)) > 8
    compiled.clear()
    metric = torch.eye(80, device=device).expand(5, 80, 80)
    state = core.methods.LayerState(lambda: metric)
    for _ in range(3):
        span = method.encode(k, v, stats, state)
        bare_module("kernels.decode").decode_layer(method, [span], *k.new_empty(2, *k.shape))
    assert compiled == []
