"""Records to token ids, and which of them are supervised: tokenizer, chat template, masks."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import numpy as np
import tokenizers

from megatrain_jax.config import UserError
from megatrain_jax.data.records import BadRecord, Completion, Conversation, Record, Text

_PROBE = "Zq7assistant7qZ"


class Sample(NamedTuple):
    """One training sequence.

    Attributes:
      token_ids: int32 ``[n]``.
      supervised: bool ``[n]``, which tokens the loss asks for. Never the first: nothing comes before it.
    """

    token_ids: np.ndarray
    supervised: np.ndarray


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with what chat needs of its folder.

    Attributes:
      backend: the tokenizer itself, without truncation, padding or post-processing.
      special_tokens: ``{"eos_token": "</s>", ...}``, what chat templates may name.
      chat_template: jinja text, or None.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    bos_id = property(lambda self: self._special_id("bos_token"), doc="Beginning of sequence, or None.")
    eos_id = property(lambda self: self._special_id("eos_token"), doc="End of sequence, or None.")
    pad_id = property(lambda self: self._special_id("pad_token"), doc="Padding, or None.")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special token is added to those that it spells out."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, as transformers 4 or 5 wrote it.

    Raises:
      UserError: `folder` has no readable ``tokenizer.json``.
    """
    folder = pathlib.Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"model.tokenizer: no tokenizer.json in '{folder}'")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise UserError(f"model.tokenizer: cannot read '{file}' ({_one_line(error)})") from None
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # it would trim blanks off the offsets that masks are drawn from
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    special = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    if (eos := special.get("eos_token")) is not None and backend.token_to_id(eos) is None:
        raise UserError(f"model.tokenizer: '{file}' lacks the eos_token '{eos}' that tokenizer_config.json names")
    return Tokenizer(backend, special, _folder_template(folder, config))


def with_chat_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """`tokenizer` with another template: jinja text or the path of a ``.jinja`` file; None keeps its own."""
    if template is None:
        return tokenizer
    if template.endswith(".jinja"):
        file = pathlib.Path(template)
        if not file.is_file():
            raise UserError(f"dataset.chat_template: no such file '{template}'")
        template = file.read_text(encoding="utf-8")
    _compile(template)
    return dataclasses.replace(tokenizer, chat_template=template)


