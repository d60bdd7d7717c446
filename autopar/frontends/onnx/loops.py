"""`Loop` and `Scan` of a known number of rounds, written out round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from onnx import GraphProto, NodeProto, TensorProto

from .bounds import nodes_within
from .values import Val
from .writer import Importer, Writer

ROUNDS = 1024
"""Rounds of one loop at most."""
WRITTEN = 200_000  # nodes of all rounds of one loop at most


class Walker(Importer, Protocol):
    """An importer that walks subgraphs, too."""

    def add_initializers(self, graph: GraphProto) -> None: ...
    def walk(self, nodes: list[NodeProto]) -> None: ...


class Rounds:
    """The rounds of one node: its body, and the values that it hands on."""

    def __init__(self, walker: Walker, node: NodeProto) -> None:
        self.walker = walker
        self.w = Writer(walker, node)
        self.body: GraphProto = self.w.given["body"]
        walker.add_initializers(self.body)
        self.own = [item.name for item in self.body.input]
        self.own += [name for inner in self.body.node for name in inner.output]

    def require(self, count: int) -> None:
        """Refuse what would be too much to write out."""
        nodes = count * sum(1 for _ in nodes_within(self.body.node))
        if count > ROUNDS or nodes > WRITTEN:
            most = f"at most {ROUNDS}, of {WRITTEN} operators together, are written out"
            raise self.w.refuse(f"has {count} rounds: {most}")

    def run(self, given: list[Val | list[Val]]) -> list[Val | list[Val]]:
        """The results of one round; its own names mean outside what they meant before."""
        if len(given) != len(self.body.input):
            raise self.w.refuse(f"gives {len(given)} values to a body of {len(self.body.input)}")
        env = self.walker.env
        outside = {name: env.pop(name) for name in self.own if name in env}
        env.update(zip((item.name for item in self.body.input), given, strict=True))
        self.walker.walk(list(self.body.node))
        results = [self.result(item.name) for item in self.body.output]
        for name in self.own:
            env.pop(name, None)
        env.update(outside)
        return results

    def result(self, name: str) -> Val | list[Val]:
        """A value that the body returns."""
        if name not in self.walker.env:
            raise self.w.refuse(f"returns {name!r}, which its body does not make")
        return self.walker.env[name]

    def give(self, place: int, value: Val | list[Val]) -> None:
        """Let a value be an output of the node."""
        if self.w.wanted(place):
            if isinstance(value, list):
                self.walker.env[self.w.node.output[place]] = value
            else:
                self.w.last("Identity", self.w.hold(value), place=place)

    def stack(self, place: int, values: list[Val | list[Val]], axis: int) -> None:
        """Let the values of all rounds, along a new dim, be an output of the node."""
        if not values:
            raise self.w.refuse("has no round, and a scan of none has no shape")
        lifted = [self.w("Unsqueeze", self.w.hold(v), self.w.constant([axis])) for v in values]
        self.w.last("Concat", *lifted, place=place, axis=axis)


def loop(walker: Walker, node: NodeProto) -> None:
    """`Loop`: the number of rounds, and whether there is another one, must be known."""
    rounds = Rounds(walker, node)
    w = rounds.w
    limit, going = (w.known(w.input(place)) for place in (0, 1))
    if (w.input(0) and limit is None) or (w.input(1) and going is None):
        raise w.refuse("runs as often as values of the model's inputs say: give them by --value")
    count = ROUNDS + 1 if limit is None else int(limit.reshape(()))
    goes_on = going is None or bool(going.reshape(()))
    carried = [walker.env[name] for name in node.input[2:]]
    scanned: list[list[Val | list[Val]]] = [[] for _ in node.output[len(carried) :]]
    done = 0
    if limit is not None and goes_on and not w.input(1):
        rounds.require(count)
    while done < count and goes_on:
        rounds.require(done + 1)
        number = walker.value(node, w.constant(done))
        flag = walker.value(node, w.constant(True, TensorProto.BOOL))
        condition, *results = rounds.run([number, flag, *carried])
        carried = results[: len(carried)]
        for values, value in zip(scanned, results[len(carried) :], strict=False):
            values.append(value)
        done += 1
        known = condition.known() if isinstance(condition, Val) else None
        if known is None:
            raise w.refuse("goes on as values of the model's inputs say")
        goes_on = bool(known.reshape(()))
    for place, value in enumerate(carried):
        rounds.give(place, value)
    for place, values in enumerate(scanned, len(carried)):
        if w.wanted(place):
            rounds.stack(place, values, 0)


def scan(walker: Walker, node: NodeProto) -> None:
    """`Scan`: as many rounds as its inputs have places along their axes."""
    rounds = Rounds(walker, node)
    w = rounds.w
    if not node.input[0]:
        raise w.refuse("scans each sequence of a batch, as in opset 8: convert it to opset 9")
    count = w.attribute("num_scan_inputs", 1)
    states = len(node.input) - count
    names = list(node.input[states:])
    made = len(rounds.body.output) - states

    def listed(name: str, size: int) -> list[int]:
        return list(w.attribute(name, [])) or [0] * size

    axes, turns = (listed(f"scan_input_{name}", count) for name in ("axes", "directions"))
    length = w.shape(names[0])[axes[0]]
    rounds.require(length)
    carried = [walker.env[name] for name in node.input[:states]]
    scanned: list[list[Val | list[Val]]] = [[] for _ in range(made)]
    for done in range(length):
        parts = []
        for name, axis, turned in zip(names, axes, turns, strict=True):
            place = length - 1 - done if turned else done
            part = w("Gather", name, w.constant(place), axis=axis)
            parts.append(walker.value(node, part))
        results = rounds.run([*carried, *parts])
        carried = results[:states]
        for values, value in zip(scanned, results[states:], strict=True):
            values.append(value)
    for place, value in enumerate(carried):
        rounds.give(place, value)
    axes, turns = (listed(f"scan_output_{name}", made) for name in ("axes", "directions"))
    for place, (values, axis, turned) in enumerate(zip(scanned, axes, turns, strict=True), states):
        first = values[0] if values else None
        rank = len(first.shape) if isinstance(first, Val) else 0
        rounds.stack(place, values[::-1] if turned else values, axis % (rank + 1))


LOOPS: Mapping[str, Callable[[Walker, NodeProto], None]] = {"Loop": loop, "Scan": scan}
