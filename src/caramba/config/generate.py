"""How text is generated: lengths, sampling, where it ends, and the cache that it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from caramba.config.base import Config, Seed, Share, UnitInterval
from caramba.config.cache_policy import CacheKeys
from caramba.config.kvcache import CacheKind
from caramba.config.layer_base import Positive

DEFAULT_SEED = 1337
TokenIds = tuple[NonNegativeInt, ...]
Compiled = bool | Literal["graph", "auto"]
"""How steps are asked to run, see `GenerateConfig.compiled`."""


class GenerateConfig(CacheKeys):
    """One generation. `temperature=0` takes the most likely token; the filters then change nothing.

    The distribution that a token is sampled from is built in this order: repetition penalty, temperature, top_k, top_p,
    min_p; each filter works on what the one before left, renormalised.
    """

    max_new_tokens: Positive = Field(default=128, description="most new tokens of a text")
    temperature: NonNegativeFloat = Field(default=1.0, description="softmax temperature; 0 takes the most likely token")
    top_k: Positive | None = Field(default=None, description="keep this many of the most likely tokens")
    top_p: Share = Field(default=1.0, description="keep the fewest tokens whose probabilities reach this sum")
    min_p: UnitInterval = Field(
        default=0.0, description="keep tokens of at least this share of the most likely one's probability"
    )
    repetition_penalty: PositiveFloat = Field(
        default=1.0, description="above 1 makes tokens of the prompt and of the new text less likely"
    )
    eos_token_id: NonNegativeInt | TokenIds | None = Field(
        default=None, description="ends a row; where unset the tokenizer's end mark"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a row and are cut off, also across token borders"
    )
    seed: Seed | None = Field(
        default=None, description="of the first row, one more for each further; unset: the run's, else 1337"
    )
    max_seq_len: Positive | None = Field(default=None, description="most tokens of prompt and new text together")
    prefill_chunk: Positive | None = Field(default=None, description="tokens per forward of the prompt")
    read_every: Positive | None = Field(
        default=None, description="steps between reads of the new tokens; unset: 1 for a stream, else 8"
    )

    compiled: Compiled = Field(
        default="auto",
        description="run steps on the device by themselves: graph captures a step in a CUDA graph, true compiles it "
        "too, and both keep caches of the next power of two for later calls; auto is graph on a CUDA device, but not "
        "where several ranks take part, such a cache does not fit, or a first call is too short to make up for the "
        "capture (speculation captures there too), and eager (false) elsewhere; stats say what ran, and why where it "
        "is not what was asked. While a step is captured no other thread may allocate on the device or wait for it",
    )

    @property
    def first_seed(self) -> int:
        """The seed of the first row."""
        return DEFAULT_SEED if self.seed is None else self.seed

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end marks that are named here."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else ids


class SampleConfig(Config):
    """What a run of `mode: sample` generates: each prompt's continuation, by the model as it is at that point."""

    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        description="texts to continue"
    )
    role: Literal["teacher", "student"] = Field(
        default="student", description="model that generates: teacher or student"
    )
    generate: GenerateConfig = Field(default=GenerateConfig(), description="sampling and cache keys")


class ChatConfig(Config):
    """What a run of `mode: chat` opens: a conversation with the model as it is at that point.

    The messages are sent first. On a terminal the conversation then continues there; without one, and without messages,
    it takes its lines from a pipe.
    """

    messages: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="messages of the user that are sent first, in order"
    )
    system: Annotated[str, Field(min_length=1)] | None = Field(default=None, description="system message; unset: none")
    plain: bool = Field(default=False, description="lines of User: and Assistant:, whatever template there is")
    role: Literal["teacher", "student"] = Field(default="student", description="model that answers: teacher or student")
    generate: GenerateConfig = Field(default=GenerateConfig(), description="sampling and cache keys")


