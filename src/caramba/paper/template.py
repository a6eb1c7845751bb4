"""The prompt of the language model: its task, the rules that code enforces, and the LaTeX that it may write."""

from __future__ import annotations

from typing import Any

from caramba.config.paper import PaperConfig
from caramba.paper.document import TITLES
from caramba.paper.evidence import Evidence
from caramba.paper.vocabulary import MATH_ENVIRONMENTS, OPERATIONS, PROSE_COMMANDS, PROSE_ENVIRONMENTS

_KINDS = {
    "paper": "a conference paper",
    "arxiv": "a preprint with room for detail",
    "technical_report": "a technical report: plain, complete, without claims of novelty",
}

RULES = r"""You write the sections of a paper from the artifacts of one finished experiment. Code checks every section
that you hand in, compiles the paper, and refuses what does not hold. Rules:
1. Numbers. Write no digits and no number words for anything measured, set or counted. \result{KEY} prints a
measured value with its dispersion and unit, \resultvalue{KEY} the value alone, \setting{PATH} a setting,
\derived{ratio|difference|percent_change}{KEY}{KEY} a number computed from two results. Digits may be in names
that the manifest or a cited title holds, and are indices in formulas. A number of another work is
\citednumber{CITATION}{VALUE}, and must be in that work's abstract; its year is \citeyear{CITATION}. Values are
separate from each other and from other digits; a formula holds at most one number between two operators.
2. Claims. Write better, worse, faster or "no loss" only with \claim{KEY}{KEY}{less|more|equal} in the same
sentence: it prints nothing, and code checks that the first result is less or more than the second, or equal,
beyond their dispersion. Report what failed. Numbers marked proxy rest on a teacher that was trained for this
run; write so, and never present them as a published model's.
3. Citations. Search, call add_citation with an id of the results, and cite by the key that it returns.
4. Figures and tables. \artifactfigure{NAME}{CAPTION} and \artifacttable{NAME}, of list_artifacts. Refer to
them by Figure~\ref{fig:NAME} and Table~\ref{tab:caramba-NAME}; to sections by Section~\ref{sec:NAME}.
5. Sections a person edited are marked "human": keep their words.
Hand in sections with write_tex_file or update_section. When every section is accepted and you are content,
answer without a tool call; the paper is then checked once more and kept as a version."""


def template(config: PaperConfig) -> dict[str, Any]:
    """Return the answer of get_paper_template."""
    words = sorted(name for name in PROSE_COMMANDS if name.isalpha() and len(name) > 2)
    return {
        "sections": {name: TITLES[name] for name in config.sections},
        "rules": RULES,
        "commands": words,
        "environments": [*PROSE_ENVIRONMENTS, *sorted(MATH_ENVIRONMENTS)],
        "operations": list(OPERATIONS),
        "example": (
            r"The student reaches a perplexity of \result{perplexity.student.perplexity}, "
            r"\derived{percent_change}{perplexity.student.perplexity}{perplexity.teacher.perplexity} from its teacher "
            r"(Table~\ref{tab:caramba-comparison})."
        ),
    }


def first_messages(config: PaperConfig, evidence: Evidence, state: str) -> list[dict[str, Any]]:
    """Return the beginning of a conversation; `state` is what is written already and its errors."""
    task = [
        f"Write {_KINDS.get(config.paper_type, config.paper_type)} on the experiment {evidence.name!r}.",
        f"Sections: {', '.join(config.sections)}.",
        f"Title: {config.title or evidence.name}.",
    ]
    if config.keywords:
        task.append(f"Keywords to search by: {', '.join(config.keywords)}.")
    if config.citations.enabled:
        task.append(f"Cite at most {config.citations.max_citations} works.")
    if evidence.proxy:
        task.append(f"The teacher is a proxy: {evidence.proxy}.")
    if evidence.failures:
        task.append(f"Failed benchmarks, which the paper must mention: {'; '.join(evidence.failures)}.")
    if config.custom_instructions.strip():
        task.append(config.custom_instructions.strip())
    task.append(state)
    return [{"role": "system", "content": RULES}, {"role": "user", "content": "\n".join(task)}]
