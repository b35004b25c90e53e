"""Megatron's .bin/.idx: against bytes built from the layout alone, Megatron's own writer, and damage."""

import struct
from pathlib import Path

import numpy as np
import pytest

from lowprec_train.data import indexed
from lowprec_train.data.indexed import IndexedDataset, token_dtype
from tests.data.indexed_files import write_indexed

FIXTURES = Path(__file__).parent / "fixtures"
DOCUMENTS = [[[5, 6, 7, 0]], [[0, 1], [2, 3, 4]], [], [[9]]]
FORMS = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def layout(documents, dtype: str, modes: bytes = b"") -> tuple[bytes, bytes]:
    """.bin and .idx by struct alone, from the table of offsets."""
    sequences = [sequence for document in documents for sequence in document]
    form = {"u1": "B", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "f8": "d", "f4": "f", "u2": "H"}[dtype[1:]]
    tokens = b"".join(struct.pack(f"<{len(s)}{form}", *s) for s in sequences)
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", FORMS[dtype])
    idx += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    offset, offsets, bounds = 0, [], [0]
    for sequence in sequences:
        offsets.append(offset)
        offset += len(sequence) * struct.calcsize(f"<{form}")
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    idx += b"".join(struct.pack("<i", len(s)) for s in sequences)
    idx += b"".join(struct.pack("<q", o) for o in offsets) + b"".join(struct.pack("<q", b) for b in bounds)
    return tokens, idx + modes


@pytest.fixture
def files(tmp_path):
    """Put bytes of .bin and .idx in place; the prefix."""

    def put(tokens: bytes, idx: bytes) -> Path:
        prefix = tmp_path / "some_text_document"
        Path(f"{prefix}.bin").write_bytes(tokens)
        Path(f"{prefix}.idx").write_bytes(idx)
        return prefix

    return put


