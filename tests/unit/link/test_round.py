"""What the draft could not be told in one round goes with the next one, whole."""

from __future__ import annotations

import numpy as np

from tests.unit.link.toys import GREEDY, following, opening


def test_two_rounds_become_one_that_says_both() -> None:
    told = opening(1, [5, 6], 0).then(following(1, 4, [7, 8], 3, want_distribution=True))
    assert told.start
    assert told.sampling is GREEDY
    assert told.request_id == "request-1"
    assert list(told.tokens) == [5, 6, 7, 8]
    assert (told.committed_length, told.draft_length, told.want_distribution) == (4, 3, True)


def test_features_follow_their_tokens() -> None:
    first = opening(1, [5, 6], 0, features=np.full((1, 1, 4), 1, np.uint16))
    told = first.then(following(1, 4, [7, 8], 3, features=np.full((2, 1, 4), 2, np.uint16)))
    assert told.features is not None
    assert told.features[:, 0, 0].tolist() == [1, 2, 2]


def test_a_new_start_leaves_what_came_before_behind() -> None:
    again = opening(1, [9], 2)
    assert following(1, 4, [7, 8], 3).then(again) is again
