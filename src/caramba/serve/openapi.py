"""The OpenAPI document, made of the classes that requests are parsed with and answers are written from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from caramba import __version__
from caramba.serve import schema
from caramba.serve.failure import REASONS

REFERENCE = "#/components/schemas/{model}"
ASKED = (400, 404, 405, 408, 413, 415, 429, 500, 503, 504)
REQUESTS: tuple[type[BaseModel], ...] = (schema.CompletionRequest, schema.ChatRequest)
ANSWERS: tuple[type[BaseModel], ...] = (
    schema.Completion,
    schema.ChatCompletion,
    schema.ChatChunk,
    schema.ModelList,
    schema.ModelCard,
    schema.Health,
    schema.FailureBody,
)


def document(model: str, max_tokens: int, *, has_key: bool) -> dict[str, Any]:
    """Return OpenAPI 3.1 of one server: of this model, at most so many new tokens, and its API key if it has one."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(one, "validation") for one in REQUESTS]
    modes.extend((one, "serialization") for one in ANSWERS)
    _, definitions = models_json_schema(modes, ref_template=REFERENCE)
    _narrow(definitions["$defs"], model, max_tokens)
    refused = (401,) if has_key else (421,)
    text, chat, chunk = schema.Completion, schema.ChatCompletion, schema.ChatChunk
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "caramba serve", "version": __version__},
        "paths": {
            "/v1/completions": _post("Go on from a text", schema.CompletionRequest, text, text, refused),
            "/v1/chat/completions": _post("Answer a conversation", schema.ChatRequest, chat, chunk, refused),
            "/v1/models": _get("The model that is served", schema.ModelList, refused),
            "/v1/models/{model}": _get("The model of this name", schema.ModelCard, (*refused, 404), "model"),
            "/health": _get(
                "Whether requests are taken", schema.Health, () if has_key else refused, busy=True
            ),
            "/metrics": _get("Counters for Prometheus", "text/plain", refused),
            "/openapi.json": _get("This document", "application/json", refused),
        },
        "components": {"schemas": definitions["$defs"]},
    }
    if has_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        found["paths"]["/health"]["get"]["security"] = []
    return found


def _narrow(schemas: dict[str, Any], model: str, max_tokens: int) -> None:
    """Write what this server takes into the requests' schemas."""
    for request in REQUESTS:
        properties = schemas[request.__name__]["properties"]
        properties["model"]["enum"] = [model]
        for key in ("max_tokens", "max_completion_tokens"):
            for branch in (properties.get(key, {}), *properties.get(key, {}).get("anyOf", ())):
                if branch.get("type") == "integer":
                    branch["maximum"] = max_tokens


def _post(
    summary: str, request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel], refused: tuple
) -> dict[str, Any]:
    events = {
        "text/event-stream": {
            "schema": {"type": "string", "description": f"`data:` and a {chunk.__name__} each, then [DONE]"}
        }
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _content(request)},
            "responses": {
                "200": {"description": "the answer", "content": _content(whole) | events},
                **_failures((*refused, *ASKED)),
            },
        }
    }


def _get(
    summary: str, answer: type[BaseModel] | str, refused: tuple, parameter: str = "", *, busy: bool = False
) -> dict[str, Any]:
    content = {answer: {}} if isinstance(answer, str) else _content(answer)
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if busy:
        responses["503"] = {"description": REASONS[503], "content": content}
    found: dict[str, Any] = {"summary": summary, "responses": responses | _failures((*refused, 405))}
    if parameter:
        found["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return {"get": found}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}


def _failures(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {
        str(status): {"description": REASONS[status], "content": _content(schema.FailureBody)}
        for status in sorted(statuses)
    }
