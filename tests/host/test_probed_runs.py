"""The probe inside runs of the host's own sampler."""

import pytest
import torch
from host.small_world import load_model, run, with_first_frames

LAYERS, HEADS = 2, 2


@pytest.fixture(scope="module")
def model(host):
    return with_first_frames(load_model(dim=256), 2)


def probed(host, model, probe, **settings):
    patched, _ = host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings), probe=probe)
    return run(patched, frames=8)


@pytest.mark.parametrize("method", ["rtn", "quantwm", "quantwm-paper"])
def test_a_teacher_forced_run_paints_what_full_precision_paints(host, model, method):
    probe = host.quantwm_core.probe.LogitProbe(teacher_forced=True)
    latent = probed(host, model, probe, method=method)
    # The frames that rehearse for `quantwm` change the order of sums in the first pass.
    assert torch.allclose(latent, run(model, frames=8), atol=1e-4)
    assert probe.top1_shift > 0 and probe.logit_mse > 0 and probe.attention_error > 0
    assert all(len(rows) == LAYERS and len(rows[0]) == HEADS for rows in probe.by_head().values())


def test_looking_changes_nothing(host, model):
    probe = host.quantwm_core.probe.LogitProbe()
    assert torch.equal(probed(host, model, probe, method="quantwm"), probed(host, model, None, method="quantwm"))
    assert probe.logit_mse > 0


def test_more_bits_lower_every_measure(host, model):
    measures = []
    for bits in (2, 4, 8):
        probe = host.quantwm_core.probe.LogitProbe(teacher_forced=True)
        probed(host, model, probe, method="rtn", key_bits=bits, value_bits=bits)
        measures.append((probe.top1_shift, probe.logit_mse, probe.attention_error))
    for name, values in zip(("top1_shift", "logit_mse", "attention_error"), zip(*measures)):
        assert values[0] > values[1] > values[2], name


def test_values_alone_leave_logits_alone(host, model):
    probe = host.quantwm_core.probe.LogitProbe(teacher_forced=True)
    probed(host, model, probe, method="rtn", key_bits=16, value_bits=2)
    assert probe.top1_shift == probe.logit_mse == 0 and probe.attention_error > 0
