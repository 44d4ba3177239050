# SPDX-License-Identifier: Apache-2.0
"""Cohorts and their samplers, checkpoints, and kept results of centralised systems."""

import logging
import zipfile

import numpy as np
import pytest
from flwr.app import Error, Message

from fedrec.errors import ClientError, EngineError, RunError
from fedrec.protocol.messages import Presence, pack_presence
from server.checkpoint import Checkpoints, State
from server.nodes import Roster, call_roster
from server.samplers import (
    FixedSizeConfig,
    FixedSizeSampler,
    Limited,
    LimitedConfig,
    PoissonConfig,
    PoissonSampler,
)

# Cohort samplers: functions of the seed and the round, with the documented distribution.

CLIENTS = np.arange(5, 205, 5)  # 40 clients, ids with gaps


def fixed(cohort=10, clients=CLIENTS, seed=0):
    return FixedSizeSampler(FixedSizeConfig(cohort=cohort), clients, seed)


def poisson(cohort=10.0, clients=CLIENTS, seed=0):
    return PoissonSampler(PoissonConfig(cohort=cohort), clients, seed)


def test_fixed_size_is_uniform():
    """Chi-square over 40 clients and 2000 cohorts of 10, corrected for drawing without
    replacement."""
    sampler = fixed()
    counts = np.bincount(np.concatenate([sampler.sample(r) for r in range(2000)]), minlength=205)[
        CLIENTS
    ]
    assert counts.sum() == 20_000
    # Each count is binomial(2000, 1/4), and they sum to a constant: 39 degrees of freedom.
    statistic = ((counts - 500) ** 2 / (2000 * 0.25 * 0.75)).sum() * 39 / 40
    assert 15 < statistic < 80  # all but 1e-4 of the distribution on either side


def test_poisson_mean_and_independence():
    sampler = poisson()
    taken = np.stack([np.isin(CLIENTS, sampler.sample(r)) for r in range(4000)])
    sizes = taken.sum(1)
    assert sizes.mean() == pytest.approx(10, abs=5 * np.sqrt(7.5 / 4000))
    assert sizes.var() == pytest.approx(7.5, rel=0.12)  # 40 * 1/4 * 3/4; a fixed size would have 0
    correlations = np.corrcoef(taken.T)[np.triu_indices(40, 1)]
    # Drawing without replacement would give a mean of -1/39 = -0.026.
    assert abs(correlations.mean()) < 0.005 and np.abs(correlations).max() < 5.5 / np.sqrt(4000)


# Limited sampling: no client more often than allowed, and cohorts that are a function of seed and
# round.

LIMITED_SAMPLER_CLIENTS = np.array([2, 3, 5, 7, 11, 13, 17])


def make(cohort=3, participations=2, seed=0):
    return Limited(
        LimitedConfig(cohort=cohort, participations=participations), LIMITED_SAMPLER_CLIENTS, seed
    )


def test_every_client_takes_part_as_often_as_allowed_and_no_more():
    sampler = make()
    cohorts = [sampler.sample(number) for number in range(1, 12)]
    counts = np.bincount(np.concatenate(cohorts), minlength=18)
    assert counts[LIMITED_SAMPLER_CLIENTS].tolist() == [2] * 7 and counts.sum() == 14
    assert all(len(np.unique(cohort)) == len(cohort) <= 3 for cohort in cohorts)
    assert len(cohorts[-1]) == 0


# The roster: the clients of each node, in the order of the nodes' partitions and not of Flower's
# ids.

NOBODY = np.array([], dtype=np.int64)


def presence(partition, training=(), evaluated=()):
    return Presence(
        partition, np.array(training, dtype=np.int64), np.array(evaluated, dtype=np.int64)
    )


class Answering:
    """A grid whose nodes reply to `hello` with given contents."""

    def __init__(self, answers):
        self.answers = answers

    def get_node_ids(self):
        return list(self.answers)

    def send_and_receive(self, messages, *, timeout=None):
        self.timeout = timeout
        return [
            self._reply(message)
            for message in messages
            if self.answers[message.metadata.dst_node_id]
        ]

    def _reply(self, message):
        answer = self.answers[message.metadata.dst_node_id]
        content = pack_presence(answer) if isinstance(answer, Presence) else answer
        return Message(content, reply_to=message)


@pytest.mark.usefixtures("identity")
def test_nodes_are_ordered_by_their_partition():
    grid = Answering(
        {17: presence(2, [2, 5]), 901: presence(0, [3], [0]), 450: presence(1, [4, 1], [7])}
    )
    roster = call_roster(grid, timeout=9.0)
    assert roster.nodes == (901, 450, 17) and grid.timeout == 9.0
    assert [found.partition for found in roster.presences] == [0, 1, 2]
    assert roster.training.tolist() == [1, 2, 3, 4, 5] and roster.evaluated.tolist() == [0, 7]


@pytest.mark.usefixtures("identity")
def test_clients_are_grouped_by_the_node_that_hosts_them():
    roster = Roster(
        (17, 450, 901), (presence(0, [0, 3], [6]), presence(1, [1]), presence(2, [2, 5], [8]))
    )
    groups = {
        node: clients.tolist()
        for node, clients in roster.by_node(np.array([-1, 0, 2, 3, 4, 5, 6, 8, 9]))
    }
    assert groups == {17: [0, 3, 6], 901: [2, 5, 8]}
    assert list(roster.by_node(NOBODY)) == []


def working(partition, training, work):
    return Presence(partition, np.array(training), NOBODY, np.array(work))


@pytest.mark.usefixtures("identity")
def test_nodes_that_may_train_each_others_clients_share_the_work():
    """On the hosting nodes the work of the cohort would be 1,300 and 10."""
    roster = Roster(
        (17, 450), (working(0, [0, 2, 4], [600, 400, 300]), working(1, [1, 3], [10, 5000]))
    )
    groups = {
        node: clients.tolist() for node, clients in roster.for_training(np.array([0, 1, 2, 4]))
    }
    assert groups == {17: [0, 1], 450: [2, 4]}
    assert list(roster.for_training(NOBODY)) == []


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("answers", [{}, {2: presence(0), 3: presence(0)}])
def test_no_nodes_and_two_nodes_of_one_place_are_refused(answers):
    with pytest.raises(EngineError, match="do not form a federation") as caught:
        call_roster(Answering(answers), timeout=1.0)
    assert caught.value.got == f"partition-ids {[found.partition for found in answers.values()]}"


@pytest.mark.usefixtures("identity")
def test_a_node_that_fails_or_does_not_answer_is_reported():
    with pytest.raises(ClientError) as caught:
        call_roster(Answering({2: presence(0), 3: Error(2, "no data here")}), timeout=1.0)
    assert caught.value.problem == "1 of 2 nodes failed" and caught.value.got == "no data here"
    with pytest.raises(ClientError) as caught:
        call_roster(Answering({2: presence(0), 3: None}), timeout=1.0)
    assert caught.value.got == "no reply before the deadline"


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


def test_the_newest_is_read_and_only_the_newest_are_kept(checkpoints):
    for round_number in (1, 2, 9, 10, 11):
        checkpoints.save(state(round_number))
    assert files(checkpoints) == ["round-000009.npz", "round-000010.npz", "round-000011.npz"]
    assert checkpoints.latest().round == 11


def test_a_truncated_checkpoint_is_replaced_by_the_previous_one_with_a_warning(checkpoints, caplog):
    assert checkpoints.latest() is None
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
    assert "missing or additional arrays" in caplog.text


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
    assert "another experiment" in caught.value.problem


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
