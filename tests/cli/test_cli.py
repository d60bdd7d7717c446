"""The command line on small models: what it prints, what it writes, and its exit code for every bad
input.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import autopar.cli
from autopar.cli import main, run
from autopar.errors import AutoparError, NoPlanFits, PlanError, RunError, UsageError
from autopar.plan import Plan
from autopar.report import traces
from autopar.report.explain import further_answers
from tests.plan_files import decide

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--batch", "8", "--dim", "sequence=16")
FOUR = ("--cluster", "dgx-h100", "--devices", "4", "--mesh", "4")
SMALL = (*SIZES, *FOUR)
TORCH_MODULE = """
import torch

print("noise on stdout")

def build():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)]
    return torch.nn.Sequential(*layers), (torch.randn(8, 16),)

def loss(outputs, x):
    return outputs.pow(2).mean()
"""


def _example() -> Callable[..., Path]:
    """`write_gpt2` of the examples."""
    spec = importlib.util.spec_from_file_location("gpt2_onnx", ROOT / "examples" / "gpt2_onnx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt2_onnx"] = module
    spec.loader.exec_module(module)
    writer: Callable[..., Path] = module.write_gpt2
    return writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small language models, a plan of the first, and files that are none."""
    path = tmp_path_factory.mktemp("cli")
    write = _example()
    for name, layers in (("two", 2), ("three", 3)):
        write(
            path / f"{name}.onnx", layers=layers, hidden=64, heads=4, vocabulary=256, positions=64
        )
    run(["plan", str(path / "two.onnx"), *SMALL, "--quiet", "-o", str(path / "two.json")])
    (path / "truncated.onnx").write_bytes((path / "two.onnx").read_bytes()[:3000])
    (path / "corrupt.json").write_text((path / "two.json").read_text()[:1000])
    (path / "other.json").write_text('{"schema": "something-else"}')
    changed = json.loads((path / "two.json").read_text())
    decide(changed, "/wte/Gather", ["nonsense"])
    (path / "wrong.json").write_text(json.dumps(changed))
    _unsupported(path / "unsupported.onnx")
    return path