class SpeculativeConfig(Config):
    """Speculation: drafted tokens are verified together; the distribution of the text stays the model's own.

    Drafts are what followed the same tokens earlier in the text (`lookup`), or come from a smaller model (`draft`) or
    the model's own first blocks (`early_exit`).

    `adaptive` doubles the number drafted after a round in which all were accepted and takes one less after a round
    with a rejection. Where rounds of lookup run on the device (`compiled`), 8 tokens take about as long as 2: there a
    round verifies `spec_k` drafts, at most 7, or none, and `adaptive` chooses by how many drafts behind a run as long
    became text before. Below `spec_disable_below_accept` drafting stops, and is tried again after `retry_after`
    tokens; it stays on from there only if the share reaches the floor plus `hysteresis`.
    """

    spec_method: Literal["lookup", "draft", "early_exit"] = Field(
        default="lookup", description="source of drafts: lookup, draft (a smaller model) or early_exit"
    )
    spec_draft_layers: Positive | None = Field(
        default=None, description="blocks that early_exit drafts with; unset: a quarter of the model's"
    )
    spec_k: Annotated[int, Field(ge=1, le=16)] = Field(default=4, description="tokens drafted in a round, from 1 to 16")
    spec_k_adaptive: bool = Field(default=True, description="whether the number of drafts follows their acceptance")
    spec_extra_token: bool = Field(
        default=True,
        description="take one more token from the verifying forward when all drafts are accepted",
    )
    spec_disable_below_accept: UnitInterval = Field(
        default=0.1, description="share of accepted drafts below which drafting stops"
    )
    hysteresis: UnitInterval = Field(
        default=0.05, description="share above that floor which drafting must reach to continue"
    )
    window: Positive = Field(default=32, description="drafted tokens over which acceptance is judged")
    retry_after: Positive = Field(default=64, description="tokens until drafting is tried again")
    max_ngram: Positive = Field(default=4, description="longest run of tokens that a lookup matches")

    @model_validator(mode="after")
    def _reachable(self) -> SpeculativeConfig:
        if self.spec_disable_below_accept + self.hysteresis > 1:
            raise ValueError(
                f"spec_disable_below_accept={self.spec_disable_below_accept} plus hysteresis={self.hysteresis} is "
                "above 1, which no share reaches; lower one"
            )
        if self.spec_draft_layers is not None and self.spec_method != "early_exit":
            raise ValueError(
                f"spec_draft_layers={self.spec_draft_layers} is of spec_method=early_exit, and the method is "
                f"{self.spec_method}; remove it, or set that method"
            )
        return self


class EngineConfig(Config):
    """An engine of `n_slots` requests at a time. Its cache is allocated once, (n_slots + n_ahead) * max_len tokens."""

    n_slots: Positive = Field(default=8, description="requests that decode together, one row of the cache each")
    n_ahead: NonNegativeInt = Field(
        default=0,
        description="requests whose prompts run before a slot is free, each in one more row of the cache: no slot "
        "is idle for a prompt then; on CUDA, with captured steps, an exact cache and no prefix_cache_bytes",
    )
    max_len: Positive = Field(default=2048, description="most tokens of a request's prompt and new text together")
    cache_kind: CacheKind | None = Field(
        default=None,
        description="format of the cache; unset, the one that the model was trained for (cache_format), else its dtype",
    )
    prefill_chunk: Positive = Field(
        default=512,
        description="prompt tokens per step, padding included, so that long prompts do not hold up the decoding rows; "
        "where steps are captured a prompt of up to 512 runs whole with an exact cache, if none of it was kept",
    )
    max_queue: NonNegativeInt = Field(default=256, description="requests that wait for a slot; one more is refused")
    batch_timeout: NonNegativeFloat = Field(
        default=0.0,
        description="seconds that a started engine in which nothing runs waits for more requests to begin with, from "
        "the first on and until there are n_slots",
    )
    prefix_cache_bytes: NonNegativeInt = Field(
        default=0,
        description="memory for the keys and values of earlier texts, whose equal beginnings are not run again",
    )
    use_memory_cache: bool = Field(
        default=False,
        description="of models with memory slots: keep their state after each chunk of a prompt and each answer, from "
        "which texts that begin so continue",
    )
    cache_size: PositiveFloat = Field(
        default=1024.0, description="of use_memory_cache: most megabytes (1e6 bytes) of kept states"
    )
    compiled: Compiled = Field(
        default="graph",
        description="as in GenerateConfig: run steps on the device by themselves where it can; stats say what ran",
    )
