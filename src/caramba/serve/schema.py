"""Requests and responses of the OpenAI-compatible interface; the OpenAPI document is made of these classes."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)

from caramba.config.base import Config
from caramba.config.generate import GenerateConfig
from caramba.config.layer_base import Positive
from caramba.config.parse import MOST_ERRORS, error_lines
from caramba.serve.failure import ApiError

MOST_STOPS = 16
MOST_TEXT_LOGPROBS, MOST_CHAT_LOGPROBS = 5, 20
"""Alternatives to each token of /v1/completions and of /v1/chat/completions, as the OpenAI interface limits them."""
MOST_VALUES = 4096
"""Keys and list items of a request; the messages of a long conversation have three each."""
Text = Annotated[str, Field(min_length=1)]
Finish = Literal["stop", "length"]
Schema = TypeVar("Schema", bound=Config)


def _one_prompt(value: object) -> object:
    """Return the text or the ids; clients put a single prompt in a list too."""
    one = value
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str | list):
        one = value[0]
    if isinstance(one, str) and one:
        return one
    if isinstance(one, list | tuple) and set(map(type, one)) == {int} and min(one) >= 0:
        return tuple(one)
    raise ValueError(
        "expected a text, a list of token ids, or a list with one of these; none is empty, and a request has one prompt"
    )


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_ONE = {"type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}
Prompt = Annotated[str | tuple[int, ...], PlainValidator(_one_prompt), WithJsonSchema({"anyOf": [_TEXT, _IDS, _ONE]})]


class StreamOptions(Config):
    """What a stream holds in addition to its text."""

    include_usage: bool = Field(default=False, description="send a last chunk without choices, with the usage")
    include_obfuscation: Literal[False] = Field(default=False, description="false alone: not supported")


class NoKeys(Config):
    """An object without keys, of an option that is accepted only where it has no effect."""


class TextFormat(Config):
    """The form of an answer: text."""

    type: Literal["text"]


class SamplingRequest(Config):
    """Keys that both endpoints share. Without a seed every request draws its own."""

    model: Text | None = Field(default=None, description="the model that is served, also where it is left out")
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Positive | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Text | Annotated[tuple[Text, ...], Field(max_length=MOST_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] = Field(default=1, description="one answer per request")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="for the caller's own records; not used")
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = Field(default=0.0, description="0 alone: not supported")
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = Field(default=0.0, description="0 alone: not supported")
    logit_bias: NoKeys = Field(default=NoKeys(), description="empty alone: not supported")

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop

    def generation(self, max_new_tokens: int, seed: int, stop: tuple[str, ...]) -> GenerateConfig:
        """Return the same keys as `caramba generate` takes them."""
        return GenerateConfig(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            stop=stop,
        )


class CompletionRequest(SamplingRequest):
    """A text to continue."""

    prompt: Prompt
    max_tokens: Positive = 16
    best_of: Annotated[int, Field(ge=1, le=1)] = Field(default=1, description="1 alone: not supported")
    echo: Literal[False] = Field(default=False, description="false alone: not supported")
    suffix: Literal[""] = Field(default="", description="empty alone: not supported")
    logprobs: Annotated[int, Field(ge=0, le=MOST_TEXT_LOGPROBS)] | None = Field(
        default=None,
        description="the log-probability of each new token, in nats, and of so many most likely tokens",
    )

    @property
    def n_alternatives(self) -> int:
        """Most likely tokens to report at each new token."""
        return self.logprobs or 0


class TextPart(Config):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Config):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[tuple[TextPart, ...], Field(min_length=1)]

    name: str | None = Field(default=None, description="of the speaker; not used")

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(SamplingRequest):
    """A conversation to answer. Without a number of tokens, as many as the server allows and the context holds."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "anyOf": [
                    {
                        "properties": {
                            "max_tokens": {"type": "integer"},
                            "max_completion_tokens": {"type": "integer"},
                        },
                        "required": ["max_tokens", "max_completion_tokens"],
                        "additionalProperties": True,
                    },
                    {
                        "properties": {
                            "top_logprobs": {"type": "integer", "minimum": 1},
                            "logprobs": {"enum": [False, None]},
                        },
                        "required": ["top_logprobs"],
                        "additionalProperties": True,
                    },
                ]
            }
        }
    )

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    tools: Annotated[tuple[NoKeys, ...], Field(max_length=0)] = Field(
        default=(), description="empty alone: not supported"
    )
    tool_choice: Literal["none", "auto"] = Field(default="none", description="there are no tools to choose")
    parallel_tool_calls: bool = Field(default=True, description="there are no tools to call")
    functions: Annotated[tuple[NoKeys, ...], Field(max_length=0)] = Field(
        default=(), description="empty alone: not supported"
    )
    function_call: Literal["none", "auto"] = Field(default="none", description="there are no functions to call")
    response_format: TextFormat = Field(
        default=TextFormat(type="text"), description="text alone: others are not supported"
    )
    modalities: Annotated[tuple[Literal["text"], ...], Field(min_length=1, max_length=1)] = Field(
        default=("text",), description="text alone: others are not supported"
    )
    reasoning_effort: Literal["none"] = Field(default="none", description="none alone: not supported")
    verbosity: Literal["medium"] = Field(default="medium", description="medium alone: not supported")
    service_tier: Literal["auto", "default"] = Field(default="auto", description="there is one tier")
    store: Literal[False] = Field(default=False, description="false alone: answers are not stored")
    metadata: dict[str, str] = Field(default={}, description="for the caller's own records; not used")
    prompt_cache_key: str | None = Field(default=None, description="not used")
    safety_identifier: str | None = Field(default=None, description="for the caller's own records; not used")
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = Field(default=None, description="older name of max_completion_tokens")
    logprobs: bool = Field(default=False, description="the log-probability of each new token, in nats")
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_CHAT_LOGPROBS)] = Field(
        default=0, description="with logprobs: report so many most likely tokens at each new token"
    )

    @property
    def n_alternatives(self) -> int:
        """Most likely tokens to report at each new token."""
        return self.top_logprobs


