# SPDX-License-Identifier: Apache-2.0
"""The templates of pages, which escape every text."""

from typing import Any


def rendered(template: str, **values: Any) -> str:
    """A template of this folder with values; one that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedrec.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
