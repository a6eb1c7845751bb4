"""`plugins`: modules of a person's own, and what is refused of them with a clear error and exit status 2."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caramba.artifacts.across_runs.compare import manifest_differences
from caramba.artifacts.across_runs.gather import read_rows
from caramba.cli import main
from caramba.config.extension import NodeConfig, parse_node
from caramba.config.plugins import PluginConfig, activate, read_source, use_plugins
from caramba.errors import ConfigError
from caramba.model.topology import build_node
from caramba.runs.manifest import check_plugins, plugin_sources

PLUGIN = Path(__file__).parents[2] / "plugin"
SITE = (
    "--config-dir",
    str(PLUGIN / "site"),
    "model=gated_conv",
    "train=pretrain",
    "benchmark=none",
    "device=cpu",
)
HEAD = """from typing import Literal
from caramba.config import LayerConfig
from caramba.config.topology import TopologyConfig
from caramba.config.layer import SwiGLULayerConfig
"""
GOOD = (
    HEAD
    + """
class FooLayerConfig(LayerConfig):
    target = "{impl}:Foo"
    decoding = "per_token"
    type: Literal["FooLayer"] = "FooLayer"
    d_model: int
    def parameter_shapes(self):
        return {}
"""
)
_numbers = itertools.count()


@pytest.fixture(name="write")
def _write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a module of a name that no other test uses into the current folder, and forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    names: list[str] = []

    def write(text: str, **words: str) -> str:
        name = f"plugin_under_test_{next(_numbers)}"
        for word, value in words.items():
            text = text.replace("{" + word + "}", value)
        Path(f"{name}.py").write_text(text)
        names.append(name)
        return name

    yield write
    activate(())
    for name in names:
        sys.modules.pop(name, None)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a launch that is refused says; nothing is written."""
    before = set(Path.cwd().iterdir())
    assert main(["launch", *words]) == 2
    assert {file for file in Path.cwd().iterdir() if file.name != "__pycache__"} <= before
    return capsys.readouterr().err


def good(write: Callable[..., str]) -> str:
    return write(GOOD, impl=write("from torch import nn\nclass Foo(nn.Module):\n    pass\n"))


