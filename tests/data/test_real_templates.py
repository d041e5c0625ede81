"""Ids and masks of six families' own tokenizers and templates; the oracle is transformers."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path

import jinja2
import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import chat, templates
from megatrain_jax.data.records import Conversation
from megatrain_jax.data.tokenizer import load_tokenizer, with_chat_template
from tests.data.real import CONVERSATIONS, fetched, published_template, sentencepiece_folder, tools_of

pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

# Folder of the tokenizer or its SentencePiece model, its stock template (None is the folder's own), one with generation tags.
MODELS = {
    "smollm2": (None, None, None),
    "qwen3": ("qwen3", None, "qwen3_training"),
    "qwen2.5": ("qwen3", "qwen2_5", "qwen2_5_training"),
    "llama3.1": ("llama3_1", "llama3_1", "llama3_training"),
    "gemma3": ("gemma3", None, "gemma3_training"),
    "gptoss": ("gptoss", "gptoss", "gptoss_training"),
    "mistral-nemo": ("mistral/v3.model", "mistralai-Mistral-Nemo-Instruct-2407", None),
    "mistral-small": ("mistral/v7.model", "Mistral-Small-3.2-24B-Instruct-2506", None),
    "ministral": ("mistral/v7.model", "mistralai-Ministral-3-14B-Reasoning-2512", None),
}
WITH_TOOLS = [name for name in CONVERSATIONS if tools_of(name)]
# What a template raises an error at, there as here: roles, several calls in a turn, calls without an id, empty answers.
REFUSED = {
    *(("gemma3", name) for name in WITH_TOOLS),
    ("llama3.1", "two calls"),
    ("mistral-nemo", "tools"),
    ("mistral-small", "tools"),
    ("ministral", "empty"),
}
# What a template leaves out without a word: calls, all but the first of several, a system message that comes early.
LOST = {*(("smollm2", name) for name in WITH_TOOLS), ("gptoss", "two calls"), ("mistral-nemo", "system")}


def said(model: str, message: dict, last: bool) -> str:
    """What the assistant writes in a turn, by the documentation of each model's format."""
    text, reasoning = message["content"], message.get("reasoning_content", "")
    if calls := message.get("tool_calls"):
        return calls_said(model, calls, last)
    if model == "qwen3":
        return f"<think>\n{reasoning}\n</think>\n\n" * last + text.lstrip("\n") + "<|im_end|>"
    if model == "gptoss":
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning and last else ""
        return thought + f"<|channel|>final<|message|>{text}" + ("<|return|>" if last else "<|end|>")
    if model == "llama3.1":
        return text.strip() + "<|eot_id|>"
    if model == "gemma3":
        return text.strip() + "<end_of_turn>"
    return text + ("</s>" if "stral" in model else "<|im_end|>")


def calls_said(model: str, calls: list[dict], last: bool) -> str:
    called = [(call["function"]["name"], dump(call["function"]["arguments"]), call.get("id")) for call in calls]
    if model.startswith("qwen"):
        empty = "<think>\n\n</think>\n\n" * (model == "qwen3" and last)
        written = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given, _ in called
        ]
        return empty + "\n".join(written) + "<|im_end|>"
    if model == "mistral-nemo":
        written = [f'{{"name": "{name}", "arguments": {given}, "id": "{number}"}}' for name, given, number in called]
        return f"[TOOL_CALLS][{', '.join(written)}]</s>"
    if "stral" in model:
        number = lambda number: f"[CALL_ID]{number}" * (model == "mistral-small")  # noqa: E731
        return "".join(f"[TOOL_CALLS]{name}{number(i)}[ARGS]{given}" for name, given, i in called) + "</s>"
    [(name, given, _)] = called
    return {
        "llama3.1": f'{{"name": "{name}", "parameters": {given}}}<|eot_id|>',
        "gptoss": f" to=functions.{name}<|channel|>commentary json<|message|>{given}<|call|>",
    }[model]


dump = functools.partial(json.dumps, ensure_ascii=False)


@functools.lru_cache(maxsize=None)
def tokenizers_of(model):
    """Our tokenizer with the stock template, theirs, and both templates' texts."""
    cache = fetched("fetch_tokenizers", "fetch")
    folder, stock, tagged = MODELS[model]
    texts = [name and published_template(name) for name in (stock, tagged)]
    if folder is None:
        path = fetched("fetch_quickstart", "fetch_model")
    elif not folder.endswith(".model"):
        path = cache / folder
    else:
        with tempfile.TemporaryDirectory() as scratch:
            path = sentencepiece_folder(Path(scratch), cache / folder, legacy=False)
            # The general class: that of Llama orders merges by id, which is not what SentencePiece does.
            return load_tokenizer(path), transformers.TokenizersBackend.from_pretrained(path), *texts
    return load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path), *texts


def cases():
    return [(model, name) for model in MODELS for name in CONVERSATIONS]


def theirs_ids(theirs, messages, template, tools, **more):
    # The whole model's length is no limit of a rendering.
    theirs.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return theirs.apply_chat_template(
        messages, chat_template=template, tools=tools, tokenize=True, return_dict=True, **more
    )


