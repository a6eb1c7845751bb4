"""Deterministic checks of a paper against its run. Each finding has a stable id and cites a section or a result key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from caramba.paper.evidence import Evidence, Result

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\])|\n[ \t]*\n")
_RESULT = re.compile(r"\\(?P<command>result|resultvalue)\{(?P<key>[^{}]*)\}")
_DERIVED = re.compile(r"\\derived\{(?P<operation>\w+)\}\{(?P<first>[^{}]*)\}\{(?P<second>[^{}]*)\}")
_FIGURE = re.compile(r"\\artifactfigure\{([^{}]*)\}")
_LESS = re.compile(r"\b(?:lower|smaller|less|fewer|below|reduces|shrinks|drops)\b", re.IGNORECASE)
_MORE = re.compile(r"\b(?:higher|larger|greater|more|above|exceeds|increases|rises)\b", re.IGNORECASE)
_BETTER = re.compile(
    r"\b(?:better|improves|outperforms|beats|superior|significant(?:ly)?|faster|worse)\b", re.IGNORECASE
)
_NEEDS_CLAIM = re.compile(
    r"\b(?:faster|slower|better|worse|improves|outperforms|beats|superior|(?:no|without) (?:any )?loss|lossless)\b",
    re.IGNORECASE,
)
_OTHERS = re.compile(
    r"\b(?:et al\.|prior work|previous work|earlier work|recent work|related work|has been shown|"
    r"others (?:have )?(?:report|show|find|found|shown))",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"(?<!\\)%[^\n]*\n?")


@dataclass(frozen=True)
class Reviewed:
    """What a check or a reviewer found. `place` is a section or a result key; blocking ones forbid approval."""

    check: str
    section: str
    place: str
    text: str
    is_blocking: bool

    @property
    def id(self) -> str:
        """The same for the same fault in the next round, whatever else was rewritten."""
        return hashlib.sha256(f"{self.check}\0{self.section}\0{self.place}".encode()).hexdigest()[:12]


def check_paper(sections: Mapping[str, str], evidence: Evidence) -> list[Reviewed]:
    """Return what the checks find in the bodies of the sections, in order, each id once."""
    plain = {name: _COMMENT.sub("", body) for name, body in sections.items()}
    found: dict[str, Reviewed] = {}
    for finding in (*_of_whole(plain, evidence), *_of_sections(plain, evidence)):
        found.setdefault(finding.id, finding)
    return list(found.values())


def _of_whole(sections: Mapping[str, str], evidence: Evidence) -> Iterator[Reviewed]:
    text = "\n\n".join(sections.values())
    used = _keys(text)
    has_baseline = any(".teacher." in key or key.startswith("ratio.") for key in used)
    knows_baseline = any(".teacher." in key for key in evidence.results)
    section = "results" if "results" in sections else next(iter(sections), "")
    has_table = "\\artifacttable{" in text
    if used and knows_baseline and not has_baseline and not has_table:
        yield Reviewed(
            "missing_baseline",
            section,
            section,
            "results are stated without the teacher's; name its values",
            True,
        )
    has_proxy = any(evidence.results[key].is_proxy for key in used if key in evidence.results)
    if evidence.proxy and has_proxy and not re.search(r"\bproxy\b", text, re.IGNORECASE):
        yield Reviewed(
            "proxy_not_labelled", section, section,
            f"numbers rest on a proxy teacher ({evidence.proxy}) and no section names it", True,
        )  # fmt: skip
    for name, body in sections.items():
        for figure in _FIGURE.findall(body):
            if f"{{fig:{figure}}}" not in text:
                yield Reviewed(
                    "unreferenced_figure",
                    name,
                    figure,
                    f"figure {figure} is shown and never referred to",
                    False,
                )


def _of_sections(sections: Mapping[str, str], evidence: Evidence) -> Iterator[Reviewed]:
    for name, body in sections.items():
        for sentence in _SENTENCE.split(body):
            keys = [key for key in _keys(sentence) if key in evidence.results]
            has_claim = bool(_LESS.search(sentence) or _MORE.search(sentence) or _BETTER.search(sentence))
            if _OTHERS.search(sentence) and "\\cite" not in sentence:
                words = " ".join(sentence.split())[:80]
                yield Reviewed("missing_citation", name, words, f"{words!r} names other work and cites none", True)
            if (compared := _NEEDS_CLAIM.search(sentence)) and "\\claim{" not in sentence:
                text = f"{compared[0]!r} has no \\claim{{KEY}}{{KEY}}{{less|more|equal}} in its sentence"
                yield Reviewed("unclaimed_comparison", name, compared[0].lower(), text, True)
            for wrong in _wrong_directions(sentence, evidence):
                yield Reviewed("wrong_direction", name, *wrong, True)
            for key in keys if has_claim else ():
                if evidence.results[key].n in (None, 1):
                    yield Reviewed(
                        "single_seed",
                        name,
                        key,
                        f"{key} is compared and rests on one measurement; repeat it",
                        True,
                    )
            for match in _RESULT.finditer(sentence):
                found = evidence.results.get(match["key"])
                if match["command"] == "resultvalue" and found is not None and found.spread is not None:
                    yield Reviewed(
                        "number_without_interval", name, match["key"],
                        f"{match['key']} is printed without its dispersion; write \\result", False,
                    )  # fmt: skip


def _wrong_directions(sentence: str, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield comparisons of two results whose stated direction their values contradict."""
    is_less, is_more = bool(_LESS.search(sentence)), bool(_MORE.search(sentence))
    if is_less == is_more or re.search(r"\b(?:not|no|never|neither)\b", sentence, re.IGNORECASE):
        return
    pairs = [(match["first"], match["second"]) for match in _DERIVED.finditer(sentence)]
    if not pairs:
        keys = [match["key"] for match in _RESULT.finditer(sentence)]
        pairs = [(keys[0], keys[1])] if len(keys) == 2 else []
    for first, second in pairs:
        one, other = evidence.results.get(first), evidence.results.get(second)
        if one is None or other is None or one.unit != other.unit:
            continue
        if one.value == other.value or (one.value < other.value) != is_less:
            yield (
                first,
                f"the sentence states {'less' if is_less else 'more'}; {_shown(one)}, {_shown(other)}",
            )


def _shown(result: Result) -> str:
    return f"{result.key} is {result.value:g}"


def _keys(text: str) -> list[str]:
    keys = [match["key"] for match in _RESULT.finditer(text)]
    return keys + [key for match in _DERIVED.finditer(text) for key in (match["first"], match["second"])]
