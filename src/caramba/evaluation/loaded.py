"""`caramba.load`: a trained model with its tokenizer, ready to generate and to be measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch

from caramba.data import TokenDataset, Tokenizer, open_windows
from caramba.errors import ConfigError, quote
from caramba.evaluation.harness import run_harness, task_manager
from caramba.evaluation.local_tasks import open_tasks, score_task
from caramba.evaluation.perplexity import count_predicted_bytes, summarise
from caramba.infer.arguments import DTYPES, end_marks
from caramba.infer.eval_text import EvalText, corpus_of, held_out_of
from caramba.infer.generator import Generated, Generator
from caramba.infer.model_bundle import ModelBundle, Role, load_model, need_tokenizer
from caramba.infer.nll import windowed_nll
from caramba.model import Model
from caramba.runtime import choose_device

LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with its tokenizer.

    `model` is a torch module: tokens [B, T] int64 to logits [B, T, V]. `opened` has its origin.
    """

    opened: ModelBundle

    @property
    def model(self) -> Model:
        return self.opened.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: neither the run's data nor the folder names one.
        """
        return need_tokenizer(self.opened, "load")

    @property
    def context(self) -> int:
        """Longest sequence that the model is known for, in tokens."""
        return self.opened.max_positions

    @property
    def device(self) -> torch.device:
        return self.model.embedder.token.weight.device

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """Return the text that follows a prompt, or a list for a list of prompts.

        Options are the keys of `caramba.infer.GenerateConfig`, such as `max_new_tokens=64, temperature=0.8, seed=1`.

        Raises:
            ConfigError: an unknown option, a value out of range, or a prompt that does not fit.
        """
        rows = self.generate_rows([prompts] if isinstance(prompts, str) else prompts, **options)
        texts = [row.text or "" for row in rows]
        return texts[0] if isinstance(prompts, str) else texts

    def generate_rows(self, prompts: Sequence[str], **options: Any) -> list[Generated]:
        """As `generate`, with the tokens, log probabilities, seed and ending of each text."""
        return self._generator(**options).generate(prompts)

    def evaluate(
        self,
        text: str | os.PathLike[str] | None = None,
        *,
        tasks: Sequence[str] = (),
        data: str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        windows: int = 64,
        batch_size: int = 8,
        limit: int | None = None,
        num_fewshot: int | None = None,
    ) -> dict[str, float]:
        """Return the loss on held-out text, or the scores of tasks.

        The loss is measured on `windows` disjoint windows of `block_size` tokens, spread over the text: `nll` in nats a
        token, `perplexity`, `bits_per_byte` where the tokenizer is known, and `unique_tokens`. Scores are named
        `TASK.METRIC`.

        Args:
            text: a UTF-8 file, a token folder or a token file; by default the held-out split of the run's data.
            tasks: tasks of lm-evaluation-harness, or of the local folder `data`.
            limit: items of each task.
            num_fewshot: examples in front of each item; for lm-evaluation-harness.

        Raises:
            ConfigError: an unknown task, or no text to measure on.
            DataError: the text does not fit the model, or has no window.
        """
        if isinstance(tasks, str):
            raise ConfigError(f"evaluate: tasks is a list of names; got {quote(tasks)}")
        if tasks and text is not None:
            raise ConfigError("evaluate: got text and tasks; call once for each")
        if not tasks and (data is not None or num_fewshot is not None or limit is not None):
            raise ConfigError("evaluate: data, limit and num_fewshot are for tasks, and none are named")
        if not tasks:
            return self._evaluate_text(text, block_size, windows, batch_size)
        longest = block_size or self.context
        if data is None:
            manager = task_manager(list(tasks), None, where="evaluate", option="include_path")
            found = run_harness(
                self.model,
                self.tokenizer,
                tasks,
                manager,
                max_length=longest,
                batch_size=batch_size,
                limit=limit,
                num_fewshot=num_fewshot,
            )
            return {
                f"{task}.{key.removesuffix(',none')}": float(value)
                for task, scores in found["results"].items()
                for key, value in scores.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
        if num_fewshot is not None:
            raise ConfigError("evaluate: num_fewshot is for lm-evaluation-harness; remove it, or data")
        opened = open_tasks(Path(data), list(tasks), limit=limit, where="evaluate")
        scored = [
            score_task(task, self.model, self.tokenizer, max_length=longest, batch_size=batch_size, limit=limit)
            for task in opened
        ]
        return {f"{one.task}.{key}": value for one in scored for key, (value, _) in one.scores.items()}

    def _generator(self, **options: Any) -> Generator:
        limit = options.get("max_seq_len") or self.context
        values: dict[str, Any] = {
            "eos_token_id": end_marks(self.opened, self.tokenizer),
            "max_seq_len": limit,
        }
        if "max_new_tokens" not in options:
            values["max_new_tokens"] = max(1, min(128, limit // 2))
        if self.opened.manifest is not None:
            values["seed"] = self.opened.manifest.seed
        if options.get("cache_kind") == "auto" and options.get("cache_quality_text") is None:
            values["held_out"] = held_out_of(self.opened)
        return Generator(self.model, self.tokenizer, **(values | options))

    def _evaluate_text(
        self, text: str | os.PathLike[str] | None, block_size: int | None, windows: int, batch_size: int
    ) -> dict[str, float]:
        length = min(block_size or self.context, LONGEST_WINDOW)
        known = self.opened.tokenizer
        if text is None:
            corpus = corpus_of(self.opened, "text")
            if isinstance(corpus, str):
                raise ConfigError(f"evaluate: {corpus}")
            dataset, token_bytes = open_windows(corpus, "val", length), corpus.token_bytes
        else:
            entries = self.model.spec.embedder.vocab_size
            held = EvalText.of_file(os.fspath(text), known, entries, key="evaluate: text")
            assert held.tokens is not None
            dataset = TokenDataset(np.asarray(held.tokens), length)
            token_bytes = None if known is None else known.token_bytes
        measured = windowed_nll(self.model, dataset, windows=windows, batch_size=batch_size, device=self.device)
        text_bytes = count_predicted_bytes(dataset, windows, token_bytes)
        return {key: value for key, (value, _, _) in summarise(measured, text_bytes).items()}

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        tokenizer = self.opened.tokenizer.name if self.opened.tokenizer is not None else "no tokenizer"
        return f"LoadedModel({self.opened.path}, {count:,} parameters, {tokenizer}, {self.device})"


def load(
    source: str | os.PathLike[str],
    *,
    which: Role = "student",
    device: str = "auto",
    dtype: Literal["float32", "bf16", "fp16"] | None = None,
    tokenizer: str | None = None,
) -> LoadedModel:
    """Load a trained model with its tokenizer.

    Args:
        source: a run, `latest`, a weights file, an export, or a Hugging Face folder.
        which: model of the run.
        device: auto, cpu, cuda or mps.
        dtype: precision of the weights; by default the stored one.
        tokenizer: `byte`, a folder or a file, in place of the stored one.

    Raises:
        ConfigError: no such run, or an unknown device or dtype.
        CheckpointError: nothing there holds weights of that role.
    """
    for name, value, known in (
        ("which", which, ("teacher", "student")),
        ("device", device, ("auto", "cpu", "cuda", "mps")),
        ("dtype", dtype, (None, *DTYPES)),
    ):
        if value not in known:
            raise ConfigError(
                f"load: {name}={quote(value)}; expected one of {', '.join(str(item) for item in known if item)}"
            )
    opened = load_model(os.fspath(source), role=which, device=choose_device(device), tokenizer=tokenizer)
    if dtype is not None:
        opened.model.to(DTYPES[dtype])
    return LoadedModel(opened)
