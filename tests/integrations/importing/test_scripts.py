"""Scripts and tables of Megatron-LM as projects write them: variables, arrays, YAML, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.analysis.searches.rivals import rivals
from autopar.errors import UsageError
from autopar.integrations.importing import Configuration, read_configuration
from autopar.integrations.importing.configuration_plan import require_sizes, scheme_text
from autopar.integrations.importing.megatron import read_megatron, read_table
from autopar.integrations.importing.megatron_arguments import words_of
from autopar.integrations.importing.shell import Script
from autopar.integrations.importing.sizes import sizes_of_model
from tests.report_models import planned

SCRIPT = """#!/bin/bash
# Runs a model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=2; PP=4
LOAD=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE # a comment with --bf16
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
)
PARALLEL="--tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP}"
if [ "$FP16" = 1 ]; then
    GPT_MODEL_ARGS+=(--fp16)
    TP=8
fi
GPT_MODEL_ARGS+=(--micro-batch-size 1 --global-batch-size $((WORLD_SIZE * 48)))
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} \\
    $PARALLEL --load "$LOAD" \\
    --use-distributed-optimizer
"""
YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --recompute-granularity: full
  --data-path: ${DATA_PATH}/text
TEST_TYPE: regular
"""


def test_variables_and_arrays_are_expanded() -> None:
    options = words_of(Script(SCRIPT).commands)
    assert options["num-layers"] == "96" and options["hidden-size"] == "12288"
    assert options["tensor-model-parallel-size"] == "2"
    assert options["pipeline-model-parallel-size"] == "4"
    assert options["global-batch-size"] == str(8 * 4 * 48)
    assert options["use-distributed-optimizer"] == "" and "bf16" not in options
    # A caller's argument stays as it is written.
    assert options["load"] == "$1"


def test_what_is_set_under_a_condition_is_left_out_and_told() -> None:
    script = Script(SCRIPT)
    assert script.conditional == ["--fp16"]
    read = read_megatron(SCRIPT.replace('PARALLEL="--tensor', 'X=1\nPARALLEL="--tensor'))
    assert read.dtype is None and any("--fp16" in line for line in read.lost)
    late = SCRIPT.replace("$PARALLEL", "--tensor-model-parallel-size $TP")
    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size is \$TP.*--set TP=VALUE"):
        read_megatron(late)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=(1 2)\nx --n ${A[1]} --m ${A[2]}", ["x", "--n", "2", "--m", "${A[2]}"]),
        ("A='--a 1'\nx $A", ["x", "--a", "1"]),
        ("x --n ${N:-3} --m ${M}", ["x", "--n", "3", "--m", "${M}"]),
        ("N=2\nx --n $((N * (3 + 4)))", ["x", "--n", "14"]),
        ("x --n $(nproc)", ["x", "--n", "$(nproc)"]),
        ("A=1 x --n 2", ["x", "--n", "2"]),
        ("for i in 1 2; do\nx --n 3\ndone", ["x", "--n", "3"]),
        ("x --text 'a\nb' --n 4", ["x", "--text", "a\nb", "--n", "4"]),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    assert Script(text).commands[-1].words[-len(words) :] == tuple(words)


@pytest.mark.parametrize("text", ["x 'a", "A=(1 2", "A=(1 2\n" * 600])
def test_what_does_not_end_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Script(text)


def test_tables_of_megatrons_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text(YAML)
    read = read_configuration(tmp_path / "model_config.yaml")
    assert (read.source, read.tensor, read.stages, read.zero) == ("megatron", 2, 2, 0)
    assert read.sequence_parallel and read.recompute == "full"
    (tmp_path / "other.yml").write_text("a: 1\n")
    with pytest.raises(UsageError, match="no argument that begins with --"):
        read_configuration(tmp_path / "other.yml")
    (tmp_path / "other.yml").write_text("a: [\n")
    with pytest.raises(UsageError, match="not YAML"):
        read_configuration(tmp_path / "other.yml")


def test_a_model_of_other_sizes_is_refused(tmp_path: Path) -> None:
    graph = planned(layers=4).model.graph
    configuration = read_megatron("x --num-layers 4 --hidden-size 64")
    require_sizes(configuration, graph, {})
    with pytest.raises(UsageError, match="--num-layers is 96, and the model has 4"):
        require_sizes(read_megatron("x --num-layers 96"), graph, {})
    (tmp_path / "config.json").write_text('{"text_config": {"n_layer": 4, "hidden_size": 32}}')
    sizes = sizes_of_model(tmp_path / "config.json")
    assert sizes == {"layers": 4, "hidden": 32}
    with pytest.raises(UsageError, match="--hidden-size is 64, and the model has 32"):
        require_sizes(configuration, graph, sizes)


