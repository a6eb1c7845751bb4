"""The memory that loading a Hugging Face folder takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

MEMORY = """
import json, sys
from pathlib import Path
import torch
from caramba.model import load_hf_folder
torch.set_num_threads(1)
def status(key):
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields[key].split()[0]) * 1024
small, big, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
load_hf_folder(small, dtype=dtype)  # code, threads and caches
start = status("VmRSS")
model = load_hf_folder(big, dtype=dtype)
print(json.dumps({"bytes": sum(p.nbytes for p in model.parameters()), "peak": status("VmHWM") - start}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_takes_less_than_a_fifth_over_the_model(tmp_path: Path, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, width, depth in (("small", 64, 1), ("big", 1024, 4)):
        config = LlamaConfig(
            vocab_size=8000,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=depth,
            num_attention_heads=16,
            num_key_value_heads=4,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():  # fresh memory may hold numbers that are not finite, which are refused
            torch.nn.init.zeros_(parameter)
        model.save_pretrained(tmp_path / name, max_shard_size="40MB")
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "big"), dtype]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    assert measured["bytes"] > 100e6
    assert 0.9 * measured["bytes"] < measured["peak"] < 1.2 * measured["bytes"], measured
