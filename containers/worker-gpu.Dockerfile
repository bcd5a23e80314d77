# The worker on GPUs: torch and FBGEMM for CUDA, TorchRec, Ray. CUDA's libraries come as Python packages: the node has the
# driver. No jax.
# Build from the repository's root: docker build -f containers/worker-gpu.Dockerfile -t twinstep/worker-gpu:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
COPY locks/worker-gpu.txt locks/
COPY pyproject.toml README.md ./
COPY twinstep twinstep
# The lock is whole, so nothing is resolved: what is written there is what is installed.
RUN python -m venv /opt/twinstep \
 && /opt/twinstep/bin/pip install --no-cache-dir --no-deps -r locks/worker-gpu.txt .

FROM python:3.11-slim
# Triton and Inductor compile on the node, with the system's compiler. KubeRay's probes call wget; it may start Ray in a
# login shell, which sets PATH anew.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/* \
 && echo 'PATH=/opt/twinstep/bin:$PATH' > /etc/profile.d/twinstep.sh
COPY --from=build /opt/twinstep /opt/twinstep
# No such user needs to be in /etc/passwd: manifests run it by number. The root file system may be read-only: what is
# written goes to /tmp and to the volumes that manifests mount.
USER 65532:65532
ENV PATH=/opt/twinstep/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 RAY_USAGE_STATS_ENABLED=0 HOME=/tmp
