"""The ratio that QuantWM KV Cache shows beside its bits, reckoned before anything runs."""

from __future__ import annotations

import json
from typing import Any

import comfy.utils
import folder_paths
from aiohttp import web

from ..quantwm_core import CacheGeometry, CacheSettings
from ..quantwm_core.planning import plan_bytes
from ..quantwm_core.presets import CUSTOM, with_preset
from ..world_models import tiny_world
from .load_world_model import BUILT_IN
from .progress import running_server

ROUTE = "/quantwm/expected"
# A usual video, where nothing is connected that says otherwise: 832 x 480, 24 latent frames in blocks of 3.
FRAME_TOKENS, BLOCK, BLOCKS = 1560, 3, 8
HEAD_DIM = 128
TINY_SEED_FRAMES, TINY_BLOCKS = 21, 5


def add_route() -> None:
    """Answer pages that ask for the ratio of a node's widgets; without a server there is nothing to add to."""
    server = running_server()
    if server is None:
        return

    @server.routes.post(ROUTE)
    async def expected(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            return web.json_response(expected_ratio(body["widgets"], body.get("model")))
        except (KeyError, TypeError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)


def expected_ratio(widgets: dict[str, Any], model: str | None = None) -> dict[str, Any]:
    """How many times smaller than in BF16 a cache will be at the end of a usual video.

    Args:
        widgets: values of the node's inputs by name; missing ones count as their defaults.
        model: file that the connected loader names, if there is one.

    Returns: `ratio`, and in `world` what it is meant for: "tiny", "model" (its heads are known), or "any".

    Raises:
        ValueError: for values that the node would refuse, and for a preset that there is not.
    """
    chosen = {name: value for name, value in widgets.items() if name in CacheSettings.__dataclass_fields__}
    chosen |= {name: int(chosen[name]) for name in ("key_bits", "value_bits") if name in chosen}
    settings = CacheSettings(**with_preset(widgets.get("preset", CUSTOM), chosen))
    world, geometry, blocks = _world(model)
    plan = plan_bytes(settings, geometry, blocks)
    return {"ratio": round(plan.bf16 / plan.resident, 2), "world": world}


def _world(model: str | None) -> tuple[str, CacheGeometry, list[int]]:
    """What the ratio is meant for, the shape of its cache, and the tokens of its blocks."""
    usual = [BLOCK * FRAME_TOKENS] * BLOCKS
    if model == BUILT_IN:
        frame = (tiny_world.HEIGHT // tiny_world.DOWNSCALE // 2) * (tiny_world.WIDTH // tiny_world.DOWNSCALE // 2)
        blocks = [TINY_SEED_FRAMES * frame] + [tiny_world.FRAMES_PER_BLOCK * frame] * TINY_BLOCKS
        return "tiny", _geometry(str(tiny_world.WORLD_FILE)), blocks
    path = folder_paths.get_full_path("diffusion_models", model) if model else None
    geometry = _geometry(path) if path and path.endswith(".safetensors") else None
    if geometry is None:
        return "any", CacheGeometry(30, 12, HEAD_DIM), usual
    return "model", geometry, usual


def _geometry(path: str) -> CacheGeometry | None:
    """Shape of a checkpoint's cache from its header alone, None where that does not tell."""
    header = json.loads(comfy.utils.safetensors_header(path) or "{}")
    config = json.loads(header.get("__metadata__", {}).get("config", "{}"))
    layers = sum(name.endswith("self_attn.q.weight") for name in header)
    widths = [entry["shape"][0] for name, entry in header.items() if name.endswith("self_attn.q.weight")]
    if not layers:
        return None
    heads = config.get("transformer", {}).get("num_heads") or max(1, widths[0] // HEAD_DIM)
    return CacheGeometry(layers, heads, widths[0] // heads)