def render(tokenizer: Tokenizer, messages: Sequence[dict], add_generation_prompt: bool = False, tools=None) -> str:
    """`messages` as the chat template writes them.

    Raises:
      UserError: there is no template, or it refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise UserError("dataset.chat_template: the tokenizer has no chat template; give jinja text or a .jinja file")
    try:
        return _compile(tokenizer.chat_template).render(
            messages=list(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"the chat template refuses the conversation: {_one_line(error)}") from None


def supervise(
    tokenizer: Tokenizer, record: Record, train_on: str = "assistant", system_prompt: str = ""
) -> list[Sample]:
    """Samples of a record, with what of them is supervised.

    A text is supervised whole and closed with the end-of-sequence token. In conversations the assistant's turns are,
    each from after its header through its end-of-turn token. A conversation gives one sample, unless the template
    writes earlier turns otherwise once more follow (as those do that drop earlier reasoning): then one per turn.

    Args:
      train_on: ``"assistant"`` all turns of the assistant, ``"last_assistant"`` the last, ``"completion"`` those that
        answer the prompt, ``"all"`` every token.
      system_prompt: opens conversations that have no system message of their own; empty for none.

    Raises:
      UserError: with file and line.
    """
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if isinstance(record, Text):
        ids = tokenizer.encode(record.text) + (eos if record.text else [])
        return [_sample(ids, np.ones(len(ids), bool))]
    if isinstance(record, Completion):
        if tokenizer.chat_template is None:
            if system_prompt:
                raise UserError("dataset.system_prompt: needs a chat template; set dataset.chat_template")
            prompt, completion = tokenizer.encode(record.prompt), tokenizer.encode(record.completion) + eos
            asked = np.arange(len(prompt) + len(completion)) >= (0 if train_on == "all" else len(prompt))
            return [_sample(prompt + completion, asked)]
        turns = {"role": "user", "content": record.prompt}, {"role": "assistant", "content": record.completion}
        record = Conversation(record.where, turns, completion_start=1)
    if system_prompt and record.messages[0]["role"] != "system":
        messages = {"role": "system", "content": system_prompt}, *record.messages
        record = dataclasses.replace(record, messages=messages, completion_start=record.completion_start + 1)
    if tokenizer.chat_template is None:
        raise UserError(
            f"{record.where}: dataset.chat_template: the tokenizer has no chat template; give jinja text or a .jinja file"
        )
    try:
        return _supervise_conversation(tokenizer, record, train_on)
    except UserError as error:
        raise BadRecord(record.where, str(error)) from None


def _supervise_conversation(tokenizer: Tokenizer, record: Conversation, train_on: str) -> list[Sample]:
    whole = render(tokenizer, record.messages, tools=record.tools)
    for message in record.messages:
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in whole:
                raise UserError(
                    "the chat template does not write tool calls; set dataset.chat_template to one that does"
                )
    if train_on == "all":
        return [_masked(tokenizer, whole, [(0, len(whole))])]
    turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    if train_on == "last_assistant":
        turns = turns[-1:]
    elif train_on == "completion":
        turns = [i for i in turns if i >= record.completion_start]
    if not turns:
        return [_masked(tokenizer, whole, [])]
    until = [render(tokenizer, record.messages[: i + 1], tools=record.tools) for i in turns]
    spans = [(_turn_start(tokenizer, record, i, text), _turn_end(tokenizer, text)) for i, text in zip(turns, until)]
    if all(whole.startswith(text) for text in until):
        return [_masked(tokenizer, whole, spans)]
    return [_masked(tokenizer, text, [span]) for text, span in zip(until, spans)]


def _turn_start(tokenizer: Tokenizer, record: Conversation, turn: int, until: str) -> int:
    """Where in `until`, the rendering up to and with message `turn`, the header of that turn has ended."""
    before = record.messages[:turn]
    if before and "add_generation_prompt" in _variables(tokenizer.chat_template):
        prompt = render(tokenizer, before, add_generation_prompt=True, tools=record.tools)
        if until.startswith(prompt):
            return len(prompt)
    # The template opens no turn by itself, or opens it otherwise than it writes it: the header ends where the content is.
    probe = render(tokenizer, [*before, {"role": "assistant", "content": _PROBE}], tools=record.tools)
    start = probe.rfind(_PROBE)
    if start < 0 or not until.startswith(probe[:start]):
        raise UserError("cannot tell where the assistant's turn starts in the rendering; check dataset.chat_template")
    return start


def _turn_end(tokenizer: Tokenizer, until: str) -> int:
    """End of the last turn of `until`: blanks that the template puts after the end-of-turn token are not of the turn."""
    stripped = until.rstrip()
    return len(stripped) if stripped.endswith(_special_texts(tokenizer.backend)) else len(until)


def _masked(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> Sample:
    """Tokens of `text`, supervised where they share a character with one of `spans`."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    supervised = np.zeros(len(starts), bool)
    for start, end in spans:
        supervised |= (ends > start) & (starts < end)
    return _sample(encoding.ids, supervised)


def _sample(token_ids: list[int], supervised: np.ndarray) -> Sample:
    supervised[:1] = False
    return Sample(np.array(token_ids, np.int32), supervised)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant writes; it renders as its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller) -> str:
        return caller()


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it (utils/chat_template_utils.py)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"dataset.chat_template: line {error.lineno}: {_one_line(error.message)}") from None


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    environment = _compile(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


@functools.lru_cache(maxsize=8)
def _special_texts(backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    return tuple(token.content for token in backend.get_added_tokens_decoder().values() if token.special)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _folder_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg})") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
