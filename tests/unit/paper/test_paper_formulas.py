"""Mathematics at the gate: structure passes, and no number is put together from its parts."""

from __future__ import annotations

import pytest

from caramba.paper.check import check_section, report
from caramba.paper.evidence import Evidence


def problems(body: str, evidence: Evidence, **named: bool) -> str:
    return report(check_section("results", body, evidence, {}, **named).problems)


HONEST = [
    r"\[ \mathcal{L} = -\frac{1}{N} \sum_{i=1}^{N} \log p_\theta(x_i \mid x_{<i}) + 2\lambda \|W\|_2^2 \]",
    r"\[ \mathrm{Attention}(Q, K, V) = \softmax\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V \]",
    r"\[ f(x) = \frac{1}{\sqrt{2\pi\sigma^2}} e^{-\frac{(x - \mu)^2}{2\sigma^2}} \]",
    r"\[ \hat{m}_t = \frac{m_t}{1 - \beta_1^t}, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \]",
    r"\begin{align} y &= 1 \\ z &= 2x + 1 \\ \bar{x}_1 &= x'^2 \end{align}",
    r"\[ \mathbb{1}[x > 0] = \begin{cases} 1 & x > 0 \\ 0 & \text{otherwise} \end{cases} \]",
    r"$\mathbf{x}_1, \ldots, \mathbf{x}_n \in \mathbb{R}^{\setting{seed}}$, $|x|^2$, $\left| x \right|_1$ and $\{x\}_i^n$",
    r"$\max_x f(x)^2$, $\log_2 n$, $\operatorname{rank}_1(A)$, $\|x\|_2$, $W_{i,1}$, $x^{t-1}$, $\text{ppl}_1$",
    r"\[ \argmin_\theta \mathbb{E}_{x \sim p}\left[ \ell(x; \theta) \right]^2 + 2x, 1 - y \]",
    r"$\setting{seed} + \setting{seed}$, $n = \setting{seed}$ and $x - \setting{seed}$",
]


@pytest.mark.parametrize("body", HONEST)
def test_honest_formulas_pass(body: str, evidence: Evidence) -> None:
    assert problems(body, evidence) == ""


GLUED = [
    (r"\[ PPL = 2{.}1 \]", "2.1"),
    (r"\[ PPL = 2 . 1 \]", "2.1"),
    (r"\[ s = 2\textstyle 1\textstyle 0 \]", "210"),
    (r"\[ s = \mathbf{2}\mathbf{1}\mathbf{0} \]", "210"),
    (r"\[ s = 2\left.1\right.0 \]", "2"),
    (r"\[ s = \frac{1}{2}\frac{2}{1} \]", "22"),
    (r"\[ s = 2\frac{1}{2} \]", "21"),
    (r"\[ \begin{matrix} 2&1 \end{matrix} \]", "21"),
    (r"\[ 2\begin{matrix} x \\ y \end{matrix}1 \]", "21"),
    (r"\begin{align*} 2&1 \end{align*}", "21"),
    (r"\[ 2\cdot 1 \]", "21"),
    (r"\[ 2\text{.}1 \]", "21"),
    (r"\[ 2x1 \]", "21"),
    (r"\[ x_12 \]", "12"),
    (r"$p^{\mathrm{5}\mathrm{2}.\mathrm{3}}$", "52"),
    (r"$p^{5 . 2}$", "5.2"),
    (r"$x^{5\,2}$", "52"),
]


@pytest.mark.parametrize(("body", "number"), GLUED)
def test_digits_without_an_operator_between_them_are_one_number(
    body: str, number: str, evidence: Evidence
) -> None:
    found = problems(body, evidence)
    assert f"'{number}" in found
    assert "digits in a formula without an operator between them read as one number" in found
    assert problems(body, evidence, numbers_are_free=True) == ""


BASELESS = [
    r"$\displaystyle^5\displaystyle^2\displaystyle^.\displaystyle^3$",
    r"$\quad^5\quad^2$",
    r"$\mathrm{ }^5\mathrm{ }^2$",
    r"${}^5$",
    r"$^5$",
    r"$()^5$",
    r"$\left.\right.^5$",
    r"$\left(\right)^5$",
    r"$|^5|^2$",
    r"$\hat{}_5$",
    r"$)^5$",
    r"$\cdot^5$",
    r"$x\,^5$",
    r"$'^5$",
    r"$\setting{seed}^{9}$",
    r"${\setting{seed}}^{9}$",
    r"$\mathrm{\setting{seed}}^{9}$",
    r"$\setting{seed}_9$",
]


@pytest.mark.parametrize("body", BASELESS)
def test_scripts_hang_on_letters_or_brackets(body: str, evidence: Evidence) -> None:
    found = problems(body, evidence)
    assert "results, line 1: a sub- or superscript needs a letter or a bracket before it" in found
    assert "a sub-" not in problems(body, evidence, numbers_are_free=True)  # a person may write it


VALUES = [
    r"\[ \setting{seed}1 \]",
    r"\[ 1\setting{seed} \]",
    r"$\setting{seed}\,\setting{seed}$",
    r"$\setting{seed}\cdot\setting{seed}$",
    r"$\frac{\setting{seed}}{x}\setting{seed}$",
    r"$\text{\setting{seed}}\setting{seed}$",
    r"$\setting{seed}\text{$\setting{seed}$}$",
    r"$x^{\setting{seed}}\setting{seed}$",
]


@pytest.mark.parametrize("body", VALUES)
def test_values_in_formulas_stand_apart(body: str, evidence: Evidence) -> None:
    assert "results, line 1: a value that a command prints and another number stand side by side" in problems(
        body, evidence
    )
    assert problems(body, evidence, numbers_are_free=True) == ""


@pytest.mark.parametrize("body", [r"$\left5x\right)$", r"$\left\alpha x\right)$", r"$\big{x}$", r"$\left"])
def test_what_follows_left_is_a_bracket(body: str, evidence: Evidence) -> None:
    assert r"expects a bracket, or . for none" in problems(body, evidence)
