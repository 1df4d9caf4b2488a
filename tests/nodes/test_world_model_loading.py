"""Load World Model reads each layout that authors publish, and says what it found where it cannot."""

import importlib
import json
import subprocess

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.host

TEXT_DIM = 24


@pytest.fixture(scope="module")
def loading(host):
    return importlib.import_module("quantwm_pack.world_models.loading")


def wan_weights(dim: int = 256, heads: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """State dictionary of a two-layer autoregressive Wan with random bf16 weights."""
    import comfy.ops
    from comfy.ldm.wan.ar_model import CausalWanModel

    model = CausalWanModel(
        dim=dim,
        ffn_dim=64,
        num_heads=heads,
        num_layers=2,
        text_dim=TEXT_DIM,
        dtype=torch.bfloat16,
        operations=comfy.ops.disable_weight_init,
    )
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.randn(value.shape, generator=generator) * 0.05).to(torch.bfloat16)
        for key, value in model.state_dict().items()
    }


def assert_loaded(model, weights: dict[str, torch.Tensor], heads: int) -> None:
    network = model.model.diffusion_model
    assert type(network).__name__ == "CausalWanModel"
    assert network.num_heads == heads and len(network.blocks) == 2
    loaded = network.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key].to(weights[key].dtype), weights[key]) for key in weights)


def test_safetensors_with_marker(loading, tmp_path):
    weights = wan_weights(dim=96)
    config = {"transformer": {"causal_ar": True, "num_heads": 2, "text_dim": TEXT_DIM}}
    path = tmp_path / "marked.safetensors"
    save_file(weights, path, metadata={"config": json.dumps(config)})
    assert_loaded(loading.load_world_model(str(path)), weights, heads=2)


def test_safetensors_without_marker(loading, tmp_path):
    weights = wan_weights()
    path = tmp_path / "bare.safetensors"
    save_file(weights, path)
    assert_loaded(loading.load_world_model(str(path)), weights, heads=2)


def test_safetensors_keeps_other_metadata(loading, tmp_path):
    weights = wan_weights(dim=96)
    path = tmp_path / "heads_only.safetensors"
    save_file(weights, path, metadata={"config": json.dumps({"transformer": {"num_heads": 4}}), "author": "x"})
    assert_loaded(loading.load_world_model(str(path)), weights, heads=4)


PREFIXES = ["", "model.", "model._fsdp_wrapped_module.", "model.diffusion_model."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("generator", ["generator", "generator_ema"])
def test_official_pt(loading, tmp_path, generator, prefix):
    weights = wan_weights()
    path = tmp_path / "official.pt"
    torch.save({generator: {prefix + key: value for key, value in weights.items()}}, path)
    assert_loaded(loading.load_world_model(str(path)), weights, heads=2)


def test_official_pt_prefers_averaged_weights(loading, tmp_path):
    trained, averaged = wan_weights(seed=1), wan_weights(seed=2)
    path = tmp_path / "both.pt"
    torch.save(
        {
            "generator": {f"model.{key}": value for key, value in trained.items()},
            "critic": {"head.modulation": torch.zeros(1)},
            "generator_ema": {f"model._fsdp_wrapped_module.{key}": value for key, value in averaged.items()},
            "step": 600,
        },
        path,
    )
    assert_loaded(loading.load_world_model(str(path)), averaged, heads=2)


def test_flat_safetensors_prefers_averaged_weights(loading, tmp_path):
    trained, averaged = wan_weights(seed=1), wan_weights(seed=2)
    path = tmp_path / "flat.safetensors"
    save_file(
        {f"generator.model.{key}": value for key, value in trained.items()}
        | {f"generator_ema.model.{key}": value for key, value in averaged.items()},
        path,
    )
    assert_loaded(loading.load_world_model(str(path)), averaged, heads=2)


def test_wrappers_inside_names(loading, tmp_path):
    weights = wan_weights()
    path = tmp_path / "wrapped.pt"
    wrapped = {
        "model._fsdp_wrapped_module." + key.replace("self_attn.", "_checkpoint_wrapped_module.self_attn."): value
        for key, value in weights.items()
    }
    torch.save({"generator_ema": wrapped}, path)
    assert_loaded(loading.load_world_model(str(path)), weights, heads=2)


def test_weight_dtype_and_reload(loading, tmp_path):
    path = tmp_path / "bare.safetensors"
    save_file(wan_weights(), path)
    model = loading.load_world_model(str(path), "fp8_e4m3fn")
    assert model.model.get_dtype() == torch.float8_e4m3fn
    # ComfyUI reloads a model this way for a second GPU and for nodes that need a plain patcher.
    reload, arguments = model.cached_patcher_init
    again = reload(*arguments, disable_dynamic=True)
    assert again.model.get_dtype() == torch.float8_e4m3fn and not again.is_dynamic()


def test_not_wan(loading, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"decoder.weight": torch.zeros(3, 5)}, path)
    with pytest.raises(ValueError, match=r"not a Wan checkpoint.*1 entry: decoder.weight \(3, 5\)"):
        loading.load_world_model(str(path))


def test_pickle_with_code(loading, tmp_path):
    path = tmp_path / "code.pt"
    torch.save({"generator": subprocess.Popen}, path)
    with pytest.raises(ValueError, match="holds more than weights"):
        loading.load_world_model(str(path))


