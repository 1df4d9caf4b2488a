"""The nodes of the pack. Each file holds one; this list is what ComfyUI registers."""

from comfy_api.latest import ComfyExtension, io

from . import expected, live
from .apply import QuantWMApply
from .budget import QuantWMBudget
from .cache_stats import QuantWMCacheStats
from .camera_path import QuantWMCameraPath
from .compare import QuantWMCompare
from .kv_cache import QuantWMKVCache
from .lingbot_conditioning import QuantWMLingBotConditioning
from .load_world_model import QuantWMLoadWorldModel
from .longcat_conditioning import QuantWMLongCatConditioning
from .longcat_lora import QuantWMLongCatLoRA
from .longcat_scheduler import QuantWMLongCatScheduler
from .memory import QuantWMMemory
from .planner import QuantWMPlanner
from .prompt_change import QuantWMPromptChange
from .tiny_world_conditioning import TinyWorldConditioning
from .tiny_world_seed import TinyWorldSeed
from .tiny_world_vae import TinyWorldVAE
from .world_sampler import QuantWMWorldSampler

NODES: list[type[io.ComfyNode]] = [
    QuantWMKVCache,
    QuantWMApply,
    QuantWMCacheStats,
    QuantWMLoadWorldModel,
    TinyWorldVAE,
    TinyWorldConditioning,
    TinyWorldSeed,
    QuantWMCompare,
    QuantWMWorldSampler,
    QuantWMPromptChange,
    QuantWMMemory,
    QuantWMCameraPath,
    QuantWMLingBotConditioning,
    QuantWMPlanner,
    QuantWMBudget,
    QuantWMLongCatConditioning,
    QuantWMLongCatScheduler,
    QuantWMLongCatLoRA,
]


class QuantWMExtension(ComfyExtension):
    async def on_load(self) -> None:
        live.add_route()
        expected.add_route()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> QuantWMExtension:
    return QuantWMExtension()
