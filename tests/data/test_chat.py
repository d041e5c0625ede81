"""Masks against transformers' own, and what no oracle knows: splits, folders, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from megatrain_jax.config import UserError
from megatrain_jax.data import chat
from megatrain_jax.data.records import Completion, Conversation, Text

NAMES = {"u": "user", "a": "assistant", "s": "system"}
DIALOGUES = {
    "single": ["u:What is the answer?", "a:Forty-two."],
    "multi": ["u:Hello there", "a:Hello, how are you?", "u:I am well. You?", "a:Well, thank you."],
    "system": ["s:Be brief.", "u:Hi", "a:Hello"],
    "unicode": [
        "u:caf\u00e9 \u2603?",
        "a:\U0001f600 \u6f22\u5b57 \U0001f9d1\u200d\U0001f680!",
        "u:e\u0301",
        "a:\U0001f600",
    ],
    "blanks": ["u: \n Hi \n\n", "a:\n\n  spaced  \n\n", "u:\t", "a: "],
    "markup": ["u:What is <think>?", "a:{{ x }} {% if %} <b>&amp;</b>", "u:<|im_end|>", "a:No"],
    "open end": ["u:Hi", "a:Hello", "u:And?"],
    "assistant first": ["a:Welcome", "u:Hi", "a:Hello"],
    "empty": ["u:", "a:", "u:x", "a:y"],
}

# Neither a generation prompt nor a special token at the end of a turn.
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def conversation(turns, completion_start=0):
    messages = tuple({"role": NAMES[turn[0]], "content": turn[2:]} for turn in turns)
    return Conversation("rows.jsonl:7", messages, completion_start)


def supervised_text(tokenizer, sample):
    return tokenizer.decode(sample.token_ids[sample.supervised], skip_special_tokens=False)


def whole_text(tokenizer, sample):
    return tokenizer.decode(sample.token_ids, skip_special_tokens=False)


def transformers_mask(folder, messages, template):
    """Token ids and mask by transformers, from the template's generation tags."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    out = theirs.apply_chat_template(
        list(messages), chat_template=template, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    return out["input_ids"], np.array(out["assistant_masks"], bool)


@pytest.mark.parametrize("name", DIALOGUES)
def test_ids_and_mask_equal_transformers(tokenizer, tokenizer_folder, templates, name):
    record = conversation(DIALOGUES[name])
    [sample] = chat.supervise(tokenizer, record)
    ids, mask = transformers_mask(tokenizer_folder, record.messages, templates.chatml)
    np.testing.assert_array_equal(sample.token_ids, ids)
    np.testing.assert_array_equal(sample.supervised, mask)


@pytest.mark.parametrize("name", sorted(set(DIALOGUES) - {"open end", "assistant first"}))
def test_turns_of_a_template_that_drops_reasoning_equal_transformers(tokenizer, tokenizer_folder, templates, name):
    record = conversation(DIALOGUES[name])
    record.messages[-1]["reasoning_content"] = "Let me think."
    samples = chat.supervise(chat.with_chat_template(tokenizer, templates.reasoning), record)
    turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    assert len(samples) == len(turns)
    for sample, turn in zip(samples, turns, strict=True):
        ids, mask = transformers_mask(tokenizer_folder, record.messages[: turn + 1], templates.reasoning)
        np.testing.assert_array_equal(sample.token_ids, ids)
        earlier = sum(message["role"] == "assistant" for message in record.messages[:turn])
        starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
        mask[: starts[earlier]] = False  # the turns before are context here
        np.testing.assert_array_equal(sample.supervised, mask)


@pytest.mark.parametrize("name", DIALOGUES)
def test_all_turns_and_nothing_else_are_supervised(tokenizer, name):
    [sample] = chat.supervise(tokenizer, conversation(DIALOGUES[name]))
    answers = [turn[2:] + "<|im_end|>" for turn in DIALOGUES[name] if turn[0] == "a"]
    assert supervised_text(tokenizer, sample).replace("\n", "") == "".join(answers).replace("\n", "")


def test_which_turns_are_supervised(tokenizer):
    turns = ["u:q1", "a:a1", "u:q2", "a:a2", "u:q3", "a:a3"]
    expected = {"assistant": "a1 a2 a3", "completion": "a2 a3", "last_assistant": "a3"}
    for train_on, answers in expected.items():
        [sample] = chat.supervise(tokenizer, conversation(turns, completion_start=3), train_on)
        assert supervised_text(tokenizer, sample) == "".join(f"{answer}<|im_end|>" for answer in answers.split())
    [sample] = chat.supervise(tokenizer, conversation(turns), "all")
    assert sample.supervised[1:].all() and not sample.supervised[0]


def test_a_conversation_without_answers_has_nothing_supervised(tokenizer):
    [sample] = chat.supervise(tokenizer, conversation(["u:Hi"]))
    assert not sample.supervised.any()


