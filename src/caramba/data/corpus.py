"""What `data=` names, opened: tokens to train on, held-out ones that share none, their tokenizer, the stdlib corpus."""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from caramba.config.benchmark import (
    ControlsBenchmarkConfig,
    LongContextBenchmarkConfig,
    MemoryGapBenchmarkConfig,
    PerplexityBenchmarkConfig,
)
from caramba.config.data import DataConfig
from caramba.config.manifest import GroupConfig, Manifest
from caramba.config.verify import CompareVerifyConfig, FidelityVerifyConfig
from caramba.console import logger
from caramba.data.folder import (
    TokenFolder,
    Tokens,
    open_token_folder,
    shard_name,
    split_at,
    write_token_folder,
)
from caramba.data.sources import open_source, source_identity
from caramba.data.token_file import TokenFile, open_benchmark_text, open_token_file
from caramba.data.tokenizer import ByteTokenizer, Tokenizer, first_texts, train_bpe
from caramba.data.tokenizer_files import load_tokenizer
from caramba.errors import DataError
from caramba.runs.files import home

Progress = Callable[[str], None]
_BUILD_VERSION = 2  # raise when the same inputs start to give other tokens


@dataclass(frozen=True)
class Corpus:
    """Tokens of one dataset, memory-mapped, and all that is known of how they were made.

    Attributes:
        train: ids to train on, 1-D, in the file's own integer type; a stream if several shards hold them.
        val: held-out ids; no position of the corpus is in both.
        tokenizer: None when the file does not say.
        vocab_size: V of the tokenizer; None when the file does not say.
        token_bytes: UTF-8 bytes per token, int32 [V]; None without a tokenizer or with one whose tokens have no byte
            count (meta.json has the reason), and then bits per byte is unknown.
        name: what reports print.
        fingerprint: SHA-256 over content and tokenizer; equal means the same data.
        content: the same without where the text came from, which is in the fingerprint of a token folder.
        folder: the folder of the token files.
        max_ids: the largest id in train and in val.
        paths: the files of train and val, for messages.
        packing: how windows are made of it, `concat` or `best_fit`.
        documents: first token of each document of train and of val, int64; None unless they are kept separate.
        source: the token folder that both splits are of; None where there is none.
    """

    train: Tokens
    val: Tokens
    tokenizer: Tokenizer | None
    vocab_size: int | None
    token_bytes: np.ndarray | None
    name: str
    fingerprint: str
    content: str
    folder: Path
    max_ids: tuple[int, int]
    paths: tuple[Path, Path]
    packing: str = "concat"
    documents: tuple[np.ndarray, np.ndarray] | None = None
    source: TokenFolder | None = None

    @cached_property
    def index(self) -> tuple[np.ndarray, np.ndarray] | None:
        """First token of each document of train and of val; None if the files do not record it.

        Raises:
            DataError: the document index of the token folder is damaged.
        """
        if self.documents is not None:
            return self.documents
        if self.source is None or not self.source.has_documents:
            return None
        return _documents(self.source, int(self.train.size))

    def check(self, vocab_size: int, block_size: int) -> None:
        """Check that a model of `vocab_size` can read the tokens and that each split holds a window.

        Raises:
            DataError: a token id or the tokenizer exceeds the model's vocabulary, or a split is shorter than
                block_size + 1 tokens.
        """
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            made_with = self.tokenizer.name if self.tokenizer else "a tokenizer"
            raise DataError(
                f"{self.folder}: tokens were made with {made_with} of {self.vocab_size} entries, the model has"
                f" vocab_size={vocab_size}; use the model's own tokenizer, or set"
                f" the model's vocab_size to {self.vocab_size}"
            )
        for split, largest, path in zip(("train", "val"), self.max_ids, self.paths, strict=True):
            if largest >= vocab_size:
                raise DataError(
                    f"{path}: largest {split} token id is {largest}, the model has vocab_size={vocab_size} (ids to"
                    f" {vocab_size - 1}); the tokens belong to another vocabulary: prepare them with the"
                    " model's tokenizer"
                )
        for split, tokens, path in zip(("train", "val"), (self.train, self.val), self.paths, strict=True):
            if tokens.size < block_size + 1:
                raise DataError(
                    f"{path}: the {split} split has {tokens.size} tokens, one window needs {block_size + 1}"
                    f" (block_size={block_size} and its last target); use a smaller block_size"
                    + (", a larger data.val_frac" if split == "val" else "")
                    + " or more data"
                )


