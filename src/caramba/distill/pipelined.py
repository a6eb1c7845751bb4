"""Next-token cross-entropy of a model whose stages are on several ranks, by torch's 1F1B schedule."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from caramba.data import IGNORED
from caramba.distill.objective import Backward, Batch, LanguageModelObjective
from caramba.model.parallel import Stage


class PipelinedObjective(LanguageModelObjective):
    """The loss of `LanguageModelObjective`, from a forward and backward of `micro_batches` equal parts of a batch.

    Every rank gives the same batches and gets the loss of the whole: L = sum over parts of n_part / n x L_part, n the
    targets that count, so that parts of other lengths weigh as in one batch. Gradients are those of
    L / `accumulation`, of this stage's weights.

    Reference: Narayanan et al., 2021, arXiv:2104.04473, section 2.2 (1F1B with flushes).
    """

    def __init__(
        self,
        stage: Stage,
        *,
        micro_batches: int,
        accumulation: int = 1,
        chunk: int = 1024,
        dense: bool = False,
    ) -> None:
        super().__init__(stage.model, chunk=chunk, dense=dense)
        self.stage, self.micro_batches, self.accumulation = stage, micro_batches, accumulation
        self._schedule: Any = None
        self._counted = torch.ones(())  # targets of the batch at hand

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Run the schedule, which goes backward through each part as soon as it can, in place of `backward`."""
        tokens, targets = batch[0], batch[1]
        if self._schedule is None:
            self._schedule = self._new_schedule(tokens)
        self._counted = (targets != IGNORED).sum().clamp_min(1)
        losses: list[Tensor] = []
        if self.stage.is_first:
            self._schedule.step(tokens)
        elif self.stage.is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step()
        total = sum((loss.detach().float() for loss in losses), self._nothing(tokens))
        return self._told(total * self.accumulation)

    def join_gradients(self) -> None:
        self.stage.join_gradients()

    def replicated_params(self) -> list[Tensor]:
        tied = self.stage.tied
        return [] if tied is None or self.stage.is_first else [tied]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        tokens, targets = batch[0], batch[1]
        stage, width = self.stage, self.model.spec.embedder.d_model
        given = tokens
        if not stage.is_first:
            given = torch.empty((*tokens.shape, width), dtype=stage.dtype, device=tokens.device)
            dist.recv(given, src=stage.index - 1)
        hidden = stage(given)
        if stage.is_last:
            return self._told(self.losses_of(hidden, targets).loss.float())
        dist.send(hidden.contiguous(), dst=stage.index + 1)
        return self._told(self._nothing(tokens))

    def _nothing(self, tokens: Tensor) -> Tensor:
        return torch.zeros((), device=tokens.device)

    def _told(self, loss: Tensor) -> dict[str, Tensor]:
        dist.broadcast(loss, src=self.stage.n_stages - 1)
        return {"loss": loss}

    def _part(self, hidden: Tensor, targets: Tensor) -> Tensor:
        loss = self.losses_of(hidden, targets).loss
        return loss * (targets != IGNORED).sum() / (self._counted * self.accumulation)

    def _new_schedule(self, tokens: Tensor) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rows, length = len(tokens) // self.micro_batches, tokens.shape[1]
        # What is sent is known: torch would find out by a forward of its own, which draws random numbers.
        width = self.model.spec.embedder.d_model
        dtype = self.stage.dtype
        features = torch.empty((rows, length, width), dtype=dtype, device="meta", requires_grad=True)
        given = features
        if self.stage.is_first:
            given = torch.empty((rows, length), dtype=tokens.dtype, device="meta")
        place = (self.stage.index, self.stage.n_stages, tokens.device)
        stage = PipelineStage(self.stage, *place, input_args=(given,), output_args=(features,))
        return Schedule1F1B(stage, self.micro_batches, loss_fn=self._part, scale_grads=False)
