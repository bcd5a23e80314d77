# The worker on TPUs: jax, libtpu, torch for CPUs. Build where pip finds torch's CPU build first: the lock names no index,
# and the CUDA build of the same version would not find its libraries.
# Build from the repository's root: docker build -f containers/worker-tpu.Dockerfile -t twinstep/worker-tpu:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
COPY locks/worker-tpu.txt locks/
COPY pyproject.toml README.md ./
COPY twinstep twinstep
# The lock is whole, so nothing is resolved: what is written there is what is installed.
RUN python -m venv /opt/twinstep \
 && /opt/twinstep/bin/pip install --no-cache-dir --no-deps -r locks/worker-tpu.txt .

FROM python:3.11-slim
# The host's part of a step, and evaluation, are compiled on the node, with the system's compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/twinstep /opt/twinstep
# No such user needs to be in /etc/passwd: manifests run it by number. The root file system may be read-only: what is
# written goes to /tmp and to the volumes that manifests mount.
USER 65532:65532
ENV PATH=/opt/twinstep/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 HOME=/tmp