def test_the_kind_of_context_parallelism_is_read(tmp_path: Path) -> None:
    ring = read_megatron("x --context-parallel-size 2")
    heads = read_megatron("x --context-parallel-size 2 --cp-comm-type a2a")
    assert scheme_text(ring, 1) == "context 2" and scheme_text(heads, 1) == "ulysses 2"
    (tmp_path / "d.json").write_text('{"sequence_parallel_size": 2}')
    assert scheme_text(read_configuration(tmp_path / "d.json"), 1) == "ulysses 2"


def test_nobody_else_s_scheme_is_planned_into_host_memory() -> None:
    plan = planned(hidden=512)
    (rival,) = rivals(plan, ["data"], memory=4 * 2**20)
    assert not rival.fits and not rival.host_memory


def test_host_memory_is_asked_for() -> None:
    assert Configuration(source="x").offload is None
    assert read_megatron("x --optimizer-cpu-offload").offload == "optimizer"


@pytest.mark.parametrize("step", ["A=$A$A", "A+=($A $A)"])
def test_variables_that_double_are_refused(step: str) -> None:
    with pytest.raises(UsageError, match="more than 4194304 characters"):
        Script("\n".join(["A=aaaaaaaaaa", *[step] * 60, "run --x $A"]))


@pytest.mark.parametrize(
    "text",
    [
        "while true; do\ndone",
        "until false; do\ndone",
        "A='eval $A'\neval $A",
        'f() { f "$@" "$@"; }\nf a',
        'f() { f "$1$1"; }\nf ' + "a" * 1000,
        "! " * 5000 + "true && run --x 1",
        "[[ " + "a || " * 5000 + "a ]] && run --x 1",
        "f() {\n" + "if true; then\n" * 40 + "f\n" + "fi\n" * 40 + "}\nf",
        "{ " * 60 + "run --x 1; " + "}; " * 60,
    ],
)
def test_scripts_without_an_end_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="arguments cannot be read"):
        Script(text)


def test_an_element_that_an_array_lacks_stays_as_written() -> None:
    script = Script("A=(a b)\nrun ${A[1]} ${A[-2]} ${A[2]} ${A[-3]}")
    assert script.commands[-1].words == ("run", "b", "a", "${A[2]}", "${A[-3]}")


def test_sums_beyond_a_shells_numbers_stay_as_written() -> None:
    script = Script("\n".join(["X=99", *["X=$((X*X))"] * 60, "run --x $X"]))
    assert script.commands[-1].words == ("run", "--x", "$((X*X))")


def test_nested_values_are_refused() -> None:
    with pytest.raises(UsageError, match="list of lists"):
        read_table({"--recompute-modules": [["mlp"]]})


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("torchrun --nproc-per-node 8 --nnodes=2", 16),
        ("GPUS=4; torchrun --nproc_per_node $GPUS", 4),
        ("torchrun --nproc_per_node 8 --nnodes $NODES", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4", None),
        ("torchrun --nproc_per_node gpu", None),
        ("srun -N 4", None),
    ],
)
def test_a_launcher_says_how_many_devices_there_are(
    tmp_path: Path, launcher: str, processes: int | None
) -> None:
    text = f"{launcher} pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1\n"
    (tmp_path / "run.sh").write_text(text)
    configuration = read_configuration(tmp_path / "run.sh")
    assert configuration.launched == processes
    if processes:
        assert configuration.devices(None) == processes
    assert configuration.devices(32) == 32


def test_a_script_that_launches_its_devices_says_the_batch(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    text = "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --micro-batch-size 1 --bf16"
    script.write_text(f"{text} --global-batch-size 128\n")
    configuration = read_configuration(script)
    assert configuration.data is None and configuration.global_batch(None) == 128
    assert not configuration.lost
    assert configuration.count(configuration.degree_of_data(None), 128) == 16
    config = tmp_path / "t.toml"
    config.write_text("[training]\nlocal_batch_size = 3\n")
    configuration = read_configuration(config)
    assert configuration.global_batch(None) is None and configuration.global_batch(8) == 24
