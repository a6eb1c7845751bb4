"""A stub of a language model that writes, reviews and proposes as a fixed function of the request, without HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from caramba.config.paper import PaperConfig

NLL = "perplexity.student.nll"
ABSTRACT = "A proxy teacher is trained, and its student after it."
RESULTS = rf"The student has \result{{{NLL}}} and its proxy teacher \result{{perplexity.teacher.nll}}."
PROPOSAL: dict[str, Any] = {
    "name": "lower_lr",
    "rationale": "The loss oscillates.",
    "hypothesis": "A lower rate ends lower.",
    "smallest_effect": 0.01,
    "patches": [{"key": "lr", "value": 0.002}],
}
FINDING = {
    "topic": "results",
    "section": "results",
    "place": NLL,
    "text": "Is the rate tuned?",
    "is_blocking": True,
}


def called(*made: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A message that calls tools."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given)},
        }
        for index, (name, given) in enumerate(made)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class StubModel:
    """Answers requests; `bodies` are those that were paid for. `review` overrides what the n-th review submits."""

    def __init__(
        self,
        review: Callable[[int], dict[str, Any]] | None = None,
        proposal: dict[str, Any] | None = None,
        bodies: dict[str, str] | None = None,
    ) -> None:
        self.sections = bodies or {"abstract": ABSTRACT, "results": RESULTS}
        self.proposal = proposal or PROPOSAL
        self.bodies: list[str] = []
        self.n_reviews = self.n_drafts = 0
        self._review = review or self._two_rounds

    def open(self, config: PaperConfig) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self.send

    def send(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(json.dumps(body, sort_keys=True))
        names = {tool["function"]["name"] for tool in body["tools"]}
        message = (self.write if "write_tex_file" in names else self.judge)(body["messages"])
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    def write(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        last = messages[-1]
        if last["role"] == "tool" and "accepted" in last["content"]:
            return said("done")
        if "Nothing is written yet" in messages[1]["content"]:
            return called(("write_tex_file", {"sections": self.sections}))
        if last["role"] == "user":
            return called(("read_tex_file", {}))
        body = (
            json.loads(last["content"])["sections"]["results"]["body"]
            + " The rate was varied: "
            + (r"\result{research.lower_lr.candidate}." if "research." in messages[1]["content"] else "not yet.")
        )
        return called(("update_section", {"section": "results", "body": body}))

    def judge(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "user":
            self.n_reviews += 1
            return called(("read_paper_section", {"section": "results"}), ("propose_experiment", self.proposal))
        is_second = r"The rate was varied" in messages[3]["content"]
        return called(("submit_review", self._review(2 if is_second else 1)))

    def _two_rounds(self, number: int) -> dict[str, Any]:
        if number == 1:
            return {"score": 6.0, "action": "new_experiment", "summary": "Tune.", "findings": [FINDING]}
        return {"score": 8.0, "action": "approve", "summary": "Good.", "findings": []}
