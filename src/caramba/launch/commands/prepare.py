"""`caramba prepare text | fineweb | stdlib | sample`: command-line words to a token folder or a flat .npy."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.config.data import DataConfig
from caramba.console import logger
from caramba.data.folder import SHARD_TOKENS
from caramba.data.prepare import Advance, PreparedCorpus, PrepareOptions, prepare
from caramba.data.sources import FINEWEB, FINEWEB_SAMPLE, DocumentSource, TextSource, open_hub, open_local
from caramba.data.tokenizer import MAX_BPE_SIZE, Tokenizer
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import HelpArguments, real

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def main(argv: list[str]) -> int:
    """Run `caramba prepare ARGV` and return its exit status.

    Raises:
        ConfigError: a word that is not understood.
        DataError: the text, tokenizer or output does not allow it.
    """
    parser = _parser()
    words = [word for word in argv if word != "--debug"]
    logger.quiet = logger.quiet or "--quiet" in words
    words = [word for word in words if word != "--quiet"]
    if not words or words == ["--help"] or words == ["-h"]:
        parser.print_help()
        return 0
    if "--help" in words or "-h" in words:
        with contextlib.suppress(SystemExit):
            parser.parse_args(words)
        return 0
    given = parser.parse_args(words)
    output = Path(given.output).expanduser()
    if given.corpus == "stdlib":
        _stdlib(given, output)
        return 0
    if given.corpus == "sample":
        _sample(given, output)
        return 0
    source: DocumentSource
    if given.corpus == "text":
        suffixes = tuple(word for word in given.suffix.split(",") if word)
        source = TextSource([Path(path).expanduser() for path in given.paths], suffixes, given.separator)
        lines = next((file for file in source.files if file.suffix in (".jsonl", ".ndjson")), None)
        if lines is not None:
            logger.warning(
                f"{lines}: read as plain text, names and escapes of its JSON included; caramba prepare fineweb --from "
                f"{lines} --field text takes the text of each line, a document of its own"
            )
    elif given.files:
        source = open_local([Path(path).expanduser() for path in given.files], given.field)
    else:
        source = open_hub(given.dataset, given.config or None, given.revision, given.field)
    _run(source, _request(given, output), output)
    return 0


def _request(given: argparse.Namespace, output: Path) -> PrepareOptions:
    val_frac = given.val_frac
    if output.suffix == ".npy":
        if val_frac:
            raise ConfigError(
                f"--val-frac={val_frac} with --output {output.name}: a flat array has no validation split"
                " (data=tokens holds out its end); leave --val-frac out or give a folder"
            )
        val_frac = 0.0
    return PrepareOptions(
        tokenizer=None if given.train_bpe else given.tokenizer,
        bpe_size=given.train_bpe,
        val_frac=0.05 if val_frac is None else val_frac,
        shard_tokens=given.shard_tokens,
        most_tokens=given.tokens,
    )


def _run(source: DocumentSource, request: PrepareOptions, output: Path) -> None:
    start = time.perf_counter()
    with _meter(source.total_bytes, request.most_tokens) as advance:
        made = prepare(source, request, output, say=logger.info, advance=advance)
    for file in getattr(source, "not_utf8", [])[:5]:
        logger.warning(f"{file}: not UTF-8 text, left out")
    _report(made, time.perf_counter() - start, wants_val=request.val_frac > 0)


def _report(made: PreparedCorpus, seconds: float, *, wants_val: bool) -> None:
    for split, facts in made.splits.items():
        logger.info(
            f"{split}: {facts['tokens']:,} tokens, {facts['bytes']:,} bytes, {facts['documents']:,} documents,"
            f" {len(facts['shards'])} shard{'s' if len(facts['shards']) != 1 else ''}"
        )
    if wants_val and "val" not in made.splits:
        logger.warning(
            "no document falls into val; data=tokens will hold out the last data.val_frac of train instead"
            " (raise --val-frac, or give more documents)"
        )
    path = f"data=tokens data.path={made.output}"
    if made.was_there:
        logger.success(f"{made.output} is there already, from the same text and settings: {path}")
    else:
        logger.success(f"{made.output} with tokenizer {made.tokenizer} in {seconds:.1f} s: {path}")


def _stdlib(given: argparse.Namespace, output: Path) -> None:
    """The folder is the one that data=stdlib makes for itself; it takes seconds, so it is not resumable."""
    from caramba.data.corpus import build_stdlib
    from caramba.data.folder import open_token_folder
    from caramba.data.prepare import flatten
    from caramba.errors import DataError

    if output.exists():
        raise DataError(f"{output}: already exists; give another --output or delete it")
    is_byte = given.tokenizer == "byte"
    fields = {"tokenizer": "byte"} if is_byte else {"vocab_size": given.train_bpe or 2048}
    config = DataConfig.model_validate({"type": "stdlib", "val_frac": given.val_frac or 0.05, **fields})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary) / "made"
        build_stdlib(config, folder, logger.info)
        opened = open_token_folder(folder)
        splits = opened.meta["splits"]
        if output.suffix == ".npy":
            shards = [shard for facts in splits.values() for shard in facts["shards"]]
            flatten(folder, shards, opened.tokenizer, output)
        else:
            shutil.move(folder, output)
    _report(PreparedCorpus(output, splits, opened.tokenizer.name), 0.0, wants_val=True)


def _sample(given: argparse.Namespace, output: Path) -> None:
    """The model and torch are loaded here alone: the other kinds need neither."""
    from caramba.infer.arguments import DTYPES
    from caramba.infer.model_bundle import load_model, need_tokenizer
    from caramba.infer.sample_folder import SampleRequest, sample_folder
    from caramba.model import model_hash
    from caramba.runtime import choose_device

    if output.suffix == ".npy":
        raise ConfigError(f"--output {output.name}: prepare sample writes a token folder; give a folder")
    opened = load_model(given.model, role=given.which, device=choose_device(given.device), tokenizer=given.tokenizer)
    if given.dtype is not None:
        opened.model.to(DTYPES[given.dtype])
    tokenizer = need_tokenizer(opened, "prepare sample")
    limit = min(opened.max_positions, 1024)
    request = SampleRequest(
        tokens=given.tokens,
        start=_start_token(given.start, tokenizer),
        temperatures=tuple(dict.fromkeys(given.temperature)),
        batch=given.batch,
        length=given.length or limit,
        seed=given.seed,
        val_frac=0.05 if given.val_frac is None else given.val_frac,
        shard_tokens=given.shard_tokens,
    )
    if not 2 <= request.length <= opened.max_positions:
        raise ConfigError(f"--length {request.length}: expected 2 to the model's context, {opened.max_positions}")
    dtype = str(opened.model.embedder.token.weight.dtype).removeprefix("torch.")
    identity = {"model": model_hash(opened.model), "dtype": dtype}
    start = time.perf_counter()
    with _meter(None, request.tokens) as advance:
        made, left_out = sample_folder(opened.model, tokenizer, identity, request, output, advance=advance)
    seconds = time.perf_counter() - start
    if left_out:
        shown = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        logger.info(f"left out: {shown}; {sum(f['tokens'] for f in made.splits.values()) / seconds:,.0f} tokens/s")
    _report(made, seconds, wants_val=request.val_frac > 0)


def _start_token(text: str | None, tokenizer: Tokenizer) -> int:
    if text is None:
        return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    found = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else tokenizer.token_id(text)
    if found is None or found >= tokenizer.vocab_size:
        raise ConfigError(
            f"--start {text!r}: no such entry of {tokenizer.name}; name one, such as <|endoftext|>, or an id below "
            f"{tokenizer.vocab_size}"
        )
    return found


@contextlib.contextmanager
def _meter(total_bytes: int | None, total_tokens: int | None) -> Iterator[Advance]:
    """A bar with MB/s on a terminal; elsewhere a line every 10%, or every 100 MB."""
    # Bytes and time of the first call: neither a former start nor training a BPE counts for the speed.
    first: list[tuple[int, float]] = []

    def text(size: int, tokens: int) -> str:
        speed = (size - first[0][0]) / 1e6 / max(1e-9, time.perf_counter() - first[0][1])
        return f"{size / 1e6:,.1f} MB, {tokens:,} tokens, {speed:.1f} MB/s"

    if logger.is_terminal and not logger.quiet:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        with Progress(*columns, TimeRemainingColumn(compact=True)) as bar:
            task = bar.add_task("encoding", total=total_tokens or total_bytes, said="")

            def draw(size: int, tokens: int) -> None:
                first[:] = first or [(size, time.perf_counter())]
                done = tokens if total_tokens else size
                bar.update(task, completed=done, said=text(size, tokens))

            yield draw
        return
    marks = [0]

    def line(size: int, tokens: int) -> None:
        first[:] = first or [(size, time.perf_counter())]
        total = total_tokens or total_bytes
        done = tokens if total_tokens else size
        mark = done * 10 // total if total else size // 100_000_000
        if mark > marks[0]:
            marks[0] = mark
            logger.info(f"encoding: {text(size, tokens)}")

    yield line


def _parser() -> argparse.ArgumentParser:
    parser = HelpArguments(prog="caramba prepare", description="Turn text into tokens that data=tokens reads.")
    kinds: Any = parser.add_subparsers(dest="corpus", required=True, parser_class=HelpArguments, metavar="CORPUS")
    text = kinds.add_parser("text", help="local text or code, files or folders")
    text.add_argument("paths", nargs="+", metavar="PATH")
    text.add_argument("--suffix", default=".txt,.md,.py", help="of the files to take from folders (%(default)s)")
    text.add_argument("--separator", help="text between the documents of a file, such as '<|endoftext|>'")
    web = kinds.add_parser("fineweb", help="FineWeb or another hub data set, streamed")
    web.add_argument("--dataset", default=FINEWEB, help="hub repository (%(default)s)")
    web.add_argument("--config", default=FINEWEB_SAMPLE, help="its configuration, '' for none (%(default)s)")
    web.add_argument("--revision", help="branch, tag or commit; the commit is recorded and kept on resume")
    web.add_argument("--field", default="text", help="column of the text (%(default)s)")
    web.add_argument("--from", dest="files", nargs="+", metavar="PATH", help="local parquet or .jsonl instead")
    stdlib = kinds.add_parser("stdlib", help="the interpreter's own library source, as data=stdlib has it")
    sample = kinds.add_parser("sample", help="text that a model writes itself, from a start token")
    sample.add_argument("model", metavar="MODEL", help="run, export, Hugging Face folder or GGUF file")
    sample.add_argument("--tokens", type=_count, required=True, help="how many, such as 33M")
    sample.add_argument("--start", metavar="TOKEN", help="first token of every row, name or id (start or end mark)")
    sample.add_argument(
        "--temperature",
        nargs="+",
        type=_temperature,
        default=[0.7, 0.85, 1.0],
        metavar="T",
        help="equal shares of the tokens (0.7 0.85 1.0)",
    )
    sample.add_argument("--batch", type=_count, default=512, help="rows at once (%(default)s)")
    sample.add_argument("--length", type=_count, help="tokens of a row (1024, or the model's context)")
    sample.add_argument("--seed", type=_seed, default=1337, help="of the first row (%(default)s)")
    sample.add_argument("--which", default="student", choices=("teacher", "student"), help="of a run")
    sample.add_argument("--tokenizer", help="in place of the model's own")
    sample.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    sample.add_argument("--dtype", choices=("float32", "bf16", "fp16"), help="of the weights (as stored)")
    sample.add_argument("--shard-tokens", type=_count, default=SHARD_TOKENS, help="per shard (100M)")
    sample.add_argument("--output", required=True, help="token folder to make")
    sample.add_argument("--val-frac", type=_fraction, help="share of documents held out (0.05)")
    for kind in (text, web, stdlib):
        kind.add_argument("--output", required=True, help="token folder to make, or FILE.npy for one flat array")
        kind.add_argument("--train-bpe", type=_entries, metavar="N", help="train a BPE of N entries on the text")
        kind.add_argument("--val-frac", type=_fraction, help="share of documents held out (0.05; none for .npy)")
    for kind in (text, web):
        kind.add_argument("--tokens", type=_count, help="stop after this many, such as 100M")
        kind.add_argument("--tokenizer", default="byte", help="byte, FOLDER, tokenizer.json or .tiktoken (byte)")
        kind.add_argument("--shard-tokens", type=_count, default=SHARD_TOKENS, help="per shard (100M)")
    stdlib.add_argument("--tokenizer", choices=["byte", "bpe"], default="bpe")
    return parser


def _count(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.lower().replace("_", ""))
    value = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 500000, 100M or 1.5B")
    return value


def _entries(text: str) -> int:
    # Compared by length first: int() of a long text takes time that grows with its square.
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and 257 <= int(text) <= MAX_BPE_SIZE):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: a byte-level BPE has from 257 (256 bytes, end mark) to {MAX_BPE_SIZE:,} entries"
        )
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a seed, an integer from 0")
    return int(text)


_temperature = real(lambda value: 0 < value <= 10, "{text!r} is not a temperature above 0, at most 10")
_fraction = real(lambda value: 0 <= value < 1, "{text!r} is not a share from 0 to below 1")
