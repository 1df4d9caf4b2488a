"""The tiny world's picture codec: a small convolutional autoencoder, and its form as a ComfyUI VAE.

One video frame is one latent frame: 128x192 pixels become 16 channels of 16x24. The model works on latents of
zero mean and unit variance. ComfyUI converts between those and what a VAE hands out through the latent format
of the model (Wan 2.1's, per channel), so the codec hands out latents in that raw form, like Wan's own VAE.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import comfy.latent_formats
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS_DIR = Path(__file__).parent / "weights"
CODEC_FILE = WEIGHTS_DIR / "codec.safetensors"

LATENT_CHANNELS = 16
DOWNSCALE = 8

_ops = comfy.ops.disable_weight_init


@dataclass(frozen=True)
class CodecConfig:
    """Sizes of the autoencoder: base width, and residual blocks at 1/2, 1/4 and 1/8 of the picture's size."""

    width: int = 64
    residuals: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def from_metadata(cls, metadata: dict[str, str] | None) -> CodecConfig:
        """The sizes written into a weight file by `metadata`."""
        stored = json.loads((metadata or {}).get("codec", "{}"))
        return cls(**{**stored, "residuals": tuple(stored.get("residuals", (0, 0, 0)))})

    def metadata(self) -> dict[str, str]:
        """What a weight file must say for `from_metadata`."""
        return {"codec": json.dumps(asdict(self))}


class _Residual(nn.Module):
    """Two 3x3 convolutions around which the input passes unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _ops.Conv2d(channels, channels, 3, padding=1)
        self.second = _ops.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


def _residuals(channels: int, count: int) -> list[nn.Module]:
    return [_Residual(channels) for _ in range(count)]


def _encoder(config: CodecConfig) -> nn.Sequential:
    width, (half, quarter, eighth) = config.width, config.residuals
    return nn.Sequential(
        _ops.Conv2d(3, width, 4, stride=2, padding=1),
        *_residuals(width, half),
        nn.SiLU(),
        _ops.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        *_residuals(2 * width, quarter),
        nn.SiLU(),
        _ops.Conv2d(2 * width, 2 * width, 4, stride=2, padding=1),
        *_residuals(2 * width, eighth),
        nn.SiLU(),
        _ops.Conv2d(2 * width, LATENT_CHANNELS, 1),
    )


def _upsample(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [_ops.Conv2d(channels_in, 4 * channels_out, 1), nn.PixelShuffle(2)]


def _decoder(config: CodecConfig) -> nn.Sequential:
    width, (half, quarter, eighth) = config.width, config.residuals
    return nn.Sequential(
        _ops.Conv2d(LATENT_CHANNELS, 2 * width, 3, padding=1),
        nn.SiLU(),
        _ops.Conv2d(2 * width, 2 * width, 3, padding=1),
        *_residuals(2 * width, eighth),
        nn.SiLU(),
        *_upsample(2 * width, width),
        nn.SiLU(),
        _ops.Conv2d(width, width, 3, padding=1),
        *_residuals(width, quarter),
        nn.SiLU(),
        *_upsample(width, width),
        nn.SiLU(),
        _ops.Conv2d(width, width, 3, padding=1),
        *_residuals(width, half),
        nn.SiLU(),
        *_upsample(width, 3),
    )


class TinyWorldCodec(nn.Module):
    """Autoencoder between pictures in [-1, 1] and the model's normalised latents."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _encoder(config)
        self.decoder = _decoder(config)
        self.register_buffer("latent_mean", torch.zeros(LATENT_CHANNELS, 1, 1))
        self.register_buffer("latent_std", torch.ones(LATENT_CHANNELS, 1, 1))

    def encode_frames(self, frames: Tensor) -> Tensor:
        """Pictures [N, 3, H, W] in [-1, 1] to normalised latents [N, 16, H/8, W/8]."""
        latent = self.encoder(frames)
        return (latent - self.latent_mean.to(latent)) / self.latent_std.to(latent)

    def decode_frames(self, latents: Tensor) -> Tensor:
        """Normalised latents [N, 16, h, w] to pictures [N, 3, 8h, 8w], in [-1, 1] give or take."""
        return self.decoder(latents * self.latent_std.to(latents) + self.latent_mean.to(latents))


