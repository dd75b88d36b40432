# The server on a CPU; docs/how-to/run-in-containers.md says how to build and run it.
FROM python:3.11.14-slim-bookworm AS build

# Where to take torch from: an index of CPU wheels makes the image several GB smaller.
ARG TORCH_INDEX=""

WORKDIR /source
RUN python -m venv /venv
COPY constraints.txt ./
RUN PIP_INDEX_URL="$TORCH_INDEX" /venv/bin/pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt '.[serve]'


FROM python:3.11.14-slim-bookworm

# numba's threads are OpenMP's; without it they fall back to a kind that is not safe to share.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin elias
COPY --from=build /venv /venv

# Caches go where a container whose root is read-only can have a tmpfs.
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/tmp/numba \
    XDG_CACHE_HOME=/tmp/cache

USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]

ENTRYPOINT ["elias", "serve"]
# Without a key, the server answers requests to localhost only.
CMD ["/model", "--host", "0.0.0.0", "--port", "8000", "--host-name", "localhost"]
