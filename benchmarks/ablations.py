"""What a row of benchmarks.quality measures, and the rows that take a method's parts away or turn one of its knobs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """A row: a method with settings, and for ablations the parts of it that are switched off.

    series: the ablation it belongs to; empty for rows that compare methods.
    """

    method: str
    name: str = "default"
    key_bits: int = 2
    value_bits: int = 2
    settings: dict = field(default_factory=dict)
    parts: dict = field(default_factory=dict)
    series: str = ""

    @property
    def measured(self) -> str:
        """What decides the figures: rows of different names that measure the same are measured once."""
        return json.dumps([self.method, self.key_bits, self.value_bits, self.settings, self.parts], sort_keys=True)


# Spans here have 288 tokens; eight centroids are as many tokens a centroid as the paper's shortest spans have.
PAPER = {"centroids": 8, "rank": 8}
# The paper's number, so that there is a choice: the given frames are one span of 2,016 tokens.
MANY = {"centroids": 256, "rank": 8}

GRID = "grid x assignment x correction"
RANK = "rank of the correction"
CANDIDATES = "candidates"
WEIGHTS = "query weights"


def _grid(symmetric: bool, query_sensitive: bool, correction: bool) -> Variant:
    names = ("ternary" if symmetric else "affine", "QSAC" if query_sensitive else "L2", "PSAC" if correction else "-")
    parts = {"query_sensitive": query_sensitive, "correction": correction, "symmetric": symmetric}
    # A part at its default is left out, so that the row counts as the one of the published method.
    parts = {name: value for name, value in parts.items() if value != (name != "symmetric")}
    return Variant("quantwm-paper", ", ".join(names), settings=PAPER, parts=parts, series=GRID)


ABLATIONS = (
    *(_grid(*parts) for parts in ((s, q, c) for s in (True, False) for q in (False, True) for c in (False, True))),
    *(
        Variant("quantwm-paper", f"rank {rank}", settings=PAPER | {"rank": rank}, series=RANK)
        for rank in (2, 4, 8, 16, 32)
    ),
    *(Variant("quantwm", f"rank {rank}", settings={"rank": rank}, series=RANK) for rank in (2, 4, 8, 16, 32)),
    *(
        Variant("quantwm-paper", f"{count} of 256", settings=MANY | {"candidates": count}, series=CANDIDATES)
        for count in (1, 4, 16, 64, 256)
    ),
    *(
        Variant("quantwm", f"{count} of 63 or fewer", settings={"candidates": count}, series=CANDIDATES)
        for count in (1, 4, 16, 63)
    ),
    # The whole second moment is an option of the PyTorch encoders; the kernels know its diagonal only.
    *(
        Variant(method, name, settings=settings | {"backend": "torch"}, parts=parts, series=WEIGHTS)
        for method, settings in (("quantwm-paper", PAPER), ("quantwm", {}))
        for name, parts in (("diagonal", {}), ("whole matrix", {"full_metric": True}))
    ),
)
