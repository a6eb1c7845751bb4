"""Bare token files, scanned once, and the tokens that a benchmark names by path."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caramba.data.folder import NpyWriter, Tokens, open_npy, open_token_folder, shard_name
from caramba.data.tokenizer import Tokenizer
from caramba.errors import DataError
from caramba.runs.files import check_folder, home, whole_file, write_json

Progress = Callable[[str], None]
_CHUNK_BYTES = 4 << 20
_LARGEST_ID = 2**32 - 1


@dataclass(frozen=True)
class TokenFile:
    """An open token file: `path` is what the user named, `tokens` the memory map, `max_id` its largest id."""

    path: Path
    tokens: np.memmap
    max_id: int
    sha256: str


def open_token_file(path: Path, *, progress: Progress | None = None) -> TokenFile:
    """Open a .npy or .tokens file; its ids are scanned once, and the scan is cached.

    Raises:
        DataError: the file is missing, of another format, damaged, or holds what is not a token id.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path.absolute()}: there is no such token file or folder; check data.path")
    if path.suffix not in (".npy", ".tokens"):
        raise DataError(
            f"{path}: cannot tell what tokens these are from {path.suffix or 'no suffix'!r};"
            " expected .npy, .tokens (integers in text) or a token folder with meta.json"
        )
    # `caramba prepare` records the sum of the array there.
    check_folder(path.with_suffix(".tokenizer"), DataError)
    key = _file_key(path)
    array_path = path
    if path.suffix == ".tokens":
        array_path = home() / "data" / f"tokens-{key}.npy"
        if not array_path.is_file():
            _text_to_npy(path, array_path, progress)
            if _file_key(path) != key:
                array_path.unlink(missing_ok=True)
                raise DataError(f"{path}: the file changed while it was read; run again when it is complete")
    tokens = open_npy(array_path)
    max_id, digest = _scan(path, array_path, tokens, key, progress)
    return TokenFile(path, tokens, max_id, digest)


def _file_key(path: Path) -> str:
    facts = path.stat()
    text = f"{path.absolute()}|{facts.st_size}|{facts.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scan(path: Path, array_path: Path, tokens: np.memmap, key: str, progress: Progress | None) -> tuple[int, str]:
    """Return the largest id and the SHA-256 of the ids, remembered until the file changes."""
    sidecar = home() / "data" / f"scan-{key}.json"
    if sidecar.is_file():
        known = json.loads(sidecar.read_text())
        return int(known["max_id"]), str(known["sha256"])
    if progress:
        progress(f"checking {tokens.size:,} tokens of {path}")
    low, high, digest = 0, 0, hashlib.sha256(tokens.dtype.str.encode())
    # Plain reads, not the map: pages of a map count as this process's memory until they are evicted.
    with open(array_path, "rb") as file:
        file.seek(int(tokens.offset))
        left = tokens.nbytes
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise DataError(f"{path}: the file ended {left} bytes early while it was read")
            digest.update(piece)
            ids = np.frombuffer(piece, dtype=tokens.dtype)
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
            left -= len(piece)
    if low < 0:
        raise DataError(f"{path}: smallest token id is {low}; token ids start at 0")
    write_json(sidecar, {"path": str(path), "tokens": tokens.size, "max_id": high, "sha256": digest.hexdigest()})
    return high, digest.hexdigest()


def _text_to_npy(path: Path, target: Path, progress: Progress | None) -> None:
    """Stream integers in text to a uint32 .npy; at most one chunk of text is in memory."""
    size = path.stat().st_size
    with (
        open(path, "rb") as text,
        whole_file(target) as temporary,
        NpyWriter(temporary, np.dtype(np.uint32)) as out,
    ):
        rest, place = b"", 0  # place: byte offset in the file of the start of `rest`
        while True:
            piece = text.read(_CHUNK_BYTES)
            block = rest + piece
            cut = _after_last_space(block) if piece else len(block)
            if cut == 0 and len(block) > 64:
                raise _bad_token(path, block, re.compile(rb"\S+"), out.count, place)
            out.append(_parse_ids(path, block[:cut], out.count, place))
            rest, place = block[cut:], place + cut
            if progress and size > _CHUNK_BYTES:
                progress(f"reading {path.name}: {place / 1e6:.0f} of {size / 1e6:.0f} MB")
            if not piece:
                break
        if out.count == 0:
            raise DataError(f"{path}: {size} bytes and 0 tokens; expected integers separated by white space")


