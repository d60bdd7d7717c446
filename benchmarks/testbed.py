"""Predicted against measured steps of four placements on an emulated network of two hosts.

Each host has two ranks.

    benchmarks/testbed.py --testbed DIR [--quick] [--json]

DIR holds a lab of network namespaces joined by a user-space switch of a given rate and delay
(`lab.py`, `wire.c`); root, gcc and /dev/net/tun are needed, else the benchmark is skipped with a
reason. In one run, for each rate of the network:

1. `autopar calibrate` on 2 ranks of one node, and on 2 ranks of two nodes (both on one core: as
   many ranks a core as in
step 3); 2. plans for 4 ranks of data parallelism, of tensor parallelism, and of both, one inside
the nodes and the
other across, and back; 3. their steps executed by the runtime under a real-time priority, each in
blocks whose medians
must agree within 5 %.

Reported: predicted and measured seconds, the error, and whether the order of the placements is that
predicted, pairs of measured times closer than 15 % aside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RATES = {"1 Gbit/s": (1e9, 100), "200 Mbit/s": (2e8, 1000)}
"""Rate (bit/s) and delay (us) of the network."""
MODELS = {"balanced": (256, 3, 8, 128), "wide": (512, 2, 8, 64), "long": (256, 2, 16, 128)}
"""Width, layers, batch and sequence of the transformers."""
HEAD = 64
"""Width of an attention head."""
PLACEMENTS = {
    "data": ("4", "data"),
    "tensor": ("4", "megatron"),
    "data across, tensor inside": ("2x2", "node:data,rank:megatron"),
    "tensor across, data inside": ("2x2", "node:megatron,rank:data"),
}
BLOCKS = 3
STEPS = 5
AGREE = 0.05
TIE = 0.15
BAR = 0.20


def skip_reason(testbed: Path) -> str:
    """The reason why the benchmark cannot run here; empty if it can."""
    for name in ("lab.py", "wire.c"):
        if not (testbed / name).is_file():
            return f"{testbed} holds no {name}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    missing = [
        name
        for name in ("gcc", "ip", "chrt", "taskset")
        if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None
    ]
    return f"not installed: {', '.join(missing)}" if missing else ""


# --- the model, and the functions on ranks ---


def transformer(name: str) -> Any:
    """A module of pre-norm transformer layers with its example input."""
    import torch

    from autopar.runtime.measuring.small_trainings import small_model

    width, layers, batch, sequence = MODELS[name]
    torch.manual_seed(0)
    module = small_model("layers", width, layers, head=HEAD)
    return module, (torch.randn(batch, sequence, width),)


def measure_steps(folder: Path, blocks: int, steps: int) -> None:
    """On one rank: seconds of the steps of every plan in `folder`; rank 0 prints them."""
    import torch

    from autopar.frontends.load import ModelOptions, load_model
    from autopar.plan import Plan
    from autopar.runtime.checking.check import optimizer_of
    from autopar.runtime.launch import init_from_environment
    from autopar.runtime.measuring.crew import Crew
    from autopar.runtime.models.model_values import model_values
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.runtime.ranks.device_groups import DeviceGroups
    from autopar.sharding.analysis import analyse

    torch.set_num_threads(1)
    crew = Crew(init_from_environment("gloo"))
    seconds: dict[str, list[list[float]]] = {}
    for path in sorted(folder.glob("*.plan.json")):
        plan = Plan.load(path)
        module, inputs = transformer(path.name.split(".")[0])
        model = load_model(module, ModelOptions(train=True), inputs)
        program = plan.program(analyse(model.graph, train=True))
        local = ParallelModule(
            program, DeviceGroups.create(program.assignment.mesh), model_values(model)
        )
        stepper = optimizer_of("sgd", dict(local.named_parameters()))

        def step(local: Any = local, inputs: Any = inputs, stepper: Any = stepper) -> None:
            local(*inputs)[local.loss_index].backward()
            stepper.step()
            local.zero_grad()

        crew.timed(step, 2)
        times = [crew.timed(step, steps) for _ in range(blocks)]
        seconds[path.name] = [(each[:, :, 2].amax(0) - each[0, :, 0]).tolist() for each in times]
    if crew.rank == 0:
        print(json.dumps(seconds))


# --- the runs ---


class Bench:
    """A copy of the testbed with its switch compiled, and the lab module in it."""

    def __init__(self, testbed: Path, folder: Path) -> None:
        self.folder = folder
        for path in testbed.iterdir():
            if path.suffix in (".py", ".c"):
                shutil.copyfile(path, folder / path.name)
        subprocess.run(
            ["gcc", "-O2", "-w", "-o", str(folder / "wire"), str(folder / "wire.c")], check=True
        )
        sys.path.insert(0, str(folder))
        self.lab = __import__("lab")

    def run(self, lab: Any, ranks: int, arguments: list[str], pin: list[int] | None) -> str:
        """The output of rank 0."""
        outputs = lab.run(ranks, arguments, env={"PYTHONPATH": str(ROOT)}, pin=pin, prio="rr")
        if outputs is None:
            raise SystemExit("a rank of the testbed failed")
        return str(outputs[0])

    def calibrate(
        self, nodes: int, rate: float, delay: float, name: str, tolerance: float, *more: str
    ) -> Path:
        """A cluster file from 2 ranks."""
        path = self.folder / f"{name}.json"
        command = [
            "-m",
            "autopar",
            "calibrate",
            "-o",
            str(path),
            "--backend",
            "gloo",
            "--tolerance",
            str(tolerance),
            "--json",
        ]
        command += ["--collectives", "all_reduce,all_gather,reduce_scatter,all_to_all", *more]
        with self.lab.Lab(nodes=nodes, mode="wire", rate=rate, delay=delay) as lab:
            self.run(lab, 2 // nodes, command, [0, 0])
        return path

    def measure(
        self, rate: float, delay: float, plans: Path, blocks: int, steps: int
    ) -> dict[str, list[list[float]]]:
        """Seconds of the steps of all plans in a folder on 4 ranks, by plan and block."""
        command = [str(Path(__file__).resolve()), "--rank", str(plans), str(blocks), str(steps)]
        with self.lab.Lab(nodes=2, mode="wire", rate=rate, delay=delay) as lab:
            seconds: dict[str, list[list[float]]] = json.loads(
                self.run(lab, 2, command, None).splitlines()[-1]
            )
        return seconds


def rows_of(
    bench: Bench, network: str, models: list[str], tolerance: float, blocks: int
) -> list[dict[str, Any]]:
    """Calibrate, plan, execute and compare on one network."""
    import autopar
    from autopar.costmodel import load_cluster

    rate, delay = RATES[network]
    tag = network.split()[0]
    inside = bench.calibrate(1, rate, delay, f"node{tag}", tolerance, "--quick")
    cluster = load_cluster(
        bench.calibrate(
            2, rate, delay, f"cluster{tag}", tolerance, "--quick", "--inside", str(inside)
        )
    ).sized(4)
    plans = bench.folder / f"plans{tag}"
    plans.mkdir()
    predicted: dict[str, float] = {}
    for model, (index, (mesh, scheme)) in itertools.product(models, enumerate(PLACEMENTS.values())):
        module, inputs = transformer(model)
        sizes = tuple(map(int, mesh.split("x")))
        plan = autopar.plan(
            module, inputs, cluster=cluster, mesh=sizes, scheme=scheme, optimizer="sgd"
        )
        plan.save(plans / f"{model}.{index}.plan.json")
        predicted[f"{model}.{index}.plan.json"] = plan.predicted.step
    seconds = bench.measure(rate, delay, plans, blocks, STEPS)
    rows = []
    for file, times in seconds.items():
        medians = [statistics.median(block) for block in times]
        measured = statistics.median(medians)
        spread = max(medians) / min(medians) - 1
        model, index = file.split(".")[:2]
        rows.append(
            {
                "network": network,
                "model": model,
                "placement": list(PLACEMENTS)[int(index)],
                "predicted_s": predicted[file],
                "measured_s": measured,
                "error": predicted[file] / measured - 1,
                "spread": spread,
                "judged": spread <= AGREE,
            }
        )
    return rows


def rankings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the pairs of placements (without ties) and those predicted in the wrong order.

    By network and model.
    """
    table = []
    for network, model in dict.fromkeys((row["network"], row["model"]) for row in rows):
        judged = [
            row
            for row in rows
            if (row["network"], row["model"]) == (network, model) and row["judged"]
        ]
        pairs = [
            (a, b)
            for a, b in itertools.permutations(judged, 2)
            if a["measured_s"] * (1 + TIE) < b["measured_s"]
        ]
        wrong = [
            f"{a['placement']} < {b['placement']}"
            for a, b in pairs
            if a["predicted_s"] >= b["predicted_s"]
        ]
        best = min(judged, key=lambda row: row["measured_s"], default=None)
        table.append(
            {
                "network": network,
                "model": model,
                "pairs": len(pairs),
                "wrong": wrong,
                "winner": best and best["placement"],
            }
        )
    return table


