# SPDX-License-Identifier: Apache-2.0
"""What the server's processes run: `superlink` or `executor`, with the flags of Flower's programs."""

from __future__ import annotations

import os
import sys

from simulations.deploy import flwr_private
from simulations.quiet import keep_quiet


def main() -> None:
    """Run the part that the first argument names."""
    keep_quiet(os.environ)
    part, *arguments = sys.argv[1:]
    (flwr_private.superlink if part == "superlink" else flwr_private.server_executor)(arguments)


if __name__ == "__main__":
    main()
