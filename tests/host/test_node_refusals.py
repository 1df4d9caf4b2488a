"""What ComfyUI's API answers to settings that cannot work: on the node, before anything runs."""

import pytest

from benchmarks.demo import node_of
from support.prompts import tiny_world_prompt
from support.server import PromptFailed


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("group_size", 40, r"group_size must be one of 16, 32, 64, 128; got 40"),
        ("key_bits", "3", r"key_bits: '3' not in \['2', '4', '8', '16'\]"),
        ("method", "from-the-future", r"method: 'from-the-future' not in \['quantwm', 'off'"),
        ("centroids", 257, r"bigger than max of 256"),
    ],
)
def test_settings_are_refused_on_the_node(server, name, value, message):
    prompt = tiny_world_prompt(server.object_info())
    node = node_of(prompt, "QuantWMKVCache")
    prompt[node]["inputs"][name] = value
    with pytest.raises(PromptFailed, match=message) as refusal:
        server.queue(prompt)
    assert f'"{node}": {{"errors"' in str(refusal.value)
