# SPDX-License-Identifier: Apache-2.0
# One image for all of fedrec's processes: SuperLink, executors, nodes, operator. It holds no key, secret or data:
# these are mounted. Not root; versions pinned.
FROM python:3.11.9-slim-bookworm

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 HOME=/home/fedrec

# A volume gets the mode of the folder that it is mounted on; containers run as whoever owns the deployment folder,
# and what they write there is readable by that user only.
RUN useradd --uid 10001 --create-home fedrec \
    && install -d -o fedrec -g fedrec -m 1777 /var/lib/fedrec /var/lib/fedrec/state /var/lib/fedrec/state/meeting \
       /var/lib/fedrec/runs

WORKDIR /opt/fedrec
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch first and by its exact version, without CUDA: from the CPU index where it can be reached.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" "$(grep -E '^torch==' constraints.txt)"
COPY fedrec fedrec
COPY clients clients
COPY server server
COPY strategies strategies
COPY simulations simulations
RUN pip install --constraint constraints.txt --editable .

USER fedrec
WORKDIR /var/lib/fedrec
ENTRYPOINT ["fedrec"]
CMD ["--help"]
