"""Memory Planner against real runs of a small causal Wan model in the real host."""

import importlib
from types import SimpleNamespace

import pytest
from host.small_world import TOKENS_PER_FRAME, load_model, run

WIDTH, HEIGHT = 64, 48  # latents of 6 x 8
CASES = [
    (method, bits)
    for method in ("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")
    for bits in ((2, 2), (4, 2), (8, 8))
] + [("off", (16, 16)), ("quantwm", (2, 16)), ("quantwm-paper", (16, 2))]


@pytest.fixture(scope="module")
def model(host):
    return load_model(256)


@pytest.fixture(scope="module")
def core(host):
    return SimpleNamespace(
        settings=host.quantwm_core.CacheSettings,
        planning=importlib.import_module("quantwm_pack.quantwm_core.planning"),
        table=importlib.import_module("quantwm_pack.quantwm_core.plan_table"),
    )


@pytest.fixture
def planner(host, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("folder_paths"), "temp_directory", str(tmp_path))
    node = importlib.import_module("quantwm_pack.nodes.planner").QuantWMPlanner
    monkeypatch.setattr(node, "hidden", SimpleNamespace(unique_id="5", prompt=None, extra_pnginfo=None))
    return node


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_a_real_run_takes_what_was_planned(host, model, core, method, bits):
    frames, block = 20, 3
    world = host.world_models.world_of(model, WIDTH, HEIGHT)
    assert world.frame_tokens == TOKENS_PER_FRAME and world.frames(frames) == 77
    settings = core.settings(method, *bits)
    blocks = [3 * TOKENS_PER_FRAME] * 6 + [2 * TOKENS_PER_FRAME]
    planned = core.planning.plan_bytes(settings, world.geometry, blocks, world.element_bytes)
    packed, handle = host.world_models.attach(model, settings)
    run(packed, frames, block)
    record = handle.record
    resident = record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]
    assert planned.tokens == record["tokens"] and planned.workspace == record["bytes_workspace_peak"]
    assert (planned.unpacked, planned.state) == (record["bytes_unpacked"], record["bytes_state"])
    assert planned.packed == pytest.approx(record["bytes_packed"], rel=0.02)
    assert planned.resident == pytest.approx(resident, rel=0.02)


def test_the_node_chooses_for_a_budget_and_the_run_keeps_to_it(host, model, core, planner):
    world = host.world_models.world_of(model, WIDTH, HEIGHT)
    plan = core.table.make_plan(world, 361, 3)
    peaks = {(row.settings.method, row.settings.key_bits): row.cache.peak for row in plan.rows[:4]}
    # Room for 4 bits, and for nothing better.
    budget = (peaks["quantwm", 4] + min(peaks["quantwm", 8], peaks["off", 16])) / 2
    result = planner.execute(model, WIDTH, HEIGHT, 361, 3, budget / core.table.GB)
    settings, report, chart = result.args
    assert settings == core.settings("quantwm", 4, 4) and "quantwm, keys 4 bit, values 4 bit" in report
    assert chart.shape[0] == 1 and chart.shape[2:] == (1280, 3) and result.ui["text"] == (report,)
    packed, handle = host.world_models.attach(model, settings)
    run(packed, 91, 3)
    record = handle.record
    resident = record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]
    assert resident + record["bytes_workspace_peak"] <= budget


def test_without_a_budget_the_free_memory_is_taken(model, planner, core):
    settings, report, _ = planner.execute(model, WIDTH, HEIGHT, 81, 3, 0.0).args
    assert settings == core.settings("off", 16, 16) and "budget" in report
    # Small random models run on the CPU here: blocks that lie there already cannot be moved away.
    assert model.load_device.type != "cpu" or "on the CPU" not in report


def test_refusals(host, model, core, planner, monkeypatch):
    with pytest.raises(ValueError, match=r"budget of .* need at least .* Raise the budget, lower length to \d+"):
        planner.execute(model, WIDTH, HEIGHT, 4001, 3, 2e-3)
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "get_free_memory", lambda device: 1 << 20)
    with pytest.raises(ValueError, match=r"1 MiB are free .* Set budget"):
        planner.execute(model, WIDTH, HEIGHT, 81, 3, 0.0)
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=object()))
    with pytest.raises(ValueError, match="needs an autoregressive world model"):
        planner.execute(other, WIDTH, HEIGHT, 81, 3, 1.0)


@pytest.mark.parametrize(("share", "large", "small"), [(0.0, True, False), (0.5, True, True), (100.0, False, True)])
def test_chart_shows_what_fits_at_any_budget(host, model, core, share, large, small):
    """share: of the largest peak in the table, with the smallest one at 0."""
    charts = importlib.import_module("quantwm_pack.nodes.plan_chart")
    world = host.world_models.world_of(model, WIDTH, HEIGHT)
    peaks = [row.cache.peak for row in core.table.make_plan(world, 401, 3).rows]
    budget = round(min(peaks) - 1 + share * (max(peaks) - min(peaks)))
    plan = core.table.make_plan(world, 401, 3, budget)
    image = charts.plan_chart(plan)
    middles = [charts.HEADER + charts.ROW * index + charts.ROW // 2 for index in range(len(plan.rows))]
    red = sum(image.getpixel((charts.BARS + 1, y))[0] > 200 for y in middles)
    assert red == sum(not plan.fits(row) for row in plan.rows)
    assert (red > 0, red < len(middles)) == (large, small)


@pytest.mark.parametrize("method", ["quantwm", "rtn", "off"])
def test_guidance_is_planned_as_it_runs(host, model, core, method):
    settings = core.settings(method, *((16, 16) if method == "off" else (2, 2)))
    world = host.world_models.world_of(model, WIDTH, HEIGHT)
    plan = core.planning.CachePlan(settings, world.geometry, world.element_bytes, conditionings=2)
    for _ in range(6):
        plan.append(3 * TOKENS_PER_FRAME)
    packed, handle = host.world_models.attach(model, settings)
    run(packed, 18, 3, cfg=3.0)
    record, planned = handle.record, plan.bytes()
    resident = record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]
    assert planned.resident == pytest.approx(resident, rel=0.02) and planned.bf16 == record["bytes_bf16"]


def test_the_node_plans_for_guidance(model, planner, core):
    alone, both = (planner.execute(model, WIDTH, HEIGHT, 81, 3, 1.0, guidance=on).args[1] for on in (False, True))
    assert "x 2 prompts (cfg)" in both and "prompts" not in alone
