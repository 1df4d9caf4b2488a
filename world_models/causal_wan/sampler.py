"""A sampler that rolls a video out block by block, as the host's ar_video does, and can forget and change its mind.

With nothing but `frames_per_block` set it gives the host's result bit for bit. Beyond that:
- a window and a sink: blocks that are too old leave the cache, whose memory then stops growing;
- context noise: a finished block is shown to the model at this noise level when it is stored (Self-Forcing,
  arXiv 2506.08009, trains for it);
- prompts that change at given blocks, with the text's keys and values computed anew;
- guidance: with a cfg other than 1 each conditioning has a cache of its own (`streams`);
- UniPC, for models that are not distilled to few steps;
- progress that counts every forward, and the whole video as the denoised output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from comfy.sampler_helpers import convert_cond
from tqdm.auto import tqdm

from ...quantwm_core.memory import Bank, CameraMotion, CameraPath, MemorySettings, Pose, PosePath
from ...quantwm_core.window import RolloutSettings, Window
from ..lingbot import camera_of, solver_of, window_of
from .history import open_history
from .solver import UniPC
from .streams import CacheStreams, ask_each_alone

# Under which a CONDITIONING says how the camera moves: turn rate, orbit, phase, as `CameraMotion`.
CAMERA_KEY = "camera_motion"
WRAPPER_KEY = "quantwm_world_sampler"


@dataclass(frozen=True)
class PromptChange:
    """From the block of this number on, counted from 1 as generated, another CONDITIONING."""

    block: int
    conditioning: list


class WorldSampler(comfy.samplers.KSAMPLER):
    """ComfyUI SAMPLER. Holds what the node was told; everything of a run lives in `Rollout`."""

    def __init__(
        self,
        settings: RolloutSettings,
        prompts: Sequence[PromptChange] = (),
        on_block: Callable[[dict], None] | None = None,
        memory: MemorySettings | None = None,
    ) -> None:
        super().__init__(self._roll_out)
        if memory is not None and memory.retrieves and not settings.window:
            raise ValueError(
                "retrieval brings back what has left the window; window is 0, so nothing leaves. Set window in World "
                "Sampler, or retrieval in World Memory to off."
            )
        self.settings = settings
        self.memory = memory
        self.prompts = tuple(prompts)
        self.on_block = on_block

    def sample(self, model_wrap, sigmas, extra_args, callback, noise, *args, **kwargs):
        """As the host calls it; progress counts every forward of every block, not the steps of one."""
        if callback is not None:
            given = given_latent(extra_args["model_options"])
            frames = noise.shape[2] - (0 if given is None else given.shape[2])
            total = len(self.settings.block_lengths(frames)) * len(sigmas)
            show = callback

            def callback(step, denoised, x, _steps):
                show(step, denoised, x, total)

        return super().sample(model_wrap, sigmas, extra_args, callback, noise, *args, **kwargs)

    def _roll_out(self, model, x, sigmas, extra_args=None, callback=None, disable=None):
        return Rollout(self, model, x, sigmas, extra_args or {}, callback).run(disable)


class Rollout:
    """One run of a `WorldSampler`: `x` is the noise `[B, C, T, H, W]`, `model` the host's denoiser around a guider."""

    def __init__(
        self,
        sampler: WorldSampler,
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: dict,
        callback: Callable | None,
    ) -> None:
        self.settings = sampler.settings
        self.on_block = sampler.on_block
        self.model = model
        self.guider = model.inner_model
        self.base_model = self.guider.inner_model
        self.x = x
        self.sigmas = sigmas
        self.levels = sigmas.tolist()
        self.extra_args = extra_args
        self.callback = callback
        self.steps_done = 0
        self.network = _causal_network(self.base_model, x)
        self.frame_tokens = _tokens_per_frame(self.network, x)
        self.given = self._prepare_given()
        self.window = Window(self.settings)
        self.solver = self.settings.solver
        if self.solver == "automatic":
            self.solver = solver_of(self.guider.conds) or "few-step"
        self._check_one_window()
        self.memory = sampler.memory or MemorySettings(retrieval="off")
        self.bank = Bank(self.memory)
        camera = camera_of(self.guider.conds)
        self.path = CameraPath() if camera is None else PosePath(camera.chained())
        self.prompts = {change.block: self._encode(change.conditioning) for change in sampler.prompts}
        self.output = torch.zeros_like(x)

    def run(self, disable: bool | None = None) -> torch.Tensor:
        """The finished latent."""
        batch, _, frames = self.x.shape[:3]
        given = 0 if self.given is None else self.given.shape[2]
        dtype, device = self.base_model.get_dtype(), self.x.device
        room = self.settings.room(frames, given, self.memory.returning) * self.frame_tokens
        self.caches = self._open_caches(batch, room)
        self.text_caches = self.network.init_crossattn_caches(batch, device, dtype)
        self.history = open_history(self.caches, self.memory, self.frame_tokens, device)
        original = self.guider.conds
        try:
            if given:
                self._remember_given()
            lengths = self.settings.block_lengths(frames - given)
            for number, length in enumerate(tqdm(lengths, disable=disable)):
                self._make_block(number, slice(given, given + length))
                given += length
                self._report(number, len(lengths), given, frames)
            # What had come back is in the bank as well: the run's record shall count it once.
            self.history.recall(())
        finally:
            self.guider.conds = original
            self._transformer_options.pop("ar_state", None)
        return self.output

    def _open_caches(self, batch: int, tokens: int) -> CacheStreams:
        """Room for `tokens` tokens of every conditioning: in the host's own caches, unless a node has patched them."""
        shape = (batch, tokens, self.x.device, self.base_model.get_dtype())

        def make_texts() -> list[dict]:
            return self.network.init_crossattn_caches(batch, *shape[2:])

        caches = self.network.init_kv_caches(*shape)
        if isinstance(caches, CacheStreams):
            return caches
        options = self.extra_args["model_options"]
        add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, ask_each_alone, options, is_model_options=True)
        return CacheStreams(caches, lambda: self.network.init_kv_caches(*shape), make_texts)

    @property
    def _transformer_options(self) -> dict:
        return self.extra_args["model_options"].setdefault("transformer_options", {})

    def _check_one_window(self) -> None:
        """Raise ValueError when model and sampler would both forget, each without the other's knowledge."""
        own = window_of(self.guider.conds)
        if own is not None and self.settings.window:
            raise ValueError(
                f"LingBot Conditioning already gives a window of {own.size} latent frames; World Sampler asks for "
                f"{self.settings.window} more. Set World Sampler's window to 0."
            )

    def _prepare_given(self) -> torch.Tensor | None:
        latent = given_latent(self.extra_args["model_options"])
        if latent is None:
            return None
        wanted = self.x.shape
        if latent.shape[2] > wanted[2] or latent.shape[0] not in (1, wanted[0]) or latent.shape[3:] != wanted[3:]:
            raise ValueError(
                f"the given first frames must fit into the latent of shape {list(wanted)}; theirs is "
                f"{list(latent.shape)}. Give fewer frames, or make the latent longer or of their size."
            )
        latent = self.base_model.process_latent_in(latent)
        latent = latent.to(device=self.x.device, dtype=self.base_model.get_dtype())
        return latent.expand(wanted[0], -1, -1, -1, -1)

    def _encode(self, conditioning: list) -> list[dict]:
        """A CONDITIONING as the guider holds its own during a run."""
        return comfy.samplers.process_conds(
            self.base_model,
            self.x,
            {"positive": convert_cond(conditioning)},
            self.x.device,
            self.model.latent_image,
            self.extra_args.get("denoise_mask"),
            self.extra_args.get("seed"),
            latent_shapes=[self.x.shape],
        )["positive"]

    def _remember_given(self) -> None:
        """One clean pass over all given frames; for a window they count as blocks of the usual length."""
        frames = self.given.shape[2]
        self.output[:, :, :frames] = self.given
        divided = self.settings.window or self.memory.keep < 1
        lengths = self.settings.block_lengths(frames) if divided else [frames]
        self._move_camera(frames)
        self.history.announce_clean_pass(lengths)
        self._forward(self.given, self.sigmas.new_zeros([1]), 0)
        self._remember(lengths)

    def _make_block(self, number: int, frames: slice) -> None:
        """Denoise the block in `frames` and store it."""
        if number + 1 in self.prompts:
            self._change_prompt(self.prompts[number + 1])
        length = frames.stop - frames.start
        self._move_camera(length)
        self._recall(frames.start + length // 2)
        latent = self.x[:, :, frames]
        path = UniPC(self.levels) if self.solver == "unipc" else None
        for step, sigma in enumerate(self.sigmas[:-1]):
            denoised = self._forward(latent, sigma, frames.start)
            self._rewind(length)
            self._progress(latent, denoised, sigma)
            if path is not None:
                latent = path.step(latent, self._at_own_level(latent, denoised, step))
            else:
                latent = denoised if self.levels[step + 1] == 0 else self._renoise(denoised, step, number)
        self.output[:, :, frames] = latent
        self._store(latent, number, frames.start)
        # What a guider's node keeps as the denoised output is the last thing it was shown.
        last = frames.stop == self.x.shape[2]
        self._progress(latent, self.output if last else latent, self.sigmas[-1])

    def _at_own_level(self, latent: torch.Tensor, denoised: torch.Tensor, step: int) -> torch.Tensor:
        """The prediction undone at the step's own noise level, where a model takes that of its whole timestep."""
        sampling = self.base_model.model_sampling
        if not hasattr(sampling, "prediction_level"):
            return denoised
        sigma = self.sigmas[step]
        return latent - sigma / sampling.prediction_level(sigma) * (latent - denoised)

    def _renoise(self, denoised: torch.Tensor, step: int, number: int) -> torch.Tensor:
        """The latent at the next noise level, with noise that only depends on the seed, the block and the step."""
        sigma = self.sigmas[step + 1]
        torch.manual_seed(self.extra_args.get("seed", 0) + number * 1000 + step)
        return (1.0 - sigma) * denoised + sigma * torch.randn_like(denoised)

    def _store(self, latent: torch.Tensor, number: int, first_frame: int) -> None:
        """The pass whose keys and values become history."""
        level = self.settings.context_noise
        if level:
            # Denoising uses the seeds below; blocks have fewer than 500 steps.
            torch.manual_seed(self.extra_args.get("seed", 0) + number * 1000 + 999)
            latent = (1.0 - level) * latent + level * torch.randn_like(latent)
        self.history.announce_clean_pass([latent.shape[2]])
        self._forward(latent, self.sigmas.new_full([1], level), first_frame)
        self._remember([latent.shape[2]])

    def _forward(self, latent: torch.Tensor, sigma: torch.Tensor, first_frame: int) -> torch.Tensor:
        """One pass over a block behind the history; its keys and values lie behind the end afterwards."""
        self._transformer_options["ar_state"] = {
            "start_frame": first_frame,
            "kv_caches": self.caches,
            "crossattn_caches": self.text_caches,
        }
        return self.model(latent, sigma * self.x.new_ones([self.x.shape[0]]), **self.extra_args)

    def _rewind(self, frames: int) -> None:
        for cache in self.caches:
            cache["end"] -= frames * self.frame_tokens

    def _remember(self, lengths: list[int]) -> None:
        """Note blocks of so many frames that the last pass has stored, and let old ones go."""
        self.history.add([self.window.add(length) for length in lengths])
        leaving = self.window.take_leaving()
        if not leaving:
            return
        self.history.retire([block.number for block in leaving])
        if self.memory.retrieves:
            for block in leaving:
                self.bank.add(block.number, self._pose(block.first_frame + block.frames // 2))
            self.history.forget(self.bank.take_surplus())

    def _recall(self, frame: int) -> None:
        """Bring back what the coming block, with `frame` in its middle, may need."""
        if self.memory.retrieval == "camera":
            self.history.recall(self.bank.nearest(self._pose(frame)))
        elif self.memory.retrieval == "similarity":
            self.history.recall_similar()

    def _pose(self, frame: int) -> Pose | None:
        return self.path.pose(frame) if self.memory.retrieval == "camera" else None

    def _move_camera(self, frames: int) -> None:
        """Follow the camera of the current prompt for the coming frames."""
        if self.memory.retrieval == "camera" and isinstance(self.path, CameraPath):
            motion = next((c[CAMERA_KEY] for c in self.guider.conds["positive"] if CAMERA_KEY in c), None)
            if motion is None:
                raise ValueError(
                    "retrieval by camera needs a prompt that says how the camera moves, as LingBot Conditioning and "
                    "Tiny World Conditioning do; this one does not. Set retrieval in World Memory to similarity."
                )
            self.path.extend(CameraMotion(*motion), frames)

    def _change_prompt(self, conds: list[dict]) -> None:
        self.caches.replace_conditioning(self.guider.conds["positive"], conds)
        self.guider.conds = self.guider.conds | {"positive": conds}
        self.caches.forget_texts()

    def _progress(self, x: torch.Tensor, denoised: torch.Tensor, sigma: torch.Tensor) -> None:
        if self.callback is not None:
            shown = {"x": x, "i": self.steps_done, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised}
            self.callback(shown)
        self.steps_done += 1

    def _report(self, number: int, blocks: int, done: int, frames: int) -> None:
        if self.on_block is not None:
            entry = {"block": number + 1, "blocks": blocks, "done": done, "frames": frames}
            self.on_block(entry | {"in_reach": self.window.frames})


def given_latent(model_options: dict) -> torch.Tensor | None:
    """First frames `[B, C, T, H, W]` that an image-to-video node gave to the model."""
    return model_options.get("transformer_options", {}).get("ar_config", {}).get("initial_latent")


def _causal_network(base_model: Any, x: torch.Tensor) -> Any:
    """The model's network, when it and the latent are what this sampler is for.

    Raises:
        ValueError: otherwise, naming what to connect.
    """
    if x.ndim != 5:
        raise ValueError(
            f"World Sampler needs a video latent [B, C, T, H, W]; got shape {list(x.shape)}. Use Empty AR Video Latent."
        )
    network = getattr(base_model, "diffusion_model", None)
    if not hasattr(network, "init_kv_caches") or not hasattr(network, "init_crossattn_caches"):
        raise ValueError(
            f"World Sampler needs an autoregressive world model with a KV cache; this is {type(base_model).__name__} "
            f"with a {type(network).__name__}. Load the checkpoint with Load World Model, or choose another sampler."
        )
    return network


def _tokens_per_frame(network: Any, x: torch.Tensor) -> int:
    _, patch_height, patch_width = network.patch_size
    return -(-x.shape[3] // patch_height) * -(-x.shape[4] // patch_width)
