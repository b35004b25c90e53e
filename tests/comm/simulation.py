"""Reductions over a list of rank tensors, written without layouts, wires or Quantizers: the oracle of the collectives.

Each takes `flats`, one tensor a rank, and `ranges`, (size, coded) of one row.
"""

import numpy as np
import torch

FP8 = {"E4M3": (torch.float8_e4m3fn, 448.0), "E5M2": (torch.float8_e5m2, 57344.0)}


def rounded(values, coded, format, block):
    """What one contribution decodes to: a 1-D tensor, FP32."""
    if not coded or format in ("BF16", "FP32"):
        return values.float() if format == "FP32" else values.to(torch.bfloat16).float()
    carrier, limit = FP8[format]
    parts = []
    for part in values.float().split(block):
        amax = part.abs().max().item()
        if not np.isfinite(amax):
            parts.append(torch.full_like(part, torch.nan))
            continue
        mantissa, exponent = np.frexp(amax / limit) if amax else (0.5, 1)
        scale = 2.0 ** max(-126, exponent - (mantissa == 0.5))
        parts.append(((part.double() / scale).float().clamp(-limit, limit).to(carrier).double() * scale).float())
    return torch.cat(parts)


def cut(flat, ranges):
    return flat.split([size for size, _ in ranges])


def total(contributions):
    """FP32 sum in rank order."""
    result = contributions[0].clone()
    for each in contributions[1:]:
        result = result + each
    return result


def sum_of_rows(rows, ranges, format, block):
    """The sum of one row, [size], from every rank's contribution to it."""
    each = [[rounded(p, coded, format, block) for p, (_, coded) in zip(cut(row, ranges), ranges)] for row in rows]
    return torch.cat([total(pieces) for pieces in zip(*each)])


def reduce_scatter(flats, ranges, format, block, results=None):
    """One result per rank, or for so many."""
    size = sum(size for size, _ in ranges)
    rows = [flat.view(-1, size) for flat in flats]
    return [sum_of_rows([row[rank] for row in rows], ranges, format, block) for rank in range(results or len(flats))]


def reduce_scatter_by_node(flats, ranges, format, block, node):
    """One result per rank: sums inside of nodes of `node` ranks, rounded once more and added in the nodes' order."""
    firsts = range(0, len(flats), node)
    of_nodes = [reduce_scatter(flats[first : first + node], ranges, format, block, len(flats)) for first in firsts]
    return [sum_of_rows(list(rows), ranges, format, block) for rows in zip(*of_nodes, strict=True)]


def all_reduce_by_node(flats, ranges, format, block, node):
    """The one result, rounded once more still."""
    firsts = range(0, len(flats), node)
    of_nodes = [sum_of_rows(flats[first : first + node], ranges, format, block) for first in firsts]
    return all_reduce(of_nodes, ranges, format, block, whole=False)


def all_reduce(flats, ranges, format, block, whole):
    """The one result: rounded once more unless whole contributions are summed."""
    result = sum_of_rows(flats, ranges, format, block)
    if whole:
        return result
    return torch.cat([rounded(p, coded, format, block) for p, (_, coded) in zip(cut(result, ranges), ranges)])


def shared_multipliers(flats, ranges, format, mu):
    """FP8-LM's s of each part: mu * min over ranks of 2^floor(log2(limit / amax)), NaN if any element is not finite."""
    size, limit, result = sum(size for size, _ in ranges), FP8[format][1], []
    rows = [flat.float().view(-1, size) for flat in flats]
    for pieces in zip(*(row.split([size for size, _ in ranges], dim=1) for row in rows)):
        local = [piece.abs().max().item() for piece in pieces]
        if not all(np.isfinite(local)):
            result.append(np.nan)
            continue
        scales = [np.frexp(limit / amax)[1] - 1 for amax in local if amax]
        result.append(np.float32(mu) * np.float32(2.0 ** min(scales, default=0)))
    return torch.tensor(np.array(result, dtype=np.float32))


def add_fp8(codes, format, every_addition):
    """(the FP8 sum as FP32, which elements an addition left at the maximum)."""
    carrier, limit = FP8[format]
    if not every_addition:
        result = total(codes).clamp(-limit, limit).to(carrier).float()
        return result, result.abs() == limit
    result, at_maximum = codes[0], torch.zeros_like(codes[0], dtype=torch.bool)
    for code in codes[1:]:
        result = (result + code).clamp(-limit, limit).to(carrier).float()
        at_maximum = at_maximum | (result.abs() == limit)
    return result, at_maximum


def shared_row(rows, ranges, multipliers, format, every_addition):
    """(sum of one row, number of codes at the maximum)."""
    carrier, limit = FP8[format]
    parts, at_maximum = [], 0
    for (_, coded), s, *pieces in zip(ranges, multipliers, *(cut(row, ranges) for row in rows)):
        if not coded:
            parts.append(total([piece.to(torch.bfloat16).float() for piece in pieces]))
            continue
        codes = [(piece.float() * s).clamp(-limit, limit).to(carrier).float() for piece in pieces]
        result, at = add_fp8(codes, format, every_addition)
        parts.append(result * (1 / s.double()).float())
        at_maximum += int(at.sum())
    return torch.cat(parts), at_maximum


def reduce_scatter_shared(flats, ranges, mu, format="E4M3", every_addition=True):
    """(one result per rank, the share of codes at the maximum)."""
    size, codes = sum(size for size, _ in ranges), sum(size for size, coded in ranges if coded)
    multipliers = shared_multipliers(flats, ranges, format, mu)
    rows = [flat.view(-1, size) for flat in flats]
    results = [
        shared_row([row[rank] for row in rows], ranges, multipliers, format, every_addition)
        for rank in range(len(flats))
    ]
    return [value for value, _ in results], sum(at for _, at in results) / max(1, codes * len(flats))


def all_reduce_shared(flats, ranges, mu, format="E4M3", every_addition=True):
    """(the one result, the number of codes at the maximum); ranges that are not coded are rounded once more."""
    multipliers = shared_multipliers(flats, ranges, format, mu)
    value, at_maximum = shared_row(flats, ranges, multipliers, format, every_addition)
    pieces = zip(cut(value, ranges), ranges)
    return torch.cat([p if coded else p.to(torch.bfloat16).float() for p, (_, coded) in pieces]), at_maximum
