# SPDX-License-Identifier: Apache-2.0
"""`fedrec privacy`: one JSON object, a table with a sentence, explanations, and errors without a
traceback."""

import json
import subprocess
import sys

import pytest

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.ledger import Ledger
from simulations.cli.experiments.finishing import print_table

ROUNDS = ("--clients", 4800, "--cohort", 30, "--rounds", 1000, "--delta", 1e-5)
ONE = (*ROUNDS, "--noise-multiplier", 1)
MANY = (*ONE, "--rounds", 10**9, "--sampler", "scheduled")
EPSILON = ("privacy", "epsilon", *ONE)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", 1.318277),
        ("--sampler fixed-size --adjacency replace-one --backend autodp", 2.158129),
        ("--backend pld", 1.318277),
        ("--sampler poisson --adjacency add-remove --backend autodp", 1.410738),
        ("--sampler poisson --adjacency add-remove --backend pld", 1.099601),
        ("--backend paper --delta 1e-6", 16.6081),
    ],
)
def test_epsilon_is_one_json_object(fedrec, options, expected):
    code, out, err = fedrec(*EPSILON, *options.split(), "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (code, err) == (0, "")
    assert found["epsilon"] == pytest.approx(expected, rel=1e-4)
    assert found["cohort"] == 30 and found["caveats"]
    assert found["attack_epsilon"] == pytest.approx(1.099601, rel=1e-3) or "--delta" in options


def test_epsilon_as_a_table_with_a_plain_line(fedrec):
    code, out, _ = fedrec(*EPSILON)
    assert code == 0 and "1.31828" in out and "right in at most 78.9% of cases" in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--delta", 1e-3), "delta 0.001 is above 1/N"), (("--backend", "paper"), "comparison only")],
)
def test_numbers_that_mislead_come_with_a_warning(fedrec, options, expected):
    assert expected in fedrec(*EPSILON, *options)[1]
    assert expected not in fedrec(*EPSILON)[1]


def test_infinite_epsilon_is_the_text_inf(fedrec):
    code, out, _ = fedrec(*EPSILON, "--delta", 0, "--json")
    assert code == 0 and json.loads(out, parse_constant=pytest.fail)["epsilon"] == "inf"


def test_laplace_without_delta(fedrec):
    options = ("--clients", 9, "--cohort", 9, "--rounds", 4, "--noise-multiplier", 2, "--delta", 0)
    code, out, _ = fedrec("privacy", "epsilon", *options, "--mechanism", "laplace", "--json")
    assert code == 0 and json.loads(out)["epsilon"] == pytest.approx(2.0)


def test_calibrated_noise_gives_back_the_target(fedrec):
    shared = (*ROUNDS, "--backend", "pld", "--json")
    code, out, _ = fedrec("privacy", "calibrate", "--epsilon", 2, *shared)
    z = json.loads(out)["noise_multiplier"]
    assert code == 0 and 0.5 < z < 1
    _, out, _ = fedrec("privacy", "epsilon", "--noise-multiplier", z, *shared)
    assert 1.999 <= json.loads(out)["epsilon"] <= 2.0


