# docker build -t layertap .                                the locked wheels of torch, which bring CUDA: for GPUs, and without
# docker build -t layertap:cpu --build-arg TORCH_INDEX=… .  the same version from an index of wheels for CPUs: some GB less
# docker build -t layertap:compiler --target compiler .     with g++, for warm plans with `compile: true`; TORCH_INDEX goes too
#
# The dependencies are those that `make serve` installs. requirements.lock is given as constraints, since the wheels of
# TORCH_INDEX have other hashes and bring no CUDA: every version is the locked one, and uv checks the hash of whatever a
# constraint gives one for. A dependency without a wheel fails the build.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# What every image has but its packages. All that is ever written lies under /var/lib/layertap (weights, compiled
# graphs) or /tmp: the root may be read-only.
FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="layertap" \
      org.opencontainers.image.description="Any layer of any PyTorch model, over HTTP." \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 layertap \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/layertap --shell /usr/sbin/nologin layertap \
    && install --directory --owner=10001 --group=10001 /var/lib/layertap
ENV PATH=/opt/package/bin:/opt/layertap/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/layertap \
    XDG_CACHE_HOME=/var/lib/layertap/cache \
    TORCH_HOME=/var/lib/layertap/torch \
    HF_HOME=/var/lib/layertap/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/layertap/inductor \
    TRITON_CACHE_DIR=/var/lib/layertap/triton
WORKDIR /var/lib/layertap
VOLUME /var/lib/layertap
USER 10001:10001
EXPOSE 8000

# 200 once the startup models are ready, 503 before and while draining; needs no API key. With TLS_CERT or UDS give another.
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 CMD ["python", "-c", \
    "import http.client as h, os, sys; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('LAYERTAP_PORT', 8000)), timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]

# Beyond loopback the server starts only with LAYERTAP_API_KEYS. Status 70 means that it has to be started again.
ENTRYPOINT ["layertap"]
CMD ["serve", "--host", "0.0.0.0"]

FROM ${PYTHON_IMAGE} AS dependencies
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 \
    UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1
WORKDIR /build
COPY requirements.lock pyproject.toml ./
RUN awk '/^[^ ]/ {on = /^uv==/} on' requirements.lock >uv.txt \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/python -m pip install --no-deps --require-hashes -r uv.txt \
    && /opt/uv/bin/uv venv --python python3 /opt/layertap
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then \
        /opt/uv/bin/uv pip install --python /opt/layertap/bin/python --no-deps --only-binary :all: \
            --index-url "$TORCH_INDEX" $(awk '/^torch(vision)?==/ {print $1}' requirements.lock); \
    fi \
    && /opt/uv/bin/uv pip install --python /opt/layertap/bin/python --only-binary :all: --constraint requirements.lock \
        -r pyproject.toml --extra all \
    && /opt/uv/bin/uv pip check --python /opt/layertap/bin/python \
    && echo /opt/package >"$(/opt/layertap/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/layertap.pth"

# The project itself, apart: a change of it is a layer of a few megabytes, not of all that it depends on.
FROM dependencies AS package
COPY . .
RUN /opt/uv/bin/uv pip install --no-config --python /opt/layertap/bin/python --no-deps \
        --build-constraint requirements.lock --target /opt/package . ./client \
    && /opt/package/bin/layertap --version

FROM base AS compiler
USER root
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=dependencies /opt/layertap /opt/layertap
COPY --from=package /opt/package /opt/package

FROM base
COPY --from=dependencies /opt/layertap /opt/layertap
COPY --from=package /opt/package /opt/package
