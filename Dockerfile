# One image a service: docker build --target gateway|target|draft .
# The gateway's has no torch. Models are prepared at build time, so that containers start with a read-only root.

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /slipstream
COPY constraints.txt pyproject.toml ./
COPY stubs stubs
RUN pip install -c constraints.txt ./stubs && useradd --uid 10001 --create-home slipstream

FROM base AS gateway
COPY gateway gateway
COPY services/__init__.py services/
COPY services/serving services/serving
RUN pip install -c constraints.txt grpcio grpcio-health-checking grpcio-reflection grpcio-status googleapis-common-protos \
    protobuf pydantic-settings prometheus-client structlog
USER slipstream
CMD ["python", "-m", "gateway"]

FROM base AS models
# torch's CPU build comes from the index that this argument names; without it pip's own index serves a build for GPUs.
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY services services
COPY gateway gateway
COPY cli cli
COPY recipes recipes
COPY bench bench
COPY drafts drafts
RUN pip install -c constraints.txt -e '.[models]'
USER slipstream
ENV SLIPSTREAM_CACHE=/home/slipstream/cache
RUN python -m services.model.kernels build && python -m services.model.store prepare default

FROM models AS draft
CMD ["python", "-m", "services.draft"]

FROM models AS target
CMD ["python", "-m", "services.target"]
