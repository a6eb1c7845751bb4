"""From sections to the files of a paper, through every check: what does not pass is not written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from caramba.config.paper import PaperConfig
from caramba.errors import CarambaError
from caramba.paper.check import Checked, Problem, check_section, report
from caramba.paper.compile import Compiled, compile_paper
from caramba.paper.document import build_paper
from caramba.paper.draft import HUMAN, Section
from caramba.paper.evidence import Evidence, read_artifact
from caramba.paper.folder import BIBLIOGRAPHY, PAPER, PDF, RESULTS
from caramba.paper.macros import list_names, provenance_note, results_tex
from caramba.paper.printed import unknown_digits
from caramba.paper.records import Record


@dataclass(frozen=True)
class Passed:
    """The outcome for some sections: the files when all is well, else why not.

    `unresolved` names references that lead nowhere yet; a version may have none.
    """

    files: Mapping[str, bytes] = field(default_factory=lambda: {})
    refusal: str | None = None
    unresolved: tuple[str, ...] = ()


class Gate:
    """Checks and compiles sections against one run's evidence."""

    def __init__(self, config: PaperConfig, evidence: Evidence) -> None:
        self.config, self.evidence = config, evidence
        # What is adopted was compiled when it was written.
        self._last: tuple[Mapping[str, bytes], Compiled] | None = None

    def problems(self, sections: Mapping[str, Section], cited: Mapping[str, Record]) -> list[Problem]:
        """Return what the checks find in the sections, without compiling them."""
        return [problem for checked in self._check(sections, cited) for problem in checked.problems]

    def _check(self, sections: Mapping[str, Section], cited: Mapping[str, Record]) -> list[Checked]:
        return [check_section(name, section.body, self.evidence, cited, numbers_are_free=section.by == HUMAN)
                for name, section in sections.items()]  # fmt: skip

    def unknown_digits(self, sections: Mapping[str, Section], cited: Mapping[str, Record]) -> str | None:
        """Return the refusal of the independent check on what the model wrote, None when it passes."""
        theirs = {name: section.body for name, section in sections.items() if section.by != HUMAN}
        wrong = unknown_digits(theirs, self.evidence, cited)
        return "refused:\n" + "\n".join(wrong) if wrong else None

    def try_out(self, sections: Mapping[str, Section], cited: Mapping[str, Record]) -> Passed:
        """Check the sections and compile the paper that they make, in a folder that is thrown away."""
        checked = self._check(sections, cited)
        found = [problem for item in checked for problem in item.problems]
        if found:
            return Passed(refusal=f"refused, {len(found)} problem(s):\n{report(found)}")
        scanned = [item.scanned for item in checked]
        keys = list(dict.fromkeys(key for part in scanned for key in part.citation_keys() if key in cited))
        try:
            figures = {
                f"figures/{name}": read_artifact(*self.evidence.figures[name])
                for name in list_names("artifactfigure", scanned)
            }
        except CarambaError as error:
            return Passed(refusal=f"refused: {error}")
        paper = build_paper(
            self.config, self.evidence.name, provenance_note(self.evidence),
            {name: section.body for name, section in sections.items()},
            has_citations=bool(keys), appendix=self.evidence.appendix,
        )  # fmt: skip
        files = {
            PAPER: paper.encode(),
            RESULTS: results_tex(scanned, self.evidence).encode(),
            BIBLIOGRAPHY: "\n".join(cited[key].bibtex(key) for key in keys).encode(),
            **figures,
            **{f"tables/{name}.tex": self.evidence.tables[name].encode()
               for name in list_names("artifacttable", scanned)},
        }  # fmt: skip
        if self._last is None or self._last[0] != files:
            self._last = files, compile_paper(files)
        compiled = self._last[1]
        if compiled.pdf is None:
            return Passed(refusal=f"refused, the paper does not compile:\n{compiled.error}")
        return Passed({**files, PDF: compiled.pdf}, None, compiled.undefined)
