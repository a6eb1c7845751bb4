from types import ModuleType
from typing import Any

from caramba.artifacts.across_runs.run import Run as Run
from caramba.artifacts.across_runs.run import runs as runs
from caramba.distill.loop import distill as distill
from caramba.evaluation.loaded import LoadedModel as LoadedModel
from caramba.evaluation.loaded import load as load
from caramba.launch.call import compile as compile
from caramba.launch.call import launch as launch
from caramba.surgery.student import transplant as transplant

__version__: str

class CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any: ...
