# SPDX-License-Identifier: Apache-2.0
"""Errors: text, exit codes, and pickling between processes."""

import ast
import pickle
from pathlib import Path

import pytest

from fedrec import errors
from fedrec.errors import ClientError, FedrecError

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FedrecError)
]


def test_text_has_one_line_per_given_part():
    error = ClientError("client 3 failed", expected="an update", fix="lower the rate")
    assert str(error) == "client 3 failed\n  expected: an update\n  fix: lower the rate"


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_keeps_kind_and_parts(kind):
    error = pickle.loads(pickle.dumps(kind("p", expected="e", got="g", fix="f")))
    assert type(error) is kind
    assert (error.problem, error.expected, error.got, error.fix) == ("p", "e", "g", "f")


def test_exit_codes_differ():
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS)
    assert 0 not in {kind.exit_code for kind in KINDS}


@pytest.mark.parametrize("package", ["fedrec", "clients", "server", "strategies", "simulations"])
def test_every_error_says_how_to_fix_it(package):
    kinds = {kind.__name__ for kind in KINDS}
    files = list((Path(__file__).resolve().parents[2] / package).rglob("*.py"))
    calls = [
        (f"{file}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for file in files
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in kinds
    ]
    assert len(calls) > 1 and not [place for place, given in calls if "fix" not in given]