def test_last_turn_alone_needs_no_split(tokenizer, templates):
    reasoning = chat.with_chat_template(tokenizer, templates.reasoning)
    record = conversation(DIALOGUES["multi"])
    [sample] = chat.supervise(reasoning, record, "last_assistant")
    assert whole_text(tokenizer, sample) == chat.render(reasoning, record.messages)
    assert supervised_text(tokenizer, sample) == "<think>\n\n</think>\n\nWell, thank you.<|im_end|>"


@pytest.mark.parametrize("name", sorted(set(DIALOGUES) - {"blanks"}))
def test_header_is_not_supervised_where_the_template_knows_no_generation_prompt(tokenizer, templates, name):
    plain = chat.with_chat_template(tokenizer, templates.plain)
    [sample] = chat.supervise(plain, conversation(DIALOGUES[name]))
    answers = [turn[2:] + "<|im_end|>" for turn in DIALOGUES[name] if turn[0] == "a"]
    assert supervised_text(tokenizer, sample) == "".join(answers)


def test_end_of_turn_that_is_no_special_token_is_supervised(tokenizer):
    lines = chat.with_chat_template(tokenizer, LINES)
    [sample] = chat.supervise(lines, conversation(["u:Hi", "a:Hello"]))
    assert supervised_text(tokenizer, sample).lstrip() == "Hello\n"


def test_prompt_that_the_template_writes_differently_when_open(tokenizer, templates):
    """As DeepSeek-R1's: the generation prompt opens reasoning that finished turns do not have."""
    template = templates.chatml.replace(
        "'<|im_start|>assistant\n' }}{%- endif", "'<|im_start|>assistant\n<think>' }}{%- endif"
    )
    [sample] = chat.supervise(chat.with_chat_template(tokenizer, template), conversation(DIALOGUES["multi"]))
    [expected] = chat.supervise(tokenizer, conversation(DIALOGUES["multi"]))
    np.testing.assert_array_equal(sample.token_ids, expected.token_ids)
    np.testing.assert_array_equal(sample.supervised, expected.supervised)


def test_system_prompt_opens_only_conversations_without_one(tokenizer):
    for turns, opening in ((DIALOGUES["single"], "Speak up."), (DIALOGUES["system"], "Be brief.")):
        [sample] = chat.supervise(tokenizer, conversation(turns, 1), "completion", system_prompt="Speak up.")
        assert whole_text(tokenizer, sample).startswith(f"<|im_start|>system\n{opening}<|im_end|>\n<|im_start|>user")
        assert whole_text(tokenizer, sample).count("system") == 1
        assert supervised_text(tokenizer, sample) == turns[-1][2:] + "<|im_end|>"


def test_system_prompt_does_not_move_the_border_of_the_completion(tokenizer):
    record = conversation(["u:q1", "a:a1", "u:q2", "a:a2"], completion_start=2)
    [sample] = chat.supervise(tokenizer, record, "completion", system_prompt="Speak up.")
    assert supervised_text(tokenizer, sample) == "a2<|im_end|>"


def test_prompt_and_completion_become_turns_where_there_is_a_template(tokenizer):
    [sample] = chat.supervise(tokenizer, Completion("x:1", "Hi", "Hello"))
    [expected] = chat.supervise(tokenizer, conversation(["u:Hi", "a:Hello"]))
    np.testing.assert_array_equal(sample.token_ids, expected.token_ids)
    np.testing.assert_array_equal(sample.supervised, expected.supervised)


def test_without_a_template_strings_still_work(bare_tokenizer):
    encode, eos = bare_tokenizer.encode, bare_tokenizer.eos_id
    [sample] = chat.supervise(bare_tokenizer, Completion("x:1", "Hi there", " Hello"))
    assert sample.token_ids.tolist() == [*encode("Hi there"), *encode(" Hello"), eos]
    assert supervised_text(bare_tokenizer, sample) == " Hello<|im_end|>"
    [sample] = chat.supervise(bare_tokenizer, Completion("x:1", "Hi there", " Hello"), "all")
    assert sample.supervised[1:].all()
    [sample] = chat.supervise(bare_tokenizer, Text("x:1", "The end."))
    assert sample.token_ids.tolist() == [*encode("The end."), eos]
    assert sample.supervised[1:].all() and not sample.supervised[0]


def test_without_a_template_conversations_and_system_prompts_are_refused(bare_tokenizer):
    with pytest.raises(UserError, match=r"rows\.jsonl:7: dataset\.chat_template: the tokenizer has no chat template"):
        chat.supervise(bare_tokenizer, conversation(DIALOGUES["single"]))
    with pytest.raises(UserError, match=r"dataset\.system_prompt: needs a chat template"):
        chat.supervise(bare_tokenizer, Completion("x:1", "Hi", "Hello"), system_prompt="Be brief.")


