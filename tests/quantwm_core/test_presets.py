"""Presets are data: valid, complete, and they decide what they name."""

import dataclasses

import pytest

from quantwm_core import CacheSettings
from quantwm_core.presets import CUSTOM, PRESET_NAMES, PRESETS, with_preset

# What belongs to the machine, not to the picture.
LEFT_OPEN = {"cache_device", "backend", "budget_gb"}
NAMES = {field.name for field in dataclasses.fields(CacheSettings)}


def test_the_names_saved_workflows_know():
    assert PRESET_NAMES == ("balanced", "smallest", "best quality", "paper", "custom")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_everything_but_the_machine(name):
    assert PRESETS[name].keys() == NAMES - LEFT_OPEN
    assert CacheSettings(**PRESETS[name]).compresses


def test_balanced_is_the_defaults():
    assert CacheSettings(**PRESETS["balanced"]) == CacheSettings()


def test_a_preset_decides_what_it_names_and_leaves_the_rest():
    chosen = {"method": "kivi", "key_bits": 8, "backend": "torch", "cache_device": "cpu"}
    settings = CacheSettings(**with_preset("best quality", chosen))
    assert (settings.method, settings.key_bits, settings.value_bits) == ("quantwm", 4, 4)
    assert (settings.backend, settings.cache_device) == ("torch", "cpu")
    assert with_preset(CUSTOM, chosen) == chosen


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset must be one of balanced.*'huge'"):
        with_preset("huge", {})
