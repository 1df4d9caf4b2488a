"""Write locales/en/nodeDefs.json from the nodes' schemas, and say what the other languages lack or no longer need.

.venv/bin/python -m scripts.update_locales
"""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.host import PACK_NAME, ROOT, load_pack, start_host

LOCALES = ROOT / "locales"
NODE_DEFS = "nodeDefs.json"


def node_defs() -> dict[str, dict[str, Any]]:
    """The texts of all nodes in the form that ComfyUI's editor looks them up: outputs by their number."""
    start_host()
    load_pack()
    nodes = importlib.import_module(f"{PACK_NAME}.nodes")
    extension = asyncio.run(nodes.comfy_entrypoint())
    schemas = [node.GET_SCHEMA() for node in asyncio.run(extension.get_node_list())]
    return {schema.node_id: _texts(schema) for schema in schemas}


def _texts(schema: Any) -> dict[str, Any]:
    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {entry.id: _named(entry) for entry in schema.inputs},
        "outputs": {str(number): _named(entry) for number, entry in enumerate(schema.outputs)},
    }


def _named(entry: Any) -> dict[str, str]:
    return {"name": entry.display_name or entry.id, "tooltip": entry.tooltip}


def read(language: str, name: str = NODE_DEFS) -> dict[str, Any]:
    return json.loads((LOCALES / language / name).read_text(encoding="utf-8"))


def paths(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """Where the texts of a tree are, such as `QuantWMApply.inputs.model.tooltip`."""
    found = set()
    for key, value in tree.items():
        found |= paths(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return found


def languages() -> list[str]:
    return sorted(path.name for path in LOCALES.iterdir() if path.is_dir())


def write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    wanted = node_defs()
    write(LOCALES / "en" / NODE_DEFS, wanted)
    for language in languages():
        have, need = paths(read(language)), paths(wanted)
        for word, keys in (("missing", need - have), ("stale", have - need)):
            for key in sorted(keys):
                print(f"{language}: {word} {key}")


if __name__ == "__main__":
    main()
