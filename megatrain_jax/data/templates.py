"""Chat templates: sandboxed Jinja as transformers runs it, and what can be known of a template."""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from megatrain_jax.config import UserError

# What templates know reasoning as. The first one that a message has counts; it is offered under the names that are read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class NamedTemplate(NamedTuple):
    """A template that needs no folder, and the special tokens that it writes."""

    text: str
    tokens: tuple[str, ...]


NAMED = {
    "chatml": NamedTemplate(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": NamedTemplate(
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # A system message opens the first question: the model knows no such role.
    "gemma": NamedTemplate(
        "{{ bos_token }}"
        "{% set told = messages[0].content | trim + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for message in messages %}{% if message.role != 'system' %}"
        "{% set role = 'model' if message.role == 'assistant' else message.role %}"
        "{% set first = loop.index0 == (1 if told else 0) %}"
        "{{ '<start_of_turn>' + role + '\n' + (told if first else '') + message.content | trim + '<end_of_turn>\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    # For models that have no tokens for turns.
    "alpaca": NamedTemplate(
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
        "{% elif message.role == 'assistant' %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}"
        "{% else %}{{ '### Instruction:\n' + message.content + '\n\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
        (),
    ),
}


class Rendering(NamedTuple):
    """A conversation as a template writes it.

    Attributes:
      text: what is tokenised.
      generated: first and last (exclusive) character of each stretch inside ``{% generation %}`` tags.
    """

    text: str
    generated: list[tuple[int, int]]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> Rendering:
    """`messages` as `template` writes them.

    Args:
      variables: what else the template may name: special tokens and settings of its own.

    Raises:
      UserError: the template refuses these messages, or fails.
    """
    pieces: list[str] = []
    generated: list[tuple[int, int]] = []
    token = _progress.set((pieces, generated))
    try:
        for piece in compiled(template).generate(
            messages=[_plain(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        ):
            pieces.append(piece)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from None
    finally:
        _progress.reset(token)
    return Rendering("".join(pieces), generated)


def has_generation_tags(template: str) -> bool:
    """Whether the template itself says what the assistant writes."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@functools.lru_cache(maxsize=32)
def knows_generation_prompt(template: str) -> bool:
    """Whether the template can open a turn of the assistant."""
    environment = compiled(template).environment
    return "add_generation_prompt" in jinja2.meta.find_undeclared_variables(environment.parse(template))


@functools.lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it (utils/chat_template_utils.py).

    Raises:
      UserError: it is not Jinja.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        message = " ".join(str(error.message).split())
        raise UserError(f"dataset.chat_template: line {error.lineno}: {message}") from None


# Of the rendering in progress: the text so far, and the stretches found. A variable of the context, since threads render.
_progress: contextvars.ContextVar[tuple[list[str], list[tuple[int, int]]]] = contextvars.ContextVar("rendering")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant writes; it renders as its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller) -> str:
        text = caller()
        pieces, generated = _progress.get()
        start = sum(map(len, pieces))
        generated.append((start, start + len(text)))
        return text


def has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether a turn comes with the reasoning that led to it."""
    return any(message.get(name) for name in _REASONING)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is null, its reasoning under each of the names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
