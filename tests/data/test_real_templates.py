"""Ids and masks of six families' own tokenizers and templates; the oracle is transformers."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import chat, templates
from megatrain_jax.data.records import Conversation
from megatrain_jax.data.tokenizer import load_tokenizer, with_chat_template
from tests.data.real import CALL, CONVERSATIONS, WEATHER, fetched

pytest.importorskip("torch")
pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

# Folder of the tokenizer, its stock template (None is the folder's own) and one with generation tags.
MODELS = {
    "smollm2": (None, None, None),
    "qwen3": ("qwen3", None, "qwen3_training"),
    "qwen2.5": ("qwen3", "qwen2_5", "qwen2_5_training"),
    "llama3.1": ("llama3_1", "llama3_1", "llama3_training"),
    "gemma3": ("gemma3", None, "gemma3_training"),
    "gptoss": ("gptoss", "gptoss", "gptoss_training"),
}
NO_TOOLS = ("smollm2", "gemma3")
ARGUMENTS = '{"city": "Z\u00fcrich <&>"}'


def said(model: str, message: dict, last: bool) -> str:
    """What the assistant writes in a turn, by the documentation of each model's format."""
    text, reasoning = message["content"], message.get("reasoning_content", "")
    if message is CALL or message.get("tool_calls"):
        return {
            "qwen2.5": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
            "llama3.1": f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eot_id|>',
            "gptoss": f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
            "qwen3": "<think>\n\n</think>\n\n" * last
            + f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
        }[model]
    if model == "qwen3":
        return f"<think>\n{reasoning}\n</think>\n\n" * last + text.lstrip("\n") + "<|im_end|>"
    if model == "gptoss":
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning and last else ""
        return thought + f"<|channel|>final<|message|>{text}" + ("<|return|>" if last else "<|end|>")
    if model == "llama3.1":
        return text.strip() + "<|eot_id|>"
    if model == "gemma3":
        return text.strip() + "<end_of_turn>"
    return text + "<|im_end|>"


@functools.lru_cache(maxsize=None)
def tokenizers_of(model):
    """Our tokenizer with the stock template, theirs, and both templates' texts."""
    cache = fetched("fetch_tokenizers", "fetch")
    folder, stock, tagged = MODELS[model]
    path = fetched("fetch_quickstart", "fetch_model") if folder is None else cache / folder
    texts = [name and (cache / "templates" / f"{name}.jinja").read_text(encoding="utf-8") for name in (stock, tagged)]
    return load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path), *texts


def cases():
    return [(m, c) for m in MODELS for c in CONVERSATIONS if not (c == "tools" and m in NO_TOOLS)]


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
    messages, tools = copy.deepcopy(CONVERSATIONS[name]), [WEATHER] if name == "tools" else None
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    samples = chat.supervise(ours, Conversation("x:1", tuple(messages), 0, tools))
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


@pytest.mark.parametrize(("model", "name"), [(m, c) for m, c in cases() if MODELS[m][2] and (m, c) != ("llama3.1", "tools")])  # fmt: skip
def test_masks_equal_those_of_generation_tags(model, name):
    ours, theirs, _, tagged = tokenizers_of(model)
    messages, tools = copy.deepcopy(CONVERSATIONS[name]), [WEATHER] if name == "tools" else None
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


@pytest.mark.parametrize("model", NO_TOOLS)
def test_tool_calls_that_a_template_would_lose_are_refused(model):
    ours, _, stock, _ = tokenizers_of(model)
    record = Conversation("x:1", tuple(CONVERSATIONS["tools"]), 0, [WEATHER])
    with pytest.raises(UserError, match="x:1: the chat template (does not write tool calls, or not all|refuses)"):
        chat.supervise(with_chat_template(ours, stock), record)


@pytest.mark.parametrize("model", MODELS)
def test_plain_text_has_the_ids_and_the_opening_that_transformers_gives_it(model):
    ours, theirs, _, _ = tokenizers_of(model)
    for text in ("Hello world", " caf\u00e9\n\n\t\u6f22\u5b57 12345", "<|im_end|><eos>"):
        assert [*ours.prefix, *ours.encode(text)] == theirs(text)["input_ids"]


@pytest.mark.parametrize(("name", "model", "stock"), [("llama3", "llama3.1", "llama3"), ("gemma", "gemma3", "gemma3"), ("chatml", "qwen3", "gguf-qwen2-0.5b")])  # fmt: skip
def test_named_templates_write_what_the_models_own_write(name, model, stock):
    ours, _, _, _ = tokenizers_of(model)
    text = (fetched("fetch_tokenizers", "fetch") / "templates" / f"{stock}.jinja").read_text(encoding="utf-8")
    for conversation in ("single", "multi", "system", "unicode", "blanks", "open end"):
        messages = CONVERSATIONS[conversation]
        if name == "chatml" and conversation != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        for open_turn in (False, True):
            mine, theirs = (with_chat_template(ours, t).render(messages, open_turn).text for t in (name, text))
            assert mine == theirs


@pytest.mark.exhaustive
def test_a_hundred_templates_render_as_in_transformers_and_supervise_the_answer():
    ours, theirs, _, _ = tokenizers_of("qwen3")
    files = sorted((fetched("fetch_tokenizers", "fetch") / "templates").glob("*.jinja"))
    assert len(files) > 100
    supervised = 0
    for file in files:
        template = file.read_text(encoding="utf-8")
        variables = {"bos_token": "<|endoftext|>"}
        mine = with_chat_template(ours, template, variables)
        for name, messages in CONVERSATIONS.items():
            tools = [WEATHER] if name == "tools" else None
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
