from slipstream.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayServiceGenerateRequest(_message.Message):
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

class GatewayServiceGenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    chunk: GenerationChunk
    finished: GenerationFinished
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., chunk: _Optional[_Union[GenerationChunk, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "active_mode", "mode_reason", "prompt_tokens", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_MODE_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    active_mode: _common_pb2.Mode
    mode_reason: str
    prompt_tokens: int
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., active_mode: _Optional[_Union[_common_pb2.Mode, str]] = ..., mode_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerationChunk(_message.Message):
    __slots__ = ("token_ids", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("finish_reason", "usage", "tag")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    tag: _common_pb2.OptimizationTag
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., tag: _Optional[_Union[_common_pb2.OptimizationTag, _Mapping]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: _common_pb2.Prompt
    def __init__(self, prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("prompt_tokens",)
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ...) -> None: ...

class GatewayServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GatewayServiceGetInfoResponse(_message.Message):
    __slots__ = ("model", "draft", "drafter", "draft_state", "modes", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATE_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    draft: _common_pb2.ModelInfo
    drafter: str
    draft_state: _common_pb2.FallbackReason
    modes: _containers.RepeatedScalarFieldContainer[_common_pb2.Mode]
    version: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., drafter: _Optional[str] = ..., draft_state: _Optional[_Union[_common_pb2.FallbackReason, str]] = ..., modes: _Optional[_Iterable[_Union[_common_pb2.Mode, str]]] = ..., version: _Optional[str] = ...) -> None: ...
