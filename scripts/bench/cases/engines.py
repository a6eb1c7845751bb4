"""Check a run's student of multi-head latent attention in llama.cpp and transformers, and write what they compute.

    python scripts/bench/run.py engines RUN --text FILE --llama-perplexity PROGRAM

Needs transformers, gguf and llama-cpp-python, and the program llama-perplexity of llama.cpp. The text's documents are
separated by `<|endoftext|>`. Counts: 196 windows of 512 tokens (100,352), 20 prompts of 48 tokens, 256 new tokens.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import Record
from torch import Tensor

from caramba.config.topology import attention_configs
from caramba.export.write import export_model
from caramba.infer.model_bundle import ModelBundle, load_model, need_tokenizer
from caramba.model import Model

WINDOW, PROMPT, CELLS = 512, 48, 8192
SEPARATOR = "<|endoftext|>"
TIE = 0.1
"""Greedy tokens may differ where the first two logits of both are closer than this."""


def read_documents(file: Path, bundle: ModelBundle, n_tokens: int) -> tuple[list[str], str, list[int]]:
    """Return the documents, and enough of them joined for `n_tokens`, with the tokens of that text."""
    documents = [item.strip() for item in file.read_text(encoding="utf-8").split(SEPARATOR) if item.strip()]
    tokenizer, text = need_tokenizer(bundle, "engines"), ""
    for document in documents:
        text += document + "\n\n"
        if len(text) > 6 * n_tokens:
            break
    return documents, text, list(tokenizer.encode(text))


@torch.no_grad()
def compare_logits(model: Model, folder: Path, ids: Tensor) -> dict[str, Any]:
    """Compare a DeepSeek folder in transformers with the model, both in float32, and each with the model in float64."""
    import transformers

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder, dtype=torch.float32).eval()
    ours, found = model(ids), theirs(ids).logits
    exact = copy.deepcopy(model).double()(ids)
    each = (found - ours).abs().amax(-1)
    return {
        "version": transformers.__version__,
        "class": type(theirs).__name__,
        "tokens": ids.numel(),
        "largest_difference": float(each.max()),
        "largest_difference_after_first_token": float(each[:, 1:].max()),
        "largest_logit": float(exact.abs().max()),
        "ours_against_float64": float((ours - exact).abs().max()),
        "theirs_against_float64": float((found - exact).abs().max()),
        "both_in_float64": float((theirs.double()(ids).logits - exact).abs().max()),
    }


@torch.no_grad()
def perplexity(model: Model, ids: list[int], windows: int) -> dict[str, Any]:
    """Return the perplexity that llama-perplexity computes: cold windows, counted from the middle of each."""
    total, count = 0.0, 0
    for batch in torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW).split(4):
        logits = model(batch)[:, WINDOW // 2 : -1]
        target = batch[:, WINDOW // 2 + 1 :].flatten()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="none")
        total, count = total + float(losses.double().sum()), count + losses.numel()
    return {"perplexity": math.exp(total / count), "tokens": windows * WINDOW, "counted": count}


def llama_perplexity(program: str, file: Path, text: Path, windows: int, threads: int) -> dict[str, Any]:
    """Run llama.cpp's own tool."""
    words = [program, "-m", str(file), "-f", str(text), "-c", str(WINDOW), "-b", str(4 * WINDOW)]
    words += ["--chunks", str(windows), "-t", str(threads)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout)
    if found is None:
        raise SystemExit(f"{program} printed no estimate:\n{done.stdout[-2000:]}")
    options = " ".join(words[5:])
    return {"options": options, "perplexity": float(found[1]), "standard_error": float(found[2])}


