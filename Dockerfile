# Penstock in one image: the command line, Prefect workers and the engine ranks they start.
#
#   docker build -t penstock .                                                   CPU, to try and to test
#   docker build -t penstock:gpu --build-arg DEVICE=gpu \
#       --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 .                GPU; PyTorch brings its own CUDA libraries
#
# The image has no git: for benchmarks to name the commit they measured, add --build-arg COMMIT=$(git rev-parse HEAD).
#
#   mkdir -p runs
#   docker run --rm --init --user "$(id -u)" -v "$PWD/runs:/penstock/runs" penstock train configs/quickstart.yaml
#   mkdir -p -m 1777 /tmp/penstock-gpus        where trainings of all containers say which GPU is whose
#   docker run --rm --init --user "$(id -u)" --gpus all --ipc=host -v /tmp/penstock-gpus:/tmp/penstock-gpus -v ... \
#       penstock:gpu train recipe.yaml
#
# --user: what a run writes is then yours, and it can write to a folder of yours; any number will do. Without it the user
# of the image writes, to volumes that Docker keeps. A folder that Docker has to make for -v is root's, hence the mkdir.
#
# A worker of a Prefect work pool, with PREFECT_API_URL in the environment (secrets too: none is in the image):
#
#   docker run --init --entrypoint prefect -e PREFECT_API_URL penstock:gpu worker start --pool penstock
#
# --init, since PID 1 must reap the ranks of an engine group and pass SIGTERM on. For the same reason no shell stands
# in between: a start script of your own must end in `exec prefect worker start ...`, because a worker that a shell
# starts in the background ignores SIGINT, does not stop on SIGTERM, and leaves its flow runs "Running" for ever.

ARG BASE=python:3.12-slim
FROM ${BASE}

ARG DEVICE=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# libnuma: vLLM's CPU kernels. The CUDA image has no Python, and Triton compiles its launchers when it first runs.
RUN apt-get update \
    && if [ "$DEVICE" = gpu ]; then packages="gcc libc6-dev python3-dev python3-venv"; else packages="libnuma1"; fi \
    && apt-get install --yes --no-install-recommends $packages \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --no-create-home --shell /usr/sbin/nologin penstock \
    && install --directory --mode=1777 /home/penstock /penstock /penstock/runs

# Home and name are those of every --user, of whom the image knows nothing: libraries ask for both. Each may write where
# a run does, as in /tmp, and nobody may touch what root has put there.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/penstock \
    USER=penstock \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /penstock

# The libraries are a layer of their own, which a change of the source leaves alone: the editable install is one path
# entry, so the code copied afterwards are importable. The proof is for the CPU image; a GPU is absent while building.
COPY pyproject.toml setup.py LICENSE ./
COPY penstock/__init__.py penstock/
COPY penstock/doctor/__init__.py penstock/doctor/environment.py penstock/doctor/
RUN if [ "$DEVICE" = cpu ]; then \
        pip install --no-deps --extra-index-url "$TORCH_CPU_INDEX" \
            "$(sed -n 's/^cpu = .*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)+cpu"; \
    fi \
    && pip install --editable ".[$DEVICE,servers]" \
    && if [ "$DEVICE" = cpu ]; then python -m penstock.doctor.environment --mend; fi

COPY . .

# Last, so that another commit builds no layer anew.
ARG COMMIT=
ENV PENSTOCK_COMMIT=$COMMIT

USER penstock
VOLUME /penstock/runs
ENTRYPOINT ["penstock"]
