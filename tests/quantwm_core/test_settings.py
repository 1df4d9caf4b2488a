"""Settings are checked once, and say what is allowed."""

import pytest

from quantwm_core import CacheSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "zip"),
        ("key_bits", 3),
        ("value_bits", 0),
        ("group_size", 48),
        ("cache_device", "disk"),
        ("backend", "cuda"),
        ("jensen", "on"),
        ("centroids", 257),
        ("centroids", -1),
        ("candidates", -1),
        ("rank", 65),
        ("rank", 2.5),
        ("span_blocks", -1),
        ("keep_first_blocks", True),
    ],
)
def test_a_value_out_of_its_domain_is_refused_with_rule_value_and_remedy(name, value):
    with pytest.raises(ValueError) as refusal:
        CacheSettings(**{name: value})
    message = str(refusal.value)
    assert name in message and repr(value) in message
    assert "must be" in message and ("Pick" in message or "Change" in message)


def test_off_and_sixteen_bits_leave_the_host_alone():
    assert not CacheSettings(method="off").compresses
    assert not CacheSettings(key_bits=16, value_bits=16).compresses
    assert CacheSettings(key_bits=16).compresses
    assert CacheSettings().compresses
