# Packages with locked versions and a CPU build of torch, for training, serving and the tests.
#
#   docker build --file docker/cpu.Dockerfile --tag megatron-deepspeed:cpu .
#   docker run --rm --shm-size 2g megatron-deepspeed:cpu bash examples/quickstart.sh

ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE}

# DeepSpeed's CPU optimizers are compiled at their first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 --shell /bin/bash trainer \
    && mkdir /opt/venv /megatron-deepspeed \
    && chown trainer /opt/venv /megatron-deepspeed
USER trainer
WORKDIR /megatron-deepspeed
ENV VENV=/opt/venv VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

# Packages are installed again when one of these files changes. Scripts that call use_python with one
# of them later find it installed. The last line fails if a build with CUDA was installed.
COPY --chown=trainer tools/venv.sh tools/
COPY --chown=trainer requirements.txt requirements-torch.txt requirements.lock ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/venv \
    && pip install --extra-index-url "$TORCH_INDEX" --requirement requirements-torch.txt \
    && bash -c "source tools/venv.sh && use_python requirements.lock requirements.txt" \
    && python -c "import sys, torch; sys.exit(torch.version.cuda)"

COPY --chown=trainer . .
RUN pip install --no-deps .
CMD ["bash"]
