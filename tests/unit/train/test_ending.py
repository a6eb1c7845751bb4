"""What a phase leaves behind on its device: the model, where it was trained, and nothing of the optimiser."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from caramba.optim import MasterWeights
from caramba.train.strategies import InPlaceStrategy

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Module(pl.LightningModule):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(4, 4), wide
        self.made: Any = None

    def configure_optimizers(self) -> Any:
        named = list(self.layer.to(torch.bfloat16 if self.wide else torch.float32).named_parameters())
        build = lambda pairs: torch.optim.AdamW([weight for _, weight in pairs])  # noqa: E731
        self.made = MasterWeights(named, build, keeps=True) if self.wide else build(named)
        return {
            "optimizer": self.made,
            "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(self.made),
        }

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.to(self.layer.weight.dtype)).float().square().mean()

    def cpu(self) -> Any:
        raise AssertionError("the model was moved to the host")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True])
def test_the_model_stays_and_the_optimiser_goes(device: str, wide: bool) -> None:
    module, strategy = Module(wide), InPlaceStrategy(torch.device(device))
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = module.layer.weight.clone().detach()
    trainer.fit(module, train_dataloaders=torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))  # pyright: ignore[reportArgumentType]
    assert module.layer.weight.device.type == device
    assert not torch.equal(module.layer.weight.cpu().float(), before)
    assert module.layer.weight.grad is None
    assert trainer.optimizers == []
    assert not module.made.state
    if wide:
        assert not module.made.inner.state
        assert {weight.numel() for weight in module.made.copies} == {0}
