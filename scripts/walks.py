"""Files that a common action passes, counted by tracing in a process of its own. Prints JSON.

Usage: python scripts/walks.py training|token|generation|decoding

training    project files that run a function between argv and the end of the first optimiser step
            (model=tiny train=pretrain). Code that only runs at import does not count.
token       project files that run a function for one decoded token (eager, CPU, model=tiny)
generation  project modules that importing the smallest decode loop loads
decoding    project modules that are loaded once that loop has built model=tiny and decoded a token
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (f"{ROOT}/src/", f"{ROOT}/kernels/")
TRAINING = (
    *("launch", "model=tiny", "train=pretrain", "device=cpu", "train.batch_size=2", "train.block_size=32"),
    *("data.max_bytes=200000", "data.vocab_size=512", "model.embedder.vocab_size=512", "--quiet"),
)


class Trace:
    """Counts calls by project file in all threads, without those made while a module is imported."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def start(self) -> None:
        threading.settrace(self._record)
        sys.settrace(self._record)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _record(self, frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(SOURCES):
            return
        caller: FrameType | None = frame
        while caller is not None:
            code = caller.f_code
            if code.co_name == "<module>" and code.co_filename.startswith(SOURCES):
                return
            caller = caller.f_back
        self.calls[name] += 1

    def report(self) -> dict[str, Any]:
        files = sorted(str(Path(name).relative_to(ROOT)) for name in self.calls)
        return {"count": len(files), "calls": self.calls.total(), "files": files}


def training() -> dict[str, Any]:
    import hydra  # noqa: F401 - here, where nothing is traced: no file of the project runs
    import lightning.pytorch  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from torch.optim.optimizer import register_optimizer_step_post_hook

    trace = Trace()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["CARAMBA_HOME"] = folder

        def finish(*_: Any) -> None:
            trace.stop()
            raise KeyboardInterrupt

        register_optimizer_step_post_hook(finish)
        from caramba.cli import main

        trace.start()
        main(list(TRAINING))
        os.chdir(ROOT)
    return trace.report()


def start_decoding() -> Callable[[], object]:
    """Build and lower model=tiny as a generation does, decode a first token, return what decodes the next.

    The first token fills caches of its own.
    """
    import torch
    import yaml

    from caramba.config.model import ModelConfig
    from caramba.infer.decode import decode_step, prefill
    from caramba.lower.lowering import lower
    from caramba.model import build_model

    config = ModelConfig.model_validate(yaml.safe_load((ROOT / "conf/model/tiny.yaml").read_text()))
    model = build_model(config, seed=0).eval()
    lower(model, "cpu", "decode")
    ctx = model.new_context(1, 16, static=True)
    step = prefill(model, torch.arange(4)[None], ctx).argmax(-1)
    step = decode_step(model, step, ctx).argmax(-1)
    return lambda: decode_step(model, step, ctx)


def token() -> dict[str, Any]:
    decode_next = start_decoding()
    trace = Trace()
    trace.start()
    decode_next()
    trace.stop()
    return trace.report()


def list_loaded() -> dict[str, Any]:
    modules = sorted(name for name in sys.modules if name.partition(".")[0] == "caramba")
    return {"count": len(modules), "files": modules}


def generation() -> dict[str, Any]:
    import caramba.infer.decode  # noqa: F401

    return list_loaded()


def decoding() -> dict[str, Any]:
    start_decoding()
    return list_loaded()


WALKS = {"training": training, "token": token, "generation": generation, "decoding": decoding}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in WALKS:
        print(f"walks: expected one of {', '.join(WALKS)}", file=sys.stderr)
        return 2
    stdout, sys.stdout = sys.stdout, sys.stderr  # what a run prints is not part of the answer
    found = WALKS[sys.argv[1]]()
    print(json.dumps(found), file=stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
