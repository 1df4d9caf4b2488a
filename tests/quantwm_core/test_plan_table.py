"""What is chosen for a budget, the longest video that fits, and the words around them."""

from dataclasses import replace

import pytest

from quantwm_core import METHODS, CacheGeometry, CacheSettings
from quantwm_core.plan_table import GB, QUALITY_ORDER, World, format_plan, make_plan, require_choice
from quantwm_core.planning import plan_bytes

CAUSAL_FORCING = World(CacheGeometry(30, 12, 128), 1560)


@pytest.mark.parametrize(
    ("gigabytes", "chosen"),
    [
        (80, CacheSettings("off", 16, 16)),
        (4.1, CacheSettings("quantwm", 8, 8)),
        (2.5, CacheSettings("quantwm", 4, 4)),
        (2, CacheSettings("quantwm", 4, 2)),
        (1.7, CacheSettings("quantwm", 2, 2)),
        (0.7, CacheSettings("quantwm", 2, 2, cache_device="cpu")),
    ],
)
def test_the_best_picture_that_fits_is_chosen(gigabytes, chosen):
    plan = make_plan(CAUSAL_FORCING, 93, 3, round(gigabytes * GB))
    assert require_choice(plan) == chosen
    better = plan.rows[: QUALITY_ORDER.index(chosen)]
    assert plan.chosen.cache.peak <= plan.budget and not any(plan.fits(row) for row in better)


def test_every_method_is_listed():
    plan = make_plan(CAUSAL_FORCING, 93, 3, 2 * GB)
    assert {row.settings.method for row in plan.rows} == set(METHODS)
    lines = format_plan(plan).splitlines()
    assert len(lines) == len(plan.rows) + 4 and sum(line.startswith("*") for line in lines) == 2
    assert "93 frames (5.8 s)" in next(line for line in lines if line.startswith("*  quantwm"))


def test_the_longest_video_fits_and_one_more_block_does_not():
    budget = 2 * GB
    for row in make_plan(CAUSAL_FORCING, 5, 3, budget).rows:
        latents = CAUSAL_FORCING.latents(row.longest)
        assert latents % 3 == 0 and CAUSAL_FORCING.frames(latents) == row.longest
        whole = plan_bytes(row.settings, CAUSAL_FORCING.geometry, [3 * 1560] * (latents // 3))
        longer = plan_bytes(row.settings, CAUSAL_FORCING.geometry, [3 * 1560] * (latents // 3 + 1))
        assert whole.peak <= budget < longer.peak


def test_a_video_that_fits_is_never_called_too_long():
    """Its last block may be short, and a whole one too much."""
    exact = plan_bytes(CacheSettings("off"), CAUSAL_FORCING.geometry, [4680, 1560]).peak
    (row, *_) = make_plan(CAUSAL_FORCING, 13, 3, exact).rows
    assert row.longest == 13 and row.cache.peak == exact


def test_refusals_name_rule_value_and_remedy():
    with pytest.raises(ValueError, match=r"budget of 800 MiB; 900 frames need at least .* lower length to \d+, or let"):
        require_choice(make_plan(CAUSAL_FORCING, 900, 3, 800 << 20))
    with pytest.raises(ValueError, match="lower width and height"):
        require_choice(make_plan(CAUSAL_FORCING, 900, 3, 1 << 20))
    for wrong, words in (((0, 3, GB), "length"), ((5, 0, GB), "frames_per_block"), ((5, 3, 0), "budget")):
        with pytest.raises(ValueError, match=words):
            make_plan(CAUSAL_FORCING, *wrong)


def test_without_a_budget_nothing_is_chosen():
    plan = make_plan(CAUSAL_FORCING, 93, 3)
    assert plan.chosen is None and "no budget" in format_plan(plan)
    with pytest.raises(ValueError, match="Give one"):
        require_choice(plan)


def test_corrected_attention_decodes_a_second_layer():
    plain, corrected = (
        plan_bytes(CacheSettings(jensen=jensen), CAUSAL_FORCING.geometry, [4680] * 4) for jensen in ("off", "exact")
    )
    assert corrected.workspace == 2 * plain.workspace == 2 * CAUSAL_FORCING.geometry.bytes_bf16(4 * 4680) // 30


def test_given_frames_are_remembered_once_for_both_prompts():
    assert CAUSAL_FORCING.guided(True).conditionings == 2 and CAUSAL_FORCING.guided(False).conditionings == 1
    assert replace(CAUSAL_FORCING, prefilled=True).guided(True).conditionings == 1
