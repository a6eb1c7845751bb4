"""Text and recall samples of the proxy study: source code found on the machine, split by file, and key-value needles.

The text is what the machine's Python installation and C libraries carry (Python, C, C++, CUDA and their notes), each
distinct file once. Students are calibrated and distilled on files that their teacher was not trained on, as with a
model from a hub, whose training text nobody has at hand; a teacher is surer of text it has seen several times.
Recall samples are made from token ids: a window of real text in which `key = value` needles stand at even depths, and
whose end asks for every key again in random order. Keys and values are random pairs of ids, so nothing but attention
to the needle can answer.
"""

from __future__ import annotations

import hashlib
import site
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from caramba.data.library import train_bpe

CODE = (
    ".py",
    ".pyi",
    ".pyx",
    ".pxd",
    ".h",
    ".hpp",
    ".hh",
    ".hxx",
    ".cuh",
    ".inl",
    ".c",
    ".cc",
    ".cpp",
    ".cxx",
    ".cu",
)
SUFFIXES = (*CODE, ".rst", ".md")
SYSTEM = ("/usr/include", "/usr/local/cuda/targets", "/usr/src", "/opt")
FRESH_SHARE, FRESH_TOKENS = 0.35, 76_000_000  # the least of both
SHORTEST, LONGEST = 200, 400_000
NEEDLES, NEEDLE_WIDTH = 8, 6


@dataclass(frozen=True)
class ProxyCorpus:
    """Token ids of the three splits on the device: the teacher's, the students' (`fresh`) and the held-out one."""

    train: Tensor
    fresh: Tensor
    val: Tensor
    val_bytes: int
    n_files: int
    vocab_size: int
    newline: int
    equals: int

    @property
    def bits_per_nat_token(self) -> float:
        """Factor from nats per token to bits per byte on the validation split."""
        return self.val.numel() / self.val_bytes / float(np.log(2.0))


def read_texts(folders: list[Path], most_bytes: int) -> list[str]:
    """Return each distinct text once, in an order that depends on contents alone."""
    found: dict[bytes, str] = {}
    total = 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file() or total >= most_bytes:
                continue
            content = path.read_bytes()
            if not SHORTEST < len(content) < LONGEST:
                continue
            digest = hashlib.sha256(content).digest()
            if digest in found:
                continue
            try:
                found[digest] = content.decode("utf-8")
            except UnicodeDecodeError:  # not a text of this study
                continue
            total += len(content)
    return [found[digest] for digest in sorted(found)]


def build(vocab_size: int, most_bytes: int, val_share: float, device: torch.device) -> ProxyCorpus:
    """Read the machine's source, train a BPE tokenizer on the training files, encode both splits."""
    began = time.perf_counter()
    paths = sysconfig.get_paths()
    places = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    sites = sorted(Path(place) for place in places if Path(place).is_dir())
    folders = [Path(paths["stdlib"]), *sites, *(Path(place) for place in SYSTEM if Path(place).is_dir())]
    texts = read_texts(folders, most_bytes)
    n_val = max(int(len(texts) * val_share), 8)
    val, train = texts[:n_val], texts[n_val:]
    tokenizer = train_bpe(train[:: max(len(train) // 4000, 1)], vocab_size)
    backend = Tokenizer.from_str(tokenizer.definition)  # its batches use every core

    def encode(documents: list[str]) -> Tensor:
        ids: list[np.ndarray] = []
        for start in range(0, len(documents), 1000):
            encoded = backend.encode_batch_fast(documents[start : start + 1000], add_special_tokens=False)
            ids += [np.array([*document.ids, tokenizer.eos_id], dtype=np.int32) for document in encoded]
        return torch.from_numpy(np.concatenate(ids)).to(device)

    newline, equals = (tokenizer.encode(text)[0] for text in ("\n", " ="))
    encoded = encode(train)
    ends = (encoded == tokenizer.eos_id).nonzero()
    n_fresh = min(int(encoded.numel() * FRESH_SHARE), FRESH_TOKENS)
    cut = int(ends[int(torch.searchsorted(ends.flatten(), n_fresh))]) + 1  # whole files
    made = ProxyCorpus(
        encoded[cut:],
        encoded[:cut].clone(),
        encode(val),
        sum(len(text.encode()) for text in val),
        len(texts),
        tokenizer.vocab_size,
        newline,
        equals,
    )
    print(
        f"corpus: {len(texts)} files, {made.train.numel() / 1e6:.1f}M training tokens, "
        f"{made.fresh.numel() / 1e6:.1f}M for students and {made.val.numel() / 1e6:.2f}M for validation, "
        f"{made.val_bytes / made.val.numel():.2f} bytes a token, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return made


def windows(tokens: Tensor, batch_size: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """Return random windows [B, n_tokens] int64."""
    starts = torch.randint(
        0, tokens.numel() - n_tokens, (batch_size, 1), generator=generator, device=tokens.device
    )
    return tokens[starts + torch.arange(n_tokens, device=tokens.device)].long()


def plant_needles(
    rows: Tensor, corpus: ProxyCorpus, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn windows of text [B, T] into recall samples.

    Returns:
        The samples [B, T]; the place of each answer's first id in them [B, NEEDLES]; and its needle's place as a
        share of the part before the questions, 0 (start) to 1 [B, NEEDLES].
    """
    batch, width = rows.shape
    device = rows.device
    tail = NEEDLES * NEEDLE_WIDTH
    slot = (width - tail) // NEEDLES
    low, high = 256, min(corpus.vocab_size, 4096)
    pairs = torch.randint(low, high, (batch, NEEDLES, 4), generator=generator, device=device)
    needles = torch.empty(batch, NEEDLES, NEEDLE_WIDTH, dtype=rows.dtype, device=device)
    needles[..., 0] = corpus.newline
    needles[..., 1:3] = pairs[..., :2]
    needles[..., 3] = corpus.equals
    needles[..., 4:6] = pairs[..., 2:]
    shift = torch.randint(0, slot - NEEDLE_WIDTH, (batch, NEEDLES), generator=generator, device=device)
    places = torch.arange(NEEDLES, device=device) * slot + shift
    out = rows.clone()
    at = places[..., None] + torch.arange(NEEDLE_WIDTH, device=device)
    out.scatter_(1, at.flatten(1), needles.flatten(1))
    order = torch.rand(batch, NEEDLES, generator=generator, device=device).argsort(dim=1)
    out[:, width - tail :] = needles.gather(1, order[..., None].expand_as(needles)).flatten(1)
    answers = width - tail + torch.arange(NEEDLES, device=device) * NEEDLE_WIDTH + 4
    return out, answers.expand(batch, -1), places.gather(1, order).float() / (slot * NEEDLES)


def training_batch(
    corpus: ProxyCorpus,
    tokens: Tensor,
    batch_size: int,
    n_tokens: int,
    recall_share: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return (x, y), each [B, n_tokens]: text of a split, with a share of recall samples."""
    rows = windows(tokens, batch_size, n_tokens + 1, generator)
    n_recall = round(batch_size * recall_share)
    if n_recall:
        rows[:n_recall] = plant_needles(rows[:n_recall], corpus, generator)[0]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
