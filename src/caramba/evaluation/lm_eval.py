"""A caramba model as lm-evaluation-harness calls one. Imports the harness, which is the extra `eval`."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportAssignmentType=false
# The library is an optional extra, and its own annotations are loose.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer import greedy_until, score_continuations
from caramba.model import Model

Request = tuple[Any, list[int], list[int]]
MAX_NEW_TOKENS = 256


class CarambaLM(TemplateLM):
    """Scores and continues text with one model in eval mode.

    As with the harness's own Hugging Face backend, text begins with the start mark where the tokenizer adds it, and
    an empty context becomes the start mark, or the end mark where there is none. Long contexts keep their last tokens.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, *, max_length: int, batch_size: int = 1) -> None:
        super().__init__()
        self.model = model.eval()
        self.own_tokenizer = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        tokenizer = self.own_tokenizer
        return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.own_tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, after the start mark where the tokenizer adds one and it is not refused."""
        tokenizer = self.own_tokenizer
        ids = tokenizer.encode(string)
        if not tokenizer.adds_bos or tokenizer.bos_id is None or add_special_tokens is False:
            return ids
        return [tokenizer.bos_id, *ids]

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        scored = score_continuations(self.model, pairs, max_length=self.max_length, batch_size=self.batch_size)
        answers = [(item.logprob, item.is_greedy) for item in scored]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows that predict every token once."""
        totals: list[float] = []
        for request in requests:
            text = str(request.args[0])
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs: list[Request] = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each prompt's most likely continuation, cut before the first stop text.

        Raises:
            ConfigError: a task that samples, or whose answers leave no room for a prompt.
        """
        answers: list[str] = []
        for request in requests:
            context, options = request.args
            _refuse_sampling(options)
            until = options.get("until") or []
            stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            answer = self._continue(context, stops, int(options.get("max_gen_toks", MAX_NEW_TOKENS)))
            self.cache_hook.add_partial("generate_until", (context, options), answer)
            answers.append(answer)
        return answers

    def _continue(self, context: str, stops: list[str], max_new_tokens: int) -> str:
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"eval: the task asks for {max_new_tokens} new tokens and the model takes {self.max_length}; "
                "set max_gen_toks in the task's generation_kwargs, or --max-length"
            )
        prompt = self.tok_encode(context)[-room:] or [self.eot_token_id]

        def is_done(new: list[int]) -> bool:
            text = self.own_tokenizer.decode(new)
            return any(stop in text for stop in stops)

        new = greedy_until(self.model, prompt, max_new_tokens, eos_id=self.eot_token_id, is_done=is_done)
        text = self.own_tokenizer.decode(new)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _refuse_sampling(options: dict[str, Any]) -> None:
    if options.get("do_sample") or float(options.get("temperature") or 0.0) > 0.0:
        raise ConfigError(
            f"eval: the task samples ({options}), and only greedy generation is supported; set do_sample: false and "
            "temperature: 0 in its generation_kwargs"
        )
