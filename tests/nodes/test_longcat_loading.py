"""Load World Model on LongCat-Video: both published layouts, fp8, what configurations say, and refusals."""

import importlib
import json

import pytest
import torch
from safetensors.torch import save_file

from support import longcat_case as case

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def loading(host):
    return importlib.import_module("quantwm_pack.world_models.loading")


@pytest.fixture(scope="module")
def longcat(host):
    return importlib.import_module("quantwm_pack.world_models.longcat")


@pytest.fixture(scope="module")
def checkpoint(host):
    return importlib.import_module("quantwm_pack.world_models.longcat.checkpoint")


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in case.weights().items()}


def repacked(checkpoint) -> dict[str, torch.Tensor]:
    """The same under the repack's names."""
    made = {}
    for name, tensor in weights().items():
        targets = checkpoint.renamed(name)
        made |= {target: part.contiguous() for target, part in zip(targets, tensor.chunk(len(targets)))}
    return made


def assert_loaded(model, expected: dict[str, torch.Tensor]) -> None:
    network = model.model.diffusion_model
    assert (type(network).__name__, network.num_heads, network.head_dim) == ("LongCatModel", case.HEADS, 128)
    loaded = network.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].to(tensor.dtype), tensor) for name, tensor in expected.items())


def official(folder, parts: int = 2, config: dict | None = None, scheduler: dict | None = None):
    """A checkpoint as it is downloaded: `dit/` in shards with its config.json, `scheduler/` beside it."""
    dit = folder / "LongCat-Video" / "dit"
    dit.mkdir(parents=True)
    stored = weights()
    names = [dit / f"diffusion_pytorch_model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
    for part, name in enumerate(names):
        save_file({key: stored[key] for key in list(stored)[part::parts]}, name)
    if config is not None:
        (dit / "config.json").write_text(json.dumps({"_class_name": "LongCatVideoTransformer3DModel"} | config))
    if scheduler is not None:
        other = folder / "LongCat-Video" / "scheduler"
        other.mkdir()
        named = {"_class_name": "FlowMatchEulerDiscreteScheduler"} | scheduler
        (other / "scheduler_config.json").write_text(json.dumps(named))
    return names


def test_official_shards_with_their_configurations(loading, longcat, checkpoint, tmp_path):
    files = official(tmp_path, config={"num_heads": 2, "text_tokens_zero_pad": False}, scheduler={"shift": 7.0})
    model = loading.load_world_model(str(files[1]))
    assert_loaded(model, repacked(checkpoint))
    assert model.get_model_object("model_sampling").shift == 7.0
    assert not model.model.diffusion_model.attends_padding
    assert longcat.describe(model) == (
        "LongCat-Video, 3 layers x 2 heads x 128\nshift 7 (scheduler_config.json)\n"
        "empty rows of the prompt left out (config.json)"
    )


def test_defaults_are_told_as_such(loading, longcat, tmp_path):
    model = loading.load_world_model(str(official(tmp_path)[0]))
    assert model.get_model_object("model_sampling").shift == 12.0
    assert "shift 12 (default)\nempty rows of the prompt attended (default)" in longcat.describe(model)


def test_configurations_of_other_models_are_left_alone(loading, longcat, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "text_tokens_zero_pad": False}))
    (tmp_path / "scheduler_config.json").write_text(json.dumps({"_class_name": "DDIMScheduler", "shift": 3.0}))
    save_file(repacked(checkpoint), tmp_path / "repack.safetensors")
    assert longcat.describe(loading.load_world_model(str(tmp_path / "repack.safetensors"))).count("(default)") == 2


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_repack_and_what_its_metadata_says(loading, longcat, checkpoint, tmp_path, prefix):
    config = {"transformer": {"text_tokens_zero_pad": True}, "scheduler": {"shift": 9}}
    path = tmp_path / "repack.safetensors"
    stored = {prefix + name: tensor for name, tensor in repacked(checkpoint).items()}
    save_file(stored, path, metadata={"config": json.dumps(config)})
    model = loading.load_world_model(str(path))
    assert_loaded(model, repacked(checkpoint))
    assert "shift 9 (metadata)\nempty rows of the prompt attended (metadata)" in longcat.describe(model)


def test_fp8_weights_run_with_the_hosts_casting(loading, checkpoint, tmp_path):
    """As the loader's weight_dtype makes them, and as the repack stores them: with a scale for each layer."""
    from support.longcat_run import run

    plain_file, scaled_file = tmp_path / "plain.safetensors", tmp_path / "scaled.safetensors"
    stored = repacked(checkpoint)
    save_file(stored, plain_file)
    scaled = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in stored.items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.ndim == 2 and name.startswith("blocks.") and "modulation" not in name:
            scale = tensor.float().abs().max() / 448
            scaled |= {name: (tensor.float() / scale).to(torch.float8_e4m3fn), f"{layer}.scale_weight": scale}
        else:
            scaled[name] = tensor
    save_file(scaled, scaled_file)
    version = case.VERSIONS["distilled"]
    plain = run(loading.load_world_model(str(plain_file)), version)
    for path, weight_dtype in ((plain_file, "fp8_e4m3fn"), (scaled_file, "default")):
        # As the server does it: quantised parameters are inference tensors from the start.
        with torch.inference_mode():
            out = run(loading.load_world_model(str(path), weight_dtype), version)
        off = float((out - plain).norm() / plain.norm())
        print(off)
        assert 0 < off < 0.2


def test_missing_weights_are_named(loading, tmp_path):
    stored = weights()
    del stored["blocks.1.attn.proj.bias"]
    save_file(stored, tmp_path / "broken.safetensors")
    with pytest.raises(
        ValueError, match=r"1 of \d+ weights are missing: blocks.1.self_attn.o.bias. Get the checkpoint"
    ):
        loading.load_world_model(str(tmp_path / "broken.safetensors"))


def test_missing_sizes_are_named(loading, tmp_path):
    stored = weights()
    del stored["final_layer.linear.weight"]
    save_file(stored, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="shows its sizes in head.head.weight, which this one lacks"):
        loading.load_world_model(str(tmp_path / "broken.safetensors"))


def test_the_avatar_is_refused(loading, tmp_path):
    stored = weights() | {"blocks.0.audio_cross_attn.proj.weight": torch.zeros(1)}
    save_file(stored, tmp_path / "avatar.safetensors")
    with pytest.raises(ValueError, match="is LongCat-Video-Avatar, which follows a voice"):
        loading.load_world_model(str(tmp_path / "avatar.safetensors"))


def test_a_lora_that_lacks_parts(host):
    lora = importlib.import_module("quantwm_pack.world_models.longcat.lora")
    broken = {name: tensor for name, tensor in case.lora().items() if "blocks.1.weight" not in name}
    with pytest.raises(ValueError, match="but not the . up matrices of that module"):
        lora.host_lora(broken)
