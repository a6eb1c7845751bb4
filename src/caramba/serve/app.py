"""The interface as an ASGI application: routes, the OpenAPI document, and who answers what cannot be answered."""

import copy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from caramba import __version__
from caramba.serve import failure, schema
from caramba.serve.failure import REASONS, ApiError
from caramba.serve.guard import Guard, read_json
from caramba.serve.metrics import CONTENT_TYPE
from caramba.serve.reply import EventStream, Reply
from caramba.serve.running import ActiveRequest
from caramba.serve.schema import ChatRequest, CompletionRequest, ModelList, SamplingRequest, parse_request
from caramba.serve.service import Service
from caramba.serve.shapes import ChatShape, Shape, TextShape

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


def document(model: str, *, max_tokens: int, vocab_size: int, has_key: bool) -> dict[str, Any]:
    """Return OpenAPI 3.1 of one server: its model, its limits, and the API key if it has one."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(one, "validation") for one in REQUESTS]
    modes.extend((one, "serialization") for one in ANSWERS)
    _, found_definitions = models_json_schema(modes, ref_template=REFERENCE)
    definitions = copy.deepcopy(found_definitions)  # parts of it belong to the classes
    limits = {"prompt": vocab_size - 1, "max_tokens": max_tokens, "max_completion_tokens": max_tokens}
    for request in REQUESTS:
        _narrow(definitions["$defs"][request.__name__]["properties"], limits, model)
    refused = (401,) if has_key else (421,)
    text, chat, chunk = schema.Completion, schema.ChatCompletion, schema.ChatChunk
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "caramba serve", "version": __version__},
        "paths": {
            "/v1/completions": _post("Continue a text", schema.CompletionRequest, text, text, refused),
            "/v1/chat/completions": _post("Answer a conversation", schema.ChatRequest, chat, chunk, refused),
            "/v1/models": _get("The model that is served", schema.ModelList, refused),
            "/v1/models/{model}": _get("The model of this name", schema.ModelCard, (*refused, 404), "model"),
            "/health": _get("Whether requests are taken", schema.Health, () if has_key else refused, busy=True),
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


def _narrow(properties: dict[str, Any], limits: dict[str, int], model: str) -> None:
    del properties["model"]["anyOf"]
    properties["model"]["enum"] = [model, None]
    for key in limits.keys() & properties.keys():
        if isinstance(properties[key].get("default"), int):
            properties[key]["default"] = min(properties[key]["default"], limits[key])
        pending = [properties[key]]
        while pending:
            node = pending.pop()
            pending += [*node.get("anyOf", ()), *([node["items"]] if "items" in node else ())]
            if node.get("type") == "integer":
                node["maximum"] = limits[key]


def _post(
    summary: str, request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel], refused: tuple
) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _content(request)},
            "responses": {
                "200": {
                    "description": f"the answer; as a stream: `data:` and a {chunk.__name__} each, then [DONE]",
                    "content": _content(whole) | {"text/event-stream": {}},
                },
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


def build_app(service: Service, *, api_key: str | None = None) -> Starlette:
    """Return the application of a service whose engine runs. Without a key only loopback is answered."""

    async def completions(request: Request) -> Response | Reply:
        wanted = parse_request(CompletionRequest, await read_json(request, service.limits.request_bytes))
        shape = TextShape(service.name, wanted.logprobs is not None, wanted.n_alternatives)
        return _reply(service, wanted, await service.complete(wanted), shape, shape.with_logprobs)

    async def chat(request: Request) -> Response | Reply:
        wanted = parse_request(ChatRequest, await read_json(request, service.limits.request_bytes))
        shape = ChatShape(service.name, with_logprobs=wanted.logprobs)
        return _reply(service, wanted, await service.answer(wanted), shape, shape.with_logprobs)

    async def models(_: Request) -> Response:
        return _json(ModelList(data=[service.card]))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name != service.name:
            raise ApiError(404, f"no model {name!r}; served: {service.name}", code="model_not_found")
        return _json(service.card)

    async def health(_: Request) -> Response:
        return _json(service.health(), 503 if service.is_stopping or service.failure else 200)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(_: Request) -> Response:
        return JSONResponse(
            document(
                service.name,
                max_tokens=service.limits.max_tokens,
                vocab_size=service.vocab_size,
                has_key=api_key is not None,
            )
        )

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, key=api_key, paths=paths, metrics=service.metrics)],
        exception_handlers={
            ApiError: failure.on_api_error,
            HTTPException: failure.on_http_error,
            Exception: failure.on_crash,
        },
    )


def _json(value: BaseModel, status: int = 200) -> Response:
    return Response(value.model_dump_json(), status, media_type="application/json")


def _reply(service: Service, wanted: SamplingRequest, running: ActiveRequest, shape: Shape, with_tokens: bool) -> Reply:
    timeout_s = service.limits.timeout_s
    if not wanted.stream:
        return Reply(running, shape, timeout_s)
    options = wanted.stream_options
    with_usage = options is not None and options.include_usage
    return EventStream(running, shape, timeout_s, with_usage=with_usage, with_tokens=with_tokens)
