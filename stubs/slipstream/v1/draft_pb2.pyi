from slipstream.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType

class DraftServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetInfoResponse(_message.Message):
    __slots__ = ("model", "drafters", "max_draft_length", "context_limit", "max_sequences", "feature_layers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_draft_length: int
    context_limit: int
    max_sequences: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., drafters: _Optional[_Iterable[str]] = ..., max_draft_length: _Optional[int] = ..., context_limit: _Optional[int] = ..., max_sequences: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("attach", "propose", "release", "mapped")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    propose: Propose
    release: Release
    mapped: Mapped
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., mapped: _Optional[_Union[Mapped, _Mapping]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("attached", "proposal", "failed")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    proposal: Proposal
    failed: Failed
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("target", "shared_memory", "hidden_size")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.ModelInfo
    shared_memory: bool
    hidden_size: int
    def __init__(self, target: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., shared_memory: _Optional[bool] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("info", "session_id", "proposals", "features", "draft_vocabulary")
    INFO_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    info: DraftServiceGetInfoResponse
    session_id: str
    proposals: Arena
    features: Arena
    draft_vocabulary: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, info: _Optional[_Union[DraftServiceGetInfoResponse, _Mapping]] = ..., session_id: _Optional[str] = ..., proposals: _Optional[_Union[Arena, _Mapping]] = ..., features: _Optional[_Union[Arena, _Mapping]] = ..., draft_vocabulary: _Optional[_Iterable[int]] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("name", "size", "epoch", "slots", "slot_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    epoch: int
    slots: int
    slot_size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., epoch: _Optional[int] = ..., slots: _Optional[int] = ..., slot_size: _Optional[int] = ...) -> None: ...

class Mapped(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("round", "sequences")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    round: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceContext]
    def __init__(self, round: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceContext, _Mapping]]] = ...) -> None: ...

class SequenceContext(_message.Message):
    __slots__ = ("sequence_id", "committed_length", "tokens", "draft_length", "sampling", "start", "features", "want_distribution", "request_id")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    WANT_DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    committed_length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    draft_length: int
    sampling: _common_pb2.SamplingParams
    start: bool
    features: Tensor
    want_distribution: bool
    request_id: str
    def __init__(self, sequence_id: _Optional[int] = ..., committed_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., draft_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., start: _Optional[bool] = ..., features: _Optional[_Union[Tensor, _Mapping]] = ..., want_distribution: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("round", "sequences", "draft_time_us", "draft_passes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PASSES_FIELD_NUMBER: _ClassVar[int]
    round: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceProposal]
    draft_time_us: int
    draft_passes: int
    def __init__(self, round: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceProposal, _Mapping]]] = ..., draft_time_us: _Optional[int] = ..., draft_passes: _Optional[int] = ...) -> None: ...

class SequenceProposal(_message.Message):
    __slots__ = ("sequence_id", "base_length", "tokens", "distribution", "refusal")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    distribution: Tensor
    refusal: _common_pb2.FallbackReason
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., distribution: _Optional[_Union[Tensor, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.FallbackReason, str]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "inline", "region")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    region: ArenaRegion
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ..., region: _Optional[_Union[ArenaRegion, _Mapping]] = ...) -> None: ...

class ArenaRegion(_message.Message):
    __slots__ = ("epoch", "slot", "generation", "offset", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    slot: int
    generation: int
    offset: int
    length: int
    def __init__(self, epoch: _Optional[int] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FallbackReason
    detail: str
    def __init__(self, reason: _Optional[_Union[_common_pb2.FallbackReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...
