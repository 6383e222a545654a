# autopar with Hugging Face transformers, and the examples:
#
#     docker build -t autopar .                                      # pip's default PyTorch: on Linux, that for CUDA
#     docker build -t autopar --build-arg TORCH_INDEX=ADDRESS .      # another one, such as the smaller one for CPUs
#     docker run --rm -v "$PWD":/work autopar plan hf:LlamaConfig --batch 64 --mesh dp=8,tp=8 --cluster dgx-h100
#
# ADDRESS is what https://pytorch.org/get-started/locally/ shows. PyTorch for CUDA brings CUDA's libraries, so that this
# base serves GPUs too, on a host with NVIDIA's container toolkit (docker run --gpus all). BASE may be any image with
# Python 3.11 or later and its venv, such as one of CUDA's that has them.
ARG BASE=python:3.11-slim

FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY autopar autopar
COPY passes passes
COPY runtime runtime
RUN python3 -m venv /build && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH_INDEX=""
ARG EXTRAS=hf
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN python3 -m venv /opt/autopar \
    && /opt/autopar/bin/pip install --no-cache-dir --constraint /constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(ls /wheels/autopar-*.whl)[$EXTRAS]" \
    && rm -r /wheels \
    && /opt/autopar/bin/autopar --version
ENV PATH=/opt/autopar/bin:$PATH
COPY examples /examples
WORKDIR /work
ENTRYPOINT ["autopar"]
CMD ["--help"]
