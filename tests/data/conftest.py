"""A tiny byte-level tokenizer, chat templates of the common kinds, and a dataset section to vary."""

from __future__ import annotations

import json
import types

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatrain_jax.config import DatasetConfig
from megatrain_jax.data.tokenizer import Tokenizer, load_tokenizer

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Qwen3's: reasoning is written for turns after the last question only.
REASONING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}"
    "{%- set answer = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.index0 > ns.last %}"
    "{{- '<think>\n' + message.reasoning_content | default('') + '\n</think>\n\n' }}"
    "{%- endif %}{{- answer + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Knows no generation prompt, and puts a system message of its own first.
PLAIN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the answer? The answer is forty-two.",
    "system user assistant\nHello there, how are you? I am well, thank you. <think>\nLet me think.\n</think>\n\n",
    "caf\u00e9 \u2603 \U0001f600 \u6f22\u5b57 The end. The end. Hello, Hello!",
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A Hugging Face folder as transformers 4 wrote them, with the ChatML template in tokenizer_config.json."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 4, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def bare_tokenizer(tokenizer):
    """The same without a chat template."""
    return Tokenizer(tokenizer.backend, tokenizer.special_tokens, None)


@pytest.fixture(scope="session")
def templates():
    return types.SimpleNamespace(chatml=CHATML, reasoning=REASONING, plain=PLAIN)


@pytest.fixture
def section():
    """Makes a dataset section: short rows, and what is given by name."""

    def make(path, **changes):
        return DatasetConfig(**{"path": str(path), "max_seq_len": 64, "pad_to_multiple_of": 8} | changes)

    return make


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows, one a line; a row that is text is written as it is."""

    def write(*rows, name="rows.jsonl"):
        file = tmp_path / name
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return write
