# SPDX-License-Identifier: Apache-2.0
"""Masked views: replaced items, their replacements and frequencies, by enumeration."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chisquare

from fedrec.pretext.views import ViewLayout, cut_sessions, draw_views

LAYOUT = ViewLayout(session=6, item_negatives=3, segment=2, segment_negatives=4)


def parts(views, layout=LAYOUT):
    """The four parts of each view as lists without padding; segments as a list of lists."""
    bounds = np.cumsum((0, *layout.widths))
    for view in views:
        masked, candidates, replaced, segments = (
            view[start:stop] for start, stop in pairwise(bounds)
        )
        rows = segments.reshape(-1, layout.segment)
        yield (
            [part[part >= 0].tolist() for part in (masked, candidates, replaced)],
            [r[r >= 0].tolist() for r in rows],
        )


@pytest.mark.parametrize(
    ("items", "longest", "expected"),
    [
        (0, 5, []),
        (1, 5, []),
        (2, 5, [(0, 2)]),
        (5, 5, [(0, 5)]),
        (6, 5, [(0, 3), (3, 3)]),
        (11, 4, [3, 4, 4]),
    ],
)
def test_sessions_are_few_nearly_equal_and_of_two_items_at_least(items, longest, expected):
    starts, lengths = cut_sessions(items, longest)
    if expected == [3, 4, 4]:
        assert lengths.tolist() == expected and starts.tolist() == [0, 3, 7]
    else:
        assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == expected


def test_a_session_of_one_item_is_dropped():
    starts, lengths = cut_sessions(3, 2)
    assert (starts.tolist(), lengths.tolist()) == ([1], [2])


def test_every_view_hides_one_item_and_one_segment_of_its_session():
    """27 distinct items in five sessions; items from 100 on are unknown to the user."""
    sequence = np.random.default_rng(0).permutation(27)
    starts, lengths = cut_sessions(27, 6)
    sessions = [
        sequence[start : start + length].tolist()
        for start, length in zip(starts, lengths, strict=True)
    ]
    views = draw_views(sequence, LAYOUT, 40, 200, np.random.default_rng(1))
    assert views.shape == (5 * 40, LAYOUT.width)
    for number, ((masked, candidates, replaced), segments) in enumerate(parts(views)):
        session = sessions[number // 40]
        (spot,) = (
            place
            for place, (old, new) in enumerate(zip(session, masked, strict=True))
            if old != new
        )
        assert candidates[0] == session[spot] and candidates[1] == masked[spot]
        assert len(candidates) == 4 and all(27 <= item < 200 for item in candidates[1:])
        true, *negatives = segments
        begin = session.index(true[0])
        assert session[begin : begin + 2] == true
        assert replaced == session[:begin] + negatives[0] + session[begin + 2 :]
        for negative in negatives:
            assert not set(negative) & set(true)
            assert any(
                negative == own[at : at + 2] for own in sessions for at in range(len(own) - 1)
            )


def test_a_masked_place_may_stay_empty():
    """The same draws except for the replacement; without segments there are no other parts."""
    sequence = np.random.default_rng(0).permutation(27)
    kept = LAYOUT.widths[0] + LAYOUT.widths[1]
    replaced, emptied = (
        draw_views(sequence, ViewLayout(6, 3, segment, 4, empty), 5, 200, np.random.default_rng(1))
        for segment, empty in ((2, False), (0, True))
    )
    assert emptied.shape[1] == kept < replaced.shape[1]
    changed = emptied != replaced[:, :kept]
    assert (changed.sum(axis=1) == 1).all() and (emptied[changed] == -1).all()
    assert (replaced[:, :kept][changed] == replaced[:, LAYOUT.session + 1]).all()


def test_segments_and_negatives_are_drawn_uniformly():
    """Sessions 0-4 and 5-9, segments of two items: given the true segment, all windows off it are
    equally likely."""
    layout = ViewLayout(session=5, item_negatives=1, segment=2, segment_negatives=1)
    views = draw_views(np.arange(10), layout, 6000, 11, np.random.default_rng(0))
    seen = Counter((tuple(segments[0]), tuple(segments[1])) for _, segments in parts(views, layout))
    windows = [(at, at + 1) for at in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert {true for true, _ in seen} == set(windows)
    for true in windows:
        possible = [window for window in windows if not set(window) & set(true)]
        counts = [seen[true, window] for window in possible]
        assert sum(counts) == sum(count for (own, _), count in seen.items() if own == true)
        assert chisquare(counts).pvalue > 1e-4
    assert (
        chisquare(
            [sum(c for (own, _), c in seen.items() if own == true) for true in windows]
        ).pvalue
        > 1e-4
    )


def test_masked_places_are_uniform():
    layout = ViewLayout(session=5, item_negatives=1, segment=1, segment_negatives=1)
    views = draw_views(np.arange(5), layout, 5000, 6, np.random.default_rng(0))
    assert chisquare(np.bincount(views[:, layout.session])).pvalue > 1e-4


def test_a_session_too_short_for_a_segment_offers_none():
    """11 items by at most 5: sessions of 3, 4 and 4. Segments of two items come from the sessions
    of 4 by half."""
    layout = ViewLayout(session=5, item_negatives=1, segment=2, segment_negatives=3)
    for (_, _, _), segments in parts(
        draw_views(np.arange(11), layout, 50, 12, np.random.default_rng(0)), layout
    ):
        assert {len(segment) for segment in segments} in ({1}, {2})
        assert all(
            not (segment[0] < edge <= segment[-1]) for segment in segments for edge in (3, 7)
        )


@pytest.mark.parametrize("sequence", [[], [3]])
def test_less_than_two_items_give_no_view(sequence):
    views = draw_views(np.array(sequence, dtype=np.int64), LAYOUT, 3, 10, np.random.default_rng(0))
    assert views.shape == (0, LAYOUT.width)


def test_a_repeated_item_is_never_its_own_negative():
    views = draw_views(np.array([1, 1]), LAYOUT, 50, 3, np.random.default_rng(0))
    for (_, candidates, replaced), segments in parts(views):
        assert candidates[0] == 1 and not {1} & set(candidates[1:])
        assert replaced == [1, 1] and segments == [[1]] * 5


def test_a_view_without_another_segment_says_so():
    """One session of four items: a segment in its middle overlaps every other one."""
    layout = ViewLayout(session=4, item_negatives=1, segment=2, segment_negatives=2)
    found = set()
    for (masked, _, replaced), segments in parts(
        draw_views(np.arange(4), layout, 60, 6, np.random.default_rng(0)), layout
    ):
        assert len(masked) == 4
        found.add((tuple(replaced), tuple(map(tuple, segments))))
    assert found == {
        ((), ((), (), ())),
        ((2, 3, 2, 3), ((0, 1), (2, 3), (2, 3))),
        ((0, 1, 0, 1), ((2, 3), (0, 1), (0, 1))),
    }


def test_a_user_who_knows_the_whole_catalogue_has_no_views():
    assert draw_views(np.arange(4), LAYOUT, 1, 4, np.random.default_rng(0)).shape == (
        0,
        LAYOUT.width,
    )


def test_the_same_stream_gives_the_same_views():
    one, other = (
        draw_views(np.arange(20), LAYOUT, 3, 50, np.random.default_rng(5)) for _ in range(2)
    )
    np.testing.assert_array_equal(one, other)
