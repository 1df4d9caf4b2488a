"""The probe against logits and attention written out in float64."""

import numpy as np
import pytest
import torch

from quantwm_core.probe import LogitProbe

BATCH, HEADS, WIDTH = 2, 3, 7


def attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def random(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(BATCH, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def expected(q, keys, values, got_keys, got_values, history):
    """The three measures of each head, float64, from their formulas."""
    q, keys, values, got_keys, got_values = (t.double().numpy() for t in (q, keys, values, got_keys, got_values))
    rows = []
    for h in range(HEADS):
        shifted, squared, wrong, norm = [], [], 0.0, 0.0
        for b in range(BATCH):
            true = q[b, :, h] @ keys[b, :, h].T / np.sqrt(WIDTH)
            got = q[b, :, h] @ got_keys[b, :, h].T / np.sqrt(WIDTH)
            shifted += list(true.argmax(-1) != got.argmax(-1))
            error = (got - true)[:, :history]
            squared += list(((error - error.mean(-1, keepdims=True)) ** 2).mean(-1))
            output = softmax(true) @ values[b, :, h]
            wrong += ((softmax(got) @ got_values[b, :, h] - output) ** 2).sum()
            norm += (output**2).sum()
        rows.append((np.mean(shifted), np.mean(squared), np.sqrt(wrong / norm), wrong, norm))
    return np.array(rows)


@pytest.mark.parametrize("teacher_forced", [False, True])
def test_all_measures_agree_with_float64(teacher_forced):
    blocks = [(random(5, 1), random(5, 2)), (random(6, 3), random(6, 4))]
    q, live = random(4, 5), (random(4, 6), random(4, 7))
    true = [torch.cat((*past, new), 1) for past, new in zip(zip(*blocks), live)]
    got = [torch.cat((t[:, :11] + 0.3 * random(11, 8 + i), t[:, 11:]), 1) for i, t in enumerate(true)]
    probe = LogitProbe(teacher_forced=teacher_forced)
    out = attention(q, *got)
    assert probe.attend(2, q, got[0], live, attention, out) is out  # no history: nothing to compare
    for k, v in blocks:
        probe.commit(2, k, v)
    went_on = probe.attend(2, q, got[0], live, attention, out)
    assert torch.equal(went_on, attention(q, *true) if teacher_forced else out)

    rows = expected(q, *true, *got, history=11)
    by_head = probe.by_head()
    for column, name in enumerate(("top1_shift", "logit_mse", "attention_error")):
        assert by_head[name] == [pytest.approx(rows[:, column], rel=1e-4)]
    assert probe.top1_shift == pytest.approx(rows[:, 0].mean())
    assert sum(probe.top1_shift_each()) / len(probe.top1_shift_each()) == pytest.approx(probe.top1_shift)
    assert probe.logit_mse == pytest.approx(rows[:, 1].mean(), rel=1e-4)
    assert probe.attention_error == pytest.approx(np.sqrt(rows[:, 3].sum() / rows[:, 4].sum()), rel=1e-4)


def test_layers_are_kept_apart_and_true_keys_give_no_error():
    probe = LogitProbe()
    assert probe.top1_shift == probe.logit_mse == probe.attention_error == 0 and probe.by_head()["logit_mse"] == []
    q, live, past = random(4, 1), (random(4, 2), random(4, 3)), (random(9, 4), random(9, 5))
    true = [torch.cat(pair, 1) for pair in zip(past, live)]
    for layer, noise in ((1, 0.5), (0, 0.0)):
        probe.commit(layer, *past)
        keys = torch.cat((past[0] + noise * random(9, 6), live[0]), 1)
        probe.attend(layer, q, keys, live, attention, attention(q, keys, true[1]))
    by_head = probe.by_head()
    assert all(values[0] == [0.0] * HEADS for values in by_head.values())
    assert min(by_head["logit_mse"][1]) > 0 and min(by_head["attention_error"][1]) > 0


def test_only_some_queries_are_asked_for_logits():
    probe = LogitProbe(queries_per_pass=3)
    q, live = random(10, 1), (random(10, 2), random(10, 3))
    past = random(9, 4), random(9, 5)
    keys = torch.cat((past[0] + random(9, 6), live[0]), 1)
    values = torch.cat((past[1], live[1]), 1)
    probe.commit(0, *past)
    probe.attend(0, q, keys, live, attention, attention(q, keys, values))
    rows = expected(q[:, ::4], torch.cat((past[0], live[0]), 1), values, keys, values, history=9)
    assert probe.by_head()["logit_mse"] == [pytest.approx(rows[:, 1], rel=1e-4)]


def test_a_cache_that_forgets_cannot_be_probed():
    probe = LogitProbe()
    probe.commit(0, random(9, 1), random(9, 2))
    live = random(4, 3), random(4, 4)
    with pytest.raises(ValueError, match="it saw 13, the cache holds 8"):
        probe.attend(0, random(4, 5), random(8, 6), live, attention, random(4, 7).flatten(2))
