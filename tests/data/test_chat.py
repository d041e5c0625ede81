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
from megatrain_jax.data.tokenizer import load_tokenizer, with_chat_template

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
    samples = chat.supervise(with_chat_template(tokenizer, templates.reasoning), record)
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
    reasoning = with_chat_template(tokenizer, templates.reasoning)
    record = conversation(DIALOGUES["multi"])
    [sample] = chat.supervise(reasoning, record, "last_assistant")
    assert whole_text(tokenizer, sample) == reasoning.render(record.messages).text
    assert supervised_text(tokenizer, sample) == "<think>\n\n</think>\n\nWell, thank you.<|im_end|>"


@pytest.mark.parametrize("name", sorted(set(DIALOGUES) - {"blanks"}))
def test_header_is_not_supervised_where_the_template_knows_no_generation_prompt(tokenizer, templates, name):
    plain = with_chat_template(tokenizer, templates.plain)
    [sample] = chat.supervise(plain, conversation(DIALOGUES[name]))
    answers = [turn[2:] + "<|im_end|>" for turn in DIALOGUES[name] if turn[0] == "a"]
    assert supervised_text(tokenizer, sample) == "".join(answers)


def test_end_of_turn_that_is_no_special_token_is_supervised(tokenizer):
    lines = with_chat_template(tokenizer, LINES)
    [sample] = chat.supervise(lines, conversation(["u:Hi", "a:Hello"]))
    assert supervised_text(tokenizer, sample).lstrip() == "Hello\n"


def test_prompt_that_the_template_writes_differently_when_open(tokenizer, templates):
    """As DeepSeek-R1's: the generation prompt opens reasoning that finished turns do not have."""
    template = templates.chatml.replace(
        "'<|im_start|>assistant\n' }}{%- endif", "'<|im_start|>assistant\n<think>' }}{%- endif"
    )
    [sample] = chat.supervise(with_chat_template(tokenizer, template), conversation(DIALOGUES["multi"]))
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
    record = Conversation("rows.jsonl:7", messages, 1, tools=[{"type": "function", "function": {"name": "add"}}])
    with pytest.raises(UserError, match=r"rows\.jsonl:7: the chat template does not write tool calls"):
        chat.supervise(tokenizer, record)
    template = "{{ tools | tojson }}" + templates.chatml.replace(
        "message['content'] + '<|im_end|>' }}{% endgen",
        "message['content'] + (message.tool_calls | default('') | tojson) + '<|im_end|>' }}{% endgen",
    )
    [sample] = chat.supervise(with_chat_template(tokenizer, template), record)
    assert supervised_text(tokenizer, sample) == json.dumps([call]) + "<|im_end|>"
    assert whole_text(tokenizer, sample).startswith('[{"type": "function", "function": {"name": "add"}}]')


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
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "the chat template leaves out a message of 'user'"),
        ("{{ messages[0].content }}", "the chat template leaves out what the assistant says"),
        (
            "{% for m in messages %}{{ m.content | length }} {{ m.content }}{% endfor %}",
            "cannot tell where the assistant's turn starts",
        ),
    ],
)
def test_templates_that_fail(tokenizer, template, message):
    with pytest.raises(UserError, match=message) as caught:
        chat.supervise(with_chat_template(tokenizer, template), conversation(DIALOGUES["single"]))
    assert "\n" not in str(caught.value)


def test_templates_come_from_text_or_a_file(tokenizer, tmp_path):
    file = tmp_path / "x.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ bos_token }}{% endfor %}"
    )
    messages = conversation(DIALOGUES["system"]).messages
    assert with_chat_template(tokenizer, str(file)).render(messages).text == "<|endoftext|>" * 2
    assert with_chat_template(tokenizer, None).chat_template == tokenizer.chat_template
    blocks = "{% for m in messages %}\n    {% if m.content %}\n{{ m.content }},\n    {% endif %}\n{% endfor %}\n"
    assert with_chat_template(tokenizer, blocks).render(messages).text == "Be brief.,\nHi,\nHello,\n"
    year = with_chat_template(tokenizer, "{{ strftime_now('%Y') }}").render(messages).text
    assert len(year) == 4 and year.isdigit()
    with pytest.raises(UserError, match=r"dataset\.chat_template: no such file 'none\.jinja'"):
        with_chat_template(tokenizer, "none.jinja")
    with pytest.raises(UserError, match=r"dataset\.chat_template: line 2: .*endfor"):
        with_chat_template(tokenizer, "x\n{% endfor %}")


def test_named_templates_are_the_tokenizers_or_ours(tokenizer):
    named = dataclasses.replace(tokenizer, named_templates={"rag": "{{ messages[0].content }}!"})
    assert with_chat_template(named, "rag").render([{"role": "user", "content": "Hi"}]).text == "Hi!"
    assert with_chat_template(named, "default").chat_template == tokenizer.chat_template
    assert with_chat_template(named, "chatml").template_for([{}]).startswith("{% for message in messages %}")
    with pytest.raises(
        UserError, match="no template is called 'chatlm'; known are default, rag, chatml, llama3, gemma"
    ):
        with_chat_template(named, "chatlm")
    with pytest.raises(UserError, match="'gemma' needs the token '<start_of_turn>', which the tokenizer lacks"):
        with_chat_template(tokenizer, "gemma")


def test_a_template_for_models_without_tokens_for_turns(tokenizer):
    alpaca = with_chat_template(tokenizer, "alpaca")
    [sample] = chat.supervise(alpaca, conversation(DIALOGUES["multi"], 0))
    assert supervised_text(tokenizer, sample) == "Hello, how are you?<|im_end|>Well, thank you.<|im_end|>"


