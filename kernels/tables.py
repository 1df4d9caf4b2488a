"""Where the pieces of a layer lie in memory, as one small tensor that a kernel can walk.

Spans have their own storages and any number of tokens, so one launch over all of them needs their addresses: a row of
int64 per piece, and a list of tiles (row, first token) that the programs share out among themselves. Both are built
when the pieces of a layer change, that is once per committed block.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch

from ..quantwm_core.codec.bits import unpack_bits
from ..quantwm_core.compiling import uncompiled
from ..quantwm_core.span import PackedSpan, RawBlock
from .launching import in_rows
from .sizes import ceil_div

# Fields of a row. Addresses are 0 where a piece has no such tensor.
SIDE = (
    *("codes", "ids", "scales", "top", "centroids", "grid", "count", "raw", "raw_b", "raw_s", "raw_h"),
    *("low", "stages"),
)
CORRECTION = ("psac_c", "psac_c_scales", "psac_c_factor", "psac_u", "bitmap", "rows", "row_count", "rows_before")
ANGLES = ("cos", "sin")
FIELDS = (
    "tokens",
    "start",
    "phase",
    "zeros",
    *(f"k_{f}" for f in SIDE),
    *(f"v_{f}" for f in SIDE),
    *CORRECTION,
    *ANGLES,
)

# Stored tensors by the field that holds their address.
NAMES = {
    "zeros": "zeros",
    "psac_c": "k_psac_c",
    "psac_c_scales": "k_psac_c_scales",
    "psac_c_factor": "k_psac_c_factor",
    "psac_u": "k_psac_u",
    "bitmap": "k_psac_c_bitmap",
    "rows": "k_psac_c_rows",
}
for _side in "kv":
    NAMES |= {f"{_side}_{field}": f"{_side}_{field}" for field in ("codes", "ids", "scales", "centroids", "raw")}
    NAMES[f"{_side}_grid"] = f"{_side}_centroids_grid"
    NAMES[f"{_side}_low"] = f"{_side}_zeros"
# Of keys that are rounded along the tokens.
NAMES_ALONG_TOKENS = {"k_scales": "k_group_scales", "k_low": "k_group_zeros"}

# Tokens that one program handles.
CHUNK = 128
ALIGNMENT = 16
# What kernels read several bytes at a time, if it is aligned. A layer's slice of a group can begin anywhere, but
# of these it is long: with usual numbers of tokens it is aligned.
READ_AS_WORDS = (
    *("k_codes", "v_codes", "k_centroids", "v_centroids", "k_grid", "v_grid"),
    *("psac_c", "cos", "sin"),
)


# Methods by the kernels that decode them.
FAMILIES = (("quantwm", "quantwm-paper", "rtn"), ("kivi",), ("qvg", "qvg-pro"), ("quarot",))


@dataclass(frozen=True)
class Format:
    """What all packed pieces of a layer have in common; the kernels are compiled for it.

    rotated: some pieces hold keys before RoPE.
    """

    method: str
    key_bits: int
    value_bits: int
    group_size: int
    rank: int
    sparse: bool
    rotated: bool = False

    def numbers(self) -> list[int]:
        """The format as whole numbers, the way an operator of torch can take it."""
        midrise, book = self.method == "quantwm", self.method in ("quantwm", "quantwm-paper")
        form = [self.key_bits, self.value_bits, self.group_size, self.rank, self.sparse, midrise, book]
        family = next((number for number, methods in enumerate(FAMILIES) if self.method in methods), 0)
        return [*form, self.rotated, family]

    @classmethod
    def of(cls, spans: Sequence[PackedSpan]) -> Format:
        """The spans' common format. A span without a correction (rank 0) goes along with those that have one.

        Raises:
            ValueError: when the spans differ otherwise.
        """
        found = {(s.method, s.key_bits, s.value_bits, s.group_size) for s in spans}
        ranks = {s.rank for s in spans} - {0}
        if len(found) != 1 or len(ranks) > 1:
            raise ValueError(f"the spans of one layer share a format; got {sorted(found)} with ranks {sorted(ranks)}.")
        sparse = any("k_psac_c_bitmap" in s.tensors for s in spans)
        return cls(*next(iter(found)), max(ranks, default=0), sparse)


def format_runs(pieces: Sequence[RawBlock | PackedSpan]) -> list[list[RawBlock | PackedSpan]]:
    """The pieces, in their order, cut where the format changes: one table can describe each run.

    Blocks in full precision go along with any format.
    """
    runs, form = [], None
    for piece in pieces:
        own = form
        if isinstance(piece, PackedSpan):
            own = (piece.method, piece.key_bits, piece.value_bits, piece.group_size)
        if not runs or form not in (None, own):
            runs.append([])
        runs[-1].append(piece)
        form = own
    return runs


# Where nothing is packed, any format serves.
RAW_FORMAT = Format("rtn", 16, 16, 64, 0, False)


@dataclass
class PieceTable:
    """rows int64 `[pieces, fields]` and tiles int32 `[tiles, 2]` on the device; `keep` holds what rows point to.

    of_piece: chunks of each piece, if all have as many but the last, which may have fewer; otherwise 0.
    aligned: what kernels read as words is aligned by 16; pairs: what `decode_pairs` reads is aligned as that needs.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    tokens: int
    format: Format
    aligned: bool
    pairs: bool
    keep: list[torch.Tensor]
    pieces: tuple[weakref.ref, ...]
    chunk_starts: tuple[int, ...]
    of_piece: int

    def first_token(self, chunk: int) -> int:
        """Position of a chunk's first token among all tokens of the table; the end for the chunk after the last."""
        return self.chunk_starts[chunk] if chunk < len(self.chunk_starts) else self.tokens

    def describes(self, pieces: Sequence) -> bool:
        return len(pieces) == len(self.pieces) and all(ref() is p for ref, p in zip(self.pieces, pieces))


