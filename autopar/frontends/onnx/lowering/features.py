"""Classical features: columns, thresholds, counted n-grams and ensembles of decision trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import reduce

import numpy as np

from autopar.errors import ModelError, unknown

from .symbols import Symbol, cat, stack, where

Numbers = tuple[float, ...]
Integers = tuple[int, ...]


def array_feature_extractor(*, X: Symbol, Y: Symbol) -> Symbol:
    """The columns that `Y` names."""
    return (X if X.rank > 1 else X.reshape(1, -1)).index_select(-1, Y.reshape(Y.size).to("int64"))


def _grams(pool: Integers, starts: Integers) -> Iterator[tuple[int, Integers]]:
    """The n-grams of the pool with their places in it.

    starts: where the n-grams of 1, 2, ... elements begin.
    """
    place = 0
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(pool)
        for first in range(start, end, i + 1):
            yield place, pool[first : first + i + 1]
            place += 1


def tf_idf(
    *,
    X: Symbol,
    mode: str,
    max_gram_length: int,
    min_gram_length: int,
    max_skip_count: int,
    ngram_counts: Integers,
    ngram_indexes: Integers,
    pool_int64s: Integers,
    weights: Numbers | None = None,
) -> Symbol:
    """Counts of the pool's n-grams, weighted by `mode`.

    Up to `max_skip_count` elements may be skipped between the parts of an n-gram.
    """
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ModelError(unknown("mode", mode, ("TF", "IDF", "TFIDF")))
    rows = X.reshape(-1, X.shape[-1]) if X.rank else X.reshape(1, 1)
    columns = max(ngram_indexes) + 1
    counts = X.constant(np.zeros((1, columns), np.float32)).expand(rows.shape[0], columns)
    grams = list(_grams(pool_int64s, ngram_counts))
    for size in range(min_gram_length, max_gram_length + 1):
        chosen = [(place, gram) for place, gram in grams if len(gram) == size]
        known = np.array([gram for _, gram in chosen], np.int64).reshape(len(chosen), size)
        goals = np.zeros((len(chosen), columns), np.float32)
        goals[range(len(chosen)), [ngram_indexes[place] for place, _ in chosen]] = 1
        # The parts of an n-gram stand `step` elements apart; one element needs no other step.
        for step in range(1, max_skip_count + 2 if size > 1 else 2):
            starts = rows.shape[1] - step * (size - 1)
            if starts <= 0 or not chosen:
                continue
            parts = [
                rows.cut(1, k * step, k * step + starts)
                .unsqueeze(2)
                .equals(rows.constant(known[:, k].astype(rows.dtype)))
                for k in range(size)
            ]
            matches = reduce(Symbol.__and__, parts)
            counts = counts + matches.to("float32").sum(1) @ rows.constant(goals)
    values = counts if mode != "IDF" else (counts > 0).to("float32")
    if weights is not None and mode != "TF":
        values = values * X.constant(np.array(weights, np.float32))
    return values if X.rank == 2 else values.reshape(values.size)


_COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")
"""The modes 0 to 5 of a node: comparisons with its split; mode 6 is membership of its set."""
_MEMBER = 6
_AVERAGE = 0


class Trees:
    """Decision trees in one: the nodes, and the leaves with the nodes on the way to each."""

    def __init__(self, roots: Integers, nodes: Mapping[str, Integers], members: Numbers) -> None:
        self.nodes = nodes
        self.leaves: list[tuple[int, dict[int, bool]]] = []
        """Each leaf, with the answer of every node above it."""
        self.sets: dict[int, Numbers] = {}
        """The sets that the membership nodes test, one after another: each ends with a NaN."""
        self._members = iter(self._split(members))
        for root in roots:
            # A tree of a single leaf has a root whose two branches are that leaf.
            alike = nodes["true_ids"][root] == nodes["false_ids"][root]
            lone = nodes["true_leafs"][root] and nodes["false_leafs"][root] and alike
            self._walk(root, bool(lone), {})

    @staticmethod
    def _split(members: Numbers) -> Iterator[Numbers]:
        current: list[float] = []
        for value in members:
            if math.isnan(value):
                yield tuple(current)
                current = []
            else:
                current.append(value)

    def _walk(self, root: int, lone: bool, above: dict[int, bool]) -> None:
        """Walk a tree; true branches first: membership nodes come in the order of their sets."""
        stack_of = [(root, lone, above)]
        while stack_of:
            index, leaf, answers = stack_of.pop()
            if leaf:
                self.leaves.append((index, answers))
                continue
            if self.nodes["modes"][index] == _MEMBER:
                self.sets[index] = next(self._members)
            for answer in (False, True):
                side = "true" if answer else "false"
                below = self.nodes[f"{side}_ids"][index]
                is_leaf = bool(self.nodes[f"{side}_leafs"][index])
                stack_of.append((below, is_leaf, {**answers, index: answer}))

    def answers(self, X: Symbol, splits: Numbers) -> tuple[Symbol, list[int]]:
        """The answers of inner nodes for every sample, and the nodes in that order."""
        used = sorted({node for _, above in self.leaves for node in above})
        columns = []
        order = []
        for mode in sorted({self.nodes["modes"][node] for node in used}):
            nodes = [node for node in used if self.nodes["modes"][node] == mode]
            values = X.picked(1, [self.nodes["features"][node] for node in nodes])
            if mode == _MEMBER:
                longest = max(len(self.sets[node]) for node in nodes)
                sets = np.full((len(nodes), longest), np.nan)
                for row, node in enumerate(nodes):
                    sets[row, : len(self.sets[node])] = self.sets[node]
                held = values.unsqueeze(2).equals(X.constant(sets.astype(X.dtype)))
                true = held.to("float32").amax(2) > 0
            else:
                bounds = np.array([splits[node] for node in nodes], X.dtype)
                true = values.compared(_COMPARISONS[mode], X.constant(bounds))
            missing = np.array([self.nodes["missing"][node] for node in nodes], np.bool_)
            if missing.any():
                # Missing values are NaN, which no comparison holds for.
                true = true | (values.map("isnan", "bool") & X.constant(missing))
            columns.append(true)
            order += nodes
        return cat([column.to("float32") for column in columns], 1), order

    def reached(self, X: Symbol, splits: Numbers) -> Symbol:
        """Whether every sample reaches every leaf: all nodes above it answer as it wants.

        The number of right answers is a product of matrices (Hummingbird, OSDI 2020).
        """
        if not any(above for _, above in self.leaves):
            return X.constant(np.ones((1, len(self.leaves)), np.bool_)).expand(
                X.shape[0], len(self.leaves)
            )
        answers, order = self.answers(X, splits)
        wanted = np.zeros((len(order), len(self.leaves)), np.float32)
        against = np.zeros(len(self.leaves), np.float32)
        place = {node: row for row, node in enumerate(order)}
        for column, (_, above) in enumerate(self.leaves):
            for node, answer in above.items():
                wanted[place[node], column] = 1 if answer else -1
                against[column] += 0 if answer else 1
        needed = np.array([len(above) for _, above in self.leaves], np.float32)
        right = answers @ answers.constant(wanted)
        return right.equals(right.constant(needed - against))


def tree_ensemble(
    *,
    X: Symbol,
    nodes_splits: Numbers,
    nodes_featureids: Integers,
    nodes_modes: Integers,
    nodes_truenodeids: Integers,
    nodes_falsenodeids: Integers,
    nodes_trueleafs: Integers,
    nodes_falseleafs: Integers,
    leaf_targetids: Integers,
    leaf_weights: Numbers,
    tree_roots: Integers,
    n_targets: int,
    aggregate_function: int = 1,
    post_transform: int = 0,
    nodes_missing_value_tracks_true: Integers | None = None,
    membership_values: Numbers | None = None,
    nodes_hitrates: Numbers | None = None,
) -> Symbol:
    """The trees' results by sample and target; zero for a target without a leaf."""
    if post_transform:
        raise ModelError(
            f"the post_transform {post_transform} of a TreeEnsemble is not supported: only 0, none"
        )
    nodes = {
        "features": nodes_featureids,
        "modes": nodes_modes,
        "true_ids": nodes_truenodeids,
        "false_ids": nodes_falsenodeids,
        "true_leafs": nodes_trueleafs,
        "false_leafs": nodes_falseleafs,
        "missing": nodes_missing_value_tracks_true or (0,) * len(nodes_modes),
    }
    trees = Trees(tree_roots, nodes, membership_values or ())
    reached = trees.reached(X, nodes_splits)
    weights = np.zeros((len(trees.leaves), n_targets), X.dtype)
    for row, (leaf, _) in enumerate(trees.leaves):
        weights[row, leaf_targetids[leaf]] = leaf_weights[leaf]
    if aggregate_function in (_AVERAGE, 1):
        y = reached.to(X.dtype) @ X.constant(weights)
        return y / len(tree_roots) if aggregate_function == _AVERAGE else y
    worst = math.inf if aggregate_function == 2 else -math.inf
    name = "amin" if aggregate_function == 2 else "amax"
    columns = []
    for target in range(n_targets):
        rows = [i for i, (leaf, _) in enumerate(trees.leaves) if leaf_targetids[leaf] == target]
        if not rows:
            columns.append(X.select(1, 0) * 0.0)
            continue
        known = X.constant(weights[rows, target])
        values = where(reached.picked(1, rows), known, worst)
        columns.append(values.reduced(f"{name}.default", (1,)))
    # A sample of a target without a leaf has zero.
    y = stack(columns, 1)
    return y.masked_fill(y.equals(worst), 0.0)


FUNCTIONS: Mapping[str, Callable[..., Symbol]] = {
    "TfIdfVectorizer": tf_idf,
    "ai.onnx.ml.ArrayFeatureExtractor": array_feature_extractor,
    "ai.onnx.ml.Binarizer": lambda *, X, threshold=0.0: (threshold < X).to(X.dtype),
    "ai.onnx.ml.TreeEnsemble": tree_ensemble,
}
