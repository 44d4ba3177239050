# SPDX-License-Identifier: Apache-2.0
"""Commands around an experiment: run, resume, list, new."""
