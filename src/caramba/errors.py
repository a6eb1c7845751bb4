"""Exceptions that users see, with where, got, expected and fix: quotes of what a user wrote, nearest names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import TypeVar

LONGEST_MESSAGE = 4000
"""Characters of a message. What users write is quoted in part, so only a mistake of caramba gets there."""
LONGEST_QUOTE = 60
# Keys of services, by the prefixes that their issuers give them so that they can be found.
_SECRET = re.compile(
    r"(?<![A-Za-z0-9])(?:(sk-|sk_)(?=[^\s]*[0-9])[A-Za-z0-9_-]{16,}|(hf_|gh[opsu]_|gsk_)[A-Za-z0-9]{20,}"
    r"|(github_pat_|glpat-|xox[abprs]-|AIza)[A-Za-z0-9_-]{16,}|(AKIA)[0-9A-Z]{16})"
)


def visible(text: str) -> str:
    """Return text with what a terminal does not print escaped, such as ESC as `\\x1b`; tabs and line breaks stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\t\n" else _escape(each) for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def one_line(error: object) -> str:
    """Return the text of an error with single blanks in place of its line breaks."""
    return " ".join(str(error).split())


def clip(text: str, length: int) -> str:
    """Return a text of at most `length` characters, which counts those that it omits."""
    if len(text) <= length:
        return text
    return f"{text[: max(length - 40, 1)]}… ({len(text) - max(length - 40, 1):,} more characters)"


def quote(value: object, length: int = LONGEST_QUOTE) -> str:
    """Return a short, printable form of a value that a user wrote, on one line, for an error message.

    A mapping or list is named by its kind. No key of a service is repeated.
    """
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return hide_secrets(repr(value) if len(value) <= length else f"{value[:length]!r}… ({len(value):,} characters)")
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def bare(value: object) -> str:
    """As `quote`, for KEY=VALUE: a word is not put in quotes."""
    is_word = isinstance(value, str) and len(value) <= LONGEST_QUOTE and value.isprintable()
    return hide_secrets(str(value)) if is_word else quote(value)


def fits_header(key: str) -> bool:
    """True if a key is printable ASCII without blanks, as `Authorization: Bearer KEY` carries it."""
    return re.fullmatch(r"[!-~]+", key) is not None


def is_secret(text: str) -> bool:
    """Return whether a text contains what looks like the key of a service."""
    return _SECRET.search(text) is not None


def hide_secrets(text: str) -> str:
    """Return a text in which the keys of services are cut to their prefix."""
    return _SECRET.sub(lambda match: f"{next(part for part in match.groups() if part)}…", text)


class CarambaError(Exception):
    """Parent of every caramba error. `exit_status` is 2 for a user's mistake and 1 for a failure.

    The message has no control characters, no keys of services, and at most `LONGEST_MESSAGE` characters.
    """

    exit_status = 1

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(clip(hide_secrets(visible(arg)), LONGEST_MESSAGE) if isinstance(arg, str) else arg for arg in args)
        )


class ConfigError(CarambaError, ValueError):
    """A manifest, override or command line that cannot be accepted as written."""

    exit_status = 2


class CacheFull(ConfigError):  # noqa: N818 - names the event
    """A key/value cache was given more tokens than it was made for; it is unchanged."""


class QueueFull(CarambaError):  # noqa: N818 - as above
    """As many requests wait as may: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(CarambaError):  # noqa: N818 - as above
    """A request came after the engine was closed."""


class DataError(CarambaError, ValueError):
    """A dataset, token file or tokenizer that does not fit what the manifest asks of it."""

    exit_status = 2


class CheckpointError(CarambaError):
    """A checkpoint that is missing, unreachable, corrupt, or made for another model."""

    exit_status = 2


class KernelUnavailable(CarambaError):  # noqa: N818 - the name that users know
    """A kernel was required and cannot be built or loaded on this device."""

    exit_status = 2


class OutOfMemory(CarambaError):  # noqa: N818 - names the event
    """A training step did not fit the device's memory; its weights are those of `step`, if `is_clean`."""

    def __init__(self, message: str, *, step: int = 0, is_clean: bool = True) -> None:
        super().__init__(message)
        self.step, self.is_clean = step, is_clean


class BatchReduced(OutOfMemory):
    """Memory ran out on one of several ranks; plan.json has a smaller batch for a restart of all."""

    exit_status = 79  # one that nothing else of a run ends with, for who started the ranks


class VerificationFailed(CarambaError):  # noqa: N818 - as above
    """A verification with `fail_fast: true` crossed its threshold."""


class BudgetExceeded(CarambaError):  # noqa: N818 - as above
    """A stage would spend more than the budget that the manifest allows."""


class AgentError(CarambaError):
    """A language-model agent returned something that cannot be used."""


class ExtensionFailedError(CarambaError):
    """A callback, logger, loss or schedule of a plugin raised an error; the message names it."""


class Preempted(BaseException):
    """A signal asked the run to stop; what has been trained is saved.

    No error: as with Ctrl-C, nothing that handles errors may take it.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


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
    "path": "data_path data_dir dataset_path train_data",
    "name": "run_name experiment_name exp_name output_dir out_dir save_dir run_dir runs_dir log_dir logdir",
    "device": "accelerator",
    "seed": "random_seed rng_seed manual_seed",
    "parallel": "gpus num_gpus n_gpus ddp fsdp distributed world_size strategy",
    "launcher": "slurm submit",
    "logger": "logging log report_to loggers",
    "wandb_project": "project project_name",
    "checkpoint": "ckpt ckpt_path resume_from_checkpoint weights",
    "eval_every": "eval_steps eval_interval val_check_interval",
    "save_every": "save_steps save_interval checkpoint_every",
}
SYNONYMS = {other: name for name, others in _SAME.items() for other in others.split()}
"""Names of other tools, and what they are called here."""


def nearest(name: object, options: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" for a synonym or the closest option, or an empty string."""
    import difflib  # only a message needs it

    if len(str(name)) > LONGEST_NAME:
        return ""
    known = [str(option) for option in options]
    same = SYNONYMS.get(str(name).lower().replace("-", "_"))
    near = [same] if same in known else difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def need_name(
    name: str, known: Collection[str], kind: str, where: str, error: type[CarambaError] = CarambaError
) -> None:
    """Refuse a name that is not known, with the nearest one or where they are listed.

    Raises:
        CarambaError: of type `error`; it is not among `known`.
    """
    if name not in known:
        raise error(f"{name!r} is no {kind}{nearest(name, known) or f'; {where}'}")


def member(kind: type[Kind], name: str) -> Kind:
    """Return the member of an enum that `name` is.

    Raises:
        ValueError: it is none, with all that there are and the nearest.
    """
    if name not in set(kind):
        raise ValueError(f"got {quote(name)}, expected one of {' '.join(kind)}{nearest(name, kind)}")
    return kind(name)
