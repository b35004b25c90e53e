"""Two E2M1 codes a byte (T01): against the layout of the format, sign | exponent 2 | mantissa 1, written out here."""

from __future__ import annotations

import pytest
import torch

import lowprec_train.ops  # noqa: F401

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NIBBLES = {0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0}


def codes(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("low", range(16))
def test_every_byte(low):
    for high in range(16):
        values = [(-1.0 if n & 8 else 1.0) * NIBBLES[n & 7] for n in (low, high)]
        packed = torch.ops.lowprec.pack_e2m1(codes(values))
        assert packed.tolist() == [low | high << 4]
        unpacked = torch.ops.lowprec.unpack_e2m1(packed)
        assert torch.equal(unpacked.view(torch.uint8), codes(values).view(torch.uint8))  # the sign of zero too


def test_round_trip_of_a_matrix():
    signed = torch.tensor(VALUES + [-v for v in VALUES])
    x = signed[torch.randint(16, (64, 96))].to(torch.float8_e4m3fn)
    packed = torch.ops.lowprec.pack_e2m1(x)
    assert packed.shape == (64, 48) and packed.dtype == torch.uint8
    assert torch.equal(torch.ops.lowprec.unpack_e2m1(packed).view(torch.uint8), x.view(torch.uint8))
