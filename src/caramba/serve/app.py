"""The interface as an ASGI application: routes, and who answers what cannot be answered."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from caramba.serve import failure
from caramba.serve.failure import ApiError
from caramba.serve.guard import Guard, read_json
from caramba.serve.metrics import CONTENT_TYPE
from caramba.serve.openapi import document
from caramba.serve.reply import EventStream, Reply
from caramba.serve.running import ActiveRequest
from caramba.serve.schema import (
    ChatRequest,
    CompletionRequest,
    ModelList,
    SamplingRequest,
    parse_request,
)
from caramba.serve.service import Service
from caramba.serve.shapes import ChatShape, Shape, TextShape


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


def _reply(
    service: Service, wanted: SamplingRequest, running: ActiveRequest, shape: Shape, with_tokens: bool
) -> Reply:
    timeout_s = service.limits.timeout_s
    if not wanted.stream:
        return Reply(running, shape, timeout_s)
    options = wanted.stream_options
    with_usage = options is not None and options.include_usage
    return EventStream(running, shape, timeout_s, with_usage=with_usage, with_tokens=with_tokens)
