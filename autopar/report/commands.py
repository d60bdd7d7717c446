"""The commands `report`, `convert`, `discover`, `train`, `doctor`, `calibrate`, `bench`, `cluster` and `checkpoint`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, UsageError
from ..printable import printable
from .files import check_outputs

if TYPE_CHECKING:
    from autopar.costmodel import Cluster


def memory_of(args: argparse.Namespace) -> float | None:
    """The given limit of a device in bytes, or None."""
    from .units import parse_bytes

    return parse_bytes(args.memory, "--memory") if args.memory else None


def print_json(found: dict[str, Any]) -> None:
    """One object on stdout."""
    print(json.dumps(found, indent=1))


# --- report ---


def report(args: argparse.Namespace) -> None:
    """Write the page of a plan."""
    check_outputs(args, args.output)
    from .page.command import report

    report(args, memory_of(args))
    print(printable(f"saved to {args.output}"), file=sys.stderr)


# --- convert ---


def convert(args: argparse.Namespace) -> None:
    """Write a plan for another project."""
    from ..convert import convert
    from ..outputs import write_whole
    from ..plan import Plan

    check_outputs(args, args.output)
    found = convert(Plan.load(args.plan), args.to)
    for note in found.lost:
        print(printable(f"autopar: {args.to}: {note}"), file=sys.stderr)
    if args.output:
        write_whole(Path(args.output), found.text)
    else:
        print(printable(found.text), end="")


# --- discover ---


def discover(args: argparse.Namespace) -> None:
    """Find the rule of an operator."""
    with contextlib.redirect_stdout(sys.stderr):
        from autopar.runtime.discovery import discover_target, example_of_texts

        if args.inputs is None and not args.set:
            found = discover_target(args.target, (), {})
        else:
            found = discover_target(args.target, *example_of_texts(args.target, args.inputs, args.set))
    if args.json:
        print_json(found.json())
    else:
        print(printable(found.line))
        print(f"# proven by executing {found.strategies} strategies on {', '.join('x'.join(map(str, mesh)) for mesh in found.meshes)}")
        print(printable("".join(f"# {note}\n" for note in found.notes)), end="")


# --- train ---


def train(args: argparse.Namespace) -> None:
    """Train as a file says."""
    from ..training.command import train

    train(args)


# --- doctor ---


def doctor(args: argparse.Namespace) -> int | None:
    """Check this machine; the exit code is that of a failed run if a plan does not compute the same as one device."""
    from .doctor import doctor
    from .tables import show

    with contextlib.redirect_stdout(sys.stderr):
        found = doctor(nproc=args.nproc, quick=args.quick)
    if found is None or isinstance(found, int):
        return found
    if args.json:
        print_json(found.json())
    else:
        show(found.parts())
    return 0 if found.ok else RunError.exit_code


# --- calibrate, bench ---


def calibrate(args: argparse.Namespace) -> None:
    """Measure the available ranks and write a cluster file."""
    from autopar.costmodel import dump, load_cluster

    from ..outputs import write_whole
    from .calibrated import calibrate, calibrated_parts
    from .clusters import show_parts
    from .tables import show

    path = Path(args.output)
    check_outputs(args, args.output)
    if path.suffix.lower() != ".json":
        raise UsageError(f"{path}: a cluster file ends in .json")
    _check_ranks(args)
    if not args.tolerance > 0:
        raise UsageError(f"--tolerance is {args.tolerance}; it must be above 0")
    inside = load_cluster(args.inside) if args.inside else None
    with contextlib.redirect_stdout(sys.stderr):
        found = calibrate(
            nproc=args.nproc, backend=args.backend, name=args.name or path.stem, kinds=_kinds(args), quick=args.quick,
            tolerance=args.tolerance, inside=inside,
        )  # fmt: skip
    if found is None:
        return
    write_whole(path, dump(found))
    if args.json:
        print_json(json.loads(dump(found)))
    else:
        show([*show_parts(found), *calibrated_parts(found)])


def bench(args: argparse.Namespace) -> None:
    """Measure collectives, and compare with the predictions."""
    from ..outputs import write_whole
    from .bench import bench_collectives, bench_json, bench_panels, bench_parts
    from .plot import svg
    from .tables import show
    from .units import parse_bytes

    check_outputs(args, args.plot)
    _check_ranks(args)
    sizes = [int(parse_bytes(text, "--sizes")) for text in args.sizes.split(",")]
    with contextlib.redirect_stdout(sys.stderr):
        found = bench_collectives(nproc=args.nproc, backend=args.backend, sizes=sizes, kinds=_kinds(args), cluster=args.cluster)
    if found is None:
        return
    if args.plot:
        write_whole(Path(args.plot), svg(bench_panels(found)))
    if args.json:
        print_json(bench_json(found))
    else:
        show(bench_parts(found))


def _kinds(args: argparse.Namespace) -> list[str]:
    return [kind for kind in args.collectives.split(",") if kind]


def _check_ranks(args: argparse.Namespace) -> None:
    if args.nproc is not None and args.nproc < 2:
        raise UsageError(f"--nproc is {args.nproc}; collectives are measured on 2 ranks or more")


# --- cluster ---


def cluster(args: argparse.Namespace) -> None:
    """List the presets, or show a cluster."""
    (_cluster_list if args.cluster_command == "list" else _cluster_show)(args)


def _cluster_list(args: argparse.Namespace) -> None:
    from autopar.costmodel import load_cluster, presets

    from .clusters import list_json, list_table
    from .tables import show

    found: list[Cluster] = [load_cluster(name) for name in presets()]
    if args.json:
        print_json(list_json(found))
    else:
        show([list_table(found)])


def _cluster_show(args: argparse.Namespace) -> None:
    from autopar.costmodel import dump

    from ..plan_options import choose_cluster
    from .clusters import show_parts
    from .tables import show

    cluster, _ = choose_cluster(args.name, args.devices)
    if args.json:
        print_json(json.loads(dump(cluster)))
    else:
        show(show_parts(cluster))


def completion(args: argparse.Namespace) -> None:
    """Print the script of a shell."""
    from .arguments import build_parser
    from .completion import completion_script

    print(completion_script(args.shell, build_parser()), end="")


def checkpoint(args: argparse.Namespace) -> None:
    """Show a checkpoint, or convert it."""
    (_checkpoint_show if args.checkpoint_command == "show" else _checkpoint_convert)(args)


def _checkpoint_show(args: argparse.Namespace) -> None:
    from .checkpoints import checkpoint_json, checkpoint_parts, read_checkpoint
    from .tables import show

    path, manifest = read_checkpoint(args.folder)
    if args.json:
        print_json(checkpoint_json(path, manifest))
    else:
        show(checkpoint_parts(path, manifest))


def _checkpoint_convert(args: argparse.Namespace) -> None:
    from .checkpoints import converted

    found = converted(args.folder, args.output, name=args.name, dtype=args.dtype, strip=args.strip, add=args.add)
    if args.json:
        print_json(found.json())
    else:
        print(printable(found.sentence))