class _VideoCodec(TinyWorldCodec):
    """The codec with the interface of a ComfyUI `first_stage_model`: video in, raw Wan 2.1 latents out."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config)
        self.latent_format = comfy.latent_formats.Wan21()

    def encode(self, video: Tensor) -> Tensor:
        """Video [B, 3, T, H, W] in [-1, 1] to raw latents [B, 16, T, H/8, W/8]."""
        batch = video.shape[0]
        latent = self.encode_frames(video.movedim(2, 1).flatten(0, 1)).unflatten(0, (batch, -1))
        return self.latent_format.process_out(latent.movedim(1, 2))

    def decode(self, latent: Tensor) -> Tensor:
        """Raw latents [B, 16, T, h, w] to video [B, 3, T, 8h, 8w]; four dimensions mean T = 1."""
        if latent.ndim == 4:
            latent = latent.unsqueeze(2)
        batch = latent.shape[0]
        latent = self.latent_format.process_in(latent).movedim(2, 1).flatten(0, 1)
        return self.decode_frames(latent).unflatten(0, (batch, -1)).movedim(1, 2)


class TinyWorldVAE(comfy.sd.VAE):
    """The codec as the VAE object that the stock VAE nodes take.

    ComfyUI recognises a VAE by its weights' names and has no entry for ours, so this fills in the fields that
    its constructor would have set and inherits everything else.
    """

    def __init__(self, codec: _VideoCodec) -> None:
        self.first_stage_model = codec.eval().requires_grad_(False)
        self._describe_format()
        self._describe_memory(codec.config)
        self._place()

    def _describe_format(self) -> None:
        self.latent_channels = LATENT_CHANNELS
        self.latent_dim = 3
        self.output_channels = 3
        self.upscale_ratio = (_same_frames, DOWNSCALE, DOWNSCALE)
        self.upscale_index_formula = (1, DOWNSCALE, DOWNSCALE)
        self.downscale_ratio = (_same_frames, DOWNSCALE, DOWNSCALE)
        self.downscale_index_formula = (1, DOWNSCALE, DOWNSCALE)
        self.process_input = _to_signed
        self.process_output = _to_unsigned
        self.crop_input = True
        self.not_video = False
        self.handles_tiling = False
        self.format_encoded = None
        self.pad_channel_value = None
        self.extra_1d_channel = None
        self.audio_sample_rate = 44100

    def _describe_memory(self, config: CodecConfig) -> None:
        # Three activations of the widest layer, at half the picture's size, are alive at once.
        per_pixel = 3 * 4 * config.width / 4
        self.memory_used_encode = lambda shape, dtype: per_pixel * _volume(shape) * dtype.itemsize
        self.memory_used_decode = lambda shape, dtype: per_pixel * DOWNSCALE**2 * _volume(shape) * dtype.itemsize

    def _place(self) -> None:
        management = comfy.model_management
        self.device = management.vae_device()
        self.output_device = management.intermediate_device()
        self.working_dtypes = [torch.float32]
        self.vae_dtype = torch.float32
        self.first_stage_model.to(self.vae_dtype)
        management.archive_model_dtypes(self.first_stage_model)
        # A few megabytes: always loaded whole, so the plain patcher serves.
        self.disable_offload = True
        self.patcher = comfy.model_patcher.ModelPatcher(
            self.first_stage_model, load_device=self.device, offload_device=management.vae_offload_device()
        )
        self.size = management.module_size(self.first_stage_model)


def _same_frames(count: int) -> int:
    return count


def _to_signed(image: Tensor) -> Tensor:
    return image * 2.0 - 1.0


def _to_unsigned(image: Tensor) -> Tensor:
    return image.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


def _volume(shape: torch.Size) -> int:
    """Frames times height times width of a [B, C, T, H, W] or [B, C, H, W] shape."""
    frames = shape[2] if len(shape) == 5 else 1
    return frames * shape[-2] * shape[-1]


def load_codec(path: Path = CODEC_FILE) -> TinyWorldCodec:
    """The bare autoencoder from a weight file, on the CPU in float32."""
    return _load(TinyWorldCodec, path)


def load_codec_vae(path: Path = CODEC_FILE) -> TinyWorldVAE:
    """The codec as a ComfyUI VAE: VAEEncode makes [1, 16, T, h, w] of T images, VAEDecode the reverse."""
    return TinyWorldVAE(_load(_VideoCodec, path))


def _load(kind: type[TinyWorldCodec], path: Path) -> TinyWorldCodec:
    weights, metadata = comfy.utils.load_torch_file(str(path), safe_load=True, return_metadata=True)
    codec = kind(CodecConfig.from_metadata(metadata))
    codec.load_state_dict(weights)
    return codec
