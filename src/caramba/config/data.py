"""Schema of the data that runs train on and benchmarks measure on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from caramba.config.base import Config, Later
from caramba.config.layer import Positive


class DataConfig(Config):
    """`stdlib` is the interpreter's own standard-library source; `tokens` reads .npy, .tokens or a token folder.

    `tokenizer` is `bpe` (trained on the corpus, `vocab_size` entries) or `byte`; for `tokens`, `vocab_size` and
    `tokenizer_hash` are what the file must have been made with, when they are set. `packing` is `concat` (windows of
    one long stream) or `best_fit` (windows of whole documents, which attention must keep apart).
    """

    type: Literal["stdlib", "tokens"] = "stdlib"
    name: str | None = None
    tokenizer: Literal["bpe", "byte"] = "bpe"
    vocab_size: Positive | None = None
    tokenizer_hash: str | None = None
    path: str | None = None
    val_path: str | None = None
    val_frac: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_bytes: Positive | None = None
    packing: Annotated[
        Literal["concat", "best_fit"], Later("attention that takes a document mask", "best_fit")
    ] = "concat"

    @model_validator(mode="after")
    def _rules(self) -> DataConfig:
        if (self.type == "tokens") != (self.path is not None):
            raise ValueError(
                "data.path is set exactly when data.type is tokens; write data=tokens data.path=FILE"
            )
        foreign = {"tokens": ("max_bytes",), "stdlib": ("val_path", "tokenizer_hash")}[self.type]
        for name in foreign:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning for data.type={self.type}; leave it out"
                )
        if self.type == "tokens" and self.tokenizer == "byte":
            raise ValueError(
                "tokenizer=byte has no meaning for data.type=tokens, whose tokens are made; leave it out"
            )
        if self.val_path is not None and self.val_frac != type(self).model_fields["val_frac"].default:
            raise ValueError(f"val_frac={self.val_frac} and val_path are both set; keep one")
        if self.type == "stdlib" and self.tokenizer == "bpe" and (self.vocab_size or 0) < 257:
            raise ValueError(
                f"a byte-level BPE needs vocab_size of at least 257 (256 bytes and the end mark), got {self.vocab_size}"
            )
        return self