def test_unknown_number_of_heads(loading, tmp_path):
    path = tmp_path / "narrow.safetensors"
    save_file(wan_weights(dim=96), path)
    with pytest.raises(ValueError, match="96 wide.*num_heads"):
        loading.load_world_model(str(path))


def test_image_conditioned_wan(loading, tmp_path):
    weights = wan_weights() | {"img_emb.proj.0.bias": torch.zeros(8), "img_emb.proj.0.weight": torch.zeros(8)}
    path = tmp_path / "i2v.safetensors"
    save_file(weights, path)
    with pytest.raises(ValueError, match="does not load it as an autoregressive model"):
        loading.load_world_model(str(path))


def lingbot_weights(dim: int = 256, **kind) -> dict[str, torch.Tensor]:
    """State dictionary of a two-layer LingBot-World with random bf16 weights."""
    import comfy.ops

    network = importlib.import_module("quantwm_pack.world_models.lingbot.network")
    sizes = {"dim": dim, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": TEXT_DIM, "in_dim": 36} | kind
    operations = comfy.ops.disable_weight_init
    made = network.LingBotModel(**sizes, dtype=torch.bfloat16, device="meta", operations=operations)
    generator = torch.Generator().manual_seed(0)
    return {
        key: (torch.randn(value.shape, generator=generator) * 0.05).to(torch.bfloat16)
        for key, value in made.state_dict().items()
    }


def save_in_parts(weights: dict[str, torch.Tensor], folder, parts: int = 3) -> list:
    files = [folder / f"diffusion_pytorch_model-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
    names = list(weights)
    for i, file in enumerate(files):
        save_file({name: weights[name] for name in names[i::parts]}, file)
    return files


def assert_lingbot(model, weights: dict[str, torch.Tensor]) -> None:
    network = model.model.diffusion_model
    assert type(network).__name__ == "LingBotModel" and type(model.model).__name__ == "LingBotWorld"
    assert network.num_heads == 2 and len(network.blocks) == 2
    loaded = network.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key].to(weights[key].dtype), weights[key]) for key in weights)


def test_lingbot_in_one_file(loading, tmp_path):
    weights = lingbot_weights()
    path = tmp_path / "lingbot.safetensors"
    save_file({f"model.{key}": value for key, value in weights.items()}, path)
    model = loading.load_world_model(str(path))
    assert_lingbot(model, weights)
    reload, arguments = model.cached_patcher_init
    assert_lingbot(reload(*arguments, disable_dynamic=True), weights)


@pytest.mark.parametrize("part", [0, 2])
def test_lingbot_in_parts_whichever_is_chosen(loading, tmp_path, part):
    weights = lingbot_weights(dim=96)
    files = save_in_parts(weights, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModelFast", "num_heads": 2}))
    assert_lingbot(loading.load_world_model(str(files[part])), weights)


def test_a_missing_part_is_named(loading, tmp_path):
    files = save_in_parts(lingbot_weights(), tmp_path)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"one of 3 parts, and 1 of them are missing: .*00002-of-00003"):
        loading.load_world_model(str(files[0]))


def test_parts_are_listed_once(loading):
    names = ["a.safetensors", "b/m-00001-of-00002.safetensors", "b/m-00002-of-00002.safetensors", "c.pt"]
    assert loading.one_of_each(names) == [names[0], names[1], names[3]]


@pytest.mark.parametrize(
    "layer", ["patch_embedding_wancamctrl.weight", "blocks.1.cam_shift_layer.bias", "c2ws_hidden_states_layer2.weight"]
)
def test_lingbot_without_a_camera_layer(loading, tmp_path, layer):
    weights = lingbot_weights()
    del weights[layer]
    path = tmp_path / "incomplete.safetensors"
    save_file(weights, path)
    with pytest.raises(ValueError, match=rf"1 of 22 weights of its camera layers are missing: {layer}"):
        loading.load_world_model(str(path))


def test_lingbot_without_any_camera_layer(loading, tmp_path):
    weights = {key: value for key, value in lingbot_weights().items() if "cam" not in key and "c2ws" not in key}
    path = tmp_path / "plain_i2v.safetensors"
    save_file(weights, path)
    with pytest.raises(ValueError, match="22 of 22 weights of its camera layers are missing.*Load Diffusion Model"):
        loading.load_world_model(str(path))


def test_lingbot_that_takes_key_presses(loading, tmp_path):
    weights = lingbot_weights(camera_channels=7)
    path = tmp_path / "act.safetensors"
    save_file(weights, path)
    model = loading.load_world_model(str(path))
    assert_lingbot(model, weights)
    assert model.model.diffusion_model.takes_keys


@pytest.mark.parametrize("width", [1535, 1280, 3072])
def test_lingbot_that_takes_something_else(loading, tmp_path, width):
    weights = lingbot_weights() | {"patch_embedding_wancamctrl.weight": torch.zeros(256, width)}
    path = tmp_path / "other.safetensors"
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"takes {width} camera numbers a token; known are 1536 or 1792"):
        loading.load_world_model(str(path))


def test_host_without_autoregressive_wan(loading, tmp_path, monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ComfyUI 0\.\d+\.\d+ cannot sample autoregressive.*Update ComfyUI"):
        loading.load_world_model(str(tmp_path / "any.safetensors"))
