# The suites without a GPU: an environment of its own, whose torch and triton cpu-constraints.txt pins. Built by
# `fp8ci image build cpu`, which lays out the context: this folder, wheels/ and ca/. The checkout is not in it: a run
# mounts it, read-only.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH=""
COPY ca/ /ca/
COPY wheels/ /wheels/
COPY install.py requirements.txt cpu-constraints.txt /fp8ci/
RUN python3 /fp8ci/install.py cpu

# Once more from the base, so that no layer holds the wheels.
# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/venv /opt/venv
COPY --from=build /usr/local/bin/fp8ci-python /usr/local/bin/fp8ci-python
ENV TRITON_DEFAULT_FP_FUSION=0
# A run names the caller's own number; nothing in here needs to be root.
USER 65534:65534
WORKDIR /tmp
ENTRYPOINT []
CMD ["/usr/local/bin/fp8ci-python"]
