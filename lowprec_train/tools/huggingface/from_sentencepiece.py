"""Conversion of a SentencePiece model to a Hugging Face `tokenizer.json` with the same token ids.

SentencePiece's BPE stores no merge list: it merges the two neighbours whose joined piece has the highest score. The
converted merge list therefore has every split of a piece into two pieces, ordered by the score of the joined piece.
Pieces write a space as U+2581, unknown characters fall back to bytes, and user-defined pieces are split off first.

Both tokenizers encode a set of difficult texts, and a difference is an error. A unigram model (this project trains
none) chooses the segmentation of lowest cost; the two libraries may resolve near-ties of that cost differently.
"""

from __future__ import annotations

from typing import Any

import sentencepiece

from lowprec_train.train.packages import needs_package

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2  # model_type in sentencepiece_model.proto; the next line has its types of pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

EXTRA_SPACES = {rf"\A +|[ {SPACE}]+\z": "", " {2,}": " "}  # pattern -> replacement of remove_extra_whitespaces
_NEVER = -1e6  # score of pieces that are not normal: no segmentation contains them

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
    """Return the content of the tokenizer.json. name: of the model, for errors.

    Raises:
        ValueError: a needed package is missing, the model is neither BPE nor unigram, or the converted tokenizer
            encodes a probe text differently.
    """
    for package, module in (("tokenizers", "tokenizers"), ("protobuf", "google.protobuf")):
        needs_package(package, extra="hf", what="exporting a SentencePiece tokenizer", module=module)
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto.FromString(content)
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"{name}: model_type {proto.trainer_spec.model_type} is neither BPE (2) nor unigram (1)")
    converted = _converted(proto)
    check(converted, sentencepiece.SentencePieceProcessor(model_proto=content), name, _probes(proto))
    return converted.to_str(pretty=True)


def check(converted: Any, original: Any, name: str, texts: tuple[str, ...]) -> None:
    """Raise ValueError for the first text that the two tokenizers encode differently."""
    converted.encode_special_tokens = True
    for text in texts:
        here, there = original.encode(text), converted.encode(text, add_special_tokens=False).ids
        if here != there:
            raise ValueError(
                f"{name} has no equivalent tokenizer.json: {text!r} is {here[:12]}, and would be {there[:12]}; "
                "--tokenizer none exports the model without a tokenizer"
            )


def special_pieces(content: bytes) -> dict[str, str]:
    """The special tokens of tokenizer_config.json: key (`eos_token`) -> piece."""
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