class Usage(BaseModel):
    """Tokens of a request and of its answer; an end mark is not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> "Usage":
        """Return the usage of so many tokens."""
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class TextLogprobs(BaseModel):
    """Tokens as text, log softmax(logits) of each before penalty, temperature and filters, and where each begins.

    `top_logprobs` maps the most likely tokens, and the new token if it is not one of them, to their log-probabilities.
    A token whose text is that of a likelier one is named `token_id:N`.
    """

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] | None = None
    text_offset: list[int] = []


class TextChoice(BaseModel):
    """An answer, or a piece of it."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token: its text, log softmax(logits) before penalty, temperature and filters, and its bytes.

    The bytes of a part of a character are null.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A new token, and the most likely tokens at its place, the most likely first."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """An answer."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {key: value for key, value in write(self).items() if value is not None}


class DeltaChoice(BaseModel):
    """A piece of an answer."""

    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(BaseModel):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["caramba"] = "caramba"
    max_model_len: int


class ModelList(BaseModel):
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "stopping", "failed"]
    active: int
    queued: int


class ErrorDetail(BaseModel):
    """What went wrong. `param` is the key that is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class FailureBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


def parse_request(schema: type[Schema], data: object) -> Schema:
    """Validate the JSON value of a body.

    Raises:
        ApiError: status 400, with every problem in a line of its own and the first one's key.
    """
    refuse_many_values(data)
    data = _whole_numbers(data)
    data = _without_nulls(schema, data)
    if isinstance(data, dict) and isinstance(turns := data.get("messages"), list):
        data["messages"] = [_without_nulls(Message, turn) for turn in turns]
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_in_json_words(line) for line in error_lines(error, data, None, {}, data)]
        first = error.errors(include_url=False)[0]["loc"]
    param = str(first[0]) if first else None
    raise ApiError(400, "\n".join(lines[:MOST_ERRORS]), param=param)


def refuse_many_values(data: object) -> None:
    """Refuse a JSON value with more than MOST_VALUES keys and list items: each may become a problem of its own.

    Token ids under `prompt` count as one value.

    Raises:
        ApiError: status 400.
    """
    n_values, waiting = 0, [data]
    while waiting:
        node = waiting.pop()
        inner: list[Any] = []
        if isinstance(node, dict):
            inner = [item for key, item in node.items() if not (key == "prompt" and _is_numbers(item))]
        elif isinstance(node, list):
            inner = node
        n_values += len(inner)
        if n_values > MOST_VALUES:
            raise ApiError(400, f"the body holds more than {MOST_VALUES} values; send fewer keys, messages or items")
        waiting += [item for item in inner if isinstance(item, dict | list)]


def _is_numbers(value: object) -> bool:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return isinstance(value, list) and set(map(type, value)) <= {int, float}


def _without_nulls(schema: type[Config], value: Any) -> Any:
    """Return an object without keys of null: clients write null for what they do not set."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None or _is_required(schema, key)}


def _is_required(schema: type[Config], key: str) -> bool:
    field = schema.model_fields.get(key)
    return field is not None and field.is_required()


def _whole_numbers(value: Any) -> Any:
    """Return a JSON value with 1.0 as 1: JSON has one kind of number, and 1.0 is an integer to its schemas."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list) and set(map(type, value)) != {int}:  # a long prompt is one pass in C
        return [_whole_numbers(item) for item in value]
    return value


def _in_json_words(line: str) -> str:
    line = re.sub(r"a valid dictionary or instance of \w+", "an object", line)
    return line.replace("a valid tuple", "a list").replace("Tuple should", "List should")