# By the last piece: when it goes, or a block is added after it, its table goes too.
_tables: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def piece_table(pieces: Sequence[RawBlock | PackedSpan], device: torch.device) -> PieceTable:
    """The table of these pieces, all on `device`; kept until the pieces change."""
    if not pieces:
        rows = torch.empty(0, len(FIELDS), dtype=torch.int64, device=device)
        tiles = torch.empty(0, 2, dtype=torch.int32, device=device)
        return PieceTable(rows, tiles, 0, RAW_FORMAT, True, True, [], (), (), 0)
    table = _tables.get(pieces[-1])
    if table is None or not table.describes(pieces):
        table = _tables[pieces[-1]] = _build(pieces, device)
    return table


@uncompiled
def layer_tables(history: Sequence[RawBlock | PackedSpan], device: torch.device) -> list[PieceTable]:
    """A table for each run of one format, at least one; pieces that are kept elsewhere are copied, for this call."""
    table = _tables.get(history[-1]) if history else None
    if table is not None and table.describes(history):
        return [table]
    runs = format_runs([on_device(piece, device) for piece in history])
    return [piece_table(run, device) for run in runs or [[]]]


def on_device(piece: RawBlock | PackedSpan, device: torch.device) -> RawBlock | PackedSpan:
    """The piece itself, or a copy when it is kept elsewhere."""
    if isinstance(piece, RawBlock) or next(iter(piece.tensors.values())).device == device:
        return piece
    return piece.to(device)


def _build(pieces: Sequence[RawBlock | PackedSpan], device: torch.device) -> PieceTable:
    rows = [_row(piece) for piece in pieces]
    lengths = tuple(piece.tokens for piece in pieces)
    tiles, chunk_starts, starts = _tiles(lengths)
    fields = torch.stack([row.fields for row in rows])
    fields[:, FIELDS.index("start")] = starts
    # One copy for both; an even number of words before the tiles keeps them aligned.
    missing = fields.numel() % 2
    whole = torch.cat((fields.flatten(), fields.new_zeros(missing), tiles.view(torch.int64).flatten()))
    whole = whole.to(device, non_blocking=True)
    spans = [piece for piece in pieces if isinstance(piece, PackedSpan)]
    rotated = any(piece.rotation is not None for piece in pieces)
    return PieceTable(
        rows=whole[: fields.numel()].view(fields.shape),
        tiles=whole[fields.numel() + missing :].view(torch.int32).view(tiles.shape),
        tokens=sum(lengths),
        format=replace(Format.of(spans) if spans else RAW_FORMAT, rotated=rotated),
        aligned=all(row.aligned for row in rows),
        pairs=all(row.pairs for row in rows),
        keep=[tensor for row in rows for tensor in row.keep],
        pieces=tuple(weakref.ref(piece) for piece in pieces),
        chunk_starts=chunk_starts,
        of_piece=_chunks_of_a_piece(lengths),
    )


