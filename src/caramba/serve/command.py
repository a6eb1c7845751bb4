"""`caramba serve RUN|DIR`: answer requests over HTTP until a signal."""

from __future__ import annotations

import argparse
import importlib.util
import os

from caramba.config.engine import EngineConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.arguments import ModelArguments, chat_template, end_marks, open_for_text
from caramba.infer.engine import Engine
from caramba.infer.opened import OpenedModel

OPTIONS = (
    "[--host 127.0.0.1] [--port 8000] [--max-batch 16] [--max-len N] [--cache-kind KIND] [--max-tokens N] "
    "[--max-queue 256] [--max-request-bytes 1048576] [--timeout 300] [--api-key-env NAME] [--prefix-cache-mb 0] "
    "[--plain]"
)
NEEDED = ("starlette", "uvicorn", "prometheus_client")


def serve(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a wrong argument, an unknown run, an address that cannot be had, or one that strangers reach
            without a key.
    """
    words = _words(argv)
    logger.quiet = words.quiet
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve: {', '.join(missing)} not installed; pip install 'caramba[serve]'")
    from caramba.serve.guard import is_loopback
    from caramba.serve.server import Server, listen
    from caramba.serve.service import Limits, Service

    key = _api_key(words.api_key_env)
    if key is None and not is_loopback(words.host):
        raise ConfigError(
            f"serve: --host {words.host} is reached by other machines, and without a key anyone there could use the "
            "model; name the environment variable of a key with --api-key-env NAME, or listen on 127.0.0.1"
        )
    config = _engine_config(words, words.max_len)
    listener = listen(words.host, words.port)
    with listener:
        opened, tokenizer = open_for_text(words)
        config = _engine_config(words, words.max_len or opened.max_positions)
        most = words.max_tokens or config.max_len - 1
        if not most < config.max_len:
            raise ConfigError(
                f"serve: --max-tokens {most} leaves no room for a prompt in --max-len {config.max_len}; lower it"
            )
        limits = Limits(most, words.max_request_bytes, words.timeout)
        engine = Engine(opened.model, config, tokenizer=tokenizer, eos_token_id=end_marks(opened, tokenizer))
        name = served_name(opened)
        service = Service(
            engine,
            tokenizer,
            name,
            limits,
            template=chat_template(opened, words),
        )
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info(
            f"{name} at {address}/v1: {config.n_slots} slots of {config.max_len} tokens, at most {most} new ones, "
            f"{'a key' if key else 'no key'}; {address}/openapi.json says all"
        )
        Server(service, api_key=key).serve_until_signalled(listener)
    logger.info("stopped")
    return 0


def served_name(opened: OpenedModel) -> str:
    """Return the model's name for clients: of a run its name and time, of a folder or file its own."""
    if opened.run_dir is not None:
        folder = opened.run_dir.resolve()
        return f"{folder.parent.name}/{folder.name}"
    return opened.path.resolve().name


def _words(argv: list[str]) -> argparse.Namespace:
    parser = ModelArguments("serve", OPTIONS)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_whole(0, 65535), default=8000)
    parser.add_argument("--max-batch", type=_whole(1), default=16)
    parser.add_argument("--max-len", type=_whole(2))
    parser.add_argument("--cache-kind")
    parser.add_argument("--max-tokens", type=_whole(1))
    parser.add_argument("--max-queue", type=_whole(0), default=256)
    parser.add_argument("--max-request-bytes", type=_whole(1), default=1 << 20)
    parser.add_argument("--timeout", type=_seconds, default=300.0)
    parser.add_argument("--api-key-env")
    parser.add_argument("--prefix-cache-mb", type=_megabytes, default=0.0)
    parser.add_argument("--plain", action="store_true")
    words = parser.parse_args(argv)
    words.command = "serve"
    return words


def _engine_config(words: argparse.Namespace, max_len: int | None) -> EngineConfig:
    given = {
        "n_slots": words.max_batch,
        "max_len": max_len,
        "cache_kind": words.cache_kind,
        "max_queue": words.max_queue,
        "prefix_cache_bytes": int(words.prefix_cache_mb * 1e6),
    }
    return parse_as(EngineConfig, {key: value for key, value in given.items() if value is not None})


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        what = "is not set" if not key else "holds blanks or characters that a header cannot carry"
        raise ConfigError(
            f"serve: --api-key-env {variable}: the environment variable {what}; export a key in it"
        )
    return key


def _whole(low: int, high: int | None = None):
    def whole_number(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(
                f"got {value}, expected {low} {'or more' if high is None else f'to {high}'}"
            )
        return value

    return whole_number


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0")
    return value


def _megabytes(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected megabytes of 0 or more")
    return value
