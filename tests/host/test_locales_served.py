"""What the real server hands its editor to show the nodes in the reader's language."""

from __future__ import annotations

import pytest

from benchmarks.host import ROOT
from scripts.update_locales import languages, read


@pytest.mark.parametrize("language", languages())
def test_server_returns_the_texts(server, language):
    served = server.json("/i18n")[language]
    own = {name: texts for name, texts in served["nodeDefs"].items() if name.startswith("QuantWM")}
    assert own == read(language)
    ours = {key: entry for key, entry in served["settings"].items() if key.startswith("QuantWM")}
    assert ours == read(language, "settings.json")
    for group, texts in read(language, "main.json").items():
        assert texts.items() <= served[group].items()


def test_every_served_node_is_translated(server):
    """By the definitions that the editor gets: its look-ups go by node id, input name and output number."""
    i18n = server.json("/i18n")
    for node_id, info in server.object_info().items():
        if not node_id.startswith("QuantWM"):
            continue
        inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        for language in languages():
            texts = i18n[language]["nodeDefs"][node_id]
            assert texts["inputs"].keys() == inputs.keys(), (language, node_id)
            assert list(texts["outputs"]) == [str(number) for number in range(len(info["output"]))]
        assert i18n["en"]["nodeDefs"][node_id]["display_name"] == info["display_name"]


def test_help_pages_are_served_where_the_editor_looks(server):
    """First by language, then the one without: that is English."""
    pages = sorted((ROOT / "web" / "docs").glob("*/*.md"))
    assert {"QuantWMKVCache", "QuantWMApply", "QuantWMCacheStats"} <= {page.parent.name for page in pages}
    for page in pages:
        served = server.get(f"/extensions/quantwm/docs/{page.parent.name}/{page.name}")
        assert served.status_code == 200 and served.content == page.read_bytes()
        assert server.get(f"/extensions/quantwm/docs/{page.parent.name}.md").status_code == 200
