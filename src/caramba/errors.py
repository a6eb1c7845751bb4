"""Exceptions that users see: each says where, what was found, what was expected, and the fix."""


class CarambaError(Exception):
    """Parent of every caramba error. `exit_status` is 2 for a user's mistake and 1 for a failure."""

    exit_status = 1


class ConfigError(CarambaError, ValueError):
    """A manifest, override or command line that cannot be accepted as written."""

    exit_status = 2


class CacheFull(ConfigError):  # noqa: N818 - says what happened
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


class OutOfMemory(CarambaError):  # noqa: N818 - says what happened
    """A training step did not fit the device's memory; its weights are those of `step`, if `is_clean`."""

    def __init__(self, message: str, *, step: int = 0, is_clean: bool = True) -> None:
        super().__init__(message)
        self.step, self.is_clean = step, is_clean


class BatchReduced(OutOfMemory):
    """Memory ran out on one of several ranks; plan.json has a smaller batch, for all of them to be started again."""

    exit_status = 79  # one that nothing else of a run ends with, for who started the ranks


class VerificationFailed(CarambaError):  # noqa: N818 - as above
    """A verification with `fail_fast: true` crossed its threshold."""


class BudgetExceeded(CarambaError):  # noqa: N818 - as above
    """A stage would spend more than the budget that the manifest allows."""


class AgentError(CarambaError):
    """A language-model agent returned something that cannot be used."""


class Preempted(BaseException):
    """A signal asked the run to stop; what has been trained is saved.

    No error: as with Ctrl-C, nothing that handles errors may take it.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
