"""A SentencePiece model (tokenizer.model) as a tokenizers object, which gives the same ids and also offsets."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatrain_jax.config import UserError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def read_sentencepiece(file: pathlib.Path, legacy: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece model of type BPE or unigram.

    Args:
      legacy: a blank is put before every stretch of text between special tokens, and not before the first alone.

    Raises:
      UserError: sentencepiece is not installed, or the file is no such model.
    """
    if importlib.util.find_spec("sentencepiece") is None or importlib.util.find_spec("google.protobuf") is None:
        raise UserError(f"model.tokenizer: '{file}' needs SentencePiece: pip install sentencepiece protobuf")
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError:
        raise UserError(f"model.tokenizer: '{file}' is no SentencePiece model") from None
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE) or not proto.pieces:
        raise UserError(f"model.tokenizer: '{file}' is neither a BPE nor a unigram model")
    backend = tokenizers.Tokenizer(_unigram(proto) if proto.trainer_spec.model_type == _UNIGRAM else _bpe(proto))
    backend.normalizer = _normalizer(proto.normalizer_spec, legacy)
    backend.pre_tokenizer = _pre_tokenizer(proto, legacy)
    backend.decoder = _decoder(proto)
    backend.add_tokens(
        [
            AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
            for piece in proto.pieces
            if piece.type in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _unigram(proto) -> models.Unigram:
    vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
    return models.Unigram(vocabulary, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _bpe(proto) -> models.BPE:
    """SentencePiece merges the two neighbours whose union has the best score: every way to cut a piece is a merge."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merged = {piece.piece: -piece.score for piece in proto.pieces if piece.type == _NORMAL}
    merges = sorted(
        (score, ids[text], ids[text[:cut]], ids[text[cut:]])
        for text, score in merged.items()
        for cut in range(1, len(text))
        if text[:cut] in merged and text[cut:] in merged
    )
    texts = [piece.piece for piece in proto.pieces]
    spec = proto.trainer_spec
    return models.BPE(
        ids,
        [(texts[left], texts[right]) for _, _, left, right in merges],
        unk_token=spec.unk_piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )


def _normalizer(spec, legacy: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and legacy:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizer(proto, legacy: bool) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if proto.normalizer_spec.add_dummy_prefix and not legacy:
        steps.append(pre_tokenizers.Metaspace(_SPACE, "first", split=False))
    whole = sorted((piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED), key=len, reverse=True)
    if whole:
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, whole))), "isolated"))
    return pre_tokenizers.Sequence(steps)


def _decoder(proto) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
