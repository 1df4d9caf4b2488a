"""The logit probe against logits written out by hand."""

import math

import torch

from quantwm_core.probe import LogitProbe


def test_the_probe_counts_shifted_tokens_and_logit_errors():
    true = torch.eye(4).view(1, 4, 1, 4) * 2
    live = torch.zeros(1, 1, 1, 4)
    queries = torch.eye(4)[:2].view(1, 2, 1, 4)
    decoded = true.clone()
    decoded[0, 1, 0, 0] = 5.0  # the first query now prefers the second token
    probe = LogitProbe()
    probe.attend(0, queries, live)
    assert probe.top1_shift == 0
    probe.commit(0, true)
    probe.attend(0, queries, torch.cat((decoded, live), dim=1))
    assert probe.top1_shift == 0.5
    # Only the first query sees an error: 5 / sqrt(4) on one of four tokens, its mean taken off.
    error = torch.tensor([0.0, 5 / math.sqrt(4), 0.0, 0.0])
    expected = (error - error.mean()).square().mean() / 2
    assert math.isclose(probe.logit_mse, float(expected), rel_tol=1e-6)
