"""`caramba init DIR`: a project folder with a configuration, a layer, its test, and a single-file manifest."""

from __future__ import annotations

from pathlib import Path

from caramba.errors import ConfigError
from caramba.launch.overrides import parse_argv
from caramba.runs.files import write_whole

LAYERS = '''"""Schemas of the layers of this project. They need no torch, so that plans stay fast."""

from typing import Literal

from caramba.config import LayerConfig, Positive


class ScaleLayerConfig(LayerConfig):
    """Multiply each feature by a learned gain. A topology names it as `type: ScaleLayer`."""

    target = "my_modules:Scale"  # the torch module, imported when a model is built
    decoding = "per_token"  # a token needs no other token, so decoding needs no cache
    type: Literal["ScaleLayer"] = "ScaleLayer"
    d_model: Positive

    def parameter_shapes(self):  # counted by plans, and compared with the module
        return {"weight": (self.d_model,)}

    def macs_per_token(self):  # multiply-adds, for FLOPs and MFU
        return self.d_model
'''
MODULES = '''"""The torch modules of this project's layers."""

import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def reset_parameters(self):  # called with the seed of the run
        nn.init.ones_(self.weight)

    def forward(self, x, ctx=None):  # [B, T, M] to [B, T, M]
        return x * self.weight
'''
TOPOLOGY = """\
embedder: {vocab_size: 1024, d_model: 64}
topology:
  type: StackedTopology
  layers:
    - type: NestedTopology # a block, repeated
      repeat: 2
      layers:
        - type: ResidualTopology # x + f(x)
          layers:
            - {type: RMSNormLayer, d_model: 64}
            - {type: AttentionLayer, mode: gqa, d_model: 64, n_heads: 2, n_kv_heads: 1, head_dim: 32}
            - {type: ScaleLayer, d_model: 64} # of my_layers.py
        - type: ResidualTopology
          layers:
            - {type: RMSNormLayer, d_model: 64}
            - {type: SwiGLULayer, d_model: 64, d_ff: 128}
    - {type: RMSNormLayer, d_model: 64}
head: {tied: true} # the output uses the embedding's weights
"""
MODEL = f"# model=scaled: two blocks, each with a learned gain after attention.\nname: scaled\n{TOPOLOGY}"
EXPERIMENT = """\
# @package _global_
# experiment=mine: everything that one run needs. The command line still overrides each key.
defaults:
  - override /model: scaled
  - override /train: pretrain
  - override /data: stdlib # your own text: data=tokens data.path=FOLDER, made by `caramba prepare text`
  - override /benchmark: smoke # perplexity, latency and memory, each small
  - override /verify: none # checks against a teacher; this model has none
plugins: [my_layers]
data: {vocab_size: 1024, max_bytes: 2000000}
train:
  steps: 200
  batch_size: 8
  block_size: 128
  lr: 1.0e-3
settings: {eval_iters: 50, save_every: 50} # steps between held-out losses, and between resumable states
"""
MANIFEST = (
    """\
# A whole experiment in one file: caramba run experiment.yaml
# `caramba schema` lists every key. Values of `vars` are used as ${NAME}.
version: 1
name: scaled_file
plugins: [my_layers]
vars: {steps: 200}
settings: {eval_iters: 50, save_every: 50}
model:
  name: scaled
"""
    + "".join(f"  {line}\n" for line in TOPOLOGY.splitlines())
    + """\
groups: # of runs on one data set, in order
  - name: main
    data: {type: stdlib, tokenizer: bpe, vocab_size: 1024, max_bytes: 2000000}
    runs:
      - id: pretrain
        train: {phase: pretrain, steps: "${steps}", batch_size: 8, block_size: 128, lr: 1.0e-3, warmup_steps: 10}
    benchmarks:
      - id: held_out
        models: [student]
        config: {type: perplexity, block_size: 128, num_batches: 4, batch_size: 8}
"""
)
TEST = '''"""Run with `pytest` in this folder."""

from pathlib import Path

import torch

import caramba
from my_layers import ScaleLayerConfig
from my_modules import Scale

HERE = Path(__file__).parent


def test_layer_scales_each_feature():
    layer = Scale(ScaleLayerConfig(d_model=4))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x), x * torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_plan_counts_the_weights_of_the_layer(monkeypatch):
    monkeypatch.chdir(HERE)
    plan = caramba.compile(["experiment=mine"], config_dirs=["conf"])
    without = caramba.compile(["experiment=mine", "model=tiny"], config_dirs=["conf"])
    assert plan.parameters != without.parameters
    assert "ScaleLayer" in plan.manifest.model_dump_json()


def test_file_is_a_manifest(monkeypatch):
    monkeypatch.chdir(HERE)
    assert caramba.compile(manifest="experiment.yaml").manifest.name == "scaled_file"
'''
IGNORE = "runs/\n.caramba/\n__pycache__/\n"
FILES = {
    "conf/model/scaled.yaml": MODEL,
    "conf/experiment/mine.yaml": EXPERIMENT,
    "experiment.yaml": MANIFEST,
    "my_layers.py": LAYERS,
    "my_modules.py": MODULES,
    "test_project.py": TEST,
    ".gitignore": IGNORE,
}


def main(argv: list[str]) -> int:
    """Write the project, and print what to do with it.

    Raises:
        ConfigError: no folder or several, or a file that is there already; nothing is written then.
    """
    words = parse_argv(argv).overrides
    if len(words) != 1:
        raise ConfigError("init: give one folder, such as `caramba init my_project`")
    folder = Path(words[0]).expanduser()
    taken = [name for name in FILES if (folder / name).exists()]
    if taken or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"init: {folder} has {', '.join(taken)} already; give a new folder"
            if taken
            else f"init: {folder} is a file; give a folder"
        )
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, text)
        print(f"  {folder / name}")
    print(
        f"\ncd {folder}\n"
        "pytest                                        # the test of the layer\n"
        "caramba compile --config-dir conf experiment=mine   # the plan\n"
        "caramba launch --config-dir conf experiment=mine    # train; runs/ has the report\n"
        "caramba run experiment.yaml                   # the same as one file"
    )
    return 0
