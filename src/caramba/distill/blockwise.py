"""Blockwise distillation: one teacher pass trains every student attention on its own block.

Each student attention is trained on what the teacher's attention of that block gave out. Its backward runs inside the
pass that feeds it and its graph is freed before the next block, so memory is that of one block. The teacher stops
after the last block that trains; frozen blocks cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.attention import COPIED
from caramba.data import documents_of, samples_of
from caramba.distill.block_loss import AttentionDivergence, BlockStep, sample_queries
from caramba.distill.objective import Backward, Batch, Objective
from caramba.distill.schedule import BlockSchedule
from caramba.distill.teacher_cache import TeacherCache
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, Documents
from caramba.model import Model
from caramba.model.topology import attention_applications
from caramba.runtime import get_rank, get_world_size, is_distributed

Named = tuple[str, AttentionLayer]
OnCall = Callable[[str, Tensor, Tensor], object]
Replacement = Callable[[str, AttentionLayer, Tensor], Tensor]


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward early
    """The last captured call has been made."""


@torch.no_grad()
def capture_attention_io(
    model: Model, layers: Sequence[Named], tokens: Tensor, on_call: OnCall, documents: Tensor | None = None
) -> None:
    """Run the model on tokens [B, T] and call on_call(name, input, output), both [B, T, M], after each given layer.

    Nothing runs after the last of the calls: no feed-forward layer, norm or head. A layer that runs several times
    (shared weights) calls once for each application. `documents` [B, T] are document ids, as in `Model`.
    """
    left = _calls(model, layers)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal left
            left -= 1
            on_call(name, inputs[0], output)
            if left == 0:
                raise _Reached

        return hook

    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_hook(hook_of(name)).remove)
        _run(model, tokens, documents)


@torch.no_grad()
def replace_attention(
    model: Model, layers: Sequence[Named], tokens: Tensor, call: Replacement, documents: Tensor | None = None
) -> None:
    """Run the model on tokens [B, T] with call(name, layer, input) -> output in place of each given layer's forward.

    `call` may run the layer itself, with gradients: its result is detached. Nothing runs after the last of the calls.
    """
    left = _calls(model, layers)

    def forward_of(name: str, layer: AttentionLayer, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
            nonlocal left
            left -= 1
            with _own_forward(layer, original):
                output = call(name, layer, x)
            if left == 0:
                raise _Reached
            return output

        return forward

    with ExitStack() as stack:
        for name, layer in layers:
            stack.enter_context(_own_forward(layer, forward_of(name, layer, layer.forward)))
        _run(model, tokens, documents)


def _calls(model: Model, layers: Sequence[Named]) -> int:
    tapped = {id(layer) for _, layer in layers}
    return sum(id(layer) in tapped for _, layer in attention_applications(model))


def _run(model: Model, tokens: Tensor, documents: Tensor | None) -> None:
    try:
        model.hidden(tokens, documents=documents)
    except _Reached:
        return


@contextmanager
def _own_forward(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """Override one module's forward inside a block."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


class BlockTargets:
    """Inputs and outputs of the teacher's attention layers under the student's names of them.

    With a cache a sample's inputs and outputs of all layers are kept, and the teacher runs once per sample.
    """

    def __init__(
        self,
        teacher: Model,
        pairs: Sequence[tuple[str, AttentionLayer, AttentionLayer]],
        cache: TeacherCache | None = None,
    ) -> None:
        self.teacher, self.cache = teacher, cache
        self.layers = {name: source for name, source, _ in pairs}
        names = {id(source): name for name, source, _ in pairs}
        self.order = [names[id(layer)] for _, layer in attention_applications(teacher) if id(layer) in names]

    def visit(self, batch: Batch, names: Sequence[str], on_call: OnCall) -> None:
        """Call on_call(name, input, output) for every application of the layers `names`, in execution order."""
        tokens, documents, samples = batch[0], documents_of(batch), samples_of(batch)
        if self.cache is None or samples is None:  # held-out batches carry no index
            layers = [(name, self.layers[name]) for name in names]
            capture_attention_io(self.teacher, layers, tokens, on_call, documents)
            return
        kept = self.cache.fetch(
            samples,
            tokens.device,
            lambda rows: self._all(tokens[rows], None if documents is None else documents[rows]),
        )
        for place, name in enumerate(self.order):
            if name in names:
                on_call(name, kept[f"{place}.x"], kept[f"{place}.o"])

    @torch.no_grad()
    def _all(self, tokens: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}

        def keep(_name: str, x: Tensor, output: Tensor) -> None:
            place = len(made) // 2
            made[f"{place}.x"], made[f"{place}.o"] = x, output

        capture_attention_io(self.teacher, list(self.layers.items()), tokens, keep, documents)
        return made


