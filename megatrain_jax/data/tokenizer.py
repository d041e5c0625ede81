"""A Hugging Face folder's tokenizer and chat templates, in the layouts of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from megatrain_jax.config import UserError
from megatrain_jax.data import templates
from megatrain_jax.data.spm import read_sentencepiece


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with what chat needs of its folder.

    Attributes:
      backend: the tokenizer itself, without truncation, padding or post-processing.
      special_tokens: ``{"eos_token": "</s>", ...}``, what chat templates may name.
      chat_template: jinja text, or None.
      named_templates: more of them, by name. "tool_use" is the one for conversations with tools.
      template_variables: settings that the templates read, such as ``{"enable_thinking": False}``.
      prefix: ids that open a plain text, usually the beginning of sequence or nothing.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None
    named_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    bos_id = property(lambda self: self._special_id("bos_token"), doc="Beginning of sequence, or None.")
    eos_id = property(lambda self: self._special_id("eos_token"), doc="End of sequence, or None.")
    pad_id = property(lambda self: self._special_id("pad_token"), doc="Padding, or None.")

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are written."""
        return tuple(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special token is added to those that it spells out."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def template_for(self, tools: Sequence[Any] | None) -> str | None:
        """The template that writes a conversation with these tools."""
        return self.named_templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, tools: Any = None
    ) -> templates.Rendering:
        """`messages` as the chat template writes them.

        Raises:
          UserError: there is no template, or it refuses these messages.
        """
        template = self.template_for(tools)
        if template is None:
            raise UserError(
                "dataset.chat_template: the tokenizer has no chat template; name one, or give a .jinja file"
            )
        variables = {**self.special_tokens, **self.template_variables}
        return templates.render(template, messages, tools, variables, add_generation_prompt)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, as transformers 4 or 5 wrote it.

    Raises:
      UserError: `folder` has neither a readable ``tokenizer.json`` nor ``tokenizer.model``.
    """
    folder = pathlib.Path(folder)
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    special = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    file = folder / "tokenizer.json"
    if file.is_file():
        backend = _read_backend(file)
        prefix = tuple(backend.encode("").ids)
        backend.post_processor = None  # it would trim blanks off the offsets that masks are drawn from
    elif (file := folder / "tokenizer.model").is_file():
        backend = read_sentencepiece(file, legacy=bool(config.get("legacy")))
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | special
        bos = backend.token_to_id(special["bos_token"])
        prefix = () if bos is None or not config.get("add_bos_token", True) else (bos,)
    else:
        raise UserError(f"model.tokenizer: neither tokenizer.json nor tokenizer.model in '{folder}'")
    _add_tokens(backend, config, special, file)
    if (eos := special.get("eos_token")) is not None and backend.token_to_id(eos) is None:
        raise UserError(f"model.tokenizer: '{file}' lacks the eos_token '{eos}' that tokenizer_config.json names")
    named = _folder_templates(folder, config)
    return Tokenizer(backend, special, named.pop("default", None), named, prefix=prefix)


def _read_backend(file: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise UserError(f"model.tokenizer: cannot read '{file}' ({' '.join(str(error).split())})") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: Mapping[str, str], file) -> None:
    """Tokens that the configuration adds to the vocabulary, and those of it that are to be found whole in a text."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for number, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(**{name: value for name, value in entry.items() if name != "__type"})
        if token.content in known:
            continue
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != int(number):
            raise UserError(
                f"model.tokenizer: '{token.content}' is token {found} in '{file}' and {number} in tokenizer_config.json"
            )
    missing = {text for text in special.values() if text not in known and backend.token_to_id(text) is not None}
    backend.add_special_tokens(sorted(missing))


def with_chat_template(
    tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any] | None = None
) -> Tokenizer:
    """`tokenizer` with another template, and with settings for it.

    Args:
      template: the name of one of the tokenizer's templates or of ours (`named.TEMPLATES`), the path of a ``.jinja``
        file, or jinja text; None keeps the tokenizer's choice.
      variables: what the template reads beside messages and tools.
    """
    tokenizer = dataclasses.replace(tokenizer, template_variables=dict(variables or {}))
    if template is None:
        return tokenizer
    if template.endswith(".jinja"):
        file = pathlib.Path(template)
        if not file.is_file():
            raise UserError(f"dataset.chat_template: no such file '{template}'")
        template = file.read_text(encoding="utf-8")
    elif "{" not in template:
        template = _by_name(tokenizer, template)
    templates.compiled(template)
    return dataclasses.replace(tokenizer, chat_template=template, named_templates={})


def _by_name(tokenizer: Tokenizer, name: str) -> str:
    own = dict(tokenizer.named_templates)
    if tokenizer.chat_template is not None:
        own["default"] = tokenizer.chat_template
    if name in own:
        return own[name]
    if name not in templates.NAMED:
        known = ", ".join([*sorted(own), *templates.NAMED])
        raise UserError(f"dataset.chat_template: no template is called '{name}'; known are {known}")
    template = templates.NAMED[name]
    missing = [token for token in template.tokens if tokenizer.backend.token_to_id(token) is None]
    if missing:
        raise UserError(f"dataset.chat_template: '{name}' needs the token '{missing[0]}', which the tokenizer lacks")
    return template.text


def _folder_templates(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: in files (transformers 5), else in a configuration (4), the plain one as "default"."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg})") from None
