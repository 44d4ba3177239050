# SPDX-License-Identifier: Apache-2.0
"""Runs that are interrupted and resumed, and whether two runs are the same."""

import numpy as np
import pandas as pd
import pytest

from fedrec.privacy.accounting.accountant import Ledger
from server.callbacks import Callback
from simulations import runner


def parameters_in(folder):
    """The parameters in the newest checkpoint of a run folder, with numpy alone."""
    with np.load(max((folder / "checkpoints").glob("round-*.npz"))) as file:
        return {
            name.removeprefix("parameters/"): file[name]
            for name in file.files
            if name.startswith("param")
        }


def charged(folder):
    """The lines of the ledger of a run folder."""
    return Ledger(folder / "privacy.jsonl").charges


def charges(folder):
    """The round of each line of the ledger of a run folder."""
    return [line.round_number for line in charged(folder)]


def assert_close(found, expected, rtol=0.0, atol=0.0):
    """Parameters of the same names, equal up to tolerances."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def assert_same_run(found, expected, *, ids=True, **tolerances):
    """Two results whose run folders have the same tables and the same parameters; users.csv without
    the data's ids if the server of the first has not read the data. Losses may differ in their last
    digits: two processes that compile the same source at the same time get different code."""
    assert_close(parameters_in(found.folder), parameters_in(expected.folder), **tolerances)
    tables = sorted(file.name for file in expected.folder.glob("*.csv"))
    assert {"rounds.csv", "users.csv", "groups.csv"} <= set(tables)
    for name in tables:
        table, other = (pd.read_csv(one.folder / name) for one in (found, expected))
        if name == "users.csv" and not ids:
            other = other.drop(columns="user")
        if name != "timings.csv":
            pd.testing.assert_frame_equal(table, other, rtol=1e-8, obj=name)


class Interrupt(Callback):
    """Ends the process after a round, as Ctrl-C would."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_start(self, run, first_round, rounds):
        self.folder = run.path

    def after_round(self, row, seconds):
        if row["round"] == self.after:
            raise KeyboardInterrupt
        return False


def resumed(run, *overrides, after):
    """The result of a run that was interrupted after a round; `run` is such as `run_tiny`."""
    interrupt = Interrupt(after)
    with pytest.raises(KeyboardInterrupt):
        run(*overrides, output="broken", callbacks=[interrupt])
    return runner.resume(interrupt.folder)


class Broken(BaseException):
    """Stands for a crash."""


def crash_in_round(monkeypatch, number, where):
    """Makes one operation fail once, in one round."""
    healthy = getattr(*where)

    def fails(*of, **more):
        if number in of and not fails.done:
            fails.done = True
            raise Broken
        return healthy(*of, **more)

    fails.done = False
    monkeypatch.setattr(*where, fails)
