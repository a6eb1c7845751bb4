"""What a phase of training minimises: the base, and objectives on the next-token distribution."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.extension import user_traceback
from caramba.data import IGNORED, documents_of, samples_of
from caramba.distill.lora import Lora
from caramba.distill.teacher_cache import TeacherCache
from caramba.distill.teacher_rows import TAIL_SAMPLES, StoredRows, n_entries, sparse_rows
from caramba.distill.vocabulary import LiveTeacher, RowsOf, VocabularyLosses, cross_entropy, vocabulary_losses
from caramba.errors import CarambaError, ConfigError, ExtensionFailedError
from caramba.lower.join_repeats import join_repeats
from caramba.model import Model
from caramba.model.topology import Granularity, ResidualTopology, checkpoint_topology, compilable_regions
from caramba.ops.backend import upcast
from caramba.ops.linear_cross_entropy import linear_cross_entropy


class ResidualDistance:
    """mean over residual blocks and tokens of |h_s - h_t|^2 / |h_t|^2, h being the stream after the block.

    Run forwards inside `watch()`; `value()` then compares them. Each token is normalised by its own norm, so that the
    few tokens of very large norm do not dominate.

    Raises:
        ConfigError: the models have another number of residual blocks.
    """

    def __init__(self, student: Model, teacher: Model) -> None:
        self.blocks = tuple(
            [block for block in model.modules() if isinstance(block, ResidualTopology)] for model in (student, teacher)
        )
        ours, theirs = (len(blocks) for blocks in self.blocks)
        if ours != theirs or not ours:
            raise ConfigError(
                f"hidden_weight: the student has {ours} residual blocks, the teacher {theirs}; both need the same "
                "number, at least one; remove hidden_weight"
            )
        self._streams: tuple[list[Tensor], list[Tensor]] = ([], [])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what the blocks give in the forwards that follow."""
        self._streams = ([], [])
        handles = [
            block.register_forward_hook(partial(_keep, stream))
            for blocks, stream in zip(self.blocks, self._streams, strict=True)
            for block in blocks
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def value(self, counted: Tensor | None = None) -> Tensor:
        """Return the distance, over the tokens `counted` bool [B, T] or all."""
        ours, theirs = self._streams
        self._streams = ([], [])
        distances = [_distance(mine, want, counted) for mine, want in zip(ours, theirs, strict=True)]
        return torch.stack(distances).mean()


def _distance(ours: Tensor, theirs: Tensor, counted: Tensor | None) -> Tensor:
    size = upcast(theirs).square().sum(-1)
    # A token of padding may be all zeros in both.
    each = (upcast(ours) - upcast(theirs)).square().sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    if counted is None:
        return each.mean()
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp_min(1)


def _keep(stream: list[Tensor], _block: nn.Module, _inputs: Any, output: Tensor) -> None:
    stream.append(output)


Batch = tuple[Tensor, ...]
"""x and y [B, T] int64, with IGNORED in y at masked tokens; then document ids [B, T] if documents are masked, and
sample indices [B] if a phase caches the teacher's outputs."""
Backward = Callable[[Tensor], None]


class Objective(ABC):
    """One step of training: call `backward` on one or more scalar losses, return detached scalars with a `loss`."""

    model: Model
    teacher: Model | None = None
    is_sharded = False
    """Whether weight sharding hooks the nodes of the model's blocks."""

    @abstractmethod
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters of `model` that this objective trains."""

    @abstractmethod
    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Run forward and backward on x, y [B, T] int64."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Return the same scalars as `step` without gradients."""

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return sets of parameters; each set's gradients are clipped by the norm of that set."""
        return [[parameter for _, parameter in self.trainable()]]

    def join_gradients(self) -> None:  # noqa: B027 - most objectives have all gradients of a weight in one place
        """Sum gradients of one weight over ranks, before clipping. Called once a step on every rank."""

    def replicated_params(self) -> list[Tensor]:
        """Return local parameters that another rank also has and counts in norms."""
        return []

    def schedule_span(self, step: int, steps: int) -> tuple[int, int]:
        """Return (step, steps) of the learning-rate schedule at optimiser step `step` of `steps`."""
        return step, steps

    def at(self, step: int, steps: int) -> None:  # noqa: B027 - most losses are the same at every step
        """Announce optimiser step `step` of `steps`, before its first batch."""

    def advance(self, losses: Mapping[str, Tensor]) -> None:  # noqa: B027 - most objectives keep no count
        """Count one optimiser step that ended with the scalars `losses`."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train before the phase's last step."""
        return False

    def compilable(self) -> list[nn.Module]:
        """Return the modules whose forward torch.compile may replace while this objective trains.

        The model may run otherwise from then on, with the same numbers, until `checkpoint("none")`.
        """
        return []

    def checkpoint(self, mode: str, granularity: Granularity = "block") -> None:
        """Trade memory for work from now on; `none` ends it. See `caramba.model.topology.checkpoint_topology`.

        Without effect where `holds_one_block`.
        """
        if not self.holds_one_block:
            checkpoint_topology(self.model.topology, mode, granularity)

    @property
    def holds_one_block(self) -> bool:
        """Whether a step never holds the graph of more than one block, so that there is nothing to checkpoint."""
        return False

    def finish(self) -> None:  # noqa: B027 - most objectives have nothing to do
        """Leave in `model` the plain weights that are saved. Called once, after the last step."""


class LanguageModelObjective(Objective):
    """Next-token cross-entropy of one model; trains all of its weights, or the low-rank updates of `lora`.

    `dense` makes the logits of a whole batch at once, in place of `chunk` tokens at a time.
    """

    def __init__(self, model: Model, *, chunk: int = 1024, lora: Lora | None = None, dense: bool = False) -> None:
        self.model, self.chunk, self.lora, self.dense = model, chunk, lora, dense

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters()) if self.lora is None else self.lora.parameters()

    def compilable(self) -> list[nn.Module]:
        self._join()
        return compilable_regions(self.model.topology)

    def _join(self) -> None:
        """Compile whole repeats, unless what shards the model over ranks hooks the nodes within them."""
        if not self.is_sharded:
            join_repeats(self.model.topology)

    def finish(self) -> None:
        if self.lora is not None:
            self.lora.merge()

    def losses(self, batch: Batch) -> VocabularyLosses:
        """Return the losses on a batch, with gradients unless they are off."""
        return self.losses_of(self.model.hidden(batch[0], documents=documents_of(batch)), batch[1])

    def losses_of(self, hidden: Tensor, targets: Tensor) -> VocabularyLosses:
        """Return the losses of the head on features [B, T, M], means over the targets that count."""
        if self.dense:
            loss = cross_entropy(self.model.logits(hidden), targets)
            return VocabularyLosses(loss, loss.detach())
        weight = self.model.head_weight
        if weight is None:
            return vocabulary_losses(self.model, hidden, targets, chunk=self.chunk)
        # On a GPU the chunk follows from what a matrix product fills.
        chunk = None if hidden.is_cuda else self.chunk
        flat = (hidden.flatten(0, 1), weight, targets.flatten())
        loss = linear_cross_entropy(*flat, ignore_index=IGNORED, chunk=chunk)
        return VocabularyLosses(loss, loss.detach())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        losses = self.losses(batch)
        backward(losses.loss)
        return _scalars(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return _scalars(self.losses(batch))


class TeacherLogitsObjective(LanguageModelObjective):
    """w T^2 KL(teacher || student) + (1 - w) CE of next-token distributions; `kl_weight` w = 1 is KL alone.

    `hidden_weight` adds so many times the `ResidualDistance` to the teacher, falling to 0 in a line over the steps that
    `at` counts, so that the end is the distributions alone; it needs the live teacher.

    With a cache the teacher runs once for each sample; its `top_k` likeliest entries and, unless `tail` is false,
    `tail_samples` samples of the others are stored, in 16 bits with `half` (see `sparse_rows`).
    """

    def __init__(
        self,
        model: Model,
        teacher: Model,
        *,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        chunk: int = 1024,
        lora: Lora | None = None,
        cache: TeacherCache | None = None,
        top_k: int = 64,
        tail_samples: int = TAIL_SAMPLES,
        half: bool = False,
        tail: bool = True,
        hidden_weight: float = 0.0,
    ) -> None:
        super().__init__(model, chunk=chunk, lora=lora)
        self.teacher = self._live = teacher
        self.kl_weight, self.temperature = kl_weight, temperature
        self.cache, self.half = cache, half
        self.entries = n_entries(top_k, tail_samples, model.spec.embedder.vocab_size, tail=tail)
        self.hidden_weight, self.left = hidden_weight, 1.0
        self.residual = ResidualDistance(model, teacher) if hidden_weight else None

    def at(self, step: int, steps: int) -> None:
        self.left = 1.0 - step / steps

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        if self.residual is None:
            return super().step(batch, backward)
        with self.residual.watch():
            losses = self.losses(batch)
        distance = self.residual.value(batch[1] != IGNORED)
        backward(losses.loss + self.hidden_weight * self.left * distance)
        return {**_scalars(losses), "hidden": distance.detach()}

    def compilable(self) -> list[nn.Module]:
        if self.residual is None:  # which hooks the blocks within a repeat
            self._join()
        return [*compilable_regions(self.model.topology), *compilable_regions(self._live.topology)]

    def losses(self, batch: Batch) -> VocabularyLosses:
        if self.cache is not None and (samples := samples_of(batch)) is not None:
            self.cache.begin(samples)  # files are read while the student runs
        return vocabulary_losses(
            self.model,
            self.model.hidden(batch[0], documents=documents_of(batch)),
            batch[1],
            rows=self._rows(batch),
            kl_weight=self.kl_weight,
            temperature=self.temperature,
            chunk=self.chunk,
        )

    @torch.no_grad()
    def _rows(self, batch: Batch) -> RowsOf:
        tokens, documents, samples = batch[0], documents_of(batch), samples_of(batch)
        if self.cache is None or samples is None:  # held-out batches carry no index
            hidden = self._live.hidden(tokens, documents=documents).flatten(0, 1)
            return LiveTeacher(self._live, hidden, self.temperature)
        kept = self.cache.fetch(
            samples,
            tokens.device,
            lambda rows: self._stored(tokens[rows], None if documents is None else documents[rows]),
        )
        parts = (kept[name].flatten(0, 1) for name in ("log_p", "index", "tail"))
        return StoredRows(*parts, n_samples=self.entries[1])

    def _stored(self, tokens: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
        rows = LiveTeacher(self._live, self._live.hidden(tokens, documents=documents).flatten(0, 1), self.temperature)
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens))
        found = [
            sparse_rows(rows(start, start + len(part)).log_p, *self.entries, part, half=self.half)
            for start, part in zip(range(0, len(places), self.chunk), places.split(self.chunk), strict=True)
        ]
        # Autocast of a CPU knows no float16 to join.
        with torch.autocast(tokens.device.type, enabled=False):
            return {name: torch.cat([part[name] for part in found]).unflatten(0, tokens.shape) for name in found[0]}


