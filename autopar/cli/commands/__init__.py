"""The commands, one a file: parsed arguments come in, printed answers and files go out."""

from autopar.cli.command import Command

from . import (
    bench,
    cache,
    calibrate,
    checkpoint,
    cluster,
    compare,
    completion,
    convert,
    discover,
    doctor,
    explain,
    import_configuration,
    models,
    plan,
    report,
    run,
    train,
    verify,
    what_if,
)

COMMANDS: tuple[Command, ...] = (
    plan.COMMAND,
    run.COMMAND,
    train.COMMAND,
    compare.COMMAND,
    explain.COMMAND,
    report.COMMAND,
    convert.COMMAND,
    import_configuration.COMMAND,
    what_if.COMMAND,
    verify.COMMAND,
    discover.COMMAND,
    calibrate.COMMAND,
    doctor.COMMAND,
    bench.COMMAND,
    checkpoint.COMMAND,
    completion.COMMAND,
    cluster.COMMAND,
    cache.COMMAND,
    models.COMMAND,
)
"""All commands in the order of the help text."""

__all__ = ["COMMANDS", "Command"]