def test_a_type_is_known_while_a_manifest_is_read_that_names_its_module(write: Callable[..., str]) -> None:
    name = good(write)
    frozen = use_plugins({"plugins": [name]})
    assert frozen == [{"module": name, "folder": str(Path.cwd())}]
    assert NodeConfig.registry["FooLayer"].__module__ == name
    use_plugins({})
    assert "FooLayer" not in NodeConfig.registry


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "adds no layer"),
        ("import os\n\n1 / 0\n", r"cannot be imported: ZeroDivisionError: .*\.py:3\)"),
        ("def f(:\n", r"cannot be imported: SyntaxError: .*\.py:1\)"),
        ("import nowhere_to_be_found\n", r"No module named 'nowhere_to_be_found' \(.*\.py:1\)"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        (
            GOOD.replace("FooLayer", "RMSNormLayer"),
            "RMSNormLayerConfig answers to type 'RMSNormLayer', which caramba",
        ),
        (
            GOOD.replace('    target = "{impl}:Foo"\n', ""),
            r"FooLayerConfig has no target of its own; .*\.py:6\)",
        ),
        (GOOD.replace("{impl}:Foo", "no colon"), "is not 'module:Class'"),
        (GOOD.replace("{impl}", "no_module_at_all"), "there is no module no_module_at_all"),
        (GOOD.replace("{impl}:Foo", "torch.nn:Linaer").replace("torch.nn", "json"), "has no Linaer"),
        (
            GOOD.replace("{impl}:Foo", "json:dumps"),
            r"is a function \(.*expected a subclass of torch.nn.Module",
        ),
        (GOOD.replace("{impl}:Foo", "json.decoder:JSONDecoder"), "is a class without a base"),
        (
            GOOD.replace('Literal["FooLayer"]', "str"),
            r'needs its type by name; add type: Literal\["FooLayer"\]',
        ),
        (GOOD.replace("def parameter_shapes", "def other"), r"does not define parameter_shapes\(\)"),
        (GOOD.replace("d_model", "width"), "has no field d_model and does not define infer"),
        (
            GOOD.replace('"per_token"', '"sometimes"'),
            "decoding = 'sometimes'; expected one of per_token, cached, refused",
        ),
        (GOOD.replace('"per_token"', '"cached"'), r"does not define cached_streams\(\)"),
        (
            GOOD.replace("(LayerConfig)", "(TopologyConfig)").replace('    decoding = "per_token"\n', ""),
            "is a topology, and plugins add layers",
        ),
        (GOOD.replace("(LayerConfig)", "(SwiGLULayerConfig)"), "is made from SwiGLULayerConfig"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    impl = write("from torch import nn\nclass Foo(nn.Module):\n    pass\n")
    name = write(text, impl=impl)
    said = refused(capsys, f"plugins=[{name}]")
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(said)
    assert f"plugins[0]={name}: " in said
    assert "(command line: plugins=" in said


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plugins=[nowhere_at_all]", "there is no module nowhere_at_all: it is not in "),
        (
            "plugins=[my-pkg/layers.py]",
            "is not the name of a module; write it as Python imports it, such as my_pkg.layers",
        ),
        (
            "plugins=[../mine/layers.py]",
            "write {module: layers, folder: ../mine}, or layers and start the command",
        ),
        ("plugins=[class]", "is not the name of a module"),
        ("plugins=[caramba.layer]", "is a part of caramba"),
        ("plugins=json", "expected a list of modules, got 'json'; write plugins=[json]"),
        ("plugins=[3]", "expected the name of a module, got 3"),
        ("plugins={a: 1}", "expected a list of modules, got a mapping"),
        ("plugins=[json,json]", "names json twice"),
        ("plugins=[{_target_: os.system}]", "_target_ would run code"),
        ("plugins=[{module: json, folder: /nowhere}]", "folder=/nowhere has no json.py"),
        ("plugins=[{module: json, path: x}]", "unknown key"),
    ],
)
def test_what_names_no_module_is_refused(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert message in refused(capsys, word)


def test_two_plugins_with_one_type_are_refused(write: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = good(write), good(write)
    assert f"{second} and {first} both have a layer of type 'FooLayer'" in refused(
        capsys, f"plugins=[{first},{second}]"
    )


@pytest.mark.parametrize("how", ["words", "folder", "file"])
def test_nothing_is_imported_for_an_agent(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    name = write("raise RuntimeError('this ran')\n")
    words = [f"plugins=[{name}]", "origin=agent"]
    if how == "folder":
        Path("site/experiment").mkdir(parents=True)
        text = f"# @package _global_\norigin: agent\nplugins: [{name}]\n"
        Path("site/experiment/mine.yaml").write_text(text)
        words = ["--config-dir", "site", "experiment=mine"]
    if how == "file":
        Path("mine.yaml").write_text(f"name: x\norigin: agent\nplugins: [{name}]\n")
        words = ["manifest=mine.yaml"]
    said = refused(capsys, *words)
    assert "may not name plugins" in said
    assert "this ran" not in said
    assert name not in sys.modules


def test_fields_of_a_node_are_placed_as_those_of_a_built_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PLUGIN)
    monkeypatch.setattr(sys, "path", sys.path[:])
    node = "model.topology.layers.0.layers.0.layers.1"
    words = (*SITE, "plugins=[gated_conv]")
    assert f"command line: {node}.kernel=0" in refused(capsys, *words, f"{node}.kernel=0")
    assert "did you mean 'kernel'?" in refused(capsys, *words, f"{node}.kernl=2")
    assert "expects width 32, got 64" in refused(capsys, *words, f"{node}.d_model=32")
    said = refused(capsys, *SITE)
    assert "name its module in plugins" in said
    assert "gated_conv.yaml:13" in said


def test_a_plan_counts_what_a_layer_declares_and_marks_what_it_does_not(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = good(write)
    words = ["model=tiny", "train=pretrain", "benchmark=none", "--json"]
    node = "model.topology.layers.1={type: FooLayer, d_model: 128}"
    assert main(["compile", *words, f"plugins=[{name}]", node]) == 0
    student = json.loads(capsys.readouterr().out)["student"]
    assert student["flops_per_token"] is None
    assert student["undeclared"] == {"flops": ["FooLayer"], "activations": ["FooLayer"], "cache": []}
    monkeypatch.chdir(PLUGIN)
    assert main(["compile", *SITE, "plugins=[gated_conv]", "--json"]) == 0
    student = json.loads(capsys.readouterr().out)["student"]
    assert student["params_per_part"]["GatedConvLayer"] == 2 * (64 * 64 + 64 * 3)
    assert student["undeclared"] == {"flops": [], "activations": [], "cache": []}
    assert student["kv_elements_per_token"] == 2 * (64 + 2 * 2 * 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("    def infer(self, width):\n        return 3\n", "returned 3, expected a Cost"),
        ("    def infer(self, width):\n        return 1 / 0\n", r"ZeroDivisionError: .*\.py:14\)"),
        (
            "    def parameter_shapes(self):\n        return [3]\n",
            "returned \\[3\\], expected names and sizes",
        ),
    ],
)
def test_what_a_layer_declares_is_held_against_itself(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    impl = write("from torch import nn\nclass Foo(nn.Module):\n    pass\n")
    name = write(GOOD + change, impl=impl)
    node = "model.topology.layers.1={type: FooLayer, d_model: 128}"
    said = refused(capsys, "model=tiny", "train=pretrain", f"plugins=[{name}]", node)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(said)
    assert "model.topology.layers[1]" in said


def test_a_plan_with_a_plugin_loads_no_torch_and_takes_its_folder_from_where_it_starts() -> None:
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; from caramba.cli import main; "
        f"status = main(['compile', *{list(SITE)!r}, 'plugins=[gated_conv]']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GatedConvLayer" in done.stdout


def test_the_schema_has_the_types_of_plugins_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PLUGIN)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["schema", "--json", "plugins=[gated_conv]"]) == 0
    definitions = json.loads(capsys.readouterr().out)["$defs"]
    assert definitions["Node"]["discriminator"]["mapping"]["GatedConvLayer"] == "#/$defs/GatedConvLayerConfig"
    assert main(["schema", "--json"]) == 0
    assert "GatedConvLayer" not in capsys.readouterr().out


def test_the_source_of_a_plugin_is_what_it_and_its_targets_import_beside_it(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("unrelated.py").write_text("x = 1\n")
    helper = write("x = 1\n")
    impl = write(f"def late():\n    import {helper}\nfrom torch import nn\nclass Foo(nn.Module):\n    pass\n")
    name = write(GOOD, impl=impl)
    use_plugins({"plugins": [name]})
    source = read_source(name)
    assert set(source.files) == {f"{item}.py" for item in (helper, impl, name)}
    Path(f"{helper}.py").write_text("x = 2\n")
    assert read_source(name).identity != source.identity
    monkeypatch.chdir(PLUGIN)
    use_plugins({"plugins": ["gated_conv"]})
    files = read_source("gated_conv").files
    assert set(files) == {f"gated_conv/{item}.py" for item in ("__init__", "schema", "layers")}


def test_a_target_brings_no_types_of_its_own_into_other_manifests(write: Callable[..., str]) -> None:
    other = write(GOOD.replace("Foo", "Dropout"), impl="nowhere")
    impl = write(
        f"import {other}\nfrom torch import nn\nclass Foo(nn.Module):\n    def forward(self, x, ctx=None):\n        return x\n    def __init__(self, config):\n        super().__init__()\n"
    )
    name = write(GOOD, impl=impl)
    before = dict(NodeConfig.registry)
    use_plugins({"plugins": [name]})
    build_node(parse_node({"type": "FooLayer", "d_model": 4}))
    assert other in sys.modules
    use_plugins({})
    assert NodeConfig.registry == before


def test_runs_of_one_process_are_all_of_the_source_that_was_imported(write: Callable[..., str], tmp_path: Path) -> None:
    impl = write("from torch import nn\nclass Foo(nn.Module):\n    pass\n")
    name = write(GOOD, impl=impl)
    use_plugins({"plugins": [name]})
    manifest: Any = SimpleNamespace(plugins=(PluginConfig(module=name),))
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
    check_plugins(tmp_path / "a", manifest)
    check_plugins(tmp_path / "b", manifest)
    assert (
        plugin_sources(tmp_path / "a")
        == plugin_sources(tmp_path / "b")
        == {f"source of {name}": read_source(name).identity[:12]}
    )
    Path(f"{impl}.py").write_text("from torch import nn\nclass Foo(nn.Linear):\n    pass\n")
    with pytest.raises(ConfigError, match="has changed since this command imported it"):
        check_plugins(tmp_path / "b", manifest)
    for run, identity in (("a", "1" * 64), ("b", "2" * 64)):
        (tmp_path / run / "sources.json").write_text(json.dumps({f"plugin {name}": {"identity": identity}}))
        (tmp_path / run / "manifest.json").write_text("{}")
    assert manifest_differences(tmp_path / "a", tmp_path / "b") == [f'source of {name}: "{"1" * 12}" -> "{"2" * 12}"']
    (tmp_path / "a" / "overrides.txt").write_text("x=1\n")
    (row,) = read_rows(tmp_path, [tmp_path / "a"])
    assert row.words == {"x": "1", f"source of {name}": "1" * 12}