class BlockShard:
    """The blocks of one rank: consecutive ones, so that the teacher of an early rank stops early; all, of one rank.

    Where `is_shared` a rank computes no gradient of another's blocks, so no gradient is ever reduced; `gather` sends
    every block's weights from its owner to all.

    Raises:
        ConfigError: more ranks than blocks.
    """

    def __init__(self, names: Sequence[str], rank: int | None = None, world_size: int | None = None) -> None:
        self.names = tuple(names)
        world = get_world_size() if world_size is None else world_size
        if world > len(self.names):
            raise ConfigError(f"blockwise: {world} ranks for {len(self.names)} blocks; use at most one rank per block")
        share, rest = divmod(len(self.names), world)
        sizes = [share + (place < rest) for place in range(world)]
        self._owner = dict(zip(self.names, (place for place, n in enumerate(sizes) for _ in range(n)), strict=True))
        mine = get_rank() if rank is None else rank
        self.is_shared = world > 1
        self.owned = tuple(name for name in self.names if self._owner[name] == mine)

    @torch.no_grad()
    def gather(self, layers: Mapping[str, nn.Module]) -> None:
        """Give every rank the weights of all blocks, each from its owner; without a process group do nothing."""
        if not is_distributed():
            return
        for name in self.names:
            for tensor in layers[name].state_dict().values():
                dist.broadcast(tensor, src=self._owner[name])


Pair = tuple[str, AttentionLayer, AttentionLayer]
BLOCK, RAW = "block", "l1"


@dataclass(frozen=True)
class _Block:
    """One application of a block: what the student and the teacher read, what the teacher gave, documents, and the
    queries whose attention is compared."""

    student_x: Tensor
    teacher_x: Tensor
    target: Tensor
    documents: Tensor | None
    apart: Documents | None
    rows: Tensor | None


