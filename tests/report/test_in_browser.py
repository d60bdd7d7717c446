"""The report in Chromium: nothing logged, nothing asked for, soon there, read and walked without
eyes or mouse, and every view drawn.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from browser import ENTER, TAB, Browser, missing
from report_models import MEGATRON, perceptrons, planned

from autopar.analysis.searches.rivals import Rival
from autopar.cli import run
from autopar.plan import Plan
from autopar.report.page import Compared, Contents, page

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "a browser is here")
SECONDS = 3.0
BYTES = 5 * 2**20
EVIL = "h.0/<img src=x onerror=alert(1)><script>document.title='evil'</script>\x1b[2J/{{ 7*7 }}"
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
GPT3 = {
    **GPT2,
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
    "n_inner": 49152,
}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LARGE = {
    "gpt2": (GPT2, "--cluster dgx-h100 --devices 8 --batch 64 --seq 1024"),
    "mixtral": (MIXTRAL, "--cluster dgx-h100 --devices 64 --batch 256 --seq 4096"),
    "gpt3": (GPT3, "--cluster dgx-a100-80g --devices 3072 --batch 1536 --seq 2048"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    staged = planned(
        layers=4,
        mesh=(2,),
        scheme="data",
        stages=2,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        zero=0,
    ).plan
    return {"one": planned(pins=MEGATRON).plan, "staged": staged}


def axe() -> str:
    """The checker of accessibility, from the file that AXE names or from the package."""
    spec = importlib.util.find_spec("axe_core_python")
    path = os.environ.get("AXE") or (
        Path(spec.origin).with_name("axe.min.js") if spec is not None and spec.origin else None
    )
    if path is None:
        pytest.skip(
            "axe-core is not there: pip install axe-core-python, or set AXE to an axe.min.js"
        )
    return Path(path).read_text(encoding="utf-8")


def answers(folder: Path) -> Path:
    """A report with every panel, by the command."""
    model, plan, other, out = (
        str(folder / name) for name in ("model.onnx", "plan.json", "other.json", "answers.html")
    )
    onnx.save(perceptrons(1), model)
    for path, devices in ((plan, "4"), (other, "2")):
        run(
            [
                "plan",
                model,
                "--cluster",
                "dgx-h100",
                "--devices",
                devices,
                "--quiet",
                "--no-compare",
                "-o",
                path,
            ]
        )
    (folder / "run.json").write_text(
        json.dumps({"seconds": Plan.load(plan).predicted.step * 2, "steps": 3})
    )
    panels = ["--compare", "--alternatives", "--sensitivity"]
    panels += ["--measured", str(folder / "run.json")]
    run(["report", plan, other, "--model", model, "-o", out, *panels])
    return Path(out)


def imported(folder: Path) -> Path:
    """A report of torchtitan's configuration."""
    for name, text in (("config.json", json.dumps(GPT2)), ("titan.toml", TITAN)):
        (folder / name).write_text(text)
    model = f"hf:{folder / 'config.json'}"
    plan = str(folder / "plan.json")
    out = str(folder / "imported.html")
    run(
        [
            "import",
            str(folder / "titan.toml"),
            "--model",
            model,
            "--cluster",
            "dgx-h100",
            "--no-compare",
            "-o",
            plan,
        ]
    )
    run(["report", plan, "-o", out])
    return Path(out)


TITAN = (
    "[training]\nlocal_batch_size = 8\nseq_len = 512\n[parallelism]\ntensor_parallel_degree = "
    "2\ndata_parallel_shard_degree = 4\n"
)


def written(path: Path, contents: Contents) -> Path:
    path.write_text(page(contents), encoding="utf-8")
    return path


def pages(folder: Path, plans: dict[str, Plan]) -> dict[str, Path]:
    """Reports of every sort."""
    planned_model = planned(pins=MEGATRON)
    rivals = [
        Rival(scheme="data", step=0.5, memory=1e9, fits=True, named="data"),
        Rival(scheme="3d", why="no mesh"),
    ]
    whole = Contents.of(
        planned_model.plan,
        graph=planned_model.model.graph,
        cluster=planned_model.cluster,
        compared=Compared(rivals=rivals, other=plans["staged"]),
    )
    return {
        "file": written(folder / "file.html", Contents.of(plans["one"])),
        "staged": written(folder / "staged.html", Contents.of(plans["staged"])),
        "model": written(folder / "model.html", whole),
    }


def require_quiet(browser: Browser, path: Path, seconds: float) -> None:
    """Nothing was said on the console, and nothing was asked for but the file."""
    assert [entry["message"] for entry in browser.log("browser")] == []
    assert [address for address in browser.requests() if address != "about:blank"] == [
        path.resolve().as_uri()
    ]
    assert seconds <= SECONDS and path.stat().st_size <= BYTES