def open_corpus(config: DataConfig, *, progress: Progress | None = None) -> Corpus:
    """Open the corpus that `config` describes, building its token folder the first time.

    Args:
        config: the `data` section of a manifest.
        progress: called with a line of text while a first opening reads, trains and encodes.

    Raises:
        DataError: a file is missing, damaged, of another tokenizer, or of the wrong type.
    """
    if config.type != "tokens":
        return _open_texts(config, progress)
    path = Path(config.path or "").expanduser()
    if path.is_dir():
        return _open_folder(config, path, progress)
    return _open_file(config, path, progress)


# --- texts that are encoded here: the standard library, or those of a plugin


def _open_texts(config: DataConfig, progress: Progress | None) -> Corpus:
    if config.tokenizer == "byte" and config.vocab_size not in (None, 257):
        raise DataError(
            f"data.vocab_size={config.vocab_size}: data.tokenizer=byte has 257 entries; leave vocab_size out"
        )
    folder = _texts_folder(config)
    if not folder.is_dir():
        (build_stdlib if config.source is None else build_source)(config, folder, progress)
    opened = open_token_folder(folder)
    name = "stdlib" if config.source is None else config.source.type
    return _from_folder(opened, config.name or name, None, config)


def is_built(config: DataConfig) -> bool:
    """Whether the tokens that `config` describes are files already, so that opening them encodes no text."""
    return config.type == "tokens" or _texts_folder(config).is_dir()


def _texts_folder(config: DataConfig) -> Path:
    if config.source is None:
        return home() / "data" / f"stdlib-{_texts_key(config, stdlib_identity())}"
    return home() / "data" / f"source-{_texts_key(config, source_identity(config.source))}"


