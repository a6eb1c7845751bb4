"""The gate of a section: honest prose passes, and no number, name or command slips through."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caramba.paper.check import check_section, derive, report
from caramba.paper.evidence import Evidence
from caramba.paper.records import Record
from caramba.paper.scan import scan
from caramba.paper.scanned import NotAllowed

WORK = Record(
    "arxiv:1",
    "Llama 3.2 and GPT-4 with 5.3x less",
    ("A. Author",),
    "2017",
    abstract="It reaches 28.4 BLEU, in 1,000 steps.",
)
CITED = {"author2017llama": WORK}


def problems(body: str, evidence: Evidence, **named: bool) -> str:
    return report(check_section("results", body, evidence, CITED, **named).problems)


HONEST = [
    r"The student reaches \result{perplexity.student.perplexity} where its teacher has \result{perplexity.teacher.perplexity}.",
    r"Prefill takes \result{latency.student.ttft_ms@prompt=128,gen=32,batch=1} on a CPU.",
    r"It trains with seed \setting{seed} for \setting{phases.global_0.steps} steps.",
    r"That is \derived{percent_change}{perplexity.student.perplexity}{perplexity.teacher.perplexity}.",
    r"We store keys in fp16, q8\_0 and nf4, as 8-bit integers and in half precision; top-1 agreement is not measured.",
    r"Llama 3.2 \citep{author2017llama} and GPT-4 (2017) are larger.",
    r"They report \citednumber{author2017llama}{28.4} BLEU.",
    r"We write $q_1 = W_2 x^2$, $\frac{1}{\sqrt{d}}$ and \[ y = 1 - \softmax(x / 2) \] for it.",
    "\\begin{equation}\\label{eq:a} p_i = \\frac{e^{z_i}}{\\sum_{j=1}^{n} e^{z_j}} \\end{equation} See Eq.~\\eqref{eq:a}.",
    r"One model, first and second; a one-page summary on the other hand. Neither of them is new.",
    "\\begin{itemize}\n\\item \\textbf{Cache.} It is small.\n\\item[(b)] Speed\\footnote{On a CPU.}.\n\\end{itemize}",
    r"\begin{tabular}{l|r} Model & PPL \\ \midrule Student & \result{perplexity.student.perplexity} \\ \end{tabular}",
    "Text % with 3 numbers in a comment\nthat goes on.",
    r"\artifactfigure{summary.png}{Overview (\result{ratio.perplexity}).} and \artifacttable{comparison}",
    "It is \\result{ratio.perplexity}\\%\nand more.",
    "A \\% of the memory \\\\% a comment with 3\nis \\emph{used}: $x\\%$ and \\_, \\{b\\}, \\\n\\ldots",
    r"M\"uller and Erd\H{o}s, na\"ive; \S~\ref{sec:results}",
]


@pytest.mark.parametrize("body", HONEST)
def test_honest_prose_passes(body: str, evidence: Evidence) -> None:
    assert problems(body, evidence) == ""


NUMBERS = [
    ("It reaches 52.05.", "52.05"),
    ("a 5.33x smaller cache", "5.33x"),
    ("about 2M parameters", "2M"),
    ("twice as fast", "twice"),
    ("half the bytes", "half"),
    ("the cache is halved", "halved"),
    ("three times faster", "three times"),
    ("a threefold speed-up", "threefold"),
    ("twenty-five percent less", "twenty-five percent"),
    ("two hundred and fifty steps", "two hundred and fifty steps"),
    ("a perplexity of fifty-two", "fifty-two"),
    ("a ratio of one point five", "one point five"),
    ("a third of the cache", "a third"),
    ("in 2019 they said", "2019"),
    ("$52.05$", "52.05"),
    (r"$2\times$ faster", "2"),
    (r"${1}{0}\times$", "10"),
    (r"x\textsubscript{5}", "x5"),
    (r"$x_{52}$", "52"),
    (r"$x^{3.5}$", "3.5"),
    (r"\[ y = 17 \]", "17"),
    (r"\[ 1 2\,0 \]", "120"),
    (r"\[ 1{}2 \]", "12"),
    (r"\[ {1}\mathrm{2} \]", "12"),
    (r"$x_5{}_2$", "base"),
    (r"${}_5$", "base"),
    ("a factor of four", "factor of four"),
    (r"$\text{reaches 9}$", "9"),
    (r"\footnote{It is 7.}", "7"),
    (r"\emph{4}\emph{2}", "42"),
    ("5%\n2", "52"),
    ("Ours is best \\% and reaches 52.3\n, as seen.", "52.3"),
    ("\\%5", "%5"),
    ("a \\\\\\%5", "%5"),
    ("$%\n$ x $%\n$ 5", "$$"),
    ("\u0665\u0662 percent", "\u0665\u0662"),
    ("x\u00b2", "x\u00b2"),
    ("\u2167 layers", "\u2167"),
    (r"\item[0.5] x", "0.5"),
    (r"\cite[p.~3]{author2017llama}", "3"),
    (r"\artifactfigure{summary.png}{Ours is 3 better}", "3"),
    (r"\caption{99}", "99"),
    ("Table 3 shows", "3"),
    ("Version 5.3x of it \\cite{author2017llama}", "5.3x"),  # a title's word that is a number is no name
    (r"\begin{tabular}{l} 0.91 \\ \end{tabular}", "0.91"),
]


@pytest.mark.parametrize(("body", "number"), NUMBERS)
def test_numbers_that_nothing_vouches_for_are_refused(body: str, number: str, evidence: Evidence) -> None:
    found = problems(body, evidence)
    if number == "$$":
        assert "$$ is not allowed" in found
        return
    if number == "base":
        assert "needs a letter or a bracket before it" in found
        return
    assert f"{number!r} is a number that no artifact vouches for" in found
    assert r"\result{KEY}" in found
    assert problems(body, evidence, numbers_are_free=True) == ""  # a person may write it


COMMANDS = [
    (r"\input{/etc/passwd}", r"\input is not a command"),
    (r"\include{x}", r"\include is not a command"),
    (r"\write18{id}", r"\write is not a command"),
    (r"\immediate\openout", r"\immediate is not a command"),
    (r"\def\x{1}", r"\def is not a command"),
    (r"\newcommand{\x}{1}", r"\newcommand is not a command"),
    (r"\let\a\input", r"\let is not a command"),
    (r"\csname input\endcsname{x}", r"\csname is not a command"),
    (r"\catcode`\@=11", r"\catcode is not a command"),
    (r"\number\count", r"\number is not a command"),
    (r"\the\numexpr", r"\the is not a command"),
    (r"\char`a", r"\char is not a command"),
    (r"\includegraphics{x}", r"\includegraphics is not a command"),
    (r"\bibliography{x}", r"\bibliography is not a command"),
    (r"\section{X}", r"\section is not a command"),
    (r"$\input{x}$", r"\input is not a command that a section may use in mathematics"),
    (r"\verb|5|", r"\verb is not a command"),
    ("^^5cinput{x}", "^^ is not allowed"),
    (r"\begin{filecontents}x\end{filecontents}", "environment 'filecontents' is not one"),
    (r"\begin{document}", "environment 'document' is not one"),
    (r"\end{document}", r"\end{document} where"),
    (r"\begin{tabular}{p{3cm}} x \end{tabular}", "expects a plain name in braces"),
    (r"\begin{tabular}{l@l} x \end{tabular}", "columns of a tabular"),
    ("\ufb01fty percent", "is a joined or styled letter; write 'fi'"),
    ("a\u200bb", "U+200B"),
    ("a\u202eb", "U+202E"),
    ("a\x00b", "U+0000"),
    ("a\fb", "U+000C"),
    ("\\emph{x", "} is missing for what opened on line 1"),
    ("x}", "a closing brace without"),
    ("$x", "$ is missing"),
    ("$$x$$", "$$ is not allowed"),
    ("a_b", r"write \_ for the sign"),
    ("a & b", r"write \& for the sign"),
    ("#1", r"write \# for the sign"),
    (r"\begin{itemize} x", r"\end{itemize} is missing"),
    (r"\result perplexity", r"\result expects {"),
    (r"\result{a\b}", r"\result expects a plain name"),
    ("% caramba:end results", "mark sections"),
    ("trailing \\", "a backslash at the end"),
    ("{" * 30_000, "more than 60 groups within each other"),
    ("$" + "{" * 30_000, "more than 60 groups within each other"),
    (r"x\!y", r"\! is not a command"),
]


@pytest.mark.parametrize(("body", "message"), COMMANDS)
def test_what_is_not_on_the_list_is_refused(body: str, message: str, evidence: Evidence) -> None:
    assert message in problems(body, evidence, numbers_are_free=True)


NAMES = [
    (r"\result{perplexity.studnt.nll}", "did you mean 'perplexity.student.nll'?"),
    (r"\resultvalue{nothing}", "'nothing' is no key of report.json"),
    (r"\setting{sed}", "'sed' is no setting; did you mean 'seed'?"),
    (r"\derived{product}{a}{b}", "'product' is no operation; they are ratio, difference, percent_change"),
    (
        r"\derived{ratio}{perplexity.student.nll}{memory.student.model_bytes@seq=256,kind=fp16}",
        "is in nats/token and",
    ),
    (r"\cite{vaswani}", "'vaswani' is no citation"),
    (r"\citep{author2017llama, smith2020}", "'smith2020' is no citation"),
    (r"\citednumber{author2017llama}{28}", "'28' does not stand in the abstract"),
    (r"\citednumber{author2017llama}{8.4}", "'8.4' does not stand in the abstract"),
    (r"\citednumber{author2017llama}{1}", "'1' does not stand in the abstract"),
    (r"\citednumber{author2017llama}{BLEU}", "'BLEU' does not stand in the abstract"),
    (r"\artifactfigure{../../x.png}{c}", "'../../x.png' is no figure"),
    (r"\artifactfigure{summry.png}{c}", "did you mean 'summary.png'?"),
    (r"\artifacttable{/etc/passwd}", "'/etc/passwd' is no table"),
    (r"\label{a b}", "label 'a b': expected letters"),
]


@pytest.mark.parametrize(("body", "message"), NAMES)
def test_names_that_lead_nowhere_are_refused(body: str, message: str, evidence: Evidence) -> None:
    assert message in problems(body, evidence)


def test_problems_say_where(evidence: Evidence) -> None:
    assert (
        problems("Fine.\n\nIt is 12 % 13\nand 14.", evidence)
        .splitlines()[0]
        .startswith("results, line 3: '12'")
    )
    assert "results, line 4: '14'" in problems("Fine.\n\nIt is 12 % 13\nand 14.", evidence)


def test_numbers_from_two_results_are_computed(evidence: Evidence) -> None:
    one, other = "perplexity.student.nll", "perplexity.teacher.nll"
    assert derive("difference", one, other, evidence) == pytest.approx(2.342 - 2.301)
    assert derive("ratio", one, other, evidence) == pytest.approx(2.342 / 2.301)
    assert derive("percent_change", one, other, evidence) == pytest.approx(100 * (2.342 / 2.301 - 1))


def visible_digits(text: str) -> str:
    """What is left of a text without comments, told apart letter by letter and apart from the scanner."""
    kept, at = "", 0
    while at < len(text):
        if text[at] == "\\":
            kept += text[at : at + 2]
            at += 2
        elif text[at] == "%":
            at = text.find("\n", at) + 1 or len(text)
        else:
            kept += text[at]
            at += 1
    return kept


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("\\{}$%&_^~#[]()ab 12.,\n=*'\"beginendcite"), max_size=60))
@example("a \\% 12\n, b 1")
@example("\\\\% 12\n1")
@example("\\\\\\% 12\n1")
@example("$a\\%_1$\n")
@example("$%\n1$")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = scan(text)
    except NotAllowed:
        return
    printed = "".join(letter for part in found.paragraphs for letter, _ in part)
    in_formulas = "".join(item.text for item in found.numerals)
    names = "".join("".join(use.arguments) for use in found.uses)
    visible = visible_digits(text)
    for digit in "12":  # every digit that is not in a comment is in one of the three
        assert (printed + in_formulas + names).count(digit) >= visible.count(digit)
