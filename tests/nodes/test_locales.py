"""The texts of the nodes in every language: complete, not stale, and in English the schemas' own."""

import re

import pytest

from benchmarks.host import ROOT
from scripts.update_locales import languages, node_defs, paths, read

pytestmark = pytest.mark.host

LANGUAGES = ("en", "ja", "zh")
TRANSLATED = ("ja", "zh")
FILES = ("main.json", "nodeDefs.json", "settings.json")
HELP_PAGES = sorted((ROOT / "web" / "docs").glob("*/*.md"))
# The editor's message format gives these a meaning of their own: list, link, plural.
SYNTAX = re.compile(r"[{}@|]")
OWN_TYPE = re.compile(r"io\.Custom\(\"(\w+)\"\)")
# What a translation has to leave as it is: the choices of lists that a tooltip explains, and numbers.
CHOICE = re.compile(r"^([a-z][\w, -]*?)(?: \(default\))?:", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def texts(host) -> dict:
    return node_defs()


def text_at(tree: dict, path: str) -> str:
    for key in path.split("."):
        tree = tree[key]
    return tree


def test_the_languages():
    assert tuple(languages()) == LANGUAGES


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_has_an_entry_and_none_is_stale(texts, language):
    have, need = paths(read(language)), paths(texts)
    assert sorted(need - have) == [], "write these"
    assert sorted(have - need) == [], "remove these"
    assert [path for path in have if not text_at(read(language), path).strip()] == []


def test_english_is_what_the_schemas_say(texts):
    assert read("en") == texts, "run python -m scripts.update_locales"


@pytest.mark.parametrize("language", LANGUAGES)
def test_main_names_the_sockets_of_the_pack(language):
    types = set(OWN_TYPE.findall((ROOT / "nodes" / "sockets.py").read_text()))
    main = read(language, "main.json")
    assert main["nodeCategories"] == {"QuantWM": "QuantWM"}
    assert main["dataTypes"].keys() == types


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_means_something_to_the_message_format(language, name):
    tree = read(language, name)
    assert [path for path in paths(tree) if SYNTAX.search(text_at(tree, path))] == []


@pytest.mark.parametrize("name", ("main.json", "settings.json"))
@pytest.mark.parametrize("language", TRANSLATED)
def test_the_panel_and_the_settings_speak_every_language(language, name):
    english, theirs = read("en", name), read(language, name)
    assert paths(theirs) == paths(english)
    if name == "settings.json":
        assert not [path for path in paths(theirs) if text_at(theirs, path).isascii()]


def test_settings_say_in_english_what_the_code_says():
    """The page shows the code's words until the locale has arrived."""
    code = (ROOT / "web" / "js" / "settings.js").read_text(encoding="utf-8")
    for key, entry in read("en", "settings.json").items():
        assert f'"{key.replace("_", ".")}"' in code
        assert f'"{entry["name"]}"' in code and f'"{entry["tooltip"]}"' in code


def test_every_text_that_the_page_asks_for_is_there():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web" / "js").glob("*.js"))
    asked = set(re.findall(r"\btext\(\"(\w+)\"\)", code))
    assert len(asked) > 8 and asked <= read("en", "main.json")["quantwm"].keys()


@pytest.mark.parametrize("language", TRANSLATED)
def test_translations_keep_choices_and_are_translated(texts, language):
    tree = read(language)
    for path in sorted(paths(texts)):
        english, theirs = text_at(texts, path), text_at(tree, path)
        if path.endswith("tooltip"):
            choices = [name.strip() for found in CHOICE.findall(english) for name in found.split(",")]
            assert [name for name in choices if name not in theirs] == [], path
        if path.endswith(("tooltip", "description")):
            assert not theirs.isascii() and theirs != english, path


@pytest.mark.parametrize("language", TRANSLATED)
def test_translations_keep_the_numbers(texts, language):
    """A default or a range that changed in the schema and not in a translation shows here."""
    tree = read(language)
    for path in sorted(paths(texts)):
        theirs = re.findall(r"\d+(?:\.\d+)?", text_at(tree, path))
        lost = {number.lstrip("-") for number in NUMBER.findall(text_at(texts, path))} - set(theirs)
        assert not lost, path


@pytest.mark.parametrize("language", LANGUAGES)
def test_names_tell_nodes_and_inputs_apart(language):
    tree = read(language)
    names = [node["display_name"] for node in tree.values()]
    assert len(set(names)) == len(names)
    for node_id, node in tree.items():
        inputs = [entry["name"] for entry in node["inputs"].values()]
        assert len(set(inputs)) == len(inputs), node_id


@pytest.mark.parametrize("language", TRANSLATED)
def test_every_node_has_a_help_page(texts, language):
    assert {page.parent.name for page in HELP_PAGES if page.stem == language} == texts.keys()


@pytest.mark.parametrize("page", HELP_PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_help_page_in_another_language_names_every_input(page):
    """By both its names: the one on the node, and the one that messages use."""
    node, text = read(page.stem)[page.parent.name], page.read_text(encoding="utf-8")
    assert text.startswith(f"# {node['display_name']}\n")
    missing = [name for name, entry in node["inputs"].items() if f"**{name}**" not in text or entry["name"] not in text]
    assert not missing
    assert not [entry["name"] for entry in node["outputs"].values() if f"**{entry['name']}**" not in text]