def _texts_key(config: DataConfig, identity: dict[str, str]) -> str:
    """Hash everything that changes the content, so that an open folder never needs a look at the corpus."""
    facts: dict[str, Any] = {
        **identity,
        "build": _BUILD_VERSION,
        "tokenizer": config.tokenizer,
        "val_frac": config.val_frac,
        "max_bytes": config.max_bytes,
    }
    if config.tokenizer_path is not None:
        facts |= {"hash": load_tokenizer(config.tokenizer_path).hash, "tokenizers": version("tokenizers")}
    elif config.tokenizer == "bpe":
        facts |= {"vocab_size": config.vocab_size, "tokenizers": version("tokenizers")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def build_stdlib(config: DataConfig, folder: Path, progress: Progress | None = None) -> None:
    """Write the token folder of the standard library that `config` (type stdlib) describes."""
    say = progress or (lambda _: None)
    identity = stdlib_identity()
    say(f"reading the standard library under {identity['root']}")
    documents = collect_documents(stdlib_root(), config.val_frac, config.max_bytes)
    tokenizer = _make_tokenizer(config, lambda: documents.texts("train"), say)
    source = {
        "corpus": "stdlib",
        "python": identity["python"],
        "implementation": identity["implementation"],
        "split_rule": SPLIT_RULE,
        "val_frac": config.val_frac,
        "max_bytes": config.max_bytes,
        "not_utf8": list(documents.not_utf8),
        "duplicates": documents.duplicates,
        "files": {"train": list(documents.train), "val": list(documents.val)},
    }
    splits = {split: documents.texts(split) for split in ("train", "val")}
    write_token_folder(folder, splits, tokenizer, source, progress=progress)


def build_source(config: DataConfig, folder: Path, progress: Progress | None = None) -> None:
    """Write the token folder of the texts of a plugin that `config` (type source) names."""
    say = progress or (lambda _: None)
    assert config.source is not None
    say(f"reading {config.source.type}")
    texts = open_source(config.source)
    tokenizer = _make_tokenizer(config, lambda: texts("train"), say)
    splits = {split: texts(split) for split in ("train", "val")}
    source = {"corpus": "source", **source_identity(config.source)}
    write_token_folder(folder, splits, tokenizer, source, progress=progress)


def _make_tokenizer(config: DataConfig, texts: Callable[[], Iterator[str]], say: Progress) -> Tokenizer:
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer_path is not None:
        found = load_tokenizer(config.tokenizer_path)
        say(f"tokenizer of {config.tokenizer_path}: {found.vocab_size} entries")
        return found
    say(f"training a byte-level BPE of {config.vocab_size} entries")
    return train_bpe(first_texts(texts()), config.vocab_size or 0)


# --- tokens


def _open_folder(config: DataConfig, path: Path, progress: Progress | None) -> Corpus:
    opened = open_token_folder(path)
    _check_made_with(path, config, opened.tokenizer.vocab_size, opened.tokenizer.hash)
    val = _open_val(config, path / shard_name("train", 0), progress)
    return _from_folder(opened, config.name or path.name, val, config)


def _open_file(config: DataConfig, path: Path, progress: Progress | None) -> Corpus:
    opened = open_token_file(path, progress=progress)
    if config.tokenizer_hash is not None:
        raise DataError(
            f"{path}: data.tokenizer_hash is set, but a bare {path.suffix} file does not say what made it;"
            " use a token folder (with meta.json) or leave tokenizer_hash out"
        )
    held_out = _open_val(config, path, progress)
    if held_out is None:
        train, val = _hold_out(opened.tokens, config.val_frac, path)
        held_out = opened
    else:
        train, val = opened.tokens, held_out.tokens
    for file in (opened, held_out):
        if config.vocab_size is not None and file.max_id >= config.vocab_size:
            raise DataError(
                f"{file.path}: largest token id is {file.max_id}, data.vocab_size={config.vocab_size} allows ids to"
                f" {config.vocab_size - 1}; the tokens belong to another vocabulary"
            )
    facts = [opened.sha256, held_out.sha256, train.size, val.size, config.vocab_size]
    content = _sha256(facts)
    return Corpus(
        train=train,
        val=val,
        tokenizer=None,
        vocab_size=config.vocab_size,
        token_bytes=None,
        name=config.name or path.stem,
        fingerprint=content,
        content=content,
        folder=path.parent,
        max_ids=(opened.max_id, held_out.max_id),
        paths=(opened.path, held_out.path),
    )


def _open_val(config: DataConfig, train_path: Path, progress: Progress | None) -> TokenFile | None:
    if config.val_path is None:
        return None
    path = Path(config.val_path).expanduser()
    if path.exists() and train_path.exists() and path.samefile(train_path):
        raise DataError(
            f"data.val_path={path} is the file that is trained on; leave it out to hold out its last val_frac"
        )
    return open_token_file(path, progress=progress)


def _hold_out(tokens: Tokens, val_frac: float, path: Path) -> tuple[Tokens, Tokens]:
    count = max(1, round(tokens.size * val_frac))
    if count >= tokens.size:
        raise DataError(
            f"{path}: {tokens.size} tokens cannot be split with data.val_frac={val_frac};"
            " give data.val_path or more data"
        )
    return split_at(tokens, tokens.size - count)


def _check_made_with(path: Path, config: DataConfig, vocab_size: int, tokenizer_hash: str) -> None:
    if config.vocab_size is not None and config.vocab_size != vocab_size:
        raise DataError(
            f"{path}: made with a vocabulary of {vocab_size}, data.vocab_size={config.vocab_size};"
            " prepare the tokens with that tokenizer or leave vocab_size out"
        )
    if config.tokenizer_hash is not None and config.tokenizer_hash != tokenizer_hash:
        raise DataError(
            f"{path}: made with tokenizer {tokenizer_hash}, data.tokenizer_hash={config.tokenizer_hash};"
            " the same text has other ids under it: prepare the tokens again"
        )


def _from_folder(opened: TokenFolder, name: str, val: TokenFile | None, config: DataConfig) -> Corpus:
    splits = opened.meta["splits"]
    train, train_path = opened.train, opened.path / shard_name("train", 0)
    train_max = int(splits["train"]["max_id"])
    others: list[Any] = []  # what the corpus is made of besides the folder
    if val is not None:
        held_out, val_path, val_max = val.tokens, val.path, val.max_id
        others.append(val.sha256)
    elif opened.val is not None:
        held_out, val_path = opened.val, opened.path / shard_name("val", 0)
        val_max = int(splits["val"]["max_id"])
    else:
        train, held_out = _hold_out(opened.train, config.val_frac, train_path)
        val_path, val_max = train_path, train_max
        others.append(held_out.size)
    is_apart = config.keeps_documents_apart and val is None
    fingerprint, content = (_sha256([own, *others]) if others else own for own in (opened.fingerprint, opened.content))
    return Corpus(
        train=train,
        val=held_out,
        tokenizer=opened.tokenizer,
        vocab_size=opened.tokenizer.vocab_size,
        token_bytes=opened.token_bytes,
        name=name,
        fingerprint=fingerprint,
        content=content,
        folder=opened.path,
        max_ids=(train_max, val_max),
        paths=(train_path, val_path),
        packing=config.packing,
        documents=_documents(opened, int(train.size)) if is_apart else None,
        source=opened if val is None else None,
    )


def _sha256(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _documents(opened: TokenFolder, train_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the document indexes of both splits; the end of a train split may be what is held out."""
    starts = opened.documents("train")
    if opened.val is not None:
        return starts, opened.documents("val")
    place = int(np.searchsorted(starts, train_size))
    # The document that was cut continues at the start of the held-out tokens.
    return starts[:place], np.unique(np.append(0, starts[place:] - train_size))


LEAST_STDLIB_BYTES = 8_000_000  # of any Python's library

# Words, capitals, code, digits, white space and other scripts: two tokenizers that agree here have one vocabulary.
PROBE = "The quick brown Fox's 1234567 jumps;\n\n    def f(x):\n\treturn [x**2, 'naïve', \"東京\"]  # Привет!\n"


def open_text(manifest: Manifest, group: GroupConfig) -> Corpus:
    """Open the data of a group and check that its model, phases and benchmarks can read it.

    Raises:
        DataError: data that is missing or damaged, or does not fit them.
    """
    corpus = open_corpus(group.data, progress=logger.info)
    vocab_size = manifest.model.embedder.vocab_size
    corpus.check(vocab_size=vocab_size, block_size=_longest_block(group))
    for bench in group.benchmarks:
        if isinstance(bench.config, PerplexityBenchmarkConfig) and bench.config.dataset:
            _check_dataset(bench.id, bench.config, group.data, corpus, vocab_size)
    return corpus


def check_text(manifest: Manifest) -> None:
    """Check the data of every selected group, as `open_text` does, before anything is written or torch is loaded.

    The standard library is not tokenised for this, which takes longer than all else, unless it may be too short.

    Raises:
        DataError: data that is missing or damaged, or does not fit the model, a phase or a benchmark.
    """
    for group in manifest.groups_to_run():
        if reads_text(manifest, group) and (is_built(group.data) or _may_be_short(group)):
            open_text(manifest, group)


def reads_text(manifest: Manifest, group: GroupConfig) -> bool:
    """Whether a group opens its data: without runs, benchmarks and a teacher its model is only loaded."""
    return bool(group.runs or group.benchmarks) or manifest.model.teacher is not None


def _may_be_short(group: GroupConfig) -> bool:
    """Whether the standard library, at a generous 16 bytes a token, may hold less than a window of held-out text."""
    n_bytes = min(group.data.max_bytes or LEAST_STDLIB_BYTES, LEAST_STDLIB_BYTES)
    has_own_text = any(
        isinstance(bench.config, PerplexityBenchmarkConfig) and bench.config.dataset for bench in group.benchmarks
    )
    return has_own_text or n_bytes * group.data.val_frac < 16 * (_longest_block(group) + 1)


def _longest_block(group: GroupConfig) -> int:
    """Return the longest window, in tokens, that a phase, check or benchmark reads of the group's data."""
    blocks = [run.train.block_size for run in group.runs if run.train]
    blocks += [
        check.block_size
        for run in group.runs
        for check in run.verify
        if isinstance(check, CompareVerifyConfig | FidelityVerifyConfig)
    ]
    blocks += [
        bench.config.block_size
        for bench in group.benchmarks
        if (isinstance(bench.config, PerplexityBenchmarkConfig) and not bench.config.dataset)
        or isinstance(bench.config, ControlsBenchmarkConfig | MemoryGapBenchmarkConfig)
    ]
    blocks += [
        max(bench.config.lengths) for bench in group.benchmarks if isinstance(bench.config, LongContextBenchmarkConfig)
    ]
    return max(blocks, default=1)


def _check_dataset(
    name: str, config: PerplexityBenchmarkConfig, data: DataConfig, corpus: Corpus, vocab_size: int
) -> None:
    """Refuse a benchmark's own data before anything is trained, not after."""
    assert config.dataset is not None
    try:
        text = open_benchmark_text(config.dataset)
        text.check(vocab_size, config.block_size, corpus.tokenizer)
    except DataError as error:
        raise DataError(f"benchmark {name!r}: dataset={config.dataset}: {error}") from None
    trained_on = None if data.path is None else Path(data.path).expanduser()
    if not text.is_held_out and trained_on is not None and text.path.samefile(trained_on):
        raise DataError(
            f"benchmark {name!r}: dataset={config.dataset} is what the run trains on, and it has no validation split; "
            "leave dataset out to measure on the data that is held out of it"
        )


def check_tokenizer(corpus: Corpus, folder: Path, where: str) -> None:
    """Refuse tokens of another tokenizer than a Hugging Face folder brings: its ids would have other meanings.

    Files of one tokenizer may be written differently, so what counts is that both give the same ids. Data or a folder
    that does not say which tokenizer it has passes.

    Raises:
        DataError: the two give a text different ids.
    """
    ours = corpus.tokenizer
    if ours is None or not (folder / "tokenizer.json").is_file():
        return
    theirs = load_tokenizer(folder)
    if theirs.hash == ours.hash or theirs.encode(PROBE) == ours.encode(PROBE):
        return
    raise DataError(
        f"{where}: {folder} has a tokenizer of {theirs.vocab_size} entries, and the tokens of {corpus.folder} were "
        f"made with another one, {ours.name} of {ours.vocab_size}: the same ids mean other text; prepare the data "
        f"with the model's (caramba prepare text PATH --tokenizer {folder} --output DIR; data=tokens data.path=DIR)"
    )


SPLIT_RULE = (
    "val if the first 7 bytes of sha256('split:' + relative path), as a fraction of 2**56, are below val_frac;"
    " documents in order of sha256('order:' + relative path)"
)
_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus, split; texts are read when asked for, so the corpus is never whole in memory."""

    root: Path
    train: tuple[str, ...]
    val: tuple[str, ...]
    not_utf8: tuple[str, ...]
    duplicates: int

    def texts(self, split: str) -> Iterator[str]:
        """Yield the text of each file of `train` or `val`, in the corpus order."""
        for name in self.train if split == "train" else self.val:
            # Not read_text: it would turn \r\n into \n and the byte counts would no longer be the files'.
            yield (self.root / name).read_bytes().decode("utf-8")


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_identity() -> dict[str, str]:
    """Return what identifies the corpus without reading it: the interpreter, its version and its path."""
    return {
        "implementation": platform.python_implementation(),
        "python": platform.python_version(),
        "root": str(stdlib_root()),
    }


def collect_documents(root: Path, val_frac: float, max_bytes: int | None = None) -> CorpusFiles:
    """List the distinct UTF-8 .py files under `root` in a fixed shuffled order and split them by file.

    Order and split depend only on relative paths. A file that would cross `max_bytes` is left out. When chance
    leaves a split empty, the file nearest to it is moved there.

    Raises:
        DataError: fewer than two usable files.
    """
    kept: list[str] = []
    not_utf8: list[str] = []
    seen: set[bytes] = set()
    total = duplicates = 0
    for name in sorted(_python_files(root), key=lambda name: hashlib.sha256(f"order:{name}".encode()).digest()):
        size = (root / name).stat().st_size
        if size == 0 or (max_bytes is not None and total + size > max_bytes):
            continue
        content = (root / name).read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            duplicates += 1
            continue
        try:
            content.decode()
        except UnicodeDecodeError:
            not_utf8.append(name)
        else:
            seen.add(digest)
            kept.append(name)
            total += size
    if len(kept) < 2:
        limit = "" if max_bytes is None else f" within data.max_bytes={max_bytes}"
        raise DataError(
            f"{root}: {len(kept)} usable .py files{limit}, expected at least 2 (one to train, one held out);"
            + (" raise data.max_bytes" if limit else " use data=tokens data.path=FILE")
        )
    held_out = {name for name in kept if _place(name) < val_frac}
    by_place = sorted(kept, key=_place)
    if not held_out:
        held_out = {by_place[0]}
    elif len(held_out) == len(kept):
        held_out.remove(by_place[-1])
    train = tuple(name for name in kept if name not in held_out)
    return CorpusFiles(root, train, tuple(n for n in kept if n in held_out), tuple(not_utf8), duplicates)


def _python_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                yield path.relative_to(root).as_posix()


def _place(name: str) -> float:
    """A file's place in [0, 1), independent of its place in the order."""
    return int.from_bytes(hashlib.sha256(f"split:{name}".encode()).digest()[:7], "big") / 2**56
