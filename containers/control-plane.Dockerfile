# The control plane: REST API, dashboard, reconciler. No torch, no jax.
# Build from the repository's root: docker build -f containers/control-plane.Dockerfile -t twinstep-control-plane:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
COPY locks/control-plane.txt locks/
COPY pyproject.toml README.md ./
COPY twinstep twinstep
# The lock is whole, so nothing is resolved: what is written there is what is installed.
RUN python -m venv /opt/twinstep \
 && /opt/twinstep/bin/pip install --no-cache-dir --no-deps -r locks/control-plane.txt .

FROM python:3.11-slim
COPY --from=build /opt/twinstep /opt/twinstep
# No such user needs to be in /etc/passwd: manifests run it by number. The root file system may be read-only: what is
# written goes to /tmp and to the volumes that manifests mount.
USER 65532:65532
ENV PATH=/opt/twinstep/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 HOME=/tmp
EXPOSE 8765
ENTRYPOINT ["python", "-m", "twinstep"]
