"""What is unpacked from .gz, .xz and .zst, and what is said of the rest."""

import gzip
import io
import lzma

import pytest

from lowprec_train.data.unpacking import Unpacked

ONE, TWO = b"one line\n" * 5000, b"another\n" * 30000


def read(tmp_path, content, packed):
    path = tmp_path / f"text{packed}"
    path.write_bytes(content)
    with Unpacked([path], packed, str(path)) as unpacked:
        return io.BufferedReader(unpacked).read(), unpacked.error


@pytest.mark.parametrize("between", [b"", bytes(4), bytes(20000)])
def test_streams_of_xz_follow_one_another_with_zeros_between_and_behind(tmp_path, between):
    streams = lzma.compress(ONE) + between + lzma.compress(TWO) + between
    assert read(tmp_path, streams, ".xz") == (ONE + TWO, None)


def test_what_is_no_stream_of_xz_is_an_error_and_what_came_before_is_kept(tmp_path):
    damaged = bytearray(lzma.compress(TWO))
    damaged[0] ^= 1
    for behind in (bytes(damaged), b"garbage", bytes(4) + b"garbage" * 5000):
        text, error = read(tmp_path, lzma.compress(ONE) + behind, ".xz")
        assert text == ONE and isinstance(error, lzma.LZMAError | EOFError)


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_an_empty_packed_file_ended_too_early(tmp_path, packed):
    text, error = read(tmp_path, b"", packed)
    assert text == b"" and isinstance(error, EOFError)


def test_a_packed_empty_text_is_none(tmp_path):
    assert read(tmp_path, gzip.compress(b""), ".gz") == read(tmp_path, lzma.compress(b""), ".xz") == (b"", None)
