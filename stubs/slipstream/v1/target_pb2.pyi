from slipstream.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_CORRECTION: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_CORRECTION: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin

class TargetServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetInfoResponse(_message.Message):
    __slots__ = ("model", "draft", "drafter", "draft_state", "draft_length", "max_sequences", "cache_tokens", "free_cache_tokens", "modes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    draft: _common_pb2.ModelInfo
    drafter: str
    draft_state: _common_pb2.FallbackReason
    draft_length: int
    max_sequences: int
    cache_tokens: int
    free_cache_tokens: int
    modes: _containers.RepeatedScalarFieldContainer[_common_pb2.Mode]
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., drafter: _Optional[str] = ..., draft_state: _Optional[_Union[_common_pb2.FallbackReason, str]] = ..., draft_length: _Optional[int] = ..., max_sequences: _Optional[int] = ..., cache_tokens: _Optional[int] = ..., free_cache_tokens: _Optional[int] = ..., modes: _Optional[_Iterable[_Union[_common_pb2.Mode, str]]] = ...) -> None: ...

class TargetServiceGenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "stop", "mode", "max_draft_length", "unsupported")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _common_pb2.Prompt
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopConditions
    mode: _common_pb2.Mode
    max_draft_length: int
    unsupported: _common_pb2.UnsupportedOptions
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopConditions, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.Mode, str]] = ..., max_draft_length: _Optional[int] = ..., unsupported: _Optional[_Union[_common_pb2.UnsupportedOptions, _Mapping]] = ...) -> None: ...

class TargetServiceGenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("active_mode", "mode_reason", "prompt_tokens", "seed")
    ACTIVE_MODE_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    active_mode: _common_pb2.Mode
    mode_reason: str
    prompt_tokens: int
    seed: int
    def __init__(self, active_mode: _Optional[_Union[_common_pb2.Mode, str]] = ..., mode_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("token_ids", "text", "num_draft_tokens", "num_accepted_draft_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "usage", "tag")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    tag: _common_pb2.OptimizationTag
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., tag: _Optional[_Union[_common_pb2.OptimizationTag, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("open", "propose")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    open: VerifyOpen
    propose: VerifyPropose
    def __init__(self, open: _Optional[_Union[VerifyOpen, _Mapping]] = ..., propose: _Optional[_Union[VerifyPropose, _Mapping]] = ...) -> None: ...

class VerifyOpen(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _common_pb2.Prompt
    sampling: _common_pb2.SamplingParams
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class VerifyPropose(_message.Message):
    __slots__ = ("tokens", "distribution", "base_length")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    distribution: bytes
    base_length: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., distribution: _Optional[bytes] = ..., base_length: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("opened", "result")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    opened: VerifyOpened
    result: VerifyResult
    def __init__(self, opened: _Optional[_Union[VerifyOpened, _Mapping]] = ..., result: _Optional[_Union[VerifyResult, _Mapping]] = ...) -> None: ...

class VerifyOpened(_message.Message):
    __slots__ = ("prompt_tokens", "token_id", "committed_length")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    token_id: int
    committed_length: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., token_id: _Optional[int] = ..., committed_length: _Optional[int] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("accepted", "token_id", "origin", "committed_length")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    token_id: int
    origin: TokenOrigin
    committed_length: int
    def __init__(self, accepted: _Optional[int] = ..., token_id: _Optional[int] = ..., origin: _Optional[_Union[TokenOrigin, str]] = ..., committed_length: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: _common_pb2.Prompt
    def __init__(self, prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
