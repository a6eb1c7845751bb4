"""`caramba export RUN --format FORMAT --out DIR [--dtype DTYPE | --weights TYPE]`."""

from __future__ import annotations

from pathlib import Path

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.export.check import check_folder, check_gguf
from caramba.export.deepseek import ENGINES
from caramba.export.gguf import WEIGHTS, check_weights
from caramba.export.precision import check_dtype
from caramba.export.write import STREAMED, Exported, check_format, check_out, export_model
from caramba.infer.model_bundle import ModelBundle, load_model
from caramba.launch.commands.arguments import CommandArguments


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a missing or unknown argument, an unknown run, a folder that is not empty, or weights that
            `--dtype` cannot hold.
    """
    parser = CommandArguments("export")
    parser.add_argument("run")
    parser.add_argument("--format", default="hf")
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--weights")
    parser.add_argument("--engine", default=ENGINES[0], choices=ENGINES)
    parser.add_argument("--which", default="student", choices=("teacher", "student"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args(argv)
    logger.quiet = args.quiet
    folder = Path(args.out)
    check_format(args.format)
    dtype = None if args.dtype is None else check_dtype(args.dtype)
    weights = _weights_of(args.format, args.weights, args.dtype)
    if args.check:
        _refuse_check(args.format, args.dtype, args.engine, weights)
    if args.engine != ENGINES[0] and args.format != "deepseek":
        raise ConfigError(
            f"export: --engine {args.engine} belongs to --format deepseek, got --format {args.format}; leave it out"
        )
    check_out(folder.expanduser(), force=args.force)
    # These formats read the weights one at a time; the check needs the model.
    device = "meta" if args.format in STREAMED else "cpu"
    opened = load_model(args.run, role=args.which, device=device)
    done = export_model(
        opened,
        folder,
        format=args.format,
        role=args.which,
        force=args.force,
        dtype=dtype,
        weights=weights,
        engine=args.engine,
    )
    for note in done.notes:
        logger.info(note)
    size = sum((done.folder / name).stat().st_size for name in done.files)
    print(f"{args.which} of {opened.path} as {done.architecture}: {len(done.files)} files, {size / 1e6:.1f} MB")
    print(f"exported: {done.folder}")
    if args.check:
        if args.format in STREAMED:
            opened = load_model(args.run, role=args.which)
        print(_check(opened, done, args.format))
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