def show(rows: list[dict[str, Any]], orders: list[dict[str, Any]]) -> None:
    """Print the tables."""
    print(
        f"{'network':12} {'model':10} {'placement':28} {'predicted':>10} {'measured':>10} "
        f"{'error':>7} {'repeats':>8}"
    )
    for row in rows:
        note = "" if row["judged"] else "  not judged: the repeats differ"
        figures = (
            f"{row['predicted_s'] * 1e3:8.1f}ms {row['measured_s'] * 1e3:8.1f}ms "
            f"{row['error']:+7.1%} {row['spread']:8.1%}"
        )
        print(f"{row['network']:12} {row['model']:10} {row['placement']:28} {figures}{note}")
    for order in orders:
        outcome = "; ".join(order["wrong"]) or "as predicted"
        print(
            f"{order['network']:12} {order['model']:10} best: {order['winner']}; {order['pairs']} "
            f"pairs in order: {outcome}"
        )
    errors = [abs(row["error"]) for row in rows if row["judged"]]
    if errors:
        wrong = sum(len(order["wrong"]) for order in orders)
        met = "met" if max(errors) <= BAR and not wrong else "missed"
        print(
            f"{len(errors)} of {len(rows)} judged: median {statistics.median(errors):.1%}, maximum "
            f"{max(errors):.1%} (bar {BAR:.0%}), "
            f"{wrong} pairs in the wrong order: {met}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testbed", type=Path, metavar="DIR", help="folder with lab.py and wire.c")
    parser.add_argument("--quick", action="store_true", help="one model on the faster network")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="of the calibration's repeats (default: 0.1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure_steps(Path(arguments.rank[0]), int(arguments.rank[1]), int(arguments.rank[2]))
        return
    reason = skip_reason(arguments.testbed) if arguments.testbed else "no --testbed DIR is given"
    if reason:
        print(json.dumps({"skipped": reason}) if arguments.json else f"skipped: {reason}")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="testbed_") as folder:
        bench = Bench(arguments.testbed, Path(folder))
        for network in list(RATES)[: 1 if arguments.quick else None]:
            rows += rows_of(
                bench,
                network,
                list(MODELS)[: 1 if arguments.quick else None],
                arguments.tolerance,
                BLOCKS,
            )
    orders = rankings(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "rankings": orders}))
    else:
        show(rows, orders)


if __name__ == "__main__":
    main()
