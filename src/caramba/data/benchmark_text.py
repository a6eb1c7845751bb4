"""Tokens that a benchmark names by path: the part of them that is held out, checked against the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caramba.data.folder import open_token_folder, shard_name
from caramba.data.stream import Tokens
from caramba.data.token_file import open_token_file
from caramba.data.tokenizer import Tokenizer
from caramba.errors import DataError


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
