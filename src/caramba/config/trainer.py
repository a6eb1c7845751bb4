"""Schema of `trainer`: flags of Lightning's Trainer that every phase takes. Those that have a key elsewhere name it."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator, model_validator

from caramba.config.base import Config, Share, nearest
from caramba.config.layer_base import Positive
from caramba.config.source import is_mapping

ELSEWHERE = {
    "accelerator": "device=auto|cpu|cuda|mps",
    "accumulate_grad_batches": "train.gradient_accumulation_steps=N",
    "barebones": "settings.instrument=none",
    "benchmark": "plan=auto, which measures",
    "callbacks": "callbacks=[{type: NAME}]",
    "check_val_every_n_epoch": "train.eval_every=STEPS",
    "default_root_dir": "name=NAME; runs are under runs/NAME",
    "deterministic": "deterministic=true",
    "devices": "parallel=ddp parallel.dp=N",
    "enable_checkpointing": "settings.save_every=STEPS",
    "enable_model_summary": "caramba compile",
    "enable_progress_bar": "settings.instrument=plain or none",
    "fast_dev_run": "debug=fdr",
    "gradient_clip_algorithm": "train.gradient_clip_algorithm=norm|value",
    "gradient_clip_val": "train.max_grad_norm=X",
    "limit_train_batches": "train.steps=N",
    "logger": "logger.lightning={CSVLogger: {}}",
    "max_epochs": "train.steps=N",
    "max_steps": "train.steps=N",
    "min_steps": "train.steps=N",
    "num_nodes": "launcher=slurm launcher.nodes=N, or launcher=torchrun",
    "overfit_batches": "debug=overfit",
    "plugins": "plugins=[MODULE]",
    "precision": "train.dtype=bfloat16",
    "strategy": "parallel=ddp, fsdp2, fsdp2_tp or pipeline",
    "use_distributed_sampler": "nothing: every rank reads its own share",
    "val_check_interval": "train.eval_every=STEPS",
    "weights_save_path": "nothing: weights are in the run's checkpoints/",
}
"""Flags of Lightning's Trainer, and what sets the same here."""


class EarlyStoppingConfig(Config):
    """End a phase when its held-out loss no longer falls, by Lightning's EarlyStopping, measured every
    `train.eval_every` steps."""

    monitor: Literal["val_loss"] = Field(default="val_loss", description="what is watched: the held-out loss")
    patience: Positive = Field(default=3, description="validations without an improvement after which it ends")
    min_delta: NonNegativeFloat = Field(default=0.0, description="least fall that is an improvement, in nats per token")
    stopping_threshold: float | None = Field(
        default=None, description="held-out loss at which the phase ends at once; unset: none"
    )
    divergence_threshold: float | None = Field(
        default=None, description="held-out loss above which the phase ends at once; unset: none"
    )


class TrainerConfig(Config):
    """Flags of Lightning's Trainer for every phase. A flag that has a key elsewhere is refused with that key."""

    max_time: str | None = Field(
        default=None,
        description="most time of a phase, DD:HH:MM:SS; the phase then ends and its weights are saved; unset: no limit",
    )
    limit_val_batches: Positive | Share = Field(
        default=1.0, description="batches of a validation: a number, or a share up to 1.0"
    )
    log_every_n_steps: Positive = Field(default=10, description="steps between two rows of metrics.csv")
    profiler: Literal["simple", "advanced", "pytorch"] | None = Field(
        default=None,
        description="profiler of Lightning, written to profile/PHASE/ of the run; debug=profile traces a few steps",
    )
    detect_anomaly: bool = Field(default=False, description="name the operation whose gradient is not finite; slower")
    early_stopping: EarlyStoppingConfig | None = Field(
        default=None, description="end a phase when its held-out loss no longer falls; unset: train all steps"
    )
    save_top_k: NonNegativeInt = Field(
        default=0, description="weights with the lowest held-out loss to keep, in checkpoints/kept/"
    )
    save_last_k: NonNegativeInt = Field(
        default=0, description="last weights to keep, one at each save_every, in checkpoints/kept/"
    )
    restore_best: bool = Field(default=False, description="end the phase with the weights of the lowest held-out loss")

    @model_validator(mode="before")
    @classmethod
    def _elsewhere(cls, value: Any) -> Any:
        for key in value if is_mapping(value) else ():
            if key in ELSEWHERE:
                raise ValueError(f"{key} is a flag of Lightning that has its own key here: {ELSEWHERE[key]}")
            if key not in cls.model_fields:
                hint = nearest(key, (*cls.model_fields, *ELSEWHERE))
                found = next((flag for flag in ELSEWHERE if hint == f"; did you mean {flag!r}?"), None)
                if found is not None:
                    raise ValueError(f"{key} is no flag{hint} It has its own key here: {ELSEWHERE[found]}")
        return value

    @field_validator("max_time", mode="before")
    @classmethod
    def _duration(cls, value: Any) -> Any:
        if value is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(value)):
            raise ValueError(f"got {value!r}, expected DD:HH:MM:SS, such as 00:01:30:00")
        return value

    @property
    def keeps_weights(self) -> bool:
        """Whether weights are kept besides the final ones."""
        return bool(self.save_top_k or self.save_last_k or self.restore_best)

    @property
    def needs_validation(self) -> tuple[str, ...]:
        """Keys that are set and need a held-out loss."""
        asked = {
            "early_stopping": self.early_stopping is not None,
            "save_top_k": self.save_top_k > 0,
            "restore_best": self.restore_best,
        }
        return tuple(key for key, is_set in asked.items() if is_set)
