# SPDX-License-Identifier: Apache-2.0
# One image for all processes of a deployment: SuperLink, executors, nodes, operator. It holds no
# key, secret or data: these are mounted. Not root; versions pinned. Simulations are for other installations: there is no Ray in it.
FROM python:3.11.9-slim-bookworm AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
RUN apt-get update && apt-get install --yes --no-install-recommends binutils
RUN python -m venv --without-pip /opt/venv
WORKDIR /opt/fedrec
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch first and by its exact version, without CUDA: from the CPU index where it can be reached.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/venv/bin/python install --no-compile --constraint constraints.txt \
        --extra-index-url "$TORCH_INDEX" "$(grep -E '^torch==' constraints.txt)"
COPY fedrec fedrec
COPY clients clients
COPY server server
COPY strategies strategies
COPY simulations simulations
RUN pip --python /opt/venv/bin/python install --no-compile --constraint constraints.txt --editable .
# What a deployment never opens: Ray, installers, plots of an accountant, headers, tests, symbols
# for a debugger.
RUN pip --python /opt/venv/bin/python uninstall --quiet --yes \
        ray uv setuptools contourpy fonttools kiwisolver matplotlib pillow \
    && cd /opt/venv/lib/python3.11/site-packages \
    && find torch/bin -type f ! -name torch_shm_manager -delete && rm -r torch/include torch/test \
    && find networkx numba numpy pandas scipy sympy -type d -name tests -prune -exec rm -r {} + \
    && find . -name '*.pyi' -delete && find torch/lib -name '*_test.so' -delete \
    && strip --strip-unneeded torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so llvmlite/binding/libllvmlite.so \
    && find Crypto greenlet numba sqlalchemy uvloop -name '*.so' -exec strip --strip-unneeded {} +

# The base without what it installs packages with, without texts, and with a user.
FROM python:3.11.9-slim-bookworm AS base
# A mounted folder gets the mode of the one below it. Containers run as whoever owns the deployment
# folder, and what they write is readable by that user only.
RUN useradd --uid 10001 fedrec \
    && install -d -o fedrec -g fedrec -m 1777 /home/fedrec /var/lib/fedrec /var/lib/fedrec/state \
       /var/lib/fedrec/state/meeting /var/lib/fedrec/runs \
    && rm -rf /usr/share/doc /usr/share/info /usr/share/locale /usr/share/man /usr/share/perl /usr/share/python-wheels \
       /usr/lib/*/perl /usr/lib/*/libperl* /var/cache/* /var/lib/apt/lists \
       /usr/lib/python3/dist-packages/pip /usr/lib/python3/dist-packages/setuptools \
       /usr/local/lib/python3.11/site-packages

# One flat file system, as removing something above a base makes an image no smaller.
FROM scratch
COPY --from=base / /
COPY --from=packages /opt /opt
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin HOME=/home/fedrec LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 FEDREC_CONTAINER=1 \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
# Bytecode of what is imported, and of nothing else: a container may not write it, and would make it
# at each start.
RUN FEDREC_CACHE=/tmp/cache python -c "import simulations.cli, server.run, simulations.deployment.operator; \
        from simulations.deployment.supernode import import_everything; import_everything()" \
    && rm -rf /tmp/cache
ENV PYTHONDONTWRITEBYTECODE=1
USER fedrec
WORKDIR /var/lib/fedrec
ENTRYPOINT ["fedrec"]
CMD ["--help"]
