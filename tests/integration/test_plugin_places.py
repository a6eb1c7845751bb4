"""Where a plugin's source may lie and how it may change: installed editable, in two folders, between two sweeps."""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from caramba.runs.sweeps import read_sweep
from tests.integration.commands import FORKS, TIMEOUT_S, caramba, environment, served
from tests.integration.test_plugins import PLUGIN, WORDS, runs_of

TRAIN = (*WORDS, "train.steps=2", "benchmark=none")
PROMPT = ("--prompt", "def area(", "--max-new-tokens", "4", "--temperature", "0")
PROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "gated-conv"
version = "0.3"
[tool.setuptools]
packages = ["gated_conv"]
package-dir = {{ "gated_conv" = "{place}" }}
"""


def copied(name: str, folder: Path, *, activation: str = "silu") -> Path:
    """Copy the example package under another name, with another activation."""
    shutil.copytree(PLUGIN / "gated_conv", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.glob("*.py"):
        file.write_text(file.read_text().replace("gated_conv", name).replace("F.silu", f"F.{activation}"))
    return folder


def changed(folder: Path, old: str, new: str) -> None:
    source = folder / "layers.py"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Path:
    """A folder to start commands in, with the group that uses the plugin and without the plugin."""
    shutil.copytree(PLUGIN / "site", tmp_path / "here" / "site")
    return tmp_path / "here"


def installed_editable(project: Path, folder: Path) -> Path:
    """Make a virtual environment that has what this one has, and the project; return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "shared.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in places))
    words = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--editable",
        str(project),
    ]
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return own


