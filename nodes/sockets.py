"""Names that the nodes share: the category in the menu and the pack's own socket types."""

from comfy_api.latest import io

CATEGORY = "QuantWM"

SettingsSocket = io.Custom("QUANTWM_SETTINGS")
CacheSocket = io.Custom("QUANTWM_CACHE")
PromptsSocket = io.Custom("QUANTWM_PROMPTS")
CameraSocket = io.Custom("QUANTWM_CAMERA")
MemorySocket = io.Custom("QUANTWM_MEMORY")
