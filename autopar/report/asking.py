"""The commands about other projects' files, and about changed conditions: `import`, `what-if`, `verify`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, UsageError
from ..printable import printable
from .commands import memory_of, print_json
from .files import check_outputs

if TYPE_CHECKING:
    from ..importing import Configuration, Imported
    from ..supposing import WhatIf


def import_(args: argparse.Namespace) -> None:
    """Plan according to a configuration, and freely, for comparison."""
    from ..importing import import_configuration, read_configuration
    from .progress import ProgressBar

    check_outputs(args, args.output)
    found = read_configuration(args.config, args.form)
    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        model = _sized_model(args, found)
        imported = import_configuration(
            found, model, devices=args.devices, cluster=args.cluster, memory=memory_of(args), compare=args.compare, progress=bar
        )  # fmt: skip
    if args.output:
        imported.planned.plan.save(args.output)
    for note in found.lost:
        print(printable(f"autopar: {found.source}: {note}"), file=sys.stderr)
    if args.json:
        print_json(_imported_json(imported))
        return
    _show_imported(imported, args.output)


def _sized_model(args: argparse.Namespace, found: Configuration) -> Any:
    """The model with the configuration's batch, sequence length and types, unless the command line gives others."""
    from ..configured import PREFIX
    from .loading import check_words, load_asked

    check_words(args, [])
    if args.devices is not None or found.data is not None:
        data = 1 if found.styles else found.degree_of_data(args.devices)
        args.batch = args.batch if args.batch is not None else found.batch_on(data)
    if args.model.startswith(PREFIX):
        args.seq = args.seq if args.seq is not None else found.sequence
    args.dtype = args.dtype if args.dtype is not None else found.dtype
    return load_asked(args)


def _show_imported(imported: Imported, saved: str | None) -> None:
    from ..schemes import scheme_of
    from ..sharding.analysis import analyse
    from .certainty import certainty_lines
    from .plan_output import cluster_sentence
    from .stages import stages_table
    from .tables import Table, comparison_table, rival_of, show, summary_lines

    planned = imported.planned
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    named = scheme_of(planned.plan, analysis)
    parts: list[str | Table] = [f"{imported.configuration.source} as {imported.scheme}"]
    parts += summary_lines(planned.plan, cluster_sentence(planned), named) + certainty_lines(planned.plan, planned.cluster)
    parts += [] if imported.fits else ["this does not fit the memory of a device: the figures are those without a limit"]
    parts += [stages_table(planned.plan)] if planned.plan.stages else []
    if imported.free is not None:
        best = scheme_of(imported.free.plan, analysis).called
        row = rival_of("configuration", planned.plan, named.called, fits=imported.fits)
        parts.append(comparison_table(imported.free.plan, best, [row]))
    parts.append("\n" + (f"saved to {saved}" if saved else "not saved: give -o FILE to keep the plan"))
    show(parts)


def _imported_json(imported: Imported) -> dict[str, Any]:
    plan = imported.planned.plan
    best = None if imported.free is None else imported.free.plan.predicted
    return {
        "source": imported.configuration.source, "lost": list(imported.configuration.lost), "scheme": imported.scheme,
        "fits": imported.fits, "step": plan.predicted.step, "memory": plan.predicted.memory,
        "best": None if best is None else {"step": best.step, "memory": best.memory},
        "plan": plan.model_dump(mode="json", by_alias=True),
    }  # fmt: skip


def what_if(args: argparse.Namespace) -> None:
    """Plan again under changed conditions."""
    from ..plan import Plan
    from ..supposing import what_if
    from .options import pair_of, sizes_of
    from .progress import ProgressBar
    from .tables import show

    check_outputs(args, args.output)
    links: dict[str, float | str] = dict(pair_of(text, "--link", "LEVEL=0.5x") for text in args.link)
    pinned: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("scheme", "stages", "micro_batches", "recompute", "zero", "offload", "schedule", "interleave")
        if getattr(args, name) is not None
    }
    pinned |= {"pins": tuple(args.pin)} if args.pin else {}
    pinned |= {"mesh": sizes_of(args.mesh, "--mesh")} if args.mesh else {}
    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        found = what_if(
            Plan.load(args.plan), args.model, memory=args.memory, links=links, devices=args.devices, cluster=args.cluster, batch=args.batch,
            keep=args.keep, trust=args.trust, progress=bar, **pinned,
        )  # fmt: skip
    if args.output:
        found.other.save(args.output)
    if args.json:
        print_json(_what_if_json(found))
    else:
        show([found.summary(), *found.tables()])


def _what_if_json(found: WhatIf) -> dict[str, Any]:
    return {
        "asked": list(found.asked), "summary": found.summary(), "before": found.plan.predicted.model_dump(mode="json"),
        "after": found.other.predicted.model_dump(mode="json"), "plan": found.other.model_dump(mode="json", by_alias=True),
    }  # fmt: skip


def verify(args: argparse.Namespace) -> None:
    """Execute a sharding shard by shard against the whole."""
    if args.nproc is not None and args.nproc < 2:
        raise UsageError(f"--nproc is {args.nproc}; a sharding is verified on 2 ranks or more")
    with contextlib.redirect_stdout(sys.stderr):
        from autopar.runtime.verifying import case_named, styles_case, verify
        from autopar.runtime.verifying.run import verdict_json

        from ..frontends.load import call_function

        if args.tp_plan:
            module, inputs = call_function(args.case)
            given = tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
            case = styles_case(Path(args.tp_plan), args.case, module, given, args.nproc or 2)
        else:
            case = case_named(args.case, args.nproc)
        found = verify(case)
    if args.json:
        print_json(verdict_json(found))
    else:
        mesh = " x ".join(map(str, found.mesh))
        print(printable(f"{found.name} on {mesh} ranks: {found.checked} operators on DTensors and {found.gradients} gradients compared"))
        print(printable("\n".join(f"  {line}" for line in (*(one.sentence for one in found.findings), *found.notes))), end="\n")
    if not found.ok:
        raise RunError(f"the sharding does not compute what the whole does: {found.findings[0].sentence}")
