"""Records to token ids, and which of them are supervised."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatrain_jax.config import UserError
from megatrain_jax.data import templates
from megatrain_jax.data.records import BadRecord, Completion, Conversation, Record, Text, Tokens
from megatrain_jax.data.tokenizer import Tokenizer

_PROBE = "Zq7assistant7qZ"


class Sample(NamedTuple):
    """One training sequence.

    Attributes:
      token_ids: int32 ``[n]``.
      supervised: bool ``[n]``, which tokens the loss asks for. Never the first: nothing comes before it.
      weights: float32 ``[n]``, what supervised tokens weigh in the loss, where 0 stands for 1 as well; 0 for the others.
        None if all weigh 1.
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    weights: np.ndarray | None = None

    def loss_weights(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """float32, what tokens `start` to `stop` weigh in the loss. No others are read."""
        weights = self.supervised[start:stop].astype(np.float32)
        if self.weights is None:
            return weights
        own = self.weights[start:stop]
        return np.where(own == 0, weights, own)


def supervise(
    tokenizer: Tokenizer, record: Record, train_on: str = "assistant", system_prompt: str = ""
) -> list[Sample]:
    """Samples of a record, with what of them is supervised.

    A text is supervised whole and closed with the end-of-sequence token. In conversations the assistant's turns are,
    each from after its header through its end-of-turn token, or what the template encloses in ``{% generation %}`` tags.
    A conversation gives one sample, unless the template writes earlier turns otherwise once more follow (as those do
    that drop earlier reasoning): then one for each stretch of turns that it writes alike.

    Args:
      train_on: ``"assistant"`` all turns of the assistant, ``"last_assistant"`` the last, ``"completion"`` those that
        answer the prompt, ``"all"`` every token. They weigh 1; a turn that says itself what it weighs has its way.
      system_prompt: opens conversations that have no system message of their own; empty for none.

    Raises:
      UserError: with file and line; a `BadRecord` where this record alone is at fault.
    """
    if isinstance(record, Tokens):
        supervised = np.array(record.supervised) | (train_on == "all")
        return [_sample(list(record.token_ids), supervised)]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if isinstance(record, Text):
        around = tokenizer.prefix if record.begins else (), eos if record.ends else ()
        ids = [*around[0], *tokenizer.encode(record.text), *around[1]] if record.text else []
        return [_sample(ids, np.ones(len(ids), bool))]
    if isinstance(record, Completion):
        if tokenizer.chat_template is None:
            if system_prompt:
                raise UserError("dataset.system_prompt: needs a chat template; set dataset.chat_template")
            prompt = [*tokenizer.prefix, *tokenizer.encode(record.prompt)]
            completion = tokenizer.encode(record.completion) + eos
            asked = np.arange(len(prompt) + len(completion)) >= (0 if train_on == "all" else len(prompt))
            return [_sample(prompt + completion, asked)]
        turns = {"role": "user", "content": record.prompt}, {"role": "assistant", "content": record.completion}
        record = Conversation(record.where, turns, completion_start=1)
    if system_prompt and record.messages[0]["role"] != "system":
        messages = {"role": "system", "content": system_prompt}, *record.messages
        record = dataclasses.replace(
            record,
            messages=messages,
            completion_start=record.completion_start + 1,
            weights={i + 1: weight for i, weight in record.weights.items()},
        )
    if tokenizer.template_for(record.tools) is None:
        raise UserError(
            f"{record.where}: dataset.chat_template: the tokenizer has no chat template; name one, or give a .jinja file"
        )
    try:
        return _supervise_conversation(tokenizer, record, train_on)
    except UserError as error:
        raise BadRecord(record.where, str(error)) from None


def _supervise_conversation(tokenizer: Tokenizer, record: Conversation, train_on: str) -> list[Sample]:
    whole = tokenizer.render(record.messages, tools=record.tools).text
    _check_written(tokenizer, record, whole)
    if train_on == "all":
        if any(weight != 1 for weight in record.weights.values()):
            raise UserError("a turn whose weight is not 1 contradicts dataset.train_on 'all'; choose 'assistant'")
        return [_masked(tokenizer, whole, [(0, len(whole), 1.0)])]
    samples: list[Sample] = []
    text, spans = whole, []
    for turn, weight in reversed(_supervised_turns(record, train_on).items()):
        until, found = _turn(tokenizer, record, turn)
        if not text.startswith(until):
            if spans:
                samples.append(_masked(tokenizer, text, spans))
            text, spans = until, []
        spans += [(start, end, weight) for start, end in found]
    samples.append(_masked(tokenizer, text, spans))
    return samples[::-1]


def _supervised_turns(record: Conversation, train_on: str) -> dict[int, float]:
    """What supervised turns weigh, by their index."""
    turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    asked = {
        "assistant": turns,
        "last_assistant": turns[-1:],
        "completion": [i for i in turns if i >= record.completion_start],
    }[train_on]
    weights = {i: record.weights.get(i, float(i in asked)) for i in turns}
    return {i: weight for i, weight in weights.items() if weight}


def _check_written(tokenizer: Tokenizer, record: Conversation, whole: str) -> None:
    """Refuses a rendering that leaves out what would be missed without a trace."""
    without = [(record.messages, None)] if record.tools else []
    for i, message in enumerate(record.messages):
        if message["role"] in ("system", "user") and not _is_written(message, whole):
            raise UserError(f"the chat template leaves out a message of '{message['role']}'; set dataset.chat_template")
        calls = message.get("tool_calls") or ()
        for k in range(len(calls)):
            fewer = {**message, "tool_calls": [*calls[:k], *calls[k + 1 :]] or None}
            without.append(([*record.messages[:i], fewer, *record.messages[i + 1 :]], record.tools))
    if any(_renders_as(tokenizer, messages, tools, whole) for messages, tools in without):
        raise UserError(
            "the chat template does not write tool calls, or not all of them; set dataset.chat_template to one that does"
        )


def _renders_as(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> bool:
    try:
        return tokenizer.render(messages, tools=tools).text == text
    except UserError:
        return False


def _is_written(message: Mapping[str, Any], rendering: str) -> bool:
    """Whether the end of the content is there; blanks around it and reasoning before it may have gone."""
    return message["content"].rpartition("</think>")[2].strip()[-32:] in rendering


def _turn(tokenizer: Tokenizer, record: Conversation, turn: int) -> tuple[str, list[tuple[int, int]]]:
    """The rendering up to and with message `turn`, and the characters of it that the assistant wrote in that turn."""
    before = record.messages[:turn]
    until = tokenizer.render(record.messages[: turn + 1], tools=record.tools)
    if not _is_written(record.messages[turn], until.text):
        raise UserError("the chat template leaves out what the assistant says; set dataset.chat_template")
    if templates.has_generation_tags(tokenizer.template_for(record.tools)):
        earlier = len(tokenizer.render(before, tools=record.tools).generated) if before else 0
        return until.text, until.generated[earlier:]
    end = _turn_end(tokenizer, until.text)
    return until.text, [(_turn_start(tokenizer, record, turn, until.text), end)]


def _turn_start(tokenizer: Tokenizer, record: Conversation, turn: int, until: str) -> int:
    """Where in `until`, the rendering up to and with message `turn`, the header of that turn has ended."""
    before = record.messages[:turn]
    opens = templates.knows_generation_prompt(tokenizer.template_for(record.tools))
    prompt = tokenizer.render(before, add_generation_prompt=True, tools=record.tools).text if before else ""
    if opens and before and until.startswith(prompt):
        return len(prompt)
    # The template opens no turn by itself, or opens it otherwise than it writes it: the header ends where the content is.
    probe = tokenizer.render([*before, {"role": "assistant", "content": _PROBE}], tools=record.tools).text
    start = probe.rfind(_PROBE)
    if not opens and until.startswith(prompt) and start >= 0 and not probe[len(prompt) : start].strip():
        return len(prompt)  # blanks are no header: the model writes them itself
    if start >= 0 and until.startswith(probe[:start]):
        return start
    # What opens a turn depends on what is in it: the header is what an open turn and this one have in common.
    common = len(os.path.commonprefix([prompt, until]))
    closed = tokenizer.render(before, tools=record.tools).text if before else ""
    if not opens or common <= len(closed) or not until.startswith(closed):
        raise UserError("cannot tell where the assistant's turn starts in the rendering; check dataset.chat_template")
    return common


def writes_reasoning(tokenizer: Tokenizer, record: Conversation) -> bool:
    """Whether the template of `record` writes the reasoning that led to an answer; tried out, since names say little."""
    turns = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "reasoning_content": _PROBE}
    try:
        return _PROBE in tokenizer.render(turns, tools=record.tools).text
    except UserError:  # of a template that takes no such conversation nothing is claimed
        return True


def _turn_end(tokenizer: Tokenizer, until: str) -> int:
    """End of the last turn of `until`: blanks that the template puts after the end-of-turn token are not of the turn."""
    stripped = until.rstrip()
    return len(stripped) if stripped.endswith(tokenizer.special_texts) else len(until)


def _masked(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int, float]]) -> Sample:
    """Tokens of `text`; those that share a character with one of `spans` weigh what is third in it."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    weights = np.zeros(len(starts), np.float32)
    for start, end, weight in spans:
        weights[(ends > start) & (starts < end)] = weight
    return _sample(encoding.ids, weights)


def _sample(token_ids: list[int], weights: np.ndarray) -> Sample:
    weights = np.array(weights, np.float32)
    weights[:1] = 0
    supervised = weights > 0
    return Sample(np.array(token_ids, np.int32), supervised, None if np.array_equal(weights, supervised) else weights)