@lru_cache(maxsize=64)
def _tiles(lengths: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Tiles int32 `[tiles, 2]` of pieces of so many tokens, each tile's first token among all, each piece's first."""
    starts = [0, *accumulate(lengths)][:-1]
    tiles = [(index, first) for index, tokens in enumerate(lengths) for first in range(0, tokens, CHUNK)]
    chunk_starts = tuple(starts[index] + first for index, first in tiles)
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 2), chunk_starts, torch.tensor(starts)


def _chunks_of_a_piece(lengths: tuple[int, ...]) -> int:
    """Chunks of each piece of so many tokens, if all have as many but the last, which may have fewer; otherwise 0."""
    *counts, last = (ceil_div(tokens, CHUNK) for tokens in lengths)
    usual = counts[0] if counts else last
    return usual if set(counts) <= {usual} and last <= usual else 0


@dataclass(frozen=True)
class Row:
    """A piece's fields, int64 on the CPU, all but `start`, and what they point to."""

    fields: torch.Tensor
    aligned: bool
    pairs: bool
    keep: list[torch.Tensor]


# Made once a piece: with every block all tables change, but all pieces except for the new one stay.
_rows: weakref.WeakKeyDictionary[RawBlock | PackedSpan, Row] = weakref.WeakKeyDictionary()


def _row(piece: RawBlock | PackedSpan) -> Row:
    known = _rows.get(piece)
    if known is None:
        keep: list[torch.Tensor] = []
        row = _span_row(piece, keep) if isinstance(piece, PackedSpan) else raw_row(piece.k, piece.v, keep)
        row |= {"tokens": piece.tokens} | _angles(piece, keep)
        aligned = all(row.get(field, 0) % ALIGNMENT == 0 for field in READ_AS_WORDS)
        pairs = all(row.get(field, 0) % step == 0 for field, step in _for_pairs(piece).items())
        known = _rows[piece] = Row(torch.tensor([row.get(field, 0) for field in FIELDS]), aligned, pairs, keep)
    return known


def _for_pairs(piece: RawBlock | PackedSpan) -> dict[str, int]:
    """The alignment that `decode_pairs` needs, by field.

    Slices of a group have it at any number of tokens. Results are rounded there as nowhere else, so that what is read
    in this way must not depend on where a span lies: one that is kept on the CPU comes back in storage of its own.
    """
    steps = {"k_grid": 16, "v_grid": 16, "cos": 16, "sin": 16}
    if isinstance(piece, PackedSpan):
        # Eight codes of so many bits are a word of as many bytes; coefficients come two bytes at a time if they can.
        steps |= {"k_codes": piece.key_bits, "v_codes": piece.value_bits, "k_centroids": 4, "v_centroids": 4}
        steps["psac_c"] = 1 if (piece.rank + 1) // 2 % 2 else 2
    return steps


def raw_row(k: torch.Tensor, v: torch.Tensor, keep: list[torch.Tensor]) -> dict[str, int]:
    """Fields of keys and values in full precision, `[B, S, H, D]` of any strides."""
    row = {}
    for side, tensor in (("k", k), ("v", v)):
        tensor = in_rows(tensor)
        keep.append(tensor)
        row |= dict(zip((f"{side}_raw", f"{side}_raw_b", f"{side}_raw_s", f"{side}_raw_h"), _address(tensor)))
    return row


def _angles(piece: RawBlock | PackedSpan, keep: list[torch.Tensor]) -> dict[str, int]:
    """Addresses of the cosines and sines of a piece whose keys lie before RoPE."""
    if piece.rotation is None:
        return {}
    tables = [table.contiguous() for table in piece.rotation.tensors]
    keep.extend(tables)
    return {name: table.data_ptr() for name, table in zip(ANGLES, tables)}


def _address(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    return tensor.data_ptr(), *tensor.stride()[:3]


def _span_row(span: PackedSpan, keep: list[torch.Tensor]) -> dict[str, int]:
    tensors = {name: t.contiguous() for name, t in span.tensors.items()}
    keep.extend(tensors.values())
    names = NAMES | NAMES_ALONG_TOKENS if "k_group_scales" in tensors else NAMES
    row = {field: tensors[name].data_ptr() for field, name in names.items() if name in tensors}
    row["phase"] = span.phase
    for side in "kv":
        if f"{side}_raw" in tensors:
            row |= dict(
                zip(
                    (f"{side}_raw", f"{side}_raw_b", f"{side}_raw_s", f"{side}_raw_h"), _address(tensors[f"{side}_raw"])
                )
            )
        if f"{side}_centroids" in tensors:
            row[f"{side}_count"] = tensors[f"{side}_centroids"].shape[-2]
            row[f"{side}_stages"] = tensors[f"{side}_ids"].shape[3] if tensors[f"{side}_ids"].ndim == 4 else 1
        # One factor per head and span, whatever the method calls it.
        for name in (f"{side}_scales_top", f"{side}_scales_factor"):
            if name in tensors:
                row[f"{side}_top"] = tensors[name].data_ptr()
    if "k_psac_c_bitmap" in tensors:
        before = _rows_before(tensors["k_psac_c_bitmap"], span.tokens)
        keep.append(before)
        row["rows_before"] = before.data_ptr()
        row["row_count"] = tensors["k_psac_c_rows"].shape[2]
        row["psac_c_scales"] = tensors["k_psac_c_row_scales"].data_ptr()
    return row


def _rows_before(bitmap: torch.Tensor, tokens: int) -> torch.Tensor:
    """How many rows are kept before each chunk of tokens, int32 `[B, H, chunks]`: where a chunk's first row lies."""
    kept = unpack_bits(bitmap, 1, tokens).int()
    kept = torch.nn.functional.pad(kept, (0, -tokens % CHUNK)).unflatten(-1, (-1, CHUNK)).sum(-1)
    return (kept.cumsum(-1) - kept).int().contiguous()
