"""The page of the documents on conversions: a table of cells, reasons, and what files leave out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from .cells import Cell

NAMES = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "mamba2": "Mamba-2",
    "bert": "BERT",
    "t5": "T5",
    "vit": "ViT",
    "swin": "Swin",
    "clip": "CLIP",
}
HEAD = """# Plans as other projects' configurations

`autopar convert PLAN --to TARGET` writes a plan as the configuration of another project, and
`autopar plan --target TARGET` searches within what that project can say ([how to](how-to.md)).
Models of transformers, with small layers, are planned here for each target on four H100, all of
which are used, and what becomes of each file is looked at:

- **runs**: torch, or transformers, runs the file on four local ranks (Gloo), with the outputs and
  gradients of one device to 1e-4 of the largest;
- **same**: the file is read back, and is the same plan;
- **named**: the file is read back as another plan, and what it leaves out is told (below);
- refused: the target cannot say any such plan, with the [reason](#refused-or-failing);
- **fails**: the file does not run, or comes back as another plan without a word.

Only what a file says of the split is read: whether Megatron-LM or torchtitan has the model at all
is not looked at.
`benchmarks/converting.py --within --page docs/converting.md` makes this page.

"""
SLOWER = """
## What a target's limits cost

The predicted step of the plan within the target's limits over that of any plan, both as the
target's framework runs them. The models are small, and what the host issues is most of their steps:
a large model loses other shares.

"""
REFUSED = """
## Refused or failing

"""
LOST = """
## What files leave out

Each file tells on top what it does not say. In the files of this page:

"""
NOTHING = "Nothing.\n"


def page(cells: Sequence[Cell]) -> str:
    """The text of the page."""
    reasons = _by_sentence((cell, (cell.why,)) for cell in cells if cell.why)
    lost = _by_sentence((cell, cell.lost) for cell in cells)
    outcomes = _table(cells, _outcome)
    slower = _table(cells, _slower)
    return f"{HEAD}{outcomes}{SLOWER}{slower}{REFUSED}{reasons or NOTHING}{LOST}{lost or NOTHING}"


def _table(cells: Sequence[Cell], shown: Callable[[Cell], str]) -> str:
    """A row for each model, a column for each target."""
    targets = list(dict.fromkeys(cell.target for cell in cells))
    rows = [["", *(f"`{target}`" for target in targets)], ["---"] * (len(targets) + 1)]
    for model in dict.fromkeys(cell.model for cell in cells):
        row = {cell.target: shown(cell) for cell in cells if cell.model == model}
        rows.append([NAMES.get(model, model), *(row.get(target, "") for target in targets)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _outcome(cell: Cell) -> str:
    words = "**fails**" if cell.outcome == "fails" else cell.outcome
    return f"{words}: {cell.mesh}" if cell.mesh else words


def _slower(cell: Cell) -> str:
    return f"{cell.slower:+.0%}".replace("+0%", "0").replace("-0%", "0") if cell.mesh else ""


def _by_sentence(cells: Iterable[tuple[Cell, Iterable[str]]]) -> str:
    """A list of sentences by target, each with the models whose file or refusal has it."""
    models: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, sentences in cells:
        for sentence in sentences:
            models[cell.target, sentence].append(NAMES.get(cell.model, cell.model))
    return "".join(
        f"- `{target}`: {sentence} ({', '.join(names)})\n"
        for (target, sentence), names in sorted(models.items(), key=lambda one: one[0][0])
    )
