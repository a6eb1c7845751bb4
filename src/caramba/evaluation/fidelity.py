"""How much the student loses: delta = student NLL - teacher NLL, ratio = student perplexity / teacher perplexity."""

from __future__ import annotations

import torch

from caramba.config.verify import FidelityVerifyConfig
from caramba.data import Tokenizer, Windows
from caramba.evaluation.other_text import check_other_texts, label_of, open_other_text
from caramba.infer.agreement import Agreement, agreement
from caramba.model import Model
from caramba.result import Check


def fidelity(
    teacher: Model,
    student: Model,
    dataset: Windows,
    config: FidelityVerifyConfig,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
) -> tuple[Check, ...]:
    """Measure both models on the same disjoint windows, over all tokens and by position in the window.

    A student that loses what is far back has a ratio that grows with the position, which short windows hide; one that
    fits the training text has a larger ratio on the other texts of the config.
    Shape: items of `dataset` are (x [T], y [T]) int64.
    """
    windows = config.batches * config.batch_size

    def measure(text: Windows) -> Agreement:
        return agreement(teacher, student, text, windows=windows, batch_size=config.batch_size, device=device)

    found = measure(dataset)
    bins = found.by_position
    others: list[Check] = []
    for name in check_other_texts(config.texts, tokenizer):
        text = open_other_text(
            name,
            dataset,
            tokenizer,
            vocab_size=teacher.spec.embedder.vocab_size,
            block_size=config.block_size,
            windows=windows,
        )
        others += _on_text(label_of(name), measure(text))
    return (
        Check("window_tokens", float(config.block_size), None, "tokens"),
        Check("delta_nll", found.delta_nll, config.max_delta_nll, "nats"),
        Check("ppl_ratio", found.ppl_ratio, config.max_ppl_ratio, "ratio"),
        Check("kl", found.kl, config.max_kl, "nats"),
        Check("top1_agreement", found.top1, config.min_top1_agreement, "share", is_minimum=True),
        *(Check(f"ppl_ratio_at_{one.start}_{one.end}", one.ppl_ratio, None, "ratio") for one in bins),
        *(Check(f"kl_at_{one.start}_{one.end}", one.kl, None, "nats") for one in bins),
        *(Check(f"top1_agreement_at_{one.start}_{one.end}", one.top1, None, "share") for one in bins),
        *others,
    )


def _on_text(label: str, found: Agreement) -> list[Check]:
    values = (("ppl_ratio", found.ppl_ratio), ("kl", found.kl), ("top1_agreement", found.top1))
    units = {"ppl_ratio": "ratio", "kl": "nats", "top1_agreement": "share"}
    return [
        *(Check(f"{key}_on_{label}", value, None, units[key]) for key, value in values),
        *(
            Check(f"ppl_ratio_on_{label}_at_{one.start}_{one.end}", one.ppl_ratio, None, "ratio")
            for one in found.by_position
        ),
    ]
