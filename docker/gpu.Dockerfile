# NVIDIA's PyTorch image with the packages of this project; its torch, and what is compiled for it,
# stay. That torch may be a version before a release, which pip does not take for the release.
#
#   docker build --file docker/gpu.Dockerfile --tag megatron-deepspeed:gpu .
#   docker run --rm --gpus all --ipc host megatron-deepspeed:gpu python tools/doctor.py

ARG BASE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${BASE}

# In place of the image's own list, which pins far more than what is compiled for its torch. Later
# uses of pip in this image heed it too.
ENV PIP_CONSTRAINT=/etc/pip/kept.txt PIP_NO_CACHE_DIR=1
WORKDIR /megatron-deepspeed
COPY docker/kept_packages.py docker/
COPY requirements.txt requirements-server.txt ./
RUN mkdir -p /etc/pip && touch "$PIP_CONSTRAINT" \
    && python docker/kept_packages.py > /tmp/kept.txt \
    && mv /tmp/kept.txt "$PIP_CONSTRAINT" \
    && python -c "import torch; print(torch.__version__, torch.version.cuda)" > /tmp/torch \
    && sed "/^torch/d" requirements.txt > /tmp/requirements.txt \
    && pip install --requirement /tmp/requirements.txt --requirement requirements-server.txt \
    && python -c "import torch; print(torch.__version__, torch.version.cuda)" | diff /tmp/torch -

COPY . .
RUN pip install --no-deps . \
    && useradd --create-home --shell /bin/bash trainer \
    && chown --recursive trainer /megatron-deepspeed
USER trainer
CMD ["bash"]
