"""Tool calls as JSON in plain text, for servers without tool calls: schemas in the prompt, calls in the answer."""

from __future__ import annotations

import json
from typing import Any

from caramba.paper.untrusted import read_json, read_object

_ASKED = (
    "You call tools by answering with one JSON object and nothing else, "
    '{"calls": [{"name": NAME, "arguments": {...}}]}, or, when you are done, {"text": WORDS}. Tools:\n'
)


def as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation without tool calls: one system message, then user and assistant in turn."""
    schemas = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    found: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], str(message["content"] or "")
        if role == "system":
            text = f"{text}\n\n{_ASKED}{schemas}"
        elif role == "assistant":
            calls = [
                {"name": call["function"]["name"], "arguments": _loaded(call["function"]["arguments"])}
                for call in message.get("tool_calls", [])
            ]
            text = json.dumps({"calls": calls} if calls else {"text": text}, ensure_ascii=False)
        elif role == "tool":
            role, text = "user", f"Result of {message['tool_call_id']}: {text}"
        if found and role == "user" == found[-1]["role"]:
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": role, "content": text})
    return found


def read_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return what an answer states and the calls that it makes, as the chat-completions protocol writes them.

    Raises:
        ValueError: the answer is not of the form that was asked for; the message is for the model.
    """
    plain = read_object(text)
    if not plain.keys() & {"calls", "text"}:
        raise ValueError("the object has neither calls nor text")
    known = [tool["function"]["name"] for tool in tools]
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(plain.get("calls") or []):
        if not isinstance(call, dict) or call.get("name") not in known:
            raise ValueError(f"call {index + 1} names no tool of {', '.join(known)}")
        arguments = json.dumps(call.get("arguments") or {}, ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{index}", "type": "function", "function": function})
    return str(plain.get("text") or ""), calls


def _loaded(arguments: str) -> Any:
    try:
        return read_json(arguments)
    except ValueError:
        return arguments
