# SPDX-License-Identifier: Apache-2.0
"""Reads traces of devices in the form of FedScale (Lai et al. 2022): what devices can do, and when
they are available, as pickled dictionaries or as JSON of the same form.

    capacity     {id: {"computation": ms per example, "communication": kbit per s}}
    behaviour    {id: {"active": [s, ...], "inactive": [s, ...], "finish_time": s}}

`computation` is the latency of inference; a training step takes three times as long. A device is
available from each time in `active` to the time at the same place in `inactive`; the trace repeats
after `finish_time`. Only numbers, texts, lists and dictionaries are read: a pickled file that names
a class is refused, because it could run any code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np

from fedrec.devices.availability import Intervals, Traced
from fedrec.errors import DataError
from fedrec.runtime.text_files import parse_json

_LARGEST = 2**30  # bytes of a file
_TRAINING = 3.0  # a step's time as a multiple of inference (FedScale's own factor)
_ENDLESS = 1e300  # that and above are no numbers of a trace, nor is what no float can hold
_FAULTS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError),
    *(KeyError, OverflowError, MemoryError, RecursionError),
)


def read_capacity(path: Path) -> np.ndarray:
    """`float64 [devices, 2]`: seconds per example of training, and seconds per megabyte, by the
    order in the file.

    Raises:
        DataError: the file cannot be read, or an entry has another form.
    """
    found = []
    for name, entry in _entries(path).items():
        speed = _number(path, name, entry, "computation")
        bandwidth = _number(path, name, entry, "communication")
        if speed < 0 or bandwidth <= 0:
            raise _wrong(path, f"device {name}: computation {speed:g}, communication {bandwidth:g}")
        found.append((_TRAINING * speed / 1000, 8000 / bandwidth))
    return np.array(found, dtype=np.float64)


def read_behaviour(path: Path) -> Traced:
    """The intervals of each device, by the order in the file.

    Raises:
        DataError: the file cannot be read, or an entry has another form.
    """
    return Traced([_intervals(path, name, entry) for name, entry in _entries(path).items()])


def _intervals(path: Path, name: object, entry: Any) -> Intervals:
    period = _number(path, name, entry, "finish_time")
    starts = _numbers(path, name, entry, "active")
    ends = _numbers(path, name, entry, "inactive")
    inside = not len(starts) or (starts[0] >= 0 and len(ends) > 0 and ends[-1] <= period)
    if (
        period <= 0
        or len(starts) != len(ends)
        or not inside
        or (starts > ends).any()
        or (ends[:-1] > starts[1:]).any()
    ):
        raise _wrong(
            path,
            f"device {name}: active and inactive are no intervals, one after the other, between 0"
            f" and finish_time {period:g}",
        )
    return Intervals(starts, ends, period)


def _entries(path: Path) -> Mapping[object, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from None
    if len(content) > _LARGEST:
        raise _wrong(path, f"more than {_LARGEST} bytes")
    try:
        text = content[:1] == b"{"
        found = parse_json(content, _LARGEST) if text else _Plain(io.BytesIO(content)).load()
    except _FAULTS as error:
        raise _wrong(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(found, dict) or not found:
        raise _wrong(path, f"{type(found).__name__} of length 0 or without names")
    return found


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries alone."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _number(path: Path, name: object, entry: Any, key: str) -> float:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not _is_number(value):
        raise _wrong(path, f"device {name}: {key!r} is {value!r}")
    return float(value)


def _numbers(path: Path, name: object, entry: Any, key: str) -> np.ndarray:
    values = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise _wrong(path, f"device {name}: {key!r} is no list of numbers")
    return np.array(values, dtype=np.float64)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < _ENDLESS


def _wrong(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is no trace of devices",
        expected="a dictionary of FedScale's form, as JSON or pickled without classes",
        got=found,
        fix="name FedScale's client_device_capacity in devices.capacity, and"
        " client_behave_trace in devices.behaviour",
    )
