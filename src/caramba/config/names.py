"""Nearest names, for every error that can offer one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from caramba.errors import quote

Kind = TypeVar("Kind", bound=StrEnum)
LONGEST_NAME = 100
"""Characters of a name that is compared; no longer one is a typing error."""

_SAME = {
    "lr": "learning_rate learningrate max_lr peak_lr base_lr step_size",
    "batch_size": "bs batchsize batch per_device_train_batch_size micro_batch_size train_batch_size",
    "steps": "max_steps num_steps n_steps iterations iters max_iters num_iters epochs max_epochs num_train_epochs",
    "block_size": "seq_length sequence_length max_seq_len max_seq_length max_length context_length context n_ctx",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters",
    "scheduler": "lr_scheduler lr_schedule lr_scheduler_type decay",
    "weight_decay": "wd l2 decoupled_weight_decay",
    "max_grad_norm": "grad_clip gradient_clip_val clip_grad_norm grad_norm clip",
    "gradient_accumulation_steps": "grad_accum accumulate_grad_batches gradient_accumulation accum_steps",
    "optimizer": "optim optimiser opt",
    "dtype": "precision bf16 fp16 mixed_precision",
    "num_workers": "workers dataloader_num_workers n_workers",
    "activation_checkpointing": "gradient_checkpointing recompute remat",
    "d_model": "hidden_size dim n_embd embed_dim hidden_dim width emb_dim",
    "n_heads": "num_heads n_head num_attention_heads heads",
    "n_kv_heads": "num_kv_heads num_key_value_heads n_kv_head kv_heads",
    "d_ff": "intermediate_size ffn_dim mlp_dim ffn_hidden_size",
    "repeat": "n_layers n_layer num_layers num_hidden_layers depth layers",
    "vocab_size": "vocab vocabulary_size n_vocab",
    "data": "dataset datasets corpus",
    "name": "run_name experiment_name exp_name output_dir",
    "seed": "random_seed rng_seed manual_seed",
    "parallel": "gpus num_gpus n_gpus ddp distributed world_size",
    "launcher": "slurm submit",
    "logger": "logging log report_to loggers",
    "checkpoint": "ckpt ckpt_path resume_from_checkpoint weights",
    "eval_every": "eval_steps eval_interval val_check_interval",
    "save_every": "save_steps save_interval checkpoint_every",
}
SYNONYMS = {other: name for name, others in _SAME.items() for other in others.split()}
"""Names of other tools, and what they are called here."""


def nearest(name: object, options: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" for a synonym or the closest option, or an empty string."""
    if len(str(name)) > LONGEST_NAME:
        return ""
    known = [str(option) for option in options]
    same = SYNONYMS.get(str(name).lower().replace("-", "_"))
    near = [same] if same in known else difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def member(kind: type[Kind], name: str) -> Kind:
    """Return the member of an enum that `name` is.

    Raises:
        ValueError: it is none, with all that there are and the nearest.
    """
    if name not in set(kind):
        raise ValueError(f"got {quote(name)}, expected one of {' '.join(kind)}{nearest(name, kind)}")
    return kind(name)