def test_tool_calls_are_rendered_or_refused(tokenizer, templates):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "<1>"}}}
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    record = Conversation("rows.jsonl:7", messages, 1, tools=[{"name": "add"}])
    with pytest.raises(UserError, match=r"rows\.jsonl:7: the chat template does not write tool calls"):
        chat.supervise(tokenizer, record)
    template = "{{ tools | tojson }}" + templates.chatml.replace(
        "message['content'] + '<|im_end|>' }}{% endgen",
        "message['content'] + (message.tool_calls | default('') | tojson) + '<|im_end|>' }}{% endgen",
    )
    [sample] = chat.supervise(chat.with_chat_template(tokenizer, template), record)
    assert supervised_text(tokenizer, sample) == json.dumps([call]) + "<|im_end|>"
    assert whole_text(tokenizer, sample).startswith('[{"name": "add"}]')


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no\nsystem') }}",
            r"rows\.jsonl:7: the chat template refuses the conversation: no system",
        ),
        ("{{ messages[9].content + 1 }}", "refuses the conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation: access to attribute '__class__'"),
        ("{% if true %}{{ messages.append(1) }}{% endif %}", "refuses the conversation"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "cannot tell where the assistant's turn starts"),
    ],
)
def test_templates_that_fail(tokenizer, template, message):
    with pytest.raises(UserError, match=message) as caught:
        chat.supervise(chat.with_chat_template(tokenizer, template), conversation(DIALOGUES["single"]))
    assert "\n" not in str(caught.value)


def test_templates_come_from_text_or_a_file(tokenizer, tmp_path):
    file = tmp_path / "x.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ bos_token }}{% endfor %}"
    )
    messages = conversation(DIALOGUES["system"]).messages
    assert chat.render(chat.with_chat_template(tokenizer, str(file)), messages) == "<|endoftext|>" * 2
    assert chat.with_chat_template(tokenizer, None) is tokenizer
    blocks = "{% for m in messages %}\n    {% if m.content %}\n{{ m.content }},\n    {% endif %}\n{% endfor %}\n"
    assert chat.render(chat.with_chat_template(tokenizer, blocks), messages) == "Be brief.,\nHi,\nHello,\n"
    year = chat.render(chat.with_chat_template(tokenizer, "{{ strftime_now('%Y') }}"), messages)
    assert len(year) == 4 and year.isdigit()
    with pytest.raises(UserError, match=r"dataset\.chat_template: no such file 'none\.jinja'"):
        chat.with_chat_template(tokenizer, "none.jinja")
    with pytest.raises(UserError, match=r"dataset\.chat_template: line 2: .*endfor"):
        chat.with_chat_template(tokenizer, "x\n{% endfor %}")


@pytest.mark.parametrize("layout", ["config", "named", "jinja", "json", "special_tokens_map"])
def test_every_layout_of_a_folder_reads_the_same(tokenizer, tokenizer_folder, templates, tmp_path, layout):
    folder = tmp_path / "folder"
    shutil.copytree(tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    if layout == "config":
        config["chat_template"] = template
    elif layout == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    elif layout == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    else:
        (folder / "chat_template.jinja").write_text(template)
    if layout == "special_tokens_map":
        special = {name: config.pop(name) for name in ("eos_token", "bos_token", "pad_token")}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = chat.load_tokenizer(folder)
    assert found.chat_template == templates.chatml
    assert (found.bos_id, found.eos_id, found.pad_id) == (0, 2, 0)
    assert found.vocab_size == len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert found.special_tokens == tokenizer.special_tokens


def test_text_comes_back(tokenizer):
    text = "caf\u00e9 \u2603 \U0001f9d1\u200d\U0001f680\n <|im_end|> end"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_end|>", "")


def test_nothing_is_added_cut_or_trimmed_by_what_the_file_asks_for(tokenizer, tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path / "folder")
    file = tmp_path / "folder" / "tokenizer.json"
    state = json.loads(file.read_text())
    state["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {"strategy": {"Fixed": 500}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    state["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(state))
    odd = chat.load_tokenizer(tmp_path / "folder")
    for template in (None, LINES, LINES.replace("\n", " ")):
        sample, expected = (
            chat.supervise(chat.with_chat_template(one, template), conversation(DIALOGUES["blanks"]))[0]
            for one in (odd, tokenizer)
        )
        np.testing.assert_array_equal(sample.token_ids, expected.token_ids)
        np.testing.assert_array_equal(sample.supervised, expected.supervised)


def test_folders_that_cannot_be_read(tokenizer_folder, tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer: no tokenizer\.json in"):
        chat.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.tokenizer: cannot read '.*tokenizer\.json'"):
        chat.load_tokenizer(tmp_path)
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UserError, match="lacks the eos_token '</s>'"):
        chat.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{\n,}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json:2: not valid JSON"):
        chat.load_tokenizer(tmp_path)


def test_tokenizers_are_frozen(tokenizer):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokenizer.chat_template = ""
