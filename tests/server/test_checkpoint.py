# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bit-exact, and damage is detected."""

import json
import logging
import signal
import threading
import zipfile

import numpy as np
import pytest

from fedrec.errors import RunError
from fedrec.runtime.end_signals import interrupting
from server.checkpoint import Checkpoints, State


def state(round_number=1):
    generator = np.random.default_rng(round_number)
    parameters = {
        "item.id": generator.standard_normal((4, 3)).astype(np.float32),
        "layer0/weight": generator.standard_normal(5),
        "half": generator.standard_normal(2).astype(np.float16),
        "scalar": np.array(-0.0, dtype=np.float32),
    }
    rows = [{"round": r, "loss": 0.1 * r, "num-clients": r} for r in range(1, round_number + 1)]
    return State(
        round_number,
        parameters,
        {"m_t/dict/item.id": np.ones(3), "eta/float/": np.asarray(0.1)},
        rows,
        rows,
    )


def same(one, other):
    for first, second in ((one.parameters, other.parameters), (one.strategy, other.strategy)):
        if list(first) != list(second):
            return False
        for name, array in first.items():
            found = second[name]
            if (found.dtype, found.shape, found.tobytes()) != (
                array.dtype,
                array.shape,
                array.tobytes(),
            ):
                return False
    return (one.round, one.rounds, one.timings) == (other.round, other.rounds, other.timings)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", "digest", keep=3)


def files(checkpoints):
    return sorted(file.name for file in checkpoints.folder.iterdir())


def test_a_state_comes_back_bit_for_bit(checkpoints):
    assert checkpoints.latest() is None
    checkpoints.save(state(2))
    assert same(checkpoints.latest(), state(2))


def test_numbers_of_the_rounds_come_back_as_they_were(checkpoints):
    rows = [{"round": 1, "loss": 0.1 + 0.2, "tiny": 5e-324, "int": 2**60, "nan": float("nan")}]
    checkpoints.save(State(1, {}, {}, rows, []))
    assert repr(checkpoints.latest().rounds) == repr(rows)


def test_the_newest_is_read_and_only_the_newest_are_kept(checkpoints):
    for round_number in (1, 2, 9, 10, 11):
        checkpoints.save(state(round_number))
    assert files(checkpoints) == ["round-000009.npz", "round-000010.npz", "round-000011.npz"]
    assert checkpoints.latest().round == 11


def test_other_files_are_left_alone(checkpoints):
    checkpoints.folder.mkdir()
    (checkpoints.folder / "round-notes.npz").write_text("mine")
    for round_number in range(1, 6):
        checkpoints.save(state(round_number))
    assert len(files(checkpoints)) == 4 and "round-notes.npz" in files(checkpoints)


def test_a_truncated_checkpoint_is_replaced_by_the_previous_one_with_a_warning(checkpoints, caplog):
    for round_number in (1, 2, 3):
        checkpoints.save(state(round_number))
    newest = checkpoints.folder / "round-000003.npz"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with caplog.at_level(logging.WARNING, "fedrec"):
        assert same(checkpoints.latest(), state(2))
    assert "round-000003.npz is damaged" in caplog.text
    checkpoints.save(state(3))  # the round is repeated and rewrites the file
    assert same(checkpoints.latest(), state(3))


def test_a_checkpoint_without_one_of_its_parameters_is_damaged(checkpoints, caplog):
    for round_number in (1, 2):
        checkpoints.save(state(round_number))
    newest = checkpoints.folder / "round-000002.npz"
    with zipfile.ZipFile(newest) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    lost = next(name for name in members if name.startswith("parameters/"))
    with zipfile.ZipFile(newest, "w") as archive:
        for name in members.keys() - {lost}:
            archive.writestr(name, members[name])
    with caplog.at_level(logging.WARNING, "fedrec"):
        assert same(checkpoints.latest(), state(1))
    assert "an array is missing" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\x00" * 500, b"PK\x03\x04 not an archive"])
def test_when_all_are_damaged_the_run_cannot_go_on(checkpoints, content):
    for round_number in (1, 2):
        checkpoints.save(state(round_number))
    for file in checkpoints.folder.iterdir():
        file.write_bytes(content)
    with pytest.raises(RunError) as caught:
        checkpoints.latest()
    assert caught.value.got == "2 damaged files"


def test_a_checkpoint_of_another_experiment_is_refused(checkpoints):
    checkpoints.save(state())
    with pytest.raises(RunError, match="another experiment") as caught:
        Checkpoints(checkpoints.folder, "other digest", keep=3).latest()
    assert "other digest" in caught.value.expected


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
def test_no_flipped_byte_changes_the_state_unnoticed(checkpoints, first):
    """For each byte of the file, with two of four masks: damage is detected, or the state is
    unchanged (a flip in a time stamp)."""
    masks = (0x01, 0x08, 0x80, 0xFF)
    small = State(1, {"w": np.array([1.5, 2], np.float32)}, {}, [{"round": 1}], [])
    checkpoints.save(small)
    file = checkpoints.folder / "round-000001.npz"
    content, noticed = file.read_bytes(), 0
    for place in range(len(content)):
        changed = content[place] ^ masks[(place + first) % 4]
        file.write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
        try:
            assert same(checkpoints.latest(), small), f"byte {place}"
        except RunError:
            noticed += 1
    assert noticed > len(content) / 2


def test_nothing_is_unpickled(checkpoints):
    checkpoints.folder.mkdir()
    np.savez(checkpoints.folder / "round-000001.npz", about=np.array([{"round": 1}], dtype=object))
    with pytest.raises(RunError, match="can be read"):
        checkpoints.latest()


def test_a_checkpoint_of_changed_rows_is_refused_with_what_reads_it(checkpoints):
    """Earlier versions wrote large tables as their difference from an earlier checkpoint."""
    checkpoints.folder.mkdir()
    checkpoints.save(state(1))
    about = {
        "round": 2,
        "rounds": [],
        "timings": [],
        "digest": "digest",
        "arrays": ["parameters/w"],
    }
    changes = {"base": 1, "checksums": {"parameters/w": 7}}
    text = np.frombuffer(json.dumps({**about, "changes": changes}).encode(), np.uint8)
    rows = {"parameters/w/rows": np.arange(1), "parameters/w/values": np.ones((1, 2))}
    np.savez(checkpoints.folder / "round-000002.npz", about=text, **rows)
    with pytest.raises(RunError, match="only the rows that changed") as caught:
        checkpoints.latest()
    assert "version that run.json names" in caught.value.fix


@pytest.mark.timeout(20)
def test_a_signal_while_a_state_is_handed_over_comes_after_it(checkpoints, monkeypatch):
    """An exception at the end of `with lock` leaves it locked, and the writer waits for ever."""
    leave = threading.Condition.__exit__

    def interrupted(condition, *error):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGHUP)
        return leave(condition, *error)

    with interrupting():
        monkeypatch.setattr(threading.Condition, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.begin(state(1))
        checkpoints.begin(state(2))
        checkpoints.finish()
    assert same(checkpoints.latest(), state(2)) and len(files(checkpoints)) == 2
