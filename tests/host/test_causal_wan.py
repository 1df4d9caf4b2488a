"""The adapter on small random models in the real host: bit-equality, lifetime, memory, bad input."""

import gc
import weakref

import pytest
import torch
from host.small_world import SIGMAS, TOKENS_PER_FRAME, load_model, run, watched, with_first_frames

# (frames, block, given frames)
CASES = [(5, 3, 0), (1, 3, 0), (20, 3, 0), (31, 3, 0), (4, 3, 1), (3, 64, 0), (7, 3, 2), (5, 1, 0)]


@pytest.fixture(scope="module")
def t128(host):
    return load_model(256)


@pytest.fixture(scope="module")
def t48(host):
    return load_model(96)


def patched(host, model, on_block=None, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings), on_block=on_block)


def frozen_modules(model) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.model.named_modules()}


def without_host_habit(names: dict[str, set[str]]) -> dict[str, set[str]]:
    """The host leaves original bound methods behind as instance attributes when it unpatches."""
    return {name: attributes - {"forward", "forward_block", "init_kv_caches"} for name, attributes in names.items()}


@pytest.mark.parametrize(("frames", "block", "given"), CASES)
@pytest.mark.parametrize("settings", [{"method": "off"}, {"key_bits": 16, "value_bits": 16}], ids=["off", "16/16"])
def test_off_and_sixteen_bits_equal_the_host(host, t48, frames, block, given, settings):
    """R11: any frame count and block size, bit for bit."""
    model = with_first_frames(t48, given) if given else t48
    native = run(model, frames, block)
    clone, handle = patched(host, model, **settings)
    assert torch.equal(run(clone, frames, block), native)
    assert handle.record["tokens"] == frames * TOKENS_PER_FRAME and handle.record["ratio_packed"] == 1


def test_off_equals_the_host_with_two_worlds_in_a_batch(host, t128):
    native = run(t128, 5, 3, batch=2)
    assert torch.equal(run(patched(host, t128, method="off")[0], 5, 3, batch=2), native)
    packed, handle = patched(host, t128)
    out = run(packed, 5, 3, batch=2)
    assert out.isfinite().all() and handle.record["tokens"] == 60
    assert handle.record["bytes_bf16"] == 60 * 2 * 2 * 2 * 128 * 4


