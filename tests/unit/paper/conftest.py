"""Fixtures of the paper tests: a finished run, and a configuration that asks the scripted model."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from finished_run import write_run
from tests.paper_servers import LiteratureServer, literature_server

from caramba.config.paper import PaperConfig
from caramba.paper import drafter, gate
from caramba.paper import literature as works
from caramba.paper.compile import Compiled
from caramba.paper.evidence import Evidence, read_evidence


@pytest.fixture(autouse=True)
def _loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any connection beyond this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        assert host in ("127.0.0.1", "::1", "localhost"), f"connects to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to read from."""
    folder = tmp_path_factory.mktemp("paper_run")
    write_run(folder)
    return folder


@pytest.fixture(scope="session")
def evidence(run: Path) -> Evidence:
    return read_evidence(run, run)


@pytest.fixture
def literature(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiteratureServer]:
    """arXiv and Semantic Scholar on loopback."""
    with literature_server() as server:
        monkeypatch.setattr(works, "ARXIV_URL", f"{server.url}/arxiv")
        monkeypatch.setattr(works, "SEMANTIC_SCHOLAR_URL", f"{server.url}/s2")
        yield server


@pytest.fixture
def config() -> Callable[..., PaperConfig]:
    """A small paper by the model at an address: `config(url, title=…)`."""

    def made(url: str = "http://127.0.0.1:9/v1", **keys: Any) -> PaperConfig:
        plain: dict[str, Any] = {
            "model": "scripted",
            "sections": ["abstract", "results"],
            "api": {"base_url": url, "timeout_s": 20.0, **keys.pop("api", {})},
            **keys,
        }
        return PaperConfig.model_validate(plain)

    return made


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A finished run to write into."""
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture
def without_latex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every paper compiles at once: for what is not about LaTeX, whose passes take most of a draft's time."""

    def compiled(files: Mapping[str, bytes]) -> Compiled:
        return Compiled(b"%PDF of " + files["paper.tex"], None)

    monkeypatch.setattr(gate, "compile_paper", compiled)
    monkeypatch.setattr(drafter, "unknown_digits", lambda *arguments: None)
    monkeypatch.setattr(drafter, "need_latex", lambda where: None)
