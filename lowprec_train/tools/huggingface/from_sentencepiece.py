"""A SentencePiece model as the `tokenizer.json` that `transformers` opens, with the same ids for every text.

SentencePiece's BPE keeps no list of merges: it merges the two neighbours whose joined piece has the highest score. So
every way to cut a piece into two pieces is a merge, ranked by the score of the whole. Spaces are U+2581 in pieces, a
character that is in none becomes bytes, and pieces that the user defined are cut out before anything is merged.

What cannot be said that way is not left to luck: the two are compared on texts that are hard for tokenizers, and a
difference is an error. A unigram model (never learnt here) takes the cheapest way through a text; where two ways cost
the same to the last bit but one, the two libraries may choose differently.
"""

from __future__ import annotations

from typing import Any

import sentencepiece

from lowprec_train.train.packages import needs_package

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2  # model_type of sentencepiece_model.proto, as are the types of pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

EXTRA_SPACES = {rf"\A +|[ {SPACE}]+\z": "", " {2,}": " "}  # of remove_extra_whitespaces
_NEVER = -1e6  # score of pieces that no text is cut into, however it spells

PROBES = (
    "Hello world",
    " a  b   c    d ",
    "\n\n  x\n\ty\r\nz\n",
    "def f(x):\n    return x[1:]  # 12345 67.89e-10\n",
    "aaaaaaaaaaaa abababababab abaaba ====== ------ ........ \u2581\u2581\u2581",
    "naïve Ünïcode ﬁ ½ Ａ 中文字符 日本語 עברית \u0301e\u0301 \u200b\u00a0 \U0001f469\u200d\U0001f52c \x00\x7f",
    "<0x0A> <unk> <s> </s> <eod> <|endoftext|> [UNK]",
    "",
)


def tokenizer_json(content: bytes, name: str) -> str:
    """The text of a tokenizer.json. name: for errors.

    Raises:
        ValueError: a package that this takes is missing, the model is neither BPE nor unigram, or what it does to some
            text has no equivalent.
    """
    for package, module in (("tokenizers", "tokenizers"), ("protobuf", "google.protobuf")):
        needs_package(package, extra="hf", what="exporting a SentencePiece tokenizer", module=module)
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto.FromString(content)
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"{name}: model_type {proto.trainer_spec.model_type} is neither BPE nor unigram")
    converted = _converted(proto)
    check(converted, sentencepiece.SentencePieceProcessor(model_proto=content), name, _probes(proto))
    text: str = converted.to_str(pretty=True)
    return text


def check(converted: Any, original: Any, name: str, texts: tuple[str, ...]) -> None:
    """Raise ValueError with the first of the texts whose ids differ."""
    converted.encode_special_tokens = True
    for text in texts:
        here, there = original.encode(text), converted.encode(text, add_special_tokens=False).ids
        if here != there:
            raise ValueError(
                f"{name}: has no equivalent tokenizer.json: {text!r} is {here[:12]}, and would be {there[:12]}; "
                "--tokenizer none exports the model without it"
            )


def special_pieces(content: bytes) -> dict[str, str]:
    """Role -> piece of the tokens that tokenizer_config.json names."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    ids = {"unk_token": processor.unk_id(), "bos_token": processor.bos_id(), "eos_token": processor.eos_id()}
    return {role: processor.id_to_piece(each) for role, each in ids.items() if each >= 0}


def _probes(proto: Any) -> tuple[str, ...]:
    defined = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    return (*PROBES, *(f"a{piece}b {piece} {piece}{piece}" for piece in defined[:64]))


def _converted(proto: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer(_bpe(proto) if proto.trainer_spec.model_type == BPE else _unigram(proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    tokenizer.decoder = _decoder(proto.normalizer_spec)
    special = [piece.piece for piece in proto.pieces if piece.type in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    defined = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece.replace(SPACE, " "), normalized=False) for piece in defined])
    return tokenizer


def _bpe(proto: Any) -> Any:
    from tokenizers.models import BPE as Model

    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = [
        (-score, ids[piece], cut, (piece[:cut], piece[cut:]))
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return Model(
        vocab=ids,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token=next(piece.piece for piece in proto.pieces if piece.type == UNKNOWN),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _unigram(proto: Any) -> Any:
    from tokenizers.models import Unigram

    unknown = next(index for index, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    vocabulary = [(piece.piece, piece.score if piece.type == NORMAL else _NEVER) for piece in proto.pieces]
    return Unigram(vocabulary, unk_id=unknown, byte_fallback=proto.trainer_spec.byte_fallback)


def _normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(pattern), to) for pattern, to in EXTRA_SPACES.items()]
    steps += [normalizers.Prepend(SPACE)] if spec.add_dummy_prefix else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(spec: Any) -> Any:
    from tokenizers import decoders

    first = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first])