@pytest.mark.parametrize(
    ("method", "frames", "block", "given"),
    [("quantwm", *case) for case in CASES]
    + [(method, *case) for method in ("quantwm-paper", "rtn", "qvg", "qvg-pro", "quarot") for case in CASES[4:7]],
)
def test_packed_runs_are_finite_and_complete(host, t48, method, frames, block, given):
    model = with_first_frames(t48, given) if given else t48
    packed, handle = patched(host, model, method=method)
    assert run(packed, frames, block).isfinite().all()
    record = handle.record
    assert record["tokens"] == frames * TOKENS_PER_FRAME == handle.history[-1]["tokens"]
    assert record["bytes_unpacked"] == 0 and record["ratio_packed"] > 1.3
    assert len(handle.history) == record["blocks"] == -(-(frames - given) // block) + (given > 0)


@pytest.mark.parametrize(("frames", "block", "given"), [CASES[3], CASES[4], (30, 4, 1)])
def test_kivi_runs_and_keeps_its_window_in_full_precision(host, t48, frames, block, given):
    model = with_first_frames(t48, given) if given else t48
    packed, handle = patched(host, model, method="kivi")
    assert run(packed, frames, block).isfinite().all()
    record, tokens = handle.record, frames * TOKENS_PER_FRAME
    older = max(0, tokens - 128) // 32 * 32
    assert record["tokens"] == tokens and record["blocks"] == -(-(frames - given) // block) + (given > 0)
    assert record["bytes_unpacked"] == 2 * 2 * 2 * 48 * 4 * (tokens - older)  # sides, layers, heads, width, float32
    assert sum(record["bytes_by_part"].values()) == record["bytes_packed"] > 0 or older == 0


@pytest.mark.parametrize("method", ["quantwm", "rtn", "kivi", "qvg"])
@pytest.mark.parametrize("form", ["exact", "second-order"])
def test_corrected_attention_runs_in_the_host_and_changes_little(host, t128, method, form):
    plain = run(patched(host, t128, method=method)[0], 20, 3)
    out = run(patched(host, t128, method=method, jensen=form)[0], 20, 3)
    assert out.isfinite().all() and 0 < (out - plain).abs().mean() < 0.1 * plain.abs().mean()


def test_more_bits_come_closer(host, t128):
    native = run(t128, 6, 3)
    errors = []
    for bits in (2, 4, 8):
        out = run(patched(host, t128, key_bits=bits, value_bits=bits)[0], 6, 3)
        errors.append(float((out - native).square().mean()))
    assert errors[0] > errors[1] > errors[2] > 0


def test_the_same_model_runs_again_cold(host, t128):
    packed, handle = patched(host, t128)
    first, other = run(packed, seed=1), run(packed, seed=2)
    record = dict(handle.record)
    assert torch.equal(run(packed, seed=1), first) and not torch.equal(first, other)
    same = {key for key in record if not key.endswith("seconds")}
    assert {k: handle.record[k] for k in same} == {k: record[k] for k in same}


def test_only_the_clean_pass_is_packed_and_bit_for_bit(host, t128):
    """R3: nothing is packed while a block is denoised, no token twice, and exactly what the clean forward computed."""
    causal = host.world_models.causal_wan
    computed, packed_tensors, steps = {}, [], []
    forward = causal.run.PackedLayer.forward

    class Spy(host.quantwm_core.methods.QuantWM):
        def encode(self, k, v, stats, state):
            packed_tensors.append((k, v, len(steps)))
            return super().encode(k, v, stats, state)

    def spy_forward(self, module, x, freqs, options):
        batch, tokens = x.shape[:2]
        if self._run.clean:
            v = module.v(x).view(batch, tokens, module.num_heads, module.head_dim)
            computed.setdefault(self._index, []).append(v)
        return forward(self, module, x, freqs, options)

    settings = host.quantwm_core.CacheSettings()
    clone, handle = host.world_models.attach(t128, settings, method=Spy(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal.run.PackedLayer, "forward", spy_forward)
        run(clone, 5, 3, callback=lambda *_: steps.append(1))
    # Two blocks in two layers, which pack together.
    assert handle.record["pack_events"] == 4 and len(packed_tensors) == 2
    assert [k.shape[:2] for k, _, _ in packed_tensors] == [(2, 36), (2, 24)]
    # Three denoise steps come before the first block is packed, six before the second.
    assert [done for _, _, done in packed_tensors] == [3, 6]
    for block, (_, v, _) in enumerate(packed_tensors):
        for layer in range(2):
            assert torch.equal(v[layer : layer + 1], computed[layer][block])


@pytest.mark.parametrize("given", [1, 2])
def test_given_frames_are_packed_as_if_nothing_rode_along(host, t128, given):
    """The noisy frames behind given ones show their queries and leave no other trace: keys, values, length, output."""
    causal, core = host.world_models.causal_wan, host.quantwm_core
    spied = []

    class Spy(core.methods.QuantWM):
        def encode(self, k, v, stats, state):
            spied.append((k.clone(), v.clone()))
            return super().encode(k, v, stats, state)

    model, settings = with_first_frames(t128, given), core.CacheSettings()
    packed, handle = host.world_models.attach(model, settings, method=Spy(settings))
    first = run(packed, 5, 3)
    assert handle.record["tokens"] == 60 and handle.record["blocks"] == 1 + -(-(5 - given) // 3)
    assert torch.equal(first[:, :, :given], run(model, 5, 3)[:, :, :given])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal.run.CausalWanRun, "begin_pass", lambda self, clean, _: setattr(self, "clean", clean))
        run(packed, 5, 3)
    half = len(spied) // 2
    # The first encoding is that of the given frames, in both layers.
    for (k, v), (k_alone, v_alone) in zip(spied[:1], spied[half : half + 1]):
        torch.testing.assert_close(k, k_alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, v_alone, rtol=1e-4, atol=1e-4)


def test_a_model_without_our_patch_is_untouched(host):
    """R35: branches A (patched) and B (not), in any order, and B equals a model that was never patched."""
    never_patched, model = load_model(96), load_model(96)
    untouched = run(never_patched)
    branch, _ = patched(host, model)
    packed = run(branch)
    for expected, used in ((untouched, model), (packed, branch), (untouched, model)):
        assert torch.equal(run(used), expected)
    for used in (never_patched, model, branch):
        used.unpatch_model()
    assert without_host_habit(frozen_modules(model)) == without_host_habit(frozen_modules(never_patched))


def test_a_second_apply_replaces_the_first(host, t48):
    once, _ = patched(host, t48, method="off")
    twice, handle = patched(host, patched(host, t48)[0], method="off")
    assert torch.equal(run(twice), run(once)) and handle.record["method"] == "off"
    assert len(twice.object_patches) == len(once.object_patches)


@pytest.mark.parametrize("where", ["denoise", "clean", "pack"])
@pytest.mark.parametrize("kind", ["interrupt", "memory"])
def test_after_an_interrupt_the_next_run_is_fresh(host, t48, where, kind):
    """R38: cancelled in a step, in the clean pass or while packing: nothing stays, nothing is swallowed."""
    import comfy.model_management

    error = comfy.model_management.InterruptProcessingException if kind == "interrupt" else torch.OutOfMemoryError
    causal, core = host.world_models.causal_wan, host.quantwm_core
    fresh = run(patched(host, t48)[0], 6, 3)
    caches, calls = [], []
    forward, encode = causal.run.PackedLayer.forward, core.methods.QuantWM.encode

    def failing_forward(self, module, x, freqs, options):
        caches.append(weakref.ref(self._run.cache))
        due = len(self._run.handle.history) == 1 and self._index == 1 and self._run.clean == (where == "clean")
        calls.append(due)
        if where != "pack" and sum(calls) == 2 - (where == "clean"):
            raise error()
        return forward(self, module, x, freqs, options)

    def failing_encode(self, k, v, stats, state):
        if where == "pack" and len(caches) > 8:
            raise error()
        return encode(self, k, v, stats, state)

    packed, _ = patched(host, t48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal.run.PackedLayer, "forward", failing_forward)
        patch.setattr(core.methods.QuantWM, "encode", failing_encode)
        with pytest.raises(error):
            run(packed, 6, 3)
    gc.collect()
    assert all(cache() is None for cache in caches)
    assert torch.equal(run(packed, 6, 3), fresh)


def test_other_models_are_refused_by_name(host, t48):
    class Ordinary:
        class model:
            diffusion_model = torch.nn.Identity()

    Ordinary.model = Ordinary.model()
    with pytest.raises(ValueError, match="autoregressive world model.*Identity.*Load World Model"):
        patched(host, Ordinary())


def test_no_tensor_of_the_full_length_but_one_decoded_layer(host, t128):
    """R29: packed from the start, and never more than one layer decoded."""
    frames = 12
    full = frames * TOKENS_PER_FRAME
    packed, handle = patched(host, t128)
    run(packed, frames, 3)
    with watched() as watch:
        run(packed, frames, 3)
    lengths = [shape for shape, _, _ in watch.seen if full in shape and 128 in shape]
    # Only [2, B, S, H, D] workspaces, views of them, and what attention makes of them, in the last block's passes.
    workspace = 2 * full * 2 * 128 * 4
    assert all(size <= workspace for shape, _, size in watch.seen if full in shape and 128 in shape), lengths[:5]
    assert handle.record["bytes_workspace_peak"] == workspace
    early = [shape for shape, _, _ in watch.seen[: len(watch.seen) // 4]]
    assert not any(full in shape for shape in early)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weight_types_do_not_reach_the_cache(host, dtype):
    """R45: the host casts weights; keys and values are never fp8, and fp8 weights work even where the host fails."""
    model = load_model(256, dtype)
    packed, handle = patched(host, model)
    with watched() as watch:
        assert run(packed).isfinite().all()
    # Shapes with heads and head width apart belong to queries, keys, values and what is stored of them.
    assert not any(shape[-2:] == (2, 128) and kind == torch.float8_e4m3fn for shape, kind, _ in watch.seen)
    assert handle.record["tokens"] == 60
    assert run(patched(host, model, method="off")[0]).isfinite().all()


def test_lora_reaches_the_packed_model_in_either_order(host, t48):
    """R41: same keys, an effect, and the same result whichever node comes first."""
    key = "diffusion_model.blocks.0.self_attn.k.weight"
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(96, 4, generator=generator), torch.randn(4, 96, generator=generator)

    def with_lora(model):
        clone = model.clone()
        assert clone.add_patches({key: ("diff", (0.05 * up @ down,))}) == [key]
        return clone

    keys = set(t48.model.state_dict())
    plain = run(patched(host, t48)[0])
    before = run(patched(host, with_lora(t48))[0])
    after = run(with_lora(patched(host, t48)[0]))
    assert torch.equal(before, after) and not torch.equal(before, plain)
    assert set(t48.model.state_dict()) == keys


def test_memory_is_asked_from_the_host(host, t128):
    """The planned cache enlarges the host's own estimate."""
    import comfy.sampler_helpers

    asked = []
    original = comfy.sampler_helpers.estimate_memory

    def estimate(model, shape, conds):
        asked.append(model.model.memory_required([shape[0] * 2, *shape[1:]]))
        return original(model, shape, conds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sampler_helpers, "estimate_memory", estimate)
        run(t128)
        run(patched(host, t128)[0])
        run(patched(host, t128, method="off")[0])
    assert asked[1] > asked[0] == asked[2]


def test_blocks_are_reported_while_sampling(host, t48):
    seen = []
    packed, handle = patched(host, t48, on_block=seen.append)
    run(packed, 5, 2)
    assert [entry["tokens"] for entry in seen] == [24, 48, 60] and seen == handle.history
    assert all(entry["bytes_bf16"] > entry["bytes_packed"] > 0 for entry in seen[1:])


def test_poison_behind_the_end_changes_nothing(host, t48):
    """R5 in the host: the sampler only ever lowers `end`; raising it or reading plain tensors is an error."""
    causal = host.world_models.causal_wan
    forward = causal.run.PackedLayer.forward

    def poking(self, module, x, freqs, options):
        with pytest.raises(KeyError, match="no plain tensor"):
            self["k"]
        with pytest.raises(KeyError, match="only `end`"):
            self["end"] = self["end"] + 12
        return forward(self, module, x, freqs, options)

    expected = run(patched(host, t48)[0])
    packed, _ = patched(host, t48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal.run.PackedLayer, "forward", poking)
        assert torch.equal(run(packed), expected)


def test_another_sampler_leaves_no_record_of_an_earlier_run(host, t48, caplog):
    """The model works as without a cache, the record says nothing was stored, and the log names the sampler to use."""
    import comfy.samplers

    packed, handle = patched(host, t48)
    run(packed)
    assert handle.record is not None

    def euler(model):
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds([[torch.ones(1, 8, 24), {}]], [[torch.ones(1, 8, 24), {}]])
        guider.set_cfg(1.0)
        noise = torch.randn(1, 16, 2, 6, 8, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            sampler = comfy.samplers.ksampler("euler")
            return guider.sample(noise, torch.zeros_like(noise), sampler, torch.tensor(SIGMAS), disable_pbar=True)

    assert torch.equal(euler(packed), euler(t48))
    assert handle.record is None and not handle.history
    assert "Use World Sampler or Sampler AR Video" in caplog.text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, True), ({"key_bits": 16}, False), ({"method": "quantwm-paper"}, False), ({"method": "kivi"}, False)],
)
def test_only_our_method_rehearses_and_only_for_packed_keys(host, t48, settings, wanted):
    lengths = []
    forward = host.world_models.causal_wan.run.PackedLayer.forward

    def spy(self, module, x, freqs, options):
        lengths.append(x.shape[1])
        return forward(self, module, x, freqs, options)

    packed, _ = patched(host, with_first_frames(t48, 1), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.world_models.causal_wan.run.PackedLayer, "forward", spy)
        run(packed, 4, 3)
    assert lengths[:2] == [TOKENS_PER_FRAME * (4 if wanted else 1)] * 2
    assert set(lengths[2:]) == {3 * TOKENS_PER_FRAME}


def test_a_run_cut_between_layers_is_not_billed_for_layers_that_stored_nothing(host, t48):
    make_history = host.quantwm_core.LayerCache.make_history
    calls = []

    def failing(self):
        calls.append(1)
        if len(calls) == 4:  # the second layer, in the second block
            raise KeyboardInterrupt
        make_history(self)

    packed, handle = patched(host, t48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.quantwm_core.LayerCache, "make_history", failing)
        with pytest.raises(KeyboardInterrupt):
            run(packed, 6, 3)
    record = handle.record
    assert record["tokens"] == 36 and record["blocks"] == 1
    assert record["bytes_bf16"] == 3 * 36 * 2 * 48 * 4  # three layer-blocks of keys and values
    # One of them waits for its group in full precision (float32 here), with the moment of its queries.
    assert record["bytes_unpacked"] == 36 * 2 * 48 * 8 + 2 * 48 * 48 * 4


def test_patches_of_other_nodes_are_named_when_they_are_replaced(host, t48, caplog):
    model = t48.clone()
    model.add_object_patch("diffusion_model.blocks.1.self_attn.forward", lambda *a, **k: None)
    patched(host, model)
    assert "replaces another node's patches" in caplog.text and "blocks.1.self_attn" in caplog.text


def test_an_impossible_backend_is_refused_at_the_node(host, t48):
    if torch.cuda.is_available():
        pytest.skip("Triton can be used here")
    with pytest.raises(ValueError, match="triton"):
        patched(host, t48, backend="triton")


def test_bits_by_layer_and_head(host, t48):
    """All heads at 16 bits by overrides equal the host up to the order of sums; some of them lie between."""
    native = run(t48, 6, 3)
    raw, raw_handle = patched(host, t48, bit_overrides="0=16, 1.0=16, 1.1=16")
    torch.testing.assert_close(run(raw, 6, 3), native, rtol=1e-4, atol=1e-4)
    assert raw_handle.record["bytes_packed"] == 0
    errors, sizes = [], []
    for overrides in ("", "1.0=8", "0-1=8"):
        packed, handle = patched(host, t48, bit_overrides=overrides)
        errors.append(float((run(packed, 6, 3) - native).square().mean()))
        sizes.append(handle.record["bytes_packed"])
        assert handle.record["bit_overrides"] == overrides
    assert errors[0] > errors[2] > 0 and sizes[0] < sizes[1] < sizes[2]
    with pytest.raises(ValueError, match="layer 2.*layers go from 0 to 1"):
        patched(host, t48, bit_overrides="2=4")