@pytest.mark.parametrize(("model", "name"), cases())
def test_ids_equal_transformers_and_what_the_assistant_says_is_supervised(model, name):
    ours, theirs, stock, _ = tokenizers_of(model)
    ours = with_chat_template(ours, stock)
    messages, tools = copy.deepcopy(CONVERSATIONS[name]), tools_of(name)
    record = Conversation("x:1", tuple(messages), 0, tools)
    if (model, name) in REFUSED:
        with pytest.raises(jinja2.TemplateError) as raised:
            theirs_ids(theirs, messages, stock, tools)
        with pytest.raises(UserError, match=f"x:1: the chat template refuses the conversation: {raised.value}"):
            chat.supervise(ours, record)
        return
    if (model, name) in LOST:
        assert theirs_ids(theirs, messages, stock, tools)
        lost = "does not write tool calls, or not all of them|leaves out a message of 'system'"
        with pytest.raises(UserError, match=f"x:1: the chat template ({lost})"):
            chat.supervise(ours, record)
        return
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    samples = chat.supervise(ours, record)
    lengths = [i + 1 for i in turns[:-1]] + [len(messages)]
    whole = {n: theirs_ids(theirs, messages[:n], stock, tools)["input_ids"] for n in {*lengths, turns[-1] + 1}}
    found = []
    for sample in samples:
        end = next(n for n in sorted(whole) if whole[n] == sample.token_ids.tolist())
        mine = [i for i in turns if i < end and i not in found]
        found += mine
        text = "".join(said(model, messages[i], i == turns[-1] or i + 1 == end) for i in mine)
        decoded = ours.decode(sample.token_ids[sample.supervised], skip_special_tokens=False)
        # A token that has blanks of the header and of the content is supervised.
        assert (
            (decoded.split(), len(decoded) >= len(text)) == (text.split(), True)
            if name == "blanks"
            else decoded == text
        )
    assert found == turns
    if len(samples) == 1 and turns[-1] + 1 == len(messages):
        assert samples[0].token_ids.tolist() == whole[len(messages)]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model, name in cases()
        if MODELS[model][2] and (model, name) not in REFUSED | LOST and not (model == "llama3.1" and name in WITH_TOOLS)
    ],
)
def test_masks_equal_those_of_generation_tags(model, name):
    ours, theirs, _, tagged = tokenizers_of(model)
    messages, tools = copy.deepcopy(CONVERSATIONS[name]), tools_of(name)
    samples = chat.supervise(with_chat_template(ours, tagged), Conversation("x:1", tuple(messages), 0, tools))
    ends = [i + 1 for i, turn in enumerate(messages) if turn["role"] == "assistant" or i + 1 == len(messages)]
    prefixes = [theirs_ids(theirs, messages[:n], tagged, tools, return_assistant_tokens_mask=True) for n in ends]
    total = 0
    for sample in samples:
        out = next(out for out in prefixes if out["input_ids"] == sample.token_ids.tolist())
        mask = np.array(out["assistant_masks"], bool)
        mask[: np.flatnonzero(sample.supervised)[0]] = False  # earlier turns are context of a sample that was split off
        np.testing.assert_array_equal(sample.supervised, mask)
        total += int(np.count_nonzero(np.diff(mask.astype(int), prepend=0) == 1))
    assert total == sum(message["role"] == "assistant" for message in messages)


@pytest.mark.parametrize("model", [model for model in MODELS if "stral" not in model])  # of those test_spm.py
def test_plain_text_has_the_ids_and_the_opening_that_transformers_gives_it(model):
    ours, theirs, _, _ = tokenizers_of(model)
    for text in ("Hello world", " caf\u00e9\n\n\t\u6f22\u5b57 12345", "<|im_end|><eos>"):
        assert [*ours.prefix, *ours.encode(text)] == theirs(text)["input_ids"]


@pytest.mark.parametrize(("name", "model", "stock"), [("llama3", "llama3.1", "llama3"), ("gemma", "gemma3", "gemma3"), ("chatml", "qwen3", "gguf-qwen2-0.5b")])  # fmt: skip
def test_named_templates_write_what_the_models_own_write(name, model, stock):
    ours, _, _, _ = tokenizers_of(model)
    text = published_template(stock)
    for conversation in ("single", "multi", "system", "unicode", "blanks", "open end"):
        messages = CONVERSATIONS[conversation]
        if name == "chatml" and conversation != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        for open_turn in (False, True):
            mine, theirs = (with_chat_template(ours, t).render(messages, open_turn).text for t in (name, text))
            assert mine == theirs


@pytest.mark.exhaustive
def test_two_hundred_templates_render_as_in_transformers_and_supervise_the_answer():
    ours, theirs, _, _ = tokenizers_of("qwen3")
    cache = fetched("fetch_tokenizers", "fetch")
    files = sorted([*(cache / "templates").glob("*.jinja"), *(cache / "templates-llamacpp").glob("*.jinja")])
    assert len(files) > 200
    supervised = 0
    for file in files:
        template = file.read_text(encoding="utf-8")
        variables = {"bos_token": "<|endoftext|>"}
        mine = with_chat_template(ours, template, variables)
        for name, messages in CONVERSATIONS.items():
            tools = tools_of(name)
            try:
                expected = theirs.apply_chat_template(
                    messages, chat_template=template, tools=tools, tokenize=False, **variables
                )
            except Exception:  # noqa: BLE001 (whatever a template or jinja raises)
                with pytest.raises(UserError):
                    mine.render(messages, tools=tools)
                continue
            assert mine.render(messages, tools=tools).text == expected, (file.stem, name)
            if name not in ("single", "multi"):
                continue
            try:
                samples = chat.supervise(mine, Conversation("x:1", tuple(messages), 0, tools))
            except UserError as error:
                assert "leaves out" in str(error), file.stem
                continue
            for sample, turn in zip(samples[::-1], messages[::-2], strict=False):
                text = mine.decode(sample.token_ids[sample.supervised], skip_special_tokens=False)
                assert turn["content"] in text, file.stem
                if not templates.has_generation_tags(template):
                    assert not any(message["content"] in text for message in messages[::2]), file.stem
            supervised += 1
    assert supervised > 200