class LlamaCpp:
    """llama.cpp through llama-cpp-python, on the CPU, with the lines that it logs."""

    def __init__(self, file: Path, n_ctx: int, threads: int, **options: Any) -> None:
        import llama_cpp

        self.lines: list[str] = []

        def keep(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
            self.lines.append(text.decode(errors="replace"))

        self._callback = llama_cpp.llama_log_callback(keep)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        self.version = llama_cpp.__version__
        self.engine: Any = llama_cpp.Llama(str(file), n_ctx=n_ctx, n_threads=threads, verbose=True, **options)

    def cache(self) -> dict[str, Any]:
        """Return the size of the cache that it allocated."""
        line = re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells.*", "".join(self.lines))
        if line is None:
            raise SystemExit("llama.cpp printed no size of its cache")
        return {"line": line[0], "bytes_per_token": float(line[1]) * 2**20 / int(line[2])}

    def greedy(self, prompt: list[int], n_tokens: int) -> tuple[list[int], Tensor]:
        """Return the most likely continuation and the logits after each token but the last."""
        self.engine.reset()
        self.engine.eval(prompt)
        text: list[int] = []
        for _ in range(n_tokens):
            if text:
                self.engine.eval(text[-1:])
            text.append(int(self.engine.scores[self.engine.n_tokens - 1].argmax()))
        return text, torch.from_numpy(self.engine.scores[: self.engine.n_tokens].copy())


@torch.no_grad()
def compare_greedy(model: Model, llama: LlamaCpp, prompts: list[list[int]], n_tokens: int) -> dict[str, Any]:
    """Compare every greedy token of llama.cpp with the model's choice after the same text."""
    ties: list[dict[str, Any]] = []
    n_equal, largest = 0, 0.0
    for index, prompt in enumerate(prompts):
        text, theirs = llama.greedy(prompt, n_tokens)
        ours = model(torch.tensor([prompt + text]))[0, :-1]
        largest = max(largest, float((ours - theirs).abs().max()))
        rows, engine = ours[len(prompt) - 1 :], theirs[len(prompt) - 1 :]
        places = (rows.argmax(-1) != torch.tensor(text)).nonzero().flatten().tolist()
        n_equal += not places
        for place in places:
            token, best = text[place], int(rows[place].argmax())
            gaps = (
                float(rows[place, best] - rows[place, token]),
                float(engine[place, token] - engine[place, best]),
            )
            ties.append({"prompt": index, "at": place, "gap_ours": gaps[0], "gap_llama": gaps[1]})
    is_tie = [max(tie["gap_ours"], tie["gap_llama"]) < TIE for tie in ties]
    return {
        "prompts": len(prompts),
        "new_tokens": n_tokens,
        "equal_prompts": n_equal,
        "differing_tokens": ties,
        "all_differing_are_ties": all(is_tie),
        "tie_below": TIE,
        "largest_difference_of_logits": largest,
    }


OPTIONS = "run --text= --llama-perplexity= --windows=196 --prompts=20 --new-tokens=256"


def run(args: argparse.Namespace, record: Record) -> None:
    start, threads = time.monotonic(), torch.get_num_threads()
    bundle = load_model(args.run)
    model = bundle.model.eval()
    documents, text, ids = read_documents(Path(args.text), bundle, args.windows * WINDOW)
    layers = attention_configs(model.spec.topology)
    record.start(model=model.spec.name, layers=len(layers))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for format in ("gguf", "deepseek"):
            export_model(bundle, folder / format, format=format, role="student")
        (file,) = (folder / "gguf").glob("*.gguf")
        (folder / "text.txt").write_text(text, encoding="utf-8")
        found = compare_logits(model, folder / "deepseek", torch.tensor(ids[:1024]).view(4, 256))
        record.save(gguf_bytes=file.stat().st_size, transformers=found)
        llama = LlamaCpp(file, CELLS, threads)
        cache = llama.cache() | {"ours_bytes_per_token": sum(2 * layer.dims().cached for layer in layers)}
        theirs = llama.engine.tokenize(text.encode(), add_bos=False, special=False)
        tokens = {"ours": len(ids), "llama": len(theirs), "equal": theirs == ids}
        record.save(llama_cpp_python=llama.version, cache=cache, tokens=tokens)
        llama.engine.close()
        own = perplexity(model, ids, args.windows)
        tool = llama_perplexity(args.llama_perplexity, file, folder / "text.txt", args.windows, threads)
        relative = tool["perplexity"] / own["perplexity"] - 1
        record.save(perplexity={"ours": own, "llama": tool, "relative": relative})
        step = max(1, len(documents) // args.prompts)
        tokenizer = need_tokenizer(bundle, "engines")
        prompts = [list(tokenizer.encode(item))[:PROMPT] for item in documents[::step][: args.prompts]]
        llama = LlamaCpp(file, PROMPT + args.new_tokens, threads, logits_all=True)
        record.save(greedy=compare_greedy(model, llama, prompts, args.new_tokens))
    record.save(seconds=round(time.monotonic() - start, 1))
    print(json.dumps(record.data, indent=2))
