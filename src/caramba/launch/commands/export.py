"""`caramba export RUN --format FORMAT --out DIR [--dtype DTYPE | --weights TYPE]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.export.check import check_folder, check_gguf
from caramba.export.deepseek import ENGINES
from caramba.export.gguf import WEIGHTS, check_weights
from caramba.export.precision import check_dtype
from caramba.export.write import FORMATS, Exported, check_format, check_out, export_model
from caramba.infer.load_model import ModelBundle, load_model


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ConfigError(f"export: {message}; caramba export RUN --format {'|'.join(FORMATS)} --out DIR")


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a missing or unknown argument, an unknown run, a folder that is not empty, or weights that
            `--dtype` cannot hold.
    """
    parser = _Parser(prog="caramba export", add_help=False, allow_abbrev=False)
    parser.add_argument("run")
    parser.add_argument("--format", default="hf")
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--weights")
    parser.add_argument("--engine", default=ENGINES[0], choices=ENGINES)
    parser.add_argument("--which", default="student", choices=("teacher", "student"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--debug", action="store_true")
    words = parser.parse_args(argv)
    logger.quiet = words.quiet
    folder = Path(words.out)
    check_format(words.format)
    dtype = None if words.dtype is None else check_dtype(words.dtype)
    weights = _weights_of(words.format, words.weights, words.dtype)
    if words.check:
        _refuse_check(words.format, words.dtype, words.engine, weights)
    if words.engine != ENGINES[0] and words.format != "deepseek":
        raise ConfigError(
            f"export: --engine {words.engine} belongs to --format deepseek, got --format {words.format}; leave it out"
        )
    check_out(folder.expanduser(), force=words.force)
    opened = load_model(words.run, role=words.which)
    done = export_model(
        opened,
        folder,
        format=words.format,
        role=words.which,
        force=words.force,
        dtype=dtype,
        weights=weights,
        engine=words.engine,
    )
    for note in done.notes:
        logger.info(note)
    size = sum((done.folder / name).stat().st_size for name in done.files)
    print(
        f"{words.which} of {opened.path} as {done.architecture}: {len(done.files)} files, {size / 1e6:.1f} MB"
    )
    print(f"exported: {done.folder}")
    if words.check:
        print(_check(opened, done, words.format))
    return 0


def _weights_of(format: str, weights: str | None, dtype: str | None) -> str:
    """Return the type of a GGUF file's weights; other formats have a dtype instead."""
    if format == "gguf":
        if dtype is not None:
            raise ConfigError(
                f"export: --dtype {dtype} is of other formats; a GGUF file takes --weights {'|'.join(WEIGHTS)}"
            )
        return check_weights(weights or WEIGHTS[0])
    if weights is not None:
        raise ConfigError(
            f"export: --weights {weights} belongs to --format gguf, got --format {format}; use --dtype there"
        )
    return WEIGHTS[0]


def _check(opened: ModelBundle, done: Exported, format: str) -> str:
    """Compare the result in its engine; return one line about it."""
    if format == "gguf":
        (file,) = (name for name in done.files if name.endswith(".gguf"))
        found = check_gguf(opened, done.folder / file)
        return "not checked: llama-cpp-python is not installed" if found is None else found.describe()
    return check_folder(opened, done.folder).describe()


def _refuse_check(format: str, dtype: str | None, engine: str, weights: str) -> None:
    """Refuse to check what is not meant to compute the same numbers as the model."""
    reason = None
    if format not in ("hf", "deepseek", "gguf"):
        reason = f"--format {format} is caramba's own"
    elif dtype not in (None, "float32", "fp32"):
        reason = f"--dtype {dtype} rounds the weights"
    elif engine != ENGINES[0]:
        reason = f"{engine} is not run here"
    elif weights != WEIGHTS[0]:
        reason = f"--weights {weights} rounds the weights"
    if reason is not None:
        raise ConfigError(f"export: --check compares with the model, and {reason}; leave out one of the two")
