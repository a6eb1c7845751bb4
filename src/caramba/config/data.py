"""Schema of the data that runs train on and benchmarks measure on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from caramba.config.base import Config, PathText
from caramba.config.extension import DataSource
from caramba.config.layer_base import Positive


class DataConfig(Config):
    """`stdlib` is the interpreter's own standard-library source; `tokens` reads .npy, .tokens or a token folder.

    `tokenizer` is `bpe` (trained on the corpus, `vocab_size` entries), `byte`, or `model`: that of the model's or its
    teacher's Hugging Face folder, `tokenizer_path`, which a launch fills in; `auto` is `model` where there is such a
    folder and `bpe` elsewhere. For `tokens`, `vocab_size` and `tokenizer_hash` are what the file must have been made
    with, when they are set. `packing` is `concat` (windows of
    one long stream) or `best_fit` (windows of whole documents, kept separate); `document_mask` keeps the documents of
    concatenated windows separate as well. Separate means: no attention across them, positions from 0 in each, and no
    first token predicted from the document before.
    """

    type: Literal["stdlib", "tokens", "source"] = Field(
        default="stdlib",
        description="stdlib: the source of Python's standard library; tokens: prepared tokens from path; source: texts "
        "of a plugin",
    )
    source: DataSource | None = Field(
        default=None, description="texts of a plugin for type=source, {type: NAME}; unset: none"
    )
    name: str | None = Field(default=None, description="name in reports; unset: by type and path")
    tokenizer: Literal["bpe", "byte", "model", "auto"] = Field(
        default="bpe",
        description="bpe (trained on the corpus), byte, model (the folder of the model), or auto",
    )
    tokenizer_path: PathText | None = Field(
        default=None, description="folder of tokenizer=model, which a launch fills in"
    )
    vocab_size: Positive | None = Field(
        default=None,
        description="entries of the vocabulary, at least 257 for bpe; of tokens: what they must have been made with",
    )
    tokenizer_hash: str | None = Field(
        default=None,
        description="hash of the tokenizer that the tokens must have been made with; unset: not checked",
    )
    path: PathText | None = Field(default=None, description="token folder, .npy or .tokens file of type=tokens")
    val_path: PathText | None = Field(default=None, description="held-out tokens; unset: the end of the data")
    val_frac: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05, description="share of the data that is held out for validation"
    )
    max_bytes: Positive | None = Field(default=None, description="most bytes of type=stdlib to read; unset: all")
    packing: Literal["concat", "best_fit"] = Field(
        default="concat",
        description="concat: windows of one long stream; best_fit: windows of whole documents",
    )
    document_mask: bool | None = Field(
        default=None,
        description="whether attention stops at document borders; unset: only with packing=best_fit",
    )

    @model_validator(mode="after")
    def _rules(self) -> DataConfig:
        if (self.type == "tokens") != (self.path is not None):
            raise ValueError("data.path is set exactly when data.type is tokens; write data=tokens data.path=FILE")
        if (self.type == "source") != (self.source is not None):
            raise ValueError(
                "data.source is set exactly when data.type is source; write data.type=source 'data.source={type: NAME}'"
            )
        foreign = {
            "tokens": ("max_bytes",),
            "stdlib": ("val_path", "tokenizer_hash"),
            "source": ("val_path", "tokenizer_hash", "max_bytes"),
        }[self.type]
        for name in foreign:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} has no meaning for data.type={self.type}; leave it out")
        if self.type == "tokens" and self.tokenizer != "bpe":
            raise ValueError(
                f"tokenizer={self.tokenizer} has no meaning for data.type=tokens, whose tokens are made; leave it out"
            )
        if self.tokenizer != "model" and self.tokenizer_path is not None:
            raise ValueError(
                f"tokenizer_path={self.tokenizer_path} is that of tokenizer=model, not of {self.tokenizer}; leave it "
                "out: it follows from model.path, model.checkpoint or model.teacher.checkpoint"
            )
        if self.val_path is not None and self.val_frac != type(self).model_fields["val_frac"].default:
            raise ValueError(f"val_frac={self.val_frac} and val_path are both set; keep one")
        if self.type != "tokens" and self.tokenizer in ("bpe", "auto") and (self.vocab_size or 0) < 257:
            raise ValueError(
                f"a byte-level BPE needs vocab_size of at least 257 (256 bytes and the end mark), got {self.vocab_size}"
            )
        self._check_documents()
        return self

    def _check_documents(self) -> None:
        if self.packing == "best_fit" and self.document_mask is False:
            raise ValueError("packing=best_fit always separates documents, got document_mask=False; leave it out")
        if not self.keeps_documents_apart:
            return
        asked = "packing=best_fit" if self.packing == "best_fit" else "document_mask=True"
        for name, path in (("path", self.path), ("val_path", self.val_path)):
            if path is not None and path.endswith((".npy", ".tokens")):
                raise ValueError(
                    f"{asked} needs the places where documents begin, and {name}={path} is a flat file that does not "
                    "hold them; give a token folder (caramba prepare text PATH --output FOLDER), or use "
                    "packing=concat without document_mask"
                )

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention, positions and targets stop at the end of a document."""
        return self.packing == "best_fit" or bool(self.document_mask)