def _after_last_space(block: bytes) -> int:
    return max(block.rfind(space) for space in (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")) + 1


def _parse_ids(path: Path, block: bytes, before: int, place: int) -> np.ndarray:
    """Parse a block that ends between tokens; `before` tokens and `place` bytes of the file precede it."""
    if block.translate(None, b"0123456789 \t\n\r\v\f"):
        raise _bad_token(path, block, re.compile(rb"\S*[^\d\s]\S*"), before, place)
    # Longer digits would saturate in the parser below and pass for another number.
    if re.search(rb"\d{19,}", block):
        raise _bad_token(path, block, re.compile(rb"\d{19,}"), before, place)
    if not block.strip():
        return np.empty(0, dtype=np.int64)
    ids = np.fromstring(block, dtype=np.int64, sep=" ")
    if int(ids.max()) > _LARGEST_ID:
        raise _bad_token(path, block, re.compile(rb"0*%d(?!\d)" % int(ids.max())), before, place)
    return ids


def _bad_token(path: Path, block: bytes, pattern: re.Pattern[bytes], before: int, place: int) -> DataError:
    found = pattern.search(block)
    start = found.start() if found else 0
    shown = (found.group() if found else block)[:40].decode(errors="replace")
    index = before + len(block[:start].split())
    return DataError(
        f"{path}: token {index} at byte {place + start} is {shown!r}; expected an integer from 0 to {_LARGEST_ID},"
        " white space between them"
    )


@dataclass(frozen=True)
class BenchmarkText:
    """Tokens to measure on, memory-mapped.

    Attributes:
        path: what was named.
        file: the first file that the tokens are read from, for messages.
        tokens: the val split of a token folder, its train split when there is no other, or a whole file.
        is_held_out: whether they are a val split.
        max_id: the largest id.
        tokenizer: None when a bare file does not say.
        token_bytes: UTF-8 bytes per token, int32 [V]; None when it is not known.
    """

    path: Path
    file: Path
    tokens: Tokens
    is_held_out: bool
    max_id: int
    tokenizer: Tokenizer | None
    token_bytes: np.ndarray | None

    def check(self, vocab_size: int, block_size: int, tokenizer: Tokenizer | None = None) -> None:
        """Check that a model of `vocab_size` reads these tokens and that they hold one window.

        Args:
            tokenizer: of the model's own data; another one of the same size would give the ids another meaning.

        Raises:
            DataError: another tokenizer, an id or a vocabulary above the model's, or fewer than block_size + 1 tokens.
        """
        ours = self.tokenizer
        if ours is not None and tokenizer is not None and ours.hash != tokenizer.hash:
            raise DataError(
                f"{self.path}: tokens were made with {ours.name} ({ours.hash[:8]}), the run's data with"
                f" {tokenizer.name} ({tokenizer.hash[:8]}); prepare them with the run's tokenizer"
                " (caramba prepare text PATH --tokenizer FOLDER)"
            )
        size = ours.vocab_size if ours is not None else self.max_id + 1
        if size > vocab_size:
            made_with = f"were made with {ours.name} of" if ours is not None else "reach id"
            raise DataError(
                f"{self.file}: tokens {made_with} {size if ours is not None else self.max_id}, the model has"
                f" vocab_size={vocab_size}; prepare them with the model's tokenizer"
            )
        if self.tokens.size < block_size + 1:
            raise DataError(
                f"{self.file}: {self.tokens.size} tokens, one window needs {block_size + 1} (block_size={block_size}"
                " and its last target); use a smaller block_size or more data"
            )


def open_benchmark_text(path: str | Path) -> BenchmarkText:
    """Open a token folder, .npy or .tokens file to measure on.

    Raises:
        DataError: the path is none of these, or does not hold what it should.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        opened = open_token_file(path)
        return BenchmarkText(path, path, opened.tokens, False, opened.max_id, None, None)
    folder = open_token_folder(path)
    split = "train" if folder.val is None else "val"
    return BenchmarkText(
        path=path,
        file=path / shard_name(split, 0),
        tokens=folder.train if folder.val is None else folder.val,
        is_held_out=folder.val is not None,
        max_id=int(folder.meta["splits"][split]["max_id"]),
        tokenizer=folder.tokenizer,
        token_bytes=folder.token_bytes,
    )
