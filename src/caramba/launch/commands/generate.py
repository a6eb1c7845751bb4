"""`caramba generate RUN|DIR --prompt TEXT`: text from a run, an export or a Hugging Face folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from caramba.config.generate import GenerateConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.arguments import GenerationArguments, open_generator, sampling_config
from caramba.infer.chat_session import describe_speculation, log_cache_choice, steps_remark, without_control
from caramba.infer.generator import Generated, Generator
from caramba.infer.model_bundle import ModelBundle
from caramba.infer.shared import joined_ranks
from caramba.infer.speculative import SpeculativeGenerator
from caramba.runtime import is_main_process, is_out_of_memory


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a wrong argument, an unknown run, a prompt that is empty or does not fit.
    """
    parser = GenerationArguments("generate", "--prompt TEXT... | --prompt-file FILE ")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt-file")
    parser.add_argument("--spec-compare", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    args.command = "generate"
    logger.quiet = args.quiet or args.json or not is_main_process()
    config, prompts = sampling_config(args), _prompts(args)
    with joined_ranks(args, config) as mesh:
        return _generate(args, config, prompts, mesh)


def _generate(args: argparse.Namespace, config: GenerateConfig, prompts: list[str], mesh: DeviceMesh | None) -> int:
    opened, generator = open_generator(args, config, mesh)
    is_streamed = len(prompts) == 1 and not args.json
    if args.spec_compare and not isinstance(generator, SpeculativeGenerator):
        raise ConfigError("generate: --spec-compare times speculation against none; name --spec-method")
    # Every rank streams or none, as that decides how often they look whether the rows have ended.
    show = _show if is_main_process() else _hide
    try:
        rows = generator.generate(prompts, on_text=show if is_streamed else None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"generate: memory ran out ({str(error).strip().splitlines()[0]}) with {len(prompts)} prompts and up to "
            f"{config.max_new_tokens} new tokens; lower --max-new-tokens, give fewer prompts, or take a "
            "--cache-kind of fewer bits"
        ) from None
    speed_up = _speed_up(generator, prompts) if args.spec_compare else None
    if not is_main_process():
        if isinstance(generator, SpeculativeGenerator):
            generator.speed_up()  # rank 0 times steps for what it prints, and they take all ranks
        return 0
    if args.json:
        print(json.dumps(_record(opened, generator, prompts, rows, speed_up), indent=2))
        return 0
    if is_streamed:
        print()
    else:
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            print(f"[{index}] {without_control(prompt)}\n{without_control(row.text or '')}")
    stats = generator.stats
    logger.info(
        f"{stats.new_tokens} tokens at {stats.tokens_per_second:.1f} tok/s, cache {stats.cache_bytes / 1e6:.2f} MB, "
        f"ended by {', '.join(row.finish for row in rows)}, seed {generator.config.first_seed}"
    )
    log_cache_choice(generator)
    steps = steps_remark(stats, generator.config, generator.model.embedder.token.weight.device)
    if steps is not None:
        logger.info(steps)
    if isinstance(generator, SpeculativeGenerator):
        against = "" if speed_up is None else f"; measured against none: {speed_up:.2f}x its decode speed"
        logger.info(f"{describe_speculation(generator)}{against}")
    return 0


def _speed_up(generator: Generator, prompts: list[str]) -> float | None:
    """Return the decode speed, tokens over time, as a multiple of the plain generator's: medians of three runs each,
    in turn, after one of both that is not timed; None where nothing was written."""
    plain = Generator(generator.model, generator.tokenizer, generator.config, generator.held_out)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(4):
        for one in (generator, plain):
            one.generate(prompts)
            if repetition:
                speeds[one is generator].append(one.stats.new_tokens / one.stats.decode_s)
    ours, theirs = (statistics.median(speeds[which]) for which in (True, False))
    return ours / theirs if theirs else None


def _show(row: int, text: str) -> None:
    sys.stdout.write(without_control(text))
    sys.stdout.flush()


def _hide(row: int, text: str) -> None:
    """Take text that another rank shows."""


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        file = Path(args.prompt_file).expanduser()
        try:
            prompts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"generate: --prompt-file {file}: {error}; name a UTF-8 text file") from None
    if not prompts:
        raise ConfigError("generate: no prompt; give --prompt TEXT (more than once for a batch) or --prompt-file FILE")
    return prompts


def _record(
    opened: ModelBundle,
    generator: Generator,
    prompts: list[str],
    rows: list[Generated],
    speed_up: float | None,
) -> dict[str, Any]:
    stats = generator.stats
    more: dict[str, Any] = {} if speed_up is None else {"speed_up": speed_up}
    if isinstance(generator, SpeculativeGenerator):
        more |= {
            "acceptance_rate": generator.acceptance_rate,
            "tokens_per_step": generator.tokens_per_step,
            "speed_up_estimate": generator.speed_up(),
        }
    decision = generator.cache_decision
    return {
        "model": str(opened.path),
        "labels": opened.labels,
        "weights": None if opened.quantised is None else opened.quantised.record(),
        "config": generator.config.model_dump(mode="json"),
        "rows": [
            {
                "prompt": prompt,
                "prompt_tokens": len(row.prompt),
                **{key: value for key, value in dataclasses.asdict(row).items() if key != "prompt"},
            }
            for prompt, row in zip(prompts, rows, strict=True)
        ],
        "stats": {**dataclasses.asdict(stats), "tok_s": stats.tokens_per_second, **more},
        "cache_policy": None if decision is None else decision.record(),
    }
