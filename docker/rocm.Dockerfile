# The suites on a ROCm base, whose own torch stays: see install.py. Built by `fp8ci image build rocm`, which lays out the
# context: this folder, wheels/ and ca/. The checkout is not in it: a run mounts it, read-only.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}
ARG TORCH=""
COPY ca/ /ca/
COPY wheels/ /wheels/
COPY install.py requirements.txt /fp8ci/
RUN python3 /fp8ci/install.py rocm && rm -rf /wheels
# The layouts and bits of every kernel depend on it (harness/platforms.py).
ENV TRITON_DEFAULT_FP_FUSION=0
# A run names the caller's own number; nothing in here needs to be root.
USER 65534:65534
WORKDIR /tmp
ENTRYPOINT []
CMD ["/usr/local/bin/fp8ci-python"]