def test_explain_takes_options_or_an_experiment(fedrec):
    code, out, _ = fedrec("privacy", "explain", *ONE, "--backend", "autodp")
    assert code == 0 and "epsilon 2.158 at delta 1e-05" in out and "server is trusted" in out
    settings = ("privacy.clip-norm=1", "privacy.noise-multiplier=2", "rounds=10")
    question = ("privacy", "explain", "privrec-synthetic")
    code, out, _ = fedrec(*question, sets=settings)
    assert code == 0 and "from all 2800 clients" in out
    code, out, _ = fedrec(*question, "--clients", 1234, sets=settings)
    assert code == 0 and "from all 1234 clients" in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("epsilon", *ROUNDS, "--noise-multiplier", 0), "noise-multiplier"),
        (("epsilon", *ROUNDS, "--noise-multiplier", "nan"), "noise-multiplier"),
        (("epsilon", *ROUNDS, "--noise-multiplier", "1e30"), "from 1e-09 to 1e+09"),
        (("epsilon", *ROUNDS, "--noise-multiplier", "1e-30"), "from 1e-09 to 1e+09"),
        (("epsilon", *ONE, "--delta", 1), "delta"),
        (("epsilon", *ONE, "--delta", 0.3), "0.1"),
        (("epsilon", *ONE, "--clients", 29), "1 to 29"),
        (("epsilon", *ONE, "--clients", 0), "clients"),
        (("epsilon", *ONE, "--cohort", 2.5), "whole number"),
        (("epsilon", *ONE, "--rounds", 0), "rounds"),
        (("epsilon", *ONE, "--sampler", "poisson"), "no proven bound"),
        (("epsilon", *ONE, "--adjacency", "add-remove"), "no proven bound"),
        (("epsilon", *ONE, "--backend", "moments"), "'autodp'"),
        (("calibrate", *ROUNDS, "--epsilon", 0), "epsilon"),
        (("calibrate", *ROUNDS, "--epsilon", 1, "--backend", "paper"), "paper's arithmetic"),
        (("calibrate", *ROUNDS, "--epsilon", 1, "--delta", 0), "delta > 0"),
        (
            ("calibrate", *ROUNDS, "--epsilon", 0.01, "--backend", "autodp"),
            "cannot prove that epsilon",
        ),
        (("epsilon", *MANY, "--mechanism", "banded"), "at most 1,000,000 rounds"),
        (("explain", "--clients", 9), "missing key 'cohort'"),
        (("explain", "privrec-synthetic"), "no differential privacy"),
        (("explain", "privrec-synthetic", "--cohort", 3), "--cohort"),
        (("explain", "no-such-experiment"), "no experiment"),
    ],
    ids=str,
)
def test_bad_input_is_explained(fedrec, arguments, fault):
    code, out, err = fedrec("privacy", *arguments)
    assert (
        code == 2 and out == "" and fault in err and "expected:" in err and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--noise-multiplier", "much", "not a valid float"),
        ("--sampler", "poison", "'fixed-size', 'poisson'"),
    ],
)
def test_a_value_of_another_type_is_a_usage_error(fedrec, option, value, expected):
    code, _, err = fedrec("privacy", "epsilon", *ROUNDS, option, value)
    assert code == 2 and value in err and expected in err and "Traceback" not in err


def test_help_explains_what_the_multiplier_is_relative_to(fedrec):
    for command in ("epsilon", "calibrate"):
        code, out, _ = fedrec("privacy", command, "--help")
        words = " ".join(out.split()).replace("- ", "-")  # lines may break after a hyphen
        assert code == 0 and "2S under replace-one" in words and "S under add-remove" in words


def test_help_imports_no_accountant():
    script = (
        "import sys; from simulations.cli import app; import"
        " fedrec.errors\nprint(sorted({name.partition('.')[0] for name in sys.modules} & {'numpy',"
        " 'scipy', 'autodp', 'pydantic'}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_a_private_run_prints_at_most_eight_lines_below_its_table(run_tiny, capsys):
    """The guarantee first, and what all private systems of the table cost together."""
    own = "evaluation.baselines=['popularity', {name='dp-gram', epsilon=5.0}]"
    result = run_tiny("rounds=2", "privacy={clip-norm=1.0, epsilon=5.0}", own)
    print_table(result)
    below = capsys.readouterr().out.rpartition("\u2518")[2].strip().splitlines()
    assert len(below) <= 8
    assert below[0].startswith("epsilon 5 at delta 1e-05 for all data of a user (replace-one) is")
    ledgers = [result.folder / "privacy.jsonl", *result.folder.glob("baselines/*/privacy.jsonl")]
    together = Accountant("pld")
    for charge in (charge for ledger in ledgers for charge in Ledger(ledger).charges):
        together.step(charge.event, charge.count)
    assert len(ledgers) == 3
    assert f"cost epsilon {together.epsilon(1e-5).epsilon:.4g} at delta 1e-05" in below[1]
    assert "is in the report" in below[-1]
    assert any(line.startswith("Not accounted") for line in result.privacy)
