# SPDX-License-Identifier: Apache-2.0
"""Activations in compiled code, written so that compilers vectorise their loops.

The exponential is Cephes' `expf` (reduction to [-ln 2 / 2, ln 2 / 2], polynomial of degree 5), the
hyperbolic tangent its `tanhf`: both are within 2 units in the last place, and NaN stays NaN.
"""

from __future__ import annotations

import numpy as np
from numba import njit

IDENTITY, RELU, SIGMOID, TANH = range(4)
CODES = {"identity": IDENTITY, "relu": RELU, "sigmoid": SIGMOID, "tanh": TANH}

_F = np.float32
_LARGEST = _F(88.0)
_SMALLEST = _F(-87.0)
_LOG2_E = _F(1.44269504088896341)
_LN2_HIGH = _F(0.693359375)
_LN2_LOW = _F(-2.12194440e-4)


@njit(error_model="numpy")
def exponential(x):
    """e to the x, for x clipped to [-87, 88]."""
    bounded = min(max(x, _SMALLEST), _LARGEST)
    whole = np.floor(bounded * _LOG2_E + _F(0.5))
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    value = _F(1.9875691500e-4)
    value = value * rest + _F(1.3981999507e-3)
    value = value * rest + _F(8.3334519073e-3)
    value = value * rest + _F(4.1665795894e-2)
    value = value * rest + _F(1.6666665459e-1)
    value = value * rest + _F(5.0000001201e-1)
    value = value * rest * rest + rest + _F(1)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return x if x != x else value * power


@njit(error_model="numpy")
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return _F(1) / (_F(1) + exponential(-x))


@njit(error_model="numpy")
def tanh(x):
    """The hyperbolic tangent."""
    size = abs(x)
    large = _F(1) - _F(2) / (exponential(_F(2) * size) + _F(1))
    square = x * x
    value = _F(-5.70498872745e-3)
    value = value * square + _F(2.06390887954e-2)
    value = value * square + _F(-5.37397155531e-2)
    value = value * square + _F(1.33314422036e-1)
    value = value * square + _F(-3.33332819422e-1)
    small = value * square * x + x
    return small if size < _F(0.625) else (large if x > 0 else -large)


@njit(error_model="numpy")
def activate(values, activation):
    """Apply an activation to an array, in place."""
    flat = values.reshape(-1)
    if activation == RELU:
        for i in range(flat.size):
            flat[i] *= _F(flat[i] > 0)  # a product is vectorised, a choice is not; NaN stays NaN
    elif activation == SIGMOID:
        for i in range(flat.size):
            flat[i] = sigmoid(flat[i])
    elif activation == TANH:
        for i in range(flat.size):
            flat[i] = tanh(flat[i])


@njit(error_model="numpy")
def through_activation(gradients, outputs, activation):
    """Turn gradients by an activation's outputs into gradients by its inputs, in place."""
    to = gradients.reshape(-1)
    out = outputs.reshape(-1)
    if activation == RELU:
        for i in range(to.size):
            to[i] = _F(0) if out[i] <= 0 else to[i]
    elif activation == SIGMOID:
        for i in range(to.size):
            to[i] *= out[i] * (_F(1) - out[i])
    elif activation == TANH:
        for i in range(to.size):
            to[i] *= _F(1) - out[i] * out[i]
