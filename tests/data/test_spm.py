"""SentencePiece models without a tokenizer.json. The oracles are sentencepiece itself and transformers."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import chat
from megatrain_jax.data.records import Conversation
from megatrain_jax.data.tokenizer import load_tokenizer, with_chat_template
from tests.data.real import CONVERSATIONS, fetched, published_template, sentencepiece_folder, tools_of

sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("google.protobuf")

RANDOM = random.Random(0)
LETTERS = "abc  \n\t,.12\u00e9\u6f22\U0001f600\u2581 the The hello"
LICENSE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
TEXTS = (
    [LICENSE[i : i + 60] for i in range(0, len(LICENSE), 173)]
    + ["Hello world", "  two  spaces ", "", "\n\nx", " ", "a" * 40, "\ufb01ne \u2460"]
    + ["".join(RANDOM.choice(LETTERS) for _ in range(RANDOM.randrange(50))) for _ in range(200)]
)


@pytest.fixture(scope="module", params=["bpe", "unigram", "bpe plain"])
def model(request, tmp_path_factory):
    """A small model as SentencePiece trains it: normalising text, or leaving it as it is."""
    folder = tmp_path_factory.mktemp("spm")
    sentences = [
        "the quick brown fox",
        "hello hello there, abc",
        "caf\u00e9 12 the The",
        "one two three four five",
    ] * 20
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(folder / "m"),
        vocab_size=900,
        model_type=request.param.split()[0],
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=["<user>"],
        minloglevel=2,
        **(plain if "plain" in request.param else {}),
    )
    return folder / "m.model"


def test_ids_equal_those_of_sentencepiece(model, tmp_path):
    ours = load_tokenizer(sentencepiece_folder(tmp_path, model, legacy=True))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert ours.vocab_size == theirs.get_piece_size()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.prefix == (theirs.bos_id(),) and ours.eos_id == theirs.eos_id()
    assert ours.encode("the<user>the")[1:-1].count(theirs.piece_to_id("<user>")) == 1


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    ("version", "template"),
    [("v1", "mixtral-8x7b"), ("v3", "mistral-large-123b"), ("v7", "mistral-small-24b")],
)
def test_chats_of_mistral_equal_transformers(version, template, legacy, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    cache = fetched("fetch_tokenizers", "fetch")
    folder = sentencepiece_folder(tmp_path, cache / "mistral" / f"{version}.model", legacy=legacy)
    text = published_template(f"gguf-{template}")
    # Its class for Llama orders merges by id, which is not what SentencePiece does; the general one by score.
    theirs = transformers.TokenizersBackend.from_pretrained(folder)
    ours = with_chat_template(load_tokenizer(folder), text)
    for name, messages in CONVERSATIONS.items():
        if tools_of(name):  # test_real_templates.py has the templates that know of tools
            continue
        [sample] = chat.supervise(ours, Conversation("x:1", tuple(messages), 0))
        expected = theirs.apply_chat_template(messages, chat_template=text, tokenize=True, return_dict=True)
        np.testing.assert_array_equal(sample.token_ids, expected["input_ids"])
        found = ours.decode(sample.token_ids[sample.supervised], skip_special_tokens=False)
        answers = "".join(turn["content"] + "</s>" for turn in messages if turn["role"] == "assistant")
        assert "".join(found.split()) == "".join(answers.split())
        # Nothing but blanks stands before an answer, so the model is asked for each of its tokens.
        if version == "v1" and name == "multi":
            first = ours.backend.id_to_token(int(sample.token_ids[np.flatnonzero(sample.supervised)[0]]))
            assert first == "\u2581Hello"


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff\xff no model")
    with pytest.raises(UserError, match="is no SentencePiece model"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs SentencePiece: pip install sentencepiece protobuf"):
        load_tokenizer(tmp_path)
