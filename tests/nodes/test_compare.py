"""Compare Worlds run by ComfyUI: outputs, pictures, refusals, and LPIPS only where its weights are."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from quantwm_core.picture_metrics import ssim

pytestmark = pytest.mark.host


@pytest.fixture
def run(host, monkeypatch, tmp_path):
    """Execute the node; returns its five outputs."""
    monkeypatch.setattr(importlib.import_module("folder_paths"), "temp_directory", str(tmp_path / "temp"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    node = importlib.import_module("quantwm_pack.nodes.compare").QuantWMCompare
    monkeypatch.setattr(node, "hidden", SimpleNamespace(unique_id="7", prompt=None, extra_pnginfo=None))

    def execute(reference, compared, gain=4.0, names=("full precision", "2 bits")):
        return node.execute(reference, compared, gain, *names).args

    return execute


def videos(frames=3, height=33, width=61, noise=0.02):
    generator = torch.Generator().manual_seed(height)
    first = torch.rand(frames, height, width, 3, generator=generator)
    return first, (first + noise * torch.randn(first.shape, generator=generator)).clamp(0, 1)


def test_outputs(run):
    first, second = videos()
    report, chart, pictures, psnr, similarity = run(first, second)
    assert psnr == pytest.approx(float(-10 * (first - second).double().square().mean().log10()), abs=1e-3)
    assert similarity == pytest.approx(sum(map(ssim, first, second)) / 3)
    assert report.startswith(f"PSNR {psnr:.2f} dB") and "2 bits against full precision" in report
    assert "LPIPS was not measured: it needs AlexNet's weights" in report
    assert json.loads(report.splitlines()[-1])["frames"] == 3
    assert chart.shape == (1, 560, 1280, 3) and chart.dtype == torch.float32
    assert pictures.shape[0] == 3 and pictures.dtype == torch.float32


@pytest.mark.parametrize(("height", "width"), [(33, 61), (48, 64), (11, 12)])
def test_side_by_side_holds_both_and_their_difference(run, height, width):
    first, second = videos(2, height, width)
    pictures = run(first, second, gain=3.0, names=("a name that is much longer than its column is wide", "b"))[2]
    assert pictures.shape[1] % 2 == pictures.shape[2] % 2 == 0
    strip = pictures.shape[1] - height
    columns = [pictures[:, strip:, left : left + width] for left in (0, width + 4, 2 * width + 8)]
    assert torch.equal(columns[0], first) and torch.equal(columns[1], second)
    assert torch.allclose(columns[2], (3 * (first - second).abs()).clamp(max=1))
    titles = pictures[:, :strip]
    assert titles.amax() > 0.5 and 0 <= titles.amin()


def test_equal_videos(run):
    first, _ = videos(1)
    report, _, _, psnr, similarity = run(first, first.clone(), names=(" ", ""))
    assert psnr == 100 and similarity == pytest.approx(1, abs=1e-6)
    assert report.startswith("PSNR equal") and "compared against reference" in report


def test_lengths_may_differ_but_sizes_may_not(run):
    first, second = videos(5)
    report, _, pictures, psnr, _ = run(first, second[:2])
    assert "lengths differ (5 and 2)" in report and len(pictures) == 2
    assert psnr == run(first[:2], second[:2])[3]
    with pytest.raises(ValueError, match="61 x 33 and 60 x 33"):
        run(first, second[:, :, :60])


def test_an_interrupt_stops_it(run):
    management = importlib.import_module("comfy.model_management")
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        run(*videos())
    assert run(*videos())[3] > 20


def test_lpips_where_its_weights_are(run, tmp_path):
    """With random weights under the name of the real ones: what is asked for is what is measured."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    name = torchvision.models.AlexNet_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(torchvision.models.alexnet(weights=None).state_dict(), folder / name)
    first, second = videos(2, 64, 72, noise=0.2)
    report, chart, *_ = run(first, second)
    record = json.loads(report.splitlines()[-1])
    assert record["lpips"] > 0 and len(record["lpips_each"]) == 2 and "not measured" not in report
    assert json.loads(run(first, first)[0].splitlines()[-1])["lpips"] == pytest.approx(0, abs=1e-6)
    assert chart.shape == (1, 560, 1280, 3)
    assert "at least 31 x 31 pixels" in run(*videos(1, 20, 72))[0]
    assert json.loads(run(*videos(1, 31, 31))[0].splitlines()[-1])["lpips"] > 0


@pytest.mark.parametrize("frames", [1, 2, 7, 41, 400])
@pytest.mark.parametrize("error", [0.0, 1e-9, 0.25])
def test_chart_of_any_length_and_distance(host, frames, error):
    core = importlib.import_module("quantwm_pack.quantwm_core.comparison")
    charts = importlib.import_module("quantwm_pack.nodes.comparison_chart")
    result = core.Comparison((frames, frames), (64, 48), [error] * frames, [1 - error] * frames, [error] * (frames - 1))
    assert charts.comparison_chart(result, ("a", "b")).size == (charts.WIDTH, charts.HEIGHT)
    result.lpips = [error] * frames
    assert charts.comparison_chart(result, ("a", "b")).size == (charts.WIDTH, charts.HEIGHT)
