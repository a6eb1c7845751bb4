"""Byte-level BPE tokenizers between tokenizer.json and the metadata of a GGUF file."""

import json
from collections.abc import Mapping
from typing import Any

from caramba.data.tokenizer import BYTE_LEVEL, CL100K, QWEN, bpe_definition, split_step, token_entry
from caramba.errors import ConfigError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens, as GGUF numbers them."""

PATTERNS = {"llama-bpe": CL100K, "qwen2": QWEN}
"""Regular expressions that split text before merges, by the names that GGUF gives them."""
READS = ("gpt-2", "smollm", *PATTERNS)


def tokenizer_metadata(definition: Mapping[str, Any], vocab_size: int, eos_id: int, where: str) -> dict[str, Any]:
    """Return the GGUF keys of a tokenizer.json: `model`, `pre`, `tokens`, `token_type`, `merges`.

    The vocabulary is filled up with unused entries to the model's `vocab_size`.

    Raises:
        ConfigError: GGUF has no name for how this tokenizer splits text.
    """
    model = definition.get("model", {})
    kind = model.get("type", "BPE")
    falls_back = bool(model.get("byte_fallback")) and _has_byte_tokens(definition)
    if kind != "BPE" or falls_back:
        raise ConfigError(
            f"{where}: GGUF cannot hold its tokenizer: a byte-level BPE is expected, got {kind}"
            f"{' with byte_fallback' if falls_back else ''}; convert the folder with llama.cpp's own "
            "convert_hf_to_gguf.py, or export --format hf"
        )
    merges = [item if isinstance(item, str) else " ".join(item) for item in model.get("merges", ())]
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, index in model.get("vocab", {}).items():
        tokens[index], kinds[index] = token, NORMAL
    for item in definition.get("added_tokens", ()):
        tokens[item["id"]] = item["content"]
        kinds[item["id"]] = CONTROL if item.get("special") else USER_DEFINED
    kinds[eos_id] = CONTROL
    pre = _split_name(definition, has_merges=bool(merges), where=where)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}


def _splits(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    split = definition.get("pre_tokenizer") or {}
    return split.get("pretokenizers", []) if split.get("type") == "Sequence" else [split]


def _has_byte_tokens(definition: Mapping[str, Any]) -> bool:
    """Whether a fallback to tokens of bytes can apply: not in a byte-level BPE without tokens such as <0x0A>."""
    is_byte_level = any(step.get("type") == "ByteLevel" for step in _splits(definition)[-1:])
    vocab = definition.get("model", {}).get("vocab", {})
    return not is_byte_level or any(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _split_name(definition: Mapping[str, Any], *, has_merges: bool, where: str) -> str:
    """Return GGUF's name of how a tokenizer splits text before its merges."""
    normalizer = definition.get("normalizer") or {}
    normalizer = None if normalizer.get("normalizers") == [] else normalizer.get("type")  # a sequence of none
    steps = _splits(definition)
    kinds = [step.get("type") for step in steps]
    is_byte_level = bool(kinds) and kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space")
    uses_regex = is_byte_level and steps[-1].get("use_regex", True)
    found = None
    if is_byte_level and not has_merges:
        found = "gpt-2"  # without merges every byte is a token, however the text is split
    elif kinds == ["ByteLevel"] and uses_regex:
        found = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0].get("individual_digits"):
        found = "smollm"
    elif kinds == ["Split", "ByteLevel"] and is_byte_level and not uses_regex:
        pattern = steps[0].get("pattern", {}).get("Regex")
        found = next((name for name, text in PATTERNS.items() if text == pattern), None)
    if found is None or normalizer not in (None, "NFC"):
        raise ConfigError(
            f"{where}: GGUF has no name for how its tokenizer splits text ({', '.join(map(str, kinds)) or 'nothing'}"
            f"{f', normalizer {normalizer}' if normalizer else ''}); it has names for the tokenizers of GPT-2, SmolLM, "
            "Llama 3 and Qwen 2: use one of them, or export --format hf"
        )
    return found


def tokenizer_definition(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of tokenizer.json, or None for a kind of tokenizer that is not read.

    Args:
        metadata: the keys below `tokenizer.ggml.` of a GGUF file.
    """
    pre = metadata.get("pre", "gpt-2")
    if metadata.get("model") != "gpt2" or pre not in READS:
        return None
    tokens, kinds = metadata["tokens"], metadata.get("token_type") or [NORMAL] * len(metadata["tokens"])
    added = [
        token_entry(index, token, special=kind == CONTROL)
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [merge for merge in metadata.get("merges", ()) if merge.replace(" ", "", 1) in vocab]
    steps: list[dict[str, Any]] = [BYTE_LEVEL]
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]
    elif pre in PATTERNS:
        steps = [split_step(PATTERNS[pre]), BYTE_LEVEL | {"use_regex": False}]
    return bpe_definition(
        vocab,
        merges,
        added=added,
        pre_tokenizer=steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        normalizer={"type": "NFC"} if pre == "qwen2" else None,
        ignore_merges=pre == "llama-bpe",
    )


def tokenizer_files(metadata: Mapping[str, Any], chat_template: str | None) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json by name, nothing for a kind of tokenizer that is not read."""
    definition = tokenizer_definition(metadata)
    if definition is None:
        return {}
    tokens = metadata["tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("add_bos_token", False)),
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        index = metadata.get(f"{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[name] = tokens[index]
    if chat_template:
        config["chat_template"] = chat_template
    return {"tokenizer.json": json.dumps(definition), "tokenizer_config.json": json.dumps(config)}
