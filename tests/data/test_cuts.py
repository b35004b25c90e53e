"""A long document in pieces has the tokens of the whole document, or says that it may not."""

import pytest

from lowprec_train.data import cuts
from lowprec_train.data.tokenizer import Tokenizer, encode_documents, encode_pieces
from tests.data import texts

RUNS = {
    "han": texts.HAN * 10,
    "emoji": texts.EMOJI * 300,
    "words": "lorem " * 700,
    "two spaces": "abc  " * 800,
    "lines": "abc d\n" * 700,
    "white space": " \n\t\n  " * 700,
    "digits": "0123456789" * 400,
    "signs": "!?.,'" * 800,
    "jamo": "".join(map(chr, range(0x1100, 0x1175))) * 30,
    "marks": "ae\u0301\u0308 o" * 700,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(cuts, "PIECE", 300)
    monkeypatch.setattr(cuts, "LONGEST", 1200)


def in_pieces(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[cuts.TextSpan]]:
    found = [*cuts.pieces(cuts.blocks(text), tokenizer)]
    assert "".join(piece.text for piece in found) == text
    assert [piece.last for piece in found] == [*[False] * (len(found) - 1), True]
    assert [piece.continued for piece in found] == [False, *[True] * (len(found) - 1)]
    return [i for ids in encode_pieces(found, tokenizer) for i in ids], found


def check_exact(tokenizer: Tokenizer, *, seeds: int = 10, sure_of: tuple[str, ...] = ()) -> None:
    """Tokens as of the whole wherever no cut says otherwise: always in mixed text, and in the runs `sure_of`."""
    samples = {f"mixed {seed}": texts.mixed(seed, 4000) for seed in range(seeds)} | RUNS
    for name, text in samples.items():
        ids, found = in_pieces(text, tokenizer)
        inexact = sum(piece.inexact for piece in found)
        assert inexact or ids == tokenizer.encode([text], parallel=False)[0], name
        assert inexact == 0 or not (name in sure_of or name.startswith("mixed")), name
        assert len(found) > 2, name


class Words:
    """Cuts after a comma, and has an id for every letter."""

    def cut(self, text: str) -> int | None:
        return text.rfind(",") + 1 or None


def test_pieces_end_at_the_last_cut_and_do_not_depend_on_blocks():
    text = ",".join("x" * (number % 90) for number in range(200))
    found = [*cuts.pieces([text], Words())]
    assert all(piece.text.endswith(",") and len(piece.text) <= 300 for piece in found[:-1])
    for size in (1, 7, 299):
        assert [*cuts.pieces((text[at : at + size] for at in range(0, len(text), size)), Words())] == found
    after = "".join(piece.text for piece in found[3:])  # as a restart reads on
    assert [*cuts.pieces([after], Words(), continued=True)] == found[3:]


def test_text_without_a_cut_is_cut_and_says_so():
    found = [*cuts.pieces(["a" * 3000], Words())]
    assert [(len(piece.text), piece.inexact) for piece in found] == [(1200, True), (1200, True), (600, False)]
    (whole,) = cuts.pieces(["a" * 300], Words())
    assert whole == cuts.TextSpan(text="a" * 300)
    assert [*cuts.pieces([], Words())] == [cuts.TextSpan(text="")]


def test_a_cut_is_tried_on_the_text_around_it(monkeypatch):
    """Where two sides have other tokens than both together, the place before is taken."""
    monkeypatch.setattr(cuts, "CONTEXT", 6)

    def encode(parts):
        return [[0] if "two three" in part else [*part.encode()] for part in parts]

    spaces = "one two three four, and five"
    assert cuts.last_cut(spaces, lambda left, right: right == " ", encode) == 19
    assert cuts.last_cut(spaces[:16], lambda left, right: right == " ", encode) == 3


def test_documents_of_all_lengths():
    tokenizer = texts.sentencepiece_model(byte_fallback=True)
    documents = ["", "short", texts.mixed(1, 2000), " ", texts.mixed(2, 700)]
    assert [*encode_documents(documents, tokenizer)] == tokenizer.encode(documents)
