"""Rows of benchmarks.quality shared out among workers: each is measured once, and they come back in order."""

import argparse
import random

from benchmarks.quality import in_order, wanted


def arguments(part=None) -> argparse.Namespace:
    return argparse.Namespace(quick=False, ablations=True, methods=None, part=part)


def test_parts_hold_each_row_once_and_rows_that_measure_the_same_together():
    whole = wanted(arguments())
    parts = [wanted(arguments((i + 1, 7))) for i in range(7)]
    assert sorted(map(whole.index, (v for part in parts for v in part))) == list(range(len(whole)))
    for part in parts:
        others = {v.measured for other in parts if other is not part for v in other}
        assert others.isdisjoint(v.measured for v in part)


def test_rows_come_back_in_order():
    whole = wanted(arguments())
    rows = [
        {"method": v.method, "variant": v.name, "series": v.series}
        | (
            {"key_bits": 16, "value_bits": 16}
            if v.method == "off"
            else {"key_bits": v.key_bits, "value_bits": v.value_bits}
        )
        for v in whole
    ]
    shuffled = random.Random(0).sample(rows, len(rows))
    assert in_order(shuffled, whole) == rows
