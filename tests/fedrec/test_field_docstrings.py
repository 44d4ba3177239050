# SPDX-License-Identifier: Apache-2.0
"""Texts of settings, beside those that pydantic reads when a class is made."""

import subprocess
import sys

from pydantic import BaseModel, ConfigDict, Field

from fedrec.config import Config
from fedrec.field_docstrings import field_docstrings


class Base(Config):
    first: int = 1
    """One
    more line."""
    second: int = 2
    """Two."""
    bare: int = 3


class Other(Config):
    second: int = 2
    """Two of another."""
    third: int = 3
    """Three."""


class Derived(Base, Other):
    first: int = 4
    given: int = Field(5, description="Given.")
    """Below."""

    class Inner(Config):
        first: int = 6
        """Inside."""


class ByPydantic(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    first: int = 1
    """One
    more line."""
    second: int = 2
    """Two."""
    bare: int = 3


def test_texts_are_those_of_pydantic():
    fields = ByPydantic.model_fields.items()
    assert Base.descriptions() == {n: f.description for n, f in fields if f.description}


def test_the_first_base_and_the_last_declaration_count():
    assert Derived.descriptions() == {"second": "Two.", "third": "Three.", "given": "Given."}
    assert Derived.Inner.descriptions() == {"first": "Inside."}


def test_classes_of_functions_and_branches_have_texts():
    for number in range(1):

        class Local(Config):
            own: int = number
            """Of a function."""

    assert Local.descriptions() == {"own": "Of a function."}


def test_a_class_without_source_has_none():
    made = type("Made", (Base,), {"__module__": "no.such.module"})
    assert field_docstrings(made, Base) == field_docstrings(Base, Base)
    assert field_docstrings(type("Made", (Config,), {"__module__": "sys"}), Config) == {}


def test_schemas_have_the_texts():
    properties = Derived.model_json_schema(by_alias=False)["properties"]
    assert properties["third"]["description"] == "Three."
    assert properties["given"]["description"] == "Given."
    assert "description" not in properties["bare"]


def test_a_program_has_the_texts_of_its_file(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from fedrec.config import Config\n"
        "class Own(Config):\n"
        "    key: int = 1\n"
        "    'Its text.'\n"
        "print(Own.descriptions())\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "{'key': 'Its text.'}"