def test_templates_read_their_settings(tokenizer):
    template = "{{ mood | default('calm') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    assert with_chat_template(tokenizer, template).render(messages).text == "calmHi"
    assert with_chat_template(tokenizer, template, {"mood": "glad"}).render(messages).text == "gladHi"


def test_turns_that_say_whether_they_are_trained(tokenizer):
    turns = ["u:q1", "a:a1", "u:q2", "a:a2", "u:q3", "a:a3"]
    for train_on, weights, answers in (
        ("assistant", {1: 0.0}, "a2 a3"),
        ("assistant", {1: 0.0, 3: 0.0, 5: 0.0}, ""),
        ("last_assistant", {1: 1.0}, "a1 a3"),
        ("last_assistant", {5: 0.0}, ""),
    ):
        record = dataclasses.replace(conversation(turns), weights=weights)
        [sample] = chat.supervise(tokenizer, record, train_on, system_prompt="Be brief.")
        assert supervised_text(tokenizer, sample) == "".join(f"{answer}<|im_end|>" for answer in answers.split())
    for weight in (0.0, 0.5):
        with pytest.raises(UserError, match="a turn whose weight is not 1 contradicts dataset.train_on 'all'"):
            chat.supervise(tokenizer, dataclasses.replace(conversation(turns), weights={1: weight}), "all")
    chat.supervise(tokenizer, dataclasses.replace(conversation(turns), weights={1: 1.0}), "all")


@pytest.mark.parametrize("template", ["tokenizer's", "reasoning"])
def test_every_token_of_a_turn_weighs_what_the_turn_says(tokenizer, templates, template):
    """Also where the template writes earlier turns otherwise, so that each turn is a sample of its own."""
    ours = tokenizer if template == "tokenizer's" else with_chat_template(tokenizer, templates.reasoning)
    turns = conversation(["u:q1", "a:a1", "u:q2", "a:a2", "u:q3", "a:a3"])
    for train_on, weights, expected in (
        ("assistant", {}, {"a1": 1, "a2": 1, "a3": 1}),
        ("assistant", {1: 0.25, 3: 0.0, 5: 3.0}, {"a1": 0.25, "a3": 3}),
        ("last_assistant", {1: 0.25}, {"a1": 0.25, "a3": 1}),
    ):
        found = {}
        for sample in chat.supervise(ours, dataclasses.replace(turns, weights=weights), train_on):
            own = sample.loss_weights()
            assert own.dtype == np.float32
            for weight in np.unique(own[sample.supervised]):
                said = tokenizer.decode(sample.token_ids[own == weight], skip_special_tokens=False)
                found |= {answer: weight for answer in said.split("<|im_end|>") if answer.strip()}
        assert {answer.split()[-1][-2:]: weight for answer, weight in found.items()} == expected


def test_turns_written_alike_share_a_sample(tokenizer, templates):
    """Reasoning after the last question stays where it was: those turns are one sample, the turn before another."""
    reasoning = with_chat_template(tokenizer, templates.reasoning)
    turns = conversation(["u:q1", "a:a1", "u:q2", "a:add", "a:a3"]).messages
    first, second = chat.supervise(reasoning, Conversation("x:1", turns, 0))
    assert supervised_text(tokenizer, first) == "<think>\n\n</think>\n\na1<|im_end|>"
    answers = [f"<think>\n\n</think>\n\n{answer}<|im_end|>" for answer in ("add", "a3")]
    assert supervised_text(tokenizer, second) == "".join(answers)


@pytest.mark.parametrize("layout", ["config", "named", "jinja", "json", "special_tokens_map", "additional"])
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
    if layout == "additional":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    if layout == "special_tokens_map":
        special = {name: config.pop(name) for name in ("eos_token", "bos_token", "pad_token")}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(folder)
    assert found.chat_template == templates.chatml
    assert found.named_templates == ({"tool_use": "x"} if layout in ("named", "additional") else {})
    assert found.template_for([{}]) == ("x" if layout in ("named", "additional") else templates.chatml)
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
    odd = load_tokenizer(tmp_path / "folder")
    for template in (None, LINES, LINES.replace("\n", " ")):
        sample, expected = (
            chat.supervise(with_chat_template(one, template), conversation(DIALOGUES["blanks"]))[0]
            for one in (odd, tokenizer)
        )
        np.testing.assert_array_equal(sample.token_ids, expected.token_ids)
        np.testing.assert_array_equal(sample.supervised, expected.supervised)


def test_folders_that_cannot_be_read(tokenizer_folder, tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer: neither tokenizer\.json nor tokenizer\.model in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.tokenizer: cannot read '.*tokenizer\.json'"):
        load_tokenizer(tmp_path)
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UserError, match="lacks the eos_token '</s>'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{\n,}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json:2: not valid JSON"):
        load_tokenizer(tmp_path)


def test_tokenizers_are_frozen(tokenizer):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokenizer.chat_template = ""


def test_every_call_of_a_turn_is_written_or_refused(tokenizer, templates):
    """A name that occurs elsewhere, and a second call that a template does not expect, are no less lost."""
    calls = [{"type": "function", "function": {"name": "a", "arguments": {"x": i}}} for i in (1, 2)]
    turns = conversation(["u:q1", "a:a1"]).messages
    turns[1]["tool_calls"] = calls
    one = "{% for m in messages %}{{ m.role + m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}{% endfor %}"
    for template in (templates.chatml, one):
        with pytest.raises(UserError, match="does not write tool calls, or not all of them"):
            chat.supervise(with_chat_template(tokenizer, template), Conversation("x:1", turns, 0))
    every = one.replace("m.tool_calls[0]", "m.tool_calls")
    [sample] = chat.supervise(with_chat_template(tokenizer, every), Conversation("x:1", turns, 0))
    assert json.dumps(calls) in whole_text(tokenizer, sample)
