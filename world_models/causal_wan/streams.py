"""A cache for each conditioning: what guidance (cfg other than 1) needs of a model that remembers.

A guider asks the network about the prompt and about the negative one at every step. Each remembers keys and values of
its own, while the host's samplers know one list of caches. `CacheStreams` is what they get in its place, and
`ask_each_alone`, around the host's batch of conditionings, lets one of them through at a time with what belongs to it.
However the host would have batched them, the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose
from typing import Any

import torch


@dataclass(eq=False)
class Stream:
    """What one conditioning remembers: caches and the text's keys and values, one a layer, and who it is."""

    caches: list
    texts: list[dict] | None = None
    group: list[dict] = field(default_factory=list)
    passes: int = 0


class CacheStreams(list):
    """One mapping with an `end` for each layer, as the host's samplers expect it, for the caches of all conditionings.

    Args:
        first: the caches of the conditioning that is asked first.
        make: makes those of another one.
        make_texts: makes empty caches of a text's keys and values.
        enter: called with (clean, first) before a conditioning is asked: whether its keys become history, and whether
            it was never asked before.
        stored: called when all of them have been asked in a pass whose keys become history.
    """

    def __init__(
        self,
        first: list,
        make: Callable[[], list],
        make_texts: Callable[[], list[dict]],
        enter: Callable[[bool, bool], None] | None = None,
        stored: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(_Position(self, layer) for layer in range(len(first)))
        self.streams = [Stream(first)]
        self._make = make
        self._make_texts = make_texts
        self._enter = enter
        self._stored = stored
        self._by_conditioning: dict[Any, Stream] = {}
        self._clean_announced = False
        # Whom the last pass has asked: what a sampler takes back, it takes back from them.
        self.asked = list(self.streams)

    @property
    def caches(self) -> list:
        """The caches of all conditionings and layers."""
        return [cache for stream in self.streams for cache in stream.caches]

    def announce_clean_pass(self) -> None:
        """The coming pass makes history, whatever its noise level."""
        self._clean_announced = True

    def forget_texts(self) -> None:
        """Compute keys and values of the texts anew."""
        for stream in self.streams:
            for text in stream.texts or ():
                text["is_init"] = False

    def replace_conditioning(self, old: list[dict], new: list[dict]) -> None:
        """From now on `new` goes on with what `old` remembers."""
        stream = self._by_conditioning.pop(old[0]["uuid"], None)
        if stream is not None:
            self._by_conditioning[new[0]["uuid"]] = stream

    def ask(
        self,
        executor: Callable,
        model: Any,
        conds: list[list[dict] | None],
        x: torch.Tensor,
        timestep: torch.Tensor,
        model_options: dict,
    ) -> list[torch.Tensor]:
        """Answers of the host's `calc_cond_batch`, one call for each conditioning.

        A conditioning that the guider leaves out of a clean pass is asked nevertheless: it will be asked again.
        """
        clean, self._clean_announced = self._clean_announced or bool((timestep == 0).all()), False
        state = model_options["transformer_options"]["ar_state"]
        answers = [torch.zeros_like(x) for _ in conds]
        self.asked = []
        for index, group in enumerate(conds):
            if group:
                stream = self._stream_of(group, state)
                self.asked.append(stream)
                alone = [group if place == index else None for place in range(len(conds))]
                options = self._begin(stream, state, model_options, clean)
                answers[index] = executor(model, alone, x, timestep, options)[index]
        for stream in self.streams if clean else ():
            if stream not in self.asked:
                executor(model, [stream.group], x, timestep, self._begin(stream, state, model_options, clean))
                self.asked.append(stream)
        self._check_lengths()
        if clean and self._stored is not None:
            self._stored()
        return answers

    def _check_lengths(self) -> None:
        """Raise ValueError unless all that were asked remember equally much: a sampler counts for all of them."""
        ends = [stream.caches[0]["end"] for stream in self.asked]
        if len(set(ends)) > 1:
            raise ValueError(
                f"both prompts have to look back equally far; they hold {' and '.join(map(str, ends))} tokens. Take "
                "them from one LingBot Conditioning, or give both the same window and sink."
            )

    def _stream_of(self, group: list[dict], state: dict) -> Stream:
        """Where a conditioning remembers; a new one begins to."""
        if len(group) > 1:
            raise ValueError(
                f"a world model remembers one prompt for each input of the guider; this run has {len(group)} in one of "
                "them, by Conditioning Combine, areas or timestep ranges. Give one; Prompt Change can change it on the "
                "way."
            )
        key = group[0]["uuid"]
        stream = self._by_conditioning.get(key)
        if stream is None:
            stream = self._new_stream(state)
            self._by_conditioning[key] = stream
        stream.group = group
        return stream

    def _new_stream(self, state: dict) -> Stream:
        stream = self.streams[0]
        if self._by_conditioning:
            if state["start_frame"]:
                raise ValueError(
                    "with a cfg other than 1 both prompts have to be asked from the first block on, so that each has "
                    f"a history; one joined at latent frame {state['start_frame']}. Set cfg in CFG Guider to one value "
                    "for the whole run."
                )
            stream = Stream(self._make(), self._make_texts())
            self.streams.append(stream)
        else:
            stream.texts = state["crossattn_caches"]
        return stream

    def _begin(self, stream: Stream, state: dict, model_options: dict, clean: bool) -> dict:
        """The model options with which a conditioning is asked alone."""
        if self._enter is not None:
            self._enter(clean, stream.passes == 0)
        stream.passes += 1
        state = state | {"kv_caches": stream.caches, "crossattn_caches": stream.texts}
        return model_options | {"transformer_options": model_options["transformer_options"] | {"ar_state": state}}


class _Position:
    """The length of one layer's history, which all conditionings share."""

    def __init__(self, streams: CacheStreams, layer: int) -> None:
        self._streams = streams
        self._layer = layer

    def __getitem__(self, name: str) -> int:
        return self._streams.asked[0].caches[self._layer][self._checked(name)]

    def __setitem__(self, name: str, value: int) -> None:
        for stream in self._streams.asked:
            stream.caches[self._layer][self._checked(name)] = value

    @staticmethod
    def _checked(name: str) -> str:
        if name != "end":
            raise KeyError(f"a sampler can read and set the `end` of a cache, not {name!r}: each conditioning has one.")
        return name


def ask_each_alone(executor, model, conds, x_in, timestep, model_options):
    """CALC_COND_BATCH wrapper: conditionings that remember are asked one at a time."""
    streams = model_options.get("transformer_options", {}).get("ar_state", {}).get("kv_caches")
    if not isinstance(streams, CacheStreams):
        return executor(model, conds, x_in, timestep, model_options)
    return streams.ask(executor, model, conds, x_in, timestep, model_options)


def count_conditionings(guider: Any) -> int:
    """How many conditionings a guider will ask about, for planning memory: its negative one only where cfg is not 1."""
    groups = sum(bool(group) for group in guider.conds.values())
    optimized = not guider.model_options.get("disable_cfg1_optimization", False)
    if optimized and isclose(getattr(guider, "cfg", 0.0), 1.0):
        return 1
    return max(1, groups)
