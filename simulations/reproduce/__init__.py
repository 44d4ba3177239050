# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of the papers: what they print beside what comes out here."""
