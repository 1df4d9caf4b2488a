"""Append, commit, rewind and read against plain tensors."""

import random

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings, LayerCache, WorldCache
from quantwm_core.layer_cache import RawBlock
from quantwm_core.methods import build_method

METHODS = ("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")
# KIVI packs a token only when newer ones push it out of its window; see test_rivals.
WITHOUT_WINDOW = tuple(method for method in METHODS if method != "kivi")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_cache(**options) -> LayerCache:
    s = CacheSettings(**options)
    return LayerCache(s, build_method(s))


def resident(layer: LayerCache) -> int:
    return sum(layer.usage().values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("back", [36, 12])
def test_rewinding_leaves_nothing_behind(method, back):
    """R5: twenty cycles of appending and rewinding keep content and memory."""
    layer = layer_cache(method=method)
    layer.append(*(torch.ones(2, 36, 2, 64),) * 3)
    layer.commit()
    sizes = []
    for _ in range(20):
        layer.rewind(back)
        layer.append(*(torch.full((2, back, 2, 64), 2.0),) * 3)
        layer.commit()
        sizes.append(resident(layer))
        keys, values = layer.read()
        assert layer.end == 36 == keys.shape[1]
        # Plain rounding keeps constants to the precision of its FP16 factor.
        torch.testing.assert_close(keys[:, 36 - back :], torch.full((2, back, 2, 64), 2.0), rtol=2**-10, atol=0)
        torch.testing.assert_close(values[:, : 36 - back], torch.ones(2, 36 - back, 2, 64), rtol=2**-10, atol=0)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("sides", [{"key_bits": 16}, {"value_bits": 16}], ids=["raw keys", "raw values"])
def test_rewinding_into_a_span_with_one_side_in_full_precision(sides):
    layer = layer_cache(**sides)
    x = normal(2, 24, 2, 64)
    layer.append(x, x, x)
    layer.commit()
    before = layer.read()
    layer.rewind(17)
    for now, then in zip(layer.read(), before):
        torch.testing.assert_close(now, then[:, :7], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_rewinding_to_nothing_and_too_far(method):
    layer = layer_cache(method=method)
    layer.append(*(normal(1, 10, 1, 48),) * 3)
    layer.commit()
    layer.append(normal(1, 4, 1, 48), normal(1, 4, 1, 48))
    layer.rewind(14)
    assert layer.end == 0 and resident(layer) == 0
    with pytest.raises(ValueError, match="rewind takes 0 to 0 tokens"):
        layer.rewind(1)
    with pytest.raises(ValueError, match="nothing to read"):
        layer.read()


@pytest.mark.parametrize("method", WITHOUT_WINDOW)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_random_operations_equal_plain_tensors(method, batch):
    """R5: what was decoded once stays what it was, in order, through any sequence of operations (504 in all)."""
    choose = random.Random(batch)
    layer = layer_cache(method=method, keep_first_blocks=batch % 2)
    plain = torch.empty(batch, 0, 1, 32)
    for step in range(56):
        action = choose.choice(("append", "append", "rewind", "read"))
        if action == "append":
            block = normal(batch, choose.randint(1, 9), 1, 32, seed=step)
            layer.append(block, block, block)
            layer.commit()
            plain = torch.cat((plain, layer.read()[0][:, plain.shape[1] :]), dim=1)
        elif action == "rewind":
            back = choose.randint(0, min(20, plain.shape[1]))
            layer.rewind(back)
            plain = plain[:, : plain.shape[1] - back]
        elif plain.shape[1]:
            torch.testing.assert_close(layer.read()[0], plain, rtol=0, atol=1e-5)
        assert layer.end == plain.shape[1]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_leave_and_come_back_from_the_bank(method):
    """What is in reach decodes to what it did before, retired blocks cost nothing, banked ones what they did."""
    layer = layer_cache(method=method)
    for block in range(6):
        layer.append(*(normal(1, 20 + block, 2, 64, seed=block),) * 3)
        layer.commit()
    whole = resident(layer)
    parts = layer.read()[0].split([20, 21, 22, 23, 24, 25], dim=1)
    layer.retire([1, 2], torch.device("cpu"))
    assert torch.equal(layer.read()[0], torch.cat((parts[0], *parts[3:]), 1))
    assert resident(layer) == whole and layer.tokens == 135 and layer.end == layer.committed == 92
    layer.recall([2])
    assert torch.equal(layer.read()[0], torch.cat((parts[2], parts[0], *parts[3:]), 1))
    layer.recall([])
    layer.forget([1])
    layer.retire([3])
    assert layer.tokens == 91 and layer.blocks == 6 and resident(layer) < 0.9 * whole
    layer.append(*(normal(1, 7, 2, 64, seed=9),) * 3)
    layer.commit()
    assert [entry.first for entry in layer.entries] == [0, 4, 5, 6]
    layer.rewind(7 + 25)
    assert layer.blocks == 5 and torch.equal(layer.read()[0], torch.cat((parts[0], parts[4]), 1))


def test_a_span_of_several_blocks_leaves_as_a_whole():
    layer = layer_cache(span_blocks=2)
    for block in range(5):
        layer.append(*(normal(1, 8, 1, 64, seed=block),) * 3)
        layer.commit()
    layer.retire([0])
    assert layer.end == 40
    layer.retire([1])
    assert layer.end == 24 and layer.blocks == 5
    layer.append(*(normal(1, 8, 1, 64),) * 3)
    layer.commit()
    assert [list(entry.numbers) for entry in layer.entries] == [[2, 3], [4, 5]]


def test_parts_of_a_block_leave_with_their_spans():
    """KIVI packs whole groups of tokens, across blocks: a span goes when all blocks that it touches may."""
    layer = layer_cache(method="kivi", group_size=32)
    for block in range(8):
        layer.append(*(normal(1, 24, 1, 64, seed=block),) * 3)
        layer.commit()
    numbers = [list(entry.numbers) for entry in layer.entries]
    layer.retire([0, 1])
    left = [held for held in numbers if not {0, 1}.issuperset(held)]
    assert [list(entry.numbers) for entry in layer.entries] == left and len(left) < len(numbers)
    layer.retire(range(2, 8), torch.device("cpu"))
    assert layer.end == 0 and layer.blocks == 8 and [list(entry.numbers) for entry in layer.bank] == left


def test_kept_first_blocks_are_the_first_of_the_run():
    layer = layer_cache(keep_first_blocks=1)
    for block in range(4):
        layer.append(*(normal(1, 8, 1, 64, seed=block),) * 3)
        layer.commit()
        layer.retire([block - 1])
    assert not isinstance(layer.entries[0].stored, RawBlock)


def test_live_tokens_follow_history_and_are_forgotten():
    layer = layer_cache()
    layer.append(*(normal(1, 20, 2, 64),) * 3)
    layer.commit()
    live = normal(1, 6, 2, 64, seed=1)
    keys, values = layer.read(live, live + 1)
    assert torch.equal(keys[:, 20:], live) and torch.equal(values[:, 20:], live + 1)
    assert layer.end == 20 and layer.read()[0].shape[1] == 20


def test_policies_keep_first_and_recent_blocks_and_fill_spans():
    layer = layer_cache(keep_first_blocks=1, keep_recent_blocks=1, span_blocks=2)
    blocks = [normal(1, 8, 1, 64, seed=i) for i in range(7)]
    for block in blocks:
        layer.append(block, block, block)
        layer.commit()
    kinds = [isinstance(entry.stored, RawBlock) for entry in layer.entries]
    # First block kept; 1-2 and 3-4 packed in pairs; 5 waits for its partner; 6 is the recent one.
    assert kinds == [True, False, False, True, True]
    assert layer.blocks == 7 and layer.end == 56
    keys, _ = layer.read()
    for index in (0, 5, 6):
        assert torch.equal(keys[:, 8 * index : 8 * index + 8], blocks[index])


def test_rewinding_into_a_span_of_blocks_keeps_count_of_them():
    layer = layer_cache(span_blocks=3)
    for block in range(3):
        layer.append(*(normal(1, 12, 1, 64, seed=block),) * 3)
        layer.commit()
    assert (layer.blocks, len(layer.entries)) == (3, 1)
    layer.rewind(13)
    assert (layer.end, layer.blocks, layer.entries[0].lengths) == (23, 2, [12, 11])


def test_blocks_that_stay_keep_no_statistics():
    layer = layer_cache(keep_first_blocks=1)
    for block in range(2):
        layer.append(*(normal(1, 12, 1, 64, seed=block),) * 3)
        layer.commit()
    assert layer.entries[0].stored.moment is None


def test_kept_blocks_do_not_hold_larger_tensors_alive():
    layer = layer_cache(keep_first_blocks=4)
    big = normal(1, 100, 1, 64)
    layer.append(big[:, :5], big[:, 5:10])
    layer.commit()
    assert layer.usage()["blocks"] == 2 * 5 * 64 * 4


def test_shapes_must_agree():
    layer = layer_cache()
    layer.append(*(normal(1, 5, 2, 64),) * 3)
    layer.commit()
    with pytest.raises(ValueError, match="set cfg to 1"):
        layer.append(normal(2, 5, 2, 64), normal(2, 5, 2, 64))
    with pytest.raises(ValueError, match="share a shape"):
        layer.append(normal(1, 5, 2, 64), normal(1, 4, 2, 64))


@pytest.mark.parametrize("method", WITHOUT_WINDOW)
def test_record_adds_up(method):
    cache = WorldCache(CacheSettings(method=method, keep_first_blocks=1), CacheGeometry(2, 2, 64))
    for block in range(3):
        for index, layer in enumerate(cache.layers):
            layer.append(normal(1, 64, 2, 64, seed=block), normal(1, 64, 2, 64, seed=99), normal(1, 64, 2, 64))
            cache.commit(index)
    record = cache.record()
    assert record["tokens"] == 192 and record["blocks"] == 3 and record["pack_events"] == 4
    assert record["bytes_bf16"] == 2 * 2 * 64 * 192 * 4
    assert record["bytes_packed"] == sum(record["bytes_by_part"].values()) > 0
    assert record["bytes_unpacked"] >= 2 * 64 * 2 * 64 * 2 * 4  # one float32 block in two layers
    resident_bytes = record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]
    assert record["ratio_resident"] == pytest.approx(record["bytes_bf16"] / resident_bytes, abs=1e-3)
    assert [entry["block"] for entry in cache.history] == [0, 1, 2]
    assert [entry["tokens"] for entry in cache.history] == [64, 128, 192]


def test_a_basis_is_learned_again_only_when_the_history_has_doubled():
    layer = layer_cache()
    for block in range(9):
        layer.append(*(normal(1, 32, 1, 64, seed=block),) * 3)
        layer.commit()
    bases = [entry.stored.tensors["k_psac_u"].data_ptr() for entry in layer.entries]
    assert [i for i in range(1, 9) if bases[i] != bases[i - 1]] == [2, 6]


@pytest.mark.parametrize(
    "settings",
    [{}, {"key_bits": 16}, {"span_blocks": 2}, {"keep_first_blocks": 9}, {"method": "kivi"}, {"method": "qvg"}],
    ids=str,
)
def test_tokens_leave_from_inside_of_blocks(settings):
    """A window that rolls by single frames: what stays is what was there, and the rest takes no room."""
    layer = layer_cache(**settings)
    # `kivi` keeps its newest 128 tokens, and rounds keys in groups of 32 tokens: the cuts are in the middle of them.
    unit = 10 if settings.get("method") == "kivi" else 1
    for block in range(4):
        layer.append(*(normal(2, 10 * unit, 2, 64, seed=3 * block + i) for i in range(3)))
        layer.commit()
    first, rest = 6 * unit, 23 * unit  # the end of the first block, the second, and the beginning of the third
    whole, bytes_before = layer.read(), sum(layer.usage().values())
    layer.evict(first, rest - first)
    layer.evict(first, unit)
    for before, left in zip(whole, layer.read()):
        # Products of other shapes may round differently.
        expected = torch.cat((before[:, :first], before[:, rest + unit :]), dim=1)
        torch.testing.assert_close(left, expected, rtol=0, atol=1e-6)
    assert (layer.committed, layer.end, layer.blocks) == (22 * unit, 22 * unit, 4)
    assert sum(layer.usage().values()) < bytes_before
    layer.append(*(normal(2, 10 * unit, 2, 64, seed=40 + i) for i in range(3)))
    layer.commit()
    assert (layer.committed, layer.blocks) == (32 * unit, 5)
    layer.rewind(12 * unit)
    assert (layer.committed, layer.blocks) == (20 * unit, 4)


def test_evict_takes_only_what_is_there():
    layer = layer_cache()
    layer.append(*(normal(1, 12, 1, 64),) * 3)
    layer.commit()
    with pytest.raises(ValueError, match="the 12 in reach; got those from 5 to 13"):
        layer.evict(5, 8)
    layer.evict(0, 12)
    assert (layer.committed, layer.blocks, layer.entries) == (0, 1, [])


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_computes_nonsense_does_not_end_the_run(method):
    layer = layer_cache(method=method)
    for seed in range(2):
        q, k, v = (normal(1, 160, 2, 32, seed=3 * seed + i) for i in range(3))
        q[:, :5], k[:, 3] = torch.nan, torch.inf
        layer.append(k, v, q)
        layer.commit()
    keys, values = layer.read()
    assert keys.shape == values.shape == (1, 320, 2, 32) and layer.usage()["codes"] > 0


@pytest.mark.parametrize("settings", [{}, {"jensen": "second-order"}, {"keep_first_blocks": 1}], ids=str)
def test_prompts_that_ask_one_history(settings, monkeypatch):
    """Each gets what it would get alone, in one reading of what is stored."""
    layer = layer_cache(**settings)
    layer.append(normal(1, 36, 2, 64), normal(1, 36, 2, 64, seed=1), normal(1, 9, 2, 64, seed=2))
    layer.commit()
    prompts = [tuple(normal(1, 12, 2, 64, seed=10 * prompt + part) for part in range(3)) for prompt in range(3)]

    def attention(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    alone = torch.cat([layer.attend(*prompt, attention) for prompt in prompts])
    gather, readings = layer._gather, []
    monkeypatch.setattr(layer, "_gather", lambda pieces: readings.append(pieces) or gather(pieces))
    assert torch.equal(layer.attend_each(prompts, attention), alone)
    assert len(readings) == 1


def test_reading_again_decodes_again(monkeypatch):
    """A backend that times the ways to attend has to see what decoding costs, and may not be given what it wrote to."""
    layer = layer_cache()
    layer.append(normal(1, 36, 2, 64), normal(1, 36, 2, 64, seed=1), normal(1, 9, 2, 64, seed=2))
    layer.commit()
    live = normal(1, 12, 2, 64, seed=3)
    expected = layer.read(live, live)

    def run(operation, facts, *arguments):
        if operation != "attend_packed":
            return run_any(operation, facts, *arguments)
        queries, *_, read = arguments
        for tensor in read():
            tensor.fill_(torch.nan)
        assert all(torch.equal(got, wanted) for got, wanted in zip(read(), expected))
        return queries.flatten(2)

    run_any = layer._backend.run
    monkeypatch.setattr(layer._backend, "run", run)
    layer.attend(live, live, live, None)


def test_prompts_without_a_history():
    prompts = [tuple(normal(1, 12, 2, 64, seed=10 * prompt + part) for part in range(3)) for prompt in range(2)]
    out = layer_cache().attend_each(prompts, lambda q, k, v: k.flatten(2))
    assert torch.equal(out, torch.cat([k.flatten(2) for _, k, _ in prompts]))


@pytest.mark.parametrize("method", ["quantwm-paper", "quantwm"])
def test_queries_of_a_prefilled_block_were_asked_before_it(method):
    """The published method takes them for those of earlier spans, and corrects its first span; nothing is kept."""
    cache = WorldCache(CacheSettings(method), CacheGeometry(1, 2, 64), prefilled=True)
    layer = cache.layers[0]
    layer.append(normal(1, 36, 2, 64), normal(1, 36, 2, 64, seed=1), normal(1, 9, 2, 64, seed=2))
    cache.commit(0)
    assert layer.usage()["psac_c"] > 0
    assert layer.state.earlier.moment is None
