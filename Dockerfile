# The dependencies are those of pyproject.toml without the development extra, so requirements.lock, which holds both, is
# given as constraints: every version is the locked one, and uv checks the hash of whatever a constraint gives one for.
# There is no compiler in here, in either stage: a dependency without a wheel fails the build, and capture plans with
# `compile: true` need an image of your own on top of this one, with g++.

FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY requirements.lock ./
RUN awk '/^[^ ]/ {on = /^uv==/} on' requirements.lock >uv.txt \
    && python -m pip install --no-deps --require-hashes -r uv.txt \
    && uv venv /opt/layertap
COPY pyproject.toml ./
RUN uv pip install --python /opt/layertap/bin/python --only-binary :all: --constraint requirements.lock \
        -r pyproject.toml --extra timm --extra transformers
COPY . .
RUN uv pip install --python /opt/layertap/bin/python --no-deps --build-constraint requirements.lock . \
    && uv pip check --python /opt/layertap/bin/python

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="layertap" \
      org.opencontainers.image.description="Any layer of any PyTorch model, over HTTP." \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 layertap \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/layertap --shell /usr/sbin/nologin layertap \
    && install --directory --owner=10001 --group=10001 /var/lib/layertap
COPY --from=build /opt/layertap /opt/layertap

# All that is ever written lies under /var/lib/layertap (weights, compiled graphs) or /tmp: the root may be read-only.
ENV PATH=/opt/layertap/bin:$PATH \
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

# 200 once the startup models are ready, 503 before and while draining; needs no API key.
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 CMD ["python", "-c", \
    "import http.client as h, sys; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]

# Beyond loopback the server starts only with LAYERTAP_API_KEYS. Status 70 means that it has to be started again.
ENTRYPOINT ["layertap"]
CMD ["serve", "--host", "0.0.0.0"]
