"""A conversation as the tokens that a model reads: by its tokenizer's chat template, or in a plain format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.prompts import refuse_broken

Message = dict[str, str]
PLAIN_STOP = "\nUser:"


class Dialogue:
    """Turns so far, and the ids of all of them with the start of the next answer.

    Without a template the format is `System: …`, `User: …` and `Assistant: …`, a line each; an answer then ends where
    the model begins a line with `User:`.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, system: str | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[Message] = []

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return () if self.template is not None else (PLAIN_STOP,)

    def reset(self) -> None:
        """Forget all turns."""
        self.turns = []

    def ask(self, text: str, limit: int) -> tuple[list[int], int]:
        """Add a user's turn; return the prompt ids, and how many of the oldest turns no longer fit `limit`.

        Raises:
            ConfigError: the message alone does not fit, or spells a mark that would end it; it is not added.
        """
        for message in self.system:
            refuse_broken(message["content"], "chat: the message")
        self._refuse(text)
        kept = [*self.turns, {"role": "user", "content": text}]
        n_turns = len(kept)
        while len(ids := self._ids([*self.system, *kept])) > limit:
            if len(kept) < 3:
                raise ConfigError(
                    f"chat: the message and its frame take {len(ids)} tokens and {max(limit, 0)} are left next to the "
                    "answer; shorten it, or lower --max-new-tokens"
                )
            kept = kept[2:]
        self.turns = kept
        return ids, n_turns - len(kept)

    def answer(self, text: str) -> None:
        """Add the model's turn."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Take back a user's turn that got no answer."""
        self.turns.pop()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a whole conversation with the start of the next answer; nothing of it is remembered.

        Raises:
            ConfigError: a message spells a mark of the format or is no text, or the template refuses the roles.
        """
        for message in messages:
            self._refuse(message["content"])
        return self._ids([*self.system, *messages])

    def _refuse(self, text: str) -> None:
        refuse_broken(text, "chat: the message")
        wrong = next((mark for mark in self._marks if mark in text), None)
        if wrong is not None:
            raise ConfigError(f"chat: the message spells {wrong!r}, a mark of the chat format; write it otherwise")

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        if self.template is None:
            lines = [f"{message['role'].capitalize()}: {message['content'].strip()}\n" for message in messages]
            ids = self.tokenizer.encode("".join(lines) + "Assistant:")
            is_begun = self.tokenizer.adds_bos and self.tokenizer.bos_id is not None
            return [self.tokenizer.bos_id, *ids] if is_begun else ids  # pyright: ignore[reportReturnType]
        return self._backend.encode(_render(self.template, messages, self._names), add_special_tokens=False).ids

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer as Backend

        # The tokenizer itself reads marks as text; in a template they are marks.
        backend = Backend.from_str(self.tokenizer.definition)
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        if self.template is None:
            return ()
        added = json.loads(self.tokenizer.definition).get("added_tokens", [])
        return tuple(item["content"] for item in added if item.get("special"))

    @cached_property
    def _names(self) -> dict[str, str]:
        bos_id = self.tokenizer.bos_id
        return {
            "eos_token": self._backend.id_to_token(self.tokenizer.eos_id) or "",
            "bos_token": "" if bos_id is None else self._backend.id_to_token(bos_id),
        }


def read_template(folder: Path) -> str | None:
    """Return the chat template of a tokenizer's folder: chat_template.jinja, or that of tokenizer_config.json.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); copy the folder again, or use --plain") from None
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: not a JSON object ({error}); copy the folder again") from None
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{file}: chat_template is a {type(found).__name__}, expected a text; use --plain")
    return found


def _render(template: str, messages: Sequence[Message], names: dict[str, str]) -> str:
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    # A template comes with the weights, so it runs in the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    try:
        found = environment.from_string(template)
        return found.render(messages=list(messages), add_generation_prompt=True, **names)
    except (TemplateError, SecurityError) as error:
        raise ConfigError(
            f"chat: the tokenizer's chat template refused the conversation ({error}); use --plain"
        ) from None
