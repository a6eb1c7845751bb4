"""Exceptions that users see, with where, got, expected and fix, and how they quote what a user wrote."""

from __future__ import annotations

import re

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
        return hide_secrets(
            repr(value) if len(value) <= length else f"{value[:length]!r}… ({len(value):,} characters)"
        )
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def bare(value: object) -> str:
    """As `quote`, for KEY=VALUE: a word is not put in quotes."""
    is_word = isinstance(value, str) and len(value) <= LONGEST_QUOTE and value.isprintable()
    return hide_secrets(str(value)) if is_word else quote(value)


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
            *(
                clip(hide_secrets(visible(arg)), LONGEST_MESSAGE) if isinstance(arg, str) else arg
                for arg in args
            )
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
