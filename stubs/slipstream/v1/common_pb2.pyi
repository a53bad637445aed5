from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_AUTO: _ClassVar[Mode]
    MODE_STANDARD: _ClassVar[Mode]
    MODE_SPECULATIVE: _ClassVar[Mode]

class QualityClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUALITY_CLASS_UNSPECIFIED: _ClassVar[QualityClass]
    QUALITY_CLASS_LOSSLESS: _ClassVar[QualityClass]
    QUALITY_CLASS_BOUNDED: _ClassVar[QualityClass]

class Verification(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_UNSPECIFIED: _ClassVar[Verification]
    VERIFICATION_TOKEN: _ClassVar[Verification]
    VERIFICATION_BLOCK: _ClassVar[Verification]
    VERIFICATION_COUPLED: _ClassVar[Verification]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class FallbackReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_REASON_UNSPECIFIED: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_ABSENT: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_SLOW: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_LOST: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_INVALID: _ClassVar[FallbackReason]
    FALLBACK_REASON_VOCABULARY_MISMATCH: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_CONTEXT: _ClassVar[FallbackReason]
    FALLBACK_REASON_DRAFT_FULL: _ClassVar[FallbackReason]
    FALLBACK_REASON_DISABLED: _ClassVar[FallbackReason]
MODE_UNSPECIFIED: Mode
MODE_AUTO: Mode
MODE_STANDARD: Mode
MODE_SPECULATIVE: Mode
QUALITY_CLASS_UNSPECIFIED: QualityClass
QUALITY_CLASS_LOSSLESS: QualityClass
QUALITY_CLASS_BOUNDED: QualityClass
VERIFICATION_UNSPECIFIED: Verification
VERIFICATION_TOKEN: Verification
VERIFICATION_BLOCK: Verification
VERIFICATION_COUPLED: Verification
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
FALLBACK_REASON_UNSPECIFIED: FallbackReason
FALLBACK_REASON_DRAFT_ABSENT: FallbackReason
FALLBACK_REASON_DRAFT_SLOW: FallbackReason
FALLBACK_REASON_DRAFT_LOST: FallbackReason
FALLBACK_REASON_DRAFT_INVALID: FallbackReason
FALLBACK_REASON_VOCABULARY_MISMATCH: FallbackReason
FALLBACK_REASON_DRAFT_CONTEXT: FallbackReason
FALLBACK_REASON_DRAFT_FULL: FallbackReason
FALLBACK_REASON_DISABLED: FallbackReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "verification")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    verification: Verification
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "chat", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class UnsupportedOptions(_message.Message):
    __slots__ = ("logprobs", "n", "grammar")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    logprobs: int
    n: int
    grammar: str
    def __init__(self, logprobs: _Optional[int] = ..., n: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class TokensByOrigin(_message.Message):
    __slots__ = ("accepted", "correction", "bonus", "standard", "early_exit")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    STANDARD_FIELD_NUMBER: _ClassVar[int]
    EARLY_EXIT_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    correction: int
    bonus: int
    standard: int
    early_exit: int
    def __init__(self, accepted: _Optional[int] = ..., correction: _Optional[int] = ..., bonus: _Optional[int] = ..., standard: _Optional[int] = ..., early_exit: _Optional[int] = ...) -> None: ...

class TimeSplit(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "draft_ms", "link_ms", "verify_ms", "stream_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    LINK_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    draft_ms: float
    link_ms: float
    verify_ms: float
    stream_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., link_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., stream_ms: _Optional[float] = ...) -> None: ...

class Fallback(_message.Message):
    __slots__ = ("reason", "rounds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    reason: FallbackReason
    rounds: int
    def __init__(self, reason: _Optional[_Union[FallbackReason, str]] = ..., rounds: _Optional[int] = ...) -> None: ...

class OptimizationTag(_message.Message):
    __slots__ = ("requested_mode", "active_mode", "mode_reason", "quality_class", "drafter", "drafter_fingerprint", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "mean_acceptance_length", "draft_acceptance_rate", "tokens_by_origin", "target_passes", "target_passes_saved", "draft_passes", "time", "fallbacks", "stale_proposals", "verification")
    REQUESTED_MODE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_MODE_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    QUALITY_CLASS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    TARGET_PASSES_SAVED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PASSES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    STALE_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    requested_mode: Mode
    active_mode: Mode
    mode_reason: str
    quality_class: QualityClass
    drafter: str
    drafter_fingerprint: str
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    mean_acceptance_length: float
    draft_acceptance_rate: float
    tokens_by_origin: TokensByOrigin
    target_passes: int
    target_passes_saved: int
    draft_passes: int
    time: TimeSplit
    fallbacks: _containers.RepeatedCompositeFieldContainer[Fallback]
    stale_proposals: int
    verification: Verification
    def __init__(self, requested_mode: _Optional[_Union[Mode, str]] = ..., active_mode: _Optional[_Union[Mode, str]] = ..., mode_reason: _Optional[str] = ..., quality_class: _Optional[_Union[QualityClass, str]] = ..., drafter: _Optional[str] = ..., drafter_fingerprint: _Optional[str] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., tokens_by_origin: _Optional[_Union[TokensByOrigin, _Mapping]] = ..., target_passes: _Optional[int] = ..., target_passes_saved: _Optional[int] = ..., draft_passes: _Optional[int] = ..., time: _Optional[_Union[TimeSplit, _Mapping]] = ..., fallbacks: _Optional[_Iterable[_Union[Fallback, _Mapping]]] = ..., stale_proposals: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "weights_fingerprint", "tokenizer_fingerprint", "vocabulary_size", "context_limit", "compute_path", "compute_path_reason", "weight_format")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_PATH_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_PATH_REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_limit: int
    compute_path: str
    compute_path_reason: str
    weight_format: str
    def __init__(self, model_id: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., context_limit: _Optional[int] = ..., compute_path: _Optional[str] = ..., compute_path_reason: _Optional[str] = ..., weight_format: _Optional[str] = ...) -> None: ...
