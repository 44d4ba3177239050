# SPDX-License-Identifier: Apache-2.0
"""Configuration: errors give the full key, what was expected, and how to fix it."""

from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from fedrec.config import Config, did_you_mean
from fedrec.errors import ExperimentError


class Inner(Config):
    step_size: float = Field(default=0.1, gt=0, lt=1)
    """How far one step goes, in (0, 1)."""
    mode: Literal["fast", "exact"] = "fast"


class Outer(Config):
    rounds: int = Field(ge=1)
    """Number of rounds."""
    inner_part: Inner = Inner()
    ks: tuple[int, ...] = (5,)
    name: str | None = None

    @model_validator(mode="after")
    def _fits(self):
        if self.rounds == 13:
            raise ValueError("rounds that are lucky")
        return self


def fault(settings, at=""):
    with pytest.raises(ExperimentError) as caught:
        Outer.parse(settings, at=at)
    return caught.value


def test_keys_are_kebab_case_and_both_spellings_are_read():
    assert Outer.keys() == ["rounds", "inner-part", "ks", "name"]
    by_toml = Outer.parse({"rounds": 2, "inner-part": {"step-size": 0.5}})
    assert by_toml == Outer(rounds=2, inner_part=Inner(step_size=0.5))
    assert by_toml.table() == {
        "rounds": 2,
        "inner-part": {"step-size": 0.5, "mode": "fast"},
        "ks": [5],
    }


def test_docstrings_of_fields_are_descriptions_also_in_schemas():
    """Those of a base, too; a field that is declared anew has its own text or none."""

    class Derived(Outer):
        rounds: int = 1
        given: int = Field(5, description="Given.")
        """Below."""
        below: int = 6
        """Two
        lines."""

    assert Outer.descriptions() == {"rounds": "Number of rounds."}
    assert Derived.descriptions() == {"given": "Given.", "below": "Two\nlines."}
    properties = Derived.model_json_schema(by_alias=False)["properties"]
    assert {name for name, one in properties.items() if "description" in one} == {"given", "below"}


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Outer(rounds=2).rounds = 3


def test_unknown_key_is_answered_with_the_nearest():
    error = fault({"rounds": 2, "round": 3})
    assert error.problem == "unknown key 'round'"
    assert error.fix == "did you mean 'rounds'?" and error.got == "round = 3"


def test_unknown_nested_key_is_named_in_full_with_the_keys_of_its_own_table():
    error = fault({"rounds": 2, "inner-part": {"step-sise": 0.1}}, at="strategy")
    assert error.problem == "unknown key 'strategy.inner-part.step-sise'"
    assert error.fix == "did you mean 'step-size'?"


def test_unknown_key_that_is_like_nothing_gets_the_whole_list():
    assert fault({"rounds": 2, "zzz": 1}).fix == "known: 'inner-part', 'ks', 'name', 'rounds'"


def test_missing_key():
    error = fault({}, at="here")
    assert error.problem == "missing key 'here.rounds'" and "set here.rounds" in error.fix


@pytest.mark.parametrize(
    ("settings", "key", "expected", "got"),
    [
        ({"rounds": "many"}, "rounds", "valid integer", "'many' (str)"),
        ({"rounds": [1]}, "rounds", "valid integer", "[1] (list)"),
        ({"rounds": 0}, "rounds", "greater than or equal to 1", "0 (int)"),
        ({"rounds": 1.5}, "rounds", "integer", "1.5 (float)"),
        (
            {"rounds": 2, "inner-part": {"step-size": 1}},
            "inner-part.step-size",
            "less than 1",
            "1 (int)",
        ),
        (
            {"rounds": 2, "inner-part": {"step-size": float("nan")}},
            "inner-part.step-size",
            "finite",
            "nan (float)",
        ),
        (
            {"rounds": 2, "inner-part": {"mode": "slow"}},
            "inner-part.mode",
            "'fast' or 'exact'",
            "'slow' (str)",
        ),
        ({"rounds": 2, "ks": [5, "x"]}, "ks.1", "integer", "'x' (str)"),
    ],
)
def test_the_error_for_a_wrong_value_has_key_expected_and_got(settings, key, expected, got):
    error = fault(settings)
    assert error.problem == f"wrong value for {key!r}"
    assert expected in error.expected and error.got == got


def test_wrong_value_shows_the_meaning_of_the_key():
    assert fault({"rounds": 0}).fix == "rounds: Number of rounds."
    nested = fault({"rounds": 2, "inner-part": {"step-size": 7}})
    assert nested.fix == "step-size: How far one step goes, in (0, 1)."


def test_further_faults_are_counted():
    assert fault({"rounds": 0, "zzz": 1}).problem.endswith("(1 more fault after this one)")
    assert fault({"rounds": 0, "zzz": 1, "yyy": 2}).problem.endswith(
        "(2 more faults after this one)"
    )


def test_settings_that_do_not_fit_together():
    assert fault({"rounds": 13}).problem == "inconsistent settings"
    error = fault({"rounds": 13}, at="strategy")
    assert error.problem == "wrong value for 'strategy'"
    assert error.expected == "rounds that are lucky"


def test_a_long_value_is_cut():
    assert len(fault({"rounds": "x" * 1000}).got) < 230


def test_did_you_mean():
    assert did_you_mean("reptil", ["fedavg", "reptile"]) == "did you mean 'reptile'?"
    assert did_you_mean("x", []) == "this table has no keys"
