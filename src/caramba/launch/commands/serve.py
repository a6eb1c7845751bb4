"""`caramba serve RUN|DIR`: answer requests over HTTP until a signal."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from caramba.config.generate import EngineConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError, fits_header
from caramba.infer.arguments import ModelArguments, chat_template, end_marks, open_for_text
from caramba.infer.engine import Engine
from caramba.infer.model_bundle import ModelBundle
from caramba.infer.quantised import calibration_config
from caramba.launch.commands.arguments import real
from caramba.runtime import is_out_of_memory

if TYPE_CHECKING:
    from caramba.serve.service import Service

MAX_LEN = 8192  # where the model goes further: every slot's cache is allocated at once
COMPILED: dict[str, bool | str] = {"graph": "graph", "auto": "auto", "true": True, "false": False}
NEEDED = ("starlette", "uvicorn", "prometheus_client")


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a wrong argument, an unknown run, an address that cannot be had, or one that strangers reach
            without a key.
    """
    args = _parse_arguments(argv)
    logger.quiet = args.quiet
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve: {', '.join(missing)} not installed; pip install 'caramba[serve]'")
    from caramba.serve.connections import BACKLOG, connections_that_fit
    from caramba.serve.guard import is_loopback
    from caramba.serve.server import Server, bind
    from caramba.serve.service import Limits, Service

    key = _api_key(args.api_key_env)
    if key is None and not is_loopback(args.host):
        raise ConfigError(
            f"serve: --host {args.host} is reached by other machines, and without a key anyone there could use the "
            "model; name the environment variable of a key with --api-key-env NAME, or listen on 127.0.0.1"
        )
    if args.batch_timeout >= args.timeout:
        raise ConfigError(
            f"serve: --batch-timeout {args.batch_timeout:g} is not below --timeout {args.timeout:g}: a request that "
            "waits alone would be cut off before it begins; lower it"
        )
    calibration_config(args)
    _engine_config(args, args.max_len)  # a wrong value, and a taken address, fail before a model loads
    with bind(args.host, args.port) as listener:
        opened, tokenizer = open_for_text(args)
        config = _engine_config(args, args.max_len or min(opened.max_positions, MAX_LEN))
        most = args.max_tokens or config.max_len - 1
        if not most < config.max_len:
            raise ConfigError(
                f"serve: --max-tokens {most} leaves no room for a prompt in --max-len {config.max_len}; lower it"
            )
        engine = _engine(opened, tokenizer, config)
        limits = Limits(most, args.max_request_bytes, args.timeout)
        template = chat_template(opened, args)
        service = Service(engine, tokenizer, model_name(opened), limits, template=template)
        listener.listen(BACKLOG)
        _announce(service, listener.getsockname(), has_key=key is not None)
        most_open = connections_that_fit(args.max_connections)
        if most_open < args.max_connections:
            logger.warning(
                f"--max-connections {args.max_connections}: {most_open} fit the files that this process may open; "
                "raise ulimit -n for more"
            )
        server = Server(service, api_key=key, max_connections=most_open, drain_s=args.drain)
        server.serve_until_signalled(listener)
    logger.info("stopped")
    return 0


def _engine(opened: ModelBundle, tokenizer: Tokenizer, config: EngineConfig) -> Engine:
    try:
        return Engine(opened.model, config, tokenizer=tokenizer, eos_token_id=end_marks(opened, tokenizer))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"serve: the cache of {config.n_slots} slots and {config.n_ahead} prompts ahead, {config.max_len} tokens "
            "each, does not fit next to the model; lower --max-batch, --prompts-ahead or --max-len, or take a "
            "smaller --cache-kind"
        ) from None


def _announce(service: Service, name: tuple[Any, ...], *, has_key: bool) -> None:
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    stats, wait = service.engine.stats(), service.engine.config.batch_timeout
    ahead = f" and {stats.n_ahead} prompts ahead" if stats.n_ahead else ""
    logger.info(
        f"{service.name} at http://{host}:{name[1]}/v1: {stats.n_slots} slots{ahead} of {service.context} tokens, "
        f"{stats.cache_kind} cache {stats.cache_bytes / 1e6:.2f} MB, {stats.decode} steps, "
        f"at most {service.limits.max_tokens} new tokens, {f'{wait:g} s for a batch to gather, ' if wait else ''}"
        f"{'with a key' if has_key else 'no key'}"
    )
    if stats.not_ahead is not None:
        logger.warning(f"--prompts-ahead {service.engine.config.n_ahead} was not followed: {stats.not_ahead}")


def model_name(opened: ModelBundle) -> str:
    """Return the model's name for clients: of a run its name and time, of a folder or file its own."""
    if opened.run_dir is not None:
        folder = opened.run_dir.resolve()
        return f"{folder.parent.name}/{folder.name}"
    return opened.path.resolve().name


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ModelArguments("serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_whole(0, 65535), default=8000)
    parser.add_argument("--max-batch", type=_whole(1), default=16)
    parser.add_argument("--prompts-ahead", type=_whole(0), default=0)
    parser.add_argument("--max-len", type=_whole(2))
    parser.add_argument("--cache-kind")
    parser.add_argument("--max-tokens", type=_whole(1))
    parser.add_argument("--max-queue", type=_whole(0), default=256)
    parser.add_argument("--batch-timeout", type=_seconds_or_none, default=0.0)
    parser.add_argument("--max-request-bytes", type=_whole(1), default=1 << 20)
    parser.add_argument("--timeout", type=_seconds, default=300.0)
    parser.add_argument("--max-connections", type=_whole(1), default=1024)
    parser.add_argument("--drain", type=_seconds_or_none, default=None)
    parser.add_argument("--api-key-env")
    parser.add_argument("--prefix-cache-mb", type=_megabytes, default=0.0)
    parser.add_argument("--memory-cache-mb", type=_megabytes, default=0.0)
    parser.add_argument("--prefill-chunk", type=_whole(1))
    parser.add_argument("--compiled", choices=tuple(COMPILED))
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args(argv)
    args.command = "serve"
    return args


def _engine_config(args: argparse.Namespace, max_len: int | None) -> EngineConfig:
    given = {
        "n_slots": args.max_batch,
        "n_ahead": args.prompts_ahead,
        "max_len": max_len,
        "cache_kind": args.cache_kind,
        "max_queue": args.max_queue,
        "batch_timeout": args.batch_timeout,
        "prefix_cache_bytes": int(args.prefix_cache_mb * 1e6),
        "use_memory_cache": args.memory_cache_mb > 0,
        "cache_size": args.memory_cache_mb or None,
        "prefill_chunk": args.prefill_chunk,
        "compiled": None if args.compiled is None else COMPILED[args.compiled],
    }
    return parse_as(EngineConfig, {key: value for key, value in given.items() if value is not None})


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not fits_header(key):
        what = "is not set" if not key else "holds blanks or characters that a header cannot carry"
        raise ConfigError(f"serve: --api-key-env {variable}: the environment variable {what}; export a key in it")
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


_seconds = real(lambda value: value > 0, "got {text}, expected seconds above 0")
_seconds_or_none = real(lambda value: value >= 0, "got {text}, expected seconds of 0 or more")
_megabytes = real(lambda value: value >= 0, "got {text}, expected megabytes of 0 or more")