@pytest.mark.parametrize("place", ["src/gated_conv", "layers_of_mine"])
def test_an_editable_package_is_found_from_anywhere_and_held_by_its_source(
    place: str, here: Path, tmp_path: Path, cache: Path
) -> None:
    """Trap: of a package that lies in a folder of another name no file was found, so that none was held."""
    project = tmp_path / "project"
    package = copied("gated_conv", project / place)
    (project / "pyproject.toml").write_text(PROJECT.format(place=place))
    own = installed_editable(project, tmp_path / "env")

    def ran(*words: str, folder: Path = here) -> subprocess.CompletedProcess[str]:
        if FORKS:  # what an interpreter does with its site-packages as it starts
            return caramba(words, folder, cache, preexec_fn=functools.partial(site.addsitedir, str(own)))
        command = [tmp_path / "env/bin/python", "-m", "caramba", *words]
        return subprocess.run(
            command, cwd=folder, env=environment(cache), capture_output=True, text=True, timeout=TIMEOUT_S
        )

    done = ran(*TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs_of(here)
    held = json.loads((run / "sources.json").read_text())["plugin gated_conv"]
    assert set(held["files"]) == {f"gated_conv/{name}.py" for name in ("__init__", "schema", "layers")}
    found = json.loads((run / "manifest.json").read_text())["plugins"][0]["folder"]
    is_mapped = Path(place).name != "gated_conv"
    assert (found, held.get("version")) == ((None, "0.3") if is_mapped else (str(project / "src"), None))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if is_mapped:
        made = ran("generate", str(run), *PROMPT, folder=elsewhere)
        assert made.returncode == 0, made.stderr
        assert "other source" not in made.stderr
    changed(package, "F.silu", "F.gelu")
    if is_mapped:
        made = ran("generate", str(run), *PROMPT, folder=elsewhere)
        assert "other source than it was trained with: plugin gated_conv: gated_conv/layers.py" in made.stderr
    refused = ran("resume", str(run), folder=elsewhere)
    assert refused.returncode == 2
    assert "has changed since this run began: gated_conv/layers.py SHA-256" in refused.stderr


def test_a_sweep_over_plugins_is_not_carried_on_with_other_source(here: Path, cache: Path) -> None:
    """Trap: the same command skipped the points that had finished, and so gave the numbers of the former layer."""
    first = copied("conv_a", here / "conv_a")
    copied("conv_b", here / "conv_b", activation="gelu")
    shared = [word for word in TRAIN if word not in ("launch", "plugins=[gated_conv]")]
    words = ["-m", *shared, "plugins=[conv_a],[conv_b]"]
    done = caramba(words, here, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = here.glob("runs/*/sweeps/*")
    runs = [run for point in read_sweep(folder).points if (run := read_sweep(folder).run_of(point))]
    for run, name in zip(runs, ("conv_a", "conv_b"), strict=True):
        assert f"plugin {name}" in json.loads((run / "sources.json").read_text())
    table = caramba(["collect", str(folder)], here, cache).stdout
    assert "[conv_b]" in table
    assert "source of" not in table, "the name of the plugin tells the points apart"

    changed(first, "F.silu", "F.relu")
    for again in (words, ["resume", str(folder)]):
        refused = caramba(again, here, cache)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert f"the source of plugins has changed since {runs[0]} of this sweep began" in refused.stderr
        assert "plugin conv_a: conv_a/layers.py SHA-256" in refused.stderr
    assert len(runs_of(here)) == 2
    anew = caramba([*words, "resume=never"], here, cache)
    assert anew.returncode == 0, anew.stdout + anew.stderr
    assert "2 of 2 points finished" in anew.stderr
    changed(first, "F.relu", "F.silu")
    assert caramba(["resume", str(folder)], here, cache).returncode == 0
    table = caramba(["collect", str(folder.parents[1])], here, cache).stdout
    assert "source of conv_a" in table, "two runs of one plugin with other source each"


def test_bytecode_of_a_former_version_does_not_run(here: Path, cache: Path) -> None:
    """Trap: two versions of one size and time, as copies that keep their times have: the former ran, under the SHA-256
    of the latter."""
    package = copied("gated_conv", here / "gated_conv")
    writes = {name: value for name, value in environment(cache).items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import gated_conv.layers"], cwd=here, env=writes, check=True)
    assert list(package.glob("__pycache__/layers.*.pyc"))
    source = package / "layers.py"
    times = source.stat()
    changed(package, "F.silu", "F.sulu")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    failed = caramba(TRAIN, here, cache)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "has no attribute 'sulu'" in failed.stderr


def test_the_module_of_the_folder_where_a_run_began_is_the_one_that_runs(here: Path, cache: Path) -> None:
    """Both the current folder and the run's have a gated_conv."""
    copied("gated_conv", here / "gated_conv")
    done = caramba(TRAIN, here, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs_of(here)
    other = here / "other"
    other.mkdir()
    copied("gated_conv", other / "gated_conv", activation="gelu")
    made = caramba(["generate", str(run), *PROMPT], other, cache)
    assert made.returncode == 0, made.stderr
    assert "other source" not in made.stderr
    (here / "gated_conv").rename(here / "away")
    made = caramba(["generate", str(run), *PROMPT], other, cache)
    assert made.returncode == 0, made.stderr
    assert "other source than it was trained with: plugin gated_conv" in made.stderr
    (other / "gated_conv").rename(other / "away")
    lost = caramba(["generate", str(run), *PROMPT], other, cache)
    assert lost.returncode == 2
    assert f"there is no module gated_conv: it is not in {here} or {other}" in lost.stderr


def test_what_opens_a_run_with_a_plugin_does_so_from_another_folder(here: Path, tmp_path: Path, cache: Path) -> None:
    httpx = pytest.importorskip("httpx")
    copied("gated_conv", here / "gated_conv")
    done = caramba(TRAIN, here, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs_of(here)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    planned = caramba(["compile", str(run / "manifest.json")], elsewhere, cache)
    assert planned.returncode == 0, planned.stderr
    assert "GatedConvLayer" in planned.stdout
    asked = caramba(["compile", str(run)], elsewhere, cache)
    assert asked.returncode == 2
    assert f"{run} is a folder; give its manifest.json" in asked.stderr
    made = caramba(["export", str(run), "--format", "safetensors", "--out", "weights"], elsewhere, cache)
    assert made.returncode == 0, made.stderr
    answered = caramba(["chat", str(run), "--max-new-tokens", "4"], elsewhere, cache, input="hello\n")
    assert answered.returncode == 0, answered.stderr
    alone = caramba(["generate", str(run), "--json", *PROMPT], elsewhere, cache)
    assert alone.returncode == 0, alone.stderr
    text = json.loads(alone.stdout)["rows"][0]["text"]

    with served(run, elsewhere, cache) as (_, address):
        (listed,) = httpx.get(f"{address}/v1/models", timeout=60).json()["data"]
        body = {"model": listed["id"], "prompt": "def area(", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == text
