"""Which drafts may ride with a target: the same tokens, other weights."""

from __future__ import annotations

import pytest
from slipstream.v1 import common_pb2, draft_pb2

from services.link.pairing import AttachError, check_draft, check_models, read_columns, width
from tests.unit.link.toys import TARGET, draft_info


def test_padding_of_the_embedding_is_tolerated() -> None:
    padded = draft_info(vocabulary_size=128).model
    check_models(TARGET, padded)
    assert width(TARGET, padded, None) == 64


def test_another_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(AttachError, match="'draft' and target 'target' have different tokenizers") as error:
        check_models(TARGET, draft_info(tokenizer_fingerprint="sha256:others").model)
    assert error.value.reason == common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH


def test_a_draft_that_does_not_say_its_tokenizer_is_refused() -> None:
    nameless = common_pb2.ModelInfo(weights_fingerprint="sha256:target")
    with pytest.raises(AttachError, match="tokenizers"):
        check_models(nameless, draft_info(tokenizer_fingerprint="").model)


def test_a_target_as_its_own_draft_is_refused() -> None:
    with pytest.raises(AttachError, match="its own draft") as error:
        check_models(TARGET, draft_info(weights_fingerprint="sha256:target").model)
    assert error.value.reason == common_pb2.FALLBACK_REASON_DRAFT_INVALID


@pytest.mark.parametrize("columns", [[-1, 2], [2, 1], [3, 3], [0, 64]])
def test_a_draft_vocabulary_must_ascend_within_the_targets(columns: list[int]) -> None:
    with pytest.raises(AttachError, match="ascending"):
        read_columns(draft_pb2.Attached(draft_vocabulary=columns), 64)


def test_a_draft_vocabulary_names_the_columns_of_q() -> None:
    columns = read_columns(draft_pb2.Attached(draft_vocabulary=[0, 5, 63]), 64)
    assert columns is not None
    assert columns.tolist() == [0, 5, 63]
    assert width(TARGET, draft_info().model, columns) == 3
    assert read_columns(draft_pb2.Attached(), 64) is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"max_draft_length": 0}, "guesses nothing"),
        ({"drafters": []}, "names no drafter"),
        ({"feature_layers": [1, -1]}, "layers"),
        ({"feature_layers": [1, 13]}, "layers"),
    ],
)
def test_a_draft_must_say_what_the_target_relies_on(changes: dict[str, object], what: str) -> None:
    with pytest.raises(AttachError, match=what) as error:
        check_draft(draft_info(**changes), 12)
    assert error.value.reason == common_pb2.FALLBACK_REASON_DRAFT_INVALID


def test_every_layer_of_the_target_may_be_asked_for_and_its_embedding() -> None:
    check_draft(draft_info(feature_layers=[0, 12]), 12)


def test_a_draft_that_holds_no_token_is_refused() -> None:
    info = draft_info()
    info.context_limit = 0  # The draft's, not its model's.
    with pytest.raises(AttachError, match="holds no sequence"):
        check_draft(info, 12)