def require_drawn(browser: Browser, folder: Path) -> None:
    """Every section has a size, and its picture shows something."""
    for anchor in browser.run(
        "return Array.from(document.querySelectorAll('section'), (found) => found.id)"
    ):
        browser.picture(folder / f"{anchor}.png", f"#{anchor}")
        data = (folder / f"{anchor}.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert width > 400 and height > 50 and len(data) > 2000, anchor


def test_reports_open_quietly_and_every_view_is_drawn(
    browser: Browser, plans: dict[str, Plan], tmp_path: Path
) -> None:
    for path in pages(tmp_path, plans).values():
        require_quiet(browser, path, browser.open(path))
        require_drawn(browser, tmp_path)


def test_reports_pass_the_checker_of_accessibility(
    browser: Browser, plans: dict[str, Plan], tmp_path: Path
) -> None:
    script = axe()
    for name, path in pages(tmp_path, plans).items():
        browser.open(path)
        browser.run(
            "document.querySelectorAll('details').forEach((found) => { found.open = true; })"
        )
        browser.run(script)
        process = browser.run("return axe.run(document, { resultTypes: ['violations'] })")
        assert [(v["id"], v["nodes"][0]["html"][:200]) for v in process["violations"]] == [], name


def test_names_do_nothing(browser: Browser, plans: dict[str, Plan], tmp_path: Path) -> None:
    plan = plans["one"]
    first = next(iter(plan.operators))
    operators = {EVIL if name == first else name: held for name, held in plan.operators.items()}
    evil = plan.model_copy(
        update={
            "operators": operators,
            "model": plan.model.model_copy(update={"name": EVIL}),
            "cluster": EVIL,
        }
    )
    path = written(tmp_path / "evil.html", Contents.of(evil, compared=Compared(other=plan)))
    require_quiet(browser, path, browser.open(path))
    assert "<img src=x" in browser.run("return document.title")
    assert browser.run("return [document.images.length, document.scripts.length]") == [0, 1]


def test_a_box_leads_to_its_row_by_keyboard(
    browser: Browser, plans: dict[str, Plan], tmp_path: Path
) -> None:
    browser.open(pages(tmp_path, plans)["model"])
    browser.keys(TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.run("document.querySelector('#model svg a').focus()")
    browser.keys(ENTER)
    row = "document.querySelector(location.hash)"
    assert browser.run(
        f"return {row}.closest('details').open && {row}.getBoundingClientRect().height > 0"
    )


def test_rows_are_filtered_and_folded(
    browser: Browser, plans: dict[str, Plan], tmp_path: Path
) -> None:
    browser.open(pages(tmp_path, plans)["model"])
    browser.run("document.getElementById('filter').focus()")
    browser.keys("relu")
    shown = (
        "return Array.from(document.querySelectorAll('.tree tr[data-name]')).filter((row) => "
        "row.checkVisibility()).length"
    )
    assert (
        browser.run(shown) == 1
        and browser.run("return document.getElementById('counted').textContent") == "1 rows"
    )
    closed = "return document.querySelectorAll('details:not([open])').length"
    browser.run("document.getElementById('unfold').click()")
    assert browser.run(closed) == 0
    browser.run("document.getElementById('fold').click()")
    assert browser.run(closed) > 3


def test_an_operator_is_found_in_every_picture_and_the_address_says_so(
    browser: Browser, plans: dict[str, Plan], tmp_path: Path
) -> None:
    """The name of one layer leads to the row, the box and the spans of all equal layers."""
    path = pages(tmp_path, plans)["model"]
    browser.open(path)
    browser.run("document.querySelector('#time input.find').focus()")
    browser.keys("layers.1/down" + ENTER)
    shown = (
        "return [document.getElementById('counted').textContent,"
        " document.querySelector('#model .counted').textContent,"
        " document.querySelectorAll('#model a.named').length > 0,"
        " document.querySelectorAll('.lane rect.named').length > 0,"
        " Array.from(document.querySelectorAll('.lane text'),"
        " (said) => said.textContent).some((said) => said.endsWith('down/MatMul')),"
        " document.querySelector('#time .tools [role=status]').textContent]"
    )
    before = browser.run(shown)
    assert before[:2] == ["1 rows", "1 boxes"] and before[2:5] == [True, True, True]
    browser.run("document.querySelector('#memory .sort').click()")
    address = browser.run("return location.href")
    browser.open(path)
    assert browser.run("return document.querySelectorAll('a.named').length") == 0
    browser.run("location.href = arguments[0]", address)
    assert browser.run(shown) == before
    sorted_by = "return document.querySelector('#memory th[aria-sort]').getAttribute('aria-sort')"
    assert browser.run(sorted_by) == "ascending"


@pytest.mark.slow
@pytest.mark.parametrize("make", [answers, imported])
def test_every_panel_and_an_imported_configuration(
    browser: Browser, make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path)
    require_quiet(browser, path, browser.open(path))
    require_drawn(browser, tmp_path)
    script = axe()
    browser.run(script)
    process = browser.run("return axe.run(document, { resultTypes: ['violations'] })")
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in process["violations"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_models(browser: Browser, name: str, tmp_path: Path) -> None:
    config, asked = LARGE[name]
    model = f"hf:{tmp_path / 'config.json'}"
    plan = str(tmp_path / "plan.json")
    out = tmp_path / "report.html"
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(
        [
            "plan",
            model,
            *asked.split(),
            "--dtype",
            "bfloat16",
            "--no-compare",
            "--quiet",
            "-o",
            plan,
        ]
    )
    for arguments in ([plan], [plan, "--model", model]):
        run(["report", *arguments, "-o", str(out)])
        require_quiet(browser, out, browser.open(out))
        require_drawn(browser, tmp_path)
