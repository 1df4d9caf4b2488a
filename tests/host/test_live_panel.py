"""What a page gets while a video is sampled: events for runs that it watches, and the expected ratio before."""

from __future__ import annotations

import pytest
import requests

from benchmarks.demo import node_of, record_in
from support.prompts import tiny_world_prompt
from support.server import ComfyServer

EVENT = "quantwm.memory"
MOST_A_SECOND = 4


@pytest.fixture(scope="module")
def prompt(server) -> dict:
    return tiny_world_prompt(server.object_info())


def with_seed(prompt: dict, seed: int) -> dict:
    """Another seed: a run that ComfyUI has no outputs of."""
    noise = node_of(prompt, "RandomNoise")
    return prompt | {noise: {**prompt[noise], "inputs": {"noise_seed": seed}}}


def run(server: ComfyServer, prompt: dict, watch: bool) -> tuple[list[dict], list[str], dict]:
    """States and texts that the page of a run gets, and the history entry."""
    body = {"client_id": server.client_id, "on": watch}
    requests.post(server.url + "/quantwm/watch", json=body, timeout=60).raise_for_status()
    states, texts = [], []

    def on_progress(event: dict) -> None:
        if event["type"] == EVENT:
            states.append(event["data"])
        elif event["type"] == "progress_text":
            texts.append(event["data"]["node"])

    return states, texts, server.run(prompt, on_progress)


def test_a_watched_run_is_sent_block_by_block(server, prompt):
    stats = node_of(prompt, "QuantWMCacheStats")
    states, texts, entry = run(server, with_seed(prompt, 101), watch=True)
    assert states and all(state["nodes"] == [stats] and state["running"] for state in states)
    tokens = [state["tokens"] for state in states]
    assert tokens == sorted(set(tokens))
    (final,) = entry["outputs"][stats]["quantwm_memory"]
    record = record_in("\n".join(entry["outputs"][stats]["text"]))
    assert not final["running"] and final["tokens"] == record["tokens"] >= tokens[-1]
    for state in (*states, final):
        growth = state["growth"]
        kept = state["bytes_packed"] + state["bytes_unpacked"]
        assert growth["kept"][-1] == kept < growth["bf16"][-1] == state["bytes_bf16"]
        assert sum(state["bytes_by_part"].values()) == state["bytes_packed"]
        assert 0 < state["encode_seconds"] + state["decode_seconds"] < state["seconds"]
        assert state["backend"] and state["backend_reason"]
        assert 0 < state["memory"]["used"] <= state["memory"]["total"]
    assert final["bytes_by_part"] == record["bytes_by_part"] and final["growth"]["block"][-1] == record["blocks"]
    # The panel says it all: no text besides.
    assert stats not in texts


def test_updates_are_few(server, prompt):
    states, _, _ = run(server, with_seed(prompt, 102), watch=True)
    times = [state["seconds"] for state in states]
    # A state tells when its block was done, a moment before it was sent.
    assert all(later - earlier > 0.9 / MOST_A_SECOND for earlier, later in zip(times, times[1:]))


def test_a_run_that_nobody_watches_sends_nothing(server, prompt):
    states, texts, entry = run(server, with_seed(prompt, 103), watch=False)
    stats = node_of(prompt, "QuantWMCacheStats")
    assert states == [] and stats in texts
    assert entry["outputs"][stats]["images"] and entry["outputs"][stats]["quantwm_memory"]


def test_a_run_without_the_node_sends_nothing(server, prompt):
    stats = node_of(prompt, "QuantWMCacheStats")
    without = {name: node for name, node in with_seed(prompt, 104).items() if name != stats}
    states, _, _ = run(server, without, watch=True)
    assert states == []


def test_comfyuis_own_cache_has_a_last_state_too(server, prompt):
    cache, stats = node_of(prompt, "QuantWMKVCache"), node_of(prompt, "QuantWMCacheStats")
    off = with_seed(prompt, 105)
    off[cache] = {**off[cache], "inputs": {**off[cache]["inputs"], "method": "off"}}
    states, _, entry = run(server, off, watch=True)
    (final,) = entry["outputs"][stats]["quantwm_memory"]
    assert states == [] and not final["running"] and final["growth"]["block"] == []
    assert final["bytes_packed"] == 0 and final["bytes_unpacked"] >= final["bytes_bf16"] > 0


def expected(server: ComfyServer, **body: object) -> requests.Response:
    return requests.post(server.url + "/quantwm/expected", json=body, timeout=60)


@pytest.mark.parametrize("preset", ["balanced", "smallest", "best quality", "paper"])
def test_the_expected_ratio_is_that_of_a_run(server, preset):
    # The template's own video.
    prompt = tiny_world_prompt(server.object_info(), seed_frames=21, length=36)
    cache = node_of(prompt, "QuantWMKVCache")
    widgets = prompt[cache]["inputs"] | {"preset": preset}
    promised = expected(server, widgets=widgets, model="tiny world (built in)").json()
    assert promised["world"] == "tiny"
    entry = server.run(prompt | {cache: {**prompt[cache], "inputs": widgets}})
    record = record_in("\n".join(entry["outputs"][node_of(prompt, "QuantWMCacheStats")]["text"]))
    assert record["ratio_resident"] == pytest.approx(promised["ratio"], rel=0.02)


def test_the_expected_ratio_without_a_model(server):
    ratios = [
        expected(server, widgets={"method": method, "key_bits": bits, "value_bits": bits}).json()
        for method, bits in (("quantwm", "2"), ("quantwm", "4"), ("off", "2"))
    ]
    assert [answer["world"] for answer in ratios] == ["any"] * 3
    assert ratios[0]["ratio"] > 6 > ratios[1]["ratio"] > 3 and ratios[2]["ratio"] == 1


def test_widgets_that_the_node_would_refuse_are_answered_with_the_rule(server):
    answer = expected(server, widgets={"group_size": 40})
    assert answer.status_code == 400 and "group_size must be one of" in answer.json()["error"]
