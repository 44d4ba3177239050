# SPDX-License-Identifier: Apache-2.0
"""The attacks, a file each: profiles that malicious clients train on, or updates that they send."""