@pytest.mark.parametrize("dtype", FORMS)
def test_writer_writes_the_layout(tmp_path, dtype):
    bounds = np.cumsum([0, *map(len, DOCUMENTS)])
    write_indexed(tmp_path / "a", [sequence for document in DOCUMENTS for sequence in document], dtype, bounds)
    expected = layout(DOCUMENTS, dtype)
    assert ((tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("modes", [b"", bytes([0, 1, 1, 2])])
def test_reader_reads_the_layout(files, dtype, modes):
    dataset = IndexedDataset(files(*layout(DOCUMENTS, dtype, modes)))
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert dataset.dtype == np.dtype(dtype)
    assert dataset.documents.tolist() == [0, 1, 3, 3, 4]
    assert dataset.document_count == 4
    assert (dataset.modes is None) if not modes else (dataset.modes.tolist() == list(modes))


def test_reading_copies_nothing(files):
    dataset = IndexedDataset(files(*layout(DOCUMENTS, "<u2")))
    assert all(np.shares_memory(dataset[i], dataset.data) for i in range(len(dataset)))
    assert not dataset.data.flags.owndata and not dataset.lengths.flags.owndata
    assert not dataset.data.flags.writeable


@pytest.mark.parametrize(("name", "top", "vocab"), [("u16", 65_499, 50_257), ("i32", 128_255, 128_256)])
def test_golden_bytes_of_megatron(tmp_path, name, top, vocab):
    golden = FIXTURES / f"golden_{name}_text_document"
    write_indexed(tmp_path / "ours", [[5, 6, 7, top], [0, 1], [2, 3, 4], [9]], token_dtype(vocab), [0, 1, 3, 4])
    for extension in ("bin", "idx"):
        ours, megatron = tmp_path / f"ours.{extension}", Path(f"{golden}.{extension}")
        assert ours.read_bytes() == megatron.read_bytes()
    assert IndexedDataset(golden)[0].tolist() == [5, 6, 7, top]


def test_golden_modes_of_megatron():
    dataset = IndexedDataset(FIXTURES / "golden_modes_text_document")
    assert dataset.modes.tolist() == [0, 1, 1, 2]
    assert [s.tolist() for s in dataset] == [[5, 6, 7, 65_499], [0, 1], [2, 3, 4], [9]]


def test_token_dtype_follows_megatron():
    assert [token_dtype(size) for size in (4096, 65_499, 65_500, 128_256)] == ["<u2", "<u2", "<i4", "<i4"]


def test_empty_dataset(tmp_path):
    write_indexed(tmp_path / "a", [], np.uint16)
    dataset = IndexedDataset(tmp_path / "a")
    assert (len(dataset), dataset.document_count, len(dataset.data)) == (0, 0, 0)


def test_sequences_are_checked_in_parts(files, monkeypatch):
    """The check of a large index walks it in parts; damage in a later part is still found, by its number."""
    monkeypatch.setattr(indexed, "_CHECKED_AT_ONCE", 2)
    tokens, idx = layout([[[1, 2]]] * 7, "<u2")
    assert len(IndexedDataset(files(tokens, idx))) == 7
    damaged = bytearray(idx)
    struct.pack_into("<i", damaged, 34 + 4 * 5, -3)
    with pytest.raises(ValueError, match=r"some_text_document\.idx: sequence 5 has -3 tokens"):
        IndexedDataset(files(tokens, bytes(damaged)))


TOKENS, INDEX = layout(DOCUMENTS, "<u2")
SIZE = 34 + 12 * 4 + 8 * 5


def patched(at: int, form: str, value: int) -> bytes:
    changed = bytearray(INDEX)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("tokens", "idx", "message"),
    [
        (TOKENS, b"", r"\.idx: truncated: 0 bytes, the header alone has 34"),
        (TOKENS, INDEX[:20], r"\.idx: truncated: 20 bytes"),
        (TOKENS, INDEX[:-9], rf"\.idx: truncated: {SIZE - 9} bytes, needs {SIZE} for 4 sequences and 5"),
        (TOKENS, INDEX + b"xx", rf"\.idx: {SIZE + 2} bytes, expected {SIZE} \(or {SIZE + 4} with modes\)"),
        (TOKENS, b"PK\x03\x04" + INDEX[4:], r"\.idx: not a Megatron index: begins with b'PK\\x03\\x04"),
        (TOKENS, b"TNTIDX\x00\x00\x00" + INDEX[9:], r"not a Megatron index: begins with b'TNTIDX"),
        (TOKENS, b"not an index", r"not a Megatron index"),
        (TOKENS, patched(9, "<Q", 2), r"\.idx: version 2, can read 1"),
        (TOKENS, patched(17, "<B", 9), r"\.idx: unknown dtype code 9, known: \[1, 2, 3, 4, 5, 6, 7, 8\]"),
        (TOKENS, patched(18, "<Q", 2**60), r"\.idx: truncated"),
        (TOKENS, patched(34 + 16, "<q", -2), r"\.idx: sequence 0 begins at byte -2"),
        (TOKENS, patched(34 + 16, "<q", 1), r"\.idx: sequence 0 begins at byte 1, not at a token"),
        (TOKENS, patched(34 + 48, "<q", 1), r"\.idx: document bounds \[1, 4\]"),
        (TOKENS, patched(SIZE - 8, "<q", 5), r"\.idx: document bounds \[0, 5\]"),
        (TOKENS, patched(34 + 48 + 8, "<q", 4), r"\.idx: document 1 has -1 sequences"),
        (TOKENS[:-1], INDEX, r"\.bin: truncated: 19 bytes, its index reaches to byte 20"),
        (b"", INDEX, r"\.bin: truncated: 0 bytes"),
    ],
)
def test_damage_is_one_clear_error(files, tokens, idx, message):
    prefix = files(tokens, idx)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert str(prefix) in str(error.value)


@pytest.mark.parametrize("extension", ["bin", "idx"])
def test_absent_file(files, extension):
    prefix = files(TOKENS, INDEX)
    Path(f"{prefix}.{extension}").unlink()
    with pytest.raises(ValueError, match=rf"some_text_document\.{extension}: no such file"):
        IndexedDataset(prefix)