class BlockwiseObjective(Objective):
    """Trains the attention layers of `model` on the teacher's blocks: sum|o_s - o_t| / sum|o_t| each, plus
    `attention_weight` times KL(A_t || A_s) on `n_queries` sampled queries per sequence, the same for all blocks of a
    step.

    `loss` is the mean over the blocks that train now, `block/NAME` each block's, `l1/NAME` its mean |o_s - o_t|.

    Args:
        schedule: which blocks train; None trains all, always.
        on_student: blocks read the student's own hidden states (the drift phase) instead of the teacher's. The
            student's stack then runs once, without gradients but in its attention layers.
        cache: keeps the teacher's block inputs and outputs; None runs the teacher at every step.
        shard: the blocks that this rank trains.
        keeps_copied: leave the weights as they are that surgery copied, W_q and W_o of latent layers, which spares
            the two largest weight gradients of a block.
    """

    def __init__(
        self,
        model: Model,
        teacher: Model,
        pairs: Sequence[Pair],
        *,
        schedule: BlockSchedule | None = None,
        on_student: bool = False,
        attention_weight: float = 0.0,
        n_queries: int = 64,
        cache: TeacherCache | None = None,
        shard: BlockShard | None = None,
        keeps_copied: bool = False,
    ) -> None:
        self.model, self.teacher, self.pairs = model, teacher, tuple(pairs)
        self.shard = shard or BlockShard([name for name, _, _ in pairs])
        self.schedule, self.on_student = schedule, on_student
        self.attention_weight, self.n_queries = attention_weight, n_queries
        self.keeps_copied = keeps_copied
        self.targets = BlockTargets(teacher, self.pairs, cache)
        self.divergence = AttentionDivergence()
        self.steps = {name: BlockStep(target) for name, _, target in pairs}
        self._layers = {name: (source, target) for name, source, target in pairs}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{name}.{key}", value)
            for name, _, layer in self.pairs
            if name in self.shard.owned
            for key, value in self._trained(layer)
        ]

    def clip_groups(self) -> list[list[nn.Parameter]]:
        layers = [layer for name, _, layer in self.pairs if name in self.shard.owned]
        return [[value for _, value in self._trained(layer)] for layer in layers]

    def _trained(self, layer: AttentionLayer) -> list[tuple[str, nn.Parameter]]:
        copied = COPIED if self.keeps_copied and layer.config.is_latent else ()
        return [
            (key, value) for key, value in layer.named_parameters() if key.removeprefix("projection.") not in copied
        ]

    def schedule_span(self, step: int, steps: int) -> tuple[int, int]:
        return (step, steps) if self.schedule is None else self.schedule.span(step, steps)

    def advance(self, losses: Mapping[str, Tensor]) -> None:
        if self.schedule is None:
            return
        if self.schedule.needs_losses:  # reading losses waits for the device
            self.schedule.advance({name: float(losses[f"{BLOCK}/{name}"]) for name in self.schedule.active()})
        else:
            self.schedule.advance()

    @property
    def is_done(self) -> bool:
        return self.schedule is not None and self.schedule.is_done

    @property
    def holds_one_block(self) -> bool:
        return True

    def compilable(self) -> list[nn.Module]:
        layers = [source for _, source, _ in self.pairs]
        if self.on_student:  # frozen layers run as well as the steps of trained ones
            layers += [student for _, _, student in self.pairs]
        return [*layers, *self.steps.values(), *([self.divergence] if self.attention_weight else [])]

    def finish(self) -> None:
        self.shard.gather({name: layer for name, _, layer in self.pairs})

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        names = self.shard.owned if self.schedule is None else self.schedule.active()
        return self._losses(batch, [name for name in names if name in self.shard.owned], backward)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return self._losses(batch, list(self.shard.owned), None)

    def _losses(self, batch: Batch, names: Sequence[str], backward: Backward | None) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        documents = documents_of(batch)
        apart = None if documents is None else Documents.of(documents)
        rows = sample_queries(batch[0], self.n_queries) if self.attention_weight else None

        def train(name: str, student_x: Tensor, teacher_x: Tensor, target: Tensor) -> Tensor:
            with torch.set_grad_enabled(backward is not None):
                block = _Block(student_x.detach(), teacher_x, target, documents, apart, rows)
                output, losses = self._block(name, block)
                if backward is not None:
                    backward(losses[BLOCK])
            for kind, loss in losses.items():
                found.setdefault(f"{kind}/{name}", []).append(loss.detach())
            return output

        if self.on_student:
            self._on_student(batch, names, train)
        else:
            self.targets.visit(batch, names, lambda name, x, target: train(name, x, x, target))
        # One copy of all, out of memory that a captured graph may own; a block that runs once is its own mean.
        parts = torch.stack([value for values in found.values() for value in values]).split(
            [len(values) for values in found.values()]
        )
        means = {key: part[0] if len(part) == 1 else part.mean() for key, part in zip(found, parts, strict=True)}
        blocks = [value for key, value in means.items() if key.startswith(f"{BLOCK}/")]
        return {"loss": torch.stack(blocks).mean(), **means}

    def _on_student(
        self, batch: Batch, names: Sequence[str], train: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.targets.visit(batch, names, lambda name, x, target: calls.setdefault(name, []).append((x, target)))
        students = [(name, self._layers[name][1]) for name in names]
        replace_attention(
            self.model,
            students,
            batch[0],
            lambda name, _layer, x: train(name, x, *calls[name].pop(0)),
            documents_of(batch),
        )

    def _block(self, name: str, block: _Block) -> tuple[Tensor, dict[str, Tensor]]:
        source, student = self._layers[name]
        output, raw, size = self.steps[name](block.student_x, block.target, block.apart, block.documents)
        losses = {BLOCK: raw / size, RAW: raw}
        if block.rows is not None:
            counted = None if block.documents is None else block.documents >= 0
            kl = self.divergence(source, student, block.teacher_x, block.student_x, block.rows, block.apart, counted)
            losses |= {BLOCK: losses[BLOCK] + self.attention_weight * kl, "attention_kl": kl}
        return output, losses


@torch.no_grad()
def block_errors(
    teacher: Model, pairs: Sequence[Pair], tokens: Tensor, documents: Tensor | None = None
) -> tuple[float, ...]:
    """Measure each block's relative L1 error on tokens [B, T], in the order of `pairs`, on every rank alike."""
    batch = (tokens, tokens) if documents is None else (tokens, tokens, documents)
    everything = BlockShard([name for name, _, _ in pairs], rank=0, world_size=1)
    blocks = BlockwiseObjective(teacher, teacher, pairs, shard=everything).evaluate(batch)
    return tuple(float(blocks[f"{BLOCK}/{name}"]) for name, _, _ in pairs)
