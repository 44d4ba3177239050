# SPDX-License-Identifier: Apache-2.0
"""Checks when a class is loaded that its methods have the signatures of its contract, so that
errors do not occur in the middle of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from fedrec.components.errors import named
from fedrec.errors import ExperimentError

_CONTRACT_PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations", "flwr")
_CONTRACT_FILES = ("base", "reader", "split", "perturbation", "strategy")


def refuse_unusable(kind: str, cls: type, base: type) -> None:
    """Refuse a class that lacks methods of its contract or has them with other parameters.

    Raises:
        ExperimentError: names the class, its file and the method.
    """
    if inspect.isabstract(cls):
        raise ExperimentError(
            f"{cls.__module__}:{cls.__qualname__} is an abstract {kind}",
            expected=(
                f"a class derived from {base.__module__}:{base.__qualname__} with all its methods"
            ),
            got=f"no {', '.join(sorted(cls.__abstractmethods__))}",  # type: ignore[attr-defined]
            fix="name a class that has them, or implement them",
        )
    for name, own, contract in _overridden(cls, base):
        if not _takes(own, contract):
            raise ExperimentError(
                f"{named(kind, cls)} has a method with the wrong signature",
                expected=f"{name}{inspect.signature(contract)}",
                got=f"{name}{inspect.signature(own)}",
                fix=f"give {cls.__name__}.{name} these parameters",
            )


def _overridden(cls: type, base: type) -> Iterator[tuple[str, Any, Any]]:
    """Name, own function and the contract's function of every method that a class overrides."""
    contracts = [one for one in cls.__mro__[1:] if one is base or _is_contract(one)]
    for contract in contracts:
        for name, function in vars(contract).items():
            own = inspect.getattr_static(cls, name, None)
            public = name == "__init__" or not name.startswith("_")
            if (
                public
                and inspect.isfunction(function)
                and inspect.isfunction(own)
                and own is not function
            ):
                yield name, own, function


def _is_contract(cls: type) -> bool:
    package, _, file = cls.__module__.rpartition(".")
    return package.split(".")[0] in _CONTRACT_PACKAGES and file in _CONTRACT_FILES


def _takes(own: Any, contract: Any) -> bool:
    """Whether a function accepts the contract's arguments: positionally, and the optional ones also
    by name."""
    kinds = inspect.Parameter
    known = list(inspect.signature(contract).parameters.values())
    ordered = [
        one for one in known if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    needed = [one for one in ordered if one.default is one.empty]
    named_only = {one.name: None for one in known if one.kind is kinds.KEYWORD_ONLY}
    by_name = {one.name: None for one in ordered if one.default is not one.empty}
    signature = inspect.signature(own)
    try:
        signature.bind(*ordered, **named_only)
        signature.bind(*needed, **by_name, **named_only)
    except TypeError:
        return False
    return True


def covers_overrides(cls: type, name: str, others: Sequence[str]) -> bool:
    """Whether a subclass that overrides some of the `others` also overrides the method `name`,
    which describes them.

    Otherwise it inherits a description that is no longer true.
    """

    def age(method: str) -> int:
        return next(place for place, owner in enumerate(cls.__mro__) if method in vars(owner))

    return all(age(name) <= age(other) for other in others)
