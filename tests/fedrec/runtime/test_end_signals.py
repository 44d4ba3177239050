# SPDX-License-Identifier: Apache-2.0
"""Signals interrupt at once, or after what must be finished; handlers of others stay."""

import contextlib
import signal

import pytest

from fedrec.runtime.end_signals import interrupting, raise_if_interrupted, uninterrupted

SIGNS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_a_signal_interrupts_at_once(sign):
    done = []
    with pytest.raises(KeyboardInterrupt, match=sign.name), interrupting():
        signal.raise_signal(sign)
        done.append("after")
    assert not done


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_what_is_begun_is_finished_first(sign):
    done = []
    with pytest.raises(KeyboardInterrupt, match=sign.name), interrupting():
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(sign)
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]


def test_a_signal_counts_once_and_an_error_within_does_not_hide_it():
    with interrupting():
        with pytest.raises(KeyboardInterrupt) as interrupted, uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("an error")
        assert isinstance(interrupted.value.__context__, ValueError)
        with uninterrupted():
            pass


def test_handlers_of_others_stay_and_ours_are_gone_afterwards(monkeypatch):
    own = []
    before = [signal.getsignal(sign) for sign in SIGNS]
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
        with interrupting(), interrupting(), uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            assert own == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is before[0]
        assert signal.getsignal(signal.SIGHUP) is before[2]
    finally:
        for sign, handler in zip(SIGNS, before, strict=True):
            signal.signal(sign, handler)


def test_without_interrupting_nothing_waits():
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it waited")


def test_an_interruption_that_was_dropped_is_raised_again():
    with interrupting():
        raise_if_interrupted()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
            raise_if_interrupted()
    with interrupting():
        raise_if_interrupted()