def _unsupported(path: Path) -> None:
    nodes = [
        helper.make_node("Foo", ["x", "w"], ["a"], domain="mine"),
        helper.make_node("Bar", ["a", "w"], ["y"], domain="mine"),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y")]
    weight = helper.make_tensor("w", TensorProto.FLOAT, (4, 4), [0.0] * 16)
    graph = helper.make_graph(nodes, "unsupported", infos[:1], infos[1:], [weight])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.fixture
def torch_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PyTorch model in a module of its own, which prints when it is imported."""
    (tmp_path / "small_torch_model.py").write_text(TORCH_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "small_torch_model:build"


def _files(folder: Path, words: Sequence[str]) -> list[str]:
    """Words that name a file of the folder become its path."""
    return [str(folder / word[1:]) if word.startswith("@") else word for word in words]


def test_plan_is_printed_and_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert run(["plan", str(folder / "two.onnx"), *SMALL, "--compare", "-o", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cluster dgx-h100; 4 x H100-SXM5-80GB"
    assert any(line.startswith("mesh gpu=4 (nvlink): 4 devices") for line in lines)
    assert any(line.strip().startswith("h.{0,1}/attn/c_attn ") for line in lines)
    assert any(line.strip().startswith("TP (megatron) ") for line in lines)
    assert lines[-1] == f"saved to {saved}"
    assert Plan.load(saved).devices == 4
    assert saved.read_bytes() == (folder / "two.json").read_bytes()


def test_json_is_one_object_and_nothing_else(
    torch_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["plan", torch_model, *FOUR, "--compare", "--json", "--loss", "small_torch_model:loss"])
        == 0
    )
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert "noise" not in out and "noise" in err
    assert set(document) == {"summary", "plan"}
    assert document["plan"]["schema"] == "autopar-plan"
    assert [rival["scheme"] for rival in document["summary"]["rivals"]] == ["data", "megatron"]
    assert document["summary"]["step"] == document["plan"]["predicted"]["step"]


def test_quiet_prints_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder / "two.onnx"), *SMALL, "--quiet", "--no-compare"]) == 0
    assert capsys.readouterr() == ("", "")


def test_any_number_of_devices(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    seven = ["--devices", "7", "--mesh", "7", "--cluster", "p5"]
    assert (
        run(
            [
                "plan",
                str(folder / "two.onnx"),
                *SIZES,
                *seven,
                "--quiet",
                "--strategy-save",
                str(saved),
            ]
        )
        == 0
    )
    assert Plan.load(saved).devices == 7


def test_a_loaded_plan_is_used_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "again.json"
    run(
        [
            "plan",
            str(folder / "two.onnx"),
            "--strategy-load",
            str(folder / "two.json"),
            "-o",
            str(saved),
        ]
    )
    assert saved.read_bytes() == (folder / "two.json").read_bytes()
    assert capsys.readouterr().out.startswith("the plan is loaded, for cluster dgx-h100; 4 x")


def test_pins_are_accepted_as_they_are_shown(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    pin = ["--pin", "h.1/mlp/c_fc/MatMul=gpu:n", "--stages", "1", "--quiet"]
    run(["plan", str(folder / "two.onnx"), *SMALL, *pin, "-o", str(saved)])
    assert Plan.load(saved).operators["/h.1/mlp/c_fc/MatMul"].strategy == ("n",)


def test_a_plan_is_printed_before_its_trace_fails(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise PlanError("not drawn")

    monkeypatch.setattr(traces, "write_trace", fails)
    words = [
        "plan",
        str(folder / "two.onnx"),
        *SMALL,
        "--no-compare",
        "--trace",
        str(tmp_path / "trace.json"),
    ]
    with pytest.raises(PlanError, match="not drawn"):
        run(words)
    assert "not saved" in capsys.readouterr().out


def test_reuse_keeps_what_matches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "more.json"
    run(
        [
            "plan",
            str(folder / "three.onnx"),
            *SMALL,
            "--reuse",
            str(folder / "two.json"),
            "-o",
            str(saved),
        ]
    )
    old = Plan.load(folder / "two.json")
    new = Plan.load(saved)
    assert "kept 60 of the 60 strategies" in capsys.readouterr().out
    assert {
        name: operator.strategy for name, operator in new.operators.items() if name in old.operators
    } == {name: operator.strategy for name, operator in old.operators.items()}


def test_pins_choose_among_the_meshes_that_have_their_axes(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "pinned.json"
    run(
        [
            "plan",
            str(folder / "two.onnx"),
            *SIZES,
            *FOUR[:4],
            "--pin",
            "*c_fc/MatMul=gpu1:n",
            "--quiet",
            "-o",
            str(saved),
        ]
    )
    plan = Plan.load(saved)
    assert [axis.name for axis in plan.mesh] == ["gpu0", "gpu1"]
    assert plan.operators["/h.1/mlp/c_fc/MatMul"].strategy[1] == "n"


BAD: dict[str, tuple[int, tuple[str, ...], str]] = {
    "truncated model": (3, ("plan", "@truncated.onnx", *SMALL), "truncated"),
    "unsupported operators, all named": (
        3,
        ("plan", "@unsupported.onnx", *FOUR),
        "mine.Bar .*mine.Foo ",
    ),
    "missing model": (3, ("plan", "@missing.onnx", *SMALL), "missing.onnx"),
    "missing function": (3, ("plan", "no_such_module:build", *FOUR), "cannot be imported"),
    "no model": (2, ("plan", "two", *FOUR), "give FILE.onnx"),
    "no devices": (2, ("plan", "@two.onnx", *SIZES, "--devices", "0"), "must be at least 1"),
    "devices not a number": (2, ("plan", "@two.onnx", "--devices", "many"), "--devices.*many"),
    "unknown preset": (
        2,
        ("plan", "@two.onnx", *SIZES, "--cluster", "dgx-h10"),
        "valid are .*dgx-h100.*Perhaps",
    ),
    "unknown option": (
        2,
        ("plan", "@two.onnx", "--device", "4"),
        r"unknown option --device: perhaps you meant --devices\? \(autopar plan --help",
    ),
    "unknown command": (
        2,
        ("plane", "x"),
        "unknown command 'plane': valid are plan, run, train, compare, .* Perhaps you meant 'plan'",
    ),
    "no command": (2, (), "required: COMMAND"),
    "one argument too many": (
        2,
        ("plan", "@two.onnx", "more", *SMALL),
        "unexpected argument 'more'",
    ),
    "unknown search": (
        2,
        ("plan", "@two.onnx", *SMALL, "--search", "magic"),
        "dynamic_programming",
    ),
    "unknown optimizer": (2, ("plan", "@two.onnx", *SMALL, "--optimizer", "adam"), "adamw"),
    "unknown dim": (
        2,
        ("plan", "@two.onnx", *SMALL, "--dim", "length=3"),
        "valid are batch, sequence",
    ),
    "bad dim": (2, ("plan", "@two.onnx", *SMALL, "--dim", "sequence"), "NAME=SIZE"),
    "bad size": (2, ("plan", "@two.onnx", *SMALL, "--dim", "sequence=x"), "no size"),
    "bad shape": (2, ("plan", "@two.onnx", *SMALL, "--shape", "input_ids=2xx"), "no size"),
    "bad batch": (2, ("plan", "@two.onnx", *SMALL, "--batch", "-1"), "--batch is -1"),
    "bad memory": (2, ("plan", "@two.onnx", *SMALL, "--memory", "8 GIB of it"), "GiB"),
    "memory and scheme before open sizes": (
        2,
        ("plan", "@two.onnx", *FOUR, "--memory", "80GBB"),
        "80GBB",
    ),
    "scheme before open sizes": (
        2,
        ("plan", "@two.onnx", *FOUR, "--scheme", "dat"),
        "unknown scheme 'dat'",
    ),
    "pin before open sizes": (2, ("plan", "@two.onnx", *FOUR, "--pin", "c_fc"), "OP=AXIS:FACTOR"),
    "pin of nothing": (
        2,
        ("plan", "@two.onnx", *SMALL, "--pin", "h.1/mlp/c_fcc/MatMul=gpu:n"),
        "nearest are h.1/mlp/c_fc/MatMul",
    ),
    "a function with arguments": (
        3,
        ("plan", "os.path:join", *FOUR),
        "must be a function without arguments that returns",
    ),
    "a function that fails": (
        3,
        ("plan", "test_cli_failing:build", *FOUR),
        "failed: KeyError: 'why' .*test_cli_failing.py, line 2",
    ),
    "no function": (3, ("plan", "os:sep", *FOUR), "must be a function"),
    "a remedy for unknown operators": (
        3,
        ("plan", "@unsupported.onnx", *FOUR),
        "Export the model with operators of the ONNX standard",
    ),
    "bad mesh": (
        2,
        ("plan", "@two.onnx", *SIZES, "--devices", "4", "--cluster", "p5", "--mesh", "3x2"),
        "does not have 4 devices",
    ),
    "bad pin": (2, ("plan", "@two.onnx", *SMALL, "--pin", "c_fc"), "OP=AXIS:FACTOR"),
    "pin on an unknown axis": (
        2,
        ("plan", "@two.onnx", *SMALL, "--pin", "*c_fc/*=node:n"),
        "valid are gpu",
    ),
    "pin to an unknown factor": (
        2,
        ("plan", "@two.onnx", *SMALL, "--pin", "*c_fc/MatMul=gpu:zz"),
        "valid are .*n",
    ),
    "no plan fits": (
        4,
        ("plan", "@two.onnx", *SMALL, "--memory", "100kB"),
        "the smallest that would do is ",
    ),
    "plan of another model": (
        5,
        ("plan", "@three.onnx", *SMALL, "--strategy-load", "@two.json"),
        "h.2.* is not in the plan",
    ),
    "plan of other sizes": (
        5,
        (
            "plan",
            "@two.onnx",
            "--batch",
            "4",
            "--dim",
            "sequence=16",
            *FOUR,
            "--strategy-load",
            "@two.json",
        ),
        r"\n  input 'input_ids' is int64 \[4, 16\], planned as int64 \[8, 16\]\n  operator",
    ),
    "loaded plan for other devices": (
        5,
        ("plan", "@two.onnx", *SIZES, "--devices", "8", "--strategy-load", "@two.json"),
        "4 devices, not 8",
    ),
    "reused plan for other devices": (
        5,
        ("plan", "@two.onnx", *SIZES, "--devices", "8", "--reuse", "@two.json"),
        "4 devices, not 8",
    ),
    "corrupt plan": (
        5,
        ("plan", "@two.onnx", *SMALL, "--strategy-load", "@corrupt.json"),
        "not a strategy checkpoint",
    ),
    "another kind of file": (5, ("explain", "@other.json"), "autopar-plan"),
    "missing plan": (5, ("explain", "@missing.json"), "missing.json"),
    "plan with a strategy that does not exist": (
        5,
        ("explain", "@wrong.json", "--model", "@two.onnx"),
        "nonsense",
    ),
    "plan run on another model": (5, ("run", "@two.json", "--model", "@three.onnx"), "h.2"),
    "plan run on other ranks": (
        5,
        ("run", "@two.json", "--model", "@two.onnx", "--nproc", "8"),
        "for 4 ranks, not 8",
    ),
    "run on no ranks": (
        2,
        ("run", "@two.json", "--model", "@two.onnx", "--nproc", "0"),
        "at least 1",
    ),
    "run without a model": (2, ("run", "@two.json"), "--model"),
    "output in no folder": (
        2,
        ("plan", "@two.onnx", *SMALL, "-o", "@no/such/plan.json"),
        "cannot be written",
    ),
    "output over a folder": (2, ("plan", "@two.onnx", *SMALL, "-o", "@."), "cannot be written"),
    "unknown operator": (2, ("explain", "@two.json", "h.0/mlp/c_fcc"), "nearest are"),
    "alternatives of nothing": (2, ("explain", "@two.json", "--alternatives"), "--model"),
    "alternatives of several": (
        2,
        ("explain", "@two.json", "h.0/attn", "--model", "@two.onnx", "--alternatives"),
        "one operator",
    ),
    "sensitivity of nothing": (
        2,
        ("explain", "@two.json", "--sensitivity"),
        "--sensitivity needs --model",
    ),
    "collectives of one operator": (
        2,
        ("explain", "@two.json", "h.0/attn", "--collectives"),
        "leave out OP",
    ),
    "a difference of one operator": (
        2,
        ("explain", "@two.json", "h.0/attn", "--diff", "@two.json"),
        "leave out OP",
    ),
    "a difference from no plan": (
        5,
        ("explain", "@two.json", "--diff", "@missing.json"),
        "missing.json",
    ),
    "unknown shell": (
        2,
        ("completion", "bsh"),
        "valid are bash, zsh, fish. Perhaps you meant .bash",
    ),
    "unknown scheme": (
        2,
        ("plan", "@two.onnx", *SMALL, "--scheme", "megatrn"),
        "Perhaps you meant .megatron",
    ),
    "unknown scheme to compare": (
        2,
        ("compare", "@two.onnx", *SIZES, "--scheme", "megatrn"),
        "Perhaps you meant .megatron",
    ),
    "a scheme without its mesh": (
        2,
        ("plan", "@two.onnx", *SIZES, "--devices", "8", "--cluster", "p5", "--scheme", "2d"),
        "4 .2x2. or 9",
    ),
    "stages that do not divide": (
        2,
        (
            "plan",
            "@two.onnx",
            *SIZES,
            "--devices",
            "4",
            "--cluster",
            "p5",
            "--scheme",
            "data",
            "--stages",
            "3",
        ),
        "3 equal stages",
    ),
    "no such recompute": (2, ("plan", "@two.onnx", *SMALL, "--recompute", "some"), "selective"),
    "unknown cluster to show": (2, ("cluster", "show", "p6"), "valid are .*p5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, words, message = BAD[name]
    if not (folder / "test_cli_failing.py").exists():
        (folder / "test_cli_failing.py").write_text("def build():\n    return {}['why']\n")
    monkeypatch.syspath_prepend(str(folder))
    before = _written(folder)
    with pytest.raises(AutoparError, match=f"(?s){message}") as raised:
        run(_files(folder, words))
    assert raised.value.exit_code == code
    assert _written(folder) == before


def _written(folder: Path) -> list[Path]:
    """The files of a folder, without those that Python itself writes of modules it imports."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_the_smallest_memory_would_do(folder: Path) -> None:
    with pytest.raises(NoPlanFits) as raised:
        run(["plan", str(folder / "two.onnx"), *SMALL, "--memory", "100kB", "--quiet"])
    enough = str(int(raised.value.minimum) + 1)
    assert run(["plan", str(folder / "two.onnx"), *SMALL, "--memory", enough, "--quiet"]) == 0


def test_nothing_half_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        run(["plan", str(folder / "two.onnx"), *SMALL, "--quiet", "-o", str(saved)])
    assert [path.name for path in tmp_path.iterdir()] == [
        "plan.json"
    ] and saved.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PlanError("no\nmatch"), 5, "autopar: error: no\nmatch\n"),
        (KeyboardInterrupt(), 130, "autopar: interrupted\n"),
    ],
)
def test_main_prints_the_error(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setitem(autopar.cli.COMMANDS, "cluster", fails)
    monkeypatch.setattr("sys.argv", ["autopar", "cluster", "list"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == code
    assert capsys.readouterr() == ("", message)


def test_a_missing_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [
        name for name in sys.modules if name.startswith("autopar.frontends.")
    ]:  # which other tests have loaded with torch
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "model.pt2").touch()
    with pytest.raises(UsageError, match=r"pip install 'autopar\[torch\]'"):
        run(["plan", str(tmp_path / "model.pt2"), *FOUR])


def test_planning_an_onnx_file_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys; from autopar.cli import run; run(sys.argv[1:]); assert not {'torch', 'rich', "
        "'scipy'} & set(sys.modules)"
    )
    words = ["plan", str(folder / "two.onnx"), *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = (
        "import sys; from autopar.cli import main; sys.argv = ['autopar', 'cluster', 'list']; "
        "sys.stdin.read(); main()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_explain_with_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "explain",
        str(folder / "two.json"),
        "h.0/mlp/c_fc",
        "--model",
        str(folder / "two.onnx"),
    ]
    assert run(words) == 0
    assert "/h.0/mlp/c_fc/MatMul (aten.matmul.default)" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [operator["name"] for operator in printed["operators"]] == [
        "/h.0/mlp/c_fc/MatMul",
        "/h.0/mlp/c_fc/Add",
    ]
    assert set(printed["operators"][0]["storage"]) == {"h.0.mlp.c_fc.weight"}


def test_explain_tells_alternatives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "explain",
        str(folder / "two.json"),
        "h.0/mlp/c_fc/MatMul",
        "--model",
        str(folder / "two.onnx"),
        "--alternatives",
    ]
    run([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    told = [other["strategy"]["gpu"] for other in printed["alternatives"]]
    assert {"k", "n", "d0"} <= set(told) and len(set(told)) == len(told)
    assert [other["strategy"] for other in printed["alternatives"] if other["planned"]] == [
        printed["operators"][0]["strategy"]
    ]
    assert min(other["step"] for other in printed["alternatives"]) == pytest.approx(printed["best"])
    run(words)
    assert "as planned" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ci
def test_explain_tells_what_other_pins_cost(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = further_answers.outer_alternatives
    kept = []

    def once(*args: Any, **more: Any) -> Any:
        kept.append(kept[0] if kept else search(*args, **more))  # both forms tell of one search
        return kept[0]

    monkeypatch.setattr(further_answers, "outer_alternatives", once)
    words = [
        "explain",
        str(folder / "two.json"),
        "--model",
        str(folder / "two.onnx"),
        "--alternatives",
    ]
    run([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {"stages", "micro-batches", "recompute", "ZeRO", "offload"} == {
        other["variable"] for other in printed["pinned"]
    }
    run(words)
    assert "The best plan if one choice were fixed" in capsys.readouterr().out and len(kept) == 2


@pytest.mark.slow
@pytest.mark.ci
def test_explain_tells_where_the_plan_flips(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "explain",
        str(folder / "two.json"),
        "--model",
        str(folder / "two.onnx"),
        "--sensitivity",
        "--json",
    ]
    run(words)
    printed = json.loads(capsys.readouterr().out)
    assert {flip["quantity"] for flip in printed["flips"]} == {
        "nvlink bandwidth",
        "memory",
        "batch",
    }
    assert printed["base"] and all(
        (flip["factor"] is None) != (flip["limit"] is None) for flip in printed["flips"]
    )


def test_compare_prices_the_schemes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "compare",
        str(folder / "two.onnx"),
        *SIZES,
        "--devices",
        "2",
        "--scheme",
        "data",
        "--scheme",
        "megatron",
        "--scheme",
        "3d",
    ]
    run([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [row["scheme"] for row in printed["rows"]] == ["plan found", "data", "megatron", "3d"]
    assert [row["step"] is None for row in printed["rows"]] == [False, False, False, True]
    run(words)
    out = capsys.readouterr().out
    assert "Beside known schemes" in out and "impossible: 3d needs a mesh" in out


def test_pins_of_the_outer_search(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    pins = ["--stages", "1", "--micro-batches", "2", "--recompute", "none", "--zero", "3"]
    run(
        [
            "plan",
            str(folder / "two.onnx"),
            *SIZES,
            "--devices",
            "2",
            "--scheme",
            "data",
            *pins,
            "-o",
            str(target),
            "--quiet",
        ]
    )
    schedule = json.loads(target.read_text())["schedule"]
    assert (schedule["micro_batches"], schedule["gathered"], schedule["recompute"]) == (
        2,
        "per_pass",
        [],
    )


@pytest.mark.parametrize("model", [True, False])
def test_explain_all(folder: Path, model: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "explain",
        str(folder / "two.json"),
        *(["--model", str(folder / "two.onnx")] if model else []),
    ]
    run([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["operators"]) == 60 and (printed["groups"] is not None) == model
    run(words)
    out = capsys.readouterr().out
    assert "h.{0,1}.attn.c_attn.weight" in out and len(out.splitlines()) < 100


def test_explain_tells_what_differs_in_another_plan(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other.json")
    run(
        [
            "plan",
            str(folder / "two.onnx"),
            *SMALL,
            "--scheme",
            "megatron",
            "--no-compare",
            "--quiet",
            "-o",
            other,
        ]
    )
    words = ["explain", str(folder / "two.json"), "--diff"]
    for beside, differs in ((other, True), (str(folder / "two.json"), False)):
        run([*words, beside, "--json"])
        actual = json.loads(capsys.readouterr().out)["difference"]
        assert actual["same_model"] and bool(actual["operators"]) == differs
        mine, theirs = (Plan.load(path).operators for path in (folder / "two.json", beside))
        assert set(actual["operators"]) == {
            name for name in mine if mine[name].strategy != theirs[name].strategy
        }
        assert [p["step"] for p in actual["predicted"]] == [
            Plan.load(path).predicted.step for path in (folder / "two.json", beside)
        ]
        run([*words, beside])
        out = capsys.readouterr().out
        assert (
            "times as long" in out
            and "Operators with another strategy" in out
            and ("h.{0,1}/mlp" in out) == differs
        )


@pytest.mark.parametrize("model", [True, False])
def test_explain_counts_collectives(
    folder: Path, model: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = str(tmp_path / "split.json")
    run(
        [
            "plan",
            str(folder / "two.onnx"),
            *SMALL,
            "--scheme",
            "megatron",
            "--no-compare",
            "--quiet",
            "-o",
            split,
        ]
    )
    for path, talks in ((split, True), (str(folder / "two.json"), False)):
        words = [
            "explain",
            path,
            "--collectives",
            *(["--model", str(folder / "two.onnx")] if model else []),
        ]
        run([*words, "--json"])
        actual = json.loads(capsys.readouterr().out)["collectives"]
        assert actual["of"] == "step" and sum(row["times"] for row in actual["totals"]) == len(
            Plan.load(path).collectives
        )
        assert bool(actual["totals"]) == talks and ("operators" in actual) == model
        run(words)
        out = capsys.readouterr().out
        assert ("Nothing is communicated." in out) != talks
        assert (
            "Collectives by axis and level" in out and ("Collectives by operator" in out) == model
        )


def test_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["cluster", "list", "--json"])
    names = [cluster["name"] for cluster in json.loads(capsys.readouterr().out)["clusters"]]
    run(["cluster", "list"])
    assert all(name in capsys.readouterr().out for name in names[:1])
    run(["cluster", "show", "p4d", "--devices", "16", "--json"])
    saved = tmp_path / "mine.json"
    saved.write_text(capsys.readouterr().out)
    run(["cluster", "show", str(saved)])
    assert "16 x A100-SXM4-40GB" in capsys.readouterr().out


def test_run_and_check(
    torch_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = str(tmp_path / "plan.json")
    run(
        [
            "plan",
            torch_model,
            "--cluster",
            "local-cpu",
            "--devices",
            "2",
            "--mesh",
            "2",
            "--quiet",
            "-o",
            saved,
        ]
    )
    assert run(["run", saved, "--model", torch_model, "--nproc", "2", "--check"]) == 0
    assert "ok: yes" in capsys.readouterr().out.splitlines()
    assert run(["run", saved, "--model", torch_model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_ranks_that_a_plan_leaves_idle_are_not_started(
    torch_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    run(
        [
            "plan",
            torch_model,
            "--cluster",
            "local-cpu",
            "--devices",
            "2",
            "--quiet",
            "-o",
            str(saved),
        ]
    )
    document = json.loads(saved.read_text(encoding="utf-8"))
    assert run(["run", str(saved), "--model", torch_model, "--nproc", "2"]) == 0
    assert document.get("unused", 0) == 1, "a small model is faster on one device"
    capsys.readouterr()
    with pytest.raises(PlanError, match="for 1 ranks, not 3"):
        run(["run", str(saved), "--model", torch_model, "--nproc", "3"])


def test_a_failed_check_is_an_error(
    torch_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import autopar.runtime.run

    saved = str(tmp_path / "plan.json")
    run(["plan", torch_model, "--cluster", "local-cpu", "--devices", "2", "--quiet", "-o", saved])
    fields = {
        "ranks": 2,
        "mesh": "",
        "backend": "gloo",
        "steps": 1,
        "seconds": 0.0,
        "losses": (),
        "collectives": "",
        "check": "differs",
        "ok": False,
    }
    monkeypatch.setattr(
        autopar.runtime.run, "run_plan", lambda *_, **__: autopar.runtime.run.RunReport(**fields)
    )
    with pytest.raises(RunError, match="differs"):
        run(["run", saved, "--model", torch_model, "--check"])
