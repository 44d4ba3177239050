# SPDX-License-Identifier: Apache-2.0
"""Traces in FedScale's form, written by hand, and files that are none."""

import json
import os
import pickle

import numpy as np
import pytest

from fedrec.devices.devices import Devices, DevicesConfig
from fedrec.devices.fedscale import read_behaviour, read_capacity
from fedrec.errors import DataError

CAPACITY = {
    7: {"computation": 100.0, "communication": 8000.0},
    9: {"computation": 20, "communication": 400.0},
}
BEHAVIOUR = {
    7: {
        "duration": 60,
        "inactive": [30, 90],
        "finish_time": 100,
        "active": [10, 50],
        "model": "phone",
    },
    9: {"inactive": [], "finish_time": 100, "active": []},
}
WRITTEN = {"json": lambda found: json.dumps(found).encode(), "pickle": pickle.dumps}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_trace_is_read_by_fedscales_formula(tmp_path, form):
    """Completion time = 3 * examples * computation / 1000 + kilobits / communication."""
    file = tmp_path / "capacity"
    file.write_bytes(WRITTEN[form](CAPACITY))
    found = read_capacity(file)
    megabytes, examples = 2.0, 50
    for (compute, network), entry in zip(found, CAPACITY.values(), strict=True):
        kilobits = megabytes * 10**6 * 8 / 1000
        expected = (
            3 * examples * entry["computation"] / 1000 + 2 * kilobits / entry["communication"]
        )
        assert examples * compute + 2 * megabytes * network == pytest.approx(expected)


@pytest.mark.parametrize("form", WRITTEN)
def test_a_client_is_a_device_of_the_trace(tmp_path, form):
    capacity, behaviour = tmp_path / "capacity", tmp_path / "behaviour"
    capacity.write_bytes(WRITTEN[form](CAPACITY))
    behaviour.write_bytes(WRITTEN[form](BEHAVIOUR))
    devices = Devices(DevicesConfig(capacity=capacity, behaviour=behaviour), seed=3)
    clients = np.arange(400)
    seconds = devices.seconds(clients, 10, 1.0)
    # 3 * 10 * .1 + 2 * 8000 / 8000, and 3 * 10 * .02 + 2 * 8000 / 400
    assert set(np.round(seconds, 9)) == {5.0, 40.6}
    assert 150 < (seconds == seconds.min()).sum() < 250
    until = devices.until(clients, 120.0)
    assert set(until.tolist()) == {130.0, -np.inf}
    assert set(devices.back(clients, 0.0).tolist()) == {10.0, np.inf}


class Harmful:
    """Runs a command when it is unpickled by anything that can run one."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_pickled_file_runs_nothing(tmp_path):
    file = tmp_path / "capacity"
    file.write_bytes(pickle.dumps({1: Harmful(tmp_path / "made")}))
    with pytest.raises(DataError, match="is no trace of devices"):
        read_capacity(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_capacity, b""),
        (read_capacity, b"{"),
        (read_capacity, b"{}"),
        (read_capacity, b"[1]"),
        (read_capacity, pickle.dumps(CAPACITY)[:-9]),
        (read_capacity, json.dumps({"1": {"computation": 1}}).encode()),
        (read_capacity, json.dumps({"1": {"computation": 1, "communication": 0}}).encode()),
        (read_capacity, b'{"1": {"computation": NaN, "communication": 1}}'),
        (read_capacity, json.dumps({"1": {"computation": True, "communication": 1}}).encode()),
        (read_capacity, json.dumps({"1": {"computation": 10**400, "communication": 1}}).encode()),
        (
            read_behaviour,
            json.dumps({"1": {"active": [0], "inactive": [10**400], "finish_time": 5}}).encode(),
        ),
        (read_behaviour, json.dumps({"1": {"active": [1], "finish_time": 5}}).encode()),
        (
            read_behaviour,
            json.dumps({"1": {"active": [3], "inactive": [2], "finish_time": 5}}).encode(),
        ),
        (
            read_behaviour,
            json.dumps({"1": {"active": [1, 2], "inactive": [3, 4], "finish_time": 5}}).encode(),
        ),
        (
            read_behaviour,
            json.dumps({"1": {"active": [1], "inactive": [9], "finish_time": 5}}).encode(),
        ),
    ],
)
def test_files_that_are_no_trace(tmp_path, read, content):
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(DataError, match="is no trace of devices"):
        read(file)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="is no trace of devices"):
        read_capacity(tmp_path / "none")
