"""One small teacher and its calibration, which no test changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from caramba.model import Model
from caramba.surgery import Calibration
from tests.unit.surgery.models import calibrated, make_teacher


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="package")
def teacher() -> Model:
    return make_teacher()


@pytest.fixture(scope="package")
def calibration(teacher: Model) -> Calibration:
    return calibrated(teacher)
