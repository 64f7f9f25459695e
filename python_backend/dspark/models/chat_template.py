"""Renders chat templates the way Hugging Face transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import CheckpointError, RequestError

__all__ = ["ChatTemplate"]


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks training targets; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled template and the one for tools where the model has another."""

    def __init__(
        self,
        template: str,
        *,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str],
        where: str,
    ) -> None:
        """Compile.

        Arguments:
            special_tokens: variables that templates use, such as `bos_token` -> "<s>".

        Raises:
            CheckpointError: when a template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(template)
            self._tool_template = (
                self._template if tool_template is None else environment.from_string(tool_template)
            )
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{where}: the chat template cannot be compiled ({error})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Return the prompt text.

        Raises:
            RequestError: on field `messages`, for wrong shapes and whatever the template refuses.
        """
        allowed = "a non-empty list of objects with a text `role`"
        given: object = messages  # from outside: not what the type says, perhaps
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise RequestError("messages", messages, allowed)
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError("messages", message, allowed)
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template may raise anything on messages it was not written for
            reason = str(error)[:300] or type(error).__name__
            raise RequestError(
                "messages", list(messages), f"what this model's chat template takes ({reason})"
            ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace jinja2's own filter, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