def _scalars(losses: VocabularyLosses) -> dict[str, Tensor]:
    named = {"loss": losses.loss.detach()}
    if losses.kl is not None:
        named |= {"ce": losses.ce, "kl": losses.kl}
    return named


class PluginLossObjective(LanguageModelObjective):
    """Minimises `function(logits, targets)`; `loss` is its value and `ce` the cross-entropy of the same logits.

    Shape: logits [B, T, V], targets [B, T] int64 with IGNORED where none counts; the loss is a scalar.
    """

    def __init__(
        self,
        model: Model,
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        name: str,
        lora: Lora | None = None,
    ) -> None:
        super().__init__(model, lora=lora, dense=True)
        self.function, self.name = function, name

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        backward(loss)
        return {"loss": loss.detach(), "ce": ce}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        return {"loss": loss, "ce": ce}

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(self.model.hidden(batch[0], documents=documents_of(batch)))
        try:
            loss = self.function(logits, batch[1])
        except (CarambaError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ExtensionFailedError(
                f"train.loss ({self.name}) failed: {user_traceback(error)}; correct it"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ExtensionFailedError(f"train.loss ({self.name}) returned {got}; expected a scalar tensor of floats")
        with torch.no_grad():
            ce = cross_entropy(logits.detach(), batch[1])
        return loss.reshape(()), ce
