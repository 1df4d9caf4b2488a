"""Principal-subspace attention correction (QuantWM, section 3.3): keep the key error along the dominant queries.

    C = E U_r,    K^ = K^_0 + C U_r^T

with U_r the leading eigenvectors of the queries' second moment.
"""

from __future__ import annotations

import torch

from .bits import pack_bits, unpack_bits
from .midrise import decode_log_scales, encode_log_scales

ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE = 8, 16
FP16_LARGEST = 65504.0


def leading_eigenvectors(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal `[N, D, rank]` for the largest eigenvalues of symmetric `[N, D, D]`, largest last."""
    # LAPACK and cuSOLVER differ in the last bits only; on devices without a solver the CPU's is used.
    device = moment.device
    work = moment.double() if device.type in ("cpu", "cuda") else moment.cpu().double()
    # A model that computes nonsense gives black frames without this pack; it must not end in a solver's error with it.
    work = work.nan_to_num(0.0, 0.0, 0.0)
    peak = work.abs().amax((1, 2), keepdim=True).clamp_min(1e-300)
    _, vectors = torch.linalg.eigh(work / peak)
    return vectors[..., -rank:].to(device=device, dtype=moment.dtype)


def encode_coefficients_int4(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """INT4 rows with a logarithmic 8-bit scale per token under one bf16 factor per head and span.

    Args:
        coefficients: float `[N, S, R]`.

    Returns:
        packed uint8 `[N, S, ceil(R/2)]`, scale codes uint8 `[N, S]`, factor bf16 `[N]`.
    """
    wanted = coefficients.abs().amax(-1, keepdim=True) / 7
    scale_codes, factor = encode_log_scales(wanted, ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE)
    unit = decode_log_scales(scale_codes, factor, ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE)
    codes = torch.where(unit > 0, coefficients / unit, 0.0).round().clamp(-8, 7) + 8
    return pack_bits(codes.to(torch.uint8), 4), scale_codes.squeeze(-1), factor


def decode_coefficients_int4(
    packed: torch.Tensor, scale_codes: torch.Tensor, factor: torch.Tensor, rank: int
) -> torch.Tensor:
    """Float `[N, S, R]`."""
    unit = decode_log_scales(scale_codes.unsqueeze(-1), factor, ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE)
    return unit * (unpack_bits(packed, 4, rank).float() - 8)


def encode_coefficients_int8(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's rows: INT8 `[N, S, R]` with an FP16 scale per token `[N, S]` (appendix D.1)."""
    scale = (coefficients.abs().amax(-1) / 127).clamp_max(FP16_LARGEST).half()
    unit = scale.float().unsqueeze(-1)
    codes = torch.where(unit > 0, coefficients / unit, 0.0).round().clamp(-128, 127)
    return codes.to(torch.int8), scale


def decode_coefficients_int8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float `[N, S, R]`."""
    return codes.float() * scale.float().unsqueeze(-1)


def helpful_rows(
    error: torch.Tensor, coefficients: torch.Tensor, basis: torch.Tensor, moment: torch.Tensor
) -> torch.Tensor:
    """Rows whose stored coefficients lower the query-weighted error e^T M e, bool `[N, S]`.

    Within the leading subspace M acts as its eigenvalues, so only the projections are compared.
    """
    eigenvalues = (basis * (moment @ basis)).sum(1, keepdim=True)
    projection = error @ basis
    before = (eigenvalues * projection.square()).sum(-1)
    after = (eigenvalues * (projection - coefficients).square()).sum(-1)
    return after < before
