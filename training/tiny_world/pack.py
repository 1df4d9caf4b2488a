"""The host and the tiny world's runtime package, as the training code imports them.

Importing this module starts ComfyUI in the process: everything else here imports `comfy` after it. The
runtime package is loaded by path because the pack around it uses relative imports and belongs to the host.
"""

from __future__ import annotations

import sys

from benchmarks.host import ROOT, import_folder, start_host

_NAME = "tiny_world"


start_host()
tiny_world = import_folder(_NAME, ROOT / "world_models" / "tiny_world")
codec = sys.modules[f"{_NAME}.codec"]
conditioning = sys.modules[f"{_NAME}.conditioning"]
render = sys.modules[f"{_NAME}.render"]
